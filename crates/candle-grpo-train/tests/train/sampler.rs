//! Tests sampled completions.

use std::sync::{Arc, Mutex};

use crate::common::{
    END, actor_config, max_difference, model, model_with_experts, model_with_states, parameters,
    parameters_of, parameters_on, prompts, sampler, sampling, tokenizer,
};
use candle_core::{DType, Device, IndexOp, Tensor};
use candle_grpo_kernels::KeyValuePages;
use candle_grpo_loss::PolicyLoss;
use candle_grpo_nn::{Decoder, DecoderConfig, Lora, LoraConfig, ModelType, Parameters};
use candle_grpo_test_support::{
    CudaCalls, assert_close, cases, cuda_peak_bytes, device, devices, noise_tensor, stay_on_cpu,
    with_failing_allocations, with_failing_calls,
};
use candle_grpo_train::learn::rollout_log_probs;
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::{LocalGenerator, PolicyWeights};
use candle_grpo_train::{
    Actor, ActorConfig, ComputeDType, FinishReason, Generator, Progress, Prompt, Rollout, Sampler,
    SamplingConfig, TokenBatch, cuda_memory,
};
use proptest::prelude::*;
use rstest::rstest;

/// Log-probs under the policy, which the local generator always computes.
fn policy_log_probs(rollout: &Rollout) -> &[f32] {
    rollout.completion.log_probs.as_ref().unwrap()
}

fn all(prompts: &[Prompt]) -> Vec<&Prompt> {
    prompts.iter().collect()
}

/// Tokens and log-probs of completions.
type Drawn = Vec<(Vec<u32>, Vec<f32>)>;

/// Calls of a generator with recorded steps, on an emulated GPU.
struct RecordedCalls {
    model: DecoderConfig,
    parameters: Parameters,
    prompts: Vec<Prompt>,
}

impl RecordedCalls {
    /// `None` without the emulated GPU.
    fn new() -> Option<Self> {
        if CudaCalls::now().is_none() {
            println!("skipped: no emulated GPU counts the calls");
            return None;
        }
        let pages = KeyValuePages::new(1, 1, 8, DType::F32, device()).unwrap();
        if pages.pages_in_place().is_none() {
            println!("skipped: recorded steps stay only on a GPU that maps memory");
            return None;
        }
        let model = DecoderConfig {
            max_position_embeddings: 128,
            ..model()
        };
        Some(Self {
            parameters: parameters_of(&model, device()),
            model,
            prompts: prompts(&["abc", "d", "eeeee"]),
        })
    }

    fn sampler(&self) -> Sampler {
        let generator = LocalGenerator::new(&self.model, &self.parameters).unwrap();
        let generator = generator.with_recorded_steps(true);
        let config = SamplingConfig {
            max_new_tokens: 70,
            stop_token_ids: Vec::new(),
            ..sampling()
        };
        Sampler::from_generator(Arc::new(generator), self.model.vocab_size, config).unwrap()
    }

    /// The completions of a call, and the number of recordings in it.
    fn call(&self, sampler: &Sampler) -> anyhow::Result<(Drawn, u64)> {
        let before = CudaCalls::now().unwrap();
        let rollouts = sampler.sample(&all(&self.prompts), 4, 0)?;
        let calls = CudaCalls::now().unwrap() - before;
        let completions = rollouts.into_iter().map(|rollout| {
            let log_probs = policy_log_probs(&rollout).to_vec();
            (rollout.completion.tokens, log_probs)
        });
        Ok((completions.collect(), calls.recordings))
    }
}

/// Bytes of the GPU that are free once its work is done.
fn free_memory() -> usize {
    device().synchronize().unwrap();
    cuda_memory(device()).unwrap().free
}

#[test]
fn calls_of_a_generator_share_recorded_steps() {
    let Some(calls) = RecordedCalls::new() else {
        return;
    };
    let sampler = calls.sampler();
    let free = free_memory();
    cuda_peak_bytes();
    let (first, recordings) = calls.call(&sampler).unwrap();
    assert!(recordings > 1, "{recordings}");
    // Inputs of the recorded steps remain, and no keys and values.
    let kept = free - free_memory();
    let total = cuda_memory(device()).unwrap().total;
    let sampled = cuda_peak_bytes().unwrap() as usize - (total - free);
    assert!(
        kept < 16 << 10 && 8 * kept < sampled,
        "{kept} of {sampled} bytes"
    );
    let (second, recordings) = calls.call(&sampler).unwrap();
    assert!(second == first && recordings == 0, "{recordings}");
    assert_eq!(free - free_memory(), kept);
    // An optimizer changes the weights in place.
    for (_, weight) in calls.parameters.iter() {
        let other = (weight.as_tensor() * 1.5).unwrap().detach();
        weight.set(&other).unwrap();
    }
    let (third, recordings) = calls.call(&sampler).unwrap();
    let (expected, _) = calls.call(&calls.sampler()).unwrap();
    assert!(third == expected && recordings == 0, "{recordings}");
    assert!(third != first);
    drop(sampler);
    assert!(free_memory() >= free);
}

/// Once, because the pool has the memory, and again, because nothing has.
#[rstest]
fn a_recording_without_memory_is_no_error(#[values(1, 2, 5)] failures: u64) {
    let Some(calls) = RecordedCalls::new() else {
        return;
    };
    let tokens = |drawn: &Drawn| {
        drawn
            .iter()
            .map(|(tokens, _)| tokens.clone())
            .collect::<Vec<_>>()
    };
    for before in [0, 3] {
        let sampler = calls.sampler();
        let (first, _) = calls.call(&sampler).unwrap();
        let call = || calls.call(&sampler);
        let failing = with_failing_calls(c"cuGraphLaunch", before, failures, call);
        let (found, failed) = failing.unwrap();
        // Each size is tried twice.
        assert!((1..=failures).contains(&failed));
        assert!(tokens(&found.unwrap().0) == tokens(&first));
    }
}

#[test]
fn a_call_that_fails_leaves_nothing_to_the_next_one() {
    let Some(calls) = RecordedCalls::new() else {
        return;
    };
    let sampler = calls.sampler();
    let free = free_memory();
    let (first, recordings) = calls.call(&sampler).unwrap();
    assert!(free_memory() < free);
    let failing = with_failing_allocations(9, 10_000, || calls.call(&sampler));
    let error = failing.unwrap().0.unwrap_err();
    assert!(format!("{error:#}").contains("OUT_OF_MEMORY"), "{error:#}");
    assert_eq!(free_memory(), free);
    let (second, again) = calls.call(&sampler).unwrap();
    assert!(second == first && again == recordings, "{again}");
}

#[test]
fn completions_end_at_a_stop_token_or_at_the_greatest_length() {
    let prompts = prompts(&["abc", "d", "eeeee"]);
    let rollouts = sampler(sampling()).sample(&all(&prompts), 40, 0).unwrap();
    assert_eq!(rollouts.len(), 120);
    let mut seen = [false; 2];
    for (i, rollout) in rollouts.iter().enumerate() {
        assert_eq!(
            (rollout.prompt_index, rollout.sample_index),
            (i as u64 / 40, i % 40)
        );
        assert_eq!(rollout.prompt_tokens, prompts[i / 40].tokens);
        let tokens = &rollout.completion.tokens;
        assert_eq!(tokens.len(), policy_log_probs(rollout).len());
        assert_eq!(
            rollout.completion.drawn_log_probs,
            policy_log_probs(rollout)
        );
        let (last, before) = tokens.split_last().unwrap();
        assert!(!before.contains(&END));
        match rollout.completion.finish_reason {
            FinishReason::StopToken => assert_eq!(*last, END),
            FinishReason::Length => assert!(tokens.len() == 8 && *last != END),
            FinishReason::StopString => panic!("there are no stop strings"),
        }
        seen[usize::from(rollout.completion.finish_reason == FinishReason::StopToken)] = true;
    }
    assert_eq!(seen, [true; 2], "both ends should occur");
}

/// Compares the first tokens and, for each of them, the second tokens with the decoder's
/// probabilities.
#[test]
fn frequencies_are_the_probabilities_of_the_policy() {
    // Each draw of an emulated GPU takes a millisecond.
    let draws = if device().is_cpu() { 20_000 } else { 2_000 };
    /// Chi-square's 99.9 % quantile with 5 degrees of freedom.
    const CRITICAL: f64 = 20.52;
    let temperature = 1.3;
    let config = SamplingConfig {
        temperature,
        max_new_tokens: 2,
        ..sampling()
    };
    let prompts = prompts(&["cab"]);
    let rollouts = sampler(config).sample(&all(&prompts), draws, 0).unwrap();

    let decoder = Decoder::new(&model(), parameters().detached_var_builder()).unwrap();
    let probabilities = |tokens: &[u32]| -> Vec<f64> {
        let ids = Tensor::new(tokens, device()).unwrap().unsqueeze(0).unwrap();
        let hidden = decoder
            .padded_hidden_states(&ids, &ids.ones_like().unwrap())
            .unwrap();
        let last = hidden.i((.., tokens.len() - 1)).unwrap();
        let logits = decoder
            .logits(&last)
            .unwrap()
            .i(0)
            .unwrap()
            .to_vec1::<f32>()
            .unwrap();
        let weights: Vec<f64> = logits
            .iter()
            .map(|&x| (f64::from(x) / temperature).exp())
            .collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|w| w / total).collect()
    };
    let check = |tokens: &[u32], drawn: &mut dyn Iterator<Item = u32>| {
        let mut counts = [0f64; 6];
        drawn.for_each(|token| counts[token as usize] += 1.);
        let n: f64 = counts.iter().sum();
        let p = probabilities(tokens);
        let chi_square: f64 = p
            .iter()
            .zip(counts)
            .map(|(p, c)| (c - n * p).powi(2) / (n * p))
            .sum();
        assert!(
            chi_square < CRITICAL,
            "after {tokens:?}: {counts:?}, expected {p:?} of {n}"
        );
    };
    let prompt = &prompts[0].tokens;
    check(prompt, &mut rollouts.iter().map(|r| r.completion.tokens[0]));
    for first in 1..6 {
        let mut after = rollouts
            .iter()
            .filter(|r| r.completion.tokens[0] == first)
            .map(|r| r.completion.tokens[1]);
        check(&[prompt.as_slice(), &[first]].concat(), &mut after);
    }
}

#[test]
fn a_completion_does_not_depend_on_the_other_prompts_of_the_batch() {
    stay_on_cpu();
    let prompts = prompts(&["abc", "d", "eeeee", "abc"]);
    let sampler = sampler(sampling());
    let together = sampler.sample(&all(&prompts), 6, 5).unwrap();
    for (i, prompt) in prompts.iter().enumerate() {
        // Fewer samples than before as well.
        let alone = sampler.sample(&[prompt], 4, 5).unwrap();
        for (a, b) in alone.iter().zip(&together[6 * i..]) {
            assert_eq!(a.completion.tokens, b.completion.tokens);
            assert_eq!(policy_log_probs(a), policy_log_probs(b));
        }
    }
    let (first, last) = (&together[..6], &together[18..]);
    let tokens = |rollouts: &[candle_grpo_train::Rollout]| -> Vec<Vec<u32>> {
        rollouts
            .iter()
            .map(|r| r.completion.tokens.clone())
            .collect()
    };
    assert_ne!(
        tokens(first),
        tokens(last),
        "equal prompts of other index are other draws"
    );
}

#[test]
fn a_prompt_that_occurs_again_goes_on_drawing() {
    let prompts = prompts(&["abc", "d"]);
    let (a, b) = (&prompts[0], &prompts[1]);
    let sampler = sampler(sampling());
    let twice = sampler.sample(&[a, b, a], 4, 5).unwrap();
    let eight = sampler.sample(&[a], 8, 5).unwrap();
    for (x, y) in twice[..4].iter().chain(&twice[8..]).zip(&eight) {
        assert_eq!(x.completion.tokens, y.completion.tokens);
        assert_eq!(x.sample_index, y.sample_index);
    }
    assert_ne!(eight[..4], eight[4..]);
    assert_eq!(twice[4].sample_index, 0);
}

#[test]
fn a_token_of_a_batch_keeps_its_budget_of_driver_calls() {
    let prompts = prompts(&["abc", "d"]);
    // With the filters, which are on the device too.
    let sample = |max_new_tokens| {
        let config = SamplingConfig {
            max_new_tokens,
            stop_token_ids: Vec::new(),
            top_k: 5,
            top_p: 0.9,
            ..sampling()
        };
        let before = CudaCalls::now();
        sampler(config).sample(&all(&prompts), 4, 0).unwrap();
        Some(CudaCalls::now()? - before?)
    };
    let (Some(three), Some(four)) = (sample(3), sample(4)) else {
        println!("skipped: no emulated GPU counts the calls");
        return;
    };
    let token = four - three;
    println!("one token: {token:?}");
    let layers = model().num_hidden_layers as u64;
    assert!(token.launches <= 5 * layers + 5, "{token:?}");
    assert!(token.products <= 5 * layers + 1, "{token:?}");
    assert!(token.copies_to_device <= 3, "{token:?}");
    assert_eq!(token.copies_to_host, 1, "{token:?}");
    assert_eq!((token.events, token.memsets), (0, 0), "{token:?}");
}

/// A recorded step reads the copies at their addresses.
#[test]
fn recorded_steps_have_the_adapters_that_are_merged_later() {
    let (model, parameters) = (model(), parameters_of(&model(), device()));
    let adapters = Lora::init(LoraConfig::all_linear(2, 4.), &model, 3, device()).unwrap();
    let weights = PolicyWeights {
        version: 0,
        model: &model,
        parameters: &parameters,
        adapters: Some(&adapters),
    };
    let merged = || LocalGenerator::merged(&weights, ComputeDType::F32).unwrap();
    let sample = |generator: &Arc<LocalGenerator>| {
        let generator = Arc::clone(generator) as _;
        let sampler = Sampler::from_generator(generator, model.vocab_size, sampling()).unwrap();
        sampler.sample(&all(&prompts(&["abc", "d"])), 4, 0).unwrap()
    };
    let recorded = Arc::new(merged().with_recorded_steps(true));
    let mut earlier = sample(&recorded);
    for seed in 0..2 {
        for (_, matrix) in adapters.parameters().iter() {
            let noise = noise_tensor(matrix.shape(), seed, DType::F32, device()).unwrap();
            matrix.set(&(noise * 0.5).unwrap()).unwrap();
        }
        assert_eq!(sample(&recorded), earlier);
        recorded.weights_changed(&weights, &NoProgress).unwrap();
        let now = sample(&recorded);
        assert_ne!(now, earlier);
        assert_eq!(now, sample(&Arc::new(merged())));
        earlier = now;
    }
}

#[test]
fn the_same_seed_gives_the_same_bits_and_another_seed_or_stream_others() {
    let prompts = prompts(&["abc", "d"]);
    let draw = |seed, stream| {
        let config = SamplingConfig { seed, ..sampling() };
        sampler(config).sample(&all(&prompts), 8, stream).unwrap()
    };
    assert_eq!(draw(1, 2), draw(1, 2));
    assert_ne!(draw(1, 2), draw(2, 2));
    assert_ne!(draw(1, 2), draw(1, 3));
}

#[rstest]
#[case::all_tokens(sampling())]
#[case::filtered(SamplingConfig { top_k: 4, top_p: 0.9, min_p: 0.05, temperature: 1.3, ..sampling() })]
#[case::greedy(SamplingConfig { greedy: true, ..sampling() })]
fn the_gpu_draws_the_completions_of_the_cpu(#[case] config: SamplingConfig) {
    let Some(gpu) = devices().find(|device| device.is_cuda()) else {
        println!("skipped: no GPU");
        return;
    };
    let prompts = prompts(&["abc", "d", "eeeee"]);
    let draw = |device| {
        let sampler = Sampler::new(&model(), &parameters_on(device), config.clone()).unwrap();
        sampler.sample(&all(&prompts), 16, 3).unwrap()
    };
    let [on_cpu, on_gpu] = [&Device::Cpu, gpu].map(draw);
    assert_eq!(on_cpu.len(), on_gpu.len());
    for (cpu, gpu) in on_cpu.iter().zip(&on_gpu) {
        assert_eq!(cpu.completion.tokens, gpu.completion.tokens);
        assert_eq!(cpu.completion.finish_reason, gpu.completion.finish_reason);
        let wide = |rollout| -> Vec<f64> {
            policy_log_probs(rollout)
                .iter()
                .map(|&x| x.into())
                .collect()
        };
        assert_close(&wide(gpu), &wide(cpu), 1e-5);
    }
}

/// Logits without a cap, with a cap, and divided.
#[rstest]
fn log_probs_are_those_that_the_actor_computes(
    #[values(1., 0.6, 1.7)] temperature: f64,
    #[values(ModelType::Llama, ModelType::Gemma2, ModelType::Granite)] model_type: ModelType,
) {
    let mut model = DecoderConfig {
        model_type,
        ..model()
    };
    match model_type {
        ModelType::Gemma2 => model.final_logit_softcapping = Some(1.5),
        ModelType::Granite => model.logits_scaling = 2.5,
        _ => {}
    }
    let parameters = parameters_of(&model, device());
    let decoder = Decoder::new(&model, parameters.detached_var_builder()).unwrap();
    let config = ActorConfig {
        temperature,
        ..actor_config(PolicyLoss::grpo())
    };
    let actor = Actor::new(model, parameters, config).unwrap();
    let config = SamplingConfig {
        temperature,
        ..sampling()
    };
    let prompts = prompts(&["abc", "d", "eeeee"]);
    let rollouts = actor
        .sampler(config)
        .unwrap()
        .sample(&all(&prompts), 16, 0)
        .unwrap();
    let batch = TokenBatch::from_rollouts(&rollouts, device()).unwrap();
    let mask = batch
        .response_mask()
        .to_dtype(candle_core::DType::F32)
        .unwrap();
    let recorded = rollout_log_probs(&rollouts, device()).unwrap();
    let computed = (actor.log_probs(&batch).unwrap() * &mask).unwrap();
    let difference = max_difference(&recorded, &computed);
    // On the CPU, training and decoding sum in one order. They compute the tanh of a cap in two
    // ways.
    let exact = device().is_cpu() && model_type != ModelType::Gemma2;
    let tolerance = if exact { 0.0 } else { 2e-5 };
    assert!(difference <= tolerance, "{difference}");

    let padded = crate::common::padded(&batch);
    let hidden = decoder
        .padded_hidden_states(&padded.input_ids, &padded.attention_mask)
        .unwrap();
    let (_, t) = batch.dims();
    let states = hidden.narrow(1, hidden.dim(1).unwrap() - t, t).unwrap();
    let logits = (decoder.logits(&states).unwrap() / temperature).unwrap();
    let probs = candle_nn::ops::softmax(&logits, 2).unwrap();
    let expected = (probs.sqr().unwrap().sum(2).unwrap() * &mask).unwrap();
    let computed = (actor.sum_of_squared_probs(&batch).unwrap() * mask).unwrap();
    let difference = max_difference(&expected, &computed);
    assert!(difference < 2e-5, "{difference}");
}

#[test]
fn greedy_takes_the_likeliest_token_each_time() {
    let config = SamplingConfig {
        greedy: true,
        ..sampling()
    };
    let prompts = prompts(&["abc", "d"]);
    let rollouts = sampler(config).sample(&all(&prompts), 2, 0).unwrap();
    assert_eq!(rollouts[0].completion.tokens, rollouts[1].completion.tokens);
    // Of six tokens the likeliest has at least a sixth.
    for rollout in &rollouts {
        assert!(rollout.completion.drawn_log_probs.iter().all(|&l| l == 0.));
        assert!(
            policy_log_probs(rollout)
                .iter()
                .all(|&l| l >= (1f32 / 6.).ln())
        );
    }
}

#[rstest]
#[case(0.)]
#[case(-1.)]
#[case(f64::NAN)]
#[case(f64::INFINITY)]
#[case(1e-300)]
#[case(1e300)]
fn a_temperature_that_no_logits_can_be_divided_by_is_an_error(#[case] temperature: f64) {
    let config = SamplingConfig {
        temperature,
        ..sampling()
    };
    let error = Sampler::new(&model(), &parameters(), config)
        .err()
        .unwrap()
        .to_string();
    assert_eq!(
        error,
        format!(
            "temperature: {temperature:?}, must be from 1e-6 to 1e6 (evaluations have greedy for the most likely token)"
        )
    );
}

#[test]
fn bad_requests_are_errors_that_say_what_to_change() {
    let good = prompts(&["abc"]);
    let mut empty = good[0].clone();
    empty.tokens.clear();
    let mut long = good[0].clone();
    long.tokens = vec![1; 17];
    let sampler = sampler(sampling());
    let error = |prompts: &[&Prompt], n| sampler.sample(prompts, n, 0).unwrap_err().to_string();
    assert_eq!(error(&[], 1), "prompts: none, there must be at least one");
    assert_eq!(
        error(&[&good[0]], 0),
        "num_generations: 0, must be at least 1"
    );
    assert_eq!(
        error(&[&empty], 1),
        "prompt 0: no tokens, must have at least one"
    );
    assert_eq!(
        error(&[&good[0], &long], 1),
        "prompt 0: 17 tokens and max_new_tokens 8 make more than the 24 positions of the model"
    );
    let config = SamplingConfig {
        max_new_tokens: 0,
        ..sampling()
    };
    let error = Sampler::new(&model(), &parameters(), config)
        .err()
        .unwrap()
        .to_string();
    assert_eq!(error, "max_new_tokens: 0, must be at least 1");
    let mut strange = good[0].clone();
    strange.tokens = vec![1, 6];
    let error = sampler.sample(&[&strange], 1, 0).unwrap_err().to_string();
    assert_eq!(
        error,
        "prompt 0: token 1 is 6, must be below the 6 of the model"
    );
    let config = SamplingConfig {
        stop_strings: vec!["x".to_owned()],
        ..sampling()
    };
    let deaf = crate::common::sampler(config);
    let error = deaf.sample(&[&good[0]], 1, 0).unwrap_err().to_string();
    assert!(
        error.starts_with("stop_strings: the sampler cannot decode text"),
        "{error}"
    );
}

#[rstest]
#[case(|c: &mut SamplingConfig| c.top_p = 0., "top_p: 0, must be above 0 and at most 1")]
#[case(|c: &mut SamplingConfig| c.top_p = 1.01, "top_p: 1.01, ")]
#[case(|c: &mut SamplingConfig| c.top_p = f64::NAN, "top_p: NaN, ")]
#[case(|c: &mut SamplingConfig| c.min_p = -0.1, "min_p: -0.1, must be from 0 to 1")]
#[case(|c: &mut SamplingConfig| c.min_p = 1.1, "min_p: 1.1, ")]
#[case(|c: &mut SamplingConfig| c.max_batch_size = 0, "max_batch_size: 0, must be at least 1")]
#[case(|c: &mut SamplingConfig| c.max_cache_mib = Some(0), "max_cache_mib: 0, must be at least 1")]
#[case(|c: &mut SamplingConfig| c.stop_strings = vec!["a".to_owned(), String::new()], "stop_strings[1]: \"\", must have at least one character")]
fn settings_out_of_range_are_named(#[case] spoil: fn(&mut SamplingConfig), #[case] words: &str) {
    let mut config = sampling();
    spoil(&mut config);
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with(words), "{error}");
}

fn bits(log_probs: &[f32]) -> Vec<u32> {
    log_probs.iter().map(|x| x.to_bits()).collect()
}

/// Bits in all parts of a rollout.
fn said(rollout: &Rollout) -> (Vec<u32>, Vec<u32>, Vec<u32>, FinishReason) {
    (
        rollout.completion.tokens.clone(),
        bits(policy_log_probs(rollout)),
        bits(&rollout.completion.drawn_log_probs),
        rollout.completion.finish_reason,
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(12, 128)))]

    /// Batches with any prompts in any order, of any size, on any number of threads.
    #[test]
    fn only_seed_prompt_and_number_decide_a_completion(
        texts in proptest::collection::vec("[a-e]{1,14}", 1..7),
        order in any::<u64>(),
        num_generations in 1usize..5,
        max_batch_size in 1usize..20,
        threads in 1usize..4,
        top_p in prop_oneof![Just(1.0), Just(0.8)],
        seed in any::<u64>(),
    ) {
        stay_on_cpu();
        let prompts = prompts(&texts.iter().map(String::as_str).collect::<Vec<_>>());
        let mut shuffled = all(&prompts);
        shuffled.sort_by_key(|p| (p.index + 1).wrapping_mul(order | 1));
        let config = SamplingConfig { max_batch_size, top_p, seed, ..sampling() };
        let sampler = sampler(config);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let together = pool.install(|| sampler.sample(&shuffled, num_generations, 3)).unwrap();
        for (prompt, rollouts) in shuffled.iter().zip(together.chunks_exact(num_generations)) {
            let alone = sampler.sample(&[prompt], num_generations, 3).unwrap();
            for (alone, rollout) in alone.iter().zip(rollouts) {
                prop_assert_eq!(rollout.prompt_index, prompt.index);
                prop_assert_eq!(said(alone), said(rollout));
            }
        }
    }
}

/// Counts sampled tokens in each step.
#[derive(Default)]
struct Steps(Mutex<Vec<(usize, usize)>>);

impl Progress for Steps {
    fn advance(&self, ended: usize, sampled: usize) {
        self.0.lock().unwrap().push((ended, sampled));
    }
}

fn long_model() -> DecoderConfig {
    DecoderConfig {
        head_dim: Some(16),
        max_position_embeddings: 128,
        ..model()
    }
}

fn long_model_with_experts() -> DecoderConfig {
    DecoderConfig {
        head_dim: Some(16),
        max_position_embeddings: 128,
        ..model_with_experts()
    }
}

fn long_model_with_states() -> DecoderConfig {
    DecoderConfig {
        head_dim: long_model().head_dim,
        max_position_embeddings: long_model().max_position_embeddings,
        ..model_with_states()
    }
}

/// The cache has room for about half of the completions at their full length, and more of them
/// start.
#[rstest]
#[case::dense(long_model())]
#[case::experts(long_model_with_experts())]
#[case::states(long_model_with_states())]
fn a_small_cache_suspends_completions_and_changes_none(#[case] model: DecoderConfig) {
    stay_on_cpu();
    let parameters = parameters_of(&model, &Device::Cpu);
    let prompts = prompts(&["abc", "d", "eeeee", "abcdeabcdeabcdeabcde"]);
    let config = SamplingConfig {
        max_new_tokens: 96,
        stop_token_ids: Vec::new(),
        ..sampling()
    };
    let sampled = |max_cache_mib| {
        let config = SamplingConfig {
            max_cache_mib,
            ..config.clone()
        };
        let steps = Arc::new(Steps::default());
        let sampler = Sampler::new(&model, &parameters, config).unwrap();
        let sampler = sampler
            .with_progress(Arc::<Steps>::clone(&steps))
            .with_experts(true);
        let rollouts = sampler.sample(&all(&prompts), 12, 0).unwrap();
        let steps = std::mem::take(&mut *steps.0.lock().unwrap());
        (rollouts, steps)
    };
    let (free, steps) = sampled(None);
    assert!(steps.iter().all(|&(_, sampled)| sampled == 48));
    let (limited, steps) = sampled(Some(1));
    // Before any completion has ended, fewer are sampled than before.
    let before_end = steps.iter().take_while(|(ended, _)| *ended == 0);
    let sampled: Vec<usize> = before_end.map(|&(_, sampled)| sampled).collect();
    let most = *sampled.iter().max().unwrap();
    assert!(most < 48 && sampled.last().unwrap() + 3 < most, "{steps:?}");
    for (free, limited) in free.iter().zip(&limited) {
        assert_eq!(said(free), said(limited));
        assert_eq!(free.completion.experts, limited.completion.experts);
        assert_eq!(free.completion.tokens.len(), 96);
    }
}

/// A suspended completion is longer than a pass.
#[test]
fn long_completions_are_continued() {
    stay_on_cpu();
    let model = DecoderConfig {
        max_position_embeddings: 1024,
        ..long_model()
    };
    let parameters = parameters_of(&model, &Device::Cpu);
    let prompts = prompts(&["abc"]);
    let sampled = |max_cache_mib| {
        let config = SamplingConfig {
            max_new_tokens: 900,
            stop_token_ids: Vec::new(),
            max_cache_mib,
            ..sampling()
        };
        let sampler = Sampler::new(&model, &parameters, config).unwrap();
        sampler.sample(&all(&prompts), 3, 0).unwrap()
    };
    // The cache has room for 2,048 positions.
    for (free, limited) in sampled(None).iter().zip(&sampled(Some(1))) {
        assert_eq!(said(free), said(limited));
    }
}

#[test]
fn a_completion_that_does_not_fit_alone_is_named() {
    let model = DecoderConfig {
        head_dim: Some(128),
        num_key_value_heads: 4,
        max_position_embeddings: 512,
        ..model()
    };
    let config = SamplingConfig {
        max_new_tokens: 256,
        stop_token_ids: Vec::new(),
        max_cache_mib: Some(1),
        ..sampling()
    };
    let sampler = Sampler::new(&model, &parameters_of(&model, device()), config).unwrap();
    let error = sampler
        .sample(&all(&prompts(&["abc", "d"])), 2, 0)
        .unwrap_err();
    // A page with 16 positions takes 128 KiB, and the prompt has its own. The rest has 112
    // positions, so the token after 113 others has no room.
    assert_eq!(
        error.root_cause().to_string(),
        "max_cache_mib: 1, must have room for the keys and values of a prompt with 3 tokens and a completion with 114"
    );
}

#[test]
fn truncation_leaves_the_log_probs_of_the_policy_and_says_its_own() {
    let config = SamplingConfig {
        top_k: 3,
        temperature: 1.4,
        ..sampling()
    };
    let prompts = prompts(&["abc", "de"]);
    let rollouts = sampler(config).sample(&all(&prompts), 200, 0).unwrap();
    for drawn_for_prompt in rollouts.chunks_exact(200) {
        // Of the first token, whose distribution is that of the prompt.
        let mut drawn: Vec<(u32, f32, f32)> = drawn_for_prompt
            .iter()
            .map(|r| {
                (
                    r.completion.tokens[0],
                    policy_log_probs(r)[0],
                    r.completion.drawn_log_probs[0],
                )
            })
            .collect();
        drawn.sort_by_key(|d| d.0);
        drawn.dedup();
        assert_eq!(drawn.len(), 3, "{drawn:?}");
        let mass = |of: fn(&(u32, f32, f32)) -> f32| drawn.iter().map(|d| of(d).exp()).sum::<f32>();
        assert!((mass(|d| d.2) - 1.).abs() < 1e-5);
        let left = mass(|d| d.1);
        assert!(left < 0.999);
        assert!(drawn.iter().all(|d| (d.1 - left.ln() - d.2).abs() < 1e-5));
    }
}

#[test]
fn completions_end_where_their_text_has_a_stop_string() {
    let config = SamplingConfig {
        stop_strings: vec!["ab".to_owned(), "dd".to_owned()],
        ..sampling()
    };
    let tokenizer = tokenizer();
    let text = move |tokens: &[u32]| {
        let text = tokenizer.decode(tokens, true);
        text.map_err(|e| anyhow::anyhow!("{e}"))
    };
    let prompts = prompts(&["abc", "d", "eeeee"]);
    let free = sampler(sampling()).sample(&all(&prompts), 100, 0).unwrap();
    let sampler = sampler(config).with_text_decoder(text.clone());
    let rollouts = sampler.sample(&all(&prompts), 100, 0).unwrap();
    let mut ended = 0;
    for (rollout, free) in rollouts.iter().zip(free) {
        let tokens = &rollout.completion.tokens;
        let has = |tokens: &[u32]| {
            let text = text(tokens).unwrap();
            text.contains("ab") || text.contains("dd")
        };
        assert_eq!(*tokens, free.completion.tokens[..tokens.len()]);
        assert!(!has(&tokens[..tokens.len() - 1]));
        assert_eq!(
            has(tokens),
            rollout.completion.finish_reason == FinishReason::StopString
        );
        if has(tokens) {
            ended += 1;
        } else {
            assert_eq!(tokens.len(), free.completion.tokens.len());
        }
    }
    assert!((20..280).contains(&ended), "{ended}");
}

#[test]
fn a_policy_that_is_not_finite_is_an_error_that_names_the_completion() {
    let mut broken = parameters().frozen_copy().unwrap();
    let norm = broken.get_mut("model.norm.weight").unwrap();
    *norm = (norm.ones_like().unwrap() * f64::NAN).unwrap();
    let broken = candle_grpo_nn::Parameters::from_tensors(&model(), broken, device()).unwrap();
    let sampler = Sampler::new(&model(), &broken, sampling()).unwrap();
    let error = sampler.sample(&all(&prompts(&["abc"])), 2, 0).unwrap_err();
    assert_eq!(
        format!("{error:#}"),
        "completion 0 of prompt 0, token 0: the logit of token 0 (NaN): not finite, no token can be drawn"
    );
}

/// The ends match vLLM's with `skip_special_tokens` false.
#[rstest]
#[case::one_token("<eos>")]
#[case::several_tokens("a<eos>")]
fn a_stop_string_may_be_a_special_token(#[case] stop: &str) {
    let config = SamplingConfig {
        stop_token_ids: Vec::new(),
        stop_strings: vec![stop.to_owned()],
        max_new_tokens: 20,
        ..sampling()
    };
    let tokenizer = tokenizer();
    let sampler = sampler(config).with_tokenizer(&tokenizer);
    let prompts = prompts(&["abc", "d"]);
    let rollouts = sampler.sample(&all(&prompts), 20, 0).unwrap();
    let mut stopped = 0;
    for rollout in &rollouts {
        let text = tokenizer.decode(&rollout.completion.tokens, false).unwrap();
        let end = text.find(stop).map(|at| at + stop.len());
        match rollout.completion.finish_reason {
            FinishReason::StopString => {
                assert_eq!(end, Some(text.len()), "{text}");
                stopped += 1;
            }
            FinishReason::Length => assert_eq!(end, None, "{text}"),
            FinishReason::StopToken => panic!("there are no stop tokens"),
        }
    }
    assert!(stopped > 0, "no completion has {stop}");
}

//! GRPO in a custom loop around a transformer: a model and a tokenizer from a Hugging Face folder,
//! completions with a cache, two updates for each batch of samples, micro-batches, a KL term to a
//! frozen reference, a checkpoint. `own-loop` is the smallest loop.
//!
//! `task.rs` has the task. The reward is a closure over texts.
//!
//! Arguments, all optional: the seed, the model folder, the checkpoint folder, the number of steps.
//! A checkpoint is a model folder. Without weights, a model folder starts with random ones.

mod task;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::DType;
use candle_grpo_core::{GroupAdvantage, MetricValues, Scale};
use candle_grpo_kernels::{Draw, DrawOptions, draw_tokens};
use candle_grpo_loss::{
    Clip, KlLoss, LogProbOptions, PaddedTokens, PolicyBatch, PolicyLoss, StepTotals, Surrogate,
    TokenLogProbs, default_device, linear_log_prob,
};
use candle_grpo_nn::{
    AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, PagedCache, Parameters, atomic_file,
};
use candle_nn::VarBuilder;
use rand::{Rng, SeedableRng, rngs::StdRng};
use tokenizers::Tokenizer;

const PROMPTS: usize = 24; // per step
const GROUP_SIZE: usize = 12; // completions per prompt
const MAX_TOKENS: usize = 3; // per completion
const EPOCHS: usize = 2; // updates with the samples of a step
const MICRO_BATCH: usize = 96; // sequences per backward pass

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let arg = |i, default| args.get(i).map_or(default, String::as_str);
    let seed: u64 = arg(1, "1").parse().context("the seed")?;
    let folder = Path::new(arg(2, "examples/transformer-loop/model"));
    let out = Path::new(arg(3, "target/transformer-loop"));
    let steps: usize = arg(4, "100").parse().context("the number of steps")?;

    // The first GPU in a build with the feature `cuda`, otherwise the CPU.
    let device = default_device()?;
    let file = |name: &str| fs::read(folder.join(name)).with_context(|| name.to_owned());
    let config = DecoderConfig::from_hugging_face(&file("config.json")?)?;
    let tokenizer = Tokenizer::from_bytes(file("tokenizer.json")?).map_err(anyhow::Error::msg)?;
    let end = tokenizer.token_to_id("<end>").context("no token <end>")?;
    let parameters = if folder.join("model.safetensors").exists() {
        Parameters::load_folder(&config, folder, &device)?
    } else {
        Parameters::init(&config, seed, &device)?
    };

    // Three decoders: one with gradients; one without, which shares its weights; a frozen copy.
    let policy = Decoder::new(&config, parameters.var_builder())?;
    let sampler = Decoder::new(&config, parameters.detached_var_builder())?;
    let copy = VarBuilder::from_tensors(parameters.frozen_copy()?, DType::F32, &device);
    let reference = Decoder::new(&config, copy)?;

    let policy_loss = PolicyLoss {
        surrogate: Surrogate::Clip(Clip::asymmetric(0.2, 0.28)), // ratios from 0.8 to 1.28
        kl: Some(KlLoss::k3(0.001)),
        entropy_coef: 0.01, // keeps rare answers in play until they are rewarded
        ..PolicyLoss::dapo()
    };
    let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters)?;
    optimizer.set_learning_rate(2e-3);
    let reward = |completion: &str, answer: &str| match completion.strip_prefix(answer) {
        Some("") => 1.0,
        Some(_) => 0.5, // the answer, but then more
        None => 0.0f32,
    };

    let mut rng = StdRng::seed_from_u64(seed);
    let mut mean = 0.0;
    for step in 1..=steps {
        // 1. Completions: G of each prompt, one prompt after the other.
        let questions: Vec<_> = (0..PROMPTS).map(|_| task::question(&mut rng)).collect();
        let prompts: Vec<Vec<u32>> = (questions.iter())
            .map(|(text, _)| Ok(tokenizer.encode(text.as_str(), false)?.get_ids().to_vec()))
            .collect::<tokenizers::Result<_>>()
            .map_err(anyhow::Error::msg)?;
        let mut completions = sample(&sampler, &prompts, &mut rng)?;
        for completion in &mut completions {
            let stop = completion.iter().position(|&token| token == end);
            completion.truncate(stop.map_or(MAX_TOKENS, |at| at + 1));
        }

        // 2. Rewards and advantages.
        let mut rewards = Vec::new();
        for (i, tokens) in completions.iter().enumerate() {
            let text = tokenizer.decode(tokens, true).map_err(anyhow::Error::msg)?;
            rewards.push(reward(&text, &questions[i / GROUP_SIZE].1));
        }
        let advantages = GroupAdvantage::grpo().compute(&rewards, GROUP_SIZE, Scale::Group)?; // [B]

        // 3. Log-probs before the update, of the policy and of the reference.
        let pairs: Vec<(&[u32], &[u32])> = (completions.iter().enumerate())
            .map(|(i, tokens)| (&prompts[i / GROUP_SIZE][..], &tokens[..]))
            .collect();
        let tokens = PaddedTokens::new(&pairs, &device)?;
        let old_log_probs = log_probs(&sampler, &tokens)?.log_probs;
        let ref_log_probs = log_probs(&reference, &tokens)?.log_probs;

        // 4. Updates. The totals are those of the whole batch, so that micro-batches add up.
        let totals = StepTotals::count(&tokens.response_mask)?;
        let mut metrics = MetricValues::default();
        for _ in 0..EPOCHS {
            let mut gradients = Gradients::new();
            for start in (0..pairs.len()).step_by(MICRO_BATCH) {
                let rows = MICRO_BATCH.min(pairs.len() - start);
                let tokens = tokens.narrow(start, rows)?;
                let now = log_probs(&policy, &tokens)?;
                let advantages = advantages.narrow(0, start, rows)?;
                let batch = PolicyBatch::new(&now.log_probs, &advantages, &tokens.response_mask)
                    .old_log_probs(&old_log_probs.narrow(0, start, rows)?)
                    .ref_log_probs(&ref_log_probs.narrow(0, start, rows)?)
                    .entropy(&now.entropy);
                let output = policy_loss.compute(&batch, &totals)?;
                // An error names the variables that the loss does not reach.
                gradients.accumulate(&output.loss, &parameters)?;
                metrics.merge(&output.metrics.to_host()?)?; // one transfer
            }
            gradients.clip_by_global_norm(1.0)?;
            optimizer.step(&parameters, &gradients)?;
        }

        let now = rewards.iter().sum::<f32>() / rewards.len() as f32;
        mean += (now - mean) / 10.min(step) as f32; // of the last steps
        if step % 10 == 0 {
            let [clipped, kl] = ["clip_fraction", "kl"].map(|name| metrics.get(name).unwrap_or(0.));
            println!("step {step:3}: reward {mean:.2}, clip fraction {clipped:.3}, KL {kl:.3}");
        }
    }

    // 5. A checkpoint: a Hugging Face folder, and the state of the optimizer.
    fs::create_dir_all(out)?;
    for name in ["config.json", "tokenizer.json"] {
        atomic_file::write(&out.join(name), &file(name)?)?;
    }
    parameters.save(&out.join("model.safetensors"))?;
    optimizer.save_state(&out.join("optimizer.safetensors"))?;
    println!("after:    reward {mean:.2}, checkpoint {}", out.display());
    ensure!(
        steps < 100 || mean > 0.6,
        "the policy did not learn the task"
    );
    Ok(())
}

/// Samples [`GROUP_SIZE`] completions of each prompt, of [`MAX_TOKENS`] tokens, at temperature 1.
fn sample(decoder: &Decoder, prompts: &[Vec<u32>], rng: &mut StdRng) -> Result<Vec<Vec<u32>>> {
    let device = decoder.output_weight().device();
    let mut cache = PagedCache::new(decoder.config(), DType::F32, device)?;
    let ids: Vec<_> = prompts.iter().map(|_| cache.add()).collect();
    let new: Vec<_> = (ids.iter().zip(prompts))
        .map(|(&id, prompt)| (id, &prompt[..]))
        .collect();
    let mut logits = decoder.next_logits(&new, &mut cache)?; // [prompts, V]
    let forks = (0..prompts.len() * GROUP_SIZE)
        .map(|i| cache.fork(ids[i / GROUP_SIZE]))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let mut completions = vec![Vec::new(); forks.len()];
    for at in 0..MAX_TOKENS {
        if at > 0 {
            let new: Vec<_> = (forks.iter().zip(&completions))
                .map(|(&id, completion)| (id, &completion[at - 1..]))
                .collect();
            logits = decoder.next_logits(&new, &mut cache)?; // [completions, V]
        }
        let mut draws = Vec::new();
        for i in 0..forks.len() {
            let row = if at == 0 { i / GROUP_SIZE } else { i };
            let uniform = rng.random();
            draws.push(Draw { row, uniform });
        }
        let drawn = draw_tokens(&logits, &draws, &DrawOptions::default())?;
        for (completion, drawn) in completions.iter_mut().zip(drawn) {
            completion.push(drawn.context("the logits are not finite")?.token);
        }
    }
    Ok(completions)
}

/// The log-probs and entropies `[B, T]` of the responses, without storing logits.
fn log_probs(decoder: &Decoder, tokens: &PaddedTokens) -> Result<TokenLogProbs> {
    let hidden = decoder.padded_hidden_states(&tokens.input_ids, &tokens.attention_mask)?;
    let hidden = tokens.predicting(&hidden)?;
    let options = LogProbOptions {
        mask: Some(&tokens.response_mask),
        ..LogProbOptions::default()
    };
    let (weight, targets) = (decoder.output_weight(), &tokens.targets);
    let tokens = linear_log_prob(&hidden, weight, None, targets, 1.0, options)?;
    Ok(tokens)
}

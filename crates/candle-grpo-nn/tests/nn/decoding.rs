//! Decoding with a paged cache: matches whole sequences, and is independent of other sequences.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candle_grpo_collective::Collective;
use candle_grpo_kernels::{KeyValuePages, cuda_memory};
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{
    AdamWConfig, Decoder, DecoderConfig, Decoding, DividedModel, LanguageModel, Lora, LoraConfig,
    PagedCache, SequenceId,
};
use proptest::prelude::*;
use rstest::rstest;
use rstest_reuse::apply;

use candle_grpo_test_support::{CudaCalls, cases, device, message, with_failing_allocations};

use crate::small::{Family, config, each_family, lively, max_difference};

/// On a GPU, the tests in this file use recorded steps.
fn cache(config: &DecoderConfig, dtype: DType) -> Result<PagedCache> {
    Ok(PagedCache::new(config, dtype, device())?.with_recorded_steps())
}

/// The logits after each token, computed without a cache.
fn whole(decoder: &Decoder, tokens: &[u32]) -> Result<Tensor> {
    let ids = Tensor::new(tokens, device())?.unsqueeze(0)?;
    let hidden = decoder.padded_hidden_states(&ids, &ids.ones_like()?)?;
    decoder.logits(&hidden)?.squeeze(0)
}

/// The same with a cache: first `prompt` tokens, then one by one. Later steps use packed weights.
fn cached(decoder: &Decoder, tokens: &[u32], prompt: usize, dtype: DType) -> Result<Tensor> {
    let mut cache = cache(decoder.config(), dtype)?;
    let sequence = cache.add();
    let mut logits = vec![decoder.next_logits(&[(sequence, &tokens[..prompt])], &mut cache)?];
    for (at, token) in tokens.chunks(1).enumerate().skip(prompt) {
        if at == tokens.len() / 2 {
            cache.pack_weights();
        }
        logits.push(decoder.next_logits(&[(sequence, token)], &mut cache)?);
    }
    Tensor::cat(&logits, 0)
}

const TOKENS: [u32; 9] = [3, 1, 4, 1, 5, 9, 2, 6, 12];

/// On the CPU, decoding and training sum in the same order, except for Qwen3.5 states, which
/// training computes in chunks.
#[apply(each_family)]
fn next_logits_are_bit_identical_to_those_of_training(
    family: Family,
    #[values(false, true)] tied: bool,
    #[values(1, 4)] prompt: usize,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    let config = DecoderConfig {
        max_position_embeddings: 40,
        ..family.config(tied)
    };
    if matches!(family, Family::Qwen3_5) || !device().is_cpu() {
        return Ok(());
    }
    let decoder = Decoder::new(
        &config,
        lively(&config)?.detached_var_builder().to_dtype(dtype),
    )?;
    // Longer than a page and a vector.
    let tokens: Vec<u32> = TOKENS.repeat(3);
    let expected = whole(&decoder, &tokens)?;
    let expected = expected.narrow(0, prompt - 1, tokens.len() - prompt + 1)?;
    let actual = cached(&decoder, &tokens, prompt, dtype)?;
    let numbers = |x: &Tensor| bits(&x.to_dtype(DType::F32)?);
    assert_eq!(numbers(&actual)?, numbers(&expected)?);
    Ok(())
}

#[apply(each_family)]
fn next_logits_equal_the_logits_of_whole_sequences(
    family: Family,
    #[values(false, true)] tied: bool,
    #[values(1, 4)] prompt: usize,
    #[values((DType::F32, 1e-4), (DType::F64, 1e-10), (DType::BF16, 0.3))] precision: (DType, f64),
) -> Result<()> {
    let (dtype, tolerance) = precision;
    let config = family.config(tied);
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.detached_var_builder().to_dtype(dtype))?;
    let expected = whole(&decoder, &TOKENS)?;
    let actual = cached(&decoder, &TOKENS, prompt, dtype)?;
    assert_eq!(actual.dtype(), dtype);
    let expected = expected.narrow(0, prompt - 1, TOKENS.len() - prompt + 1)?;
    let difference = max_difference(&actual, &expected)?;
    assert!(difference < tolerance, "{difference}");
    Ok(())
}

#[test]
fn next_logits_apply_the_adapters() -> Result<()> {
    let config = config(true);
    let base = lively(&config)?;
    let lora = Lora::init(LoraConfig::all_linear(3, 6.0), &config, 1, device())?;
    for (name, variable) in lora.parameters().iter() {
        let wave = (variable.as_tensor().ones_like()? * (name.len() as f64 * 0.01))?;
        variable.set(&(variable.as_tensor() + wave)?)?;
    }
    let decoder = Decoder::new(&config, lora.var_builder(&base)?)?;
    let logits = cached(&decoder, &TOKENS, 1, DType::F32)?;
    assert!(!logits.track_op());
    assert!(max_difference(&logits, &whole(&decoder, &TOKENS)?.detach())? < 1e-4);
    let without = Decoder::new(&config, base.detached_var_builder())?;
    assert!(max_difference(&logits, &whole(&without, &TOKENS)?)? > 0.1);
    Ok(())
}

#[test]
fn next_logits_follow_updates_of_the_variables() -> Result<()> {
    let config = config(true);
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
    let before = cached(&decoder, &TOKENS, 3, DType::F32)?;
    for (_, variable) in parameters.iter() {
        variable.set(&(variable.as_tensor() * 1.1)?.detach())?;
    }
    let after = cached(&decoder, &TOKENS, 3, DType::F32)?;
    assert!(max_difference(&before, &after)? > 1e-3);
    assert!(max_difference(&after, &whole(&decoder, &TOKENS)?.narrow(0, 2, 7)?)? < 1e-4);
    Ok(())
}

#[test]
fn packed_weights_are_copies() -> Result<()> {
    if !device().is_cpu() {
        return Ok(());
    }
    let config = config(false);
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
    let mut cache = cache(&config, DType::F32)?;
    cache.pack_weights();
    let step = |cache: &mut PagedCache| {
        let sequence = cache.add();
        decoder.next_logits(&[(sequence, &TOKENS)], cache)
    };
    let before = bits(&step(&mut cache)?)?;
    for (name, variable) in parameters.iter() {
        if variable.rank() == 2 && !name.contains("embed_tokens") {
            variable.set(&variable.zeros_like()?)?;
        }
    }
    assert_eq!(bits(&step(&mut cache)?)?, before);
    Ok(())
}

fn long(family: Family) -> DecoderConfig {
    DecoderConfig {
        max_position_embeddings: 200,
        ..family.config(true)
    }
}

/// A rank whose other half of each weight is a copy of its own.
#[derive(Debug)]
struct Mirror;

impl Collective for Mirror {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        2
    }

    fn all_gather(&self, tensors: &[&Tensor]) -> Result<()> {
        for tensor in tensors {
            let half = tensor.dim(0)? / 2;
            let own = tensor.narrow(0, 0, half)?.force_contiguous()?;
            tensor.slice_set(&own, 0, half)?;
        }
        Ok(())
    }

    fn all_reduce_sum(&self, _: &[&Tensor]) -> Result<()> {
        Ok(())
    }

    fn reduce_scatter_sum(&self, _: &[&Tensor]) -> Result<()> {
        Ok(())
    }

    fn broadcast(&self, _: &[&Tensor], _: usize) -> Result<()> {
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn split(&self, _: usize) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(Self))
    }
}

/// Weights that ranks divide have other addresses each time that they are gathered.
#[test]
fn recorded_steps_end_with_the_gathered_weights() -> Result<()> {
    if device().is_cpu() {
        return Ok(());
    }
    let config = config(true);
    let ranks: Arc<dyn Collective> = Arc::new(Mirror);
    let options = AdamWConfig::default();
    let parameters = options.divide(lively(&config)?, DType::BF16, (&ranks, Sharding::Full))?;
    let decoder = Decoder::new(&config, parameters.detached_var_builder())?;
    let decoder = decoder.gathering(&parameters)?;
    let mut caches = [
        cache(&config, DType::BF16)?,
        PagedCache::new(&config, DType::BF16, device())?,
    ];
    let ids = caches.each_mut().map(PagedCache::add);
    for tokens in [0..4, 4..8] {
        // The memory of the first weights is elsewhere then.
        let elsewhere = (tokens.start > 0).then(|| Tensor::zeros(1 << 16, DType::BF16, device()));
        let held = decoder.divided().map(DividedModel::hold_all).transpose()?;
        for token in tokens {
            let mut results = Vec::new();
            for (cache, &id) in caches.iter_mut().zip(&ids) {
                results.push(decoder.next_logits(&[(id, &[token])], cache)?);
            }
            let difference = max_difference(&results[0], &results[1])?;
            assert!(difference < 1e-6, "{token}: {difference}");
        }
        drop((held, elsewhere.transpose()?));
    }
    Ok(())
}

/// Batches shrink and grow, sequences pass the end of an attention part, and the cache grows after
/// steps were recorded. Together, these families use every part of a step.
#[rstest]
fn recorded_steps_equal_others(
    #[values(
        Family::Llama,
        Family::SmolLm3,
        Family::Gemma3,
        Family::Phi3,
        Family::Qwen3Moe,
        Family::Qwen3_5
    )]
    family: Family,
) -> Result<()> {
    if device().is_cpu() {
        return Ok(());
    }
    let config = DecoderConfig {
        max_position_embeddings: 300,
        ..family.config(true)
    };
    let decoder = Decoder::new(&config, lively(&config)?.detached_var_builder())?;
    let mut caches = [
        cache(&config, DType::F32)?,
        PagedCache::new(&config, DType::F32, device())?,
    ];
    // The first two take no steps. With them the prompts have 120 of 128 pages, so the cache grows
    // after steps are recorded.
    let lengths = [290, 290].into_iter().chain((0..10).map(|i| 3 + 27 * i));
    let prompts: Vec<Vec<u32>> = lengths
        .zip(2..)
        .map(|(length, i)| (0..length).map(|at| (at * i) % 13).collect())
        .collect();
    let all = caches.each_mut().map(|cache| {
        let ids: Vec<SequenceId> = prompts.iter().map(|_| cache.add()).collect();
        let new = ids
            .iter()
            .zip(&prompts)
            .map(|(&id, prompt)| (id, &**prompt));
        let new: Vec<(SequenceId, &[u32])> = new.collect();
        decoder.next_logits(&new, cache).map(|_| ids)
    });
    let all = all.into_iter().collect::<Result<Vec<_>>>()?;
    let batches = [[3; 4], [10; 4], [9; 4], [1; 4], [10; 4], [9; 4]].concat();
    for (step, &batch) in batches.iter().enumerate() {
        let token = [step as u32 % 13];
        let mut results = Vec::new();
        for (cache, ids) in caches.iter_mut().zip(&all) {
            // The last sequences. The longest of these crosses 256 positions.
            let new = ids[12 - batch..].iter().map(|&id| (id, &token[..]));
            results.push(decoder.next_logits(&new.collect::<Vec<_>>(), cache)?);
        }
        let difference = max_difference(&results[0], &results[1])?;
        assert!(difference < 1e-5, "step {step}: {difference}");
    }
    Ok(())
}

/// Completions of two prompts read the pages of their prompt together, while there are enough of
/// them.
#[rstest]
fn steps_of_a_group_equal_those_of_single_sequences(
    #[values((DType::F32, 1e-4), (DType::BF16, 0.3))] precision: (DType, f64),
) -> Result<()> {
    if device().is_cpu() {
        return Ok(());
    }
    let (dtype, tolerance) = precision;
    let config = DecoderConfig {
        head_dim: Some(8),
        max_position_embeddings: 300,
        ..config(true)
    };
    let parameters = lively(&config)?;
    let decoder = Decoder::new(&config, parameters.detached_var_builder().to_dtype(dtype))?;
    let not_recorded = || PagedCache::new(&config, dtype, device());
    let mut caches = [cache(&config, dtype)?, not_recorded()?, not_recorded()?];
    // 15 pages and a part.
    let prompts = [2, 3].map(|i| (0..250).map(|at| (at * i) % 13).collect::<Vec<u32>>());
    let mut forks = Vec::new();
    for cache in &mut caches {
        let [a, b] = [cache.add(), cache.add()];
        decoder.next_logits(&[(a, &prompts[0]), (b, &prompts[1])], cache)?;
        let ids = (0..24).map(|i| cache.fork([a, b][i % 2]));
        forks.push(ids.collect::<Result<Vec<_>>>()?);
    }
    let launches = || {
        let kernel = if dtype == DType::F32 {
            "64_f32"
        } else {
            "64_bf16"
        };
        CudaCalls::launches_of(&format!("shared_paged_attention_{kernel}"))
    };
    let before = launches();
    // A recorded step repeats, and completions end.
    for (step, batch) in [24, 24, 24, 20, 20, 20, 6].into_iter().enumerate() {
        let tokens: Vec<[u32; 1]> = (0..batch).map(|i| [(5 * i + step as u32) % 13]).collect();
        let new = |ids: &[SequenceId]| -> Vec<_> { ids.iter().copied().zip(&tokens).collect() };
        let [recorded, direct] = [0, 1].map(|i| {
            let new = new(&forks[i]);
            let new: Vec<_> = new.iter().map(|(id, token)| (*id, &token[..])).collect();
            decoder.next_logits(&new, &mut caches[i])
        });
        let alone = new(&forks[2])
            .into_iter()
            .map(|(id, token)| decoder.next_logits(&[(id, &token[..])], &mut caches[2]));
        let alone = Tensor::cat(&alone.collect::<Result<Vec<_>>>()?, 0)?;
        let (recorded, direct) = (recorded?, direct?);
        let difference = max_difference(&recorded, &direct)?;
        assert!(difference < 1e-5, "step {step}: {difference}");
        let difference = max_difference(&direct, &alone)?;
        assert!(difference < tolerance, "step {step}: {difference}");
    }
    if let Some((before, now)) = before.zip(launches()) {
        // In each layer, six steps, and two sizes that a recording has run once directly and once
        // to record.
        assert_eq!(now - before, 10 * config.num_hidden_layers as u64);
    }
    Ok(())
}

/// Rows that share the pages of a prompt, and rows that do not, take the same recording, unless the
/// kernels read these pages once.
#[rstest]
#[case::no_kernel(4, 1)]
#[case::kernel(8, 2)]
fn shared_pages_need_recordings_where_they_are_read_once(
    #[case] head_dim: usize,
    #[case] expected: u64,
) -> Result<()> {
    if device().is_cpu() {
        return Ok(());
    }
    let config = DecoderConfig {
        head_dim: Some(head_dim),
        max_position_embeddings: 300,
        num_hidden_layers: 1,
        ..config(true)
    };
    let decoder = Decoder::new(&config, lively(&config)?.detached_var_builder())?;
    let mut cache = cache(&config, DType::F32)?;
    let prompt: Vec<u32> = (0..240).map(|at| at % 13).collect();
    let of_all = cache.add();
    decoder.next_logits(&[(of_all, &prompt)], &mut cache)?;
    let forks = (0..20)
        .map(|_| cache.fork(of_all))
        .collect::<Result<Vec<_>>>()?;
    let others: Vec<_> = (0..20).map(|_| cache.add()).collect();
    for id in &others {
        decoder.next_logits(&[(*id, &prompt)], &mut cache)?;
    }
    let before = CudaCalls::now();
    for token in [[0], [1], [2]] {
        for ids in [&forks, &others] {
            let new: Vec<_> = ids.iter().map(|id| (*id, &token[..])).collect();
            decoder.next_logits(&new, &mut cache)?;
        }
    }
    if let Some((before, now)) = before.zip(CudaCalls::now()) {
        assert_eq!((now - before).recordings, expected);
    }
    Ok(())
}

/// Two mixtures of five experts, with sizes that do not fill the kernels' fragments.
fn mixture(norm_topk_prob: bool) -> DecoderConfig {
    DecoderConfig {
        hidden_size: 36,
        moe_intermediate_size: 21,
        num_experts: 5,
        norm_topk_prob,
        mlp_only_layers: Vec::new(),
        ..Family::Qwen3Moe.config(true)
    }
}

/// Returns the logits and experts after a prompt in each of four sequences, and after more steps.
/// Also returns the calls of the last step.
fn steps_of_mixture(
    decoder: &Decoder,
    mut cache: PagedCache,
) -> Result<(Vec<[Tensor; 2]>, Option<CudaCalls>)> {
    let ids = [cache.add(), cache.add(), cache.add(), cache.add()];
    let prompts: Vec<_> = ids.iter().map(|&id| (id, &TOKENS[..])).collect();
    let mut next = |new: &[(SequenceId, &[u32])]| -> Result<_> {
        let before = CudaCalls::now();
        let (logits, experts) = decoder.next_logits_and_experts(new, &mut cache)?;
        let calls = CudaCalls::now().zip(before);
        let calls = calls.map(|(now, before)| now - before);
        Ok(([logits, experts.expect("a model with experts")], calls))
    };
    let (mut all, mut last) = (vec![next(&prompts)?.0], None);
    for step in 0..6 {
        let tokens = [step, step + 1, 3, 12 - step].map(|token| [token]);
        let new: Vec<_> = ids
            .iter()
            .zip(&tokens)
            .map(|(&id, new)| (id, &new[..]))
            .collect();
        let (results, calls) = next(&new)?;
        all.push(results);
        last = calls;
    }
    Ok((all, last))
}

/// A recorded step overwrites the tensors of the one before, but not its results. A decoder with a
/// graph for training has none in decoding.
#[rstest]
fn recorded_steps_return_the_same_experts(
    #[values(true, false)] norm_topk_prob: bool,
    #[values(true, false)] has_graph: bool,
) -> Result<()> {
    if device().is_cpu() {
        return Ok(());
    }
    let config = mixture(norm_topk_prob);
    let parameters = lively(&config)?;
    let builder = if has_graph {
        parameters.var_builder()
    } else {
        parameters.detached_var_builder()
    };
    let decoder = Decoder::new(&config, builder)?;
    let (recorded, calls) = steps_of_mixture(&decoder, cache(&config, DType::F32)?)?;
    if let Some(calls) = calls {
        assert_eq!((calls.launches, calls.copies_to_host), (0, 0), "{calls:?}");
    }
    let cache = PagedCache::new(&config, DType::F32, device())?;
    let (others, _) = steps_of_mixture(&decoder, cache)?;
    for (step, ([logits, experts], [other, of_other])) in recorded.iter().zip(&others).enumerate() {
        let rows = if step == 0 { 4 * TOKENS.len() } else { 4 };
        assert_eq!(experts.dims(), [rows, 4]);
        assert_eq!(experts.to_vec2::<u32>()?, of_other.to_vec2::<u32>()?);
        let difference = max_difference(logits, other)?;
        assert!(difference < 1e-5, "step {step}: {difference}");
    }
    // If the experts were the same at each step, the comparison would be void.
    assert_ne!(
        recorded[1][1].to_vec2::<u32>()?,
        recorded[6][1].to_vec2::<u32>()?
    );
    Ok(())
}

/// Experts with adapters are computed one after the other. New adapters change nothing.
#[rstest]
fn experts_in_one_launch_equal_those_one_by_one(
    #[values(true, false)] norm_topk_prob: bool,
) -> Result<()> {
    let config = mixture(norm_topk_prob);
    let parameters = lively(&config)?;
    let lora = LoraConfig {
        target_modules: vec!["experts.4.down_proj".to_owned()],
        ..LoraConfig::all_linear(2, 4.0)
    };
    let lora = Lora::init(lora, &config, 1, device())?;
    let run = |builder| {
        let decoder = Decoder::new(&config, builder)?;
        steps_of_mixture(&decoder, PagedCache::new(&config, DType::F32, device())?)
    };
    let (found, calls) = run(parameters.detached_var_builder())?;
    let (expected, others) = run(lora.detached_var_builder(&parameters)?)?;
    if let Some((calls, others)) = calls.zip(others) {
        assert_eq!((calls.copies_to_host, calls.waits), (0, 0), "{calls:?}");
        assert_eq!(others.copies_to_host, 2, "{others:?}");
    }
    for (step, ([logits, experts], [other, of_other])) in found.iter().zip(&expected).enumerate() {
        assert_eq!(experts.to_vec2::<u32>()?, of_other.to_vec2::<u32>()?);
        let difference = max_difference(logits, other)?;
        assert!(difference < 1e-5, "step {step}: {difference}");
    }
    Ok(())
}

/// Without virtual memory management, pages and states move, and steps are recorded again.
#[rstest]
fn recorded_steps_stay_when_the_cache_grows(
    #[values(Family::Qwen3, Family::Qwen3_5)] family: Family,
) -> Result<()> {
    if CudaCalls::now().is_none() {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    }
    let config = long(family);
    let decoder = Decoder::new(&config, lively(&config)?.detached_var_builder())?;
    let run = |grows: bool| -> Result<_> {
        let mut cache = cache(&config, DType::F32)?;
        let ids = [cache.add(), cache.add(), cache.add()];
        let prompts = ids.map(|id| (id, &TOKENS[..]));
        decoder.next_logits(&prompts, &mut cache)?;
        let (mut all, mut before) = (Vec::new(), CudaCalls::now());
        for step in 0..8 {
            if step == 4 {
                before = CudaCalls::now();
                if grows {
                    assert!(cache.reserve(&[(None, 1000); 10])?);
                }
            }
            let token = [step % 13];
            let new = ids.map(|id| (id, &token[..]));
            all.push(bits(&decoder.next_logits(&new, &mut cache)?)?);
        }
        let calls = CudaCalls::now()
            .zip(before)
            .map(|(now, before)| now - before);
        Ok((all, calls.unwrap()))
    };
    let ((with, growing), (without, steady)) = (run(true)?, run(false)?);
    assert_eq!(with, without);
    let pages = KeyValuePages::new(1, 1, 8, DType::F32, device())?;
    let moves = u64::from(pages.pages_in_place().is_none());
    assert_eq!(
        (growing.recordings, steady.recordings),
        (moves, 0),
        "{growing:?}"
    );
    if moves == 0 {
        assert_eq!(growing.copies_on_device, steady.copies_on_device);
        assert_eq!(growing.launches, steady.launches);
        assert!(growing.allocations > steady.allocations, "{growing:?}");
    }
    Ok(())
}

/// Later sequences have what recorded steps need, and nothing of the earlier ones.
#[rstest]
fn an_empty_cache_has_no_limit_and_no_sequences(
    #[values(Family::Llama, Family::Qwen3_5)] family: Family,
) -> Result<()> {
    let config = family.config(true);
    let decoder = Decoder::new(&config, lively(&config)?.detached_var_builder())?;
    let parameters = lively(&config)?;
    for (_, weight) in parameters.iter() {
        weight.set(&(weight.as_tensor() * 1.5)?.detach())?;
    }
    let other = Decoder::new(&config, parameters.detached_var_builder())?;
    let steps = |decoding: &mut dyn Decoding, id| -> Result<_> {
        let logits = (0..4).map(|token| bits(&decoding.next_logits(&[(id, &[token])])?));
        logits.collect::<Result<Vec<_>>>()
    };
    let mut first = decoder.decoding()?;
    first.record_steps();
    first.limit_memory(16 << 20)?;
    let id = first.add();
    let expected = steps(&mut *first, id)?;
    assert!(!first.reserve(&[(None, 500_000)])?);
    let pages = KeyValuePages::new(1, 1, 8, DType::F32, device())?;
    let cache = first.into_empty_cache();
    // Without recorded steps there is nothing to keep.
    assert_eq!(cache.is_some(), pages.pages_in_place().is_some());
    let Some(cache) = cache else {
        return Ok(());
    };
    let mut second = decoder.decoding_with(cache)?;
    assert!(message(second.next_logits(&[(id, &[1])])).contains("not in the cache"));
    assert!(second.reserve(&[(None, 50_000)])?);
    let id = second.add();
    assert_eq!(steps(&mut *second, id)?, expected);
    // The recordings have the weights of the first decoder.
    let mut third = other.decoding_with(second.into_empty_cache().unwrap())?;
    let (id, mut new) = (third.add(), other.decoding()?);
    let of_other = steps(&mut *third, id)?;
    let id = new.add();
    assert!(of_other == steps(&mut *new, id)? && of_other != expected);
    Ok(())
}

/// Each layer has an allocation for keys and one for values. A growth tries each one twice, and is
/// followed by two smaller ones.
#[rstest]
fn a_cache_that_cannot_grow_stays_valid(#[values(0, 1, 2, 3)] before: u64) -> Result<()> {
    let pages = KeyValuePages::new(1, 1, 8, DType::F32, device())?;
    if CudaCalls::now().is_none() || pages.pages_in_place().is_none() {
        println!("skipped: no emulated GPU fails allocations of pages that grow in place");
        return Ok(());
    }
    let config = config(true);
    let decoder = Decoder::new(&config, lively(&config)?.detached_var_builder())?;
    let mut last = Vec::new();
    for fails in [false, true] {
        let mut cache = cache(&config, DType::F32)?;
        let sequence = cache.add();
        decoder.next_logits(&[(sequence, &TOKENS)], &mut cache)?;
        if fails {
            device().synchronize()?;
            let free = cuda_memory(device())?.free;
            let reserve = || cache.reserve(&[(None, 9000)]);
            let (reserved, failed) = with_failing_allocations(before, 100, reserve).unwrap();
            assert!(message(reserved).contains("OUT_OF_MEMORY"));
            assert_eq!((failed, cuda_memory(device())?.free), (6, free));
            assert!(!cache.reserve(&[(None, 9000)])?);
        }
        for token in 0..4 {
            last.push(bits(
                &decoder.next_logits(&[(sequence, &[token])], &mut cache)?,
            )?);
        }
    }
    assert_eq!(last[..4], last[4..]);
    Ok(())
}

fn bits(logits: &Tensor) -> Result<Vec<Vec<u32>>> {
    let rows = logits.to_vec2::<f32>()?;
    Ok(rows
        .into_iter()
        .map(|row| row.into_iter().map(f32::to_bits).collect())
        .collect())
}

/// One sequence's token chunks.
type Chunks = Vec<Vec<u32>>;

fn chunks(most: usize) -> impl Strategy<Value = Chunks> {
    proptest::collection::vec(proptest::collection::vec(0u32..13, 1..25), 1..most)
}

/// The bits of one sequence's last logits when it is decoded alone.
fn alone(decoder: &Decoder, before: &Chunks, after: &Chunks) -> Result<Vec<u32>> {
    let mut cache = cache(decoder.config(), DType::F32)?;
    let sequence = cache.add();
    let mut last = decoder.next_logits(&[(sequence, &before.concat())], &mut cache)?;
    if !after.is_empty() {
        let fork = cache.fork(sequence)?;
        last = decoder.next_logits(&[(fork, &after.concat())], &mut cache)?;
    }
    Ok(bits(&last)?.remove(0))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(10, 100)))]

    /// Sequences advance side by side, in any order and any chunk size.
    #[test]
    fn the_bits_of_logits_depend_only_on_their_sequence(
        sequences in proptest::collection::vec((chunks(4), chunks(4)), 1..6),
        reversed in any::<bool>(),
        family in prop_oneof![Just(Family::Llama), Just(Family::Qwen3_5)],
    ) {
        // On a GPU, products depend on the number of rows.
        if !device().is_cpu() {
            return Ok(());
        }
        let config = long(family);
        let decoder = Decoder::new(&config, lively(&config)?.detached_var_builder())?;
        let mut cache = cache(&config, DType::F32)?;
        let mut ids: Vec<SequenceId> = sequences.iter().map(|_| cache.add()).collect();
        let mut last = vec![Vec::new(); sequences.len()];
        for step in 0..8 {
            let mut new: Vec<(usize, SequenceId, &[u32])> = Vec::new();
            for (i, (before, after)) in sequences.iter().enumerate() {
                if step == before.len() {
                    let prompt = ids[i];
                    ids[i] = cache.fork(prompt)?;
                    cache.remove(prompt)?;
                }
                let all: Vec<&Vec<u32>> = before.iter().chain(after).collect();
                if let Some(chunk) = all.get(step) {
                    new.push((i, ids[i], chunk.as_slice()));
                }
            }
            if reversed {
                new.reverse();
            }
            if !new.is_empty() {
                let pass: Vec<_> = new.iter().map(|&(_, id, chunk)| (id, chunk)).collect();
                let logits = bits(&decoder.next_logits(&pass, &mut cache)?)?;
                for ((i, _, _), logits) in new.into_iter().zip(logits) {
                    last[i] = logits;
                }
            }
        }
        for ((before, after), last) in sequences.iter().zip(last) {
            prop_assert_eq!(alone(&decoder, before, after)?, last);
        }
    }
}

#[test]
fn bad_requests_are_refused_before_the_cache_changes() -> Result<()> {
    let config = config(true);
    let decoder = Decoder::new(&config, lively(&config)?.detached_var_builder())?;
    let mut other_cache = cache(
        &DecoderConfig {
            num_hidden_layers: 3,
            ..config.clone()
        },
        DType::F32,
    )?;
    let other = other_cache.add();
    let mut cache = cache(&config, DType::F32)?;
    let (a, gone) = (cache.add(), cache.add());
    cache.remove(gone)?;
    for (new, words) in [
        (vec![], "new: no sequences"),
        (vec![(a, &[][..])], "new[0]: no tokens"),
        (
            vec![(a, &[1, 13])],
            "new[0]: token 1: 13, must be below vocab_size, which is 13",
        ),
        (
            vec![(a, &[1; 17])],
            "new[0]: 17 tokens make 17 positions, must be at most max_position_embeddings, which is 16",
        ),
        (vec![(a, &[1]), (a, &[2])], "twice, must occur once"),
        (vec![(a, &[1]), (gone, &[2])], "not in the cache"),
    ] {
        let error = message(decoder.next_logits(&new, &mut cache));
        assert!(error.contains(words), "{error}");
    }
    assert_eq!((cache.len(a)?, cache.pages_in_use()), (0, 0));
    let error = message(decoder.next_logits(&[(other, &[1])], &mut other_cache));
    assert!(error.contains("cache: 3 layers, must have 2"), "{error}");
    Ok(())
}

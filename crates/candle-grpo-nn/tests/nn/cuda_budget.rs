//! CUDA driver calls per layer, as counted by the emulated GPU.

use candle_core::{DType, Result};
use candle_grpo_nn::{BaseWeights, Decoder, DecoderConfig, LayerType, PagedCache};
use candle_grpo_test_support::{CudaCalls, device};
use rstest::rstest;

use crate::base_weights::{adapters, wide};
use crate::small::{Family, Kind, lively};

/// The calls of a decoding step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Unrecorded,
    Recorded,
    /// Also returns the experts.
    RecordedWithExperts,
}

/// Returns the calls for one token in each of three sequences, with this number of layers. If the
/// step is recorded, that comes first.
fn decode(kind: impl Into<Kind>, layers: usize, step: Step) -> Result<Option<CudaCalls>> {
    let config = kind.into().config(layers);
    let parameters = lively(&config)?;
    let vb = parameters.detached_var_builder().to_dtype(DType::BF16);
    decode_with(&config, &Decoder::new(&config, vb)?, step)
}

/// Like [`decode`], with adapters on all linear maps, over quantized weights.
fn decode_qlora(layers: usize, step: Step) -> Result<Option<CudaCalls>> {
    let config = wide(Kind::from(Family::Qwen3).config(layers));
    let base = lively(&config)?.frozen_as(&config, BaseWeights::Q4K, DType::BF16)?;
    let (vb, _) = adapters(&config)?.copied_var_builder(&base, DType::BF16)?;
    decode_with(&config, &Decoder::new(&config, vb)?, step)
}

/// Like [`decode`], with adapters on all linear maps, which may be merged into copies.
fn decode_lora(
    is_merged: bool,
    family: Family,
    layers: usize,
    step: Step,
) -> Result<Option<CudaCalls>> {
    let config = Kind::from(family).config(layers);
    let base = lively(&config)?.frozen_as(&config, BaseWeights::Dense, DType::BF16)?;
    let adapters = adapters(&config)?;
    let vb = if is_merged {
        adapters.merged_var_builder(&base, DType::BF16)?.0
    } else {
        adapters.copied_var_builder(&base, DType::BF16)?.0
    };
    decode_with(&config, &Decoder::new(&config, vb)?, step)
}

fn decode_with(config: &DecoderConfig, decoder: &Decoder, step: Step) -> Result<Option<CudaCalls>> {
    let mut cache = PagedCache::new(config, DType::BF16, device())?;
    if step != Step::Unrecorded {
        cache = cache.with_recorded_steps();
    }
    let ids = [cache.add(), cache.add(), cache.add()];
    let prompts = ids.map(|id| (id, &[1u32, 2, 3][..]));
    decoder.next_logits(&prompts, &mut cache)?;
    let new = ids.map(|id| (id, &[4u32][..]));
    let mut run = || match step {
        Step::RecordedWithExperts => decoder.next_logits_and_experts(&new, &mut cache).map(drop),
        _ => decoder.next_logits(&new, &mut cache).map(drop),
    };
    // The second step with a given size is recorded.
    for _ in 0..if step == Step::Unrecorded { 0 } else { 2 } {
        run()?;
    }
    let before = CudaCalls::now();
    run()?;
    Ok(CudaCalls::now()
        .zip(before)
        .map(|(after, before)| after - before))
}

#[rstest]
#[case::without_biases(Family::Qwen3.into(), 5, 5)]
#[case::biases_of_the_attention(Family::Qwen2.into(), 6, 5)]
#[case::biases_of_all_maps(Family::LlamaWithBiases.into(), 9, 5)]
#[case::experts(Family::Qwen3Moe.into(), 8, 4)]
#[case::gated_attention(Kind(Family::Qwen3_5, Some(LayerType::FullAttention)), 6, 5)]
#[case::the_gated_delta_rule(Kind(Family::Qwen3_5, Some(LayerType::LinearAttention)), 8, 6)]
fn a_layer_of_decoding_keeps_its_budget_of_driver_calls(
    #[case] kind: Kind,
    #[case] launches: u64,
    #[case] products: u64,
) -> Result<()> {
    let calls = |layers| decode(kind, layers, Step::Unrecorded);
    let (Some(one), Some(two)) = (calls(1)?, calls(2)?) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let layer = two - one;
    let rest = one - layer;
    println!("one layer: {layer:?}, the rest: {rest:?}");
    // Current counts. Lower them when the code needs fewer.
    assert!(layer.launches <= launches, "{layer:?}");
    assert!(layer.products <= products, "{layer:?}");
    assert_eq!(layer.copies_to_device, 0, "{layer:?}");
    assert!(rest.launches <= 3 && rest.products <= 1, "{rest:?}");
    // One for the tokens with their positions, one for the tables, and one for the states' table.
    // Sampling adds a copy for its random numbers.
    let tables = 1 + u64::from(kind.1 == Some(LayerType::LinearAttention));
    assert!(rest.copies_to_device <= 1 + tables, "{rest:?}");
    for calls in [layer, rest] {
        assert_eq!((calls.copies_to_host, calls.waits), (0, 0), "{calls:?}");
        assert_eq!((calls.events, calls.memsets), (0, 0), "{calls:?}");
    }
    Ok(())
}

/// Two further products and two kernels for each map are gone.
#[rstest]
fn merged_adapters_take_no_driver_calls(
    #[values(Family::Qwen3, Family::Qwen3Moe)] family: Family,
    #[values(Step::Unrecorded, Step::Recorded)] step: Step,
) -> Result<()> {
    let none = decode(family, 2, step)?;
    let merged = decode_lora(true, family, 2, step)?;
    assert_eq!(merged, none);
    let Some((none, apart)) = none.zip(decode_lora(false, family, 2, step)?) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    println!("{none:?}, with adapters {apart:?}");
    if step == Step::Unrecorded {
        let maps = 2 * 7;
        assert!(apart.products >= none.products + 2 * maps, "{apart:?}");
        assert!(apart.launches >= none.launches + 2 * maps, "{apart:?}");
    }
    Ok(())
}

/// A recorded step is one call, however many layers there are. Experts are copied once, to new
/// memory.
#[rstest]
#[case::without_experts(Family::Qwen3.into(), Step::Recorded, 1, 0)]
#[case::experts(Family::Qwen3Moe.into(), Step::Recorded, 1, 0)]
#[case::experts_that_are_returned(Family::Qwen3Moe.into(), Step::RecordedWithExperts, 2, 1)]
#[case::states(
    Kind(Family::Qwen3_5, Some(LayerType::LinearAttention)),
    Step::Recorded,
    1,
    0
)]
fn a_recorded_step_keeps_its_budget_of_driver_calls(
    #[case] kind: Kind,
    #[case] step: Step,
    #[case] allocations: u64,
    #[case] copies_on_device: u64,
) -> Result<()> {
    let Some(step) = decode(kind, 3, step)? else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    println!("{step:?}");
    // The logits, and the copy of tokens, positions and tables.
    assert_eq!((step.launches, step.products), (0, 1));
    assert_eq!((step.copies_to_device, step.copies_to_host), (1, 0));
    assert_eq!(step.allocations, allocations);
    assert_eq!((step.copies_on_device, step.waits), (copies_on_device, 0));
    Ok(())
}

/// The products of quantized weights are four launches: query, key and value share one, and so do
/// gate and up. An adapter has two cuBLAS products and two launches.
#[test]
fn a_layer_of_quantized_weights_keeps_its_budget_of_driver_calls() -> Result<()> {
    let calls = |layers| decode_qlora(layers, Step::Unrecorded);
    let (Some(one), Some(two)) = (calls(1)?, calls(2)?) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let layer = two - one;
    println!("one layer: {layer:?}");
    let adapters = 7;
    assert!(layer.launches <= 9 + 2 * adapters, "{layer:?}");
    assert!(layer.products <= 2 * adapters, "{layer:?}");
    assert_eq!((layer.copies_to_device, layer.waits), (0, 0), "{layer:?}");

    let step = decode_qlora(3, Step::Recorded)?;
    let step = step.ok_or_else(|| candle_core::Error::msg("no emulated GPU"))?;
    assert_eq!((step.launches, step.products), (0, 1), "{step:?}");
    Ok(())
}

/// A fork copies two tensors per layer, and a new sequence zeroes them.
#[test]
fn states_of_a_fork_take_a_copy_each() -> Result<()> {
    let layers = 3;
    let config = Kind(Family::Qwen3_5, Some(LayerType::LinearAttention)).config(layers);
    let mut cache = PagedCache::new(&config, DType::BF16, device())?;
    let vb = lively(&config)?
        .detached_var_builder()
        .to_dtype(DType::BF16);
    let decoder = Decoder::new(&config, vb)?;
    let prompt = cache.add();
    decoder.next_logits(&[(prompt, &[1, 2, 3])], &mut cache)?;
    let before = CudaCalls::now();
    cache.fork(prompt)?;
    let Some((after, before)) = CudaCalls::now().zip(before) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let calls = after - before;
    assert_eq!(calls.copies_on_device, 2 * layers as u64, "{calls:?}");
    assert_eq!((calls.launches, calls.memsets), (0, 0), "{calls:?}");
    Ok(())
}

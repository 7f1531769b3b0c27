//! CUDA driver calls per layer, as counted by the emulated GPU.

use candle_core::{DType, Result};
use candle_grpo_nn::{Decoder, DecoderConfig, PagedCache};
use candle_grpo_test_support::{CudaCalls, device};
use rstest::rstest;

use crate::small::{Family, lively};

/// Returns the calls for one token in each of three sequences, with this number of layers. With
/// `records`, the step is recorded first.
fn decode(family: Family, layers: usize, records: bool) -> Result<Option<CudaCalls>> {
    let config = DecoderConfig {
        num_hidden_layers: layers,
        ..family.config(true)
    };
    let parameters = lively(&config)?;
    let decoder = Decoder::new(
        &config,
        parameters.detached_var_builder().to_dtype(DType::BF16),
    )?;
    let mut cache = PagedCache::new(&config, DType::BF16, device())?;
    if records {
        cache = cache.with_recorded_steps();
    }
    let ids = [cache.add(), cache.add(), cache.add()];
    let prompts = ids.map(|id| (id, &[1u32, 2, 3][..]));
    decoder.next_logits(&prompts, &mut cache)?;
    let new = ids.map(|id| (id, &[4u32][..]));
    // The second step with a given size is recorded.
    for _ in 0..if records { 2 } else { 0 } {
        decoder.next_logits(&new, &mut cache)?;
    }
    let before = CudaCalls::now();
    decoder.next_logits(&new, &mut cache)?;
    Ok(CudaCalls::now()
        .zip(before)
        .map(|(after, before)| after - before))
}

#[rstest]
#[case::without_biases(Family::Qwen3, 5)]
#[case::biases_of_the_attention(Family::Qwen2, 6)]
#[case::biases_of_all_maps(Family::LlamaWithBiases, 9)]
fn a_layer_of_decoding_keeps_its_budget_of_driver_calls(
    #[case] family: Family,
    #[case] launches: u64,
) -> Result<()> {
    let (Some(one), Some(two)) = (decode(family, 1, false)?, decode(family, 2, false)?) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let layer = two - one;
    let rest = one - layer;
    println!("one layer: {layer:?}, the rest: {rest:?}");
    // Current counts. Lower them when the code needs fewer.
    assert!(layer.launches <= launches, "{layer:?}");
    assert!(layer.products <= 5, "{layer:?}");
    assert_eq!(layer.copies_to_device, 0, "{layer:?}");
    assert!(rest.launches <= 3 && rest.products <= 1, "{rest:?}");
    // One for the tokens with their positions, one for the tables. Sampling adds a third copy for
    // its random numbers.
    assert!(rest.copies_to_device <= 2, "{rest:?}");
    for calls in [layer, rest] {
        assert_eq!(calls.copies_to_host, 0, "{calls:?}");
        assert_eq!((calls.events, calls.memsets), (0, 0), "{calls:?}");
    }
    Ok(())
}

/// A recorded step is one call, however many layers there are.
#[test]
fn a_recorded_step_keeps_its_budget_of_driver_calls() -> Result<()> {
    let Some(step) = decode(Family::Qwen3, 3, true)? else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    println!("{step:?}");
    // The logits, and the copy of tokens, positions and tables.
    assert_eq!((step.launches, step.products, step.allocations), (0, 1, 1));
    assert_eq!((step.copies_to_device, step.copies_to_host), (1, 0));
    Ok(())
}

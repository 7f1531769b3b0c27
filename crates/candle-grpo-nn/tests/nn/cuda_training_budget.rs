//! CUDA driver calls per layer in training, as counted by the emulated GPU.

use candle_core::{DType, Result};
use candle_grpo_nn::optim::GradientDType;
use candle_grpo_nn::{
    ActivationCheckpointing, AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, LanguageModel,
    LayerType, PackedTokens,
};
use candle_grpo_test_support::{CudaCalls, cuda_peak_bytes, device};
use rstest::rstest;

use crate::small::{Family, Kind, lively};

/// A micro-batch's calls, and how often it launches the attention forward pass.
type Counts = Option<(CudaCalls, u64)>;

/// Returns the counts for a micro-batch after the first, with this number of layers.
fn micro_batch(kind: Kind, layers: usize, shares_prefixes: bool) -> Result<Counts> {
    let config = kind.config(layers);
    let parameters = lively(&config)?;
    let (vb, _copies) = parameters.copied_var_builder(DType::BF16)?;
    let decoder = Decoder::new(&config, vb)?;
    let sequences = [vec![1, 2, 3, 4], vec![1, 2, 5]];
    let tokens = if shares_prefixes {
        PackedTokens::sharing_prefixes(&sequences, device())?
    } else {
        PackedTokens::new(&sequences, device())?
    };
    let mut gradients = Gradients::new();
    let mut run = || {
        let (hidden, recorded) = decoder.record(&tokens)?;
        recorded.backward(&hidden, &parameters, &mut gradients)
    };
    let counts = || CudaCalls::now().zip(CudaCalls::launches_of("attention_forward_64_bf16"));
    run()?;
    let before = counts();
    run()?;
    Ok(counts()
        .zip(before)
        .map(|((calls, forward), (calls_before, forward_before))| {
            (calls - calls_before, forward - forward_before)
        }))
}

#[rstest]
#[case::whole_sequences(Family::Qwen3.into(), false, 24, 21)]
#[case::shared_prefixes(Family::Qwen3.into(), true, 36, 21)]
#[case::biases_of_the_attention(Family::Qwen2.into(), false, 23, 21)]
#[case::biases_of_all_maps(Family::LlamaWithBiases.into(), false, 30, 21)]
#[case::four_norms_and_geglu(Family::Gemma3.into(), false, 34, 21)]
#[case::gated_attention(Kind(Family::Qwen3_5, Some(LayerType::FullAttention)), false, 26, 21)]
#[case::the_gated_delta_rule(
    Kind(Family::Qwen3_5, Some(LayerType::LinearAttention)),
    false,
    38,
    24
)]
fn a_layer_of_training_keeps_its_budget_of_driver_calls(
    #[case] kind: Kind,
    #[case] shares_prefixes: bool,
    #[case] launches: u64,
    #[case] products: u64,
) -> Result<()> {
    let (Some((one, forward)), Some((two, twice))) = (
        micro_batch(kind, 1, shares_prefixes)?,
        micro_batch(kind, 2, shares_prefixes)?,
    ) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let layer = two - one;
    println!("one layer: {layer:?}, the rest: {:?}", one - layer);
    let passes = u64::from(kind.1 != Some(LayerType::LinearAttention));
    assert_eq!(
        (forward, twice),
        (passes, 2 * passes),
        "forward passes of attention"
    );
    assert!(layer.launches <= launches, "{layer:?}");
    assert!(layer.products <= products, "{layer:?}");
    assert_eq!(layer.copies_to_device, 0, "{layer:?}");
    assert_eq!(layer.copies_to_host, 0, "{layer:?}");
    assert_eq!(layer.memsets, 0, "{layer:?}");
    assert_eq!(layer.events, 0, "{layer:?}");
    Ok(())
}

/// The bytes of a micro-batch's tensors at their peak, and its calls, with all layers recomputed.
/// `None` without the emulation.
fn checkpointed(
    config: &DecoderConfig,
    length: usize,
    offloading: bool,
) -> Result<Option<(u64, CudaCalls)>> {
    let parameters = lively(config)?;
    let (vb, _copies) = parameters.copied_var_builder(DType::BF16)?;
    let decoder = Decoder::new(config, vb)?.with_activation_checkpointing(true)?;
    let decoder = decoder.with_activation_offloading(offloading);
    let tokens = PackedTokens::new(&[vec![1; length]], device())?;
    let mut gradients = Gradients::new();
    let mut run = || {
        let (hidden, recorded) = decoder.record(&tokens)?;
        recorded.backward(&hidden, &parameters, &mut gradients)?;
        device().synchronize()
    };
    run()?;
    cuda_peak_bytes();
    let (used, before) = (cuda_peak_bytes(), CudaCalls::now());
    run()?;
    let calls = CudaCalls::now().zip(before);
    let bytes = cuda_peak_bytes().zip(used);
    let bytes = bytes.map(|(peak, used)| peak - used);
    Ok(bytes.zip(calls.map(|(after, before)| after - before)))
}

#[test]
fn offloaded_inputs_leave_the_gpu_and_nothing_waits_for_them() -> Result<()> {
    let (layers, length) = (8, 256);
    let config = DecoderConfig {
        num_hidden_layers: layers,
        max_position_embeddings: length,
        ..Family::Qwen3.config(true)
    };
    let (Some((kept, calls)), Some((moved, calls_moved))) = (
        checkpointed(&config, length, false)?,
        checkpointed(&config, length, true)?,
    ) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let planned = |offloading| {
        let checkpointing = (ActivationCheckpointing::All(true), offloading);
        config.recorded_bytes((length, length), DType::BF16, checkpointing)
    };
    let (plan, plan_moved) = (planned(false)?, planned(true)?);
    let input = length * config.hidden_size * 2;
    assert_eq!(plan.kept - plan_moved.kept, (layers - 2) * input);
    assert_eq!(plan_moved.main_memory, layers * input);
    assert_eq!(plan.main_memory, 0);
    // An emulated GPU that works late frees memory late.
    let is_lazy = std::env::var("CUDA_ON_HOST_LAZY").is_ok_and(|value| value == "1");
    assert!(is_lazy || (kept - moved) as usize == (layers - 2) * input);

    let more = calls_moved - calls;
    let layers = layers as u64;
    assert_eq!(more.copies_to_host, layers, "{more:?}");
    assert_eq!(more.copies_to_device, layers - 1, "{more:?}");
    assert_eq!(more.allocations, layers - 1, "{more:?}");
    assert_eq!((more.launches, more.waits), (0, 0), "{more:?}");
    Ok(())
}

/// With the sums of gradients in f32, and those in the layers in bf16, in half of the memory.
#[rstest]
fn an_optimizer_step_has_one_launch_for_all_parameters(
    #[values(GradientDType::F32, GradientDType::Bf16)] dtype: GradientDType,
) -> Result<()> {
    let config = Family::Qwen3.config(true);
    let parameters = lively(&config)?;
    let (vb, copies) = parameters.copied_var_builder(DType::BF16)?;
    let decoder = Decoder::new(&config, vb)?;
    let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters)?;
    let tokens = PackedTokens::new(&[vec![1, 2, 3, 4]], device())?;
    let mut gradients = Gradients::with_dtype(dtype);
    let bytes_in_use = || {
        // The second peak starts with what is in use.
        cuda_peak_bytes();
        cuda_peak_bytes()
    };
    let without = bytes_in_use();
    {
        let (hidden, recorded) = decoder.record(&tokens)?;
        recorded.backward(&hidden, &parameters, &mut gradients)?;
    }
    let with = bytes_in_use();
    let before = CudaCalls::now();
    let (_, factor) = gradients.clip_factor(1.0)?;
    optimizer.scaled_step(&parameters, &gradients, factor, &copies)?;
    let Some((after, before)) = CudaCalls::now().zip(before) else {
        println!("skipped: no emulated GPU counts the calls");
        return Ok(());
    };
    let step = after - before;
    println!("an optimizer step: {step:?}");
    // Squares, their sums, and AdamW with the clip factor and the copies.
    assert_eq!(step.launches, 3, "{step:?}");
    assert_eq!(step.copies_to_device, 2, "{step:?}");
    assert_eq!(step.copies_to_host, 1, "{step:?}");
    assert_eq!(step.memsets, 0, "{step:?}");

    let bytes = gradients.iter().map(|(name, gradient)| {
        let is_rounded = name.starts_with("model.layers.") && gradient.dims().len() == 2;
        let is_rounded = is_rounded && dtype == GradientDType::Bf16;
        gradient.elem_count() as u64 * if is_rounded { 2 } else { 4 }
    });
    let taken = with.zip(without).map(|(with, without)| with - without);
    assert_eq!(taken, Some(bytes.sum()));
    Ok(())
}

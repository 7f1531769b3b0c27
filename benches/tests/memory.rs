//! Memory of the operators on the vocabulary and of the models of a run, beyond their arguments.

use std::alloc::System;
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_grpo_bench::{Counting, peak_bytes};
use candle_grpo_kernels::{
    LinearLogProb, LogProbOptions, TokenLogProbs, log_prob, log_prob_gradient,
};
use candle_grpo_loss::PolicyLoss;
use candle_grpo_nn::{AdamWConfig, DecoderConfig, Lora, LoraConfig, Parameters};
use candle_grpo_train::learn::ActorConfig;
use candle_grpo_train::{Actor, ComputeDType, SamplingConfig};
use rstest::rstest;

#[global_allocator]
static ALLOCATOR: Counting<System> = Counting(System);

/// One test at a time, because the allocator counts for the whole process.
static ALONE: Mutex<()> = Mutex::new(());

const MIB: usize = 1 << 20;

fn ones_like(tokens: &TokenLogProbs) -> Result<TokenLogProbs> {
    Ok(TokenLogProbs {
        log_probs: tokens.log_probs.ones_like()?,
        entropy: tokens.entropy.ones_like()?,
        log_sum_exp: tokens.log_sum_exp.ones_like()?,
    })
}

#[rstest]
fn log_prob_takes_its_gradient_or_nothing(
    #[values(DType::F32, DType::BF16)] dtype: DType,
    #[values(false, true)] gradient_into_logits: bool,
) -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (rows, vocab) = (256, 20_000);
    let logits = Tensor::randn(0f32, 1., (rows, vocab), &Device::Cpu)?.to_dtype(dtype)?;
    let targets = Tensor::zeros(rows, DType::U32, &Device::Cpu)?;
    let options = LogProbOptions {
        gradient_into_logits,
        ..Default::default()
    };
    let (gradient, bytes) = peak_bytes(|| {
        let tokens = log_prob(&logits, &targets, 1.0, options)?;
        let derivatives = ones_like(&tokens)?;
        log_prob_gradient(&logits, &targets, 1.0, options, &tokens, &derivatives)
    });
    let logits_bytes = gradient?.elem_count() * dtype.size_in_bytes();
    let allowed = if gradient_into_logits {
        0
    } else {
        logits_bytes
    };
    assert!(
        bytes <= allowed + logits_bytes / 20,
        "{bytes} bytes beside logits of {logits_bytes}"
    );
    Ok(())
}

/// The bound, for any number of rows. Logits would take up to 312 MiB, a copy of the hidden states
/// 20.
#[rstest]
fn linear_log_prob_takes_its_gradients_and_a_few_mib(
    #[values(1, 1000, 20_000)] rows: usize,
    #[values(false, true)] is_masked: bool,
    #[values(false, true)] is_frozen: bool,
    #[values(DType::F32, DType::BF16)] dtype: DType,
) -> Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (vocab, width) = (4096, 256);
    let random = |shape: (usize, usize)| {
        Var::from_tensor(&Tensor::randn(0f32, 1., shape, &Device::Cpu)?.to_dtype(dtype)?)
    };
    let (hidden, weight) = (random((rows, width))?, random((vocab, width))?);
    let weight = if is_frozen {
        weight.as_detached_tensor()
    } else {
        weight.as_tensor().clone()
    };
    let targets = Tensor::zeros(rows, DType::U32, &Device::Cpu)?;
    let kept = (0..rows).map(|row| u8::from(row % 4 != 1));
    let mask = Tensor::from_iter(kept, &Device::Cpu)?;
    let options = LogProbOptions {
        mask: is_masked.then_some(&mask),
        ..Default::default()
    };
    let layer = LinearLogProb::new(&hidden, &weight, None, &targets, 1.0, options)?;
    let (gradients, bytes) = peak_bytes(|| {
        let tokens = layer.forward()?;
        let derivatives = ones_like(&tokens)?;
        layer.backward(&tokens, &derivatives)
    });
    let gradients = gradients?;
    assert_eq!(gradients.weight.is_none(), is_frozen);
    let size = dtype.size_in_bytes();
    let weight_bytes = if is_frozen { 0 } else { vocab * width * size };
    // The gradient of the hidden states is first summed in f32.
    let rounded = if dtype == DType::F32 { 0 } else { size };
    let hidden_bytes = rows * width * (DType::F32.size_in_bytes() + rounded);
    // A few numbers per row: tokens, derivatives, coefficients, indices of unmasked rows.
    let rows_bytes = rows * 256;
    // A tile of logits, packing buffers of products, and for half precision a tile of each argument
    // in f32.
    let tile_bytes = if dtype == DType::F32 { 13 } else { 20 } * MIB;
    let allowed = weight_bytes + hidden_bytes + rows_bytes + tile_bytes;
    assert!(bytes <= allowed, "{bytes} bytes, allowed are {allowed}");
    Ok(())
}

#[test]
fn policy_reference_and_sampler_share_the_weights_under_adapters() -> anyhow::Result<()> {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let model = DecoderConfig {
        vocab_size: 1000,
        hidden_size: 256,
        intermediate_size: 512,
        num_hidden_layers: 8,
        num_attention_heads: 4,
        num_key_value_heads: 4,
        ..DecoderConfig::default()
    };
    let parameters = Parameters::init(&model, 0, &Device::Cpu)?;
    let bytes_in_f32 = 4 * parameters.num_elements();
    let adapters = Lora::init(LoraConfig::all_linear(1, 1.), &model, 0, &Device::Cpu)?;
    let config = ActorConfig {
        policy_loss: PolicyLoss::default(),
        optimizer: AdamWConfig::default(),
        temperature: 1.,
        activation_checkpointing: false,
        compute_dtype: ComputeDType::Bf16,
        router_aux_loss_coef: 0.,
    };
    let (made, bytes) = peak_bytes(|| -> anyhow::Result<_> {
        let actor = Actor::with_adapters(model, parameters, adapters, config)?;
        let reference = actor.reference()?;
        let sampler = actor.sampler(SamplingConfig::default())?;
        Ok((actor, reference, sampler))
    });
    made?;
    // While a weight is converted, it is there twice.
    assert!(
        bytes < bytes_in_f32 / 10,
        "{bytes} bytes, the weights took {bytes_in_f32}"
    );
    Ok(())
}

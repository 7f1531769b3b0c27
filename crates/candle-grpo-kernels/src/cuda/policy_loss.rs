//! The CUDA path of [`policy_loss`](crate::policy_loss()).

use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::CudaSlice;
use candle_core::{Result, Shape, Tensor};

use super::{In, Out, alloc, as_tensor, grid, kernels};
use crate::policy_loss::{Arguments, KlSlope, Parts, PolicySum, RowDivisor, TokenSurrogate};

include!("../../kernels/policy_loss.rs");

/// Threads of a block, as in the kernel.
const THREADS: u32 = 256;
/// The blocks go on to further sequences. So many keep a GPU busy, and the last one adds what they found.
const MAX_BLOCKS: usize = 512;
/// What a block finds: the figures and the loss.
const FIGURES: usize = PolicySum::COUNT + 1;

pub(crate) fn forward(arguments: &Arguments) -> Result<Parts> {
    let device = arguments.log_probs.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (batch, tokens) = arguments.log_probs.dims2()?;
    let (n, options) = (batch * tokens, arguments.options);
    let blocks = batch.clamp(1, MAX_BLOCKS);
    let (score, [score_a, score_b, score_c, score_d]) = score_numbers(options.surrogate);
    let kl_slope = options.kl.map(|kl| slope_numbers(kl.slope));
    let of_tokens = |x: &Tensor| i32::from(x.elem_count() == n);

    let log_probs = arguments.log_probs.storage_and_layout();
    let old_log_probs = arguments
        .old_log_probs
        .as_ref()
        .map(Tensor::storage_and_layout);
    let ref_log_probs = arguments
        .ref_log_probs
        .as_ref()
        .map(Tensor::storage_and_layout);
    let advantages = arguments.advantages.storage_and_layout();
    let weights = arguments.weights.as_ref().map(Tensor::storage_and_layout);
    let entropy = arguments.entropy.as_ref().map(Tensor::storage_and_layout);
    let row_divisors = arguments
        .row_divisors
        .as_ref()
        .map(Tensor::storage_and_layout);
    let mask = arguments.mask.storage_and_layout();

    // SAFETY: the kernel writes all of them, `kl` where there is a term.
    #[allow(unsafe_code)]
    let (
        [mut gradient, mut surrogate, mut policy, mut log_ratios],
        mut kl,
        mut clipped,
        mut parts,
        mut loss,
        mut sums,
    ) = unsafe {
        (
            [
                alloc::<f32>(device, n)?,
                alloc(device, n)?,
                alloc(device, n)?,
                alloc(device, n)?,
            ],
            options.kl.map(|_| alloc::<f32>(device, n)).transpose()?,
            alloc::<u8>(device, n)?,
            alloc::<f64>(device, blocks * FIGURES)?,
            alloc::<f32>(device, 1)?,
            alloc::<f64>(device, PolicySum::COUNT)?,
        )
    };
    let mut finished = device.alloc_zeros::<u32>(1)?;
    // SAFETY: all have batch * tokens elements but the row divisors (batch), advantages and weights (as their flags say), parts
    // (FIGURES for each block), finished and loss (one) and sums; there is a reference where there is a KL term.
    #[allow(unsafe_code)]
    unsafe {
        kernels::policy_loss {
            log_probs: In::of(&log_probs, &stream)?,
            old_log_probs: In::optional(old_log_probs.as_ref(), &stream)?,
            ref_log_probs: In::optional(ref_log_probs.as_ref(), &stream)?,
            advantages: In::of(&advantages, &stream)?,
            weights: In::optional(weights.as_ref(), &stream)?,
            entropy: In::optional(entropy.as_ref(), &stream)?,
            row_divisors: In::optional(row_divisors.as_ref(), &stream)?,
            mask: In::of(&mask, &stream)?,
            gradient: Out::new(&mut gradient, &stream),
            surrogate: Out::new(&mut surrogate, &stream),
            policy: Out::new(&mut policy, &stream),
            kl: kl
                .as_mut()
                .map_or_else(Out::null, |kl| Out::new(kl, &stream)),
            log_ratios: Out::new(&mut log_ratios, &stream),
            clipped: Out::new(&mut clipped, &stream),
            parts: Out::new(&mut parts, &stream),
            finished: Out::new(&mut finished, &stream),
            loss: Out::new(&mut loss, &stream),
            sums: Out::new(&mut sums, &stream),
            batch: batch as u64,
            tokens: tokens as u64,
            advantages_of_tokens: of_tokens(&arguments.advantages),
            weights_of_tokens: arguments.weights.as_ref().map_or(0, of_tokens),
            level: options.level as i32,
            log_ratio_clamp: options.log_ratio_clamp,
            score,
            score_a,
            score_b,
            score_c,
            score_d,
            kl_estimate: options.kl.map_or(0, |kl| kl.estimate as i32),
            kl_slope: kl_slope.map_or(0, |slope| slope.0),
            kl_ratio: options.kl.map_or(0, |kl| kl.ratio as i32),
            kl_coef: options.kl.map_or(0.0, |kl| kl.coef),
            kl_slope_max: kl_slope.map_or(0.0, |slope| slope.1),
            kl_log_ratio_clamp: options.kl.map_or(0.0, |kl| kl.log_ratio_clamp),
            kl_value_clamp: options.kl.map_or(0.0, |kl| kl.value_clamp),
            divide_by_length: i32::from(matches!(options.row_divisor, RowDivisor::Length)),
            denominator: options.denominator,
        }
        .launch(device, grid(blocks, THREADS)?)?;
    }
    let of_tokens = Shape::from((batch, tokens));
    let tensor =
        |x: CudaSlice<f32>| as_tensor(CudaStorage::wrap_cuda_slice(x, device.clone()), &of_tokens);
    Ok(Parts {
        loss: as_tensor(
            CudaStorage::wrap_cuda_slice(loss, device.clone()),
            &Shape::from(()),
        ),
        gradient: tensor(gradient),
        surrogate: tensor(surrogate),
        policy: tensor(policy),
        kl: kl.map(tensor),
        log_ratio: tensor(log_ratios),
        clipped: as_tensor(
            CudaStorage::wrap_cuda_slice(clipped, device.clone()),
            &of_tokens,
        ),
        sums: as_tensor(
            CudaStorage::wrap_cuda_slice(sums, device.clone()),
            &Shape::from(PolicySum::COUNT),
        ),
    })
}

//! The CUDA path of [`policy_loss`](crate::policy_loss).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::{Error, Layout, Result, Shape, Tensor};

use super::{Arguments, Kept, KlNumbers, PolicyStatistic};
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels};

/// Threads per block, and tokens that a block processes, as in the kernels.
const THREADS: u32 = 256;
const TOKENS_OF_BLOCK: usize = 1024;

/// Returns the loss, the statistics and the derivatives.
pub(super) fn forward(
    storage: &CudaStorage,
    layout: &Layout,
    arguments: &Arguments,
) -> Result<(CudaStorage, Kept)> {
    let device = storage.device();
    let stream = device.cuda_stream();
    let (rows, tokens) = (arguments.rows, arguments.tokens);
    let n = rows * tokens;
    let chunks = tokens.div_ceil(TOKENS_OF_BLOCK);
    let blocks = rows * chunks;
    let has_bonus = arguments.numbers.entropy_scale != 0.0;
    // SAFETY: the kernels write every element.
    #[allow(unsafe_code)]
    let (mut of_log_probs, mut of_entropy, mut parts, mut statistics, mut loss) = unsafe {
        (
            alloc::<f32>(device, n)?,
            has_bonus.then(|| alloc::<f32>(device, n)).transpose()?,
            alloc::<f64>(device, blocks * PolicyStatistic::COUNT)?,
            alloc::<f64>(device, PolicyStatistic::COUNT)?,
            alloc::<f32>(device, 1)?,
        )
    };
    let numbers = &arguments.numbers;
    let hold = Tensor::storage_and_layout;
    let (mask, advantages) = (hold(&arguments.mask), hold(&arguments.advantages));
    let old_log_probs = arguments.old_log_probs.as_ref().map(hold);
    let ref_log_probs = arguments.ref_log_probs.as_ref().map(hold);
    let entropy = arguments.entropy.as_ref().map(hold);
    let factors = arguments.factors.each_ref().map(|x| x.as_ref().map(hold));
    let token_weights = arguments.token_weights.as_ref().map(hold);
    let prompt_tokens = arguments.prompt_tokens.as_ref().map(hold);
    let policy_mask = arguments.policy_mask.as_ref().map(hold);
    let entropy_mask = arguments.entropy_mask.as_ref().map(hold);
    // SAFETY: tensors have an element for each token, or for each sequence as `per_token` and the
    // divisors have it. The blocks cover the tokens, and each writes its part.
    #[allow(unsafe_code)]
    unsafe {
        kernels::policy_loss_forward {
            log_probs: In::new(storage, layout, &stream)?,
            old_log_probs: In::optional(old_log_probs.as_ref(), &stream)?,
            ref_log_probs: In::optional(ref_log_probs.as_ref(), &stream)?,
            entropy: In::optional(entropy.as_ref(), &stream)?,
            advantages: In::from_tensor(&advantages, &stream)?,
            first_factors: In::optional(factors[0].as_ref(), &stream)?,
            second_factors: In::optional(factors[1].as_ref(), &stream)?,
            token_weights: In::optional(token_weights.as_ref(), &stream)?,
            prompt_tokens: In::optional(prompt_tokens.as_ref(), &stream)?,
            mask: In::from_tensor(&mask, &stream)?,
            policy_mask: In::optional(policy_mask.as_ref(), &stream)?,
            entropy_mask: In::optional(entropy_mask.as_ref(), &stream)?,
            of_log_probs: Out::new(&mut of_log_probs, &stream),
            of_entropy: match &mut of_entropy {
                Some(of_entropy) => Out::new(of_entropy, &stream),
                None => Out::null(),
            },
            parts: Out::new(&mut parts, &stream),
            tokens: u32::try_from(tokens).map_err(Error::wrap)?,
            chunks: chunks as u32,
            per_token: per_token(arguments),
            surrogate: numbers.surrogate,
            low: numbers.low,
            high: numbers.high,
            delta: numbers.delta,
            dual_clip: numbers.dual_clip,
            drop_low: numbers.drop_low,
            drop_high: numbers.drop_high,
            log_ratio_clamp: numbers.log_ratio_clamp,
            kl_form: form(&numbers.kl),
            kl_coef: numbers.kl.coef,
            kl_log_ratio_clamp: numbers.kl.log_ratio_clamp,
            kl_value_clamp: numbers.kl.value_clamp,
            kl_max_log_weight: numbers.kl.max_log_weight,
            old_kl_form: form(&numbers.old_kl),
            old_kl_coef: numbers.old_kl.coef,
            old_kl_log_ratio_clamp: numbers.old_kl.log_ratio_clamp,
            old_kl_value_clamp: numbers.old_kl.value_clamp,
            old_kl_max_log_weight: numbers.old_kl.max_log_weight,
            divisor: numbers.divisor,
            scale: numbers.scale,
            entropy_divisor: numbers.entropy_divisor,
            entropy_scale: numbers.entropy_scale,
        }
        .launch(device, grid(blocks, THREADS)?)?;
        let parts = CudaStorage::wrap_cuda_slice(parts, device.clone());
        let all = Layout::contiguous(blocks * PolicyStatistic::COUNT);
        // A warp for each statistic.
        kernels::policy_loss_merge {
            parts: In::new(&parts, &all, &stream)?,
            statistics: Out::new(&mut statistics, &stream),
            loss: Out::new(&mut loss, &stream),
            count: blocks as u32,
        }
        .launch(device, grid(1, 32 * PolicyStatistic::COUNT as u32)?)?;
    }
    let shape = Shape::from((rows, tokens));
    let tensor = |x| as_tensor(CudaStorage::wrap_cuda_slice(x, device.clone()), &shape);
    let statistics = CudaStorage::wrap_cuda_slice(statistics, device.clone());
    let kept = Kept {
        statistics: as_tensor(statistics, &Shape::from(PolicyStatistic::COUNT)),
        of_log_probs: tensor(of_log_probs),
        of_entropy: of_entropy.map(tensor),
    };
    Ok((CudaStorage::wrap_cuda_slice(loss, device.clone()), kept))
}

/// Multiplies the derivatives by the loss's gradient.
pub(super) fn backward(kept: &Kept, gradient: &Tensor) -> Result<(Tensor, Option<Tensor>)> {
    let device = gradient.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (shape, n) = (kept.of_log_probs.shape(), kept.of_log_probs.elem_count());
    // SAFETY: the kernel writes every element.
    #[allow(unsafe_code)]
    let (mut log_probs, mut entropy) = unsafe {
        let of_entropy = kept.of_entropy.as_ref();
        let entropy = of_entropy.map(|_| alloc::<f32>(device, n)).transpose()?;
        (alloc::<f32>(device, n)?, entropy)
    };
    let of_log_probs = kept.of_log_probs.storage_and_layout();
    let of_entropy = kept.of_entropy.as_ref().map(Tensor::storage_and_layout);
    let gradient = gradient.storage_and_layout();
    // SAFETY: all have n elements except the gradient, which is a scalar. The blocks cover them.
    #[allow(unsafe_code)]
    unsafe {
        kernels::policy_loss_backward {
            of_log_probs: In::from_tensor(&of_log_probs, &stream)?,
            of_entropy: In::optional(of_entropy.as_ref(), &stream)?,
            gradient: In::from_tensor(&gradient, &stream)?,
            log_prob_gradient: Out::new(&mut log_probs, &stream),
            entropy_gradient: match &mut entropy {
                Some(entropy) => Out::new(entropy, &stream),
                None => Out::null(),
            },
            n: n as u64,
        }
        .launch(device, grid(n.div_ceil(THREADS as usize), THREADS)?)?;
    }
    let tensor = |x| as_tensor(CudaStorage::wrap_cuda_slice(x, device.clone()), shape);
    Ok((tensor(log_probs), entropy.map(tensor)))
}

/// Returns a bit for the advantages and for each factor, which is set if there is one per token.
fn per_token(arguments: &Arguments) -> u32 {
    let [first, second] = arguments.factors.each_ref().map(Option::as_ref);
    [Some(&arguments.advantages), first, second]
        .into_iter()
        .enumerate()
        .filter_map(|(bit, x)| Some((bit, x?)))
        .filter(|(_, x)| x.elem_count() == arguments.rows * arguments.tokens)
        .fold(0, |bits, (bit, _)| bits | 1 << bit)
}

/// Returns a KL term's estimate, slope and factor as one number.
fn form(kl: &KlNumbers) -> u32 {
    kl.estimate | kl.slope << 4 | kl.times_ratio << 8
}

//! The router of a mixture of experts.

pub(crate) mod composed;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{D, DType, Result, Tensor, bail};

use crate::ops::attention::composed::softmax;
use crate::{arithmetic_dtype, check};

/// Chooses the `top_k` experts with the largest logits for each token, the largest first, and
/// computes their gates. Gates are a softmax over the chosen experts if `normalize`, else over all
/// experts.
///
/// There is no gradient. For gates with a gradient, pass the experts to [`expert_gates`].
///
/// If logits are equal, the first experts are chosen. This does not hold for f64 on a GPU. There is
/// no wait for a GPU.
///
/// # Shapes
///
/// - `logits`: `[N, E]`, any float dtype
/// - results: experts u32 `[N, top_k]`; gates `[N, top_k]`, f64 for f64 logits, else f32
///
/// # Errors
///
/// Fails if `logits` has a different shape or an integer dtype, or `top_k` is not from 1 to E.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::route;
///
/// let logits = Tensor::new(&[[1f32, 3., 3., 0.]], &Device::Cpu)?;
/// let (experts, gates) = route(&logits, 2, true)?;
/// assert_eq!(experts.to_vec2::<u32>()?, [[1, 2]]);
/// assert_eq!(gates.to_vec2::<f32>()?, [[0.5, 0.5]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn route(logits: &Tensor, top_k: usize, normalize: bool) -> Result<(Tensor, Tensor)> {
    check_logits(logits, top_k)?;
    let logits = logits.detach().contiguous()?;
    #[cfg(feature = "cuda")]
    if logits.device().is_cuda() && crate::path::is_fused(&logits) {
        return cuda::forward(&logits, top_k, normalize);
    }
    composed::unchecked(&logits, top_k, normalize)
}

/// Computes the gates for experts chosen before, as [`route`] does. The gradient reaches the
/// logits.
///
/// # Shapes
///
/// - `logits`: `[N, E]`, any float dtype
/// - `experts`: u32 `[N, top_k]`
/// - result: `[N, top_k]`, f64 for f64 logits, else f32
///
/// # Errors
///
/// Fails if shapes or dtypes do not match. Expert indices must be below E, which only the CPU
/// checks.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::expert_gates;
///
/// let logits = Tensor::new(&[[1f32, 3., 3., 0.]], &Device::Cpu)?;
/// let experts = Tensor::new(&[[2u32, 1]], &Device::Cpu)?;
/// let gates = expert_gates(&logits, &experts, 2, true)?;
/// assert_eq!(gates.to_vec2::<f32>()?, [[0.5, 0.5]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn expert_gates(
    logits: &Tensor,
    experts: &Tensor,
    top_k: usize,
    normalize: bool,
) -> Result<Tensor> {
    let (tokens, number) = check_logits(logits, top_k)?;
    if experts.dims() != [tokens, top_k] || experts.dtype() != DType::U32 {
        bail!(
            "experts: {:?} of {:?}, must be [{tokens}, {top_k}] of U32",
            experts.dims(),
            experts.dtype(),
        );
    }
    check_experts(experts, number)?;
    let logits = logits.to_dtype(arithmetic_dtype(logits.dtype()))?;
    let experts = experts.contiguous()?;
    if normalize {
        let chosen = logits.contiguous()?.gather(&experts, D::Minus1)?;
        softmax(&chosen)
    } else {
        let probs = softmax(&logits)?;
        probs.contiguous()?.gather(&experts, D::Minus1)
    }
}

/// Fails if an index is not below `number`. Only the CPU checks this, because it would synchronize
/// a GPU.
pub(crate) fn check_experts(experts: &Tensor, number: usize) -> Result<()> {
    if !experts.device().is_cpu() || experts.elem_count() == 0 {
        return Ok(());
    }
    let largest = experts.max_all()?.to_scalar::<u32>()?;
    if largest as usize >= number {
        bail!("experts: {largest}, must be below {number}, the number of experts");
    }
    Ok(())
}

/// Returns N and E.
pub(crate) fn check_logits(logits: &Tensor, top_k: usize) -> Result<(usize, usize)> {
    check::one_stream(logits.device())?;
    match *logits.dims() {
        [tokens, experts]
            if tokens > 0 && (1..=experts).contains(&top_k) && logits.dtype().is_float() =>
        {
            Ok((tokens, experts))
        }
        _ => bail!(
            "logits: {:?} of {:?}, must be [N, E] of a floating-point type, with at least one token and E at least \
             top_k, which is {top_k} and must be at least 1",
            logits.dims(),
            logits.dtype(),
        ),
    }
}

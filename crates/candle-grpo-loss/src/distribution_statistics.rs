//! Distribution statistics at each token.

use candle_core::{D, DType, Result, Tensor, bail};
use candle_grpo_core::dtype::arithmetic_dtype;

use crate::sum_of_squared_probs::sum_of_squared_probs;

/// Statistics for `softmax(logits / temperature)`, each `[..]` and without a gradient.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DistributionStatistics {
    /// `log sum_v p_v^2`, the negative Renyi entropy of order 2.
    pub log_sum_squared_probs: Tensor,
    /// Mean `logits / temperature` over the vocabulary.
    pub mean_logit: Tensor,
    /// 1 where the target is the first largest logit, which greedy decoding would choose. u8.
    pub is_top1: Tensor,
}

/// Computes the statistics for logits `[.., V]` and targets `[..]`, integers below V.
///
/// # Errors
///
/// Fails on other shapes, and on a temperature outside [`candle_grpo_kernels::TEMPERATURES`].
pub fn distribution_statistics(
    logits: &Tensor,
    targets: &Tensor,
    temperature: f64,
) -> Result<DistributionStatistics> {
    let logits = logits.detach();
    let sums = sum_of_squared_probs(&logits, temperature)?;
    if targets.dims() != sums.dims() {
        bail!(
            "targets: shape {:?}, must be {:?}",
            targets.dims(),
            sums.dims()
        );
    }
    let z = (logits.to_dtype(arithmetic_dtype(logits.dtype()))? / temperature)?;
    let vocabulary = z.dim(D::Minus1)? as u32;
    // First place that has the maximum.
    let is_largest = z.broadcast_eq(&z.max_keepdim(D::Minus1)?)?;
    let place = Tensor::arange(0u32, vocabulary, z.device())?.broadcast_as(z.shape())?;
    let place = place.contiguous()?;
    let none = Tensor::full(vocabulary, z.shape(), z.device())?;
    let first = is_largest.where_cond(&place, &none)?.min(D::Minus1)?;
    Ok(DistributionStatistics {
        log_sum_squared_probs: sums.log()?,
        mean_logit: z.mean(D::Minus1)?,
        is_top1: first.eq(&targets.detach().to_dtype(DType::U32)?)?,
    })
}

//! Metrics for the difference between the two policies.

use candle_core::{D, Result, Tensor};
use candle_grpo_core::dtype::statistics_dtype;
use candle_grpo_core::{Mask, Metrics};

/// Adds perplexities and chi-square divergences, in the statistics dtype.
///
/// `old` and `rollout` are log-probs `[B, T]`, 0 outside the mask. `d` is their clamped difference,
/// and `product` its clamped sum over each sequence, `[B, 1]`.
pub(super) fn push(
    metrics: &mut Metrics,
    [old, rollout]: [&Tensor; 2],
    d: &Tensor,
    product: &Tensor,
    mask: &Mask,
) -> Result<()> {
    let dtype = statistics_dtype(d.device());
    let lengths = mask.lengths(dtype)?;
    // One number per sequence: a mask over sequences, and its values.
    let sequences = Mask::new(&lengths.gt(0.)?)?;
    let mean = |x: &Tensor| -> Result<Tensor> {
        x.to_dtype(dtype)?.sum_keepdim(D::Minus1)? / lengths.maximum(1.)?
    };
    let (training, sampling) = (mean(old)?.neg()?, mean(rollout)?.neg()?);
    let gap = (&training - &sampling)?;
    for (name, values) in [
        ("training_log_ppl", &training),
        ("rollout_log_ppl", &sampling),
        ("training_ppl", &training.exp()?),
        ("rollout_ppl", &sampling.exp()?),
        ("log_ppl_diff", &gap),
        ("log_ppl_abs_diff", &gap.abs()?),
        ("ppl_ratio", &gap.exp()?),
        (
            "chi2_sequence",
            &((product.to_dtype(dtype)? * 2.)?.exp()? - 1.)?,
        ),
    ] {
        metrics.push_masked_mean(&format!("mismatch_{name}"), values, &sequences)?;
    }
    metrics.push_masked_max("mismatch_log_ppl_diff_max", &gap, &sequences)?;
    metrics.push_masked_min("mismatch_log_ppl_diff_min", &gap, &sequences)?;
    let chi2 = ((d.to_dtype(dtype)? * 2.)?.exp()? - 1.)?;
    metrics.push_masked_mean("mismatch_chi2_token", &chi2, mask)
}

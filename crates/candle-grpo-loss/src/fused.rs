//! The fused path of the policy loss: which points of the product it covers, and how they are said to the operator.
//!
//! The composed product is the reference, and computes what is not covered; it also says what is wrong with a batch.

use candle_core::{DType, Result, Tensor};
use candle_grpo_core::{Kl, KlEstimator, KlGradient, Mask, Metrics};
use candle_grpo_kernels::{
    FusedPolicyLoss, KlEstimate, KlRatio, KlSlope, KlTerm, PolicyLossOptions, PolicyLossTensors,
    PolicySum, RatioLevel, RowDivisor, TokenSurrogate, policy_loss, policy_loss_is_fused,
};

use crate::aggregation::Aggregation;
use crate::batch::{PolicyBatch, over_tokens};
use crate::importance::ImportanceLevel;
use crate::kl_loss::{BiasCorrection, KlLoss, KlValues};
use crate::policy_loss::{PolicyLoss, PolicyLossOutput, TokenTerms};
use crate::surrogate::{Divergence, Surrogate};
use crate::totals::StepTotals;

/// The names of the metrics that count a flag, with the figure that has it.
type Counted = Vec<(&'static str, PolicySum)>;

/// A point of the product that the operator covers.
struct Covered {
    level: RatioLevel,
    surrogate: TokenSurrogate,
    counted: Counted,
    kl: Option<KlTerm>,
}

/// The decision: what the operator is to compute, or nothing if the composed product must.
fn covered(loss: &PolicyLoss, batch: &PolicyBatch) -> Option<Covered> {
    let level = match loss.importance_level {
        ImportanceLevel::Token => RatioLevel::Token,
        ImportanceLevel::Sequence => RatioLevel::Sequence,
        ImportanceLevel::SequenceToken => RatioLevel::SequenceToken,
        ImportanceLevel::SequenceProduct => RatioLevel::SequenceProduct,
        ImportanceLevel::Segment => return None,
    };
    let composed_only = loss.off_policy_threshold.is_some()
        || loss.positive_nll.is_some()
        || loss.loss_coef == 0.
        || batch.kl_values.is_some();
    let log_probs = batch.log_probs?;
    if composed_only || !policy_loss_is_fused(log_probs) || !fits(loss, batch, log_probs) {
        return None;
    }
    let (surrogate, counted) = surrogate(&loss.surrogate)?;
    let kl = match &loss.kl {
        None => None,
        Some(kl) if kl.values == KlValues::Given || batch.ref_log_probs.is_none() => return None,
        Some(kl) => Some(kl_term(kl)),
    };
    Some(Covered {
        level,
        surrogate,
        counted,
        kl,
    })
}

/// Whether all tensors are there and have the shapes and the device that they must have.
fn fits(loss: &PolicyLoss, batch: &PolicyBatch, log_probs: &Tensor) -> bool {
    let Ok(mask) = Mask::new(batch.response_mask) else {
        return false;
    };
    let per_token = [
        Some(log_probs),
        batch.old.log_probs(),
        batch.rollout_log_probs,
        batch.ref_log_probs,
        batch.entropy,
        batch.policy_mask,
        batch.entropy_mask,
        batch.selected_tokens,
    ];
    let spread = [
        Some(batch.advantages),
        batch.scores,
        batch.importance_weights,
        batch.sample_weights,
    ];
    let device = log_probs.device();
    let here = |x: &Tensor| x.device().same_device(device);
    let prompts = match (loss.aggregation, batch.prompt_tokens) {
        (Aggregation::PromptMeanTokenMean, Some(tokens)) => {
            here(tokens) && tokens.dims() == [log_probs.dims()[0]]
        }
        (Aggregation::PromptMeanTokenMean, None) => false,
        _ => true,
    };
    here(batch.response_mask)
        && per_token
            .into_iter()
            .flatten()
            .all(|x| here(x) && mask.check_shape("", x).is_ok())
        && spread
            .into_iter()
            .flatten()
            .all(|x| here(x) && over_tokens("", x, &mask).is_ok())
        && prompts
        && (loss.entropy_coef == 0. || batch.entropy.is_some())
}

/// A surrogate that is a function of one token; nothing for the others.
fn surrogate(surrogate: &Surrogate) -> Option<(TokenSurrogate, Counted)> {
    let bound = |x: Option<f64>| x.map_or(f32::INFINITY, |x| x as f32);
    let sides = || {
        vec![
            ("clip_fraction_low", PolicySum::ClippedLow),
            ("clip_fraction_high", PolicySum::ClippedHigh),
        ]
    };
    let clip_fraction = ("clip_fraction", PolicySum::Clipped);
    Some(match surrogate {
        Surrogate::Clip(s) => {
            let mut counted = sides();
            if s.dual_clip.is_some() {
                counted.push(("dual_clip_fraction", PolicySum::DualClipped));
            }
            counted.push(clip_fraction);
            let clip = TokenSurrogate::Clip {
                ratio_min: (1. - s.low) as f32,
                ratio_max: (1. + s.high) as f32,
                dual_clip: bound(s.dual_clip),
                delta: bound(s.delta),
            };
            (clip, counted)
        }
        Surrogate::PolicyGradient => (TokenSurrogate::PolicyGradient, Vec::new()),
        Surrogate::DetachedWeight(s) => {
            let mut counted = sides();
            counted.push(clip_fraction);
            if s.unified_mask.is_some() {
                counted.push(("dropped_fraction", PolicySum::Dropped));
            }
            let weight = TokenSurrogate::DetachedWeight {
                ratio_min: s.ratio_min.unwrap_or(0.) as f32,
                ratio_max: bound(s.ratio_max),
                drop_below: s.unified_mask.map_or(0., |mask| (1. - mask.low) as f32),
                drop_above: bound(s.unified_mask.map(|mask| 1. + mask.high)),
            };
            (weight, counted)
        }
        Surrogate::Topr(s) if s.positive_if == crate::PositiveIf::AdvantagePositive => {
            let topr = TokenSurrogate::Topr {
                positive_weight: s.positive_weight as f32,
                negative_weight: s.negative_weight as f32,
            };
            let positive = ("positive_fraction", PolicySum::Positive);
            (topr, vec![clip_fraction, positive])
        }
        Surrogate::SoftGate(s) => {
            let gate = TokenSurrogate::SoftGate {
                tau_pos: s.tau_pos as f32,
                tau_neg: s.tau_neg as f32,
            };
            (gate, Vec::new())
        }
        Surrogate::SquaredLogRatio(s) => {
            let coef = s.coef as f32;
            (TokenSurrogate::SquaredLogRatio { coef }, Vec::new())
        }
        Surrogate::DivergenceMask(s) => {
            let mut counted = sides();
            counted.push(clip_fraction);
            counted.push(("ratio_max_fraction", PolicySum::WeightBounded));
            let mask = TokenSurrogate::DivergenceMask {
                binary_kl: s.divergence == Divergence::BinaryKl,
                low: s.low as f32,
                high: s.high as f32,
                ratio_max: s.ratio_max as f32,
            };
            (mask, counted)
        }
        _ => return None,
    })
}

fn kl_term(loss: &KlLoss) -> KlTerm {
    let Kl {
        estimator,
        gradient,
        log_ratio_clamp,
        value_clamp,
    } = loss.kl;
    let bound = |x: Option<f64>| x.map_or(f32::INFINITY, |x| x as f32);
    KlTerm {
        coef: loss.coef as f32,
        estimate: match estimator {
            KlEstimator::K1 => KlEstimate::K1,
            KlEstimator::K2 => KlEstimate::K2,
            KlEstimator::K3 => KlEstimate::K3,
            KlEstimator::Abs => KlEstimate::Abs,
        },
        slope: match gradient {
            KlGradient::Direct => KlSlope::Direct,
            KlGradient::StraightThrough => KlSlope::StraightThrough,
            KlGradient::ImportanceWeighted { max } => {
                KlSlope::ImportanceWeighted { max: max as f32 }
            }
        },
        log_ratio_clamp: bound(log_ratio_clamp),
        value_clamp: bound(value_clamp),
        ratio: match loss.bias_correction {
            BiasCorrection::Off => KlRatio::One,
            BiasCorrection::Token => KlRatio::Token,
            BiasCorrection::ImportanceLevel => KlRatio::Level,
        },
    }
}

/// The output of the operator; nothing if it does not cover this. Options and totals have been checked.
pub(crate) fn compute(
    loss: &PolicyLoss,
    batch: &PolicyBatch,
    totals: &StepTotals,
) -> Result<Option<PolicyLossOutput>> {
    let Some(covered) = covered(loss, batch) else {
        return Ok(None);
    };
    let prompt_tokens = batch
        .prompt_tokens
        .map(|tokens| tokens.detach().to_dtype(DType::F32)?.maximum(1.))
        .transpose()?;
    let weights = weights(batch)?;
    let tensors = PolicyLossTensors {
        log_probs: batch.log_probs()?,
        old_log_probs: batch.old.log_probs(),
        ref_log_probs: covered.kl.and(batch.ref_log_probs),
        advantages: batch.advantages,
        weights: weights.as_ref(),
        entropy: batch.entropy,
        mask: batch.response_mask,
    };
    let options = PolicyLossOptions {
        level: covered.level,
        log_ratio_clamp: loss.log_ratio_clamp.map_or(f32::INFINITY, |c| c as f32),
        surrogate: covered.surrogate,
        kl: covered.kl,
        row_divisor: match (loss.aggregation, &prompt_tokens) {
            (Aggregation::SeqMeanTokenMean, _) => RowDivisor::Length,
            (Aggregation::PromptMeanTokenMean, Some(tokens)) => RowDivisor::Given(tokens),
            _ => RowDivisor::One,
        },
        denominator: loss.aggregation.denominator(totals)? / loss.loss_coef,
    };
    let output = policy_loss(&tensors, &options)?;
    let mut value = output.loss.clone();
    if let (Some(entropy), true) = (batch.entropy, loss.entropy_coef > 0.) {
        let mask = Mask::new(batch.response_mask)?;
        let entropy = entropy.to_dtype(DType::F32)?;
        let kept = batch
            .entropy_mask
            .map(|kept| kept.detach().ne(0.))
            .transpose()?;
        value = (value - loss.entropy_bonus(&entropy, kept.as_ref(), &mask, totals, batch)?)?;
    }
    Ok(Some(PolicyLossOutput {
        loss: value,
        metrics: metrics(&covered, batch, &output)?,
        tokens: TokenTerms {
            surrogate: output.surrogate,
            policy: output.policy,
            kl: output.kl,
            log_ratio: output.log_ratio,
            clipped: covered
                .counted
                .iter()
                .any(|&(_, sum)| sum == PolicySum::Clipped)
                .then_some(output.clipped),
        },
    }))
}

/// Everything that multiplies or masks the surrogate, `[B]`, `[B, 1]` or `[B, T]`; nothing if there is nothing.
fn weights(batch: &PolicyBatch) -> Result<Option<Tensor>> {
    let column = |x: &Tensor| match x.rank() {
        1 => x.unsqueeze(1),
        _ => Ok(x.clone()),
    };
    let mut product: Option<Tensor> = None;
    for x in [batch.importance_weights, batch.sample_weights]
        .into_iter()
        .flatten()
    {
        let x = column(&x.detach().to_dtype(DType::F32)?)?;
        product = Some(match product {
            None => x,
            Some(product) => product.broadcast_mul(&x)?,
        });
    }
    let Some(kept) = batch.policy_mask else {
        return Ok(product);
    };
    let kept = kept.detach().ne(0.)?;
    let ones = kept.to_dtype(DType::F32)?;
    Ok(Some(match product {
        None => ones,
        Some(product) => {
            kept.where_cond(&product.broadcast_as(ones.shape())?, &ones.zeros_like()?)?
        }
    }))
}

fn metrics(covered: &Covered, batch: &PolicyBatch, output: &FusedPolicyLoss) -> Result<Metrics> {
    let count = output.sum(PolicySum::Count)?;
    let mut metrics = Metrics::new();
    for &(name, sum) in &covered.counted {
        metrics.push_mean(name, &output.sum(sum)?, &count)?;
    }
    for (name, sum) in [
        ("ratio_mean", PolicySum::Ratio),
        ("approx_kl", PolicySum::K1),
        ("approx_kl_abs", PolicySum::Abs),
        ("approx_kl_k2", PolicySum::K2),
        ("approx_kl_k3", PolicySum::K3),
        ("log_prob", PolicySum::LogProb),
        ("old_log_prob", PolicySum::OldLogProb),
    ] {
        metrics.push_mean(name, &output.sum(sum)?, &count)?;
    }
    for (name, largest) in [
        ("ratio_max", PolicySum::RatioMax),
        ("token_ratio_max", PolicySum::TokenRatioMax),
        ("approx_kl_k3_max", PolicySum::K3Max),
    ] {
        metrics.push_max(name, &output.sum(largest)?)?;
    }
    metrics.push_min("ratio_min", &output.sum(PolicySum::RatioMin)?)?;
    if covered.kl.is_some() {
        metrics.push_mean("kl", &output.sum(PolicySum::Kl)?, &count)?;
    }
    if batch.entropy.is_some() {
        metrics.push_mean("entropy", &output.sum(PolicySum::Entropy)?, &count)?;
    }
    Ok(metrics)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{Clip, GeometricMean, PositiveNll, Vespo};

    /// Whether the operator covers a loss of a batch with all that it may need.
    fn is_covered(loss: &PolicyLoss, dtype: DType) -> Result<bool> {
        let x = Tensor::zeros((2, 3), dtype, &Device::Cpu)?;
        let advantages = Tensor::zeros(2, dtype, &Device::Cpu)?;
        let batch = PolicyBatch::new(&x, &advantages, &x)
            .old_log_probs(&x)
            .ref_log_probs(&x)
            .prompt_tokens(&advantages);
        Ok(covered(loss, &batch).is_some())
    }

    #[test]
    fn published_losses_are_fused_and_the_rest_is_composed() -> Result<()> {
        let clip = PolicyLoss {
            surrogate: Clip::default().into(),
            kl: Some(KlLoss::k3(0.1)),
            ..Default::default()
        };
        for loss in [
            PolicyLoss::dapo(),
            PolicyLoss {
                importance_level: ImportanceLevel::Sequence,
                ..clip.clone()
            },
            PolicyLoss {
                aggregation: Aggregation::PromptMeanTokenMean,
                ..clip.clone()
            },
            clip.clone(),
        ] {
            assert!(is_covered(&loss, DType::F32)? && is_covered(&loss, DType::BF16)?);
            assert!(!is_covered(&loss, DType::F64)?);
        }
        for loss in [
            PolicyLoss {
                surrogate: Vespo::default().into(),
                ..clip.clone()
            },
            PolicyLoss {
                surrogate: GeometricMean::default().into(),
                ..clip.clone()
            },
            PolicyLoss {
                importance_level: ImportanceLevel::Segment,
                ..clip.clone()
            },
            PolicyLoss {
                positive_nll: Some(PositiveNll {
                    coef: 1.,
                    score_above: 0.,
                }),
                ..clip.clone()
            },
            PolicyLoss {
                off_policy_threshold: Some(0.1),
                ..clip.clone()
            },
            PolicyLoss {
                kl: Some(KlLoss::given(0.1)),
                ..clip
            },
        ] {
            assert!(!is_covered(&loss, DType::F32)?, "{loss:?}");
        }
        Ok(())
    }
}

//! The fused path: losses whose terms depend on one token each, as one operator.

use candle_core::{Result, Tensor};
use candle_grpo_core::kl::KlGradient;
use candle_grpo_core::{KlEstimator, MetricKind, Metrics};
use candle_grpo_kernels::{
    Divisor, EntropyBonus, KlEstimate, KlSlope, KlTerm, PolicyStatistic, PolicyTerms,
    RatioSurrogate, TokenShare, policy_loss,
};

use super::checked_batch::Checked;
use super::{PolicyLoss, PolicyLossOutput, required_entropy, required_reference};
use crate::aggregation::{Aggregation, checked_prompt_tokens};
use crate::importance_level::ImportanceLevel;
use crate::kl_loss::{BiasCorrection, KlLoss};
use crate::surrogate::Surrogate;
use crate::totals::StepTotals;

/// Computes all terms except that on observations. Returns `None` for losses and tensors that the
/// operator does not support.
pub(super) fn compute(
    loss: &PolicyLoss,
    checked: &Checked,
    totals: &StepTotals,
) -> Result<Option<PolicyLossOutput>> {
    let batch = checked.batch;
    let (dtype, device) = (checked.log_probs.dtype(), checked.log_probs.device());
    let is_per_token = loss.importance_level == ImportanceLevel::Token
        && loss.off_policy_threshold.is_none()
        && loss.positive_nll.is_none()
        && loss.distillation.is_none();
    let Some(surrogate) = surrogate(&loss.surrogate).filter(|_| is_per_token) else {
        return Ok(None);
    };
    let kl_terms = [loss.kl, loss.old_kl].map(|kl| kl.map(|kl| kl_term(&kl)));
    if kl_terms.contains(&Some(None)) || !PolicyTerms::are_supported(dtype, device) {
        return Ok(None);
    }
    let [kl, old_kl] = kl_terms.map(Option::flatten);
    let kl = match kl {
        Some(term) => Some((term, required_reference(&batch.ref_log_probs)?)),
        None => None,
    };
    let entropy = if loss.entropy_coef > 0. {
        required_entropy(&batch.entropy)?;
        Some(loss.entropy_mean(batch, totals)?)
    } else {
        None
    };
    let aggregations = [Some(loss.aggregation), entropy.map(|(by, _)| by)];
    let prompt_tokens = if aggregations.contains(&Some(Aggregation::PromptMeanTokenMean)) {
        let (sequences, _) = checked.mask.dims()?;
        let tokens = batch.prompt_tokens.as_ref();
        Some(checked_prompt_tokens(tokens, sequences)?)
    } else {
        None
    };
    let flags = |x: &Option<Tensor>| x.as_ref().map(|x| x.detach().ne(0.)).transpose();
    let (policy_mask, entropy_mask) = (flags(&batch.policy_mask)?, flags(&batch.entropy_mask)?);
    let entropy_bonus = match entropy {
        Some((aggregation, totals)) => Some(EntropyBonus {
            mask: entropy_mask.as_ref(),
            share: share(aggregation, loss.entropy_coef, &totals)?,
        }),
        None => None,
    };
    let terms = PolicyTerms {
        mask: checked.mask.selected(),
        old_log_probs: batch.old.log_probs(),
        advantages: &checked.advantages,
        factors: [&checked.importance_weights, &checked.sample_weights].map(Option::as_ref),
        policy_mask: policy_mask.as_ref(),
        token_weights: batch.token_weights.as_ref(),
        log_ratio_clamp: loss.log_ratio_clamp,
        surrogate,
        kl,
        old_kl,
        share: share(loss.aggregation, loss.loss_coef, totals)?,
        entropy: batch.entropy.as_ref(),
        entropy_bonus,
        prompt_tokens,
    };
    let (value, statistics) = policy_loss(checked.log_probs, &terms)?;
    Ok(Some(PolicyLossOutput {
        loss: value,
        metrics: metrics(&terms, &statistics)?,
    }))
}

fn surrogate(surrogate: &Surrogate) -> Option<RatioSurrogate> {
    match surrogate {
        Surrogate::Clip(clip) => Some(RatioSurrogate::Clip {
            low: 1. - clip.low,
            high: 1. + clip.high,
            delta: clip.delta,
            dual_clip: clip.dual_clip,
        }),
        Surrogate::DetachedWeight(weight) => Some(RatioSurrogate::DetachedWeight {
            min: weight.ratio_min,
            max: weight.ratio_max,
            drop: weight
                .unified_mask
                .map(|mask| (1. - mask.low, 1. + mask.high)),
        }),
        Surrogate::PolicyGradient => Some(RatioSurrogate::PolicyGradient),
        _ => None,
    }
}

/// Returns a KL loss as numbers, unless the operator lacks its estimator or gradient.
fn kl_term(loss: &KlLoss) -> Option<KlTerm> {
    Some(KlTerm {
        coef: loss.coef,
        estimate: match loss.kl.estimator {
            KlEstimator::K1 => KlEstimate::K1,
            KlEstimator::K2 => KlEstimate::K2,
            KlEstimator::K3 => KlEstimate::K3,
            KlEstimator::Abs => KlEstimate::Abs,
            _ => return None,
        },
        slope: match loss.kl.gradient {
            KlGradient::Direct => KlSlope::Own,
            KlGradient::StraightThrough => KlSlope::LogRatio,
            KlGradient::ImportanceWeighted { max } => KlSlope::WeightedLogRatio { max },
            _ => return None,
        },
        log_ratio_clamp: loss.kl.log_ratio_clamp,
        value_clamp: loss.kl.value_clamp,
        // At the level of tokens, both ratios are the same.
        times_ratio: loss.bias_correction != BiasCorrection::Off,
    })
}

/// Returns each token's share in `coef` times the aggregation.
fn share(aggregation: Aggregation, coef: f64, totals: &StepTotals) -> Result<TokenShare> {
    totals.check()?;
    Ok(TokenShare {
        scale: coef / aggregation.denominator(totals)?,
        divisor: match aggregation {
            Aggregation::SeqMeanTokenMean => Divisor::Length,
            Aggregation::PromptMeanTokenMean => Divisor::PromptTokens,
            Aggregation::TokenMean
            | Aggregation::TokenSum
            | Aggregation::SeqMeanTokenSum
            | Aggregation::SeqMeanTokenSumNorm { .. } => Divisor::One,
        },
    })
}

fn metrics(terms: &PolicyTerms, statistics: &Tensor) -> Result<Metrics> {
    use MetricKind::{Max, Mean, Min};
    use PolicyStatistic as Statistic;

    let mut names = vec![
        ("ratio_mean", Mean, Statistic::Ratio),
        ("ratio_max", Max, Statistic::RatioMax),
        ("ratio_min", Min, Statistic::RatioMin),
        ("token_ratio_max", Max, Statistic::RatioMax),
        ("approx_kl", Mean, Statistic::K1),
        ("approx_kl_abs", Mean, Statistic::Abs),
        ("approx_kl_k2", Mean, Statistic::K2),
        ("approx_kl_k3", Mean, Statistic::K3),
        ("approx_kl_k3_max", Max, Statistic::K3Max),
        ("log_prob", Mean, Statistic::LogProb),
        ("old_log_prob", Mean, Statistic::OldLogProb),
    ];
    if terms.surrogate != RatioSurrogate::PolicyGradient {
        names.extend([
            ("clip_fraction", Mean, Statistic::Clipped),
            ("clip_fraction_low", Mean, Statistic::ClippedLow),
            ("clip_fraction_high", Mean, Statistic::ClippedHigh),
        ]);
    }
    match terms.surrogate {
        RatioSurrogate::Clip {
            dual_clip: Some(_), ..
        } => names.push(("dual_clip_fraction", Mean, Statistic::DualClipped)),
        RatioSurrogate::DetachedWeight { drop: Some(_), .. } => {
            names.push(("dropped_fraction", Mean, Statistic::Dropped));
        }
        _ => {}
    }
    if terms.kl.is_some() {
        names.push(("kl", Mean, Statistic::Kl));
    }
    if terms.old_kl.is_some() {
        names.push(("old_kl", Mean, Statistic::OldKl));
    }
    if terms.entropy.is_some() {
        names.push(("entropy", Mean, Statistic::Entropy));
    }
    let names: Vec<_> = names
        .into_iter()
        .map(|(name, kind, statistic)| (name, kind, statistic as usize))
        .collect();
    let mut metrics = Metrics::new();
    metrics.push_reduced(statistics, Statistic::Tokens as usize, &names)?;
    Ok(metrics)
}

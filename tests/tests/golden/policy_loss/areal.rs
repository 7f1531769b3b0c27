//! The losses of AReaL: three policies, and the tokens that a rejection leaves.

use anyhow::{Context, Result, bail};
use candle_core::{D, DType, Tensor};
use candle_grpo_core::{Kl, KlEstimator};
use candle_grpo_loss::correction::{FilterLevel, FilterStatistic, ImportanceWeight, RolloutFilter};
use candle_grpo_loss::surrogate::{DivergenceMask, MaskedValue, SoftGate};
use candle_grpo_loss::{
    ImportanceLevel, KlLoss, Mask, OldPolicy, PolicyBatch, PolicyLoss, RolloutCorrection,
    StepTotals, TeacherTerm,
};
use serde_json::Value;

use super::{Tensors, clip, level, metric, unbounded};
use crate::case::{Case, Outputs, Ran};
use crate::rollout_correction::on_tokens;

/// The tokens of the loss, their weights and its denominator.
struct Kept {
    mask: Tensor,
    weights: Option<Tensor>,
    totals: StepTotals,
    outputs: Outputs,
}

pub(super) fn run(case: &Case, tensors: &Tensors) -> Result<Ran> {
    let options = &case.config;
    if options.text("aggregation")? != "token_mean" {
        bail!("unknown aggregation");
    }
    let kept = match (
        options.get("rejection"),
        options.optional_number("m2_threshold")?,
    ) {
        (Value::Null, None) => Kept {
            mask: tensors.mask.clone(),
            weights: None,
            totals: StepTotals::count(&tensors.mask)?,
            outputs: Outputs::default(),
        },
        (Value::Null, Some(threshold)) => second_moment(threshold, tensors)?,
        (rejection, None) => rejected(&rejection, tensors)?,
        _ => bail!("a rejection and m2_threshold"),
    };
    let mut loss = match options.text("loss")?.as_str() {
        "ppo_clip" => unbounded(clip(case)?),
        "sapo" => unbounded(SoftGate {
            tau_pos: options.number("tau_pos")?,
            tau_neg: options.number("tau_neg")?,
        }),
        other => bail!("unknown loss {other}"),
    };
    loss.importance_level = level(case)?;
    let mask = Mask::new(&kept.mask)?;
    let mut advantages = tensors.advantages.to_dtype(DType::F32)?;
    if loss.importance_level == ImportanceLevel::Sequence && advantages.rank() == 2 {
        // AReaL averages the advantages over the tokens that are left.
        let sum = mask.select(&advantages)?.sum(D::Minus1)?;
        advantages = (sum / mask.lengths(DType::F32)?.squeeze(1)?.maximum(1.)?)?;
    }
    if let Some(coef) = options.optional_number("distillation_coef")? {
        let rl_coef = options.number("rl_coef")?;
        if rl_coef == 0. {
            return Ok(Ok(distillation(case, tensors, &loss, &advantages, coef)?));
        }
        advantages = (advantages * rl_coef)?;
        let k1 = Kl {
            log_ratio_clamp: None,
            ..Kl::new(KlEstimator::K1)
        };
        loss.kl = Some(KlLoss::new(coef, k1));
    }
    let batch = PolicyBatch {
        importance_weights: kept.weights.clone(),
        ref_log_probs: tensors.teacher_log_probs.clone(),
        ..batch(tensors, &advantages, &kept.mask)
    };
    let output = loss.compute(&batch, &kept.totals)?;
    let outputs = kept
        .outputs
        .out("loss", &output.loss)
        .gradients(&output.loss, &[("log_probs", &tensors.log_probs)])?;
    // Of the tokens that count, not of those that are left.
    let share = mask.count(DType::F64)?.to_scalar::<f64>()? / kept.totals.tokens;
    Ok(Ok(clip_metrics(
        outputs,
        &output.metrics.to_host()?,
        share,
    )?))
}

fn batch(tensors: &Tensors, advantages: &Tensor, mask: &Tensor) -> PolicyBatch {
    PolicyBatch::new(&tensors.log_probs, advantages, mask).old_log_probs(tensors.old())
}

fn clip_metrics(
    outputs: Outputs,
    metrics: &candle_grpo_core::MetricValues,
    share: f64,
) -> Result<Outputs> {
    outputs
        .number("clip_fraction", metric(metrics, "clip_fraction") * share)?
        .number(
            "dual_clip_fraction",
            metric(metrics, "dual_clip_fraction") * share,
        )
}

/// The ratio of the sampler with the teacher's advantage, and nothing else.
fn distillation(
    case: &Case,
    tensors: &Tensors,
    ppo: &PolicyLoss,
    advantages: &Tensor,
    coef: f64,
) -> Result<Outputs> {
    let rollout = case.input("rollout_log_probs")?;
    let loss = PolicyLoss {
        distillation: Some(TeacherTerm::new(coef)),
        // No probability moves by more than 1.
        ..unbounded(DivergenceMask {
            low: 1.,
            high: 1.,
            ratio_max: None,
            value: MaskedValue::Ratio,
            ..Default::default()
        })
    };
    let nothing = advantages.zeros_like()?;
    let batch = PolicyBatch {
        teacher_log_probs: tensors.teacher_log_probs.clone(),
        old: OldPolicy::Rollout(rollout),
        ..batch(tensors, &nothing, &tensors.mask)
    };
    let totals = StepTotals::count(&tensors.mask)?;
    let output = loss.compute(&batch, &totals)?;
    let outputs = Outputs::default()
        .out("loss", &output.loss)
        .gradients(&output.loss, &[("log_probs", &tensors.log_probs)])?;
    // The metrics are those of the loss that is left out.
    let ppo = PolicyLoss {
        kl: None,
        ..ppo.clone()
    };
    let batch = self::batch(tensors, advantages, &tensors.mask);
    let metrics = ppo.compute(&batch, &totals)?.metrics.to_host()?;
    clip_metrics(outputs, &metrics, 1.)
}

fn rollout(tensors: &Tensors) -> Result<&Tensor> {
    let rollout = tensors.rollout_log_probs.as_ref();
    rollout.context("no log-probs of the rollout")
}

fn second_moment(threshold: f64, tensors: &Tensors) -> Result<Kept> {
    let correction = RolloutCorrection::m2po(threshold);
    let kept = correction
        .compute(tensors.old(), rollout(tensors)?, &tensors.mask)?
        .kept;
    Ok(Kept {
        weights: None,
        totals: StepTotals::count(&kept)?,
        outputs: Outputs::default().out("mask", &kept),
        mask: kept,
    })
}

fn rejected(options: &Value, tensors: &Tensors) -> Result<Kept> {
    let text = |key: &str| {
        let value = options[key].as_str();
        value.with_context(|| format!("the rejection has no {key}"))
    };
    let (metric, by_sequence) = (text("metric")?, text("level")? == "sequence");
    let (lower, upper) = (options["lower"].as_f64(), options["upper"].as_f64());
    let log = |bound: f64| (bound > 0.).then(|| bound.ln());
    let (statistic, min, max) = match metric {
        "ratio" => (
            FilterStatistic::LogRatio,
            lower.and_then(log),
            upper.and_then(log),
        ),
        "kl_k1" => (FilterStatistic::LogRatio, lower, upper),
        "kl_k2" => (FilterStatistic::K2, lower, upper),
        "kl_k3" => (FilterStatistic::InverseK3, lower, upper),
        other => bail!("unknown metric {other}"),
    };
    let filter = RolloutFilter {
        statistic,
        level: match (by_sequence, text("agg")?) {
            (false, _) => FilterLevel::Token,
            (true, "mean") => FilterLevel::SequenceMean,
            (true, "sum") => FilterLevel::SequenceSum,
            (true, "max") => FilterLevel::SequenceMax,
            (true, other) => bail!("unknown agg {other}"),
        },
        min,
        max,
    };
    let correction = RolloutCorrection {
        weight: Some(ImportanceWeight {
            level: if by_sequence && metric == "ratio" {
                ImportanceLevel::Sequence
            } else {
                ImportanceLevel::Token
            },
            max: None,
            ..ImportanceWeight::truncated(1.)
        }),
        filters: vec![filter],
        log_ratio_clamp: None,
        second_moment: None,
    };
    let corrected = correction.compute(tensors.old(), rollout(tensors)?, &tensors.mask)?;
    let all = Mask::new(&tensors.mask)?;
    let weights = on_tokens(&corrected, &all)?.context("no weights")?;
    let inside = &corrected.kept;
    let (mask, weights, changed) = match text("action")? {
        "mask" => {
            let weights = inside.where_cond(&weights, &weights.zeros_like()?)?;
            (inside.clone(), weights, inside.eq(0u8)?)
        }
        "clamp" => {
            let lowest = lower.unwrap_or(f64::NEG_INFINITY);
            let bounded = weights.clamp(lowest, upper.unwrap_or(f64::INFINITY))?;
            let bounded = all.select(&inside.where_cond(&weights, &bounded)?)?;
            let changed = bounded.ne(&weights)?;
            (tensors.mask.clone(), bounded, changed)
        }
        other => bail!("unknown action {other}"),
    };
    let totals = StepTotals::count(&tensors.mask)?;
    let changed = all.select(&changed)?.to_dtype(DType::F64)?.sum_all()?;
    let changed = changed.to_scalar::<f64>()? / totals.tokens;
    Ok(Kept {
        mask,
        outputs: Outputs::default()
            .out("rollout_weights", &weights)
            .number("filtered_fraction", changed)?,
        weights: Some(weights),
        totals,
    })
}

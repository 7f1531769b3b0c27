//! The losses of ROLL.

use anyhow::{Context, Result, bail};
use candle_core::{DType, Tensor};
use candle_grpo_core::Mask;
use candle_grpo_loss::{
    Aggregation, DetachedWeight, ImportanceLevel, ImportanceWeight, KlLoss, PolicyLoss, PositiveIf,
    RolloutCorrection, SquaredLogRatio, StepTotals, Surrogate, Topr, UnifiedMask, length_weights,
};

use super::{Results, Setup, Tensors, clip, k3, level, number};
use crate::aggregate::{Rows, aggregation};
use crate::case::{Case, Outputs};

pub(super) fn setup(case: &Case, tensors: &Tensors) -> Result<Setup> {
    let options = &case.config;
    options.ignore(&["masked_positions"]);
    let mask = Mask::new(&tensors.mask)?;
    let mode = options.text("aggregation")?;
    let (aggregation, totals) = aggregation(case, &mode, &mask, Rows::All)?;
    let coef = options.optional_number("kl_coef")?.unwrap_or_default();
    let use_kl = options.flag("use_kl_loss")?;
    let loss = PolicyLoss {
        importance_level: level(case)?,
        allow_length_weighting: true,
        log_ratio_clamp: None,
        surrogate: surrogate(case)?,
        loss_coef: options.number("rl_coef")?,
        kl: use_kl.then(|| KlLoss::new(coef, k3(Some(10.)))),
        entropy_coef: options.number("entropy_coef")?,
        aggregation,
        ..Default::default()
    };
    let mut setup = Setup::new(loss, totals);
    if options.flag("length_weight")? {
        setup.sample_weights = Some(length_weights(&tensors.mask)?);
    }
    correct(case, tensors, &mut setup)?;
    Ok(setup)
}

fn surrogate(case: &Case) -> Result<Surrogate> {
    let options = &case.config;
    let number = |key: &str| options.number(key);
    Ok(match options.text("loss")?.as_str() {
        "ppo_clip" => clip(case)?.into(),
        "vanilla" => Surrogate::PolicyGradient,
        "tis" => DetachedWeight {
            ratio_min: Some(number("tis_lower_bound")?),
            ratio_max: Some(number("tis_upper_bound")?),
            unified_mask: None,
        }
        .into(),
        "cispo" => {
            let (low, high) = (number("cispo_epsilon_low")?, number("cispo_epsilon_high")?);
            DetachedWeight {
                ratio_min: Some(1. - low),
                ratio_max: Some(1. + high),
                unified_mask: options
                    .flag("cispo_use_unified_mask")?
                    .then_some(UnifiedMask { low, high }),
            }
            .into()
        }
        "topr" => Topr {
            positive_weight: number("topr_positive_weight")?,
            negative_weight: number("topr_negative_weight")?,
            positive_if: PositiveIf::ScoreAbove(0.),
        }
        .into(),
        "kimi15" => SquaredLogRatio {
            coef: number("kimi15_tau")?,
        }
        .into(),
        other => bail!("unknown loss {other}"),
    })
}

/// `exp(old - rollout)` at a level, at most a maximum.
fn correct(case: &Case, tensors: &Tensors, setup: &mut Setup) -> Result<()> {
    let level = case.config.text_or("rollout_correction", "off")?;
    let max = case.config.optional_number("rollout_correction_max")?;
    let level = match level.as_str() {
        "off" => return Ok(()),
        "token" => ImportanceLevel::Token,
        "segment" => ImportanceLevel::Segment,
        "geometric" => ImportanceLevel::Sequence,
        "sequence" => ImportanceLevel::SequenceProduct,
        other => bail!("unknown rollout_correction {other}"),
    };
    let correction = RolloutCorrection {
        weight: Some(ImportanceWeight {
            level,
            max,
            ..Default::default()
        }),
        log_ratio_clamp: None,
        ..Default::default()
    };
    let rollout = tensors
        .rollout_log_probs
        .as_ref()
        .context("no log-probs of the rollout")?;
    let corrected = correction.compute(tensors.old(), rollout, &tensors.mask)?;
    setup.importance_weights = corrected.weights;
    Ok(())
}

/// ROLL aggregates most metrics as it does the loss, and counts the ratios of masked positions too.
pub(super) fn metrics(
    case: &Case,
    outputs: Outputs,
    results: &Results,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<Outputs> {
    let mask = &results.mask;
    let (batch, width) = mask.dims()?;
    let sequences = case
        .config
        .optional_number("global_sequences")?
        .unwrap_or(batch as f64);
    let aggregate = |x: &Tensor| {
        let x = x.to_dtype(DType::F64)?;
        setup.loss.aggregation.apply(&x, mask, &setup.totals)
    };
    let terms = &results.output.tokens;
    let token_d = tensors.log_ratio()?;
    let unweighted = match &setup.importance_weights {
        Some(weights) => (&terms.surrogate * weights.to_dtype(DType::F32)?)?,
        None => terms.surrogate.clone(),
    };
    let mut outputs = outputs
        .out("approx_kl_k2", &aggregate(&(token_d.sqr()? * 0.5)?)?)
        .out("log_ratio", &aggregate(&token_d)?)
        .out("pg_loss", &aggregate(&unweighted)?)
        .out("weighted_pg_loss", &aggregate(&terms.policy)?);
    if let Some(clipped) = &terms.clipped {
        outputs = outputs.out("clip_fraction", &aggregate(clipped)?);
    }
    let reference = case.input("ref_log_probs")?;
    let kl = k3(Some(10.)).per_token(
        &mask.select(&tensors.log_probs)?,
        &mask.select(&reference)?,
        None,
    )?;
    outputs = outputs.out("kl_loss", &aggregate(&kl)?);

    // A sequence ratio stands at every position of its row, a token ratio only at its own.
    let d = terms.log_ratio.to_dtype(DType::F64)?;
    let everywhere = if setup.loss.importance_level == ImportanceLevel::Sequence {
        results
            .row_means(&d)?
            .broadcast_as((batch, width))?
            .contiguous()?
    } else {
        d
    };
    let ratio = everywhere.exp()?;
    if let Surrogate::Clip(clip) = &setup.loss.surrogate {
        let tokens = setup.totals.tokens;
        let fraction =
            |flags: &Tensor| -> Result<Tensor> { Ok((number(flags)?.sum_all()? / tokens)?) };
        let above = ratio.gt(1. + clip.high)?;
        let below = ratio.lt(1. - clip.low)?;
        outputs = outputs
            .out("ratio_above_fraction", &fraction(&above)?)
            .out("ratio_below_fraction", &fraction(&below)?)
            .out(
                "ratio_outside_fraction",
                &fraction(&above.maximum(&below)?)?,
            );
    }
    let counts = StepTotals {
        sequences,
        ..setup.totals
    };
    let ratio_mean = Aggregation::SeqMeanTokenMean.apply(&ratio, mask, &counts)?;
    let weights = match &setup.sample_weights {
        Some(weights) => weights.to_dtype(DType::F64)?,
        None => Tensor::ones(batch, DType::F64, ratio.device())?,
    };
    let valid = number(&mask.lengths(DType::F64)?.gt(0.)?)?.sum_all()?;
    let samples = if case.variant.starts_with("roll_pg") {
        batch as f64
    } else {
        sequences
    };
    outputs = outputs
        .out("ratio_mean", &ratio_mean)
        .out("ratio_max", &ratio.max_all()?)
        .out("ratio_min", &ratio.min_all()?)
        .out("sample_weights_max", &weights.max_all()?)
        .out("sample_weights_mean", &weights.mean_all()?)
        .out("sample_weights_min", &weights.min_all()?)
        .out("valid_samples", &valid)
        .out("valid_sample_ratio", &(&valid / samples)?)
        .number("total_samples", batch as f64)?;
    if let Some(weights) = &setup.importance_weights
        && let Some(max) = case.config.optional_number("rollout_correction_max")?
    {
        outputs = outputs.out(
            "rollout_correction_clip_fraction",
            &aggregate(&weights.ge(max)?)?,
        );
    }
    surrogate_metrics(outputs, results, setup, tensors, &aggregate)
}

/// What ROLL reports of single surrogates: fractions are of all positions, masked ones included.
fn surrogate_metrics(
    mut outputs: Outputs,
    results: &Results,
    setup: &Setup,
    tensors: &Tensors,
    aggregate: &dyn Fn(&Tensor) -> candle_core::Result<Tensor>,
) -> Result<Outputs> {
    let mean = |x: &Tensor| -> Result<Tensor> { Ok(number(x)?.mean_all()?) };
    let d = tensors.log_ratio()?;
    let ratio = d.exp()?;
    let advantages = tensors.token_advantages()?;
    match &setup.loss.surrogate {
        Surrogate::DetachedWeight(weight) => {
            let (min, max) = (
                weight.ratio_min.unwrap_or(0.),
                weight.ratio_max.unwrap_or(f64::MAX),
            );
            let (below, above) = (ratio.lt(min)?, ratio.gt(max)?);
            let clipped = ratio.clamp(min, max)?;
            for name in ["tis", "cispo"] {
                outputs = outputs
                    .out(&format!("{name}_lower_clipfrac"), &mean(&below)?)
                    .out(&format!("{name}_upper_clipfrac"), &mean(&above)?)
                    .out(
                        &format!("{name}_total_clipfrac"),
                        &mean(&below.maximum(&above)?)?,
                    );
            }
            outputs = outputs
                .out("tis_clipped_ratio_mean", &aggregate(&clipped)?)
                .out(
                    "cispo_clipped_ratio_mean",
                    &results.row_means(&clipped)?.mean_all()?,
                );
            if let Some(bounds) = weight.unified_mask {
                let positive = (ratio.gt(1. + bounds.high)? * advantages.gt(0.)?)?;
                let negative = (ratio.lt(1. - bounds.low)? * advantages.lt(0.)?)?;
                let kept = positive.maximum(&negative)?.eq(0u8)?;
                outputs = outputs
                    .out("cispo_kept_tokens", &mean(&kept)?)
                    .out("cispo_masked_positive_tokens", &mean(&positive)?)
                    .out("cispo_masked_negative_tokens", &mean(&negative)?);
            }
        }
        Surrogate::Topr(topr) => {
            let scores = tensors
                .scores
                .as_ref()
                .context("no scores")?
                .to_dtype(DType::F64)?;
            let (count, positive) = (scores.elem_count() as f64, number(&scores.gt(0.)?)?);
            let spread = scores.broadcast_sub(&scores.mean_keepdim(0)?)?;
            let std = (spread.sqr()?.sum_all()? / (count - 1.))?.sqrt()?;
            let column = |x: &Tensor| x.unsqueeze(1)?.broadcast_as(ratio.shape())?.contiguous();
            let (is_positive, is_negative) = (column(&positive)?, column(&(1. - &positive)?)?);
            let loss = results.output.tokens.surrogate.to_dtype(DType::F64)?;
            let positive_loss = aggregate(&(&loss * &is_positive)?)?;
            let negative_loss = aggregate(&(&loss * &is_negative)?)?;
            let above = (number(&ratio.gt(1.)?)? * &is_negative)?;
            let samples = positive.sum_all()?;
            outputs = outputs
                .out(
                    "topr_positive_loss",
                    &(&positive_loss / topr.positive_weight)?,
                )
                .out(
                    "topr_negative_loss",
                    &(&negative_loss / topr.negative_weight)?,
                )
                .out("topr_weighted_positive_loss", &positive_loss)
                .out("topr_weighted_negative_loss", &negative_loss)
                .out("topr_positive_samples", &samples)
                .out("topr_negative_samples", &(count - &samples)?)
                .out("topr_positive_ratio", &(&samples / count)?)
                .out("topr_negative_ratio", &((count - &samples)? / count)?)
                .out("topr_scores_mean", &scores.mean_all()?)
                .out("topr_scores_std", &std)
                .out("topr_negative_upper_clipfrac", &mean(&above)?)
                .out("topr_negative_total_clipfrac", &mean(&above)?)
                .number("topr_negative_lower_clipfrac", 0.)?;
        }
        Surrogate::SquaredLogRatio(penalty) => {
            let regulariser = (d.sqr()? * (0.5 * penalty.coef))?.mean_all()?;
            let gradient = (&advantages * &d)?.abs()?.mean_all()?;
            let log_ratio_mean = d.mean_all()?;
            let spread = d.broadcast_sub(&log_ratio_mean)?.sqr()?.sum_all()?;
            let std = (spread / (d.elem_count() as f64 - 1.))?.sqrt()?;
            outputs = outputs
                .out("kimi15_reg_ratio", &(&regulariser / &gradient)?)
                .out("kimi15_kl_reg_magnitude", &regulariser)
                .out("kimi15_policy_grad_magnitude", &gradient)
                .out("kimi15_log_ratio_mean", &log_ratio_mean)
                .out("kimi15_log_ratio_abs_mean", &d.abs()?.mean_all()?)
                .out("kimi15_log_ratio_std", &std);
        }
        _ => {}
    }
    Ok(outputs)
}

//! The losses of verl.

use anyhow::{Result, bail};
use candle_grpo_core::{Mask, MetricValues};
use candle_grpo_loss::surrogate::{
    ClipCov, DetachedWeight, Divergence, DivergenceMask, GeometricMean, KlCov, SoftGate,
    SquaredLogRatio,
};
use candle_grpo_loss::{EmptySequences, ImportanceLevel, PolicyLoss, Surrogate};

use super::numbers::{Numbers, flag};
use super::{Setup, Tensors, clip, metric, ratio_min};
use crate::aggregate::{Rows, aggregation};
use crate::case::{Case, Outputs, Ran};

pub(super) fn setup(case: &Case, tensors: &Tensors) -> Result<Setup> {
    let options = &case.config;
    let mask = Mask::new(&tensors.mask)?;
    let name = options.text("loss")?;
    let mut loss = PolicyLoss {
        surrogate: surrogate(case, &name)?,
        ..Default::default()
    };
    if ["gspo", "clip_cov", "kl_cov", "geo_mean", "dro"].contains(&name.as_str()) {
        loss.log_ratio_clamp = None;
    }
    if name == "gspo" {
        loss.importance_level = ImportanceLevel::SequenceToken;
        loss.allow_length_weighting = true;
    }
    let mode = options.text("aggregation")?;
    let (mode, rows) = match mode.as_str() {
        "mean_of_all_rows" => {
            loss.empty_sequences = EmptySequences::Include;
            ("seq_mean_token_mean", Rows::All)
        }
        mode => (mode, Rows::NonEmpty),
    };
    let (aggregation, totals) = aggregation(case, mode, &mask, rows)?;
    loss.aggregation = aggregation;
    Ok(Setup {
        factor: options.optional_number("dp_size")?.unwrap_or(1.),
        importance_weights: case.optional("rollout_weights"),
        ..Setup::new(loss, totals)
    })
}

/// The sampler's log-probs as the old ones, and a correction of the policy against them.
pub(super) fn bypass(case: &Case, tensors: &Tensors) -> Result<Ran> {
    let options = &case.config;
    let corrected = crate::rollout_correction::verl(case)?.compute(
        &tensors.log_probs.as_detached_tensor(),
        tensors.old(),
        &tensors.mask,
    )?;
    let tensors = &Tensors {
        mask: corrected.kept.clone(),
        ..tensors.clone()
    };
    let kept = Mask::new(&tensors.mask)?;
    let (surrogate, weights, log_ratio_clamp) = match options.text("loss")?.as_str() {
        "ppo_clip" => (clip(case)?.into(), None, Some(20.)),
        "reinforce" => {
            options.ignore(&["clip_low", "clip_high", "dual_clip"]);
            // The ratio is only in the metric.
            (Surrogate::PolicyGradient, corrected.weights, None)
        }
        other => bail!("unknown loss {other}"),
    };
    let mode = options.text("aggregation")?;
    let (aggregation, totals) = aggregation(case, &mode, &kept, Rows::NonEmpty)?;
    let setup = Setup {
        factor: options.number("dp_size")?,
        importance_weights: weights,
        ..Setup::new(
            PolicyLoss {
                surrogate,
                log_ratio_clamp,
                aggregation,
                ..PolicyLoss::default()
            },
            totals,
        )
    };
    let output = setup.compute(&setup.loss, tensors)?;
    let loss = (&output.loss * setup.factor)?;
    let outputs = Outputs::default()
        .out("loss", &loss)
        .gradients(&loss, &[("log_probs", &tensors.log_probs)])?;
    let metrics = output.metrics.to_host()?;
    let get = |name: &str| metric(&metrics, name);
    Ok(Ok(outputs
        .number("approx_kl", get("approx_kl"))?
        .number("clip_fraction", get("clip_fraction"))?
        .number(
            "clip_fraction_lower",
            get("dual_clip_fraction"),
        )?))
}

fn surrogate(case: &Case, name: &str) -> Result<Surrogate> {
    let options = &case.config;
    let number = |key: &str| options.number(key);
    Ok(match name {
        "ppo_clip" | "gspo" => clip(case)?.into(),
        "gpg" => Surrogate::PolicyGradient,
        "sapo" => SoftGate {
            tau_pos: number("tau_pos")?,
            tau_neg: number("tau_neg")?,
        }
        .into(),
        "cispo" => DetachedWeight {
            ratio_min: Some(ratio_min(number("clip_low")?)),
            ..DetachedWeight::at_most(1. + number("clip_high")?)
        }
        .into(),
        "geo_mean" => GeometricMean {
            low: number("clip_low")?,
            high: number("clip_high")?,
        }
        .into(),
        "clip_cov" => ClipCov {
            clip: clip(case)?,
            ratio: number("clip_cov_ratio")?,
            lower: number("clip_cov_lb")?,
            upper: number("clip_cov_ub")?,
        }
        .into(),
        "kl_cov" => KlCov {
            ratio: number("kl_cov_ratio")?,
            coef: number("ppo_kl_coef")?,
        }
        .into(),
        "dppo_tv" | "dppo_kl" => DivergenceMask {
            divergence: if name == "dppo_tv" {
                Divergence::TotalVariation
            } else {
                Divergence::BinaryKl
            },
            low: number("clip_low")?,
            high: number("clip_high")?,
            ratio_max: Some(number("ratio_max")?),
            ..DivergenceMask::default()
        }
        .into(),
        "dro" => SquaredLogRatio {
            coef: number("dro_beta")?,
        }
        .into(),
        other => bail!("unknown loss {other}"),
    })
}

pub(super) fn metrics(
    case: &Case,
    outputs: Outputs,
    metrics: &MetricValues,
    tensors: &Tensors,
) -> Result<Outputs> {
    let get = |name: &str| metric(metrics, name);
    let loss = case.config.text("loss")?;
    let (clipped, lower) = match loss.as_str() {
        "clip_cov" => (get("selected_fraction"), 0.),
        "dppo_tv" | "dppo_kl" => dropped_by_divergence(case, &loss, tensors)?,
        "geo_mean" => clipped_by_sign(case, tensors)?,
        _ => (get("clip_fraction"), get("dual_clip_fraction")),
    };
    outputs
        .number("approx_kl", get("approx_kl"))?
        .number("approx_kl_abs", get("approx_kl_abs"))?
        .number("clip_fraction", clipped)?
        .number("clip_fraction_lower", lower)
}

/// verl counts log-ratios outside the range on either side, by the sign of the advantage.
fn clipped_by_sign(case: &Case, tensors: &Tensors) -> Result<(f64, f64)> {
    let x = Numbers::read(tensors)?;
    let low = case.config.number("clip_low")?;
    let high = case.config.number("clip_high")?;
    let outside = |i: usize| x.log_ratio[i] > high || x.log_ratio[i] < -low;
    let clipped = x.map(|i| flag(outside(i) && x.advantages[i] > 0.));
    let lower = x.map(|i| flag(outside(i) && x.advantages[i] < 0.));
    Ok((x.mean(&clipped), x.mean(&lower)))
}

/// The fraction of dropped tokens, and of kept tokens whose ratio exceeds `ratio_max`.
///
/// verl treats an advantage of 0 as negative.
fn dropped_by_divergence(case: &Case, loss: &str, tensors: &Tensors) -> Result<(f64, f64)> {
    let x = Numbers::read(tensors)?;
    let low = case.config.number("clip_low")?;
    let high = case.config.number("clip_high")?;
    let ratio_max = case.config.number("ratio_max")?;
    let dropped = |i: usize| {
        let (p, q) = (x.log_probs[i].exp(), x.old_log_probs[i].exp());
        let distance = if loss == "dppo_tv" {
            (p - q).abs()
        } else {
            let others = ((1. - q + 1e-8) / (1. - p + 1e-8)).ln();
            q * (x.old_log_probs[i] - x.log_probs[i]) + (1. - q) * others
        };
        if x.advantages[i] > 0. {
            p > q && distance > high
        } else {
            p < q && distance > low
        }
    };
    let ratio = |i: usize| x.log_ratio[i].clamp(-20., 20.).exp();
    Ok((
        x.mean(&x.map(|i| flag(dropped(i)))),
        x.mean(&x.map(|i| flag(!dropped(i) && ratio(i) > ratio_max))),
    ))
}

//! The losses of verl.

use anyhow::{Result, bail};
use candle_core::Tensor;
use candle_grpo_core::Mask;
use candle_grpo_loss::{
    ClipCov, DetachedWeight, Divergence, DivergenceMask, EmptySequences, GeometricMean,
    ImportanceLevel, KlCov, PolicyLoss, SoftGate, SquaredLogRatio, Surrogate,
};

use super::{Results, Setup, Tensors, clip, number};
use crate::aggregate::{Rows, aggregation};
use crate::case::{Case, Outputs};

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
        factor: options.number("dp_size")?,
        importance_weights: case.optional("rollout_weights"),
        ..Setup::new(loss, totals)
    })
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
            ratio_min: Some(1. - number("clip_low")?),
            ratio_max: Some(1. + number("clip_high")?),
            unified_mask: None,
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
            ratio_max: number("ratio_max")?,
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
    results: &Results,
    tensors: &Tensors,
) -> Result<Outputs> {
    let get = |name: &str| results.metric(name);
    let (clipped, lower) = match case.config.text("loss")?.as_str() {
        "clip_cov" => (get("selected_fraction"), 0.),
        "dppo_tv" | "dppo_kl" => (get("clip_fraction"), get("ratio_max_fraction")),
        "geo_mean" => clipped_by_sign(case, results, tensors)?,
        _ => (get("clip_fraction"), get("dual_clip_fraction")),
    };
    outputs
        .number("approx_kl", get("approx_kl"))?
        .number("approx_kl_abs", get("approx_kl_abs"))?
        .number("clip_fraction", clipped)?
        .number("clip_fraction_lower", lower)
}

/// verl counts log-ratios outside the range on either side, by the sign of the advantage.
fn clipped_by_sign(case: &Case, results: &Results, tensors: &Tensors) -> Result<(f64, f64)> {
    let d = tensors.log_ratio()?;
    let (low, high) = (
        case.config.number("clip_low")?,
        case.config.number("clip_high")?,
    );
    let outside = number(&d.gt(high)?.maximum(&d.lt(-low)?)?)?;
    let advantages = tensors.token_advantages()?;
    let of = |sign: Tensor| -> Result<f64> { results.mean(&(&outside * number(&sign)?)?) };
    Ok((of(advantages.gt(0.)?)?, of(advantages.lt(0.)?)?))
}

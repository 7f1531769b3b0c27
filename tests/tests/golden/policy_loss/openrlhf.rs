//! The losses of OpenRLHF.

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_core::Mask;
use candle_grpo_loss::{
    FilterLevel, FilterStatistic, ImportanceLevel, ImportanceWeight, Outside, PolicyLoss,
    RolloutCorrection, RolloutFilter,
};

use super::{Results, Setup, Tensors, clip};
use crate::aggregate::{Rows, aggregation};
use crate::case::{Case, Outputs};

pub(super) fn setup(case: &Case, tensors: &Tensors) -> Result<Setup> {
    let options = &case.config;
    let mask = Mask::new(&tensors.mask)?;
    let mode = options.text("aggregation")?;
    let (aggregation, totals) = aggregation(case, &mode, &mask, Rows::NonEmpty)?;
    let level = match options.text("loss")?.as_str() {
        "ppo_clip" => ImportanceLevel::Token,
        "gspo" => ImportanceLevel::Sequence,
        other => bail!("unknown loss {other}"),
    };
    let loss = PolicyLoss {
        importance_level: level,
        log_ratio_clamp: (level == ImportanceLevel::Token).then_some(20.),
        surrogate: clip(case)?.into(),
        aggregation,
        ..Default::default()
    };
    let mut setup = Setup {
        factor: options.number("dp_size")?,
        ..Setup::new(loss, totals)
    };
    correct(case, tensors, &mut setup)?;
    Ok(setup)
}

/// A weight for each token, and a band on the ratio of the token or the geometric mean of the sequence.
fn correct(case: &Case, tensors: &Tensors, setup: &mut Setup) -> Result<()> {
    let options = &case.config;
    let level = options.text("correction_level")?;
    let gating = options.text("correction_gating")?;
    let mode = options.text("correction_mode")?;
    let band = options.get("correction_band");
    if level == "off" {
        return Ok(());
    }
    ensure!(gating == "ratio", "unknown correction_gating {gating}");
    let bound = |i: usize| band[i].as_f64().context("a bound of correction_band");
    let (min, max) = (bound(0)?, bound(1)?);
    let free = ImportanceWeight {
        min: None,
        max: None,
        ..ImportanceWeight::default()
    };
    let correction = match (level.as_str(), mode.as_str()) {
        ("token", "mask" | "clip") => RolloutCorrection {
            weight: Some(ImportanceWeight {
                min: Some(min),
                max: Some(max),
                outside: if mode == "mask" {
                    Outside::Mask
                } else {
                    Outside::Truncate
                },
                ..free
            }),
            ..Default::default()
        },
        ("seq", "mask") => RolloutCorrection {
            weight: Some(free),
            filters: vec![RolloutFilter {
                statistic: FilterStatistic::LogRatio,
                level: FilterLevel::SequenceMean,
                min: Some(min.ln()),
                max: Some(max.ln()),
            }],
            ..Default::default()
        },
        other => bail!("unknown correction {other:?}"),
    };
    let old = tensors.old_log_probs.as_ref().context("no old log-probs")?;
    let rollout = tensors
        .rollout_log_probs
        .as_ref()
        .context("no log-probs of the rollout")?;
    let corrected = correction.compute(old, rollout, &tensors.mask)?;
    setup.extra = corrected.metrics.to_host()?;
    setup.importance_weights = corrected.weights;
    setup.policy_mask = Some(corrected.kept);
    Ok(())
}

pub(super) fn metrics(
    outputs: Outputs,
    results: &Results,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<Outputs> {
    let extra = |name: &str| setup.extra.get(name).unwrap_or_default();
    outputs
        .number("approx_kl", results.mean(&tensors.log_ratio()?.neg()?)?)?
        .number("clip_fraction", results.metric("clip_fraction"))?
        .number("rollout_kl", extra("rollout_kl"))?
        .number(
            "filtered_fraction",
            extra("rollout_truncated_fraction") + extra("rollout_rejected_fraction"),
        )
}

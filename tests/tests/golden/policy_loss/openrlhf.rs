//! The losses of OpenRLHF.

use anyhow::{Context, Result, bail};
use candle_grpo_core::{Mask, MetricValues};
use candle_grpo_loss::correction::{
    FilterLevel, FilterStatistic, ImportanceWeight, OutOfBounds, RolloutFilter,
};
use candle_grpo_loss::{ImportanceLevel, PolicyLoss, RolloutCorrection};

use super::numbers::{Numbers, flag, mean, numbers};
use super::{Setup, Tensors, clip, metric};
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
        allow_length_weighting: true,
        ..Default::default()
    };
    let mut setup = Setup {
        factor: options.number("dp_size")?,
        ..Setup::new(loss, totals)
    };
    let correction = Correction::read(case)?;
    match (correction, level) {
        (None, _) => {}
        // The ratio corrects for the rollout; no weight and no band applies.
        (Some(_), ImportanceLevel::Sequence) => setup.against_rollout = true,
        (Some(correction), _) => correction.apply(tensors, &mut setup)?,
    }
    Ok(setup)
}

/// A correction for the rollout policy: a statistic per token or sequence must be within a band.
struct Correction {
    by_sequence: bool,
    gating: Gating,
    /// True if weights outside the band are clamped instead of dropped.
    clamps: bool,
    min: f64,
    max: f64,
}

#[derive(Clone, Copy, PartialEq)]
enum Gating {
    Ratio,
    BinaryKl,
    TotalVariation,
}

impl Correction {
    fn read(case: &Case) -> Result<Option<Self>> {
        let options = &case.config;
        let level = options.text_or("correction_level", "off")?;
        let gating = options.text_or("correction_gating", "ratio")?;
        let mode = options.text_or("correction_mode", "mask")?;
        let band = options.get("correction_band");
        let by_sequence = match level.as_str() {
            "off" => return Ok(None),
            "token" => false,
            "seq" => true,
            other => bail!("unknown correction_level {other}"),
        };
        let gating = match gating.as_str() {
            "ratio" => Gating::Ratio,
            "binary_kl" => Gating::BinaryKl,
            "tv" => Gating::TotalVariation,
            other => bail!("unknown correction_gating {other}"),
        };
        let clamps = match mode.as_str() {
            "mask" => false,
            "clip" => true,
            other => bail!("unknown correction_mode {other}"),
        };
        // A divergence may have its upper bound alone, as a number or as the last of the band.
        let last = band.as_array().map_or(Some(&band), |band| band.last());
        let max = last
            .and_then(serde_json::Value::as_f64)
            .context("no upper bound in correction_band")?;
        let min = match band.as_array() {
            Some(band) if band.len() > 1 => band[0].as_f64().unwrap_or(f64::NEG_INFINITY),
            _ => f64::NEG_INFINITY,
        };
        Ok(Some(Self {
            by_sequence,
            gating,
            clamps,
            min,
            max,
        }))
    }

    fn apply(&self, tensors: &Tensors, setup: &mut Setup) -> Result<()> {
        let weight = ImportanceWeight {
            min: None,
            max: None,
            ..ImportanceWeight::default()
        };
        let bounded = ImportanceWeight {
            min: Some(self.min.max(0.)),
            max: Some(self.max),
            out_of_bounds: if self.clamps {
                OutOfBounds::Truncate
            } else {
                OutOfBounds::Mask
            },
            ..weight
        };
        let filter = RolloutFilter {
            statistic: match self.gating {
                Gating::Ratio => FilterStatistic::LogRatio,
                Gating::BinaryKl => FilterStatistic::BinaryKl,
                Gating::TotalVariation => FilterStatistic::AbsoluteProbabilityDifference,
            },
            level: if self.by_sequence {
                FilterLevel::SequenceMean
            } else {
                FilterLevel::Token
            },
            min: (self.gating == Gating::Ratio && self.min > 0.).then(|| self.min.ln()),
            max: Some(if self.gating == Gating::Ratio {
                self.max.ln()
            } else {
                self.max
            }),
        };
        let correction = if self.gating == Gating::Ratio && !self.by_sequence {
            RolloutCorrection {
                weight: Some(bounded),
                filters: Vec::new(),
                log_ratio_clamp: None,
                second_moment: None,
            }
        } else {
            RolloutCorrection {
                weight: Some(weight),
                filters: vec![filter],
                log_ratio_clamp: None,
                second_moment: None,
            }
        };
        let old = tensors.old();
        let rollout = tensors.rollout_log_probs.as_ref();
        let rollout = rollout.context("no log-probs of the rollout")?;
        let corrected = correction.compute(old, rollout, &tensors.mask)?;
        setup.importance_weights = corrected.weights;
        setup.policy_mask = Some(corrected.kept);
        Ok(())
    }

    /// The fraction of tokens, or of sequences, outside the band.
    fn filtered(&self, x: &Numbers, rollout: &[f64]) -> f64 {
        let clamped = |log_prob: f64| log_prob.exp().clamp(1e-6, 1. - 1e-6);
        let statistic = x.map(|i| {
            let (p, q) = (clamped(rollout[i]), clamped(x.old_log_probs[i]));
            match self.gating {
                Gating::Ratio => x.old_log_probs[i] - rollout[i],
                Gating::BinaryKl => p * (p / q).ln() + (1. - p) * ((1. - p) / (1. - q)).ln(),
                Gating::TotalVariation => (p - q).abs(),
            }
        });
        // A sequence without a token has a statistic of 0 / 0, which is outside every band.
        let outside = |statistic: f64| {
            let statistic = match self.gating {
                Gating::Ratio => statistic.exp(),
                _ => statistic,
            };
            flag(!(statistic >= self.min && statistic <= self.max))
        };
        if self.by_sequence {
            let means = x.row_means(&statistic).into_iter();
            let outside: Vec<f64> = means.map(|m| outside(m.unwrap_or(f64::NAN))).collect();
            mean(&outside)
        } else {
            x.mean(&x.map(|i| outside(statistic[i])))
        }
    }
}

pub(super) fn metrics(
    case: &Case,
    outputs: Outputs,
    metrics: &MetricValues,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<Outputs> {
    let x = Numbers::read(tensors)?;
    let outputs = outputs
        .number("approx_kl", -x.mean(&x.log_ratio))?
        .number("clip_fraction", metric(metrics, "clip_fraction"))?;
    let (Some(correction), Some(rollout)) = (Correction::read(case)?, &tensors.rollout_log_probs)
    else {
        return Ok(outputs);
    };
    if setup.against_rollout {
        return Ok(outputs);
    }
    let rollout = numbers(rollout)?;
    let drift = x.map(|i| rollout[i] - x.old_log_probs[i]);
    outputs
        .number("rollout_kl", x.mean(&drift))?
        .number("filtered_fraction", correction.filtered(&x, &rollout))
}

//! The losses of ROLL.

use anyhow::{Context, Result, bail};
use candle_core::Tensor;
use candle_grpo_core::Mask;
use candle_grpo_loss::correction::ImportanceWeight;
use candle_grpo_loss::surrogate::{DetachedWeight, PositiveIf, SquaredLogRatio, Topr, UnifiedMask};
use candle_grpo_loss::{
    Aggregation, Clip, ImportanceLevel, KlLoss, PolicyLoss, RolloutCorrection, StepTotals,
    Surrogate,
};

use super::numbers::{Numbers, flag, mean, numbers, std};
use super::{EntropyBonus, Setup, Tensors, clip, k3, level, ratio_min};
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
    if aggregation == Aggregation::TokenMean && setup.loss.entropy_coef > 0. {
        // ROLL's token mean sums all positions, so that masked ones have a gradient.
        setup.entropy_bonus = Some(EntropyBonus {
            loss: PolicyLoss {
                loss_coef: 0.,
                entropy_coef: setup.loss.entropy_coef,
                aggregation,
                ..Default::default()
            },
            totals,
            mask: tensors.mask.ones_like()?,
            entropy_mask: None,
            factor: 1.,
        });
        setup.loss.entropy_coef = 0.;
    }
    if options.flag("length_weight")? {
        let weights = length_weights(&Numbers::read(tensors)?);
        setup.sample_weights = Some(Tensor::new(weights, tensors.mask.device())?);
    }
    if let Some(correction) = correction(case)? {
        let rollout = tensors.rollout_log_probs.as_ref();
        let rollout = rollout.context("no log-probs of the rollout")?;
        let corrected = correction.compute(tensors.old(), rollout, &tensors.mask)?;
        setup.importance_weights = corrected.weights;
    }
    Ok(setup)
}

fn surrogate(case: &Case) -> Result<Surrogate> {
    let options = &case.config;
    let number = |key: &str| options.number(key);
    Ok(match options.text("loss")?.as_str() {
        "ppo_clip" => clip(case)?.into(),
        "vanilla" => Surrogate::PolicyGradient,
        "tis" => DetachedWeight {
            ratio_min: Some(number("tis_lower_bound")?.max(0.)),
            allow_max_below_one: true,
            ..DetachedWeight::at_most(number("tis_upper_bound")?)
        }
        .into(),
        "cispo" => {
            let (low, high) = (number("cispo_epsilon_low")?, number("cispo_epsilon_high")?);
            DetachedWeight {
                ratio_min: Some(ratio_min(low)),
                unified_mask: options
                    .flag("cispo_use_unified_mask")?
                    .then_some(UnifiedMask { low, high }),
                ..DetachedWeight::at_most(1. + high)
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

/// Weights `1.5 - (n - min n) / (max n - min n)` by the number n of tokens, scaled to the mean 1.
fn length_weights(x: &Numbers) -> Vec<f64> {
    let lengths = x.row_sums(&x.map(|_| 1.));
    let min = lengths.iter().copied().fold(f64::INFINITY, f64::min);
    let max = lengths.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights = lengths.iter().map(|n| 1.5 - (n - min) / (max - min + 1e-8));
    let weights: Vec<f64> = weights.collect();
    let mean = mean(&weights);
    weights.iter().map(|w| w / mean).collect()
}

/// The level of the correction for the rollout, if there is one.
fn correction_level(case: &Case) -> Result<Option<ImportanceLevel>> {
    Ok(
        match case.config.text_or("rollout_correction", "off")?.as_str() {
            "off" => None,
            "token" => Some(ImportanceLevel::Token),
            "segment" => Some(ImportanceLevel::Segment),
            "geometric" => Some(ImportanceLevel::Sequence),
            "sequence" => Some(ImportanceLevel::SequenceProduct),
            other => bail!("unknown rollout_correction {other}"),
        },
    )
}

/// `exp(old - rollout)` at a level, at most a maximum.
fn correction(case: &Case) -> Result<Option<RolloutCorrection>> {
    let max = case.config.optional_number("rollout_correction_max")?;
    Ok(correction_level(case)?.map(|level| RolloutCorrection {
        weight: Some(ImportanceWeight {
            level,
            max,
            ..Default::default()
        }),
        filters: Vec::new(),
        log_ratio_clamp: None,
        second_moment: None,
    }))
}

/// ROLL aggregates most metrics as it does the loss, and counts the ratios of masked positions too.
pub(super) fn metrics(
    case: &Case,
    outputs: Outputs,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<Outputs> {
    let x = Numbers::read(tensors)?;
    let rows = x.rows as f64;
    let sequences = case
        .config
        .optional_number("global_sequences")?
        .unwrap_or(rows);
    let roll = Roll {
        x: &x,
        aggregation: setup.loss.aggregation,
        totals: setup.totals,
        sequences,
    };
    let d = &x.log_ratio;
    let reference = numbers(&case.input("ref_log_probs")?)?;
    let k3 = x.map(|i| {
        let d = reference[i] - x.log_probs[i];
        (d.exp() - d - 1.).clamp(-10., 10.)
    });
    let mut outputs = policy_terms(outputs, setup, tensors)?
        .number(
            "approx_kl_k2",
            roll.aggregate(&x.map(|i| d[i] * d[i] / 2.))?,
        )?
        .number("log_ratio", roll.aggregate(d)?)?
        .number("kl_loss", roll.aggregate(&k3)?)?;

    let ratio: Vec<f64> = x
        .at_level(d, setup.loss.importance_level)
        .into_iter()
        .map(f64::exp)
        .collect();
    let (max, min) = x.extremes(&ratio);
    let lengths = x.row_sums(&x.map(|_| 1.));
    let valid = lengths.iter().filter(|n| **n > 0.).count() as f64;
    let samples = if case.variant.starts_with("roll_pg") {
        rows
    } else {
        sequences
    };
    let weights = match &setup.sample_weights {
        Some(weights) => numbers(weights)?,
        None => vec![1.; x.rows],
    };
    outputs = outputs
        .number("ratio_mean", roll.seq_mean_token_mean(&ratio)?)?
        .number("ratio_max", max.max(0.))?
        .number("ratio_min", min.min(1e10))?
        .number(
            "sample_weights_max",
            weights.iter().copied().fold(f64::MIN, f64::max),
        )?
        .number("sample_weights_mean", mean(&weights))?
        .number(
            "sample_weights_min",
            weights.iter().copied().fold(f64::MAX, f64::min),
        )?
        .number("valid_samples", valid)?
        .number("valid_sample_ratio", valid / samples)?
        .number("total_samples", rows)?;
    outputs = correction_metrics(case, outputs, &roll, tensors)?;
    match &setup.loss.surrogate {
        Surrogate::Clip(clip) => clip_metrics(outputs, &roll, clip, &ratio),
        Surrogate::DetachedWeight(weight) => detached_metrics(case, outputs, &roll, weight),
        Surrogate::Topr(topr) => topr_metrics(outputs, &roll, topr, tensors),
        Surrogate::SquaredLogRatio(penalty) => kimi_metrics(outputs, &x, penalty),
        _ => Ok(outputs),
    }
}

/// ROLL's aggregations.
struct Roll<'a> {
    x: &'a Numbers,
    aggregation: Aggregation,
    totals: StepTotals,
    sequences: f64,
}

impl Roll<'_> {
    fn apply(&self, aggregation: Aggregation, totals: &StepTotals, values: &[f64]) -> Result<f64> {
        let (values, mask) = self.x.tensor(values)?;
        Ok(aggregation.apply(&values, &mask, totals)?.to_scalar()?)
    }

    /// The aggregation of the loss.
    fn aggregate(&self, values: &[f64]) -> Result<f64> {
        self.apply(self.aggregation, &self.totals, values)
    }

    fn seq_mean_token_mean(&self, values: &[f64]) -> Result<f64> {
        let totals = StepTotals {
            sequences: self.sequences,
            ..self.totals
        };
        self.apply(Aggregation::SeqMeanTokenMean, &totals, values)
    }

    /// The sum over all positions, masked ones included, divided by the number of tokens.
    fn unmasked_token_mean(&self, values: &[f64]) -> f64 {
        values.iter().sum::<f64>() / self.totals.tokens
    }
}

/// The policy term without and with sample weights.
fn policy_terms(outputs: Outputs, setup: &Setup, tensors: &Tensors) -> Result<Outputs> {
    let policy_only = PolicyLoss {
        kl: None,
        entropy_coef: 0.,
        loss_coef: 1.,
        ..setup.loss.clone()
    };
    let unweighted = Setup {
        importance_weights: setup.importance_weights.clone(),
        ..Setup::new(policy_only.clone(), setup.totals)
    };
    let pg_loss = unweighted.compute(&policy_only, tensors)?.loss;
    let weighted = setup.compute(&policy_only, tensors)?.loss;
    Ok(outputs
        .out("pg_loss", &pg_loss)
        .out("weighted_pg_loss", &weighted))
}

/// The weights above the maximum. Padding counts: a weight of the sequence is repeated there,
/// others are 1.
fn correction_metrics(
    case: &Case,
    outputs: Outputs,
    roll: &Roll,
    tensors: &Tensors,
) -> Result<Outputs> {
    let max = case.config.optional_number("rollout_correction_max")?;
    let (Some(level), Some(max)) = (correction_level(case)?, max) else {
        return Ok(outputs);
    };
    let x = roll.x;
    let rollout = tensors.rollout_log_probs.as_ref();
    let rollout = numbers(rollout.context("no log-probs of the rollout")?)?;
    let d = x.map(|i| {
        if x.mask[i] {
            x.old_log_probs[i] - rollout[i]
        } else {
            0.
        }
    });
    let above: Vec<f64> = x
        .at_level(&d, level)
        .into_iter()
        .map(|d| flag(d.exp() > max))
        .collect();
    outputs.number(
        "rollout_correction_clip_fraction",
        roll.unmasked_token_mean(&above),
    )
}

fn clip_metrics(outputs: Outputs, roll: &Roll, clip: &Clip, ratio: &[f64]) -> Result<Outputs> {
    let x = roll.x;
    let above = x.map(|i| flag(ratio[i] > 1. + clip.high));
    let below = x.map(|i| flag(ratio[i] < 1. - clip.low));
    let clipped = x.map(|i| {
        let a = x.advantages[i];
        flag(ratio[i].clamp(1. - clip.low, 1. + clip.high) * a < ratio[i] * a)
    });
    let (above, below) = (
        roll.unmasked_token_mean(&above),
        roll.unmasked_token_mean(&below),
    );
    outputs
        .number("clip_fraction", roll.aggregate(&clipped)?)?
        .number("ratio_above_fraction", above)?
        .number("ratio_below_fraction", below)?
        .number("ratio_outside_fraction", above + below)
}

/// Clip fractions are means over all positions, masked ones included.
fn detached_metrics(
    case: &Case,
    outputs: Outputs,
    roll: &Roll,
    weight: &DetachedWeight,
) -> Result<Outputs> {
    let x = roll.x;
    let ratio = x.map(|i| x.log_ratio[i].exp());
    let min = weight.ratio_min.unwrap_or(0.);
    let max = weight.ratio_max.unwrap_or(f64::INFINITY);
    let below = mean(&x.map(|i| flag(ratio[i] < min)));
    let above = mean(&x.map(|i| flag(ratio[i] > max)));
    let clipped = x.map(|i| ratio[i].max(min).min(max));
    let clipped_means = x
        .row_means(&clipped)
        .into_iter()
        .map(Option::unwrap_or_default);
    let clipped_means: Vec<f64> = clipped_means.collect();
    let name = case.config.text("loss")?;
    let outputs = outputs
        .number(&format!("{name}_lower_clipfrac"), below)?
        .number(&format!("{name}_upper_clipfrac"), above)?
        .number(&format!("{name}_total_clipfrac"), below + above)?
        .number(
            "tis_clipped_ratio_mean",
            roll.seq_mean_token_mean(&clipped)?,
        )?
        .number("cispo_clipped_ratio_mean", mean(&clipped_means))?;
    let Some(bounds) = weight.unified_mask else {
        return Ok(outputs);
    };
    let a = &x.advantages;
    let positive = mean(&x.map(|i| flag(ratio[i] > 1. + bounds.high && a[i] > 0.)));
    let negative = mean(&x.map(|i| flag(ratio[i] < 1. - bounds.low && a[i] < 0.)));
    outputs
        .number("cispo_kept_tokens", 1. - positive - negative)?
        .number("cispo_masked_positive_tokens", positive)?
        .number("cispo_masked_negative_tokens", negative)
}

fn topr_metrics(outputs: Outputs, roll: &Roll, topr: &Topr, tensors: &Tensors) -> Result<Outputs> {
    let x = roll.x;
    let scores = numbers(tensors.scores.as_ref().context("no scores")?)?;
    let is_positive = |i: usize| scores[i / x.width] > 0.;
    let ratio = |i: usize| x.log_ratio[i].exp();
    let gain = |i: usize| x.advantages[i] * x.log_probs[i];
    let positive = x.map(|i| if is_positive(i) { -gain(i) } else { 0. });
    let negative = x.map(|i| {
        if is_positive(i) {
            0.
        } else {
            -ratio(i).min(1.) * gain(i)
        }
    });
    let (positive, negative) = (roll.aggregate(&positive)?, roll.aggregate(&negative)?);
    let above = mean(&x.map(|i| flag(ratio(i) > 1. && !is_positive(i))));
    let count = scores.len() as f64;
    let samples = scores.iter().filter(|score| **score > 0.).count() as f64;
    outputs
        .number("topr_positive_loss", positive)?
        .number("topr_negative_loss", negative)?
        .number(
            "topr_weighted_positive_loss",
            topr.positive_weight * positive,
        )?
        .number(
            "topr_weighted_negative_loss",
            topr.negative_weight * negative,
        )?
        .number("topr_positive_samples", samples)?
        .number("topr_negative_samples", count - samples)?
        .number("topr_positive_ratio", samples / count)?
        .number("topr_negative_ratio", (count - samples) / count)?
        .number("topr_scores_mean", mean(&scores))?
        .number("topr_scores_std", std(&scores))?
        .number("topr_negative_upper_clipfrac", above)?
        .number("topr_negative_total_clipfrac", above)?
        .number("topr_negative_lower_clipfrac", 0.)
}

/// Means over all positions, masked ones included.
fn kimi_metrics(outputs: Outputs, x: &Numbers, penalty: &SquaredLogRatio) -> Result<Outputs> {
    let d = x.map(|i| (x.log_ratio[i].exp() + 1e-8).ln());
    let regularizer = mean(&x.map(|i| penalty.coef * d[i] * d[i] / 2.));
    let gradient = mean(&x.map(|i| (x.advantages[i] * d[i]).abs()));
    outputs
        .number("kimi15_reg_ratio", regularizer / (gradient + 1e-8))?
        .number("kimi15_kl_reg_magnitude", regularizer)?
        .number("kimi15_policy_grad_magnitude", gradient)?
        .number("kimi15_log_ratio_mean", mean(&d))?
        .number("kimi15_log_ratio_abs_mean", mean(&x.map(|i| d[i].abs())))?
        .number("kimi15_log_ratio_std", std(&d))
}

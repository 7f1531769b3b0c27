//! The losses of TRL and Liger, which share their options.

use anyhow::{Context, Result, bail};
use candle_grpo_core::selection::top_entropy_tokens;
use candle_grpo_core::{Mask, MetricValues};
use candle_grpo_loss::experimental::Vespo;
use candle_grpo_loss::surrogate::{DetachedWeight, SoftGate};
use candle_grpo_loss::{
    Aggregation, BiasCorrection, Clip, EmptySequences, EntropyTokens, ImportanceLevel, KlLoss,
    PolicyLoss, StepTotals, Surrogate,
};

use super::numbers::{Numbers, flag, mean, numbers};
use super::{EntropyBonus, Setup, Tensors, clip, k3, level, metric};
use crate::case::{Case, Outputs};

/// Losses whose denominator spans the generation batch.
fn spans_generation_batch(loss_type: &str) -> bool {
    ["dapo", "cispo", "vespo"].contains(&loss_type)
}

pub(crate) fn setup(case: &Case, tensors: &Tensors) -> Result<Setup> {
    let options = &case.config;
    let loss_type = options.text("loss_type")?;
    let local = StepTotals::count(&tensors.mask)?;
    let mut totals = local;
    let aggregation = match loss_type.as_str() {
        "grpo" | "sapo" | "rloo" => Aggregation::SeqMeanTokenMean,
        "bnpo" | "dapo" | "cispo" | "vespo" => Aggregation::TokenMean,
        "dr_grpo" => Aggregation::SeqMeanTokenSumNorm {
            length: options.number("max_completion_length")?,
        },
        "luspo" => Aggregation::SeqMeanTokenSum,
        other => bail!("unknown loss_type {other}"),
    };
    let global_tokens = options.optional_number("global_tokens")?;
    if spans_generation_batch(&loss_type)
        && let Some(tokens) = global_tokens
    {
        totals.tokens = tokens;
    }
    let beta = options.optional_number("beta")?.unwrap_or(0.);
    let bias_correction = if options.flag("bias_corrected_kl")? {
        BiasCorrection::ImportanceLevel
    } else {
        BiasCorrection::Off
    };
    let surrogate = surrogate(case, &loss_type)?;
    let is_vespo = matches!(surrogate, Surrogate::Vespo(_));
    let level = level(case)?;
    let loss = PolicyLoss {
        importance_level: level,
        allow_length_weighting: true,
        // VESPO clamps the log-ratio of each token.
        log_ratio_clamp: is_vespo.then_some(20.),
        surrogate,
        off_policy_threshold: options.optional_number("off_policy_mask_threshold")?,
        kl: (beta != 0.).then(|| KlLoss {
            bias_correction,
            ..KlLoss::new(beta, k3(None))
        }),
        aggregation,
        empty_sequences: EmptySequences::Include,
        ..Default::default()
    };
    let accumulation = options
        .optional_number("gradient_accumulation_steps")?
        .unwrap_or(1.);
    let per_generation = options
        .optional_number("steps_per_generation")?
        .unwrap_or(1.);
    let mut setup = Setup {
        importance_weights: case.optional("rollout_weights"),
        factor: if spans_generation_batch(&loss_type) {
            per_generation / accumulation
        } else {
            1. / accumulation
        },
        ..Setup::new(loss, totals)
    };
    let quantile = options
        .optional_number("top_entropy_quantile")?
        .unwrap_or(1.);
    if quantile < 1. {
        let entropies = tensors.entropies.as_ref().context("no entropies")?;
        let top = top_entropy_tokens(entropies, &Mask::new(&tensors.mask)?, quantile)?;
        setup.policy_mask = Some(top.selected().clone());
    }
    let entropy_coef = options.optional_number("entropy_coef")?.unwrap_or(0.);
    if entropy_coef != 0. {
        setup.entropy_bonus = Some(entropy_bonus(
            &setup,
            tensors,
            local,
            entropy_coef,
            accumulation,
        )?);
    }
    setup.defect = defect(case, &setup, &loss_type, beta);
    Ok(setup)
}

/// The mean entropy of the local tokens that the bonus acts on, divided by the accumulation steps
/// alone.
fn entropy_bonus(
    setup: &Setup,
    tensors: &Tensors,
    local: StepTotals,
    entropy_coef: f64,
    accumulation: f64,
) -> Result<EntropyBonus> {
    let entropy_mask = setup.policy_mask.clone();
    let totals = match &entropy_mask {
        Some(mask) => local.with_entropy_mask(mask)?,
        None => local,
    };
    Ok(EntropyBonus {
        loss: PolicyLoss {
            loss_coef: 0.,
            entropy_coef,
            entropy_tokens: match entropy_mask {
                Some(_) => EntropyTokens::TopEntropy,
                None => EntropyTokens::All,
            },
            aggregation: Aggregation::TokenMean,
            ..Default::default()
        },
        totals,
        mask: tensors.mask.clone(),
        entropy_mask,
        factor: 1. / accumulation,
    })
}

fn defect(case: &Case, setup: &Setup, loss_type: &str, beta: f64) -> Option<String> {
    let totals = setup.totals;
    if loss_type == "rloo" && totals.sequences < totals.rows {
        return Some(
            "TRL's RLOO counts the advantage of a sequence without a token in the loss".to_owned(),
        );
    }
    let weights = setup.importance_weights.as_ref();
    let one_number = setup.loss.importance_level == ImportanceLevel::Sequence
        && beta == 0.
        && weights.is_none_or(|w| w.dims().last() == Some(&1));
    if case.variant == "liger_luspo" && !one_number {
        return Some(
            "Liger's luspo gives a gradient to masked positions unless the loss is one number per sequence"
                .to_owned(),
        );
    }
    None
}

fn surrogate(case: &Case, loss_type: &str) -> Result<Surrogate> {
    let options = &case.config;
    let number = |key: &str| options.number(key);
    Ok(match loss_type {
        "sapo" => {
            options.ignore(&["clip_low", "clip_high", "delta"]);
            SoftGate {
                tau_pos: number("tau_pos")?,
                tau_neg: number("tau_neg")?,
            }
            .into()
        }
        "cispo" => {
            options.ignore(&["clip_low", "delta"]);
            DetachedWeight {
                // TRL's default bound is 0.2.
                allow_max_below_one: true,
                ..DetachedWeight::at_most(cispo_bound(case)?)
            }
            .into()
        }
        "vespo" => {
            options.ignore(&["clip_low", "clip_high", "delta"]);
            let lambda = |key: &str| Ok::<f64, anyhow::Error>(number(key)?.max(1e-4));
            Vespo {
                k_pos: number("k_pos")?,
                lambda_pos: lambda("lambda_pos")?,
                k_neg: number("k_neg")?,
                lambda_neg: lambda("lambda_neg")?,
            }
            .into()
        }
        _ => clip(case)?.into(),
    })
}

fn cispo_bound(case: &Case) -> Result<f64> {
    let high = case.config.number("clip_high")?;
    Ok(if case.config.flag("clip_high_is_absolute")? {
        high
    } else {
        1. + high
    })
}

pub(crate) fn metrics(
    case: &Case,
    outputs: Outputs,
    metrics: &MetricValues,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<Outputs> {
    let mut outputs = outputs
        .number("kl", metric(metrics, "kl"))?
        .number("entropy", metric(metrics, "entropy"))?;
    if case.expects("out.policy_loss") {
        // Logged before the division by accumulation, unless the denominator spans the generation
        // batch.
        let loss_type = case.config.text("loss_type")?;
        let factor = if spans_generation_batch(&loss_type) {
            setup.factor
        } else {
            1.
        };
        let loss = setup.compute(&setup.loss, tensors)?.loss;
        let coef = setup
            .entropy_bonus
            .as_ref()
            .map_or(0., |b| b.loss.entropy_coef);
        outputs = outputs
            .out("policy_loss", &(loss * factor)?)
            .number("entropy_coef", coef)?;
    }
    let x = Numbers::read(tensors)?;
    if let Surrogate::Vespo(vespo) = &setup.loss.surrogate {
        outputs = outputs.number("vespo_weight_mean", vespo_weight_mean(&x, vespo, setup)?)?;
    }
    let flags = Flags::new(case, &x, setup)?;
    flags.metrics(outputs, &x)
}

/// The weight phi is one number per sequence if the advantage is: its mean is then over all
/// sequences.
fn vespo_weight_mean(x: &Numbers, vespo: &Vespo, setup: &Setup) -> Result<f64> {
    let min = 1e-8f64.ln();
    let mut log_weights = x.row_sums(&x.map(|i| x.log_ratio[i].clamp(-20., 20.)));
    if let Some(weights) = &setup.importance_weights {
        let logs = numbers(weights)?
            .into_iter()
            .map(|w| w.ln().clamp(min, 20.));
        let logs: Vec<f64> = logs.collect();
        let per_row = if logs.len() == x.rows {
            logs
        } else {
            x.row_sums(&logs)
        };
        for (sum, log) in log_weights.iter_mut().zip(per_row) {
            *sum += log;
        }
    }
    let phi = x.map(|i| {
        let log_weight = log_weights[i / x.width].clamp(min, 20.);
        let (k, lambda) = if x.advantages[i] >= 0. {
            (vespo.k_pos, vespo.lambda_pos)
        } else {
            (vespo.k_neg, vespo.lambda_neg)
        };
        let phi = (lambda + k * log_weight - lambda * log_weight.exp()).exp();
        if phi.is_finite() { phi } else { 0. }
    });
    Ok(if x.one_advantage {
        let first: Vec<f64> = phi.chunks(x.width).map(|row| row[0]).collect();
        mean(&first)
    } else {
        x.mean(&phi)
    })
}

/// The positions whose ratio is outside the range on the side that the sign of the advantage makes
/// matter.
struct Flags {
    low: Vec<f64>,
    high: Vec<f64>,
    /// True if there is one flag per sequence, so that metrics are means over sequences.
    by_sequence: bool,
}

impl Flags {
    fn new(case: &Case, x: &Numbers, setup: &Setup) -> Result<Self> {
        let level = setup.loss.importance_level;
        let is_liger = case.variant.starts_with("liger");
        let log_ratio = x.at_level(&x.log_ratio, level);
        // TRL takes the flags after the two-sided bound, Liger before.
        let delta = case.config.optional_number("delta")?.filter(|_| !is_liger);
        let (min, max, delta) = match &setup.loss.surrogate {
            Surrogate::Clip(Clip { low, high, .. }) => (1. - low, 1. + high, delta),
            Surrogate::DetachedWeight(_) => (0., cispo_bound(case)?, None),
            _ => (0., f64::INFINITY, None),
        };
        let ratio = |i: usize| log_ratio[i].exp().min(delta.unwrap_or(f64::INFINITY));
        Ok(Self {
            low: x.map(|i| flag(ratio(i) < min && x.advantages[i] < 0.)),
            high: x.map(|i| flag(ratio(i) > max && x.advantages[i] > 0.)),
            by_sequence: level != ImportanceLevel::Token && !is_liger && x.one_advantage,
        })
    }

    fn metrics(&self, outputs: Outputs, x: &Numbers) -> Result<Outputs> {
        let (low, high, lows, highs) = if self.by_sequence {
            let per_row =
                |flags: &[f64]| -> Vec<f64> { flags.chunks(x.width).map(|row| row[0]).collect() };
            let (lows, highs) = (per_row(&self.low), per_row(&self.high));
            (mean(&lows), mean(&highs), lows, highs)
        } else {
            // Sequences without a token have no fraction.
            let per_row = |flags: &[f64]| x.row_means(flags).into_iter().flatten().collect();
            let (lows, highs): (Vec<f64>, Vec<f64>) = (per_row(&self.low), per_row(&self.high));
            (x.mean(&self.low), x.mean(&self.high), lows, highs)
        };
        outputs
            .number("clip_fraction", low + high)?
            .number("clip_fraction_cispo", high)?
            .number("clip_fraction_low", low)?
            .number("clip_fraction_high", high)?
            .number(
                "clip_fraction_low_min",
                lows.into_iter().fold(f64::INFINITY, f64::min),
            )?
            .number(
                "clip_fraction_high_max",
                highs.into_iter().fold(f64::NEG_INFINITY, f64::max),
            )
    }
}

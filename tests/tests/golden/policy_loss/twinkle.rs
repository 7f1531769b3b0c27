//! The losses of twinkle.

use anyhow::{Result, bail};
use candle_grpo_loss::surrogate::{DetachedWeight, SoftGate};
use candle_grpo_loss::{
    Aggregation, EmptySequences, ImportanceLevel, KlLoss, PolicyLoss, StepTotals,
};

use super::numbers::{Numbers, flag};
use super::{Setup, Tensors, clip, k3, level, metric};
use crate::case::{Case, Outputs};

pub(super) fn setup(case: &Case) -> Result<Setup> {
    let options = &case.config;
    let mut totals = StepTotals::count(&case.input("mask")?)?;
    if let Some(tokens) = options.optional_number("global_tokens")? {
        totals.tokens = tokens;
    }
    let loss_type = options.text("loss_type")?;
    let aggregation = match loss_type.as_str() {
        "grpo" | "gspo" | "sapo" => Aggregation::SeqMeanTokenMean,
        "bnpo" | "cispo" => Aggregation::TokenMean,
        "dr_grpo" => Aggregation::SeqMeanTokenSumNorm {
            length: options.number("max_completion_length")?,
        },
        "ppo" => match options.text("aggregation")?.as_str() {
            "token_mean" => Aggregation::TokenMean,
            "seq_mean_token_mean" => Aggregation::SeqMeanTokenMean,
            other => bail!("unknown aggregation {other}"),
        },
        other => bail!("unknown loss_type {other}"),
    };
    let surrogate = match loss_type.as_str() {
        "sapo" => {
            options.ignore(&["clip_low", "clip_high"]);
            SoftGate {
                tau_pos: options.number("tau_pos")?,
                tau_neg: options.number("tau_neg")?,
            }
            .into()
        }
        "cispo" => {
            options.ignore(&["clip_low", "metric_clip_high"]);
            let high = options.number("clip_high")?;
            let absolute = options.flag("clip_high_is_absolute")?;
            DetachedWeight {
                allow_max_below_one: true,
                ..DetachedWeight::at_most(if absolute { high } else { 1. + high })
            }
            .into()
        }
        _ => clip(case)?.into(),
    };
    let beta = options.number("beta")?;
    let loss = PolicyLoss {
        importance_level: level(case)?,
        allow_length_weighting: true,
        log_ratio_clamp: options.optional_number("log_ratio_clamp")?,
        surrogate,
        kl: (beta > 0.).then(|| KlLoss::new(beta, k3(None))),
        entropy_coef: options.number("entropy_coef")?,
        aggregation,
        empty_sequences: EmptySequences::Include,
        ..Default::default()
    };
    Ok(Setup::new(loss, totals))
}

pub(super) fn metrics(
    case: &Case,
    outputs: Outputs,
    setup: &Setup,
    tensors: &Tensors,
) -> Result<Outputs> {
    // twinkle clamps the log-ratio in the loss and not in its metrics.
    let unclamped = PolicyLoss {
        log_ratio_clamp: None,
        ..setup.loss.clone()
    };
    let metrics = setup.compute(&unclamped, tensors)?.metrics.to_host()?;
    let get = |name: &str| metric(&metrics, name);
    let outputs = outputs
        .number("entropy", get("entropy"))?
        .number("approx_kl_k3", get("approx_kl_k3"))?
        .number("max_ratio", get("token_ratio_max"))?
        .number("max_token_kl_k3", get("approx_kl_k3_max"))?
        .number("mean_log_prob", get("log_prob"))?
        .number("mean_log_ratio", -get("approx_kl"))?
        .number("mean_old_log_prob", get("old_log_prob"))?
        .number("policy_confidence", get("log_prob").exp())?;
    if !case.expects("out.clip_fraction") {
        return Ok(outputs);
    }
    let (low, high) = clip_fractions(case, setup, tensors)?;
    outputs
        .number("clip_fraction", low + high)?
        .number("clip_fraction_low", low)?
        .number("clip_fraction_high", high)
}

/// The fractions of tokens, or of sequences for GSPO, whose ratio is below and above the range.
///
/// They count where the sign of the advantage makes the bound matter, but everywhere for CISPO.
fn clip_fractions(case: &Case, setup: &Setup, tensors: &Tensors) -> Result<(f64, f64)> {
    let x = Numbers::read(tensors)?;
    let is_cispo = case.variant == "twinkle_cispo";
    let high_width = case.config.number("clip_high")?;
    let (low_width, high_width) = if is_cispo {
        // One epsilon for the bound of the loss and the lower bound of the metric.
        let epsilon = if case.config.flag("clip_high_is_absolute")? {
            high_width - 1.
        } else {
            high_width
        };
        let high = case.config.optional_number("metric_clip_high")?;
        (epsilon, high.unwrap_or(epsilon))
    } else {
        (case.config.number("clip_low")?, high_width)
    };
    if setup.loss.importance_level == ImportanceLevel::Sequence {
        let advantages = x.row_means(&x.advantages);
        let rows = x.row_means(&x.log_ratio).into_iter().zip(advantages);
        let rows: Vec<(f64, f64)> = rows
            .filter_map(|(log_ratio, advantage)| Some((log_ratio?.exp(), advantage?)))
            .collect();
        let fraction = |holds: &dyn Fn(f64, f64) -> bool| {
            rows.iter().filter(|(r, a)| holds(*r, *a)).count() as f64 / rows.len().max(1) as f64
        };
        return Ok((
            fraction(&|r, a| r < 1. - low_width && a < 0.),
            fraction(&|r, a| r > 1. + high_width && a > 0.),
        ));
    }
    let ratio = |i: usize| x.log_ratio[i].exp();
    let low = x.map(|i| flag(ratio(i) < 1. - low_width && (is_cispo || x.advantages[i] < 0.)));
    let high = x.map(|i| flag(ratio(i) > 1. + high_width && (is_cispo || x.advantages[i] > 0.)));
    Ok((x.mean(&low), x.mean(&high)))
}

//! The losses of twinkle.

use anyhow::{Context, Result, bail};
use candle_core::{DType, Tensor};
use candle_grpo_core::Mask;
use candle_grpo_loss::{
    Aggregation, DetachedWeight, EmptySequences, KlLoss, PolicyLoss, SoftGate, StepTotals,
};

use super::{Results, Setup, Tensors, clip, k3, level, number};
use crate::case::{Case, Outputs};

pub(super) fn setup(case: &Case) -> Result<Setup> {
    let options = &case.config;
    let mut totals = StepTotals::to_host(&case.input("mask")?)?;
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
        "sapo" => SoftGate {
            tau_pos: options.number("tau_pos")?,
            tau_neg: options.number("tau_neg")?,
        }
        .into(),
        "cispo" => {
            options.ignore(&["clip_low", "metric_clip_high"]);
            let high = options.number("clip_high")?;
            let absolute = options.flag("clip_high_is_absolute")?;
            DetachedWeight::at_most(if absolute { high } else { 1. + high }).into()
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
    let output = setup.compute(&unclamped, tensors)?;
    let results = Results {
        metrics: output.metrics.to_host()?,
        output,
        mask: Mask::new(&tensors.mask)?,
    };
    let get = |name: &str| results.metric(name);
    let outputs = outputs
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
    let (low, high) = clipped(case, &results, tensors)?;
    // Of sequences for the sequence ratio, of tokens for the token ratio.
    let counted = if case.variant == "twinkle_gspo" {
        Aggregation::SeqMeanTokenMean
    } else {
        Aggregation::TokenMean
    };
    let totals = StepTotals::to_host(&tensors.mask)?;
    let fraction = |flags: &Tensor| counted.apply(flags, &results.mask, &totals);
    Ok(outputs
        .out("clip_fraction", &fraction(&(&low + &high)?)?)
        .out("clip_fraction_low", &fraction(&low)?)
        .out("clip_fraction_high", &fraction(&high)?))
}

/// Tokens below and above the range; only where the sign of the advantage makes it matter, but for CISPO.
fn clipped(case: &Case, results: &Results, tensors: &Tensors) -> Result<(Tensor, Tensor)> {
    if case.variant == "twinkle_cispo" {
        let ratio = tensors.log_ratio()?.exp()?;
        let high = case.config.number("metric_clip_high")?;
        let low = case.config.optional_number("clip_low")?.unwrap_or(0.2);
        return Ok((
            number(&ratio.lt(1. - low)?)?,
            number(&ratio.gt(1. + high)?)?,
        ));
    }
    let clipped = results.output.tokens.clipped.as_ref().context("no clip")?;
    let advantages = tensors.token_advantages()?;
    let of =
        |sign: Tensor| -> Result<Tensor> { Ok((clipped.to_dtype(DType::F64)? * number(&sign)?)?) };
    Ok((of(advantages.lt(0.)?)?, of(advantages.gt(0.)?)?))
}

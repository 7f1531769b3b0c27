//! `rollout_correction` and `proximal_log_prob`: the sampler against the trainer.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Tensor};
use candle_grpo_loss::correction::{
    FilterLevel, FilterStatistic, ImportanceWeight, OutOfBounds, ProximalPolicy, RolloutFilter,
};
use candle_grpo_loss::{ImportanceLevel, Mask, RolloutCorrection, RolloutWeights};
use serde_json::Value;

use crate::case::{Case, Outputs, Ran};

/// verl's options of a correction.
pub(crate) fn verl(case: &Case) -> Result<RolloutCorrection> {
    let options = &case.config;
    // The name that verl has for the combination.
    options.ignore(&["preset"]);
    let outside = match options.text("outside")?.as_str() {
        "clip" => OutOfBounds::Truncate,
        "mask" => OutOfBounds::Mask,
        other => bail!("unknown outside {other}"),
    };
    let (min, max) = (
        options.optional_number("weight_min")?,
        options.optional_number("weight_max")?,
    );
    let normalize = options.flag("normalize")?;
    let level = match options.get("weight_level").as_str() {
        None => None,
        Some("token") => Some(ImportanceLevel::Token),
        Some("sequence") => Some(ImportanceLevel::SequenceProduct),
        Some(other) => bail!("unknown weight_level {other}"),
    };
    let filters = options.get("filters");
    let filters = filters.as_array().context("filters are not a list")?;
    Ok(RolloutCorrection {
        weight: level.map(|level| ImportanceWeight {
            level,
            // verl has a lower bound for the band of IcePop only.
            min: min.filter(|_| outside == OutOfBounds::Mask),
            max,
            out_of_bounds: outside,
            normalize,
        }),
        filters: filters.iter().map(filter).collect::<Result<_>>()?,
        ..RolloutCorrection::default()
    })
}

fn filter(options: &Value) -> Result<RolloutFilter> {
    let name = options["statistic"].as_str().context("no statistic")?;
    let (level, name) = name.rsplit_once('_').context("a statistic without level")?;
    let (lower, upper) = (options["lower_ratio"].as_f64(), options["upper"].as_f64());
    let (statistic, min, max) = match name {
        "k1" => (FilterStatistic::K1, lower.map(f64::ln), upper.map(f64::ln)),
        "k2" => (FilterStatistic::K2, None, upper),
        "k3" => (FilterStatistic::K3, None, upper),
        other => bail!("unknown statistic {other}"),
    };
    Ok(RolloutFilter {
        statistic,
        level: match level {
            "token" => FilterLevel::Token,
            "seq_sum" => FilterLevel::SequenceSum,
            "seq_mean" => FilterLevel::SequenceMean,
            "seq_max" => FilterLevel::SequenceMax,
            other => bail!("unknown level {other}"),
        },
        min,
        max,
    })
}

/// The weights of a correction at every token, 0 outside the mask.
pub(crate) fn on_tokens(corrected: &RolloutWeights, mask: &Mask) -> Result<Option<Tensor>> {
    let weights = corrected.weights.as_ref();
    let weights = weights.map(|x| mask.select(&x.broadcast_as(mask.dims()?)?.contiguous()?));
    Ok(weights.transpose()?)
}

pub(crate) fn run(case: &Case) -> Result<Ran> {
    ensure!(case.variant == "verl", "unknown variant");
    let correction = verl(case)?;
    let (old, rollout) = (
        case.input("old_log_probs")?,
        case.input("rollout_log_probs")?,
    );
    let response_mask = case.input("mask")?;
    let mask = Mask::new(&response_mask)?;
    let compute = |correction: &RolloutCorrection| -> Result<RolloutWeights> {
        Ok(correction.compute(&old, &rollout, &response_mask)?)
    };
    let corrected = compute(&correction)?;
    let metrics = corrected.metrics.to_host()?;
    let unclamped = RolloutCorrection {
        log_ratio_clamp: None,
        ..correction.clone()
    };
    let unclamped = compute(&unclamped)?.metrics.to_host()?;
    // verl reports the extremes of a weight of sequences before its bounds.
    let unbounded = RolloutCorrection {
        weight: correction.weight.map(|weight| ImportanceWeight {
            min: None,
            max: None,
            ..weight
        }),
        ..correction.clone()
    };
    let extremes = match correction.weight.map(|weight| weight.level) {
        Some(ImportanceLevel::SequenceProduct) => compute(&unbounded)?.metrics.to_host()?,
        _ => metrics.clone(),
    };
    let get = |name: &str| metrics.get(name).unwrap_or_default();
    let mismatch = |name: &str| get(&format!("mismatch_{name}"));
    let of_extremes = |name: &str| extremes.get(name).unwrap_or_default();
    let mut outputs = Outputs::default()
        .out("mask", &corrected.kept)
        .number("kl", unclamped.get("rollout_kl").unwrap_or_default())?
        .number("k3_kl", unclamped.get("rollout_kl_k3").unwrap_or_default())?
        .number("chi2_token", mismatch("chi2_token"))?
        .number("chi2_seq", mismatch("chi2_sequence"))?
        .number("rollout_is_mean", get("rollout_weight_mean"))?
        .number(
            "rollout_is_eff_sample_size",
            get("rollout_weight_mean").powi(2) / get("rollout_weight_square"),
        )?
        .number("rollout_is_max", of_extremes("rollout_weight_max"))?
        .number("rollout_is_min", of_extremes("rollout_weight_min"))?
        .number("rollout_is_oob_ratio", get("rollout_truncated_fraction"))?
        .number(
            "rollout_is_batch_norm_factor",
            get("rollout_weight_normalizer"),
        )?
        .number(
            "rollout_rs_masked_fraction",
            get("rollout_rejected_fraction"),
        )?
        .number(
            "rollout_rs_seq_masked_fraction",
            get("rollout_rejected_sequence_fraction"),
        )?;
    for name in [
        "training_ppl",
        "rollout_ppl",
        "training_log_ppl",
        "rollout_log_ppl",
        "log_ppl_diff",
        "log_ppl_abs_diff",
        "log_ppl_diff_max",
        "log_ppl_diff_min",
        "ppl_ratio",
    ] {
        outputs = outputs.number(name, mismatch(name))?;
    }
    if let Some(weights) = on_tokens(&corrected, &mask)? {
        outputs = outputs.out("rollout_weights", &weights);
    }
    Ok(Ok(outputs))
}

pub(crate) fn proximal(case: &Case) -> Result<Ran> {
    let method = case.config.text("method")?;
    ensure!(case.variant == format!("areal_{method}"), "unknown variant");
    let policy = match method.as_str() {
        "loglinear" => ProximalPolicy::LogLinear,
        "linear" => ProximalPolicy::Linear { floor: 1e-10 },
        other => bail!("unknown method {other}"),
    };
    let old = policy.log_probs(
        &case.input("log_probs")?,
        &case.input("rollout_log_probs")?,
        &case.input("versions")?.to_dtype(DType::I64)?,
        case.config.size("current_version")? as i64,
    )?;
    Ok(Ok(Outputs::default().out("old_log_probs", &old)))
}

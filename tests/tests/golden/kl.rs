//! `kl`: estimators of the divergence from a reference, with gradients.

use anyhow::{Result, bail, ensure};
use candle_core::Tensor;
use candle_grpo_core::kl::KlGradient;
use candle_grpo_core::{Kl, KlEstimator, Mask};

use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    ensure!(
        ["verl", "roll", "liger_k3", "openrlhf", "roll_full"].contains(&case.variant.as_str()),
        "unknown variant"
    );
    case.config.ignore(&["batch", "peer_name"]);
    let log_probs = case.variable("log_probs")?;
    let reference = case.variable("ref_log_probs")?;
    let mut kl = match case.config.text("estimator")?.as_str() {
        "full" => {
            ensure!(
                case.config
                    .text("direction")?
                    .starts_with("sum_v exp(log_probs)"),
                "unknown direction"
            );
            Kl::full(&log_probs, &reference)?
        }
        name => estimate(case, name, &log_probs, &reference)?,
    };
    if let Some(mask) = case.optional("mask") {
        kl = Mask::new(&mask)?.select(&kl)?;
    }
    let loss = (&kl * case.input("upstream")?.to_dtype(kl.dtype())?)?.sum_all()?;
    let mut variables = vec![("log_probs", &log_probs)];
    if case.expects("grad.ref_log_probs") {
        variables.push(("ref_log_probs", &reference));
    }
    Ok(Ok(Outputs::default()
        .out("kl", &kl)
        .gradients(&loss, &variables)?))
}

fn estimate(case: &Case, name: &str, log_probs: &Tensor, reference: &Tensor) -> Result<Tensor> {
    let estimator = match name {
        "k1" => KlEstimator::K1,
        "k2" => KlEstimator::K2,
        "k3" => KlEstimator::K3,
        "abs" => KlEstimator::Abs,
        other => bail!("unknown estimator {other}"),
    };
    let max = case.config.optional_number("importance_weight_max")?;
    let weighted = case.config.flag("importance_weighted")?;
    let unbiased = case.config.flag("unbiased_gradient")?;
    let gradient = match (unbiased && weighted, max) {
        (true, Some(max)) => KlGradient::ImportanceWeighted { max },
        (true, None) => bail!("no largest importance weight"),
        _ if unbiased || case.config.flag("straight_through_k2")? => KlGradient::StraightThrough,
        _ => KlGradient::Direct,
    };
    let kl = Kl {
        gradient,
        log_ratio_clamp: case.config.optional_number("log_ratio_clamp")?,
        value_clamp: case.config.optional_number("value_clamp")?,
        ..Kl::new(estimator)
    };
    Ok(kl.per_token(
        log_probs,
        reference,
        case.optional("old_log_probs").as_ref(),
    )?)
}

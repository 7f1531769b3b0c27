//! `value_loss`: the loss of a critic.

use anyhow::{Result, bail, ensure};
use candle_core::DType;
use candle_grpo_loss::{ErrorLoss, Mask, ValueLoss};

use crate::aggregate::{Rows, aggregation};
use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    ensure!(
        ["areal", "twinkle", "verl"].contains(&case.variant.as_str()),
        "unknown variant"
    );
    let options = &case.config;
    let delta = options.optional_number("huber_delta")?;
    let error = match (options.text("loss")?.as_str(), delta) {
        ("squared", _) => ErrorLoss::Squared,
        ("huber", Some(delta)) => ErrorLoss::Huber { delta },
        (other, _) => bail!("unknown loss {other}"),
    };
    let response_mask = case.input("mask")?;
    let mask = Mask::new(&response_mask)?;
    let mode = options.text("aggregation")?;
    let (aggregation, totals) = aggregation(case, &mode, &mask, Rows::NonEmpty)?;
    let loss = ValueLoss {
        clip: options.optional_number("clip")?,
        error,
        aggregation,
    };
    let values = case.variable("values")?;
    let (loss, metrics) = loss.compute(
        &values,
        case.optional("old_values").as_ref(),
        &case.input("returns")?,
        &response_mask,
        &totals,
    )?;
    let clipped = metrics.to_host()?.get("value_clip_fraction");
    Ok(Ok(Outputs::default()
        .out("loss", &loss.to_dtype(DType::F64)?)
        .number("clip_fraction", clipped.unwrap_or_default())?
        .gradients(&loss, &[("values", &values)])?))
}

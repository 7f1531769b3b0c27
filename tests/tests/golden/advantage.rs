//! `advantage`: rewards to advantages.

use anyhow::{Result, bail};
use candle_core::{DType, Tensor};
use candle_grpo_core::{GroupAdvantage, Groups, Mask, Scale, SingleSample};

use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    let outputs = match case.variant.as_str() {
        "twinkle_grpo" | "twinkle_rloo" => twinkle(case)?,
        "trl_grpo" | "trl_rloo" => match trl(case)? {
            Some(outputs) => outputs,
            None => return Ok(Err("normalising over the batch is not there yet".to_owned())),
        },
        "verl_grpo" | "verl_grpo_vectorized" | "verl_rloo" | "verl_rloo_vectorized" => verl(case)?,
        variant => return Ok(Err(format!("{variant} is not there yet"))),
    };
    Ok(Ok(outputs))
}

fn scale(case: &Case) -> Result<Scale> {
    Ok(match case.config.text("scale")?.as_str() {
        "group" => Scale::Group,
        "batch" => Scale::Batch,
        "none" => Scale::None,
        other => bail!("unknown scale {other}"),
    })
}

fn estimator(case: &Case) -> Result<GroupAdvantage> {
    Ok(match case.config.text("estimator")?.as_str() {
        "grpo" | "grpo_vectorized" => GroupAdvantage::grpo(),
        "rloo" | "rloo_vectorized" => GroupAdvantage::rloo(),
        other => bail!("unknown estimator {other}"),
    })
}

fn twinkle(case: &Case) -> Result<Outputs> {
    case.config.ignore(&["rewards"]);
    let scale = scale(case)?;
    let function = GroupAdvantage {
        epsilon: case.config.number("epsilon")?,
        single_sample: if scale == Scale::Group {
            SingleSample::Raw
        } else {
            SingleSample::BatchMean
        },
        ..estimator(case)?
    };
    let advantages = function.compute(
        &case.input("rewards")?,
        case.config.size("group_size")?,
        scale,
    )?;
    Ok(Outputs::default().out("advantages", &advantages))
}

fn trl(case: &Case) -> Result<Option<Outputs>> {
    case.config.ignore(&["rewards"]);
    if case.config.flag("normalize_batch")? {
        return Ok(None);
    }
    let function = GroupAdvantage {
        epsilon: case.config.number("epsilon")?,
        single_sample: SingleSample::Zero,
        ..estimator(case)?
    };
    let scale = if case.variant == "trl_grpo" {
        scale(case)?
    } else {
        Scale::None
    };
    let rewards = case.input("rewards")?;
    let group_size = case.config.size("group_size")?;
    let statistics = function.group_statistics(&rewards, group_size)?;
    let batch = function.group_statistics(&rewards, rewards.dim(0)?)?;

    let zero = match scale {
        Scale::Batch => batch.zero_variance,
        _ => statistics.zero_variance,
    };
    Ok(Some(
        Outputs::default()
            .out(
                "advantages",
                &function.compute(&rewards, group_size, scale)?,
            )
            .out("reward_std", &batch.std.mean_all()?)
            .out("fraction_zero_std", &zero.to_dtype(DType::F64)?.mean_all()?),
    ))
}

fn verl(case: &Case) -> Result<Outputs> {
    case.config.ignore(&["rewards"]);
    let function = GroupAdvantage {
        epsilon: case.config.optional_number("epsilon")?.unwrap_or(0.),
        single_sample: if case.variant == "verl_rloo_vectorized" {
            SingleSample::Zero
        } else {
            SingleSample::Raw
        },
        ..estimator(case)?
    };
    let scale = if case.config.flag("normalize_by_std")? {
        Scale::Group
    } else {
        Scale::None
    };
    let groups = Groups::from_ids_to_host(&case.input("group_ids")?)?;
    let per_sequence = function.compute(&case.input("rewards")?, groups, scale)?;
    let mask = Mask::new(&case.input("mask")?)?;
    let tokens = on_tokens(&per_sequence, &mask)?;
    Ok(Outputs::default()
        .out("sequence_advantages", &per_sequence)
        .out("advantages", &tokens)
        .out("returns", &tokens))
}

fn on_tokens(per_sequence: &Tensor, mask: &Mask) -> Result<Tensor> {
    let (batch, tokens) = mask.dims()?;
    let spread = per_sequence.unsqueeze(1)?.broadcast_as((batch, tokens))?;
    Ok(mask.select(&spread.contiguous()?)?)
}

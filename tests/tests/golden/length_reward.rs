//! `length_reward`: rewards that depend on the length.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};
use candle_grpo_core::rewards::{CosineLength, OverlongPenalty};

use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    let rewards = match case.variant.as_str() {
        "trl_cosine" | "swift_cosine" => cosine(case)?,
        "trl_soft_overlong" | "swift_soft_overlong" | "areal_overlong" => overlong(case)?,
        variant => bail!("unknown variant {variant}"),
    };
    Ok(Ok(Outputs::default().out("rewards", &rewards)))
}

fn cosine(case: &Case) -> Result<Tensor> {
    let number = |key: &str| case.config.number(key);
    let scale = CosineLength {
        max_length: case.config.size("max_length")?,
        min_value_correct: number("min_value_correct")?,
        max_value_correct: number("max_value_correct")?,
        min_value_wrong: number("min_value_wrong")?,
        max_value_wrong: number("max_value_wrong")?,
        periodic: case.variant == "swift_cosine",
    };
    let host =
        |name: &str| -> Result<Vec<f64>> { Ok(case.input(name)?.to_dtype(DType::F64)?.to_vec1()?) };
    let samples = host("lengths")?.into_iter().zip(host("correct")?);
    let rewards = samples.map(|(length, correct)| scale.compute(length as usize, correct != 0.));
    let rewards = rewards.collect::<candle_core::Result<Vec<f64>>>()?;
    Ok(Tensor::new(rewards, &Device::Cpu)?)
}

fn overlong(case: &Case) -> Result<Tensor> {
    let penalty = OverlongPenalty {
        factor: case.config.optional_number("factor")?.unwrap_or(1.),
        unbounded: case.variant != "trl_soft_overlong",
        ..OverlongPenalty::new(case.config.size("max_length")?, case.config.size("buffer")?)
    };
    let penalty = penalty.compute(&case.input("lengths")?)?;
    Ok(match case.optional("rewards") {
        Some(rewards) => (rewards.to_dtype(penalty.dtype())? + penalty)?,
        None => penalty,
    })
}

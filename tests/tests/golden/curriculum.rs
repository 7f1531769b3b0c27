//! `curriculum`: pools of tasks by difficulty, and gates of groups.

use anyhow::{Result, bail};
use candle_core::{DType, Device, Tensor};
use candle_grpo_core::selection::{AdvantageRange, DifficultyPools, TaskScores};

use crate::advantage::required_numbers;
use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    Ok(Ok(match case.variant.as_str() {
        "prime_difficulty_pools" => pools(case)?,
        "prime_advantage_range" => {
            let range = AdvantageRange {
                min: case.config.number("reject_min")?,
                max: case.config.number("reject_max")?,
            };
            Outputs::default().out("admitted", &range.admits(&case.input("advantages")?)?)
        }
        variant => bail!("unknown variant {variant}"),
    }))
}

fn pools(case: &Case) -> Result<Outputs> {
    let pools = DifficultyPools {
        thresholds: required_numbers(case, "thresholds")?,
        weights: required_numbers(case, "weights")?,
        unseen_weight: case.config.number("unseen_weight")?,
    };
    let tasks = case.config.size("tasks")?;
    // The pools are on the host. Candle does not convert empty tensors on CUDA.
    let on_host = |name| anyhow::Ok(case.input(name)?.to_device(&Device::Cpu)?);
    let ids = on_host("task_ids")?
        .to_dtype(DType::I64)?
        .to_vec1::<i64>()?;
    let rewards = on_host("rewards")?.to_dtype(DType::F64)?.to_vec2::<f64>()?;
    let mut scores = TaskScores::default();
    for (id, rewards) in ids.into_iter().zip(rewards) {
        scores.record(usize::try_from(id)?, &rewards)?;
    }
    let places: Vec<f64> = (0..tasks)
        .map(|task| scores.pool(task, &pools).map_or(-1., |pool| pool as f64))
        .collect();
    let counts = scores.occupancy(tasks, &pools);
    let unseen = tasks - counts.iter().sum::<usize>();
    let occupancy: Vec<f64> = std::iter::once(unseen)
        .chain(counts)
        .map(|count| count as f64)
        .collect();
    let tensor = |x: Vec<f64>| Tensor::new(x, &Device::Cpu);
    Ok(Outputs::default()
        .out("pools", &tensor(places)?)
        .out("occupancy", &tensor(occupancy)?)
        .out("weights", &tensor(scores.weights(tasks, &pools)?)?))
}

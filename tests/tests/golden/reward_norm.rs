//! `reward_norm`: normalization of rewards and values.

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Device, Tensor};
use candle_grpo_core::advantage::{EpsilonPlacement, Whitening};
use candle_grpo_core::rewards::{NormLevel, RewardNorm, RunningMoments, RunningState, StdCenter};
use candle_grpo_core::{Mask, RewardShaping};

use crate::case::{Case, Outputs, Ran};

pub(crate) fn run(case: &Case) -> Result<Ran> {
    Ok(Ok(match case.variant.as_str() {
        "roll_reward_norm" | "roll_reward_norm_clip" | "roll_group_reward_norm" => shape(case)?,
        "areal_norm" => areal(case)?,
        "roll_running_moments" => running(case)?,
        "roll_masked_whiten" | "verl_masked_whiten" => whiten(case)?,
        "roll_masked_normalize" | "openrlhf_masked_normalize" => normalize(case)?,
        variant => bail!("unknown variant {variant}"),
    }))
}

fn level(name: &str) -> Result<NormLevel> {
    Ok(match name {
        "none" => NormLevel::None,
        "group" => NormLevel::Group,
        "batch" => NormLevel::Batch,
        "running" => NormLevel::Running,
        other => bail!("unknown level {other}"),
    })
}

fn shape(case: &Case) -> Result<Outputs> {
    case.config.ignore(&["rewards"]);
    let epsilon = case.config.number("epsilon")?;
    let group_size = case.config.size("group_size")?;
    let mean = level(&case.config.text("mean")?)?;
    let std = case.config.text("std")?;
    let mut rewards = case.input("rewards")?;
    let mut norm = RewardNorm {
        mean,
        epsilon,
        ..Default::default()
    };
    if std == "batch_of_centered" {
        // The deviation of the centered rewards: center first, then divide.
        let center = RewardShaping {
            norm,
            ..Default::default()
        };
        rewards = center.apply(&rewards, group_size, None)?.rewards;
        norm = RewardNorm {
            mean: NormLevel::None,
            std: NormLevel::Batch,
            ..norm
        };
    } else {
        norm.std = level(&std)?;
    }
    let shaping = RewardShaping {
        norm,
        clip: case.config.optional_number("clip")?,
        ..Default::default()
    };
    let mut moments = RunningMoments::new(&case.device)?;
    let shaped = shaping.apply(&rewards, group_size, Some(&mut moments))?;
    let outputs = Outputs::default().out("rewards", &shaped.rewards);
    match shaped.metrics.to_host()?.get("reward_clip_fraction") {
        Some(fraction) => outputs.number("clip_fraction", fraction),
        None => Ok(outputs),
    }
}

fn areal(case: &Case) -> Result<Outputs> {
    let options = &case.config;
    let level = |key: &str| level(&options.text_or(key, "none")?);
    let norm = RewardNorm {
        mean: level("mean_level")?,
        std: level("std_level")?,
        epsilon: options.number("eps")?,
        ddof: usize::from(options.flag("std_unbiased")?),
        // Without a mean there is nothing to leave out.
        leave_one_out: options.flag("mean_leave1out")? && level("mean_level")? != NormLevel::None,
        std_center: StdCenter::SubtractedMean,
    };
    let shaping = RewardShaping {
        norm,
        ..Default::default()
    };
    let shaped = shaping.apply(&case.input("rewards")?, options.size("group_size")?, None)?;
    Ok(Outputs::default().out("rewards", &shaped.rewards))
}

fn running(case: &Case) -> Result<Outputs> {
    // The option describes the batches.
    case.config.ignore(&["offset"]);
    let count = case.config.number("initial_count")?;
    let initial = RunningState {
        count,
        mean: case.config.number("initial_mean")?,
        squares: case.config.number("initial_var")? * count,
    };
    let norm = RewardShaping {
        norm: RewardNorm {
            mean: NormLevel::Running,
            ..Default::default()
        },
        ..Default::default()
    };
    let mut moments = RunningMoments::from_state(initial, &case.device)?;
    let batches = case.input("batches")?;
    let (count, size) = batches.dims2()?;
    let mut columns: [Vec<f64>; 6] = Default::default();
    for i in 0..count {
        let batch = batches.get(i)?;
        norm.apply(&batch, size, Some(&mut moments))?;
        let mut batch_moments = RunningMoments::new(&case.device)?;
        norm.apply(&batch, size, Some(&mut batch_moments))?;
        let state = moments.state()?;
        let std = |m: &RunningMoments| -> Result<f64> { Ok(m.std(1)?.get(0)?.to_scalar::<f64>()?) };
        let row = [
            state.mean,
            state.squares / state.count,
            std(&moments)?,
            state.count,
            batch_moments.state()?.mean,
            std(&batch_moments)?,
        ];
        for (column, x) in columns.iter_mut().zip(row) {
            column.push(x);
        }
    }
    let names = ["mean", "var", "std", "count", "batch_mean", "batch_std"];
    let mut outputs = Outputs::default();
    for (name, column) in names.into_iter().zip(columns) {
        outputs = outputs.out(name, &Tensor::new(column, &Device::Cpu)?);
    }
    Ok(outputs)
}

fn whiten(case: &Case) -> Result<Outputs> {
    case.config.ignore(&["values"]);
    let whitening = Whitening {
        shift_mean: case.config.flag("shift_mean")?,
        ddof: usize::from(case.config.flag("unbiased")?),
        epsilon: case.config.number("epsilon")?,
        placement: if case.config.flag("epsilon_inside_sqrt")? {
            EpsilonPlacement::InsideSqrt
        } else {
            EpsilonPlacement::AddToStd
        },
        ..Whitening::default()
    };
    let mask = Mask::new(&case.input("mask")?)?;
    let whitened = whitening.apply(&case.input("values")?, &mask)?;
    Ok(Outputs::default().out("values", &whitened))
}

fn normalize(case: &Case) -> Result<Outputs> {
    case.config.ignore(&["values"]);
    ensure!(
        case.config.size("dim")? == 1 && !case.config.flag("unbiased")?,
        "unknown form of normalization"
    );
    let mask = Mask::new(&case.input("mask")?)?;
    let values = mask.select(&case.input("values")?)?;
    let (rows, _) = mask.dims()?;
    let epsilon = case.config.number("min_variance")?;
    let whitening = Whitening {
        epsilon,
        ..Whitening::openrlhf()
    };
    let mut normalized = Vec::new();
    for i in 0..rows {
        let x = values.narrow(0, i, 1)?;
        let row_mask = Mask::new(&mask.selected().narrow(0, i, 1)?)?;
        let count = row_mask.count(DType::F64)?.to_scalar::<f64>()?;
        normalized.push(if count >= 2. {
            whitening.apply(&x, &row_mask)?
        } else {
            // The whitening of a batch leaves one value unchanged; here its variance is 0.
            let mean = x.sum_all()?;
            (x.broadcast_sub(&mean)? / epsilon.sqrt())?
        });
    }
    let mut values = Tensor::cat(&normalized, 0)?;
    if case.config.flag("masked_positions_zero")? {
        values = mask.select(&values)?;
    }
    Ok(Outputs::default().out("values", &values))
}

//! The composed twin of [`group_advantage`](crate::group_advantage()).

use candle_core::{Result, Tensor};

use crate::group_advantage::{
    AdvantageScale, Arguments, GroupAdvantageOptions, GroupBaseline, LoneSample, SampleGroups,
};

/// [`group_advantage`](crate::group_advantage()) in plain Candle operations, over a table of groups by samples.
pub fn group_advantage(
    rewards: &Tensor,
    groups: SampleGroups,
    options: GroupAdvantageOptions,
) -> Result<Tensor> {
    advantages(&Arguments::new(rewards, groups, options)?)
}

pub(crate) fn advantages(arguments: &Arguments) -> Result<Tensor> {
    let rewards = &arguments.wide_rewards()?;
    let batch = rewards.dim(0)?;
    if batch == 0 {
        return rewards.to_dtype(arguments.result);
    }
    let statistic = &arguments.statistic;
    let everyone = match &arguments.mask {
        Some(mask) => mask.clone(),
        None => rewards.zeros_like()?.eq(0.0)?,
    };
    let everyone = everyone.unsqueeze(0)?;
    let table = table(arguments)?;
    let inside = table.broadcast_mul(&everyone)?;

    let group = Moments::of(rewards, &inside)?;
    let whole = Moments::of(rewards, &everyone)?;
    let divided = |x: &Tensor, std: Tensor| {
        let denominator = (std + statistic.epsilon)?;
        let denominator = denominator
            .eq(0.0)?
            .where_cond(&denominator.ones_like()?, &denominator)?;
        x.broadcast_div(&denominator)
    };
    let centered = match statistic.baseline {
        GroupBaseline::Mean => group.centered.clone(),
        GroupBaseline::LeaveOneOut => {
            let others = (&group.count - 1.0)?.maximum(1.0)?;
            group.centered.broadcast_mul(&(&group.count / others)?)?
        }
    };
    let advantages = match statistic.scale {
        AdvantageScale::Group => divided(&centered, group.std(statistic.ddof)?)?,
        AdvantageScale::Batch => divided(&centered, whole.std(statistic.ddof)?)?,
        AdvantageScale::None => centered,
    };
    let lone = match (statistic.lone_sample, statistic.scale) {
        (LoneSample::Zero, _) => rewards.zeros_like()?.unsqueeze(0)?,
        (LoneSample::Raw, _) => rewards.unsqueeze(0)?,
        (LoneSample::BatchMean, AdvantageScale::Batch) => {
            divided(&whole.centered, whole.std(statistic.ddof)?)?
        }
        (LoneSample::BatchMean, _) => whole.centered,
    };
    let is_lone = group.count.eq(1.0)?.broadcast_as(inside.shape())?;
    let advantages = is_lone.where_cond(&lone.broadcast_as(inside.shape())?, &advantages)?;
    // Each sample is in one group: the sum has one term.
    inside
        .where_cond(&advantages, &advantages.zeros_like()?)?
        .sum(0)?
        .to_dtype(arguments.result)
}

/// `[P, B]` of u8: 1 where the sample is in the group.
fn table(arguments: &Arguments) -> Result<Tensor> {
    let batch = arguments.members.samples.len();
    let mut group_of = vec![0u32; batch];
    let groups = arguments.members.offsets.len() - 1;
    for (group, samples) in arguments.members.groups().enumerate() {
        for &sample in samples {
            group_of[sample as usize] = group as u32;
        }
    }
    let device = arguments.rewards.device();
    let group_of = Tensor::from_vec(group_of, (1, batch), device)?;
    let groups = Tensor::arange(0u32, groups as u32, device)?.unsqueeze(1)?;
    group_of.broadcast_eq(&groups)
}

/// Of the rewards that are `inside`, along the last dimension.
struct Moments {
    count: Tensor,
    centered: Tensor,
    squares: Tensor,
}

impl Moments {
    fn of(rewards: &Tensor, inside: &Tensor) -> Result<Self> {
        let x = rewards
            .unsqueeze(0)?
            .broadcast_as(inside.shape())?
            .contiguous()?;
        let zeros = x.zeros_like()?;
        let count = inside.to_dtype(x.dtype())?.sum_keepdim(1)?;
        let smallest = inside
            .where_cond(&x, &(&zeros + f64::INFINITY)?)?
            .min_keepdim(1)?;
        let shifted = inside.where_cond(&x.broadcast_sub(&smallest)?, &zeros)?;
        let mean = (shifted.sum_keepdim(1)? / count.maximum(1.0)?)?;
        let constant = shifted.max_keepdim(1)?.eq(0.0)?.broadcast_as(x.shape())?;
        let centered = inside.where_cond(&shifted.broadcast_sub(&mean)?, &zeros)?;
        let centered = constant.where_cond(&zeros, &centered)?;
        Ok(Self {
            squares: centered.sqr()?.sum_keepdim(1)?,
            count,
            centered,
        })
    }

    fn std(&self, ddof: usize) -> Result<Tensor> {
        // Where nothing is left in the denominator, there is one entry at most, and the squares are 0.
        (&self.squares / (&self.count - ddof as f64)?.maximum(1.0)?)?.sqrt()
    }
}

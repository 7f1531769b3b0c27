//! The CPU path of [`group_advantage`](crate::group_advantage()).

use candle_core::Result;

use super::slice;
use crate::group_advantage::{AdvantageScale, Arguments, GroupBaseline, LoneSample, Statistic};

pub(crate) fn forward(rewards: &[f64], arguments: &Arguments) -> Result<Vec<f64>> {
    match &arguments.mask {
        None => Ok(advantages(rewards, arguments, |_| true)),
        Some(mask) => slice::read::<u8, _>(mask, |mask| {
            Ok(advantages(rewards, arguments, |sample| mask[sample] != 0))
        }),
    }
}

fn advantages(
    rewards: &[f64],
    arguments: &Arguments,
    has_reward: impl Fn(usize) -> bool,
) -> Vec<f64> {
    let statistic = &arguments.statistic;
    let batch = statistic.needs_batch().then(|| {
        let rewards = rewards.iter().enumerate();
        Moments::of(rewards.filter_map(|(sample, &x)| has_reward(sample).then_some(x)))
    });
    let mut advantages = vec![0.0; rewards.len()];
    for group in arguments.members.groups() {
        let samples = || {
            group
                .iter()
                .map(|&sample| sample as usize)
                .filter(|&sample| has_reward(sample))
        };
        let moments = Moments::of(samples().map(|sample| rewards[sample]));
        for sample in samples() {
            advantages[sample] = statistic.advantage(rewards[sample], &moments, batch.as_ref());
        }
    }
    advantages
}

impl Statistic {
    fn needs_batch(&self) -> bool {
        self.scale == AdvantageScale::Batch || self.lone_sample == LoneSample::BatchMean
    }

    fn advantage(&self, reward: f64, group: &Moments, batch: Option<&Moments>) -> f64 {
        if group.count == 1.0 {
            return match (self.lone_sample, batch) {
                (LoneSample::Raw, _) => reward,
                (LoneSample::BatchMean, Some(batch)) => self.beside_batch(reward, batch),
                _ => 0.0,
            };
        }
        let centered = group.centered(reward);
        let centered = match self.baseline {
            GroupBaseline::Mean => centered,
            GroupBaseline::LeaveOneOut => centered * (group.count / (group.count - 1.0)),
        };
        match (self.scale, batch) {
            (AdvantageScale::Group, _) => self.divided(centered, group.std(self.ddof)),
            (AdvantageScale::Batch, Some(batch)) => self.divided(centered, batch.std(self.ddof)),
            _ => centered,
        }
    }

    fn beside_batch(&self, reward: f64, batch: &Moments) -> f64 {
        let centered = batch.centered(reward);
        match self.scale {
            AdvantageScale::Batch => self.divided(centered, batch.std(self.ddof)),
            _ => centered,
        }
    }

    /// 0 stays 0 where `std + epsilon` is 0.
    fn divided(&self, centered: f64, std: f64) -> f64 {
        let denominator = std + self.epsilon;
        if denominator == 0.0 {
            centered
        } else {
            centered / denominator
        }
    }
}

/// Mean and variance, relative to the smallest entry. Of no entries they are not numbers: no sample asks for them.
struct Moments {
    count: f64,
    smallest: f64,
    /// The mean minus the smallest.
    shifted_mean: f64,
    /// The sum of the squared distances from the mean.
    squares: f64,
    /// Whether all entries are equal. Their mean can be rounded; what is centred on it is 0 all the same.
    constant: bool,
}

impl Moments {
    fn of(entries: impl Iterator<Item = f64> + Clone) -> Self {
        let (mut count, mut smallest, mut largest) = (0.0, f64::INFINITY, f64::NEG_INFINITY);
        for x in entries.clone() {
            count += 1.0;
            smallest = x.min(smallest);
            largest = x.max(largest);
        }
        let sum: f64 = entries.clone().map(|x| x - smallest).sum();
        let mut moments = Self {
            count,
            smallest,
            shifted_mean: sum / count,
            squares: 0.0,
            // The smallest and the largest leave NaN out, the sum does not.
            constant: smallest == largest && sum == 0.0,
        };
        moments.squares = entries.map(|x| moments.centered(x).powi(2)).sum();
        moments
    }

    fn centered(&self, x: f64) -> f64 {
        if self.constant {
            0.0
        } else {
            (x - self.smallest) - self.shifted_mean
        }
    }

    fn std(&self, ddof: usize) -> f64 {
        // Where nothing is left in the denominator, there is one entry, and the squares are 0.
        (self.squares / (self.count - ddof as f64).max(1.0)).sqrt()
    }
}

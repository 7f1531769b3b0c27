//! The metrics of one training step.

use std::collections::BTreeMap;

use anyhow::Result;
use candle_grpo_core::rewards::RepetitionPenalty;
use serde::{Deserialize, Serialize};

use super::rollout_groups::RolloutGroups;
use super::step::Updates;
use crate::data::json_lines::{finite_numbers, number};
use crate::environment::mean_metrics;
use crate::rewards::{RewardFaults, RewardRequests};
use crate::step_record::StepRecord;
use crate::{FinishReason, Rollout};

/// The metrics of one training step: one line of `metrics.jsonl`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The number of the step, from 1.
    pub step: usize,
    /// True if the step made no update, because all advantages were 0 or no completion remained.
    pub skipped: bool,
    /// The reason why the rewards made no update. Absent if they made one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip_reason: Option<String>,
    /// Number of updates of the policy. 0 if only the critic trained.
    #[serde(default)]
    pub updates: usize,
    /// Number of mini-batches, in all passes, that made no update, because none of their tokens
    /// trains.
    #[serde(default)]
    pub skipped_mini_batches: usize,
    /// Number of sampled groups, including dropped ones. 0 if the step learns from the samples of
    /// a teacher alone; the values below are then 0, too.
    pub sampled_groups: usize,
    /// Number of groups after [`Recipe::group_filter`](candle_grpo_loss::Recipe::group_filter).
    pub kept_groups: usize,
    /// Mean reward of all sampled completions that have one, before shaping. 0 without any.
    #[serde(deserialize_with = "number")]
    pub reward_mean: f64,
    /// Standard deviation of the rewards of all completions (population).
    #[serde(deserialize_with = "number")]
    pub reward_std: f64,
    /// Mean and standard deviation of each component of the reward, by its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rewards: BTreeMap<String, RewardStatistics>,
    /// Share of groups with equal rewards or without any, which teach nothing.
    #[serde(deserialize_with = "number")]
    pub constant_groups: f64,
    /// Mean rewards of the groups that have any: minimum, three quartiles, maximum.
    #[serde(default)]
    pub group_reward_quantiles: [f64; 5],
    /// The scores that are missing or were not computed, for each reward that has such scores.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reward_faults: BTreeMap<String, RewardFaults>,
    /// The requests to servers that the scores took, for each reward that sends requests.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub reward_requests: BTreeMap<String, RewardRequests>,
    /// Mean length of the completions in tokens.
    #[serde(deserialize_with = "number")]
    pub response_length: f64,
    /// Share of completions that reached the maximum length.
    #[serde(deserialize_with = "number")]
    pub truncated: f64,
    /// Mean share of the completions' 4-grams of tokens that repeat an earlier one (`seq-rep-4`,
    /// <https://arxiv.org/abs/1908.04319>). Prose has a few percent, and a loop close to 1.
    #[serde(default, deserialize_with = "number")]
    pub repetition: f64,
    /// Means over trajectories with an environment: `turns`, `reward`, `limit_reached` (the share
    /// that a limit ended), `failed` (the share whose environment failed), and the metrics of the
    /// environment.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "finite_numbers"
    )]
    pub environment: BTreeMap<String, f64>,
    /// Mean norm of the gradients before clipping. Absent if skipped, or if only the critic
    /// trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grad_norm: Option<f64>,
    /// Learning rate. Absent if the norm is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Metrics of advantages and policy loss by name (`kl`, `entropy`, `clip_fraction`, ...).
    /// Empty if skipped.
    ///
    /// If completions are drawn ahead
    /// ([`RolloutConfig::max_staleness`](crate::rollout::RolloutConfig::max_staleness)), also in a
    /// skipped step:
    ///
    /// - `staleness_mean`, `staleness_max`: the number of updates between the weights that drew a
    ///   token and those that it trains
    /// - `regenerated_groups`: the number of groups that were drawn again because they exceeded
    ///   the maximum
    ///
    /// With a curriculum, `curriculum_pool_0` and so on are the numbers of prompts in each pool
    /// after the step, and `curriculum_unseen` those without a score.
    #[serde(flatten, deserialize_with = "finite_numbers")]
    pub policy: BTreeMap<String, f64>,
    /// Seconds per phase.
    pub seconds: PhaseSeconds,
    /// The alarms of the step by name, each with what it measured
    /// ([`AlarmConfig::check`](crate::run::AlarmConfig::check)). Empty without a run.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub alarms: BTreeMap<String, f64>,
}

/// Mean and standard deviation of a component of the reward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RewardStatistics {
    /// Mean over the completions that have it. 0 without any.
    #[serde(deserialize_with = "number")]
    pub mean: f64,
    /// Standard deviation over these completions (population).
    #[serde(deserialize_with = "number")]
    pub std: f64,
}

impl RewardStatistics {
    /// The statistics of the scores that are not NaN.
    pub(super) fn of(scores: &[f32]) -> Self {
        let scores = present(scores);
        let mean = mean(&scores).unwrap_or(0.);
        let squares: f64 = scores.iter().map(|score| (score - mean).powi(2)).sum();
        Self {
            mean,
            std: (squares / scores.len().max(1) as f64).sqrt(),
        }
    }
}

/// The times of the phases of a step, in seconds. Completions that are drawn ahead are sampled and
/// scored during earlier steps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PhaseSeconds {
    /// Sampling completions.
    pub sample: f64,
    /// Decoding and scoring them.
    pub score: f64,
    /// Log-probs, backward passes and optimizer steps.
    pub train: f64,
    /// Time that the training waited for completions. Present if they are drawn ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<f64>,
    /// Time that the generator was idle before it drew the completions of the step, because no
    /// later step was allowed yet. Present if they are drawn ahead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle: Option<f64>,
}

impl PhaseSeconds {
    /// Adds those of completions that a step draws in addition to these, before it trains.
    pub(super) fn add(&mut self, others: &Self) {
        self.sample += others.sample;
        self.score += others.score;
        if let Some(wait) = &mut self.wait {
            *wait += others.sample + others.score;
        }
    }

    /// The duration of the step.
    pub fn total(&self) -> f64 {
        self.train + self.wait.unwrap_or(self.sample + self.score)
    }
}

impl StepRecord for StepMetrics {
    fn step(&self) -> usize {
        self.step
    }
}

impl StepMetrics {
    /// Computes the metrics that are known before training.
    pub(super) fn of_groups(step: usize, all: &RolloutGroups) -> Result<Self> {
        let (rollouts, rewards) = (&all.rollouts, &all.scores);
        if rollouts.is_empty() {
            return Ok(Self {
                step,
                ..Self::default()
            });
        }
        let n = rollouts.len() as f64;
        let RewardStatistics { mean, std } = RewardStatistics::of(rewards);
        let groups: Vec<Vec<f64>> = rewards.chunks(all.num_generations).map(present).collect();
        let group_means = groups
            .iter()
            .filter_map(|group| self::mean(group))
            .collect();
        let constant = groups
            .iter()
            .filter(|g| g.windows(2).all(|pair| pair[0] == pair[1]));
        let tokens: usize = rollouts.iter().map(Rollout::response_length).sum();
        let truncated = rollouts
            .iter()
            .filter(|r| r.completion.finish_reason == FinishReason::Length);
        let repeated = RepetitionPenalty {
            ngram: 4,
            penalty: 1.,
        };
        let repetition = rollouts.iter();
        let repetition = repetition.map(|r| repeated.compute(&r.completion.written_tokens()));
        let repetition: Vec<f64> = repetition.collect::<candle_core::Result<_>>()?;
        Ok(Self {
            step,
            sampled_groups: groups.len(),
            kept_groups: groups.len(),
            reward_mean: mean,
            reward_std: std,
            constant_groups: constant.count() as f64 / groups.len() as f64,
            group_reward_quantiles: quartiles(group_means),
            response_length: tokens as f64 / n,
            truncated: truncated.count() as f64 / n,
            repetition: repetition.iter().map(|term| term.abs()).sum::<f64>() / n,
            environment: mean_metrics(rollouts.iter().filter_map(|r| r.episode.as_ref())),
            reward_faults: all.faults(),
            reward_requests: all.requests(),
            rewards: all.reward_statistics(),
            ..Self::default()
        })
    }

    /// Sets those of the updates.
    pub(super) fn add_updates(&mut self, found: Updates) {
        self.updates = found.updates;
        self.skipped_mini_batches = found.skipped_mini_batches;
        self.grad_norm = found.grad_norm;
        self.learning_rate = found.learning_rate;
        self.policy = found.metrics;
    }
}

/// The scores that are not missing.
fn present(scores: &[f32]) -> Vec<f64> {
    let present = scores.iter().filter(|score| !score.is_nan());
    present.copied().map(f64::from).collect()
}

/// The mean; `None` if there are no values.
fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Returns the minimum, the nearest-rank quartiles and the maximum of `values`; zeros if empty.
fn quartiles(mut values: Vec<f64>) -> [f64; 5] {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    [0., 0.25, 0.5, 0.75, 1.].map(|share| {
        let nearest = (share * last).round() as usize;
        values.get(nearest).copied().unwrap_or(0.)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_values() {
        assert_eq!(quartiles(vec![4., 0., 2., 1., 3.]), [0., 1., 2., 3., 4.]);
        assert_eq!(quartiles(vec![7.]), [7.; 5]);
        assert_eq!(quartiles(vec![]), [0.; 5]);
    }

    #[test]
    fn the_statistics_of_a_component_leave_out_missing_scores() {
        let found = RewardStatistics::of(&[1., f32::NAN, 3., 5.]);
        assert_eq!(found.mean, 3.);
        assert!((found.std - (8f64 / 3.).sqrt()).abs() < 1e-12);
        assert_eq!(
            RewardStatistics::of(&[f32::NAN]),
            RewardStatistics::default()
        );
    }

    #[test]
    fn scalars_have_the_names_of_what_they_are_in() {
        let mut metrics = StepMetrics {
            step: 3,
            reward_mean: 0.5,
            ..StepMetrics::default()
        };
        metrics.seconds.train = 2.;
        metrics.policy.insert("kl".to_owned(), 0.1);
        let scalars = metrics.scalars().unwrap();
        for expected in [
            ("reward_mean", 0.5),
            ("seconds/train", 2.),
            ("kl", 0.1),
            ("group_reward_quantiles/4", 0.),
        ] {
            assert!(
                scalars.contains(&(expected.0.to_owned(), expected.1)),
                "{expected:?} in {scalars:?}"
            );
        }
        assert!(
            !scalars
                .iter()
                .any(|(name, _)| name == "step" || name == "skipped" || name == "grad_norm")
        );
    }
}

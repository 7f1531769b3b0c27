//! The turns of a trajectory.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// The turns of a trajectory, their rewards, and its end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    /// The turns of the policy in order, at least one.
    pub turns: Vec<EpisodeTurn>,
    /// The reason why it ended.
    pub end: EpisodeEnd,
    /// True if the rewards of its turns are a component of the reward.
    pub gives_rewards: bool,
    /// The sums of [`Step::metrics`](super::Step::metrics).
    pub metrics: BTreeMap<String, f64>,
}

/// A turn of the policy in its trajectory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpisodeTurn {
    /// The places of its tokens in [`Completion::tokens`](crate::Completion::tokens).
    pub tokens: Range<usize>,
    /// The reward that the environment gave.
    pub reward: f64,
    /// A digest of the state before the turn.
    pub state: u64,
}

/// The reason why a trajectory ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpisodeEnd {
    /// The environment ended it.
    Done,
    /// It has the maximum number of turns.
    MaxTurns,
    /// No further turn fits the maximum length of the response.
    MaxTokens,
    /// It took the maximum time.
    MaxSeconds,
    /// The environment failed with this message.
    Failed(String),
}

impl Episode {
    /// The sum of the rewards of the turns.
    pub fn reward(&self) -> f64 {
        self.turns.iter().map(|turn| turn.reward).sum()
    }

    /// The message of the environment, if it failed.
    pub(crate) fn failure(&self) -> Option<&str> {
        match &self.end {
            EpisodeEnd::Failed(message) => Some(message),
            _ => None,
        }
    }

    /// The metrics of the trajectory by name: `turns`, `reward` if it has one, `limit_reached`,
    /// `failed`, and those of the environment.
    pub fn all_metrics(&self) -> BTreeMap<String, f64> {
        let is = |condition: bool| f64::from(u8::from(condition));
        let limits = [
            EpisodeEnd::MaxTurns,
            EpisodeEnd::MaxTokens,
            EpisodeEnd::MaxSeconds,
        ];
        let mut metrics = self.metrics.clone();
        metrics.insert("turns".to_owned(), self.turns.len() as f64);
        metrics.insert("limit_reached".to_owned(), is(limits.contains(&self.end)));
        metrics.insert("failed".to_owned(), is(self.failure().is_some()));
        if self.gives_rewards {
            metrics.insert("reward".to_owned(), self.reward());
        }
        metrics
    }
}

/// Fails if the environments of several trajectories all failed: the cause is not the policy.
/// `failures` has the message of each trajectory that failed, and of all ranks.
pub(crate) fn ensure_some_worked<'a>(
    failures: impl ExactSizeIterator<Item = Option<&'a str>>,
) -> Result<()> {
    let all = failures.len();
    let mut failures = failures.flatten();
    if let Some(first) = failures.next()
        && all > 1
        && failures.count() + 1 == all
    {
        bail!("environment: failed in all {all} trajectories, in the first one with: {first}");
    }
    Ok(())
}

/// The mean of each metric over trajectories, with 0 for one that lacks it.
pub(crate) fn mean_metrics<'a>(
    episodes: impl Iterator<Item = &'a Episode>,
) -> BTreeMap<String, f64> {
    let mut sums = BTreeMap::new();
    let mut count = 0.;
    for episode in episodes {
        count += 1.;
        for (name, value) in episode.all_metrics() {
            *sums.entry(name).or_default() += value;
        }
    }
    sums.values_mut().for_each(|sum| *sum /= count);
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    fn episode(rewards: &[f64], end: EpisodeEnd, calls: Option<f64>) -> Episode {
        let turn = |&reward: &f64| EpisodeTurn {
            tokens: 0..1,
            reward,
            state: 0,
        };
        Episode {
            turns: rewards.iter().map(turn).collect(),
            end,
            gives_rewards: true,
            metrics: calls.map(|n| ("calls".to_owned(), n)).into_iter().collect(),
        }
    }

    #[test]
    fn metrics_are_means_over_trajectories() {
        let episodes = [
            episode(&[0., 1., 1.], EpisodeEnd::MaxTurns, Some(3.)),
            episode(&[0.5], EpisodeEnd::Failed("no".to_owned()), None),
        ];
        let metrics = mean_metrics(episodes.iter());
        let expected = [
            ("calls", 1.5),
            ("failed", 0.5),
            ("limit_reached", 0.5),
            ("reward", 1.25),
            ("turns", 2.),
        ];
        let found: Vec<(&str, f64)> = metrics.iter().map(|(k, v)| (k.as_str(), *v)).collect();
        assert_eq!(found, expected);
    }
}

//! A trajectory's turns.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

/// A trajectory's turns, their rewards, and its end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    /// Policy turns in order, at least one.
    pub turns: Vec<EpisodeTurn>,
    /// Why it ended.
    pub end: EpisodeEnd,
    /// True if its turns' rewards are a reward component.
    pub gives_rewards: bool,
    /// True if the trajectory has no reward.
    #[serde(default)]
    pub excluded: bool,
    /// True if the environment gave no reward at any turn.
    #[serde(default)]
    pub unrewarded: bool,
    /// Sums over [`Step::metrics`](crate::environment::Step::metrics).
    pub metrics: BTreeMap<String, f64>,
    /// The environment's text about the trajectory. A teacher may read it.
    #[serde(default)]
    pub feedback: Option<String>,
    /// Rewards of roles, in place of the turns' rewards, for the rows with these
    /// [roles](crate::Rollout::role).
    #[serde(default)]
    pub role_rewards: BTreeMap<String, f64>,
}

/// A policy turn in its trajectory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EpisodeTurn {
    /// Its token range in [`Completion::tokens`](crate::Completion::tokens).
    pub tokens: Range<usize>,
    /// The reward that the environment gave.
    pub reward: f64,
    /// A hash of the state before the turn.
    pub state: u64,
}

/// Why a trajectory ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EpisodeEnd {
    /// The environment ended it.
    Done,
    /// It has the maximum number of turns.
    MaxTurns,
    /// No further turn fits the maximum response length.
    MaxTokens,
    /// It took the maximum time.
    MaxSeconds,
    /// The environment failed with this message.
    Failed(String),
}

impl Episode {
    /// Sums the turns' rewards.
    pub fn reward(&self) -> f64 {
        self.turns.iter().map(|turn| turn.reward).sum()
    }

    /// Returns whether the trajectory has the failure reward instead of any other reward.
    pub(crate) fn has_failure_reward(&self) -> bool {
        self.failure().is_some() && !self.excluded
    }

    /// Returns the environment's message, if it failed.
    pub(crate) fn failure(&self) -> Option<&str> {
        match &self.end {
            EpisodeEnd::Failed(message) => Some(message),
            _ => None,
        }
    }

    /// Returns the trajectory's metrics by name: `turns`, `reward` if it has one, `limit_reached`,
    /// `failed`, `excluded`, and the environment's own.
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
        metrics.insert("excluded".to_owned(), is(self.excluded));
        if self.gives_rewards && !self.excluded {
            metrics.insert("reward".to_owned(), self.reward());
        }
        metrics
    }
}

/// Fails if several trajectories' environments all failed, because then the policy is not the
/// cause. `failures` has the message of each failed trajectory, over all ranks.
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

/// Averages each metric over trajectories, with 0 for a trajectory that lacks it. `reward` is
/// averaged over the trajectories that have one. Means over finite values are finite.
pub(crate) fn mean_metrics<'a>(
    episodes: impl Iterator<Item = &'a Episode>,
) -> BTreeMap<String, f64> {
    let all: Vec<&Episode> = episodes.collect();
    let rewarded = all.iter().filter(|episode| !episode.excluded).count();
    let mut means = BTreeMap::new();
    for episode in &all {
        for (name, value) in episode.all_metrics() {
            let count = if name == "reward" {
                rewarded
            } else {
                all.len()
            };
            *means.entry(name).or_default() += value / count as f64;
        }
    }
    let finite = |mean: &mut f64| *mean = mean.clamp(f64::MIN, f64::MAX);
    means.values_mut().for_each(finite);
    means
}

/// Metric names that do not come from the environment.
pub const OWN_METRICS: [&str; 5] = ["turns", "reward", "limit_reached", "failed", "excluded"];

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
            excluded: false,
            unrewarded: false,
            metrics: calls.map(|n| ("calls".to_owned(), n)).into_iter().collect(),
            feedback: None,
            role_rewards: BTreeMap::new(),
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
            ("excluded", 0.),
            ("failed", 0.5),
            ("limit_reached", 0.5),
            ("reward", 1.25),
            ("turns", 2.),
        ];
        let found: Vec<(&str, f64)> = metrics.iter().map(|(k, v)| (k.as_str(), *v)).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn the_mean_of_rewards_leaves_out_excluded_trajectories() {
        let mut episodes = [1., 9., 3.].map(|reward| episode(&[reward], EpisodeEnd::Done, None));
        episodes[1].excluded = true;
        let metrics = mean_metrics(episodes.iter());
        assert_eq!((metrics["reward"], metrics["turns"]), (2., 1.));
        assert!((metrics["excluded"] - 1. / 3.).abs() < 1e-15);
    }

    #[test]
    fn means_of_large_metrics_are_finite() {
        for value in [1e308, f64::MAX, f64::MIN] {
            let episodes = [(); 7].map(|()| episode(&[0.], EpisodeEnd::Done, Some(value)));
            let mean = mean_metrics(episodes.iter())["calls"];
            assert!((mean / value - 1.).abs() < 1e-12, "{value}: {mean}");
        }
    }
}

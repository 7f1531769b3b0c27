//! A curriculum: tasks are drawn by how well the policy solves them.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::Invalid;
use crate::dtype::for_statistics;
use crate::validate::{self, Checked};

/// Pools of tasks of similar difficulty, each with a weight for drawing its tasks (prime-rl).
///
/// The score of a task is the mean reward of its latest group. Its pool is the first one whose
/// threshold is at least the score, or the last one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DifficultyPools {
    /// Largest score of each pool, ascending. Default `[0.2, 0.8, 1.0]`.
    pub thresholds: Vec<f64>,
    /// Weight of the tasks of each pool. Default `[0.2, 1.0, 0.2]`.
    pub weights: Vec<f64>,
    /// Weight of a task without a score. Default 1.
    pub unseen_weight: f64,
}

impl Default for DifficultyPools {
    /// Tasks that are solved sometimes are drawn five times as often as the others.
    fn default() -> Self {
        Self {
            thresholds: vec![0.2, 0.8, 1.],
            weights: vec![0.2, 1., 0.2],
            unseen_weight: 1.,
        }
    }
}

impl DifficultyPools {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails with the name of the invalid option.
    pub fn validate(&self) -> Checked {
        let ascending = self.thresholds.windows(2).all(|pair| pair[0] < pair[1]);
        let finite = self.thresholds.iter().all(|x| x.is_finite());
        if self.thresholds.is_empty() || !ascending || !finite {
            return Err(Invalid::new(
                "thresholds",
                format_args!("{:?}", self.thresholds),
                "be finite numbers in ascending order",
            ));
        }
        if self.weights.len() != self.thresholds.len() {
            let must = format!("be one for each threshold, {}", self.thresholds.len());
            return Err(Invalid::new("weights", self.weights.len(), must));
        }
        for weight in &self.weights {
            validate::non_negative("weights", *weight)?;
        }
        validate::non_negative("unseen_weight", self.unseen_weight)
    }

    /// Returns the pool of a score.
    pub fn pool(&self, score: f64) -> usize {
        let place = self.thresholds.iter().position(|bound| *bound >= score);
        place.unwrap_or(self.thresholds.len().saturating_sub(1))
    }
}

/// The latest score of each task. The serialized form is the whole state.
///
/// ```
/// use candle_grpo_core::selection::{DifficultyPools, TaskScores};
///
/// let pools = DifficultyPools::default();
/// let mut scores = TaskScores::default();
/// scores.record(3, &[0., 1., 0., 1.])?;
/// assert_eq!(scores.pool(3, &pools), Some(1));
/// assert_eq!(scores.pool(0, &pools), None);
/// assert_eq!(scores.weights(4, &pools)?, [1., 1., 1., 1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TaskScores(BTreeMap<usize, f64>);

impl TaskScores {
    /// Sets the score of a task to the mean of the `rewards` of a group.
    ///
    /// # Errors
    ///
    /// Fails if there are no rewards, or if one of them or their sum is not finite.
    pub fn record(&mut self, task: usize, rewards: &[f64]) -> Result<()> {
        let sum = rewards.iter().sum::<f64>();
        if rewards.is_empty() || rewards.iter().any(|x| !x.is_finite()) || !sum.is_finite() {
            bail!("rewards: {rewards:?}, must be at least one finite number, with a finite sum");
        }
        let mean = sum / rewards.len() as f64;
        self.0.insert(task, mean);
        Ok(())
    }

    /// Returns the pool of a task, or `None` if it has no score.
    pub fn pool(&self, task: usize, pools: &DifficultyPools) -> Option<usize> {
        self.0.get(&task).map(|score| pools.pool(*score))
    }

    /// Returns the tasks that have a score, in ascending order.
    pub fn tasks(&self) -> impl Iterator<Item = usize> {
        self.0.keys().copied()
    }

    /// Returns the scores under the new numbers of their tasks. A task without one loses its score.
    pub fn renumber(&self, number: impl Fn(usize) -> Option<usize>) -> Self {
        let scores = self.0.iter();
        Self(
            scores
                .filter_map(|(task, score)| Some((number(*task)?, *score)))
                .collect(),
        )
    }

    /// Returns the weight of each of the tasks `0..tasks`.
    ///
    /// # Errors
    ///
    /// Fails if an option of the pools is invalid.
    pub fn weights(&self, tasks: usize, pools: &DifficultyPools) -> Result<Vec<f64>> {
        pools.validate()?;
        let weight = |task| match self.pool(task, pools) {
            Some(pool) => pools.weights[pool],
            None => pools.unseen_weight,
        };
        Ok((0..tasks).map(weight).collect())
    }

    /// Counts the tasks of `0..tasks` in each pool.
    pub fn occupancy(&self, tasks: usize, pools: &DifficultyPools) -> Vec<usize> {
        let mut counts = vec![0; pools.thresholds.len()];
        for pool in (0..tasks).filter_map(|task| self.pool(task, pools)) {
            counts[pool] += 1;
        }
        counts
    }
}

/// A gate that rejects groups whose advantages are all in a range (prime-rl).
///
/// With the range `0..0` it rejects groups without a signal.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantageRange {
    /// Smallest advantage of a rejected group. Default 0.
    pub min: f64,
    /// Largest advantage of a rejected group. Default 0.
    pub max: f64,
}

impl AdvantageRange {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails with the name of the invalid option.
    pub fn validate(&self) -> Checked {
        let must = format!("be at most max, {}", self.max);
        validate::check(self.min <= self.max, "min", self.min, &must)
    }

    /// Returns 1 for the groups that have an advantage outside the range: `[P, n]` to u8 `[P]`.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid or `advantages` has another rank.
    pub fn admits(&self, advantages: &Tensor) -> Result<Tensor> {
        self.validate()?;
        let &[_, _] = advantages.dims() else {
            bail!("advantages: shape {:?}, must be [P, n]", advantages.dims());
        };
        let x = for_statistics(advantages)?;
        // A NaN is outside every range.
        let inside = (x.ge(self.min)? * x.le(self.max)?)?;
        inside.eq(0u8)?.max(1)
    }
}

//! A curriculum: tasks are sampled by how well the policy solves them.

use std::collections::BTreeMap;

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::Invalid;
use crate::dtype::for_statistics;
use crate::validate::{self, Checked};

/// Task pools by difficulty, each with a sampling weight (prime-rl).
///
/// Use pools if most tasks are always or never solved: such tasks give no gradient. A task's score
/// is the mean reward in its latest group. The task belongs to the first pool whose threshold is at
/// least the score, or to the last pool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct DifficultyPools {
    /// Largest score in each pool, ascending. Default `[0.2, 0.8, 1.0]`.
    pub thresholds: Vec<f64>,
    /// Task weight in each pool. Default `[0.2, 1.0, 0.2]`.
    pub weights: Vec<f64>,
    /// Weight for a task without a score. Default 1.
    pub unseen_weight: f64,
}

impl Default for DifficultyPools {
    /// Samples tasks that are solved sometimes five times as often as the others.
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
    /// Fails if an option is invalid; the error names it.
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

    /// Returns the pool for a score.
    pub fn pool(&self, score: f64) -> usize {
        let place = self.thresholds.iter().position(|bound| *bound >= score);
        place.unwrap_or(self.thresholds.len().saturating_sub(1))
    }
}

/// Each task's latest score. The serialized form is the complete state.
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
    /// Sets a task's score to the mean `rewards` in a group.
    ///
    /// # Errors
    ///
    /// Fails if there are no rewards, or if a reward or their sum is not finite.
    pub fn record(&mut self, task: usize, rewards: &[f64]) -> Result<()> {
        let sum = rewards.iter().sum::<f64>();
        if rewards.is_empty() || rewards.iter().any(|x| !x.is_finite()) || !sum.is_finite() {
            bail!("rewards: {rewards:?}, must be at least one finite number, with a finite sum");
        }
        let mean = sum / rewards.len() as f64;
        self.0.insert(task, mean);
        Ok(())
    }

    /// Returns a task's pool, or `None` if it has no score.
    pub fn pool(&self, task: usize, pools: &DifficultyPools) -> Option<usize> {
        self.0.get(&task).map(|score| pools.pool(*score))
    }

    /// Returns the tasks that have a score, in ascending order.
    pub fn tasks(&self) -> impl Iterator<Item = usize> {
        self.0.keys().copied()
    }

    /// Returns the scores under new task numbers. A task without a new number loses its score.
    #[must_use]
    pub fn renumber(&self, number: impl Fn(usize) -> Option<usize>) -> Self {
        let scores = self.0.iter();
        Self(
            scores
                .filter_map(|(task, score)| Some((number(*task)?, *score)))
                .collect(),
        )
    }

    /// Returns the weight for each task in `0..tasks`.
    ///
    /// # Errors
    ///
    /// Fails if a pool option is invalid.
    pub fn weights(&self, tasks: usize, pools: &DifficultyPools) -> Result<Vec<f64>> {
        pools.validate()?;
        let weight = |task| match self.pool(task, pools) {
            Some(pool) => pools.weights[pool],
            None => pools.unseen_weight,
        };
        Ok((0..tasks).map(weight).collect())
    }

    /// Counts the tasks in `0..tasks` that are in each pool.
    pub fn occupancy(&self, tasks: usize, pools: &DifficultyPools) -> Vec<usize> {
        let mut counts = vec![0; pools.thresholds.len()];
        for pool in (0..tasks).filter_map(|task| self.pool(task, pools)) {
            counts[pool] += 1;
        }
        counts
    }
}

/// A gate that rejects groups whose advantages all lie in a range (prime-rl).
///
/// The default range, from 0 to 0, rejects groups without a signal.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantageRange {
    /// Smallest advantage in a rejected group. Default 0.
    pub min: f64,
    /// Largest advantage in a rejected group. Default 0.
    pub max: f64,
}

impl AdvantageRange {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        let must = format!("be at most max, {}", self.max);
        validate::check(self.min <= self.max, "min", self.min, &must)
    }

    /// Returns 1 for groups that have an advantage outside the range: `[P, n]` to u8 `[P]`.
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
        // NaN is outside every range.
        let inside = (x.ge(self.min)? * x.le(self.max)?)?;
        inside.eq(0u8)?.max(1)
    }
}

//! Batches whose rows are steps in trajectories, for multi-turn training.

mod gigpo;

pub use gigpo::{EpisodePopulation, Gigpo};

use std::collections::HashMap;

use candle_core::{Result, Tensor, bail};

use crate::advantage::reverse_recurrence;
use crate::groups::{GroupLayout, Groups};
use crate::validate;

/// Each row's trajectory and state, for a batch with B rows.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::trajectories::Steps;
///
/// // Two trajectories of two steps, the second one in reverse order; both start in state 7.
/// let steps = Steps::new([0u32, 0, 1, 1].as_slice(), [7u32, 8, 9, 7].as_slice()).numbers(vec![0, 1, 1, 0]);
/// let rewards = Tensor::new(&[0f64, 1., 4., 2.], &Device::Cpu)?;
/// let returns = steps.discounted_returns(&rewards, 0.5)?;
/// assert_eq!(returns.to_vec1::<f64>()?, [0.5, 1., 4., 4.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Steps {
    /// Each row's trajectory.
    pub trajectories: Groups,
    /// The state in which each row's action was chosen, such as a hash of the observation. Rows
    /// for different tasks may share a number.
    pub states: Groups,
    /// Each row's time in its trajectory; only the order matters. If absent, a trajectory's rows
    /// are in time order.
    pub numbers: Option<Vec<i64>>,
}

impl Steps {
    /// Creates steps whose rows are in time order.
    pub fn new(trajectories: impl Into<Groups>, states: impl Into<Groups>) -> Self {
        Self {
            trajectories: trajectories.into(),
            states: states.into(),
            numbers: None,
        }
    }

    /// Sets each row's time in its trajectory.
    #[must_use]
    pub fn numbers(mut self, numbers: Vec<i64>) -> Self {
        self.numbers = Some(numbers);
        self
    }

    /// Computes `G_t = r_t + gamma G_(t+1)` along each trajectory: from `rewards` `[B]` to returns
    /// `[B]` for the same rows.
    ///
    /// # Errors
    ///
    /// Fails if there are not B trajectories or times, if two rows are the same step, or if `gamma`
    /// is not from 0 to 1.
    pub fn discounted_returns(&self, rewards: &Tensor, gamma: f64) -> Result<Tensor> {
        validate::unit_interval("gamma", gamma)?;
        let ids = self.trajectory_of(rewards)?;
        let order = self.by_time(&ids)?;
        let mut place = vec![0u32; order.len()];
        for (at, &row) in order.iter().enumerate() {
            place[row as usize] = at as u32;
        }
        let sorted: Vec<i64> = order.iter().map(|&row| ids[row as usize]).collect();
        let device = rewards.device();
        let order = Tensor::new(order, device)?;
        let rewards = rewards.contiguous()?.index_select(&order, 0)?;
        let (layout, rows) = by_trajectory(sorted, &rewards)?;
        let discount = (rows.zeros_like()? + gamma)?;
        let returns = layout.to_samples(&reverse_recurrence(&rows, &discount)?)?;
        returns.index_select(&Tensor::new(place, device)?, 0)
    }

    /// Sums the rewards in each row's trajectory: `[B]` to `[B]`.
    pub(crate) fn sums(&self, rewards: &Tensor) -> Result<Tensor> {
        let (layout, rewards) = by_trajectory(self.trajectory_of(rewards)?, rewards)?;
        layout.to_members(&rewards.sum_keepdim(1)?)
    }

    fn trajectory_of(&self, rewards: &Tensor) -> Result<Vec<i64>> {
        let &[rows] = rewards.dims() else {
            bail!("rewards: shape {:?}, must be [B]", rewards.dims());
        };
        if rows == 0 {
            bail!("rewards: shape [0] is empty, there must be at least one step");
        }
        self.trajectories.to_ids("trajectories", rows)
    }

    /// Sorts the rows by trajectory, then by time.
    fn by_time(&self, trajectories: &[i64]) -> Result<Vec<u32>> {
        let rows = trajectories.len();
        let mut order: Vec<u32> = (0..rows as u32).collect();
        let Some(numbers) = &self.numbers else {
            order.sort_by_key(|&row| trajectories[row as usize]);
            return Ok(order);
        };
        if numbers.len() != rows {
            bail!(
                "numbers: {} numbers of steps for {rows} rows, there must be one for each",
                numbers.len()
            );
        }
        let key = |row: u32| (trajectories[row as usize], numbers[row as usize]);
        order.sort_by_key(|&row| key(row));
        if let Some(pair) = order.windows(2).find(|pair| key(pair[0]) == key(pair[1])) {
            let (trajectory, number) = key(pair[0]);
            bail!(
                "numbers: rows {} and {} are both step {number} of trajectory {trajectory}, there must be one row for a step",
                pair[0],
                pair[1]
            );
        }
        Ok(order)
    }

    /// Groups the rows that have the same task and state.
    pub(crate) fn state_groups(&self, tasks: &Groups, rows: usize) -> Result<Groups> {
        let tasks = tasks.to_ids("groups", rows)?;
        let states = self.states.to_ids("states", rows)?;
        Ok(Groups::Ids(numbered(tasks.into_iter().zip(states))))
    }
}

/// Arranges the rewards with one row per trajectory, 0 after its last step.
fn by_trajectory(ids: Vec<i64>, rewards: &Tensor) -> Result<(GroupLayout, Tensor)> {
    let layout = GroupLayout::new(&Groups::Ids(ids), rewards.dim(0)?, rewards.device())?;
    let rows = layout.to_rows(rewards)?;
    let rows = layout.present()?.where_cond(&rows, &rows.zeros_like()?)?;
    Ok((layout, rows))
}

/// Numbers the items from 0 by first appearance. Equal items share a number.
pub(crate) fn numbered<T: std::hash::Hash + Eq>(items: impl Iterator<Item = T>) -> Vec<i64> {
    let mut numbers = HashMap::new();
    items
        .map(|item| {
            let next = numbers.len() as i64;
            *numbers.entry(item).or_insert(next)
        })
        .collect()
}

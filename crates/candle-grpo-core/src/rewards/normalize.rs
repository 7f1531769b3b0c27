//! Normalising rewards with a mean and a standard deviation that are chosen independently.

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::dtype::statistics_dtype;
use crate::groups::{GroupLayout, Groups};
use crate::moments::{Moments, divide_by_std};

/// Over which rewards a moment is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Not at all: the mean is 0, the standard deviation is not divided by.
    #[default]
    None,
    /// The samples of the same prompt.
    Group,
    /// All samples of the batch.
    Batch,
    /// All samples seen so far, these included: needs [`RunningMoments`].
    Running,
}

/// `(reward - mean) / (std + epsilon)` as in ROLL, where mean and std may be of different levels: mean of the group and
/// std of the batch is the normalisation of <https://arxiv.org/abs/2508.08221>.
///
/// With the std of the group, a group whose rewards are all equal is not divided: with the mean of the group it gives 0,
/// with any other its distance from that mean, and not that distance over epsilon.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RewardNorm {
    /// The level of the mean (ROLL's `norm_mean_type`).
    pub mean: Level,
    /// The level of the standard deviation (ROLL's `norm_std_type`).
    pub std: Level,
    /// Added to the standard deviation.
    pub epsilon: f64,
    /// 1 for the standard deviation of a sample, 0 for that of a population.
    pub ddof: usize,
}

impl Default for RewardNorm {
    fn default() -> Self {
        Self {
            mean: Level::None,
            std: Level::None,
            epsilon: 1e-6,
            ddof: 1,
        }
    }
}

impl RewardNorm {
    /// Whether [`RunningMoments`] are needed.
    pub fn is_running(&self) -> bool {
        self.mean == Level::Running || self.std == Level::Running
    }

    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        if !(self.epsilon > 0. && self.epsilon.is_finite()) {
            bail!(
                "norm.epsilon: {}, must be positive and finite",
                self.epsilon
            );
        }
        if self.ddof > 1 {
            bail!("norm.ddof: {}, must be 0 or 1", self.ddof);
        }
        Ok(())
    }

    pub(crate) fn apply(
        &self,
        rewards: &Tensor,
        finite: &Tensor,
        groups: &Groups,
        running: Option<&mut RunningMoments>,
    ) -> Result<Tensor> {
        self.validate()?;
        let layout = GroupLayout::new(groups, rewards.dim(0)?, rewards.device())?;
        if self.std == Level::Group
            && self.ddof == 1
            && let Some(group) = layout.sizes().iter().position(|&n| n == 1)
        {
            bail!(
                "norm.std: group {group} has one sample, whose standard deviation is not defined; use batch, running or none"
            );
        }
        let rows = layout.to_rows(rewards)?;
        let selected = (layout.to_rows(finite)? * layout.present()?)?;
        let group = Moments::new(&rows, &selected)?;
        let batch = Moments::new(rewards, finite)?;
        let running = match running {
            Some(running) if self.is_running() => {
                running.update(&batch)?;
                Some(running)
            }
            None if self.is_running() => {
                bail!("running: absent, must be given for a running mean or standard deviation")
            }
            _ => None,
        };
        let centered = match (self.mean, &running) {
            (Level::Group, _) => group.centered.clone(),
            (Level::Batch, _) => layout.to_rows(&batch.centered)?,
            (Level::Running, Some(running)) => rows.broadcast_sub(&running.mean)?,
            _ => rows,
        };
        let normalised = match (self.std, &running) {
            (Level::Group, _) => {
                let divided = divide_by_std(&centered, &group.std(self.ddof)?, self.epsilon)?;
                let constant = group.constant.broadcast_as(centered.shape())?;
                constant.where_cond(&centered, &divided)?
            }
            (Level::Batch, _) => {
                let std = batch.std(self.ddof)?.unsqueeze(0)?;
                divide_by_std(&centered, &std, self.epsilon)?
            }
            (Level::Running, Some(running)) => {
                divide_by_std(&centered, &running.std(self.ddof)?, self.epsilon)?
            }
            _ => centered,
        };
        layout.to_samples(&normalised)
    }
}

/// Mean and variance of all rewards seen so far (Chan's parallel update), on the device, without decay.
#[derive(Debug, Clone)]
pub struct RunningMoments {
    count: Tensor,
    mean: Tensor,
    squares: Tensor,
}

/// [`RunningMoments`] as numbers, for a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunningState {
    /// How many rewards.
    pub count: f64,
    /// Their mean.
    pub mean: f64,
    /// The sum of their squared distances from the mean.
    pub squares: f64,
}

impl RunningMoments {
    /// Nothing seen yet.
    pub fn new(device: &Device) -> Result<Self> {
        Self::from_state(RunningState::default(), device)
    }

    /// What a checkpoint holds.
    pub fn from_state(state: RunningState, device: &Device) -> Result<Self> {
        if !(state.count >= 0. && state.squares >= 0. && state.mean.is_finite()) {
            bail!("running moments: {state:?}, counts and squares must be at least 0 and finite");
        }
        let dtype = statistics_dtype(device);
        let scalar = |x: f64| Tensor::new(&[x], device)?.to_dtype(dtype);
        Ok(Self {
            count: scalar(state.count)?,
            mean: scalar(state.mean)?,
            squares: scalar(state.squares)?,
        })
    }

    /// The numbers, copied to the host.
    pub fn to_host(&self) -> Result<RunningState> {
        let numbers = Tensor::cat(&[&self.count, &self.mean, &self.squares], 0)?
            .to_dtype(DType::F64)?
            .to_vec1::<f64>()?;
        Ok(RunningState {
            count: numbers[0],
            mean: numbers[1],
            squares: numbers[2],
        })
    }

    /// The standard deviation of the rewards seen, `[1]`; 1 as long as it is not defined.
    pub fn std(&self, ddof: usize) -> Result<Tensor> {
        let denominator = (&self.count - ddof as f64)?;
        let defined = denominator.gt(0.)?;
        let variance = (&self.squares / denominator.maximum(1.)?)?;
        defined.where_cond(&variance.sqrt()?, &self.mean.ones_like()?)
    }

    /// The mean of the rewards seen, `[1]`.
    pub fn mean(&self) -> &Tensor {
        &self.mean
    }

    fn update(&mut self, batch: &Moments) -> Result<()> {
        let total = (&self.count + &batch.count)?;
        let share = (&batch.count / total.maximum(1.)?)?;
        let delta = (&batch.mean - &self.mean)?;
        let between = ((delta.sqr()? * &self.count)? * &share)?;
        self.squares = ((&self.squares + batch.sum_of_squares())? + between)?;
        self.mean = (&self.mean + (delta * share)?)?;
        self.count = total;
        Ok(())
    }
}

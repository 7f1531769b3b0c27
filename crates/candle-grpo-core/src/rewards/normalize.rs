//! Reward normalization, with independent levels for mean and standard deviation.

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::advantage::DEFAULT_EPSILON;
use crate::dtype::statistics_dtype;
use crate::groups::{GroupLayout, Groups};
use crate::moments::{Moments, divide_by_std};
use crate::validate::{self, Checked};

/// The rewards over which a moment is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NormLevel {
    /// None: the mean is 0, or the rewards are not divided. The default.
    #[default]
    None,
    /// Samples for the same prompt.
    Group,
    /// All samples in the batch.
    Batch,
    /// All samples so far, including this batch. Needs [`RunningMoments`].
    Running,
}

/// The center for a standard deviation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StdCenter {
    /// The mean over the same rewards. The default.
    #[default]
    OwnMean,
    /// The subtracted mean, at any level (AReaL). A deviation without a degree of freedom is 1.
    SubtractedMean,
}

/// Reward normalization as in ROLL: `(reward - mean) / (std + epsilon)`, with independent levels
/// for mean and std. The group mean and the batch std give the normalization from
/// <https://arxiv.org/abs/2508.08221>.
///
/// With a group std, a group with equal rewards is not divided. It gives 0 with the group mean, and
/// the distance from the mean at any other level.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RewardNorm {
    /// Level for the mean (ROLL's `norm_mean_type`). Default `none`.
    pub mean: NormLevel,
    /// Level for the standard deviation (ROLL's `norm_std_type`). Default `none`.
    pub std: NormLevel,
    /// Added to the standard deviation. Default `DEFAULT_EPSILON`.
    pub epsilon: f64,
    /// Delta degrees of freedom for the variance: 1 divides by n - 1, 0 by n. Default 1.
    pub ddof: usize,
    /// Leaves the reward itself out of its group or batch mean (AReaL's `mean_leave1out`). A
    /// reward that is alone has mean 0. Default `false`.
    pub leave_one_out: bool,
    /// Center for the group or batch standard deviation. Default `own_mean`.
    pub std_center: StdCenter,
}

impl Default for RewardNorm {
    fn default() -> Self {
        Self {
            mean: NormLevel::None,
            std: NormLevel::None,
            epsilon: DEFAULT_EPSILON,
            ddof: 1,
            leave_one_out: false,
            std_center: StdCenter::OwnMean,
        }
    }
}

impl RewardNorm {
    /// Returns whether [`RunningMoments`] are needed.
    pub fn is_running(&self) -> bool {
        self.mean == NormLevel::Running || self.std == NormLevel::Running
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::positive("epsilon", self.epsilon)?;
        validate::ddof("ddof", self.ddof)?;
        let running = self.mean == NormLevel::Running || self.mean == NormLevel::None;
        validate::check(
            !(self.leave_one_out && running),
            "leave_one_out",
            true,
            "be false unless the mean is that of a group or batch",
        )?;
        validate::check(
            self.std_center == StdCenter::OwnMean || self.std != NormLevel::Running,
            "std_center",
            "subtracted_mean",
            "be own_mean with a running standard deviation",
        )
    }

    pub(crate) fn apply(
        &self,
        rewards: &Tensor,
        finite: &Tensor,
        groups: &Groups,
        running: Option<&mut RunningMoments>,
    ) -> Result<Tensor> {
        let layout = GroupLayout::new(groups, rewards.dim(0)?, rewards.device())?;
        if self.std == NormLevel::Group
            && self.std_center == StdCenter::OwnMean
            && self.ddof == 1
            && let Some(group) = layout.sizes().iter().position(|&n| n == 1)
        {
            bail!(
                "norm.std: group {group} has one sample, whose standard deviation is undefined; use batch, running or none"
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
            (NormLevel::Group, _) => self.left_out(&group.centered, &group.count, &rows)?,
            (NormLevel::Batch, _) => {
                let centered = self.left_out(&batch.centered, &batch.count, rewards)?;
                layout.to_rows(&centered)?
            }
            (NormLevel::Running, Some(running)) => rows.broadcast_sub(&running.mean)?,
            _ => rows,
        };
        let normalized = match (self.std, &running) {
            (NormLevel::Group | NormLevel::Batch, _)
                if self.std_center == StdCenter::SubtractedMean =>
            {
                let std = self.std_of_centered(&centered, &selected)?;
                divide_by_std(&centered, &std, self.epsilon)?
            }
            (NormLevel::Group, _) => {
                let divided = divide_by_std(&centered, &group.std(self.ddof)?, self.epsilon)?;
                let constant = group.constant.broadcast_as(centered.shape())?;
                constant.where_cond(&centered, &divided)?
            }
            (NormLevel::Batch, _) => {
                let std = batch.std(self.ddof)?.unsqueeze(0)?;
                divide_by_std(&centered, &std, self.epsilon)?
            }
            (NormLevel::Running, Some(running)) => {
                divide_by_std(&centered, &running.std(self.ddof)?, self.epsilon)?
            }
            _ => centered,
        };
        layout.to_samples(&normalized)
    }

    /// Changes distances from the mean over `count` entries in `x` into distances from the mean
    /// over the other entries, if the option is set.
    fn left_out(&self, centered: &Tensor, count: &Tensor, x: &Tensor) -> Result<Tensor> {
        if !self.leave_one_out {
            return Ok(centered.clone());
        }
        let factor = (count / (count - 1.)?.maximum(1.)?)?;
        let others = centered.broadcast_mul(&factor)?;
        let alone = count.le(1.)?.broadcast_as(x.shape())?;
        alone.where_cond(x, &others)
    }

    /// Returns the root mean square of `centered` `[P, W]` over its group or the batch: `[P, 1]` or
    /// `[1, 1]`.
    fn std_of_centered(&self, centered: &Tensor, selected: &Tensor) -> Result<Tensor> {
        let squares = selected
            .where_cond(centered, &centered.zeros_like()?)?
            .sqr()?;
        let ones = selected.to_dtype(squares.dtype())?;
        let sum = |x: &Tensor| match self.std {
            NormLevel::Group => x.sum_keepdim(1),
            _ => x.sum_all()?.reshape((1, 1)),
        };
        let freedom = (sum(&ones)? - self.ddof as f64)?;
        let std = (sum(&squares)? / freedom.maximum(1.)?)?.sqrt()?;
        freedom.gt(0.)?.where_cond(&std, &std.ones_like()?)
    }
}

/// Mean and variance over all rewards so far, on the device and without decay (Chan's parallel
/// update).
#[derive(Debug, Clone)]
pub struct RunningMoments {
    count: Tensor,
    mean: Tensor,
    squares: Tensor,
}

/// [`RunningMoments`] state, for a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunningState {
    /// Number of rewards. Default 0.
    pub count: f64,
    /// Mean reward. Default 0.
    pub mean: f64,
    /// Summed squared distances from the mean. Default 0.
    pub squares: f64,
}

impl RunningMoments {
    /// Creates moments over no rewards.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot allocate.
    pub fn new(device: &Device) -> Result<Self> {
        Self::from_state(RunningState::default(), device)
    }

    /// Restores the moments from a checkpoint.
    ///
    /// # Errors
    ///
    /// Fails if a number is not finite, or if the count or the squares are negative.
    pub fn from_state(state: RunningState, device: &Device) -> Result<Self> {
        let numbers = [state.count, state.mean, state.squares];
        let finite = numbers.iter().all(|x| x.is_finite());
        if !(finite && state.count >= 0. && state.squares >= 0.) {
            bail!("state: {state:?}, must be finite, with a count and squares of at least 0");
        }
        let dtype = statistics_dtype(device);
        let scalar = |x: f64| Tensor::new(&[x], device)?.to_dtype(dtype);
        Ok(Self {
            count: scalar(state.count)?,
            mean: scalar(state.mean)?,
            squares: scalar(state.squares)?,
        })
    }

    /// Copies the state to the host. Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Fails if the device cannot copy.
    pub fn state(&self) -> Result<RunningState> {
        let numbers = Tensor::cat(&[&self.count, &self.mean, &self.squares], 0)?
            .to_dtype(DType::F64)?
            .to_vec1::<f64>()?;
        Ok(RunningState {
            count: numbers[0],
            mean: numbers[1],
            squares: numbers[2],
        })
    }

    /// Returns the standard deviation over all rewards so far, `[1]`, or 1 while it is undefined.
    ///
    /// # Errors
    ///
    /// Fails if a device operation fails.
    pub fn std(&self, ddof: usize) -> Result<Tensor> {
        let denominator = (&self.count - ddof as f64)?;
        let defined = denominator.gt(0.)?;
        let variance = (&self.squares / denominator.maximum(1.)?)?;
        defined.where_cond(&variance.sqrt()?, &self.mean.ones_like()?)
    }

    /// Returns the mean over all rewards so far, `[1]`.
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

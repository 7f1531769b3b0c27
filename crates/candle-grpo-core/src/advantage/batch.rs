//! Tensors of a batch from which advantages are computed.

use candle_core::{D, Result, Tensor, bail};

use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::groups::Groups;
use crate::mask::Mask;
use crate::rewards::{IntoRewards, RewardTensor};
use crate::trajectories::Steps;

/// The tensors of a batch of B sequences with T response tokens from which advantages are computed.
///
/// Every tensor is a constant. Positions outside the response mask may hold anything, including
/// NaN. An estimator that needs an absent tensor returns an error that names it.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, AdvantagePipeline};
///
/// let rewards = Tensor::new(&[1f32, 0., 1., 0.], &Device::Cpu)?;
/// let response_mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], &Device::Cpu)?;
/// let batch = AdvantageBatch::new(&rewards, 4).response_mask(&response_mask);
///
/// let opo = AdvantagePipeline::opo().estimate(&batch)?;
/// assert!((opo.advantages.to_vec1::<f32>()?[0] - 0.4444).abs() < 1e-4);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AdvantageBatch<'a> {
    /// Rewards of the sequences, `[B]`, or `[B, K]` for several components.
    pub rewards: Option<&'a Tensor>,
    /// Groups of sequences that share a prompt.
    pub groups: Groups,
    /// Tokens that the policy generated, `[B, T]`, 0 or 1 in any dtype.
    pub response_mask: Option<&'a Tensor>,
    /// Rewards of the tokens, `[B, T]`.
    pub token_rewards: Option<&'a Tensor>,
    /// Values of a critic, `[B, T]`.
    pub values: Option<&'a Tensor>,
    /// Baselines from another source, such as the rewards of greedy completions, `[B]`.
    pub reward_baselines: Option<&'a Tensor>,
    /// Log-probs of the policy before the update, `[B, T]`.
    pub old_log_probs: Option<&'a Tensor>,
    /// Log-probs of the reference policy, `[B, T]`.
    pub ref_log_probs: Option<&'a Tensor>,
    /// Log-probs of a teacher, `[B, T]`.
    pub teacher_log_probs: Option<&'a Tensor>,
    /// Sums over the vocabulary of the squared probabilities of the old policy, `[B, T]`.
    pub sum_of_squared_probs: Option<&'a Tensor>,
    /// Importance weights of samples from another engine, `[B, T]`.
    pub rollout_weights: Option<&'a Tensor>,
    /// Trajectory and state of each row, if the rows are steps of trajectories.
    pub steps: Option<&'a Steps>,
    /// Scores of the whole trajectories, `[B]`, if they are not the sums of the rewards of their
    /// steps.
    pub episode_rewards: Option<&'a Tensor>,
}

impl<'a> AdvantageBatch<'a> {
    /// A batch of `rewards` `[B]` or `[B, K]` of sequences in these groups.
    pub fn new(rewards: &'a Tensor, groups: impl Into<Groups>) -> Self {
        Self {
            rewards: Some(rewards),
            ..Self::without_rewards(groups.into())
        }
    }

    /// A batch of `token_rewards` `[B, T]` in which every sequence is a group of its own; see
    /// [`Self::groups`].
    pub fn from_token_rewards(token_rewards: &'a Tensor, response_mask: &'a Tensor) -> Self {
        Self {
            token_rewards: Some(token_rewards),
            response_mask: Some(response_mask),
            ..Self::without_rewards(1.into())
        }
    }

    pub(crate) fn without_rewards(groups: Groups) -> Self {
        Self {
            rewards: None,
            groups,
            response_mask: None,
            token_rewards: None,
            values: None,
            reward_baselines: None,
            old_log_probs: None,
            ref_log_probs: None,
            teacher_log_probs: None,
            sum_of_squared_probs: None,
            rollout_weights: None,
            steps: None,
            episode_rewards: None,
        }
    }

    /// Sets the groups of sequences that share a prompt.
    pub fn groups(mut self, groups: impl Into<Groups>) -> Self {
        self.groups = groups.into();
        self
    }

    /// Sets the tokens `[B, T]` (1 or 0) that the policy generated.
    pub fn response_mask(mut self, response_mask: &'a Tensor) -> Self {
        self.response_mask = Some(response_mask);
        self
    }

    /// Sets the rewards `[B, T]` of the tokens. If there are no rewards of sequences, these are
    /// their sums.
    pub fn token_rewards(mut self, token_rewards: &'a Tensor) -> Self {
        self.token_rewards = Some(token_rewards);
        self
    }

    /// Sets the values `[B, T]` of a critic.
    pub fn values(mut self, values: &'a Tensor) -> Self {
        self.values = Some(values);
        self
    }

    /// Sets baselines `[B]` from another source, such as the rewards of greedy completions of the
    /// same prompts.
    pub fn reward_baselines(mut self, reward_baselines: &'a Tensor) -> Self {
        self.reward_baselines = Some(reward_baselines);
        self
    }

    /// Sets the log-probs `[B, T]` of the policy before the update.
    pub fn old_log_probs(mut self, old_log_probs: &'a Tensor) -> Self {
        self.old_log_probs = Some(old_log_probs);
        self
    }

    /// Sets the log-probs `[B, T]` of the reference policy.
    pub fn ref_log_probs(mut self, ref_log_probs: &'a Tensor) -> Self {
        self.ref_log_probs = Some(ref_log_probs);
        self
    }

    /// Sets the log-probs `[B, T]` of a teacher.
    pub fn teacher_log_probs(mut self, teacher_log_probs: &'a Tensor) -> Self {
        self.teacher_log_probs = Some(teacher_log_probs);
        self
    }

    /// Sets the sums over the vocabulary of the squared probabilities of the old policy, `[B, T]`.
    pub fn sum_of_squared_probs(mut self, sum_of_squared_probs: &'a Tensor) -> Self {
        self.sum_of_squared_probs = Some(sum_of_squared_probs);
        self
    }

    /// Sets the importance weights `[B, T]` of samples from another engine.
    pub fn rollout_weights(mut self, rollout_weights: &'a Tensor) -> Self {
        self.rollout_weights = Some(rollout_weights);
        self
    }

    /// Sets the trajectory and state of each row.
    pub fn steps(mut self, steps: &'a Steps) -> Self {
        self.steps = Some(steps);
        self
    }

    /// Sets the score `[B]` of the whole trajectory of each row, if it is not the sum of the
    /// rewards of its steps.
    pub fn episode_rewards(mut self, episode_rewards: &'a Tensor) -> Self {
        self.episode_rewards = Some(episode_rewards);
        self
    }

    /// Returns the response mask.
    ///
    /// # Errors
    ///
    /// Fails if it is absent or not `[B, T]`.
    pub fn mask(&self) -> Result<Mask> {
        match self.response_mask {
            Some(mask) => Mask::new(mask),
            None => bail!("response_mask: absent, must be given for this estimator"),
        }
    }

    /// Returns the rewards of the sequences: [`Self::rewards`], or the sums `[B]` of the token
    /// rewards over the mask.
    ///
    /// # Errors
    ///
    /// Fails if both are absent.
    pub fn sequence_rewards(&self) -> Result<RewardTensor> {
        match (self.rewards, self.token_rewards) {
            (Some(rewards), _) => rewards.into_rewards(),
            (None, Some(token_rewards)) => Ok(RewardTensor {
                values: self
                    .on_tokens("token_rewards", self.token_rewards)?
                    .sum(D::Minus1)?,
                result_dtype: arithmetic_dtype(token_rewards.dtype()),
            }),
            (None, None) => bail!("rewards: absent, must be given (or token_rewards)"),
        }
    }

    /// Returns a tensor `[B, T]` of this batch in the dtype of statistics, 0 outside the mask.
    /// `name` is for errors.
    ///
    /// # Errors
    ///
    /// Fails if the tensor or the mask is absent, or if their shapes differ.
    pub fn on_tokens(&self, name: &str, tensor: Option<&Tensor>) -> Result<Tensor> {
        let Some(tensor) = tensor else {
            bail!("{name}: absent, must be given for this estimator");
        };
        let mask = self.mask()?;
        mask.check_shape(name, tensor)?;
        mask.select(&for_statistics(tensor)?)
    }

    /// The reward baselines in the dtype of statistics; an error if they are absent.
    pub(crate) fn baselines(&self) -> Result<Tensor> {
        match self.reward_baselines {
            Some(baselines) => for_statistics(baselines),
            None => bail!("reward_baselines: absent, must be given for this baseline"),
        }
    }
}

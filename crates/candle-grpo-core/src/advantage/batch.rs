//! What an advantage estimator may use.

use candle_core::{D, Result, Tensor, bail};

use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::groups::Groups;
use crate::mask::Mask;
use crate::rewards::{IntoRewards, RewardTensor};
use crate::trajectories::Steps;

/// The tensors of a batch of B sequences with T response tokens, from which advantages are taken.
///
/// Every tensor is a constant. Positions outside the response mask may hold anything, NaN included. An estimator that
/// needs a tensor that is absent gives an error that names it.
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
    /// `[B]`, or `[B, K]` for several components.
    pub rewards: Option<&'a Tensor>,
    /// Which sequences answer the same prompt.
    pub groups: Groups,
    /// `[B, T]`, 0 or 1 in any dtype.
    pub response_mask: Option<&'a Tensor>,
    /// `[B, T]`.
    pub token_rewards: Option<&'a Tensor>,
    /// `[B, T]`.
    pub values: Option<&'a Tensor>,
    /// `[B]`.
    pub reward_baselines: Option<&'a Tensor>,
    /// `[B, T]`.
    pub old_log_probs: Option<&'a Tensor>,
    /// `[B, T]`.
    pub ref_log_probs: Option<&'a Tensor>,
    /// `[B, T]`.
    pub teacher_log_probs: Option<&'a Tensor>,
    /// `[B, T]`.
    pub sum_of_squared_probs: Option<&'a Tensor>,
    /// `[B, T]`.
    pub rollout_weights: Option<&'a Tensor>,
    /// What the rows are steps of, if they are steps.
    pub steps: Option<&'a Steps>,
    /// `[B]`.
    pub episode_rewards: Option<&'a Tensor>,
}

impl<'a> AdvantageBatch<'a> {
    /// `rewards` `[B]` or `[B, K]` of sequences, and the groups of these.
    pub fn new(rewards: &'a Tensor, groups: impl Into<Groups>) -> Self {
        Self {
            rewards: Some(rewards),
            groups: groups.into(),
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

    /// `token_rewards` `[B, T]`, and the positions that count. Every sequence is a group of its own until
    /// [`Self::groups`] says otherwise.
    pub fn from_token_rewards(token_rewards: &'a Tensor, response_mask: &'a Tensor) -> Self {
        let mut batch = Self::new(token_rewards, 1)
            .token_rewards(token_rewards)
            .response_mask(response_mask);
        batch.rewards = None;
        batch
    }

    /// Which sequences answer the same prompt.
    pub fn groups(mut self, groups: impl Into<Groups>) -> Self {
        self.groups = groups.into();
        self
    }

    /// The tokens `[B, T]` (1 or 0) that the policy wrote.
    pub fn response_mask(mut self, response_mask: &'a Tensor) -> Self {
        self.response_mask = Some(response_mask);
        self
    }

    /// A reward `[B, T]` for each token. The reward of a sequence is their sum where no other is given.
    pub fn token_rewards(mut self, token_rewards: &'a Tensor) -> Self {
        self.token_rewards = Some(token_rewards);
        self
    }

    /// What a critic expects at each token, `[B, T]`.
    pub fn values(mut self, values: &'a Tensor) -> Self {
        self.values = Some(values);
        self
    }

    /// A baseline `[B]` that is known from elsewhere, as the reward of a greedy answer to the same prompt.
    pub fn reward_baselines(mut self, reward_baselines: &'a Tensor) -> Self {
        self.reward_baselines = Some(reward_baselines);
        self
    }

    /// Log-probs `[B, T]` of the policy that the update starts from.
    pub fn old_log_probs(mut self, old_log_probs: &'a Tensor) -> Self {
        self.old_log_probs = Some(old_log_probs);
        self
    }

    /// Log-probs `[B, T]` of the reference policy.
    pub fn ref_log_probs(mut self, ref_log_probs: &'a Tensor) -> Self {
        self.ref_log_probs = Some(ref_log_probs);
        self
    }

    /// Log-probs `[B, T]` of a policy to learn from.
    pub fn teacher_log_probs(mut self, teacher_log_probs: &'a Tensor) -> Self {
        self.teacher_log_probs = Some(teacher_log_probs);
        self
    }

    /// The sum over the vocabulary of the squared probabilities of the old policy, `[B, T]`.
    pub fn sum_of_squared_probs(mut self, sum_of_squared_probs: &'a Tensor) -> Self {
        self.sum_of_squared_probs = Some(sum_of_squared_probs);
        self
    }

    /// Importance weights `[B, T]` of samples that another engine drew.
    pub fn rollout_weights(mut self, rollout_weights: &'a Tensor) -> Self {
        self.rollout_weights = Some(rollout_weights);
        self
    }

    /// Says that the rows are steps of trajectories, and which ones.
    pub fn steps(mut self, steps: &'a Steps) -> Self {
        self.steps = Some(steps);
        self
    }

    /// The score `[B]` of the whole trajectory that each row is a step of, where it is not the sum of the rewards of its
    /// steps.
    pub fn episode_rewards(mut self, episode_rewards: &'a Tensor) -> Self {
        self.episode_rewards = Some(episode_rewards);
        self
    }

    /// The response mask; an error if it is absent.
    pub fn mask(&self) -> Result<Mask> {
        match self.response_mask {
            Some(mask) => Mask::new(mask),
            None => bail!("response_mask: absent, must be given for this estimator"),
        }
    }

    /// The rewards of the sequences: [`Self::rewards`], or the sums `[B]` of the token rewards over the mask.
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

    /// One of the tensors `[B, T]` in the dtype of statistics, 0 outside the mask. An error that has its name if it is
    /// absent or of another shape.
    pub fn on_tokens(&self, name: &str, tensor: Option<&Tensor>) -> Result<Tensor> {
        let Some(tensor) = tensor else {
            bail!("{name}: absent, must be given for this estimator");
        };
        let mask = self.mask()?;
        mask.check_shape(name, tensor)?;
        mask.select(&for_statistics(tensor)?)
    }
}

//! Tensors of a batch from which advantages are computed.

use candle_core::{D, Result, Tensor, bail};

use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::groups::{GroupLayout, Groups};
use crate::inputs::Input;
use crate::mask::Mask;
use crate::rewards::{IntoRewards, RewardTensor, check_not_empty};
use crate::trajectories::Steps;

/// Declares [`AdvantageBatch`] and the setter of each optional tensor.
macro_rules! advantage_batch {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The tensors of a batch of B sequences with T response tokens from which advantages are
        /// computed.
        ///
        /// Every tensor is a constant. Positions outside the response mask may hold anything,
        /// including NaN. An estimator that needs an absent tensor returns an error that names it.
        ///
        /// ```
        /// # use candle_core::{DType, Device, Tensor};
        /// use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, AdvantagePipeline};
        ///
        /// let rewards = Tensor::new(&[1f32, 0., 1., 0.], &Device::Cpu)?;
        /// let response_mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], &Device::Cpu)?;
        /// let batch = AdvantageBatch::new(&rewards, 4).response_mask(&response_mask);
        ///
        /// let returns = AdvantagePipeline::reinforce_plus_plus().estimate(&batch)?.returns;
        /// assert_eq!(returns.expect("a stage of tokens").to_vec2::<f32>()?[1], [0., 0., 0.]);
        /// # Ok::<(), candle_core::Error>(())
        /// ```
        #[derive(Debug, Clone)]
        pub struct AdvantageBatch {
            /// Rewards of the sequences, `[B]`, or `[B, K]` for several components.
            pub rewards: Option<Tensor>,
            /// Groups of sequences that share a prompt.
            pub groups: Groups,
            /// Trajectory and state of each row, if the rows are steps of trajectories.
            pub steps: Option<Steps>,
            /// Number of steps of the run before this batch, for coefficients with a schedule.
            pub step: Option<usize>,
            $($(#[$doc])* pub $name: Option<Tensor>,)*
        }

        impl AdvantageBatch {
            /// Returns whether a batch can have `input`.
            pub fn accepts(input: Input) -> bool {
                [$(stringify!($name)),*].contains(&input.name())
            }

            /// Sets `input`. One that a batch does not [accept](Self::accepts) changes nothing.
            pub fn with(mut self, input: Input, tensor: &Tensor) -> Self {
                $(if input.name() == stringify!($name) {
                    self.$name = Some(tensor.clone());
                })*
                self
            }

            pub(crate) fn without_rewards(groups: Groups) -> Self {
                Self {
                    rewards: None,
                    groups,
                    steps: None,
                    step: None,
                    $($name: None,)*
                }
            }

            $(
                #[doc = concat!("Sets [`Self::", stringify!($name), "`](field@Self::", stringify!($name), ").")]
                #[must_use]
                pub fn $name(mut self, $name: &Tensor) -> Self {
                    self.$name = Some($name.clone());
                    self
                }
            )*
        }
    };
}

advantage_batch! {
    /// Tokens that the policy generated, `[B, T]`, 0 or 1 in any dtype.
    response_mask,
    /// Rewards of the tokens, `[B, T]`. If there are no rewards of sequences, these are their
    /// sums.
    token_rewards,
    /// Values of a critic, `[B, T]`.
    values,
    /// Baselines from another source, such as the rewards of greedy completions of the same
    /// prompts, `[B]`.
    reward_baselines,
    /// Log-probs of the policy before the update, `[B, T]`.
    old_log_probs,
    /// Log-probs of the reference policy, `[B, T]`.
    ref_log_probs,
    /// Log-probs of a teacher, `[B, T]`.
    teacher_log_probs,
    /// Sums over the vocabulary of the squared probabilities of the old policy, `[B, T]`.
    sum_of_squared_probs,
    /// Importance weights of samples from another engine, `[B, T]`.
    importance_weights,
    /// Log-probs of the sampling engine, `[B, T]`.
    rollout_log_probs,
    /// Entropies of the policy before the update, `[B, T]`.
    entropy,
    /// Scores of the whole trajectories, `[B]`, if they are not the sums of the rewards of their
    /// steps.
    episode_rewards,
}

impl AdvantageBatch {
    /// A batch of `rewards` `[B]` or `[B, K]` of sequences in these groups.
    pub fn new(rewards: &Tensor, groups: impl Into<Groups>) -> Self {
        Self {
            rewards: Some(rewards.clone()),
            ..Self::without_rewards(groups.into())
        }
    }

    /// A batch of `token_rewards` `[B, T]` in which every sequence is a group of its own; see
    /// [`Self::groups`].
    pub fn from_token_rewards(token_rewards: &Tensor, response_mask: &Tensor) -> Self {
        Self::without_rewards(1.into())
            .token_rewards(token_rewards)
            .response_mask(response_mask)
    }

    /// Sets the groups of sequences that share a prompt.
    #[must_use]
    pub fn groups(mut self, groups: impl Into<Groups>) -> Self {
        self.groups = groups.into();
        self
    }

    /// Sets the trajectory and state of each row.
    #[must_use]
    pub fn steps(mut self, steps: &Steps) -> Self {
        self.steps = Some(steps.clone());
        self
    }

    /// Sets the number of steps of the run before this batch.
    #[must_use]
    pub fn step(mut self, step: usize) -> Self {
        self.step = Some(step);
        self
    }

    /// Returns the layout of the groups, for tensors `[B, ..]` on the device of `like`, which is
    /// one: the rewards, for example.
    ///
    /// # Errors
    ///
    /// Fails as [`GroupLayout::new`] does, or if `like` is a scalar.
    pub fn layout(&self, like: &Tensor) -> Result<GroupLayout> {
        GroupLayout::new(&self.groups, like.dim(0)?, like.device())
    }

    /// Returns the response mask.
    ///
    /// # Errors
    ///
    /// Fails if it is absent or not `[B, T]`.
    pub fn mask(&self) -> Result<Mask> {
        match &self.response_mask {
            Some(mask) => Mask::new(mask),
            None => bail!("response_mask: absent, must be given for this estimator"),
        }
    }

    /// Returns the rewards of the sequences: [`Self::rewards`], or the sums `[B]` of the token
    /// rewards over the mask.
    ///
    /// # Errors
    ///
    /// Fails if both are absent, or if the rewards are empty.
    pub fn sequence_rewards(&self) -> Result<RewardTensor> {
        match (&self.rewards, &self.token_rewards) {
            (Some(rewards), _) => {
                check_not_empty(rewards)?;
                rewards.into_rewards()
            }
            (None, Some(token_rewards)) => Ok(RewardTensor {
                values: self
                    .on_tokens("token_rewards", Some(token_rewards))?
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
        mask.check(name, tensor)?;
        mask.select(&for_statistics(tensor)?)
    }

    /// The reward baselines in the dtype of statistics; an error if they are absent.
    pub(crate) fn baselines(&self) -> Result<Tensor> {
        match &self.reward_baselines {
            Some(baselines) => for_statistics(baselines),
            None => bail!("reward_baselines: absent, must be given for this baseline"),
        }
    }
}

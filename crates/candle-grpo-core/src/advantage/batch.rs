//! Tensors that advantages are computed from.

use candle_core::{D, Result, Tensor, bail};

use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::groups::{GroupLayout, Groups};
use crate::inputs::Input;
use crate::mask::Mask;
use crate::rewards::{IntoRewards, RewardTensor, check_not_empty};
use crate::trajectories::Steps;

/// Declares [`AdvantageBatch`], with a setter for each optional tensor.
macro_rules! advantage_batch {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The tensors that an advantage estimator reads, for B sequences with T response tokens.
        ///
        /// Rewards, for sequences or for tokens, come first. Add other tensors with their setters
        /// when an estimator needs them: if one is missing, the error names it.
        ///
        /// Gradients do not flow into these tensors. Positions outside the response mask may hold
        /// any value, NaN included.
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
            /// Sequence rewards, `[B]`, or `[B, K]` with K components.
            pub rewards: Option<Tensor>,
            /// Groups: sequences that share a prompt.
            pub groups: Groups,
            /// Each row's trajectory and state, if the rows are steps in trajectories.
            pub steps: Option<Steps>,
            /// Number of steps trained before this batch, for scheduled coefficients.
            pub step: Option<usize>,
            $($(#[$doc])* pub $name: Option<Tensor>,)*
        }

        impl AdvantageBatch {
            /// Returns whether a batch has a field for `input`.
            pub fn accepts(input: Input) -> bool {
                [$(stringify!($name)),*].contains(&input.name())
            }

            /// Sets `input`. Does nothing if a batch does not [accept](Self::accepts) it.
            #[must_use]
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
    /// Response mask, `[B, T]`: 1 for the tokens that the policy generated, 0 for the others, in
    /// any dtype.
    response_mask,
    /// Token rewards, `[B, T]`. Without sequence rewards, their sums over the mask are used
    /// instead.
    token_rewards,
    /// Critic values, `[B, T]`.
    values,
    /// Baselines from another source, `[B]`, such as the rewards of greedy completions for the same
    /// prompts.
    reward_baselines,
    /// Log-probs under the policy before the update, `[B, T]`.
    old_log_probs,
    /// Log-probs under the reference policy, `[B, T]`.
    ref_log_probs,
    /// Log-probs under a teacher, `[B, T]`.
    teacher_log_probs,
    /// Tokens that have a teacher, `[B, T]` (1 or 0). A teacher does not change the advantages of
    /// others. If absent, all have one.
    teacher_mask,
    /// The old policy's squared probabilities, summed over the vocabulary, `[B, T]`.
    sum_of_squared_probs,
    /// Importance weights for samples from another engine, `[B, T]`.
    importance_weights,
    /// Log-probs from the sampling engine, `[B, T]`.
    rollout_log_probs,
    /// The policy's entropies before the update, `[B, T]`.
    entropy,
    /// Scores for whole trajectories, `[B]`, unless they are the sums of the step rewards.
    episode_rewards,
}

impl AdvantageBatch {
    /// Creates a batch with sequence `rewards` `[B]` or `[B, K]` in these groups.
    pub fn new(rewards: &Tensor, groups: impl Into<Groups>) -> Self {
        Self {
            rewards: Some(rewards.clone()),
            ..Self::without_rewards(groups.into())
        }
    }

    /// Creates a batch with `token_rewards` `[B, T]`, in which each sequence is its own group. Call
    /// [`Self::groups`] to change that.
    pub fn from_token_rewards(token_rewards: &Tensor, response_mask: &Tensor) -> Self {
        Self::without_rewards(1.into())
            .token_rewards(token_rewards)
            .response_mask(response_mask)
    }

    /// Sets the groups: sequences that share a prompt.
    #[must_use]
    pub fn groups(mut self, groups: impl Into<Groups>) -> Self {
        self.groups = groups.into();
        self
    }

    /// Sets each row's trajectory and state.
    #[must_use]
    pub fn steps(mut self, steps: &Steps) -> Self {
        self.steps = Some(steps.clone());
        self
    }

    /// Sets the number of steps trained before this batch.
    #[must_use]
    pub fn step(mut self, step: usize) -> Self {
        self.step = Some(step);
        self
    }

    /// Returns the group layout for tensors `[B, ..]`, on the device that `like` is on. `like` is
    /// such a tensor, for example the rewards.
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
    /// Fails if the mask is absent or not `[B, T]`.
    pub fn mask(&self) -> Result<Mask> {
        match &self.response_mask {
            Some(mask) => Mask::new(mask),
            None => bail!("response_mask: absent, must be given for this estimator"),
        }
    }

    /// Returns the tokens in the response mask that have a teacher.
    pub(crate) fn taught(&self) -> Result<Mask> {
        let mask = self.mask()?;
        match &self.teacher_mask {
            None => Ok(mask),
            Some(taught) => {
                mask.check("teacher_mask", taught)?;
                mask.and(taught)
            }
        }
    }

    /// Returns the sequence rewards: [`Self::rewards`], or the token rewards summed over the mask,
    /// `[B]`.
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

    /// Converts a batch tensor `[B, T]` to the statistics dtype, with 0 outside the mask. Errors
    /// refer to the tensor as `name`.
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

    /// Returns the reward baselines in the statistics dtype, or an error if they are absent.
    pub(crate) fn baselines(&self) -> Result<Tensor> {
        match &self.reward_baselines {
            Some(baselines) => for_statistics(baselines),
            None => bail!("reward_baselines: absent, must be given for this baseline"),
        }
    }
}

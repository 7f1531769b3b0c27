//! The inputs of a policy loss.

use candle_core::{Result, Tensor, bail};

/// The denominator policy of the ratio.
///
/// The type records whether the ratio corrects for the sampling engine, so that no correction is
/// applied twice.
#[derive(Debug, Clone, Copy)]
pub enum OldPolicy<'a> {
    /// The policy itself, detached: the ratio is 1 and its gradient is that of the log-prob.
    /// Correct for a single update on each batch of samples.
    Current,
    /// Log-probs `[B, T]` that the trainer computed before the update. Differences from the
    /// sampling engine can be corrected with [`PolicyBatch::importance_weights`].
    Recomputed(&'a Tensor),
    /// Log-probs `[B, T]` of the sampling engine. The ratio corrects for the difference already;
    /// additional importance weights are an error.
    Rollout(&'a Tensor),
}

impl<'a> OldPolicy<'a> {
    /// Returns the log-probs, or `None` for the current policy.
    pub(crate) fn log_probs(self) -> Option<&'a Tensor> {
        match self {
            Self::Current => None,
            Self::Recomputed(x) | Self::Rollout(x) => Some(x),
        }
    }
}

/// The tensors of one micro-batch: B sequences of T response tokens.
///
/// Only `log_probs` and `entropy` carry a gradient; all other tensors are detached.
/// Positions outside the mask may hold anything, including NaN.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// # let x = Tensor::zeros((2, 3), candle_core::DType::F32, &Device::Cpu)?;
/// # let (log_probs, old_log_probs, ref_log_probs, response_mask) = (&x, &x, &x, &x);
/// # let advantages = &Tensor::zeros(2, candle_core::DType::F32, &Device::Cpu)?;
/// use candle_grpo_loss::PolicyBatch;
///
/// let batch = PolicyBatch::new(log_probs, advantages, response_mask)
///     .old_log_probs(old_log_probs)
///     .ref_log_probs(ref_log_probs);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct PolicyBatch<'a> {
    pub(crate) log_probs: Option<&'a Tensor>,
    pub(crate) advantages: &'a Tensor,
    pub(crate) response_mask: &'a Tensor,
    pub(crate) old: OldPolicy<'a>,
    pub(crate) rollout_log_probs: Option<&'a Tensor>,
    pub(crate) ref_log_probs: Option<&'a Tensor>,
    pub(crate) entropy: Option<&'a Tensor>,
    pub(crate) scores: Option<&'a Tensor>,
    pub(crate) importance_weights: Option<&'a Tensor>,
    pub(crate) sample_weights: Option<&'a Tensor>,
    pub(crate) policy_mask: Option<&'a Tensor>,
    pub(crate) entropy_mask: Option<&'a Tensor>,
    pub(crate) selected_tokens: Option<&'a Tensor>,
    pub(crate) prompt_tokens: Option<&'a Tensor>,
}

impl<'a> PolicyBatch<'a> {
    /// A batch whose old policy is the current one.
    ///
    /// # Shapes
    ///
    /// `log_probs` `[B, T]`, with gradient; `advantages` `[B]`, `[B, 1]` or `[B, T]`;
    /// `response_mask` `[B, T]`, 0 or 1 in any dtype.
    pub fn new(log_probs: &'a Tensor, advantages: &'a Tensor, response_mask: &'a Tensor) -> Self {
        Self {
            log_probs: Some(log_probs),
            ..Self::without_log_probs(advantages, response_mask)
        }
    }

    /// A batch for [`crate::linear_policy_loss`], which computes log-probs and entropy itself.
    pub fn without_log_probs(advantages: &'a Tensor, response_mask: &'a Tensor) -> Self {
        Self {
            log_probs: None,
            advantages,
            response_mask,
            old: OldPolicy::Current,
            rollout_log_probs: None,
            ref_log_probs: None,
            entropy: None,
            scores: None,
            importance_weights: None,
            sample_weights: None,
            policy_mask: None,
            entropy_mask: None,
            selected_tokens: None,
            prompt_tokens: None,
        }
    }

    /// Returns the log-probs.
    ///
    /// # Errors
    ///
    /// Fails if there are none.
    pub(crate) fn log_probs(&self) -> Result<&'a Tensor> {
        match self.log_probs {
            Some(log_probs) => Ok(log_probs),
            None => bail!("log_probs: absent, a batch without them is for linear_policy_loss"),
        }
    }

    /// Sets the log-probs `[B, T]` under the policy at the start of the update:
    /// [`OldPolicy::Recomputed`].
    pub fn old_log_probs(self, old_log_probs: &'a Tensor) -> Self {
        self.old_policy(OldPolicy::Recomputed(old_log_probs))
    }

    /// Sets the denominator policy of the ratio.
    pub fn old_policy(mut self, old: OldPolicy<'a>) -> Self {
        self.old = old;
        self
    }

    /// Sets the log-probs `[B, T]` of the sampling engine, for
    /// [`crate::PolicyLoss::off_policy_threshold`].
    pub fn rollout_log_probs(mut self, rollout_log_probs: &'a Tensor) -> Self {
        self.rollout_log_probs = Some(rollout_log_probs);
        self
    }

    /// Sets the log-probs `[B, T]` under the reference policy, which a KL loss requires.
    pub fn ref_log_probs(mut self, ref_log_probs: &'a Tensor) -> Self {
        self.ref_log_probs = Some(ref_log_probs);
        self
    }

    /// Sets the log-probs `[B, T]` of the policy, with gradient, of a batch
    /// [without](Self::without_log_probs) them.
    pub fn with_log_probs(mut self, log_probs: &'a Tensor) -> Self {
        self.log_probs = Some(log_probs);
        self
    }

    /// Sets the entropy `[B, T]` of the policy at each position, with gradient. An entropy bonus
    /// requires it.
    pub fn entropy(mut self, entropy: &'a Tensor) -> Self {
        self.entropy = Some(entropy);
        self
    }

    /// Sets the score `[B]` of each sample before any shaping, for terms on samples with a high
    /// score.
    pub fn scores(mut self, scores: &'a Tensor) -> Self {
        self.scores = Some(scores);
        self
    }

    /// Sets the weights of the policy term for samples of another engine, from
    /// [`crate::RolloutCorrection`].
    ///
    /// `[B, T]`, or `[B, 1]` or `[B]` for one weight per sequence. [`crate::surrogate::Vespo`] and
    /// [`crate::surrogate::GeometricMean`] use a weight per sequence once, and the product of
    /// weights per token.
    pub fn importance_weights(mut self, importance_weights: &'a Tensor) -> Self {
        self.importance_weights = Some(importance_weights);
        self
    }

    /// Sets a weight `[B]` of the policy term for each sequence. Denominators do not change: use
    /// weights with a mean of 1 over the step.
    pub fn sample_weights(mut self, sample_weights: &'a Tensor) -> Self {
        self.sample_weights = Some(sample_weights);
        self
    }

    /// Sets the positions `[B, T]` (1 or 0) of the policy term, such as top-entropy tokens and
    /// samples that no filter rejects. KL, entropy and denominators do not change.
    pub fn policy_mask(mut self, policy_mask: &'a Tensor) -> Self {
        self.policy_mask = Some(policy_mask);
        self
    }

    /// Sets the positions `[B, T]` (1 or 0) of the entropy bonus, which becomes the mean over these
    /// tokens of the whole step.
    ///
    /// The loss requires their number, [`crate::StepTotals::entropy_tokens`]. Absent: the response
    /// mask, whatever `policy_mask` is.
    pub fn entropy_mask(mut self, entropy_mask: &'a Tensor) -> Self {
        self.entropy_mask = Some(entropy_mask);
        self
    }

    /// Sets the tokens `[B, T]` (1 or 0) that [`crate::PolicyLoss::select_tokens`] selected from
    /// the whole step.
    pub fn selected_tokens(mut self, selected_tokens: &'a Tensor) -> Self {
        self.selected_tokens = Some(selected_tokens);
        self
    }

    /// Sets, for each sequence `[B]`, the number of tokens of all samples of its prompt over the
    /// whole step. [`crate::Aggregation::PromptMeanTokenMean`] requires it.
    pub fn prompt_tokens(mut self, prompt_tokens: &'a Tensor) -> Self {
        self.prompt_tokens = Some(prompt_tokens);
        self
    }
}

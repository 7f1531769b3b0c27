//! What a policy loss is computed from.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::Mask;

/// The policy that the ratio is taken against.
///
/// Whether the samples' own engine has already been corrected for is part of the type, so that it cannot be done twice.
#[derive(Debug, Clone, Copy)]
pub enum OldPolicy<'a> {
    /// The policy itself, detached: the ratio is 1 and its gradient that of the log-prob. Right for one update on each
    /// batch of samples.
    Current,
    /// Log-probs `[B, T]` that the trainer computed before the update. What the engine that sampled said may differ, and
    /// [`PolicyBatch::importance_weights`] may correct for that.
    Recomputed(&'a Tensor),
    /// Log-probs `[B, T]` of the engine that sampled: the ratio corrects for the difference already, and importance weights
    /// on top of it are an error.
    Rollout(&'a Tensor),
}

impl<'a> OldPolicy<'a> {
    /// The log-probs, unless they are those of the policy itself.
    pub(crate) fn log_probs(self) -> Option<&'a Tensor> {
        match self {
            Self::Current => None,
            Self::Recomputed(x) | Self::Rollout(x) => Some(x),
        }
    }
}

/// The tensors of one micro-batch: B sequences of T response tokens.
///
/// Only `log_probs`, `entropy` and `kl_values` carry a gradient; everything else is taken as a constant. Positions outside the mask
/// may hold anything, NaN included.
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
    pub(crate) kl_values: Option<&'a Tensor>,
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
    /// `log_probs` `[B, T]` of the policy, with gradient; `advantages` `[B]`, `[B, 1]` or `[B, T]`; `response_mask`
    /// `[B, T]`, 0 or 1 in any dtype. The old policy is the current one until another is given.
    pub fn new(log_probs: &'a Tensor, advantages: &'a Tensor, response_mask: &'a Tensor) -> Self {
        Self {
            log_probs: Some(log_probs),
            ..Self::without_log_probs(advantages, response_mask)
        }
    }

    /// The same for [`crate::linear_policy_loss`], which computes log-probs and entropy itself.
    pub fn without_log_probs(advantages: &'a Tensor, response_mask: &'a Tensor) -> Self {
        Self {
            log_probs: None,
            advantages,
            response_mask,
            old: OldPolicy::Current,
            rollout_log_probs: None,
            ref_log_probs: None,
            kl_values: None,
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

    /// An error if there are none.
    pub(crate) fn log_probs(&self) -> Result<&'a Tensor> {
        match self.log_probs {
            Some(log_probs) => Ok(log_probs),
            None => bail!("log_probs: absent, a batch without them is for linear_policy_loss"),
        }
    }

    /// Log-probs `[B, T]` under the policy at the start of the update: [`OldPolicy::Recomputed`].
    pub fn old_log_probs(self, old_log_probs: &'a Tensor) -> Self {
        self.old_policy(OldPolicy::Recomputed(old_log_probs))
    }

    /// The policy that the ratio is taken against.
    pub fn old_policy(mut self, old: OldPolicy<'a>) -> Self {
        self.old = old;
        self
    }

    /// Log-probs `[B, T]` of the engine that sampled, for [`crate::PolicyLoss::off_policy_threshold`].
    pub fn rollout_log_probs(mut self, rollout_log_probs: &'a Tensor) -> Self {
        self.rollout_log_probs = Some(rollout_log_probs);
        self
    }

    /// Log-probs `[B, T]` under the reference policy, which a KL loss needs.
    pub fn ref_log_probs(mut self, ref_log_probs: &'a Tensor) -> Self {
        self.ref_log_probs = Some(ref_log_probs);
        self
    }

    /// The divergence `[B, T]` from the reference at each position, with gradient, for a [`crate::KlLoss::given`] instead of
    /// one that is estimated from log-probs.
    pub fn kl_values(mut self, kl_values: &'a Tensor) -> Self {
        self.kl_values = Some(kl_values);
        self
    }

    /// The log-probs `[B, T]` of the policy, with gradient, for a batch that was begun [without](Self::without_log_probs).
    pub fn with_log_probs(mut self, log_probs: &'a Tensor) -> Self {
        self.log_probs = Some(log_probs);
        self
    }

    /// The entropy `[B, T]` of the policy at each position, with gradient: an entropy bonus needs it.
    pub fn entropy(mut self, entropy: &'a Tensor) -> Self {
        self.entropy = Some(entropy);
        self
    }

    /// The score `[B]` of each sample before any shaping, for terms that ask whether a sample was right.
    pub fn scores(mut self, scores: &'a Tensor) -> Self {
        self.scores = Some(scores);
        self
    }

    /// Weights `[B, T]` or `[B, 1]` of the policy term for samples that another engine drew, as
    /// [`crate::RolloutCorrection`] computes them.
    pub fn importance_weights(mut self, importance_weights: &'a Tensor) -> Self {
        self.importance_weights = Some(importance_weights);
        self
    }

    /// A weight `[B]` of the policy term for each sequence. Denominators stay as they are, so give weights whose mean
    /// over the step is 1.
    pub fn sample_weights(mut self, sample_weights: &'a Tensor) -> Self {
        self.sample_weights = Some(sample_weights);
        self
    }

    /// The positions `[B, T]` (1 or 0) at which the policy term counts, all others being 0 in it; KL, entropy and
    /// denominators stay as they are. Top-entropy tokens and rejected samples are of this kind.
    pub fn policy_mask(mut self, policy_mask: &'a Tensor) -> Self {
        self.policy_mask = Some(policy_mask);
        self
    }

    /// The positions `[B, T]` (1 or 0) at which the entropy bonus counts, all others being 0 in it; denominators stay as they
    /// are. Absent: those of the response mask (ROLL), whatever `policy_mask` is. Give that one here as well for a bonus on
    /// the same tokens.
    pub fn entropy_mask(mut self, entropy_mask: &'a Tensor) -> Self {
        self.entropy_mask = Some(entropy_mask);
        self
    }

    /// The tokens `[B, T]` (1 or 0) that [`crate::PolicyLoss::select_tokens_to_host`] took from the whole step.
    pub fn selected_tokens(mut self, selected_tokens: &'a Tensor) -> Self {
        self.selected_tokens = Some(selected_tokens);
        self
    }

    /// For each sequence `[B]` the number of tokens, over the whole step, of the samples that answer its prompt:
    /// [`crate::Aggregation::PromptMeanTokenMean`] needs it.
    pub fn prompt_tokens(mut self, prompt_tokens: &'a Tensor) -> Self {
        self.prompt_tokens = Some(prompt_tokens);
        self
    }
}

/// `[B]` and `[B, 1]` repeated for each token; `[B, T]` as it is.
pub(crate) fn over_tokens(name: &str, x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let (batch, tokens) = mask.dims()?;
    let column = match *x.dims() {
        [b] if b == batch => x.unsqueeze(1)?,
        [b, 1] if b == batch => x.clone(),
        [b, t] if (b, t) == (batch, tokens) => return Ok(x.clone()),
        _ => bail!(
            "{name}: shape {:?}, must be [{batch}] or [{batch}, {tokens}]",
            x.dims()
        ),
    };
    column.broadcast_as((batch, tokens))?.contiguous()
}

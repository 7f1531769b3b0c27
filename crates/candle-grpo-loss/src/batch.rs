//! What a policy loss is computed from.

use candle_core::Tensor;

/// The tensors of one micro-batch: B sequences of T response tokens.
///
/// Only `log_probs` (and `entropy`) carry a gradient; everything else is taken as a constant. Positions outside the mask
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
    pub(crate) log_probs: &'a Tensor,
    pub(crate) advantages: &'a Tensor,
    pub(crate) response_mask: &'a Tensor,
    pub(crate) old_log_probs: Option<&'a Tensor>,
    pub(crate) ref_log_probs: Option<&'a Tensor>,
    pub(crate) entropy: Option<&'a Tensor>,
    pub(crate) importance_weights: Option<&'a Tensor>,
    pub(crate) sample_weights: Option<&'a Tensor>,
}

impl<'a> PolicyBatch<'a> {
    /// `log_probs` `[B, T]` of the policy, with gradient; `advantages` `[B]`, `[B, 1]` or `[B, T]`; `response_mask`
    /// `[B, T]`, 0 or 1 in any dtype.
    pub fn new(log_probs: &'a Tensor, advantages: &'a Tensor, response_mask: &'a Tensor) -> Self {
        Self {
            log_probs,
            advantages,
            response_mask,
            old_log_probs: None,
            ref_log_probs: None,
            entropy: None,
            importance_weights: None,
            sample_weights: None,
        }
    }

    /// Log-probs `[B, T]` under the policy at the start of the update. Without them the old policy is the current one,
    /// detached: the ratio is 1 and its gradient that of the log-prob.
    pub fn old_log_probs(mut self, old_log_probs: &'a Tensor) -> Self {
        self.old_log_probs = Some(old_log_probs);
        self
    }

    /// Log-probs `[B, T]` under the reference policy, which a KL loss needs.
    pub fn ref_log_probs(mut self, ref_log_probs: &'a Tensor) -> Self {
        self.ref_log_probs = Some(ref_log_probs);
        self
    }

    /// The entropy `[B, T]` of the policy at each position, with gradient: an entropy bonus needs it.
    pub fn entropy(mut self, entropy: &'a Tensor) -> Self {
        self.entropy = Some(entropy);
        self
    }

    /// Weights `[B, T]` or `[B, 1]` of the policy term for samples that another engine drew, such as
    /// `exp(old_log_probs - rollout_log_probs)`, truncated.
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
}

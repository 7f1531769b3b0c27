//! The interface of a surrogate.

use std::fmt::Debug;

use candle_core::{Result, Tensor};
use candle_grpo_core::Mask;

/// The loss of one token: the extension point for custom surrogates.
///
/// [`Surrogate::custom`](super::Surrogate::custom) puts an implementation into a
/// [`PolicyLoss`](crate::PolicyLoss), which adds weights, KL term, entropy bonus and aggregation.
///
/// ```
/// use candle_core::{Device, Result, Tensor, Var};
/// use candle_grpo_loss::surrogate::{SurrogateInputs, TokenLosses};
/// use candle_grpo_loss::{PolicyBatch, PolicyLoss, StepTotals, Surrogate, TokenLoss};
///
/// /// `-r A`, without a clip. The share of ratios above 2 is a metric.
/// #[derive(Debug)]
/// struct Unclipped;
///
/// impl TokenLoss for Unclipped {
///     fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
///         let ratio = inputs.log_ratio.exp()?;
///         Ok(TokenLosses {
///             loss: (&ratio * inputs.advantages)?.neg()?,
///             flags: vec![("large_ratios", ratio.gt(2.)?)],
///         })
///     }
/// }
///
/// let loss = PolicyLoss { surrogate: Surrogate::custom(Unclipped), ..PolicyLoss::grpo() };
/// let device = Device::Cpu;
/// let log_probs = Var::new(&[[-1f32, -0.5]], &device)?;
/// let mask = Tensor::new(&[[1u8, 1]], &device)?;
/// let batch = PolicyBatch::new(&log_probs, &Tensor::new(&[2f32], &device)?, &mask);
/// let output = loss.compute(&batch, &StepTotals::count(&mask)?)?;
/// assert_eq!(output.loss.to_scalar::<f32>()?, -2.);
/// assert_eq!(output.metrics.to_host()?.get("large_ratios"), Some(0.));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait TokenLoss: Debug + Send + Sync {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// The error names the option, its value and what it must be.
    fn validate(&self) -> Result<()> {
        Ok(())
    }

    /// Computes the loss of each token, to be minimized.
    ///
    /// # Shapes
    ///
    /// All tensors are `[B, T]`. Positions outside the mask hold 0 and their losses are ignored.
    ///
    /// # Errors
    ///
    /// Fails if an input that the surrogate needs is absent.
    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses>;

    /// Returns whether the surrogate combines the tokens of a sequence itself.
    ///
    /// Such a surrogate requires [`ImportanceLevel::Token`](crate::ImportanceLevel::Token). It must
    /// apply [`SurrogateInputs::importance_weights`]: the policy loss does not multiply by them.
    fn reduces_over_sequence(&self) -> bool {
        false
    }

    /// Returns whether the surrogate applies [`SurrogateInputs::policy_mask`] itself.
    fn applies_policy_mask(&self) -> bool {
        false
    }

    /// Returns whether the loss of a sequence depends on the other sequences of its group.
    ///
    /// Such a surrogate requires [`SurrogateInputs::groups`], and whole groups in a batch.
    fn reduces_over_group(&self) -> bool {
        false
    }
}

/// The inputs of a surrogate. Tensors are `[B, T]`, of one dtype, and hold 0 outside the mask.
#[derive(Debug, Clone, Copy)]
pub struct SurrogateInputs<'a> {
    /// Log-probs of the policy, with gradient.
    pub log_probs: &'a Tensor,
    /// Log-probs of the old policy, a constant.
    pub old_log_probs: &'a Tensor,
    /// The clamped log-ratio of each token, `log_probs - old_log_probs`, with gradient.
    pub token_log_ratio: &'a Tensor,
    /// The log-ratio at the importance level, with gradient.
    pub log_ratio: &'a Tensor,
    /// The advantages, a constant.
    pub advantages: &'a Tensor,
    /// The tokens that count.
    pub mask: &'a Mask,
    /// The score of each sample, a constant.
    pub scores: Option<&'a Tensor>,
    /// Weights for samples of another engine, a constant: `[B, T]`, or `[B, 1]` for one weight per
    /// sequence.
    pub importance_weights: Option<&'a Tensor>,
    /// 1 for the tokens that were selected over the whole step, u8.
    pub selected_tokens: Option<&'a Tensor>,
    /// 1 for the tokens of the policy term, u8; absent: all.
    pub policy_mask: Option<&'a Tensor>,
    /// Group of each sequence, `[B]`.
    pub groups: Option<&'a Tensor>,
}

/// The output of a surrogate.
#[derive(Debug, Clone)]
pub struct TokenLosses {
    /// The loss of each token, `[B, T]`, with gradient.
    pub loss: Tensor,
    /// Names with flags (u8) or numbers, `[B, T]`. Their means over the mask become metrics of
    /// these names.
    pub flags: Vec<(&'static str, Tensor)>,
}

impl TokenLosses {
    /// Losses without flags.
    pub fn new(loss: Tensor) -> Self {
        Self {
            loss,
            flags: Vec::new(),
        }
    }
}

impl SurrogateInputs<'_> {
    /// Returns `positive` where the advantage is above 0 and `other` elsewhere.
    pub(super) fn by_sign(&self, positive: f64, other: f64) -> Result<Tensor> {
        self.advantages.gt(0.)?.where_cond(
            &full_like(self.advantages, positive)?,
            &full_like(self.advantages, other)?,
        )
    }

    /// Computes `-weight * advantage * log_prob` with a detached weight.
    pub(super) fn weighted_policy_gradient(&self, weight: &Tensor) -> Result<Tensor> {
        ((weight.detach() * self.advantages)? * self.log_probs)?.neg()
    }
}

/// Returns a tensor like `x` with every entry `value`.
pub(super) fn full_like(x: &Tensor, value: f64) -> Result<Tensor> {
    x.zeros_like()? + value
}

/// Returns 1 where both flags hold, u8.
pub(super) fn both(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a * b
}

/// Returns 1 where at least one flag holds, u8.
pub(super) fn either(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.maximum(b)
}

/// Returns 1 where the flag does not hold, u8.
pub(super) fn not(a: &Tensor) -> Result<Tensor> {
    a.eq(0u8)
}

/// Sets `loss` to 0 where `dropped` holds.
pub(super) fn without(dropped: &Tensor, loss: &Tensor) -> Result<Tensor> {
    not(dropped)?.where_cond(loss, &loss.zeros_like()?)
}

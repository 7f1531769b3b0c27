//! The interface of a surrogate.

use std::fmt::Debug;

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::Mask;
use candle_grpo_core::inputs::{Input, Inputs};

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
    /// Fails if an input that the surrogate needs is absent; [`SurrogateInputs::get`] returns
    /// such an error.
    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses>;

    /// Returns the tokens on which the loss of one token depends.
    fn level(&self) -> LossLevel {
        LossLevel::Token
    }

    /// Returns the inputs that the surrogate reads, so that a trainer computes them.
    ///
    /// An input that is not declared is absent from [`SurrogateInputs`]. A surrogate that declares
    /// [`Input::ImportanceWeights`] or [`Input::PolicyMask`] applies them itself, in place of the
    /// policy loss.
    fn needs(&self) -> Inputs {
        Inputs::NONE
    }
}

/// The tokens on which the loss of one token depends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LossLevel {
    /// The token alone. The default.
    #[default]
    Token,
    /// The tokens of its sequence, which the surrogate combines itself.
    ///
    /// The surrogate requires [`ImportanceLevel::Token`](crate::ImportanceLevel::Token). Without
    /// [`Input::ImportanceWeights`] among its needs, it rejects such weights.
    Sequence,
    /// The tokens of all sequences of its group, otherwise as [`Self::Sequence`]. The surrogate
    /// requires [`PolicyBatch::groups`](crate::PolicyBatch::groups), and whole groups in a batch.
    Group,
}

/// The inputs of a surrogate. Tensors are `[B, T]`, of one dtype, and hold 0 outside the mask.
///
/// The optional ones are present if [`TokenLoss::needs`] declares them and the batch has them.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
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
    /// Log-probs of the sampling engine, a constant.
    pub rollout_log_probs: Option<&'a Tensor>,
    /// Log-probs of the reference policy, a constant.
    pub ref_log_probs: Option<&'a Tensor>,
    /// Log-probs of a teacher, a constant.
    pub teacher_log_probs: Option<&'a Tensor>,
    /// Values of a critic, a constant.
    pub values: Option<&'a Tensor>,
    /// Entropy of the policy, with gradient.
    pub entropy: Option<&'a Tensor>,
    /// The score of each sample, a constant.
    pub scores: Option<&'a Tensor>,
    /// Weights for samples of another engine, a constant: `[B, T]`, or `[B, 1]` for one weight per
    /// sequence.
    pub importance_weights: Option<&'a Tensor>,
    /// 1 for the tokens that were selected over the whole step, u8.
    pub selected_tokens: Option<&'a Tensor>,
    /// 1 for the tokens of the policy term, u8; absent: all.
    pub policy_mask: Option<&'a Tensor>,
    /// Group of each sequence, `[B]`, for a surrogate of [`LossLevel::Group`].
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

impl<'a> SurrogateInputs<'a> {
    /// Returns an input that [`TokenLoss::needs`] declares.
    ///
    /// # Errors
    ///
    /// Fails if the input is absent.
    pub fn get(&self, input: Input) -> Result<&'a Tensor> {
        let tensor = match input {
            Input::OldLogProbs => Some(self.old_log_probs),
            Input::RolloutLogProbs => self.rollout_log_probs,
            Input::RefLogProbs => self.ref_log_probs,
            Input::TeacherLogProbs => self.teacher_log_probs,
            Input::Values => self.values,
            Input::Entropy => self.entropy,
            Input::Scores => self.scores,
            Input::ImportanceWeights => self.importance_weights,
            Input::SelectedTokens => self.selected_tokens,
            Input::PolicyMask => self.policy_mask,
            _ => None,
        };
        match tensor {
            Some(tensor) => Ok(tensor),
            None => bail!(
                "{input}: absent, must be given in the batch and declared by the surrogate that needs it"
            ),
        }
    }

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

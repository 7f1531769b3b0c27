//! The interface for surrogates.

use std::fmt::Debug;

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::Mask;
use candle_grpo_core::inputs::{Input, Inputs};

/// One token's loss: the extension point for custom surrogates.
///
/// Implement [`Self::per_token`], and put your type into a [`PolicyLoss`](crate::PolicyLoss) with
/// [`Surrogate::custom`](super::Surrogate::custom). The policy loss adds weights, KL term, entropy
/// bonus and aggregation.
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
    /// Fails if an option is invalid. The error names the option, its value and what it must be.
    fn validate(&self) -> Result<()> {
        Ok(())
    }

    /// Computes each token's loss, to be minimized.
    ///
    /// # Shapes
    ///
    /// All tensors are `[B, T]`. Positions outside the mask are 0, and losses there are ignored.
    ///
    /// # Errors
    ///
    /// Fails if an input that the surrogate needs is absent. [`SurrogateInputs::get`] returns such
    /// an error.
    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses>;

    /// Returns the tokens that one token's loss depends on.
    fn level(&self) -> LossLevel {
        LossLevel::Token
    }

    /// Returns the inputs that the surrogate reads, so that a trainer computes them.
    ///
    /// An undeclared input is absent from [`SurrogateInputs`]. If a surrogate declares
    /// [`Input::ImportanceWeights`] or [`Input::PolicyMask`], it applies them itself, instead of
    /// the policy loss.
    fn needs(&self) -> Inputs {
        Inputs::NONE
    }
}

/// Tokens that one token's loss depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LossLevel {
    /// The token alone. The default.
    #[default]
    Token,
    /// The tokens in its sequence, which the surrogate combines itself.
    ///
    /// The surrogate requires [`ImportanceLevel::Token`](crate::ImportanceLevel::Token). It rejects
    /// importance weights unless it declares [`Input::ImportanceWeights`].
    Sequence,
    /// The tokens in all sequences in its group, otherwise like [`Self::Sequence`]. The surrogate
    /// requires [`PolicyBatch::groups`](crate::PolicyBatch::groups), and whole groups in a batch.
    Group,
}

/// A surrogate's inputs. Tensors are `[B, T]`, have one dtype, and are 0 outside the mask.
///
/// An optional input is present if [`TokenLoss::needs`] declares it and the batch has it.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct SurrogateInputs<'a> {
    /// Log-probs under the policy, with gradient.
    pub log_probs: &'a Tensor,
    /// Log-probs under the old policy, a constant.
    pub old_log_probs: &'a Tensor,
    /// Each token's clamped log-ratio, `log_probs - old_log_probs`, with gradient.
    pub token_log_ratio: &'a Tensor,
    /// Log-ratio at the importance level, with gradient.
    pub log_ratio: &'a Tensor,
    /// Advantages, a constant.
    pub advantages: &'a Tensor,
    /// Mask over the tokens that count.
    pub mask: &'a Mask,
    /// Log-probs from the sampling engine, a constant.
    pub rollout_log_probs: Option<&'a Tensor>,
    /// Log-probs under the reference policy, a constant.
    pub ref_log_probs: Option<&'a Tensor>,
    /// Log-probs under a teacher, a constant.
    pub teacher_log_probs: Option<&'a Tensor>,
    /// Critic values, a constant.
    pub values: Option<&'a Tensor>,
    /// The policy's entropy, with gradient.
    pub entropy: Option<&'a Tensor>,
    /// Each sample's score, a constant.
    pub scores: Option<&'a Tensor>,
    /// Weights for samples from another engine, a constant: `[B, T]`, or `[B, 1]` for one weight
    /// per sequence.
    pub importance_weights: Option<&'a Tensor>,
    /// 1 for tokens that were selected over the whole step, u8.
    pub selected_tokens: Option<&'a Tensor>,
    /// 1 for tokens in the policy term, u8. If absent, all tokens are.
    pub policy_mask: Option<&'a Tensor>,
    /// Each sequence's group, `[B]`, for a surrogate at [`LossLevel::Group`].
    pub groups: Option<&'a Tensor>,
}

/// A surrogate's output.
#[derive(Debug, Clone)]
pub struct TokenLosses {
    /// Each token's loss, `[B, T]`, with gradient.
    pub loss: Tensor,
    /// Names, with flags (u8) or numbers `[B, T]`. Their means over the mask become metrics with
    /// these names.
    pub flags: Vec<(&'static str, Tensor)>,
}

impl TokenLosses {
    /// Creates losses without flags.
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

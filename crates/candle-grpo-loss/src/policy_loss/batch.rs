//! The inputs of a policy loss.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::inputs::Input;

/// The denominator policy of the ratio.
///
/// The type records whether the ratio corrects for the sampling engine, so that no correction is
/// applied twice.
#[derive(Debug, Clone)]
pub enum OldPolicy {
    /// The policy itself, detached: the ratio is 1 and its gradient is that of the log-prob.
    /// Correct for a single update on each batch of samples.
    Current,
    /// Log-probs `[B, T]` that the trainer computed before the update. Differences from the
    /// sampling engine can be corrected with [`PolicyBatch::importance_weights`].
    Recomputed(Tensor),
    /// Log-probs `[B, T]` of the sampling engine. The ratio corrects for the difference already;
    /// additional importance weights are an error.
    Rollout(Tensor),
}

impl OldPolicy {
    /// Returns the log-probs, or `None` for the current policy.
    pub fn log_probs(&self) -> Option<&Tensor> {
        match self {
            Self::Current => None,
            Self::Recomputed(x) | Self::Rollout(x) => Some(x),
        }
    }

    fn map(&self, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(match self {
            Self::Current => Self::Current,
            Self::Recomputed(x) => Self::Recomputed(f(x)?),
            Self::Rollout(x) => Self::Rollout(f(x)?),
        })
    }
}

/// Declares [`PolicyBatch`], the setter of each optional tensor, and the one list of them.
macro_rules! policy_batch {
    ($($(#[$doc:meta])* $name:ident: $shape:ident,)*) => {
        /// The tensors of one micro-batch: B sequences of T response tokens.
        ///
        /// Only `log_probs` and `entropy` carry a gradient; all other tensors are
        /// detached. Positions outside the mask may hold anything, including NaN. A loss that
        /// needs an absent tensor returns an error that names it.
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
        #[derive(Debug, Clone)]
        pub struct PolicyBatch {
            /// Advantages, `[B]`, `[B, 1]` or `[B, T]`. Those per sequence may be on the CPU.
            pub advantages: Tensor,
            /// Response mask `[B, T]`, 0 or 1 in any dtype.
            pub response_mask: Tensor,
            /// Denominator policy of the ratio.
            pub old: OldPolicy,
            $($(#[$doc])* pub $name: Option<Tensor>,)*
        }

        impl PolicyBatch {
            /// Returns whether a batch can have `input`.
            pub fn accepts(input: Input) -> bool {
                input == Input::OldLogProbs
                    || [$(stringify!($name)),*].contains(&input.name())
            }

            /// Sets `input`. One that a batch does not [accept](Self::accepts) changes nothing.
            pub fn with(mut self, input: Input, tensor: &Tensor) -> Self {
                if input == Input::OldLogProbs {
                    self.old = OldPolicy::Recomputed(tensor.clone());
                }
                $(if input.name() == stringify!($name) {
                    self.$name = Some(tensor.clone());
                })*
                self
            }

            /// A batch for [`crate::linear_policy_loss`], which computes log-probs and entropy
            /// itself. Its old policy is the current one.
            pub fn without_log_probs(advantages: &Tensor, response_mask: &Tensor) -> Self {
                Self {
                    advantages: advantages.clone(),
                    response_mask: response_mask.clone(),
                    old: OldPolicy::Current,
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

            /// Applies `f` to each tensor, for example to select rows or to move to a device.
            ///
            /// # Errors
            ///
            /// Fails if `f` fails.
            pub fn map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
                Ok(Self {
                    advantages: f(&self.advantages)?,
                    response_mask: f(&self.response_mask)?,
                    old: self.old.map(&f)?,
                    $($name: self.$name.as_ref().map(&f).transpose()?,)*
                })
            }

            /// Returns all tensors but the mask, with names and shapes.
            fn inputs(&self) -> impl Iterator<Item = (&'static str, InputShape, &Tensor)> {
                [
                    ("advantages", InputShape::Either, Some(&self.advantages)),
                    ("old_log_probs", InputShape::PerToken, self.old.log_probs()),
                    $((stringify!($name), InputShape::$shape, self.$name.as_ref()),)*
                ]
                .into_iter()
                .filter_map(|(name, shape, x)| Some((name, shape, x?)))
            }
        }
    };
}

policy_batch! {
    /// Log-probs `[B, T]` of the policy, with gradient.
    log_probs: PerToken,
    /// Log-probs `[B, T]` under the reference policy, which a KL loss requires.
    ref_log_probs: PerToken,
    /// Log-probs `[B, T]` under a teacher, for [`crate::PolicyLoss::distillation`].
    teacher_log_probs: PerToken,
    /// Values `[B, T]` of a critic, for a custom surrogate.
    values: PerToken,
    /// Log-probs `[B, T]` of the sampling engine, for
    /// [`crate::PolicyLoss::off_policy_threshold`].
    rollout_log_probs: PerToken,
    /// Entropy `[B, T]` of the policy at each position, with gradient. An entropy bonus requires
    /// it.
    entropy: PerToken,
    /// Score `[B]` of each sample before any shaping, for terms on samples with a high score.
    scores: PerSequence,
    /// Weights of the policy term for samples of another engine, from
    /// [`crate::RolloutCorrection`].
    ///
    /// `[B, T]`, or `[B, 1]` or `[B]` for one weight per sequence.
    /// [`crate::experimental::Vespo`] and [`crate::surrogate::GeometricMean`] use a weight per
    /// sequence once, and the product of weights per token.
    importance_weights: Either,
    /// Weight `[B]` of the policy term for each sequence. Denominators do not change: use weights
    /// with a mean of 1 over the step.
    sample_weights: PerSequence,
    /// Weight `[B, T]` of each token in every term but the entropy bonus. Denominators do not
    /// change.
    token_weights: PerToken,
    /// Positions `[B, T]` (1 or 0) of the policy term, such as top-entropy tokens and samples that
    /// no filter rejects. KL, entropy and denominators do not change.
    policy_mask: PerToken,
    /// Positions `[B, T]` (1 or 0) of the entropy bonus, which becomes the mean over these tokens
    /// of the whole step.
    ///
    /// The loss requires their number, [`crate::StepTotals::entropy_tokens`]. Absent: the response
    /// mask, whatever `policy_mask` is.
    entropy_mask: PerToken,
    /// Tokens `[B, T]` (1 or 0) that [`crate::PolicyLoss::select_tokens`] selected from the whole
    /// step.
    selected_tokens: PerToken,
    /// Number of tokens of all samples of the prompt of each sequence over the whole step, `[B]`.
    /// [`crate::Aggregation::PromptMeanTokenMean`] requires it.
    prompt_tokens: PerSequence,
    /// Group `[B]` of each sequence, any number. A surrogate of
    /// [`crate::surrogate::LossLevel::Group`] requires it, and all sequences of a group in one
    /// batch.
    groups: PerSequence,
}

impl PolicyBatch {
    /// A batch whose old policy is the current one.
    ///
    /// # Shapes
    ///
    /// `log_probs` `[B, T]`, with gradient; `advantages` `[B]`, `[B, 1]` or `[B, T]`;
    /// `response_mask` `[B, T]`, 0 or 1 in any dtype.
    pub fn new(log_probs: &Tensor, advantages: &Tensor, response_mask: &Tensor) -> Self {
        Self::without_log_probs(advantages, response_mask).log_probs(log_probs)
    }

    /// Sets the log-probs `[B, T]` under the policy at the start of the update:
    /// [`OldPolicy::Recomputed`].
    #[must_use]
    pub fn old_log_probs(self, old_log_probs: &Tensor) -> Self {
        self.old_policy(OldPolicy::Recomputed(old_log_probs.clone()))
    }

    /// Sets the denominator policy of the ratio.
    #[must_use]
    pub fn old_policy(mut self, old: OldPolicy) -> Self {
        self.old = old;
        self
    }

    /// Returns B and T.
    ///
    /// # Errors
    ///
    /// Names a tensor whose shape differs from its description.
    pub fn dims(&self) -> Result<(usize, usize)> {
        let &[b, t] = self.response_mask.dims() else {
            bail!(
                "response_mask: shape {:?}, must be [B, T]",
                self.response_mask.dims()
            );
        };
        for (name, shape, x) in self.inputs() {
            shape.check(name, x, b, t)?;
        }
        Ok((b, t))
    }

    /// Returns the names of all tensors but the response mask, with the tensors.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.inputs().map(|(name, _, x)| (name, x))
    }

    /// Returns the log-probs.
    ///
    /// # Errors
    ///
    /// Fails if there are none.
    pub(crate) fn ensure_log_probs(&self) -> Result<&Tensor> {
        match &self.log_probs {
            Some(log_probs) => Ok(log_probs),
            None => bail!("log_probs: absent, a batch without them is for linear_policy_loss"),
        }
    }
}

/// The shape of an input for B sequences of T tokens.
#[derive(Clone, Copy)]
enum InputShape {
    /// `[B, T]`
    PerToken,
    /// `[B]`
    PerSequence,
    /// `[B]`, `[B, 1]` or `[B, T]`
    Either,
}

impl InputShape {
    fn check(self, name: &str, x: &Tensor, b: usize, t: usize) -> Result<()> {
        let (valid, must) = match self {
            Self::PerToken => (x.dims() == [b, t], format!("[{b}, {t}]")),
            Self::PerSequence => (x.dims() == [b], format!("[{b}]")),
            Self::Either => (
                [&[b][..], &[b, 1], &[b, t]].contains(&x.dims()),
                format!("[{b}] or [{b}, {t}]"),
            ),
        };
        if !valid {
            bail!("{name}: shape {:?}, must be {must}", x.dims());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_grpo_test_support::message;

    use super::*;

    /// Two sequences of three tokens, with every input.
    fn full() -> Result<PolicyBatch> {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
        let (tokens, sequences) = (zeros(&[2, 3])?, zeros(&[2])?);
        Ok(PolicyBatch::new(&tokens, &sequences, &tokens)
            .old_log_probs(&tokens)
            .ref_log_probs(&tokens)
            .rollout_log_probs(&tokens)
            .entropy(&tokens)
            .scores(&sequences)
            .importance_weights(&zeros(&[2, 1])?)
            .sample_weights(&sequences)
            .policy_mask(&tokens)
            .entropy_mask(&tokens)
            .selected_tokens(&tokens)
            .prompt_tokens(&sequences)
            .teacher_log_probs(&tokens)
            .token_weights(&tokens)
            .values(&tokens)
            .groups(&sequences))
    }

    #[test]
    fn map_reaches_every_tensor() -> Result<()> {
        let batch = full()?;
        assert_eq!(batch.dims()?, (2, 3));
        // A tensor that keeps its rows does not fit the others.
        assert_eq!(batch.map(|x| x.narrow(0, 1, 1))?.dims()?, (1, 3));
        Ok(())
    }

    #[test]
    fn dims_names_a_tensor_of_another_shape() -> Result<()> {
        let wrong = Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?;
        for (batch, expected) in [
            (
                full()?.log_probs(&wrong),
                "log_probs: shape [3, 2], must be [2, 3]",
            ),
            (
                full()?.old_log_probs(&wrong),
                "old_log_probs: shape [3, 2], must be [2, 3]",
            ),
            (full()?.scores(&wrong), "scores: shape [3, 2], must be [2]"),
            (
                full()?.importance_weights(&wrong),
                "importance_weights: shape [3, 2], must be [2] or [2, 3]",
            ),
        ] {
            assert_eq!(message(batch.dims()), expected);
        }
        Ok(())
    }
}

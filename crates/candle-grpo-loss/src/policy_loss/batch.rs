//! Inputs for a policy loss.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::inputs::Input;

/// The old policy: the denominator in the ratio.
///
/// Choose [`Self::Current`] if each batch gets one update, [`Self::Recomputed`] if it gets several,
/// and [`Self::Rollout`] to let the ratio correct for the sampling engine. The type prevents a
/// correction from being applied twice.
#[derive(Debug, Clone)]
pub enum OldPolicy {
    /// The policy itself, detached: the ratio is 1, and its gradient is the log-prob's. Correct for
    /// a single update on each batch of samples.
    Current,
    /// Log-probs `[B, T]` that the trainer computed before the update. To correct for the sampling
    /// engine, set [`PolicyBatch::importance_weights`].
    Recomputed(Tensor),
    /// Log-probs `[B, T]` from the sampling engine. The ratio already corrects for the difference,
    /// so additional importance weights are an error.
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

/// Declares [`PolicyBatch`], a setter for each optional tensor, and the list of tensors.
macro_rules! policy_batch {
    ($($(#[$doc:meta])* $name:ident: $shape:ident,)*) => {
        /// The tensors in one micro-batch: B sequences with T response tokens.
        ///
        /// Only `log_probs` and `entropy` carry a gradient; all other tensors are detached.
        /// Positions outside the mask may hold any value, NaN included. Add optional tensors with
        /// their setters: if a loss needs one that is absent, the error names it.
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
            /// Advantages, `[B]`, `[B, 1]` or `[B, T]`. Advantages per sequence may be on the CPU.
            pub advantages: Tensor,
            /// Response mask `[B, T]`, 0 or 1 in any dtype.
            pub response_mask: Tensor,
            /// The ratio's denominator policy.
            pub old: OldPolicy,
            $($(#[$doc])* pub $name: Option<Tensor>,)*
        }

        impl PolicyBatch {
            /// Returns whether a batch has a field for `input`.
            pub fn accepts(input: Input) -> bool {
                input == Input::OldLogProbs
                    || [$(stringify!($name)),*].contains(&input.name())
            }

            /// Sets `input`. Does nothing if a batch does not [accept](Self::accepts) it.
            #[must_use]
            pub fn with(mut self, input: Input, tensor: &Tensor) -> Self {
                if input == Input::OldLogProbs {
                    self.old = OldPolicy::Recomputed(tensor.clone());
                }
                $(if input.name() == stringify!($name) {
                    self.$name = Some(tensor.clone());
                })*
                self
            }

            /// Creates a batch for [`crate::linear_policy_loss`], which computes log-probs and
            /// entropy itself. The old policy is the current one.
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

            /// Applies `f` to each tensor, for example to select rows or to move them to a device.
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

            /// Returns all tensors except the mask, with names and shapes.
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
    /// Log-probs `[B, T]` under the policy, with gradient.
    log_probs: PerToken,
    /// Log-probs `[B, T]` under the reference policy, which a KL loss requires.
    ref_log_probs: PerToken,
    /// Log-probs `[B, T]` under a teacher, for [`crate::PolicyLoss::distillation`].
    teacher_log_probs: PerToken,
    /// Positions `[B, T]` (1 or 0) that have a teacher. The terms of
    /// [`crate::PolicyLoss::distillation`] are 0 at others, and denominators do not change. If
    /// absent, all have one.
    teacher_mask: PerToken,
    /// Critic values `[B, T]`, for a custom surrogate.
    values: PerToken,
    /// Log-probs `[B, T]` from the sampling engine, for
    /// [`crate::PolicyLoss::off_policy_threshold`].
    rollout_log_probs: PerToken,
    /// The policy's entropy `[B, T]` at each position, with gradient. An entropy bonus requires it.
    entropy: PerToken,
    /// Scores `[B]` before any shaping, for terms on high-scoring samples.
    scores: PerSequence,
    /// Weights in the policy term for samples from another engine. [`crate::RolloutCorrection`]
    /// computes them.
    ///
    /// `[B, T]`, or `[B, 1]` or `[B]` for one weight per sequence. [`crate::experimental::Vespo`]
    /// and [`crate::surrogate::GeometricMean`] use a sequence weight once, and multiply token
    /// weights.
    importance_weights: Either,
    /// Each sequence's weight `[B]` in the policy term. Denominators do not change, so use weights
    /// whose mean over the step is 1.
    sample_weights: PerSequence,
    /// Each token's weight `[B, T]` in every term except the entropy bonus. Denominators do not
    /// change.
    token_weights: PerToken,
    /// Positions `[B, T]` (1 or 0) in the policy term, such as top-entropy tokens, or samples that
    /// no filter rejects. KL, entropy and denominators do not change.
    policy_mask: PerToken,
    /// Positions `[B, T]` (1 or 0) in the entropy bonus, which then averages over these tokens in
    /// the whole step.
    ///
    /// The loss requires their number, [`crate::StepTotals::entropy_tokens`]. If absent, the
    /// response mask is used, whatever `policy_mask` is.
    entropy_mask: PerToken,
    /// Positions `[B, T]` (1 or 0) of observations, for [`crate::PolicyLoss::observation_coef`]:
    /// response tokens outside the response mask that an environment or a tool wrote. The log-probs
    /// must be valid there, too.
    ///
    /// The loss requires their number, [`crate::StepTotals::observations`].
    observation_mask: PerToken,
    /// Tokens `[B, T]` (1 or 0) that [`crate::PolicyLoss::select_tokens`] selected from the whole
    /// step.
    selected_tokens: PerToken,
    /// Number of tokens in all samples for each sequence's prompt, over the whole step, `[B]`.
    /// [`crate::Aggregation::PromptMeanTokenMean`] requires it.
    prompt_tokens: PerSequence,
    /// Each sequence's group `[B]`, any number. A surrogate at
    /// [`crate::surrogate::LossLevel::Group`] requires it, and all sequences in a group must be in
    /// one batch.
    groups: PerSequence,
}

impl PolicyBatch {
    /// Creates a batch whose old policy is the current one.
    ///
    /// # Shapes
    ///
    /// `log_probs` `[B, T]`, with gradient; `advantages` `[B]`, `[B, 1]` or `[B, T]`;
    /// `response_mask` `[B, T]`, 0 or 1 in any dtype.
    pub fn new(log_probs: &Tensor, advantages: &Tensor, response_mask: &Tensor) -> Self {
        Self::without_log_probs(advantages, response_mask).log_probs(log_probs)
    }

    /// Sets the log-probs `[B, T]` under the policy before the update: [`OldPolicy::Recomputed`].
    #[must_use]
    pub fn old_log_probs(self, old_log_probs: &Tensor) -> Self {
        self.old_policy(OldPolicy::Recomputed(old_log_probs.clone()))
    }

    /// Sets the ratio's denominator policy.
    #[must_use]
    pub fn old_policy(mut self, old: OldPolicy) -> Self {
        self.old = old;
        self
    }

    /// Returns B and T.
    ///
    /// # Errors
    ///
    /// Fails if a tensor's shape differs from its description; the error names it.
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

    /// Returns all tensors except the response mask, with their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        self.inputs().map(|(name, _, x)| (name, x))
    }

    /// Returns the log-probs.
    ///
    /// # Errors
    ///
    /// Fails if they are absent.
    pub(crate) fn ensure_log_probs(&self) -> Result<&Tensor> {
        match &self.log_probs {
            Some(log_probs) => Ok(log_probs),
            None => bail!("log_probs: absent, a batch without them is for linear_policy_loss"),
        }
    }
}

/// Shape for an input with B sequences and T tokens.
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

    /// Two sequences with three tokens each, and every input.
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
            .observation_mask(&tokens)
            .selected_tokens(&tokens)
            .prompt_tokens(&sequences)
            .teacher_log_probs(&tokens)
            .teacher_mask(&tokens)
            .token_weights(&tokens)
            .values(&tokens)
            .groups(&sequences))
    }

    #[test]
    fn map_reaches_every_tensor() -> Result<()> {
        let batch = full()?;
        assert_eq!(batch.dims()?, (2, 3));
        // A tensor that keeps its rows would not match the others.
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

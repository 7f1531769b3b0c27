//! The policy that a policy learns from.

use anyhow::{Result, bail, ensure};
use candle_core::Tensor;
use candle_grpo_loss::{OutputLayer, Support};
use candle_grpo_nn::DividedModel;

use crate::{Progress, TokenBatch};

/// A fixed policy to learn from: a model in this process ([`Reference`](crate::learn::Reference)),
/// or one on servers (`ServerTeacher` in `rollout::engine`).
///
/// ```
/// use anyhow::Result;
/// use candle_core::{DType, Tensor};
/// use candle_grpo_train::learn::Teacher;
/// use candle_grpo_train::{Progress, TokenBatch};
///
/// /// All of 11 tokens have the same probability.
/// struct Uniform;
///
/// impl Teacher for Uniform {
///     fn log_probs(&self, batch: &TokenBatch, _: f64, _: &dyn Progress) -> Result<Tensor> {
///         let zeros = batch.response_mask().to_dtype(DType::F32)?.zeros_like()?;
///         Ok((zeros - 11f64.ln())?)
///     }
/// }
/// let _: &dyn Teacher = &Uniform;
/// ```
pub trait Teacher: Send + Sync {
    /// Returns whether a call has the sequences of one micro-batch, whose memory is bounded. By
    /// default it has; otherwise a call has all sequences of the rank.
    fn takes_micro_batches(&self) -> bool {
        true
    }

    /// Returns the most tokens that the teacher can read in a sequence. A [`Trainer`] lets no
    /// teacher read a completion with a longer sequence. By default there is no limit.
    ///
    /// [`Trainer`]: crate::Trainer
    fn longest_row(&self) -> usize {
        usize::MAX
    }

    /// Returns the weights, if ranks divide them. All ranks then make as many calls. By default,
    /// they do not.
    fn divided(&self) -> Option<&DividedModel> {
        None
    }

    /// Checks that the teacher answers, before the first completion is drawn. `entries` is as in
    /// [`Self::distributions`]. By default, nothing is checked.
    ///
    /// # Errors
    ///
    /// If the teacher fails, and with [`Interrupted`](crate::Interrupted) if `progress` cancels.
    fn check(&self, entries: Option<usize>, progress: &dyn Progress) -> Result<()> {
        let _ = (entries, progress);
        Ok(())
    }

    /// Returns the log-probs of the responses of `batch` at `temperature`, f32 `[B, T]`, detached.
    /// Those of tokens that are not in the response mask are not used.
    ///
    /// # Errors
    ///
    /// If the teacher fails, and with [`Interrupted`](crate::Interrupted) if `progress` cancels.
    fn log_probs(
        &self,
        batch: &TokenBatch,
        temperature: f64,
        progress: &dyn Progress,
    ) -> Result<Tensor>;

    /// Returns the distributions at the responses of `batch` at temperature 1, for
    /// [`Recipe::distillation_loss`](candle_grpo_loss::Recipe::distillation_loss). Those of tokens
    /// that are not in the response mask are not used. By default a teacher has none.
    ///
    /// `entries` is the number of the most likely entries to compare, for which a teacher may give
    /// whole distributions as well. If it is absent, the loss needs whole distributions. A teacher
    /// that takes micro-batches is asked again in each epoch.
    ///
    /// # Errors
    ///
    /// If the teacher fails or cannot do this, and with [`Interrupted`](crate::Interrupted) if
    /// `progress` cancels.
    fn distributions(
        &self,
        batch: &TokenBatch,
        entries: Option<usize>,
        progress: &dyn Progress,
    ) -> Result<TeacherDistributions> {
        let _ = (batch, entries, progress);
        bail!(
            "teacher: gives log-probs of tokens only, must give distributions for recipe.distillation_loss"
        )
    }
}

/// The distributions of a teacher at the responses of B sequences of up to T tokens, detached.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum TeacherDistributions {
    /// The output layer of a model.
    Hidden {
        /// Hidden states, `[B, T, H]`.
        hidden: Tensor,
        /// Output weight, `[V, H]`. Rows beyond the vocabulary of the policy are not used: models
        /// of one family have the same tokens and differ in their padding.
        weight: Tensor,
        /// Bound of the logits.
        logit_cap: Option<f64>,
    },
    /// The most likely entries.
    TopK {
        /// Entries of the vocabulary, u32 `[B, T, K]`.
        ids: Tensor,
        /// Their log-probs, f32 `[B, T, K]`.
        log_probs: Tensor,
    },
}

impl TeacherDistributions {
    /// Calls `f` with the distributions over a vocabulary of this size, for a loss of this support.
    pub(crate) fn over<T>(
        &self,
        vocabulary: usize,
        support: Support,
        f: impl FnOnce(candle_grpo_loss::TeacherLogits<'_>) -> Result<T>,
    ) -> Result<T> {
        match self {
            Self::Hidden {
                hidden,
                weight,
                logit_cap,
            } => {
                let rows = weight.dim(0)?;
                ensure!(
                    rows >= vocabulary,
                    "teacher: {rows} logits, must be at least {vocabulary}, those of the policy"
                );
                let weight = weight.narrow(0, 0, vocabulary)?;
                f(candle_grpo_loss::TeacherLogits::Hidden(OutputLayer {
                    logit_cap: *logit_cap,
                    ..OutputLayer::new(hidden, &weight)
                }))
            }
            Self::TopK { ids, log_probs } => {
                let given = ids.dims().last().copied().unwrap_or(0);
                ensure!(
                    matches!(support, Support::Teacher { k } if k >= given),
                    "distillation_loss.support: {support:?}, must be the entries of the teacher, which gives its {given} most likely ones"
                );
                f(candle_grpo_loss::TeacherLogits::TopK { ids, log_probs })
            }
        }
    }

    /// The tensors of which each sequence has a part, `[B, T, ..]`, with their names.
    pub(crate) fn by_sequence(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            Self::Hidden { hidden, .. } => vec![("teacher.hidden", hidden)],
            Self::TopK { ids, log_probs } => {
                vec![("teacher.ids", ids), ("teacher.log_probs", log_probs)]
            }
        }
    }

    /// Applies `f` to each tensor of which each sequence has a part.
    pub(crate) fn map(
        &self,
        f: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<Self> {
        Ok(match self {
            Self::Hidden {
                hidden,
                weight,
                logit_cap,
            } => Self::Hidden {
                hidden: f(hidden)?,
                weight: weight.clone(),
                logit_cap: *logit_cap,
            },
            Self::TopK { ids, log_probs } => Self::TopK {
                ids: f(ids)?,
                log_probs: f(log_probs)?,
            },
        })
    }
}

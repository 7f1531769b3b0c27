//! A teacher's distributions.

use candle_core::{Result, Tensor};

use super::OutputLayer;
use super::output_layer::products;

/// A teacher's distributions, without a gradient.
///
/// Pass `Logits` if they fit in memory, `Hidden` with
/// [`linear_distillation_loss`](crate::linear_distillation_loss) if they do not, and `TopK` if the
/// teacher is a server.
#[derive(Debug, Clone, Copy)]
pub enum TeacherLogits<'a> {
    /// Logits over the whole vocabulary, `[B, T, V]`.
    Logits(&'a Tensor),
    /// Hidden states `[B, T, H]`, with the layer that turns them into logits.
    Hidden(OutputLayer<'a>),
    /// Log-probs for the most likely entries, which are also the support.
    TopK {
        /// Vocabulary entries, `[B, T, K]`.
        ids: &'a Tensor,
        /// Their log-probs, `[B, T, K]`.
        log_probs: &'a Tensor,
    },
}

/// Distributions at some places.
pub(super) enum TeacherRows {
    /// `[.., V]`
    Logits(Tensor),
    /// Both `[.., K]`.
    TopK { ids: Tensor, log_probs: Tensor },
}

impl TeacherLogits<'_> {
    /// Returns the distributions at the places that `select` picks from a tensor by name.
    pub(super) fn rows(
        &self,
        select: impl Fn(&str, &Tensor) -> Result<Tensor>,
    ) -> Result<TeacherRows> {
        Ok(match self {
            Self::Logits(logits) => TeacherRows::Logits(select("teacher", logits)?),
            Self::Hidden(layer) => {
                let hidden = select("teacher.hidden", layer.hidden)?;
                let width = hidden.dims().last().copied().unwrap_or(0);
                layer.check("teacher", width)?;
                let mut shape = hidden.dims().to_vec();
                let products = products(&hidden.reshape(((), width))?, layer.weight)?;
                shape[hidden.rank() - 1] = products.dim(1)?;
                TeacherRows::Logits(layer.logits(&products.reshape(shape)?)?.detach())
            }
            Self::TopK { ids, log_probs } => TeacherRows::TopK {
                ids: select("teacher.ids", ids)?,
                log_probs: select("teacher.log_probs", log_probs)?,
            },
        })
    }
}

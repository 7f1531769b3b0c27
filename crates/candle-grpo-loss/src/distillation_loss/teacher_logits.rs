//! The distributions of a teacher.

use candle_core::{Result, Tensor};

use super::OutputLayer;
use super::output_layer::products;

/// The distributions of a teacher. They have no gradient.
#[derive(Debug, Clone, Copy)]
pub enum TeacherLogits<'a> {
    /// Logits of the whole vocabulary, `[B, T, V]`.
    Logits(&'a Tensor),
    /// Hidden states `[B, T, H]` and the layer that turns them into logits.
    Hidden(OutputLayer<'a>),
    /// Log-probs of the most likely entries. They are the support.
    TopK {
        /// Entries of the vocabulary, `[B, T, K]`.
        ids: &'a Tensor,
        /// Their log-probs, `[B, T, K]`.
        log_probs: &'a Tensor,
    },
}

/// The distributions at some places.
pub(super) enum TeacherRows {
    /// `[.., V]`
    Logits(Tensor),
    /// Both `[.., K]`.
    TopK { ids: Tensor, log_probs: Tensor },
}

impl TeacherLogits<'_> {
    /// Returns the distributions at the places that `select` takes from a tensor of this name.
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

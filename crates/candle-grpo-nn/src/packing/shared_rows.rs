//! Rows that several sequences share.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::{add_embedding_gradient, arithmetic_dtype, embedding};

use crate::PackedTokens;

/// The conversion between shared rows `[N, ..]` and the tokens `[T, ..]` of all sequences, one
/// after another. Only attention needs the latter.
#[derive(Debug, Clone)]
pub(crate) struct SharedRows {
    /// The row of each token, u32 `[T]`.
    row_of_token: Tensor,
    /// The first token of each row, u32 `[N]`.
    first_token: Tensor,
}

impl SharedRows {
    /// `None` if the sequences share no tokens.
    pub(crate) fn new(tokens: &PackedTokens) -> Result<Option<Self>> {
        let device = tokens.ids().device();
        let Some(rows) = tokens.shared_rows() else {
            return Ok(None);
        };
        Ok(Some(Self {
            row_of_token: Tensor::new(rows, device)?,
            first_token: Tensor::new(tokens.first_tokens(), device)?,
        }))
    }

    /// Expands `[N, ..]` to `[T, ..]`.
    pub(crate) fn to_tokens(&self, x: &Tensor) -> Result<Tensor> {
        embedding(&self.row_of_token, x)
    }

    /// [`Self::to_tokens`] of query, key and value.
    pub(crate) fn all_to_tokens(&self, x: &[Tensor; 3]) -> Result<[Tensor; 3]> {
        let [query, key, value] = x.each_ref().map(|x| self.to_tokens(x));
        Ok([query?, key?, value?])
    }

    /// Returns the gradients of the arguments of [`Self::all_to_tokens`] from those of its results.
    pub(crate) fn to_tokens_gradient(&self, gradients: [Tensor; 3]) -> Result<[Tensor; 3]> {
        let rows = self.first_token.dim(0)?;
        let [query, key, value] = gradients.map(|x| summed(&self.row_of_token, rows, &x));
        Ok([query?, key?, value?])
    }

    /// Selects `[N, ..]` from `[T, ..]`, in which all tokens of a row are equal.
    pub(crate) fn to_rows(&self, x: &Tensor) -> Result<Tensor> {
        embedding(&self.first_token, x)
    }

    /// Returns the gradient of the argument of [`Self::to_rows`] from that of its result.
    pub(crate) fn to_rows_gradient(&self, gradient: &Tensor) -> Result<Tensor> {
        summed(&self.first_token, self.row_of_token.dim(0)?, gradient)
    }
}

/// Adds each row of `gradient` at its place in zeros `[count, ..]` of the same dtype.
fn summed(places: &Tensor, count: usize, gradient: &Tensor) -> Result<Tensor> {
    let dtype = arithmetic_dtype(gradient.dtype());
    let sum = Tensor::zeros((count, gradient.dim(1)?), dtype, gradient.device())?;
    add_embedding_gradient(&sum, places, gradient)?;
    sum.to_dtype(gradient.dtype())
}

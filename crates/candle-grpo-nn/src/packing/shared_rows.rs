//! Rows that several sequences share.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::RowMap;

use crate::PackedTokens;

/// Converts between shared rows `[N, ..]` and all sequences' tokens `[T, ..]`. Only attention needs
/// the latter.
#[derive(Debug, Clone)]
pub(crate) struct SharedRows {
    row_of_token: RowMap,
    first_token_of_row: RowMap,
}

impl SharedRows {
    /// `None` if the sequences share no tokens.
    pub(crate) fn new(tokens: &PackedTokens) -> Result<Option<Self>> {
        let device = tokens.ids().device();
        let Some(rows) = tokens.shared_rows() else {
            return Ok(None);
        };
        let first_tokens = tokens.first_tokens();
        Ok(Some(Self {
            row_of_token: RowMap::new(rows.to_vec(), first_tokens.len(), device)?,
            first_token_of_row: RowMap::new(first_tokens, rows.len(), device)?,
        }))
    }

    /// Expands `[N, ..]` to `[T, ..]`.
    pub(crate) fn to_tokens(&self, x: &Tensor) -> Result<Tensor> {
        self.row_of_token.select(x)
    }

    /// Applies [`Self::to_tokens`] to query, key and value.
    pub(crate) fn all_to_tokens(&self, x: &[Tensor; 3]) -> Result<[Tensor; 3]> {
        let [query, key, value] = x.each_ref().map(|x| self.to_tokens(x));
        Ok([query?, key?, value?])
    }

    /// Returns the gradients with respect to the arguments to [`Self::all_to_tokens`], given its
    /// output gradients.
    pub(crate) fn to_tokens_gradient(&self, gradients: [Tensor; 3]) -> Result<[Tensor; 3]> {
        let [query, key, value] = gradients.map(|x| self.row_of_token.sum(&x));
        Ok([query?, key?, value?])
    }

    /// Selects `[N, ..]` from `[T, ..]`, where a row's tokens are all equal.
    pub(crate) fn to_rows(&self, x: &Tensor) -> Result<Tensor> {
        self.first_token_of_row.select(x)
    }

    /// Returns the gradient with respect to the argument to [`Self::to_rows`], given its output
    /// gradient.
    pub(crate) fn to_rows_gradient(&self, gradient: &Tensor) -> Result<Tensor> {
        self.first_token_of_row.sum(gradient)
    }
}

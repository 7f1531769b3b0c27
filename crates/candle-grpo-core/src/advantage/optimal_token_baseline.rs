//! The minimum-variance baseline for each token.

use candle_core::{D, DType, Result, Tensor};
use serde::{Deserialize, Serialize};

use super::{AdvantageBatch, reverse_recurrence};
use crate::groups::GroupLayout;
use crate::mask::Mask;
use crate::validate::{self, Checked};

/// Correspondence between tokens in two sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TokenAlignment {
    /// By position. The default.
    #[default]
    Position,
    /// By the number of policy tokens before them: tokens from other sources between the turns are
    /// not counted (verl's `tir_optimal_token_baseline`).
    Generated,
}

/// The minimum-variance baseline for each token (verl's `optimal_token_baseline`).
///
/// ```text
/// baseline_t = sum(G_t W_t) / (sum(W_t) + epsilon)   over the sequences of the group with a token at t
/// W_t = sum_(u <= t) (1 - 2 p_u + q_u) w_u^2
/// ```
///
/// G is the return and p the token's probability under the old policy. q is the sum of squared
/// probabilities at its position, and w its importance weight (1 if absent). If only one sequence
/// in a group has tokens, its baseline is 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct OptimalTokenBaseline {
    /// Correspondence between tokens in two sequences. Default `position`.
    pub alignment: TokenAlignment,
    /// Sets the baseline to 0 after the group's second-longest sequence has ended. Past that
    /// point, the baseline would be the longest sequence's own return, and its advantage 0. As
    /// in verl, a sequence with n tokens ends after column n. Unlike in verl, a column in
    /// which another sequence has a token keeps its baseline. Default `true`.
    pub handle_zero_tail: bool,
    /// Added to the summed W. Default 1e-8.
    pub epsilon: f64,
}

impl Default for OptimalTokenBaseline {
    fn default() -> Self {
        Self {
            alignment: TokenAlignment::Position,
            handle_zero_tail: true,
            epsilon: 1e-8,
        }
    }
}

impl OptimalTokenBaseline {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::positive("epsilon", self.epsilon)
    }

    /// Computes the baseline `[B, T]` for `returns` `[B, T]`, both 0 outside the mask.
    pub(super) fn compute(
        &self,
        returns: &Tensor,
        mask: &Mask,
        batch: &AdvantageBatch,
    ) -> Result<Tensor> {
        self.validate()?;
        let (sequences, _) = mask.dims()?;
        let layout = GroupLayout::new(&batch.groups, sequences, returns.device())?;
        let weights = cumulative_energy(mask, batch)?;
        let baseline = match self.alignment {
            TokenAlignment::Position => {
                let here = mask.to_dtype(returns.dtype())?;
                self.by_column(returns, &weights, &here, &layout, mask)?
            }
            TokenAlignment::Generated => {
                let columns = Compaction::new(mask)?;
                let here = columns.compact(&mask.to_dtype(returns.dtype())?)?;
                let returns = columns.compact(returns)?;
                let weights = columns.compact(&weights)?;
                columns.spread(&self.by_column(&returns, &weights, &here, &layout, mask)?)?
            }
        };
        mask.select(&baseline)
    }

    /// Computes the baseline when tokens in the same column correspond. `here` is 1 where a
    /// sequence has a token.
    fn by_column(
        &self,
        returns: &Tensor,
        weights: &Tensor,
        here: &Tensor,
        layout: &GroupLayout,
        mask: &Mask,
    ) -> Result<Tensor> {
        let dtype = returns.dtype();
        let present = layout.present()?.to_dtype(dtype)?;
        let weights = (weights * here)?;
        let rows = |x: &Tensor| layout.to_rows(x)?.broadcast_mul(&present.unsqueeze(2)?);
        let weighted = rows(&(returns * &weights)?)?.sum_keepdim(1)?;
        let total = (rows(&weights)?.sum_keepdim(1)? + self.epsilon)?;
        let (groups, width) = present.dims2()?;
        let tokens = returns.dim(1)?;
        let baseline = (weighted / total)?.broadcast_as((groups, width, tokens))?;
        let baseline = layout.to_samples(&baseline)?;

        let lengths = (layout.to_rows(&mask.lengths(dtype)?.squeeze(1)?)? * &present)?;
        let others = layout.to_members(&lengths.gt(0.)?.to_dtype(dtype)?.sum_keepdim(1)?)?;
        let mut applies = others
            .gt(1.)?
            .unsqueeze(1)?
            .broadcast_as((returns.dim(0)?, tokens))?;
        if self.handle_zero_tail {
            // A masked gap moves tokens past the column that equals their sequence's length.
            let shared = rows(here)?.sum_keepdim(1)?.gt(1.)?;
            let shared = layout.to_samples(&shared.broadcast_as((groups, width, tokens))?)?;
            let kept = before_the_tail(&lengths, tokens, layout)?.maximum(&shared)?;
            applies = (applies * kept)?;
        }
        applies.where_cond(&baseline, &baseline.zeros_like()?)
    }
}

/// Returns u8 `[B, T]`: 0 in the columns that only the group's longest sequence reaches, else 1.
fn before_the_tail(lengths: &Tensor, tokens: usize, layout: &GroupLayout) -> Result<Tensor> {
    let longest = lengths.max_keepdim(1)?;
    let is_longest = lengths.broadcast_eq(&longest)?;
    let second = is_longest
        .where_cond(&lengths.zeros_like()?, lengths)?
        .max_keepdim(1)?;
    let unique = is_longest
        .to_dtype(lengths.dtype())?
        .sum_keepdim(1)?
        .eq(1.)?;
    let is_unique = is_longest.broadcast_mul(&unique)?;
    // Without a unique longest sequence, the tail begins after the last column.
    let end = (lengths.zeros_like()? + tokens as f64)?;
    let second = second.broadcast_as(lengths.shape())?;
    let tail = layout.to_samples(&is_unique.where_cond(&second, &end)?)?;
    let columns = Tensor::arange(0u32, tokens as u32, lengths.device())?
        .to_dtype(lengths.dtype())?
        .unsqueeze(0)?;
    columns.broadcast_lt(&tail.unsqueeze(1)?)
}

/// Returns the energies summed up to each token, `[B, T]`.
fn cumulative_energy(mask: &Mask, batch: &AdvantageBatch) -> Result<Tensor> {
    let log_probs = batch.on_tokens("old_log_probs", batch.old_log_probs.as_ref())?;
    let squares = batch.on_tokens("sum_of_squared_probs", batch.sum_of_squared_probs.as_ref())?;
    let mut energy = mask.select(&((squares - (log_probs.exp()? * 2.)?)? + 1.)?)?;
    if batch.importance_weights.is_some() {
        let weights = batch.on_tokens("importance_weights", batch.importance_weights.as_ref())?;
        energy = (energy * weights.sqr()?)?;
    }
    cumulative_sum(&energy)
}

/// Returns running sums along the last dimension.
fn cumulative_sum(x: &Tensor) -> Result<Tensor> {
    let last = [x.rank() - 1];
    let sums = reverse_recurrence(&x.flip(&last)?, &x.ones_like()?)?;
    sums.flip(&last)
}

/// Moves masked-in tokens to the front of their row, and back.
struct Compaction {
    /// `[B, T]`, u32: the column that a token moves to; T outside the mask.
    column_of: Tensor,
}

impl Compaction {
    fn new(mask: &Mask) -> Result<Self> {
        let (batch, tokens) = mask.dims()?;
        let rank = (cumulative_sum(&mask.to_dtype(DType::F32)?)? - 1.)?;
        let outside = Tensor::full(tokens as f32, (batch, tokens), rank.device())?;
        let column_of = mask.selected().where_cond(&rank, &outside)?;
        Ok(Self {
            column_of: column_of.to_dtype(DType::U32)?.contiguous()?,
        })
    }

    fn compact(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, tokens) = x.dims2()?;
        let wide = Tensor::zeros((batch, tokens + 1), x.dtype(), x.device())?;
        wide.scatter_add(&self.column_of, &x.contiguous()?, D::Minus1)?
            .narrow(1, 0, tokens)?
            .contiguous()
    }

    fn spread(&self, x: &Tensor) -> Result<Tensor> {
        x.pad_with_zeros(1, 0, 1)?
            .contiguous()?
            .gather(&self.column_of, D::Minus1)
    }
}

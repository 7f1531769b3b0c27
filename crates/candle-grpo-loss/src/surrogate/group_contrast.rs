//! Positive against negative sequences in a group.

use candle_core::{D, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::token_loss::both;
use super::{LossLevel, SurrogateInputs, TokenLoss, TokenLosses};
use candle_grpo_core::validate::positive;

/// `log(1 + sum_neg exp(s)) + log(1 + sum_pos exp(-s))` for each group, where a sequence has
/// `s = mean_t d / tau` (REAL, <https://arxiv.org/abs/2602.05630>).
///
/// Positive sequences have a mean advantage above 0. Over all sequences with the same sign, the
/// gradients add up to less than `1 / tau`, however far the ratios move. A group without both signs
/// has loss 0, and a sequence without tokens is not part of its group.
///
/// Each sequence has its group's loss. [`crate::Aggregation::PromptMeanTokenMean`] averages over
/// groups. Needs [`crate::PolicyBatch::groups`], with all sequences in a group in one batch.
#[doc(alias = "REAL")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct GroupContrast {
    /// Score temperature. Default 0.5.
    pub tau: f64,
}

impl Default for GroupContrast {
    fn default() -> Self {
        Self { tau: 0.5 }
    }
}

impl TokenLoss for GroupContrast {
    fn validate(&self) -> Result<()> {
        positive("group_contrast.tau", self.tau)?;
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let Some(groups) = inputs.groups else {
            bail!("groups: absent, group_contrast needs the group of each sequence");
        };
        let d = inputs.token_log_ratio;
        let count = inputs.mask.lengths(d.dtype())?;
        let lengths = count.maximum(1.)?;
        // Columns, `[B, 1]`.
        let score = ((d.sum_keepdim(D::Minus1)? / &lengths)? / self.tau)?;
        let advantage = inputs.advantages.sum_keepdim(D::Minus1)?;
        let has_tokens = count.gt(0.)?;
        let is_positive = both(&advantage.gt(0.)?, &has_tokens)?;
        let is_negative = both(&advantage.le(0.)?, &has_tokens)?;
        // Row i, column j: sequence j is in the same group as sequence i.
        let groups = groups.unsqueeze(1)?;
        let same = groups.broadcast_eq(&groups.t()?)?;
        let negatives = same.broadcast_mul(&is_negative.t()?)?;
        let positives = same.broadcast_mul(&is_positive.t()?)?;
        let row = score.t()?;
        let loss =
            (log_one_plus_sum(&row, &negatives)? + log_one_plus_sum(&row.neg()?, &positives)?)?;
        let has_both = both(
            &negatives.max_keepdim(D::Minus1)?,
            &positives.max_keepdim(D::Minus1)?,
        )?;
        let loss = has_both.where_cond(&loss, &loss.zeros_like()?)?;
        let on_tokens = |x: &Tensor| x.broadcast_as(d.shape())?.contiguous();
        Ok(TokenLosses {
            loss: on_tokens(&loss)?,
            flags: vec![("positive_fraction", on_tokens(&is_positive)?)],
        })
    }

    fn level(&self) -> LossLevel {
        LossLevel::Group
    }
}

/// Computes `log(1 + sum_j exp(x_j))` over the selected columns of `x` `[1, B]`: `[B, 1]`.
fn log_one_plus_sum(x: &Tensor, selected: &Tensor) -> Result<Tensor> {
    let x = x.broadcast_as(selected.shape())?;
    let lowest = (x.zeros_like()? + f64::NEG_INFINITY)?;
    let x = selected.where_cond(&x, &lowest)?;
    // At least 0, which is the exponent for the 1.
    let largest = x.detach().max_keepdim(D::Minus1)?.maximum(0.)?;
    let sum = x.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?;
    (sum + largest.neg()?.exp()?)?.log()? + largest
}

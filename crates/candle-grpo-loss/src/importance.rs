//! The ratio of the policy to the old policy, at the level at which it is taken.

use candle_core::{D, Result, Tensor};
use candle_grpo_core::{Mask, reverse_recurrence};
use serde::{Deserialize, Serialize};

/// Over what the log-ratio `d = log_probs - old_log_probs` is averaged before it is exponentiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImportanceLevel {
    /// Each token has its own ratio (PPO, GRPO).
    #[default]
    Token,
    /// The mean of `d` over the sequence, so that the ratio is a geometric mean (GSPO, <https://arxiv.org/abs/2507.18071>).
    #[serde(alias = "seq")]
    Sequence,
    /// The value of [`Self::Sequence`] with the gradient of each token (GSPO-token).
    SequenceToken,
    /// The sum of `d` over the sequence, so that the ratio is a product (REINFORCE leave-one-out of TRL).
    SequenceProduct,
    /// The mean of `d` over each run of consecutive tokens of the mask: one ratio for each turn.
    Segment,
}

impl ImportanceLevel {
    /// The log-ratio at this level, `[B, T]`: `log_ratio` `[B, T]` holds 0 outside the mask.
    pub(crate) fn log_ratio(self, log_ratio: &Tensor, mask: &Mask) -> Result<Tensor> {
        let over_sequence = |mean: bool| -> Result<Tensor> {
            let sum = log_ratio.sum_keepdim(D::Minus1)?;
            let sum = if mean {
                (sum / mask.lengths(log_ratio.dtype())?.maximum(1.)?)?
            } else {
                sum
            };
            sum.broadcast_as(log_ratio.shape())
        };
        match self {
            Self::Token => Ok(log_ratio.clone()),
            Self::Sequence => over_sequence(true),
            Self::SequenceToken => {
                over_sequence(true)?.detach() + (log_ratio - log_ratio.detach())?
            }
            Self::SequenceProduct => over_sequence(false),
            Self::Segment => {
                let sums = segment_sums(log_ratio, mask)?;
                let ones = mask.to_dtype(log_ratio.dtype())?;
                sums / segment_sums(&ones, mask)?.maximum(1.)?
            }
        }
    }
}

/// The k3 estimate of the KL of the policy that drew from the other one: `exp(d) - 1 - d` with d the log-ratio of the
/// other one to it.
pub(crate) fn k3(d: &Tensor) -> Result<Tensor> {
    (d.exp()? - 1.)? - d
}

/// At each position of the mask the sum of `x` over its run of consecutive positions; `x` is 0 elsewhere.
fn segment_sums(x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let inside = mask.to_dtype(x.dtype())?;
    let forward = reverse_recurrence(&x.flip(&[1])?, &inside.flip(&[1])?)?.flip(&[1])?;
    let backward = reverse_recurrence(x, &inside)?;
    mask.select(&((forward + backward)? - x)?)
}

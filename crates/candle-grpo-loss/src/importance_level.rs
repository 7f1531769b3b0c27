//! The level at which the policy's ratio to the old policy is computed.

use candle_core::{D, Result, Tensor};
use candle_grpo_core::Mask;
use candle_grpo_core::advantage::reverse_recurrence;
use serde::{Deserialize, Serialize};

/// Reduction for the log-ratio `d = log_probs - old_log_probs` before `exp`.
///
/// Use [`Self::Token`] by default. Try [`Self::Sequence`] if token ratios are noisy, for example in
/// mixture-of-experts models, and [`Self::Segment`] for multi-turn samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ImportanceLevel {
    /// One ratio per token (PPO, GRPO). The default.
    #[default]
    Token,
    /// Mean `d` over the sequence: the ratio is a geometric mean (GSPO,
    /// <https://arxiv.org/abs/2507.18071>).
    #[doc(alias = "GSPO")]
    #[serde(alias = "seq")]
    #[cfg_attr(feature = "schema", schemars(extend("aliases" = ["seq"])))]
    Sequence,
    /// [`Self::Sequence`] in value, with each token's own gradient (GSPO-token).
    SequenceToken,
    /// `d` summed over the sequence: the ratio is a product (RLOO in TRL).
    SequenceProduct,
    /// Mean `d` over each run of consecutive masked-in tokens: one ratio per turn.
    Segment,
}

impl ImportanceLevel {
    /// Computes the log-ratio at this level, `[B, T]`. `log_ratio` `[B, T]` must be 0 outside the
    /// mask.
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

/// Sums `x` over the run of consecutive masked-in positions around each position. `x` must be 0
/// outside the mask.
fn segment_sums(x: &Tensor, mask: &Mask) -> Result<Tensor> {
    let inside = mask.to_dtype(x.dtype())?;
    let forward = reverse_recurrence(&x.flip(&[1])?, &inside.flip(&[1])?)?.flip(&[1])?;
    let backward = reverse_recurrence(x, &inside)?;
    mask.select(&((forward + backward)? - x)?)
}

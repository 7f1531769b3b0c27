//! What becomes of the reward of a response that was cut off.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::dtype::{arithmetic_dtype, for_statistics};

/// The reward of a response that did not stop by itself (OpenRLHF's `stop_properly_penalty_coef`).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::TruncationPenalty;
///
/// let rewards = Tensor::new(&[1f32, 0.5], &Device::Cpu)?;
/// let truncated = Tensor::new(&[0u8, 1], &Device::Cpu)?;
/// let replaced = TruncationPenalty::Replace(-1.).apply(&rewards, &truncated)?;
/// assert_eq!(replaced.to_vec1::<f32>()?, [1., -1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TruncationPenalty {
    /// Multiplied by this.
    Multiply(f64),
    /// This, whatever it was.
    Replace(f64),
}

impl TruncationPenalty {
    /// OpenRLHF's coefficient, whose sign says what is done: from 0 it multiplies, below 0 it replaces.
    pub fn from_coefficient(coefficient: f64) -> Self {
        if coefficient < 0. {
            Self::Replace(coefficient)
        } else {
            Self::Multiply(coefficient)
        }
    }

    /// `rewards` `[B]` with those of the samples where `truncated` `[B]` is not 0 changed.
    pub fn apply(&self, rewards: &Tensor, truncated: &Tensor) -> Result<Tensor> {
        let (Self::Multiply(number) | Self::Replace(number)) = *self;
        if !number.is_finite() {
            bail!("truncation penalty: {number}, must be finite");
        }
        if rewards.rank() != 1 || rewards.dims() != truncated.dims() {
            bail!(
                "truncated: shape {:?}, must be that of rewards, [B], which is {:?}",
                truncated.dims(),
                rewards.dims()
            );
        }
        let x = for_statistics(rewards)?;
        let changed = match self {
            Self::Multiply(factor) => (&x * *factor)?,
            Self::Replace(reward) => (x.zeros_like()? + *reward)?,
        };
        truncated
            .detach()
            .ne(0.)?
            .where_cond(&changed, &x)?
            .to_dtype(arithmetic_dtype(rewards.dtype()))
    }
}

//! A penalty for responses that come close to the longest that is allowed.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::dtype::{arithmetic_dtype, for_statistics};

/// The soft overlong penalty of DAPO (<https://arxiv.org/abs/2503.14476>):
/// `-factor * clip((length - (max_length - buffer)) / buffer, 0, 1)`.
///
/// Up to `max_length` verl (`overlong_buffer`), OpenRLHF (`overlong_penalty_factor`) and TRL
/// (`get_soft_overlong_punishment`, with the factor 1) have the same; beyond it, verl's goes on growing.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::OverlongPenalty;
///
/// let penalty = OverlongPenalty { max_length: 100, buffer: 20, factor: 1. };
/// let lengths = Tensor::new(&[50u32, 80, 90, 100, 130], &Device::Cpu)?;
/// assert_eq!(penalty.of(&lengths)?.to_vec1::<f32>()?, [0., 0., -0.5, -1., -1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverlongPenalty {
    /// The length at which the penalty is whole.
    pub max_length: usize,
    /// Over how many tokens before that it grows.
    pub buffer: usize,
    /// The whole penalty.
    #[serde(default = "one")]
    pub factor: f64,
}

fn one() -> f64 {
    1.
}

impl OverlongPenalty {
    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        if self.buffer == 0 || self.buffer > self.max_length {
            bail!(
                "buffer: {}, must be from 1 to max_length, {}",
                self.buffer,
                self.max_length
            );
        }
        if !(self.factor >= 0. && self.factor.is_finite()) {
            bail!("factor: {}, must be finite and at least 0", self.factor);
        }
        Ok(())
    }

    /// What is added to the rewards of responses of these `lengths`: the same shape, not above 0.
    pub fn of(&self, lengths: &Tensor) -> Result<Tensor> {
        self.validate()?;
        let free = (self.max_length - self.buffer) as f64;
        let excess = ((for_statistics(lengths)? - free)? / self.buffer as f64)?;
        let penalty = (excess.clamp(0., 1.)? * -self.factor)?;
        // 0 and not -0 where there is no penalty.
        (penalty + 0.)?.to_dtype(arithmetic_dtype(lengths.dtype()))
    }
}

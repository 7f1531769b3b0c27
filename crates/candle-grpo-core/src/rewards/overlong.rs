//! A penalty for responses close to the length limit.

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::validate::{self, Checked};

/// DAPO's soft overlong penalty (<https://arxiv.org/abs/2503.14476>):
/// `-factor * clip((length - (max_length - buffer)) / buffer, 0, 1)`.
///
/// Use it if many responses hit the length limit: truncated answers then lose reward gradually. Set
/// `max_length` to the limit, and `buffer` to about a fifth of it, as DAPO does.
///
/// verl (`overlong_buffer`), OpenRLHF (`overlong_penalty_factor`) and TRL
/// (`get_soft_overlong_punishment`, with factor 1) agree up to `max_length`. Beyond it, the penalty
/// keeps growing in verl, AReaL and ms-swift: set `unbounded` for that.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::rewards::OverlongPenalty;
///
/// let penalty = OverlongPenalty::new(100, 20);
/// let lengths = Tensor::new(&[50u32, 80, 90, 100, 130], &Device::Cpu)?;
/// assert_eq!(penalty.compute(&lengths)?.to_vec1::<f32>()?, [0., 0., -0.5, -1., -1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct OverlongPenalty {
    /// Length at which the penalty reaches `factor`.
    pub max_length: usize,
    /// Number of tokens before `max_length` over which the penalty grows.
    pub buffer: usize,
    /// Largest penalty. Default 1.
    #[serde(default = "one")]
    pub factor: f64,
    /// Continues the slope beyond `max_length`. Default `false`.
    #[serde(default)]
    pub unbounded: bool,
}

fn one() -> f64 {
    1.
}

impl OverlongPenalty {
    /// Creates a bounded penalty with factor 1.
    pub fn new(max_length: usize, buffer: usize) -> Self {
        Self {
            max_length,
            buffer,
            factor: 1.,
            unbounded: false,
        }
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::check(
            (1..=self.max_length).contains(&self.buffer),
            "buffer",
            self.buffer,
            &format!("be from 1 to max_length, {}", self.max_length),
        )?;
        validate::non_negative("factor", self.factor)
    }

    /// Computes the terms, at most 0, that you add to the rewards for responses with these
    /// `lengths`. The result has the same shape as `lengths`.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid.
    pub fn compute(&self, lengths: &Tensor) -> Result<Tensor> {
        self.validate()?;
        let free = (self.max_length - self.buffer) as f64;
        let excess = ((for_statistics(lengths)? - free)? / self.buffer as f64)?;
        let excess = if self.unbounded {
            excess.maximum(0.)?
        } else {
            excess.clamp(0., 1.)?
        };
        let penalty = (excess * -self.factor)?;
        // 0 instead of -0 where there is no penalty.
        (penalty + 0.)?.to_dtype(arithmetic_dtype(lengths.dtype()))
    }
}

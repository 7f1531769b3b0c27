//! Whitening over a batch's tokens or samples.

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::mask::Mask;
use crate::moments::{Moments, divide_by_std};
use crate::validate::{self, Checked};

/// Where epsilon enters the divisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EpsilonPlacement {
    /// `sqrt(variance + epsilon)` (verl, ROLL). The default.
    #[default]
    InsideSqrt,
    /// `sqrt(variance) + epsilon` (TRL, twinkle).
    AddToStd,
    /// `sqrt(max(variance, epsilon))` (OpenRLHF).
    Floor,
}

/// Whitening: `(x - mean) / std`, with moments over all selected entries in a batch.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::advantage::Whitening;
/// use candle_grpo_core::Mask;
///
/// let mask = Mask::new(&Tensor::new(&[[1u8, 1, 0], [1, 1, 0]], &Device::Cpu)?)?;
/// let values = Tensor::new(&[[1f32, 3., 9.], [1., 3., 9.]], &Device::Cpu)?;
/// let whitened = mask.select(&Whitening::openrlhf().apply(&values, &mask)?)?;
/// assert_eq!(whitened.to_vec2::<f32>()?, [[-1., 1., 0.], [-1., 1., 0.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Whitening {
    /// Subtracts the mean. If false, the mean is added back after the division. Default `true`.
    pub shift_mean: bool,
    /// Divides by the standard deviation (the opposite of OpenRLHF's `no_std_norm`). Default
    /// `true`.
    pub divide: bool,
    /// Delta degrees of freedom for the variance: 1 divides by n - 1, 0 by n. Default 1.
    pub ddof: usize,
    /// Keeps the divisor away from 0. Default 1e-8.
    pub epsilon: f64,
    /// Where epsilon enters the divisor. Default `inside_sqrt`.
    pub placement: EpsilonPlacement,
}

impl Default for Whitening {
    /// `(x - mean) / sqrt(var + 1e-8)` with the sample variance (verl, ROLL).
    fn default() -> Self {
        Self {
            shift_mean: true,
            divide: true,
            ddof: 1,
            epsilon: 1e-8,
            placement: EpsilonPlacement::InsideSqrt,
        }
    }
}

impl Whitening {
    /// `(x - mean) / sqrt(max(var, 1e-8))` with the population variance (OpenRLHF).
    pub fn openrlhf() -> Self {
        Self {
            ddof: 0,
            placement: EpsilonPlacement::Floor,
            ..Self::default()
        }
    }

    /// `(x - mean) / (std + 1e-4)` with the sample standard deviation, as TRL normalizes
    /// advantages.
    pub fn trl() -> Self {
        Self {
            epsilon: 1e-4,
            placement: EpsilonPlacement::AddToStd,
            ..Self::default()
        }
    }

    /// `(x - mean) / (std + 1e-8)` with the population standard deviation (twinkle).
    pub fn twinkle() -> Self {
        Self {
            ddof: 0,
            placement: EpsilonPlacement::AddToStd,
            ..Self::default()
        }
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::positive("epsilon", self.epsilon)?;
        validate::ddof("ddof", self.ddof)
    }

    /// Whitens `values` `[B, T]` with the moments over the positions in `mask`. The result is f32
    /// (f64 for f64).
    ///
    /// Positions outside the mask are transformed too, so select by the mask afterwards. The
    /// variance needs at least two positions in the mask: with fewer, the values are returned
    /// unchanged.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, or if the shape or device of the values differs from the
    /// mask's.
    pub fn apply(&self, values: &Tensor, mask: &Mask) -> Result<Tensor> {
        mask.check("values", values)?;
        self.apply_selected(&for_statistics(values)?, mask.selected())?
            .to_dtype(arithmetic_dtype(values.dtype()))
    }

    /// Whitens `x` in the statistics dtype. `selected` is u8 and has the same shape.
    pub(crate) fn apply_selected(&self, x: &Tensor, selected: &Tensor) -> Result<Tensor> {
        self.validate()?;
        let moments = Moments::new(&x.flatten_all()?, &selected.flatten_all()?)?;
        let divide = |x: &Tensor| {
            if !self.divide {
                return Ok(x.clone());
            }
            let variance = moments.variance(self.ddof)?;
            match self.placement {
                EpsilonPlacement::InsideSqrt => {
                    x.broadcast_div(&(variance + self.epsilon)?.sqrt()?)
                }
                EpsilonPlacement::AddToStd => divide_by_std(x, &variance.sqrt()?, self.epsilon),
                EpsilonPlacement::Floor => {
                    x.broadcast_div(&variance.maximum(self.epsilon)?.sqrt()?)
                }
            }
        };
        // Equal values give exactly 0, even if the mean is rounded.
        let centered = selected.where_cond(
            &moments.centered.reshape(x.shape())?,
            &x.broadcast_sub(&moments.mean)?,
        )?;
        let mut whitened = divide(&centered)?;
        if !self.shift_mean {
            whitened = whitened.broadcast_add(&moments.mean)?;
        }
        let enough = moments.count.ge(2.)?.broadcast_as(x.shape())?;
        enough.where_cond(&whitened, x)
    }
}

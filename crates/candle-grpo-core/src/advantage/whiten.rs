//! Whitening over the tokens of a batch, and normalising each sequence.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::mask::Mask;
use crate::moments::{Moments, divide_by_std};

/// How epsilon keeps a small variance from being divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EpsilonPlacement {
    /// `sqrt(variance + epsilon)` (verl, ROLL).
    #[default]
    InsideSqrt,
    /// `sqrt(variance) + epsilon` (TRL, twinkle).
    AddToStd,
    /// `sqrt(max(variance, epsilon))` (OpenRLHF).
    Floor,
}

/// `(x - mean) / std` with the moments of everything that counts, all sequences together.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::{Mask, Whitening};
///
/// let mask = Mask::new(&Tensor::new(&[[1u8, 1, 0], [1, 1, 0]], &Device::Cpu)?)?;
/// let values = Tensor::new(&[[1f32, 3., 9.], [1., 3., 9.]], &Device::Cpu)?;
/// let whitened = mask.select(&Whitening::openrlhf().apply(&values, &mask)?)?;
/// assert_eq!(whitened.to_vec2::<f32>()?, [[-1., 1., 0.], [-1., 1., 0.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Whitening {
    /// Whether the mean is subtracted; if not, it is added back.
    pub shift_mean: bool,
    /// Whether the standard deviation is divided by (OpenRLHF's `no_std_norm` is the opposite).
    pub divide: bool,
    /// 1 for the variance of a sample (n - 1), 0 for that of a population (n).
    pub ddof: usize,
    /// What keeps a small variance from being divided by.
    pub epsilon: f64,
    /// How it does so.
    pub placement: EpsilonPlacement,
}

impl Default for Whitening {
    /// As verl and ROLL have it: `(x - mean) / sqrt(var + 1e-8)`, the variance being that of a sample.
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
    /// `(x - mean) / sqrt(max(var, 1e-8))`, the variance being that of the population.
    pub fn openrlhf() -> Self {
        Self {
            ddof: 0,
            placement: EpsilonPlacement::Floor,
            ..Self::default()
        }
    }

    /// `(x - mean) / (std + 1e-4)`, the standard deviation being that of a sample, as TRL normalises advantages.
    pub fn trl() -> Self {
        Self {
            epsilon: 1e-4,
            placement: EpsilonPlacement::AddToStd,
            ..Self::default()
        }
    }

    /// `(x - mean) / (std + 1e-8)`, the standard deviation being that of the population, as twinkle has it.
    pub fn twinkle() -> Self {
        Self {
            ddof: 0,
            placement: EpsilonPlacement::AddToStd,
            ..Self::default()
        }
    }

    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        check_epsilon(self.epsilon)?;
        if self.ddof > 1 {
            bail!("ddof: {}, must be 0 or 1", self.ddof);
        }
        Ok(())
    }

    /// `values` `[B, T]` gives `[B, T]` in f32 (f64 for f64).
    ///
    /// Positions outside the mask are transformed as well: select by the mask afterwards. With fewer than two positions in
    /// the mask there is no variance, and the values come back as they are.
    pub fn apply(&self, values: &Tensor, mask: &Mask) -> Result<Tensor> {
        mask.check_shape("values", values)?;
        self.apply_selected(&for_statistics(values)?, mask.selected())?
            .to_dtype(arithmetic_dtype(values.dtype()))
    }

    /// `x` in the dtype of statistics and `selected` in u8, of one shape.
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
        // Equal values are 0 exactly, however the mean is rounded.
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

/// [`Whitening`] as verl and ROLL have it, with the epsilon and, unless `shift_mean`, the mean added back.
pub fn masked_whiten(
    values: &Tensor,
    mask: &Mask,
    shift_mean: bool,
    epsilon: f64,
) -> Result<Tensor> {
    let whitening = Whitening {
        shift_mean,
        epsilon,
        ..Whitening::default()
    };
    whitening.apply(values, mask)
}

/// `(x - mean) / sqrt(max(variance, min_variance))` for each sequence, with the moments of its positions of `mask` and
/// the variance of a population (n), as in OpenRLHF and ROLL.
///
/// `values` `[B, T]` gives `[B, T]` in f32 (f64 for f64). Positions outside the mask count as 0 and are transformed as
/// well: select by the mask afterwards.
pub fn masked_normalize(values: &Tensor, mask: &Mask, min_variance: f64) -> Result<Tensor> {
    mask.check_shape("values", values)?;
    check_epsilon(min_variance)?;
    let x = mask.select(&for_statistics(values)?)?;
    let moments = Moments::new(&x, mask.selected())?;
    let std = moments.variance(0)?.maximum(min_variance)?.sqrt()?;
    let centered = mask
        .selected()
        .where_cond(&moments.centered, &x.broadcast_sub(&moments.mean)?)?;
    centered
        .broadcast_div(&std)?
        .to_dtype(arithmetic_dtype(values.dtype()))
}

fn check_epsilon(epsilon: f64) -> Result<()> {
    if !(epsilon > 0. && epsilon.is_finite()) {
        bail!("epsilon: {epsilon}, must be positive and finite");
    }
    Ok(())
}

//! Rewards: accepted types, shaping before the advantage, and penalties.
//!
//! Start without shaping: group advantages already center and scale rewards. If answers get too
//! long, try [`OverlongPenalty`] near a token limit or [`CosineLength`] for any length. If a policy
//! repeats itself, try [`RepetitionPenalty`].

mod cosine;
mod cost;
mod ensemble;
mod normalize;
mod overlong;
mod repetition;
pub(crate) mod shaping;

pub use cosine::CosineLength;
pub use cost::{CostPenalty, Costs};
pub use ensemble::ScoreEnsemble;
pub use normalize::{NormLevel, RewardNorm, RunningMoments, RunningState, StdCenter};
pub use overlong::OverlongPenalty;
pub use repetition::RepetitionPenalty;
pub use shaping::ShapedRewards;

use candle_core::{DType, Device, Result, Tensor, WithDType, bail};
use serde::{Deserialize, Serialize};

use crate::Invalid;
use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::validate::Checked;

/// Types that hold rewards: a tensor `[B]` or `[B, K]` on any device, or a slice, array or vector
/// of numbers `[B]`, which becomes a CPU tensor.
///
/// Results are f32, but an f64 tensor gives f64. An f64 slice is computed in f64 and gives f32,
/// like log-probs.
pub trait IntoRewards {
    /// Converts the rewards to a tensor.
    ///
    /// # Errors
    ///
    /// Fails if the device lacks the dtype.
    fn into_rewards(self) -> Result<RewardTensor>;
}

/// Rewards as a tensor, and the result dtype.
#[derive(Debug, Clone)]
pub struct RewardTensor {
    /// Rewards, `[B]` or `[B, K]`, in the statistics dtype (f64, or f32 on Metal).
    pub values: Tensor,
    /// Result dtype: f32 or f64.
    pub result_dtype: DType,
}

impl IntoRewards for &Tensor {
    fn into_rewards(self) -> Result<RewardTensor> {
        Ok(RewardTensor {
            values: for_statistics(self)?,
            result_dtype: arithmetic_dtype(self.dtype()),
        })
    }
}

impl IntoRewards for Tensor {
    fn into_rewards(self) -> Result<RewardTensor> {
        (&self).into_rewards()
    }
}

impl IntoRewards for RewardTensor {
    fn into_rewards(self) -> Result<RewardTensor> {
        Ok(self)
    }
}

impl<T: WithDType> IntoRewards for &[T] {
    fn into_rewards(self) -> Result<RewardTensor> {
        let values = Tensor::from_slice(self, self.len(), &Device::Cpu)?;
        Ok(RewardTensor {
            values: for_statistics(&values)?,
            result_dtype: DType::F32,
        })
    }
}

impl<T: WithDType> IntoRewards for &Vec<T> {
    fn into_rewards(self) -> Result<RewardTensor> {
        self.as_slice().into_rewards()
    }
}

impl<T: WithDType> IntoRewards for Vec<T> {
    fn into_rewards(self) -> Result<RewardTensor> {
        self.as_slice().into_rewards()
    }
}

impl<T: WithDType, const N: usize> IntoRewards for [T; N] {
    fn into_rewards(self) -> Result<RewardTensor> {
        self.as_slice().into_rewards()
    }
}

impl<T: WithDType, const N: usize> IntoRewards for &[T; N] {
    fn into_rewards(self) -> Result<RewardTensor> {
        self.as_slice().into_rewards()
    }
}

/// Treatment for rewards that are NaN or infinite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NonFinite {
    /// An error that names the sample. Synchronizes with the device. The default.
    #[default]
    Error,
    /// A missing score, which no statistic includes. A sample without any score gets advantage 0
    /// (TRL).
    Exclude,
}

pub(crate) fn check_not_empty(rewards: &Tensor) -> Result<()> {
    if rewards.elem_count() == 0 {
        bail!(
            "rewards: shape {:?} is empty, there must be at least one sample",
            rewards.dims()
        );
    }
    Ok(())
}

/// Largest reward magnitude. 10^8 squares add up to a finite sum.
const LARGEST: f64 = 1e150;

/// Checks that no entry in `rewards` is so large that a square or a difference would be infinite.
/// Non-finite entries pass.
///
/// Only CPU tensors are checked, because the check would synchronize other devices.
pub(crate) fn check_magnitude(name: &str, rewards: &Tensor) -> Result<()> {
    if !rewards.device().is_cpu() || rewards.dtype() != DType::F64 {
        return Ok(());
    }
    let values = rewards.flatten_all()?.to_vec1::<f64>()?;
    let is_too_large = |x: &f64| x.is_finite() && x.abs() > LARGEST;
    match values.iter().position(is_too_large) {
        Some(index) => bail!(
            "{name}: {} has {:e}, must be from -{LARGEST:e} to {LARGEST:e}, because differences and squares must be finite",
            place(rewards, index),
            values[index]
        ),
        None => Ok(()),
    }
}

/// Converts advantages or returns, `[B]` or `[B, T]`, to the result dtype. `name` is the singular.
/// NaN, which can come from inputs other than rewards, stays NaN.
///
/// # Errors
///
/// On the CPU, fails if an entry overflows `dtype`.
pub(crate) fn to_result_dtype(name: &str, values: &Tensor, dtype: DType) -> Result<Tensor> {
    let result = values.to_dtype(dtype)?;
    if !result.device().is_cpu() || values.dtype() == dtype {
        return Ok(result);
    }
    // An entry that was not finite before the conversion passes.
    let is_kept = (finite_mask(&result)? + finite_mask(values)?.eq(0u8)?)?;
    if let Some((index, value)) = first_unset(&result, &is_kept)? {
        let place = match *result.dims() {
            [_, tokens] => format!("row {} in column {}", index / tokens, index % tokens),
            _ => place(&result, index),
        };
        bail!(
            "rewards: the {name} of {place} is {value} in {}, the rewards must be smaller",
            dtype.as_str()
        );
    }
    Ok(result)
}

/// Returns an entry's sample in `[B]` or `[B, K]`, and its component.
fn place(rewards: &Tensor, index: usize) -> String {
    match *rewards.dims() {
        [_, k] => format!("sample {} in component {}", index / k, index % k),
        _ => format!("sample {index}"),
    }
}

/// Returns the weighted component sums `[B]`, and u8 `[B]`: 1 for samples with at least one finite
/// component.
///
/// `weights` has one number for each of the K components. If absent, all weights are 1.
pub(crate) fn combine(
    rewards: &RewardTensor,
    weights: Option<&[f64]>,
    policy: NonFinite,
) -> Result<(Tensor, Tensor)> {
    let values = &rewards.values;
    let components = match *values.dims() {
        [_] => 1,
        [_, k] => k,
        _ => bail!("rewards: shape {:?}, must be [B] or [B, K]", values.dims()),
    };
    check_not_empty(values)?;
    if let Some(w) = weights
        && w.len() != components
    {
        bail!(
            "reward_weights: {} weights for {components} reward components, there must be one each",
            w.len()
        );
    }
    check_weights(weights)?;
    check_magnitude("rewards", values)?;
    let finite = finite_mask(values)?;
    if policy == NonFinite::Error {
        check_finite("rewards", values, &finite)?;
    }
    let clean = finite.where_cond(values, &values.zeros_like()?)?;
    let weighted = match weights {
        Some(w) => {
            let w = Tensor::new(w, values.device())?.to_dtype(values.dtype())?;
            if values.rank() == 1 {
                clean.broadcast_mul(&w.squeeze(0)?)?
            } else {
                clean.broadcast_mul(&w)?
            }
        }
        None => clean,
    };
    let (sums, finite) = match values.rank() {
        1 => (weighted, finite),
        _ => (weighted.sum(1)?, finite.max(1)?),
    };
    check_magnitude("rewards with reward_weights", &sums)?;
    Ok((sums, finite))
}

/// Checks that all weights are finite.
pub(crate) fn check_weights(weights: Option<&[f64]>) -> Checked {
    let weights = weights.unwrap_or_default();
    match weights.iter().position(|w| !w.is_finite()) {
        Some(k) => Err(Invalid::new(
            "reward_weights",
            format_args!("weight {k} is {}", weights[k]),
            "be finite",
        )),
        None => Ok(()),
    }
}

/// Returns u8: 1 where `x` is finite.
pub(crate) fn finite_mask(x: &Tensor) -> Result<Tensor> {
    // NaN and infinity times 0 are NaN, which is not equal to anything.
    (x * 0.)?.eq(0.)
}

/// Returns `x` where `scored` is 1, and elsewhere NaN, which marks a missing score.
pub(crate) fn mark_missing(x: &Tensor, scored: &Tensor) -> Result<Tensor> {
    scored.where_cond(x, &(x.zeros_like()? + f64::NAN)?)
}

/// Checks that `values` `[B, T]`, which are 0 outside the mask, are finite. Synchronizes with the
/// device.
pub(crate) fn check_finite_tokens(name: &str, values: &Tensor) -> Result<()> {
    if let Some((index, value)) = first_unset(values, &finite_mask(values)?)? {
        let tokens = values.dims2()?.1;
        bail!(
            "{name}: row {} has {value} in column {}, must be finite at every position of response_mask",
            index / tokens,
            index % tokens
        );
    }
    check_magnitude(name, values)
}

/// Returns the flat index and value for the first entry whose flag (u8) is 0. Synchronizes with the
/// device.
pub(crate) fn first_unset(values: &Tensor, flags: &Tensor) -> Result<Option<(usize, f64)>> {
    let flags = flags.flatten_all()?;
    if flags.to_dtype(DType::F32)?.min(0)?.to_scalar::<f32>()? == 1. {
        return Ok(None);
    }
    let flags = flags.to_vec1::<u8>()?;
    let index = flags.iter().position(|&f| f == 0).unwrap_or_default();
    let value = values
        .flatten_all()?
        .get(index)?
        .to_dtype(DType::F64)?
        .to_scalar::<f64>()?;
    Ok(Some((index, value)))
}

/// Checks that all entries in `values` are `finite`, for a function with a [`NonFinite`] option.
/// Synchronizes with the device.
pub(crate) fn check_finite(name: &str, values: &Tensor, finite: &Tensor) -> Result<()> {
    let hint = " (or exclude missing scores with NonFinite::Exclude)";
    finite_or(name, values, finite, hint)
}

/// Checks that all entries in `values` are finite. Synchronizes with the device.
pub(crate) fn check_all_finite(name: &str, values: &Tensor) -> Result<()> {
    finite_or(name, values, &finite_mask(values)?, "")
}

fn finite_or(name: &str, values: &Tensor, finite: &Tensor, hint: &str) -> Result<()> {
    let Some((index, value)) = first_unset(values, finite)? else {
        return check_magnitude(name, values);
    };
    match *values.dims() {
        [_, k] => bail!(
            "{name}: sample {} has {value} in component {}, must be finite{hint}",
            index / k,
            index % k
        ),
        _ => bail!("{name}: sample {index} is {value}, must be finite{hint}"),
    }
}

//! What happens to the rewards of samples before advantages are taken.

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::advantage::sequence::check_range;
use crate::groups::Groups;
use crate::metrics::Metrics;
use crate::rewards::{IntoRewards, NonFinite, RewardNorm, RunningMoments, check_weights, combine};

/// Shaping of response-level rewards, in the order of the ROLL pipeline: components are summed, then
/// `(reward + shift) * scale`, then normalised, then clipped.
///
/// ```
/// use candle_grpo_core::{Level, RewardNorm, RewardShaping};
///
/// let shaping = RewardShaping {
///     norm: RewardNorm { mean: Level::Group, std: Level::Batch, ..Default::default() },
///     clip: Some(1.0),
///     ..Default::default()
/// };
/// let shaped = shaping.apply(&[0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], 4, None)?;
/// let rewards = shaped.rewards.to_vec1::<f32>()?;
/// assert!((rewards[1] - 0.96609).abs() < 1e-5);
/// assert_eq!(rewards[4], 1.0); // 1.449 before the clip
/// assert_eq!(shaped.metrics.to_host()?.get("reward_clip_fraction"), Some(1. / 8.));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RewardShaping {
    /// A weight for each of K reward components; absent: all 1.
    pub reward_weights: Option<Vec<f64>>,
    /// Added to each reward.
    pub shift: f64,
    /// Multiplies each reward, after the shift.
    pub scale: f64,
    /// Mean and standard deviation, each over group, batch, running or not at all.
    pub norm: RewardNorm,
    /// Rewards are clipped to plus and minus this.
    pub clip: Option<f64>,
    /// Rewards are clipped to lie from the first to the second (TRL's `reward_clip_range`); not together with `clip`.
    pub clip_range: Option<[f64; 2]>,
    /// What a reward that is not finite gives. Excluded ones stay NaN, so that the advantage function excludes them too.
    pub non_finite: NonFinite,
}

impl Default for RewardShaping {
    fn default() -> Self {
        Self {
            reward_weights: None,
            shift: 0.,
            scale: 1.,
            norm: RewardNorm::default(),
            clip: None,
            clip_range: None,
            non_finite: NonFinite::Error,
        }
    }
}

/// Rewards after shaping.
#[derive(Debug, Clone)]
pub struct ShapedRewards {
    /// `[B]`, in f32 (f64 for f64).
    pub rewards: Tensor,
    /// `reward_clip_fraction`, over the samples, if there is a clip.
    pub metrics: Metrics,
}

impl RewardShaping {
    /// Shapes `rewards` `[B]` or `[B, K]`. `running` is needed, and updated before it is used, if the normalisation is
    /// of that level.
    pub fn apply(
        &self,
        rewards: impl IntoRewards,
        groups: impl Into<Groups>,
        running: Option<&mut RunningMoments>,
    ) -> Result<ShapedRewards> {
        self.validate()?;
        let rewards = rewards.into_rewards()?;
        let (x, finite) = combine(&rewards, self.reward_weights.as_deref(), self.non_finite)?;
        let x = ((x + self.shift)? * self.scale)?;
        let x = self.norm.apply(&x, &finite, &groups.into(), running)?;
        let mut metrics = Metrics::new();
        let x = match self.bounds()? {
            None => x,
            Some([low, high]) => {
                let clipped = x.clamp(low, high)?;
                let outside = (x.ne(&clipped)? * &finite)?;
                metrics.push_mean(
                    "reward_clip_fraction",
                    &outside.to_dtype(DType::F32)?.sum_all()?,
                    &finite.to_dtype(DType::F32)?.sum_all()?,
                )?;
                clipped
            }
        };
        let x = match self.non_finite {
            NonFinite::Error => x,
            NonFinite::Exclude => finite.where_cond(&x, &(x.zeros_like()? + f64::NAN)?)?,
        };
        Ok(ShapedRewards {
            rewards: x.to_dtype(rewards.result_dtype)?,
            metrics,
        })
    }
}

impl RewardShaping {
    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        for (name, x) in [("shift", self.shift), ("scale", self.scale)] {
            if !x.is_finite() {
                bail!("{name}: {x}, must be finite");
            }
        }
        check_weights(self.reward_weights.as_deref())?;
        self.norm.validate()?;
        if let Some(bounds) = self.bounds()? {
            check_range("clip_range", bounds)?;
        }
        Ok(())
    }

    fn bounds(&self) -> Result<Option<[f64; 2]>> {
        match (self.clip, self.clip_range) {
            (Some(_), Some(_)) => bail!("clip and clip_range: both given, must be one of them"),
            (Some(clip), None) => {
                check_clip("clip", clip)?;
                Ok(Some([-clip, clip]))
            }
            (None, range) => Ok(range),
        }
    }
}

pub(crate) fn check_clip(name: &str, clip: f64) -> Result<()> {
    if !(clip > 0. && clip.is_finite()) {
        bail!("{name}: {clip}, must be positive and finite");
    }
    Ok(())
}

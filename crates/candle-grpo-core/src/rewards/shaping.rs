//! Reward shaping before advantages are computed.

use candle_core::{DType, Result, Tensor};
use serde::{Deserialize, Serialize};

use crate::Invalid;
use crate::groups::Groups;
use crate::metrics::Metrics;
use crate::rewards::{
    IntoRewards, NonFinite, NormLevel, RewardNorm, RunningMoments, check_weights, combine,
    mark_missing,
};
use crate::validate::{self, Checked};

/// Sequence reward shaping, in the ROLL pipeline's order: sum the components, apply
/// `(reward + shift) * scale`, normalize, clip.
///
/// The default changes nothing. Shape rewards if their scale varies between batches, or if a few
/// extreme rewards dominate.
///
/// ```
/// use candle_grpo_core::rewards::{NormLevel, RewardNorm};
/// use candle_grpo_core::RewardShaping;
///
/// let shaping = RewardShaping {
///     norm: RewardNorm { mean: NormLevel::Group, std: NormLevel::Batch, ..Default::default() },
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct RewardShaping {
    /// Weights for the K reward components. If absent, all weights are 1. Absent by default.
    pub reward_weights: Option<Vec<f64>>,
    /// Added to each reward. Default 0.
    pub shift: f64,
    /// Factor for each reward, after the shift. Default 1.
    pub scale: f64,
    /// Normalization by a mean and a standard deviation. Each is over the group, the batch or all
    /// steps so far, or is left out. Default [`RewardNorm::default`].
    pub norm: RewardNorm,
    /// Rewards are clipped to plus and minus this bound. Absent by default.
    pub clip: Option<f64>,
    /// Range that rewards are clipped to (TRL's `reward_clip_range`). Excludes `clip`. Absent by
    /// default.
    pub clip_range: Option<[f64; 2]>,
    /// Treatment for non-finite rewards. Excluded rewards stay NaN, so the advantage function
    /// excludes them too. Default `error`.
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
#[non_exhaustive]
pub struct ShapedRewards {
    /// Rewards, `[B]`, in f32 (f64 for f64).
    pub rewards: Tensor,
    /// `reward_clip_fraction` over the samples, if there is a clip. A value near 1 means that the
    /// clip hides most differences.
    pub metrics: Metrics,
}

impl RewardShaping {
    /// Shapes `rewards` `[B]` or `[B, K]`.
    ///
    /// `running` is updated with these rewards first. Only `NormLevel::Running` needs it.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, if the rewards do not fit the groups or weights, or if
    /// `running` is needed but absent.
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
            NonFinite::Exclude => mark_missing(&x, &finite)?,
        };
        Ok(ShapedRewards {
            rewards: x.to_dtype(rewards.result_dtype)?,
            metrics,
        })
    }

    /// Returns whether shaping only sums the components.
    pub fn is_identity(&self) -> bool {
        let norm = RewardNorm {
            mean: NormLevel::None,
            std: NormLevel::None,
            // Unused by this normalization.
            ..self.norm
        };
        *self
            == Self {
                norm,
                ..Self::default()
            }
    }

    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::finite("shift", self.shift)?;
        validate::finite("scale", self.scale)?;
        check_weights(self.reward_weights.as_deref())?;
        self.norm.validate().map_err(|e| e.within("norm"))?;
        self.bounds().map(|_| ())
    }

    fn bounds(&self) -> std::result::Result<Option<[f64; 2]>, Invalid> {
        match (self.clip, self.clip_range) {
            (Some(_), Some(_)) => Err(Invalid::new(
                "clip and clip_range",
                "both given",
                "be one of them",
            )),
            (Some(clip), None) => {
                validate::positive("clip", clip)?;
                Ok(Some([-clip, clip]))
            }
            (None, Some(range)) => {
                validate::range("clip_range", range)?;
                Ok(Some(range))
            }
            (None, None) => Ok(None),
        }
    }
}

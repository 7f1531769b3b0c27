//! Score ensembles: several scores for the same response.

use candle_core::{D, DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::rewards::{
    IntoRewards, NonFinite, check_finite, check_magnitude, finite_mask, mark_missing,
};

/// Combines the scores that several judges give to the same response.
///
/// Start with the mean. Choose the minimum if the policy learns to please one judge. For different
/// criteria, such as format and correctness, use weighted components instead:
/// [`crate::RewardShaping::reward_weights`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::rewards::{NonFinite, ScoreEnsemble};
///
/// let scores = Tensor::new(&[[0.5f32, 1.], [0., f32::NAN]], &Device::Cpu)?;
/// let lowest = ScoreEnsemble::Min.combine(&scores, NonFinite::Exclude)?;
/// assert_eq!(lowest.to_vec1::<f32>()?, [0.5, 0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ScoreEnsemble {
    /// Mean. The default.
    #[default]
    Mean,
    /// Minimum, the most conservative choice.
    Min,
    /// Maximum.
    Max,
    /// Median; with an even number of scores, the mean of the middle two.
    Median,
    /// The most frequent score; in a tie, the smallest. It suits verdicts.
    Majority,
    /// Weighted mean. Needs one weight for each judge, at least 0 and not all 0.
    Weighted(Vec<f64>),
}

impl ScoreEnsemble {
    /// Combines `scores` `[B, K]` from K judges to `[B]`.
    ///
    /// The median and the majority synchronize with the device.
    ///
    /// With [`NonFinite::Exclude`], missing scores are left out, and a sample without any score
    /// stays NaN.
    ///
    /// # Errors
    ///
    /// Fails if the shape is different or empty, if the weights are invalid, or if a score is not
    /// finite, unless such scores are excluded.
    pub fn combine(&self, scores: impl IntoRewards, non_finite: NonFinite) -> Result<Tensor> {
        let scores = scores.into_rewards()?;
        let x = &scores.values;
        let &[batch, judges] = x.dims() else {
            bail!("scores: shape {:?}, must be [B, K]", x.dims());
        };
        if batch == 0 || judges == 0 {
            bail!("scores: shape [{batch}, {judges}] is empty");
        }
        check_magnitude("scores", x)?;
        let finite = finite_mask(x)?;
        if non_finite == NonFinite::Error {
            check_finite("scores", x, &finite)?;
        }
        let filled = |with: f64| finite.where_cond(x, &(x.zeros_like()? + with)?);
        let combined = match self {
            Self::Mean => self.weighted(&filled(0.)?, &finite, &vec![1.; judges])?,
            Self::Weighted(weights) => self.weighted(&filled(0.)?, &finite, weights)?,
            Self::Min => filled(f64::INFINITY)?.min(D::Minus1)?,
            Self::Max => filled(f64::NEG_INFINITY)?.max(D::Minus1)?,
            Self::Median => each_row(x, median)?,
            Self::Majority => each_row(x, majority)?,
        };
        mark_missing(&combined, &finite.max(D::Minus1)?)?.to_dtype(scores.result_dtype)
    }

    fn weighted(&self, x: &Tensor, finite: &Tensor, weights: &[f64]) -> Result<Tensor> {
        if weights.len() != x.dim(1)? {
            bail!(
                "weights: {} for {} judges, there must be one each",
                weights.len(),
                x.dim(1)?
            );
        }
        let valid = weights.iter().all(|w| *w >= 0. && w.is_finite());
        if !valid || weights.iter().all(|w| *w == 0.) {
            bail!("weights: {weights:?}, must be finite, at least 0, and not all 0");
        }
        let weights = Tensor::new(weights, x.device())?.to_dtype(x.dtype())?;
        let sum = x.broadcast_mul(&weights)?.sum(D::Minus1)?;
        let total = finite
            .to_dtype(x.dtype())?
            .broadcast_mul(&weights)?
            .sum(D::Minus1)?;
        sum / total
    }
}

/// Combines each row's finite scores, in ascending order, with `combine`.
fn each_row(x: &Tensor, combine: impl Fn(&[f64]) -> f64) -> Result<Tensor> {
    let rows = x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    let rows = rows.to_vec2::<f64>()?;
    let combined = rows.into_iter().map(|mut row| {
        row.retain(|score| score.is_finite());
        row.sort_by(f64::total_cmp);
        combine(&row)
    });
    let combined: Vec<f64> = combined.collect();
    Tensor::new(combined, &Device::Cpu)?
        .to_dtype(x.dtype())?
        .to_device(x.device())
}

/// Returns the median of sorted scores, or NaN if there are none.
fn median(scores: &[f64]) -> f64 {
    let middle = scores.len() / 2;
    match (scores.get(middle), scores.len() % 2) {
        (None, _) => f64::NAN,
        (Some(score), 1) => *score,
        (Some(score), _) => (scores[middle - 1] + score) / 2.,
    }
}

/// Returns the most frequent of the sorted `scores`; in a tie, the smallest. NaN if there are none.
fn majority(scores: &[f64]) -> f64 {
    let mut found: &[f64] = &[f64::NAN];
    for equal in scores.chunk_by(|a, b| a == b) {
        if equal.len() > found.len() || found[0].is_nan() {
            found = equal;
        }
    }
    found[0]
}

//! Resampling within a step, by reward.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::validate::{self, Checked};

/// Resampling with replacement, weighted by reward (PF-PPO, <https://arxiv.org/abs/2409.06957>, as
/// in verl). Each variant is a weight.
///
/// ```
/// use candle_grpo_core::selection::ScoreResampling;
///
/// // The caller provides the uniform random numbers.
/// let drawn = ScoreResampling::default().draw(&[0., 0., 3., 1.], &[0.05, 0.5, 0.95])?;
/// assert_eq!(drawn, [2, 2, 3]); // the weights are 0, 0, 9, 1
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum ScoreResampling {
    /// `|score|` to this power. Default 2. The default.
    Power(f64),
    /// 1 for the highest and the lowest score, 0 for all others.
    MaxMin,
    /// 0.4 for the highest score, 0.1 for all others.
    MaxRandom,
}

impl Default for ScoreResampling {
    fn default() -> Self {
        Self::Power(2.)
    }
}

/// Added to each weight, so that a batch whose weights are all 0 is sampled uniformly.
const FLOOR: f64 = 1e-8;

impl ScoreResampling {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        match *self {
            Self::Power(power) => validate::non_negative("power", power),
            Self::MaxMin | Self::MaxRandom => Ok(()),
        }
    }

    /// Samples one index into `scores` for each number in `uniforms`: independent random numbers,
    /// uniform in [0, 1).
    ///
    /// # Errors
    ///
    /// Fails if there are no scores, or if a score, a uniform number or the power is invalid.
    pub fn draw(&self, scores: &[f64], uniforms: &[f64]) -> Result<Vec<usize>> {
        self.validate()?;
        if scores.is_empty() {
            bail!("scores: empty, there must be at least one");
        }
        if let Some(i) = scores.iter().position(|s| !s.is_finite()) {
            bail!("scores: sample {i} is {}, must be finite", scores[i]);
        }
        if let Some(i) = uniforms.iter().position(|u| !(0. ..1.).contains(u)) {
            bail!("uniforms: [{i}] is {}, must be from 0 to 1", uniforms[i]);
        }
        let mut total = 0.;
        let cumulative: Vec<f64> = self
            .weights(scores)
            .iter()
            .map(|weight| {
                total += weight + FLOOR;
                total
            })
            .collect();
        let pick = |u: &f64| {
            let index = cumulative.partition_point(|&c| c <= u * total);
            index.min(scores.len() - 1)
        };
        Ok(uniforms.iter().map(pick).collect())
    }

    fn weights(&self, scores: &[f64]) -> Vec<f64> {
        let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lowest = scores.iter().copied().fold(f64::INFINITY, f64::min);
        let weigh = |score: f64| match *self {
            Self::Power(power) => score.abs().powf(power),
            Self::MaxMin => f64::from(u8::from(score == highest || score == lowest)),
            Self::MaxRandom if score == highest => 0.4,
            Self::MaxRandom => 0.1,
        };
        scores.iter().map(|&score| weigh(score)).collect()
    }
}

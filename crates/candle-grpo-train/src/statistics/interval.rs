//! Confidence intervals for means over prompts.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

use super::CONFIDENCE;

/// A mean over prompts with a 95% confidence interval.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The mean.
    pub value: f64,
    /// Standard error of the mean. A prompt's completions form one cluster, so this is the
    /// standard deviation of the prompts' values divided by the square root of their number
    /// (Miller 2024, <https://arxiv.org/abs/2411.00640>). Absent with one prompt.
    pub standard_error: Option<f64>,
    /// Lower end of the interval; absent with one prompt, unless the values are 0 or 1.
    pub low: Option<f64>,
    /// Upper end of the interval.
    pub high: Option<f64>,
    /// The method for the interval.
    pub interval: IntervalMethod,
}

/// A method for confidence intervals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum IntervalMethod {
    /// Wilson's score interval (Wilson 1927), if each prompt's value is 0 or 1.
    Wilson,
    /// Student's t interval with the clustered standard error, clipped to 0 and 1.
    StudentT,
}

/// The mean of one value in 0..=1 per prompt, with its interval.
///
/// ```
/// use candle_grpo_train::statistics::mean;
///
/// let estimate = mean(&[0., 1., 1., 1.])?;
/// assert_eq!(estimate.value, 0.75);
/// assert!(estimate.low < Some(0.31) && estimate.high > Some(0.95));
/// # Ok::<(), anyhow::Error>(())
/// ```
///
/// # Errors
///
/// If there are no values, or one is not in 0..=1.
pub fn mean(values: &[f64]) -> Result<Estimate> {
    ensure!(!values.is_empty(), "values: none, must be at least one");
    check_shares(values)?;
    let Moments {
        mean: value,
        standard_error,
    } = Moments::new(values);
    if are_binary(values) {
        let ones = values.iter().filter(|x| **x == 1.).count();
        let (low, high) = wilson(ones, values.len())?;
        return Ok(Estimate {
            value,
            standard_error,
            low: Some(low),
            high: Some(high),
            interval: IntervalMethod::Wilson,
        });
    }
    let margin = standard_error
        .map(|error| Ok::<_, anyhow::Error>(error * student_quantile(values.len())?))
        .transpose()?;
    Ok(Estimate {
        value,
        standard_error,
        low: margin.map(|margin| (value - margin).max(0.)),
        high: margin.map(|margin| (value + margin).min(1.)),
        interval: IntervalMethod::StudentT,
    })
}

/// Wilson's 95% score interval for `ones` in `count`, without continuity correction (Wilson 1927).
///
/// # Errors
///
/// If `count` is 0, or `ones` is above `count`.
pub fn wilson(ones: usize, count: usize) -> Result<(f64, f64)> {
    ensure!(count > 0, "count: 0, must be at least 1");
    ensure!(ones <= count, "ones: {ones}, must be at most {count}");
    let z = normal_quantile()?;
    let n = count as f64;
    let share = ones as f64 / n;
    let scale = 1. + z * z / n;
    let center = (share + z * z / (2. * n)) / scale;
    let half = z / scale * (share * (1. - share) / n + z * z / (4. * n * n)).sqrt();
    // The ends are exact where rounding would leave 1e-17.
    let low = if ones == 0 { 0. } else { center - half };
    let high = if ones == count { 1. } else { center + half };
    Ok((low, high))
}

/// Checks that values are in 0..=1.
pub(super) fn check_shares(values: &[f64]) -> Result<()> {
    for value in values {
        ensure!(
            (0. ..=1.).contains(value),
            "values: {value}, must be from 0 to 1"
        );
    }
    Ok(())
}

/// Returns whether each value is 0 or 1.
pub(super) fn are_binary(values: &[f64]) -> bool {
    values.iter().all(|x| *x == 0. || *x == 1.)
}

/// The mean and its standard error, which is absent with one value.
pub(super) struct Moments {
    pub(super) mean: f64,
    pub(super) standard_error: Option<f64>,
}

impl Moments {
    pub(super) fn new(values: &[f64]) -> Self {
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
        let standard_error = (values.len() > 1).then(|| (squares / (n - 1.) / n).sqrt());
        Self {
            mean,
            standard_error,
        }
    }
}

/// The normal distribution's two-sided quantile for [`CONFIDENCE`].
pub(super) fn normal_quantile() -> Result<f64> {
    let normal = Normal::new(0., 1.).context("normal distribution")?;
    Ok(normal.inverse_cdf(0.5 + CONFIDENCE / 2.))
}

/// Student's t distribution for the mean of `count` values, at least 2.
pub(super) fn student(count: usize) -> Result<StudentsT> {
    StudentsT::new(0., 1., count.saturating_sub(1) as f64).context("Student's distribution")
}

/// The two-sided [`student`] quantile for [`CONFIDENCE`].
pub(super) fn student_quantile(count: usize) -> Result<f64> {
    Ok(student(count)?.inverse_cdf(0.5 + CONFIDENCE / 2.))
}

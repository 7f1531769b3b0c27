//! Paired comparison between two policies on the same prompts.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use statrs::distribution::{Binomial, ContinuousCDF, DiscreteCDF};

use super::interval::{
    Moments, are_binary, check_shares, normal_quantile, student, student_quantile,
};

/// A paired comparison between policies A and B on the same prompts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PairedComparison {
    /// Number of prompts.
    pub prompts: usize,
    /// A's mean.
    pub a: f64,
    /// B's mean.
    pub b: f64,
    /// `b - a`.
    pub difference: f64,
    /// Lower end of the 95% interval for the difference; absent with one prompt, unless the test
    /// is McNemar's.
    pub low: Option<f64>,
    /// Upper end.
    pub high: Option<f64>,
    /// Number of prompts on which A has the higher value.
    pub a_better: usize,
    /// Number of prompts on which B has the higher value.
    pub b_better: usize,
    /// The test.
    pub test: PairedTest,
    /// Two-sided p-value for the test that A and B are equal; absent with one prompt, unless the
    /// test is McNemar's.
    pub p_value: Option<f64>,
}

/// A paired test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PairedTest {
    /// McNemar's exact test on the prompts where A and B differ, for values 0 and 1. Its interval
    /// is Bonett and Price's adjusted Wald interval for paired proportions (2012,
    /// <https://doi.org/10.3102/1076998611411915>), which adds one prompt to each of the two ways
    /// to differ.
    McnemarExact,
    /// Student's paired t-test on the prompts' means, for other values. A prompt with all its
    /// completions is one cluster.
    PairedT,
}

/// Compares two policies' values, in 0..=1, on the same prompts in the same order. Uses McNemar's
/// exact test if all values are 0 or 1, and otherwise Student's paired t-test.
///
/// # Errors
///
/// If there are no values, `a` and `b` have different lengths, or a value is not in 0..=1.
pub fn compare_paired(a: &[f64], b: &[f64]) -> Result<PairedComparison> {
    ensure!(!a.is_empty(), "prompts: none, must be at least one");
    ensure!(
        a.len() == b.len(),
        "prompts: {} of A and {} of B, must be the same",
        a.len(),
        b.len()
    );
    check_shares(a)?;
    check_shares(b)?;
    let pairs = || a.iter().zip(b);
    let differences: Vec<f64> = pairs().map(|(a, b)| b - a).collect();
    let a_better = pairs().filter(|(a, b)| a > b).count();
    let b_better = pairs().filter(|(a, b)| b > a).count();
    let moments = Moments::new(&differences);
    let (test, interval, p_value) = if are_binary(a) && are_binary(b) {
        (
            PairedTest::McnemarExact,
            Some(bonett_price(a_better, b_better, a.len())?),
            Some(mcnemar(a_better, b_better)?),
        )
    } else {
        match moments.standard_error {
            Some(error) => (
                PairedTest::PairedT,
                Some(t_interval(moments.mean, error, a.len())?),
                Some(t_test(moments.mean, error, a.len())?),
            ),
            None => (PairedTest::PairedT, None, None),
        }
    };
    Ok(PairedComparison {
        prompts: a.len(),
        a: Moments::new(a).mean,
        b: Moments::new(b).mean,
        difference: moments.mean,
        low: interval.map(|(low, _)| low),
        high: interval.map(|(_, high)| high),
        a_better,
        b_better,
        test,
        p_value,
    })
}

/// Two-sided p-value for McNemar's exact test: how likely a fair coin is to fall on one side as
/// rarely as in the smaller count, or more rarely.
fn mcnemar(a_better: usize, b_better: usize) -> Result<f64> {
    let trials = (a_better + b_better) as u64;
    if trials == 0 {
        return Ok(1.);
    }
    let coin = Binomial::new(0.5, trials).context("binomial distribution")?;
    Ok((2. * coin.cdf(a_better.min(b_better) as u64)).min(1.))
}

fn bonett_price(a_better: usize, b_better: usize, prompts: usize) -> Result<(f64, f64)> {
    let n = prompts as f64 + 2.;
    let (a, b) = ((a_better + 1) as f64 / n, (b_better + 1) as f64 / n);
    let margin = normal_quantile()? * ((a + b - (b - a).powi(2)) / n).sqrt();
    Ok(((b - a - margin).max(-1.), (b - a + margin).min(1.)))
}

fn t_interval(difference: f64, error: f64, prompts: usize) -> Result<(f64, f64)> {
    let margin = error * student_quantile(prompts)?;
    Ok((
        (difference - margin).max(-1.),
        (difference + margin).min(1.),
    ))
}

fn t_test(difference: f64, error: f64, prompts: usize) -> Result<f64> {
    if error == 0. {
        // All prompts differ by the same amount.
        return Ok(f64::from(u8::from(difference == 0.)));
    }
    let t = (difference / error).abs();
    Ok(2. * student(prompts)?.sf(t))
}

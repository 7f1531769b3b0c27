//! Rotary frequencies for rows longer than those of pretraining.

use std::f64::consts::TAU;

use candle_grpo_core::validate::{self, Checked, check};
use serde::{Deserialize, Serialize};

/// The change of the rotary frequencies `theta^(-2i / head_dim)`, named as `rope_scaling` in a
/// Hugging Face `config.json`.
///
/// `dynamic` and `longrope` are not supported: their frequencies depend on the longest row of a
/// batch, so the log-probabilities of a sequence would differ between training and sampling.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Unchanged frequencies.
    #[default]
    Default,
    /// Position interpolation (Chen et al. 2023): divides all frequencies by `factor`.
    Linear {
        /// The divisor, at least 1.
        factor: f64,
    },
    /// Llama 3.1: divides the frequencies of long waves by `factor`, keeps those of short waves,
    /// blends those between.
    Llama3 {
        /// The divisor, at least 1.
        factor: f64,
        /// Waves longer than `original_max_position_embeddings / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Waves shorter than `original_max_position_embeddings / high_freq_factor` are short.
        high_freq_factor: f64,
        /// The longest row of pretraining.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al. 2023): divides frequencies with few turns within the longest row of
    /// pretraining, keeps those with many turns, and blends those between by their index.
    Yarn {
        /// The divisor, at least 1.
        factor: f64,
        /// The longest row of pretraining.
        original_max_position_embeddings: usize,
        /// Frequencies with more turns than this are kept.
        #[serde(default = "default_beta_fast")]
        beta_fast: f64,
        /// Frequencies with fewer turns than this are divided.
        #[serde(default = "default_beta_slow")]
        beta_slow: f64,
        /// The factor of queries and keys. `None` means `0.1 ln(factor) + 1`, as in the paper.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
    },
}

fn default_beta_fast() -> f64 {
    32.0
}

fn default_beta_slow() -> f64 {
    1.0
}

impl RopeScaling {
    /// Checks that the fields, which lie in `section`, describe frequencies. The error names the
    /// first one that does not.
    pub(crate) fn validate(&self, section: &str) -> Checked {
        self.check_fields()
            .map_err(|invalid| invalid.within(section))
    }

    fn check_fields(&self) -> Checked {
        let (factor, original) = match *self {
            Self::Default => return Ok(()),
            Self::Linear { factor } => (factor, 1),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                check_above(("low_freq_factor", low), ("high_freq_factor", high))?;
                (factor, original)
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast: fast,
                beta_slow: slow,
                attention_factor,
            } => {
                check_above(("beta_slow", slow), ("beta_fast", fast))?;
                if let Some(attention_factor) = attention_factor {
                    validate::positive("attention_factor", attention_factor)?;
                }
                (factor, original)
            }
        };
        check(
            factor >= 1.0 && factor.is_finite(),
            "factor",
            factor,
            "be finite and at least 1",
        )?;
        validate::at_least_one("original_max_position_embeddings", original)
    }

    /// The frequencies of the `head_dim / 2` pairs, in radians per position.
    pub(crate) fn frequencies(&self, head_dim: usize, theta: f64) -> Vec<f64> {
        (0..head_dim / 2)
            .map(|pair| {
                let plain = theta.powf(-((2 * pair) as f64) / head_dim as f64);
                let (kept, factor) = self.kept(pair, plain, head_dim, theta);
                plain * kept + plain / factor * (1.0 - kept)
            })
            .collect()
    }

    /// The factor of cosines and sines.
    pub(crate) fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn {
                attention_factor,
                factor,
                ..
            } => attention_factor.unwrap_or(0.1 * factor.ln() + 1.0),
            _ => 1.0,
        }
    }

    /// Returns the share of this frequency that is kept, and the divisor of the rest.
    fn kept(&self, pair: usize, plain: f64, head_dim: usize, theta: f64) -> (f64, f64) {
        match *self {
            Self::Default => (1.0, 1.0),
            Self::Linear { factor } => (0.0, factor),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                let turns = original as f64 * plain / TAU;
                (((turns - low) / (high - low)).clamp(0.0, 1.0), factor)
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast,
                beta_slow,
                ..
            } => {
                // The index of the pair with this number of turns within the longest row of
                // pretraining.
                let index = |turns: f64| {
                    head_dim as f64 * (original as f64 / (turns * TAU)).ln() / (2.0 * theta.ln())
                };
                let first = index(beta_fast).floor().max(0.0);
                let last = index(beta_slow).ceil().min((head_dim - 1) as f64);
                let divided = (pair as f64 - first) / (last - first).max(1e-3);
                (1.0 - divided.clamp(0.0, 1.0), factor)
            }
        }
    }
}

/// Checks that `low` is positive, and that `high` is finite and above it.
fn check_above((low_name, low): (&str, f64), (high_name, high): (&str, f64)) -> Checked {
    validate::positive(low_name, low)?;
    let must = format!("be finite and above {low_name}, which is {low}");
    check(high > low && high.is_finite(), high_name, high, &must)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The golden model `llama3_rope` tests the frequencies of Llama 3.1.
    #[test]
    fn linear_divides_all_frequencies() {
        let plain = RopeScaling::Default.frequencies(8, 1e4);
        let divided = RopeScaling::Linear { factor: 4.0 }.frequencies(8, 1e4);
        for (at, expected) in [1.0, 0.1, 0.01, 0.001].into_iter().enumerate() {
            assert!((plain[at] - expected).abs() < 1e-12 * expected);
            assert!((divided[at] - expected / 4.0).abs() < 1e-12 * expected);
        }
    }

    /// Head width 128, theta 1e6, 32768 positions, as YaRN is set for Qwen2.5: 32 turns are those
    /// of pair 128 ln(32768 / (64 pi)) / (2 ln 1e6) = 23.6, one turn those of 39.65.
    #[test]
    fn yarn_keeps_fast_frequencies_and_divides_slow_ones() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_max_position_embeddings: 32768,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: None,
        };
        let plain = RopeScaling::Default.frequencies(128, 1e6);
        let share: Vec<f64> = yarn
            .frequencies(128, 1e6)
            .iter()
            .zip(&plain)
            .map(|(scaled, plain)| scaled / plain)
            .collect();
        assert!(
            share[..=23]
                .iter()
                .all(|&share| (share - 1.0).abs() < 1e-12)
        );
        assert!(
            share[40..]
                .iter()
                .all(|&share| (share - 0.25).abs() < 1e-12)
        );
        // One of the 17 steps from pair 23 to pair 40.
        assert!((share[24] - (1.0 - 0.75 / 17.0)).abs() < 1e-12);
        assert!((yarn.attention_factor() - 1.138_629_436_111_989).abs() < 1e-12);
    }

    #[test]
    fn invalid_fields_are_refused_by_name() {
        for (scaling, words) in [
            (
                r#"{"rope_type": "linear", "factor": 0.5}"#,
                "rope_scaling.factor: 0.5",
            ),
            (
                r#"{"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                   "original_max_position_embeddings": 8}"#,
                "rope_scaling.high_freq_factor: 4",
            ),
            (
                r#"{"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 0}"#,
                "rope_scaling.original_max_position_embeddings: 0",
            ),
            (
                r#"{"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 9, "beta_fast": 1}"#,
                "rope_scaling.beta_fast: 1",
            ),
            (
                r#"{"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 9, "attention_factor": 0}"#,
                "rope_scaling.attention_factor: 0",
            ),
        ] {
            let scaling: RopeScaling = serde_json::from_str(scaling).unwrap();
            let error = scaling.validate("rope_scaling").unwrap_err().to_string();
            assert!(error.starts_with(words), "{error}");
        }
    }
}

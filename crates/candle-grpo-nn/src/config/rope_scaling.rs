//! Rotary frequency scaling for rows longer than in pretraining.

use std::f32::consts::TAU;

use candle_grpo_core::validate::{self, Checked, check};
use serde::{Deserialize, Serialize};

/// A field name that several [`RopeScaling`] variants share.
pub(crate) const ORIGINAL: &str = "original_max_position_embeddings";

/// Scaling of the rotary frequencies `theta^(-2i / head_dim)`, named as in `rope_scaling` in a
/// Hugging Face `config.json`.
///
/// `dynamic` is not supported. Its frequencies depend on the longest row in a batch, so a
/// sequence's log-probs would differ between training and sampling.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
#[non_exhaustive]
pub enum RopeScaling {
    /// Unchanged frequencies.
    #[default]
    Default,
    /// Position interpolation (Chen et al. 2023): divides all frequencies by `factor`.
    Linear {
        /// The divisor, at least 1.
        factor: f64,
    },
    /// Llama 3.1: divides low frequencies (long waves) by `factor`, keeps high ones (short waves),
    /// and blends between them.
    Llama3 {
        /// The divisor, at least 1.
        factor: f64,
        /// Waves longer than `original_max_position_embeddings / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Waves shorter than `original_max_position_embeddings / high_freq_factor` are short.
        high_freq_factor: f64,
        /// The longest row in pretraining.
        original_max_position_embeddings: usize,
    },
    /// YaRN (Peng et al. 2023): divides frequencies that make few turns within the longest
    /// pretraining row, keeps those with many turns, and blends those between by index.
    Yarn {
        /// The divisor, at least 1.
        factor: f64,
        /// The longest row in pretraining.
        original_max_position_embeddings: usize,
        /// Frequencies with more turns than this are kept.
        #[serde(default = "default_beta_fast")]
        beta_fast: f64,
        /// Frequencies with fewer turns than this are divided.
        #[serde(default = "default_beta_slow")]
        beta_slow: f64,
        /// Multiplies queries and keys. `None` means `0.1 ln(factor) + 1`, as in the paper.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
    },
    /// LongRoPE (Ding et al. 2024, <https://arxiv.org/abs/2402.13753>): divides each frequency by
    /// its own factor.
    ///
    /// A model has two factor lists. transformers chooses one per batch, by its longest row. Here a
    /// decoder has one list, so that training and sampling agree. vLLM does the same, and chooses
    /// by `max_model_len`: see [`DecoderConfig::for_rows_of`](crate::DecoderConfig).
    LongRope {
        /// Divisors for rows up to `original_max_position_embeddings`, one per pair.
        short_factor: Vec<f64>,
        /// Divisors for longer rows, one per pair.
        long_factor: Vec<f64>,
        /// The longest row in pretraining.
        original_max_position_embeddings: usize,
        /// Ratio between `max_position_embeddings` and `original_max_position_embeddings`.
        factor: f64,
        /// Multiplies cosines and sines. `None` means
        /// `sqrt(1 + ln(factor) / ln(original_max_position_embeddings))`, or 1 if `factor` is at
        /// most 1.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attention_factor: Option<f64>,
        /// True selects `short_factor`, for rows up to `original_max_position_embeddings`. False
        /// selects `long_factor` if `factor` is above 1. This is not a `config.json` key.
        #[serde(skip)]
        short_rows: bool,
    },
}

fn default_beta_fast() -> f64 {
    32.0
}

fn default_beta_slow() -> f64 {
    1.0
}

impl RopeScaling {
    /// Checks that the fields in `section` describe valid frequencies. The error names the first
    /// invalid field.
    pub(crate) fn validate(&self, section: &str) -> Checked {
        self.check_fields()
            .map_err(|invalid| invalid.within(section))
    }

    /// Checks that each list has `pairs` entries.
    pub(crate) fn validate_pairs(&self, section: &str, pairs: usize) -> Checked {
        let Self::LongRope {
            short_factor,
            long_factor,
            ..
        } = self
        else {
            return Ok(());
        };
        for (name, factors) in [("short_factor", short_factor), ("long_factor", long_factor)] {
            let must = format!("have {pairs} numbers, one for each rotated pair");
            check(factors.len() == pairs, name, format!("{factors:?}"), &must)
                .map_err(|invalid| invalid.within(section))?;
        }
        Ok(())
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
            Self::LongRope {
                ref short_factor,
                ref long_factor,
                original_max_position_embeddings: original,
                factor,
                attention_factor,
                ..
            } => {
                for (name, factors) in
                    [("short_factor", short_factor), ("long_factor", long_factor)]
                {
                    let positive = factors.iter().all(|&x| x > 0.0 && x.is_finite());
                    check(
                        positive,
                        name,
                        format!("{factors:?}"),
                        "be positive numbers",
                    )?;
                }
                for (name, value) in [
                    ("factor", factor),
                    ("attention_factor", attention_factor.unwrap_or(1.0)),
                ] {
                    validate::positive(name, value)?;
                }
                // Its logarithm is a divisor.
                return check(original > 1, ORIGINAL, original, "be at least 2");
            }
        };
        check(
            factor >= 1.0 && factor.is_finite(),
            "factor",
            factor,
            "be finite and at least 1",
        )?;
        validate::at_least_one(ORIGINAL, original)
    }

    /// The `head_dim / 2` frequencies, in radians per position.
    ///
    /// They are computed in f32 exactly as in transformers, because models are trained with these
    /// values. A decoder in f64 therefore computes the same function.
    pub(crate) fn frequencies(&self, head_dim: usize, theta: f64) -> Vec<f32> {
        let scaled = |pair| {
            let (period, plain) = period(pair, head_dim, theta);
            let (kept, divisor) = self.kept(pair, plain, head_dim, theta);
            let divisor = divisor as f32;
            match self {
                Self::Default | Self::Linear { .. } | Self::Llama3 { .. } => {
                    (1.0 - kept) * plain / divisor + kept * plain
                }
                Self::Yarn { .. } | Self::LongRope { .. } => {
                    1.0 / (divisor * period) * (1.0 - kept) + plain * kept
                }
            }
        };
        (0..head_dim / 2).map(scaled).collect()
    }

    /// Divisors for the `head_dim / 2` frequencies.
    pub(crate) fn divisors(&self, head_dim: usize, theta: f64) -> Vec<f64> {
        let divisor = |pair| {
            let (_, plain) = period(pair, head_dim, theta);
            let (kept, divisor) = self.kept(pair, plain, head_dim, theta);
            let kept = f64::from(kept);
            1.0 / (kept + (1.0 - kept) / divisor)
        };
        (0..head_dim / 2).map(divisor).collect()
    }

    /// Multiplies cosines and sines.
    pub(crate) fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn {
                attention_factor,
                factor,
                ..
            } => attention_factor.unwrap_or(0.1 * factor.ln() + 1.0),
            Self::LongRope {
                attention_factor: Some(attention_factor),
                ..
            } => *attention_factor,
            Self::LongRope {
                original_max_position_embeddings: original,
                factor,
                ..
            } if *factor > 1.0 => (1.0 + factor.ln() / (*original as f64).ln()).sqrt(),
            _ => 1.0,
        }
    }

    /// Returns what fraction of the frequency `plain` is kept, and the divisor for the rest.
    fn kept(&self, pair: usize, plain: f32, head_dim: usize, theta: f64) -> (f32, f64) {
        match *self {
            Self::Default => (1.0, 1.0),
            Self::Linear { factor } => (0.0, factor),
            Self::LongRope {
                ref short_factor,
                ref long_factor,
                factor,
                short_rows,
                ..
            } => {
                let factors = if factor > 1.0 && !short_rows {
                    long_factor
                } else {
                    short_factor
                };
                (0.0, factors.get(pair).copied().unwrap_or(1.0))
            }
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                let wavelength = 1.0 / plain * TAU;
                let turns = 1.0 / wavelength * original as f32;
                let kept = (turns - low as f32) / (high - low) as f32;
                (kept.clamp(0.0, 1.0), factor)
            }
            Self::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast,
                beta_slow,
                ..
            } => {
                // Index of the pair that makes this many turns within the longest pretraining row.
                let index = |turns: f64| {
                    let length = original as f64 / (turns * std::f64::consts::TAU);
                    head_dim as f64 * length.ln() / (2.0 * theta.ln())
                };
                let first = index(beta_fast).floor().max(0.0);
                let last = index(beta_slow).ceil().min((head_dim - 1) as f64);
                let divided = (pair as f32 - first as f32) / (last - first).max(1e-3) as f32;
                (1.0 - divided.clamp(0.0, 1.0), factor)
            }
        }
    }
}

/// `theta^(2 pair / head_dim)` and its inverse in f32. The power is rounded from f64, so it is the
/// same on every processor.
fn period(pair: usize, head_dim: usize, theta: f64) -> (f32, f32) {
    let exponent = (2 * pair) as f32 / head_dim as f32;
    let period = f64::from(theta as f32).powf(exponent.into()) as f32;
    (period, 1.0 / period)
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
    use crate::DecoderConfig;

    /// The golden model `llama3_rope` tests the Llama 3.1 frequencies.
    #[test]
    fn linear_divides_all_frequencies() {
        let plain = RopeScaling::Default.frequencies(8, 1e4);
        let divided = RopeScaling::Linear { factor: 4.0 }.frequencies(8, 1e4);
        assert_eq!(plain, [1.0, 0.1, 0.01, 0.001]);
        assert_eq!(divided, [0.25, 0.025, 0.0025, 0.00025]);
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
        let share: Vec<f32> = yarn
            .frequencies(128, 1e6)
            .iter()
            .zip(&plain)
            .map(|(scaled, plain)| scaled / plain)
            .collect();
        assert!(share[..=23].iter().all(|&share| share == 1.0));
        assert!(share[40..].iter().all(|&share| share == 0.25));
        // One in 17 steps from pair 23 to pair 40, rounded at most eight times.
        assert!((share[24] - (1.0 - 0.75 / 17.0)).abs() < 4.0 * f32::EPSILON);
        assert!((yarn.attention_factor() - 1.138_629_436_111_989).abs() < 1e-12);
    }

    /// The golden model `phi3_longrope` tests the long factors.
    #[test]
    fn longrope_has_the_short_factors_up_to_the_length_of_pretraining() {
        let scaling = |factor| RopeScaling::LongRope {
            short_factor: vec![2.0, 4.0],
            long_factor: vec![5.0, 8.0],
            original_max_position_embeddings: 16,
            factor,
            attention_factor: None,
            short_rows: false,
        };
        assert_eq!(scaling(1.0).frequencies(4, 1e4), [0.5, 0.0025]);
        assert_eq!(scaling(1.0).attention_factor(), 1.0);
        assert_eq!(scaling(256.0).frequencies(4, 1e4), [0.2, 0.00125]);
        // sqrt(1 + ln 256 / ln 16)
        assert!((scaling(256.0).attention_factor() - 3f64.sqrt()).abs() < 1e-12);
        assert!(scaling(1.0).validate_pairs("rope_scaling", 2).is_ok());
        let error = scaling(1.0).validate_pairs("rope_scaling", 3).unwrap_err();
        let words = "rope_scaling.short_factor: [2.0, 4.0], must have 3 numbers";
        assert!(error.to_string().starts_with(words), "{error}");
    }

    /// Both transformers and vLLM compute the cosine factor from `factor` alone.
    #[test]
    fn the_longest_row_decides_between_the_factors_of_longrope() {
        let model = DecoderConfig {
            max_position_embeddings: 64,
            rope_scaling: RopeScaling::LongRope {
                short_factor: vec![2.0, 4.0],
                long_factor: vec![5.0, 8.0],
                original_max_position_embeddings: 16,
                factor: 4.0,
                attention_factor: None,
                short_rows: false,
            },
            ..DecoderConfig::default()
        };
        for (tokens, frequencies, longest) in [(16, [0.5, 0.0025], 16), (17, [0.2, 0.00125], 64)] {
            let model = model.clone().for_rows_of(tokens);
            assert_eq!(model.rope_scaling.frequencies(4, 1e4), frequencies);
            assert_eq!(model.rope_scaling.attention_factor(), 1.5f64.sqrt());
            assert_eq!(model.longest_row(), longest);
        }
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
            (
                r#"{"rope_type": "longrope", "short_factor": [1, 0], "long_factor": [1, 1], "factor": 8,
                   "original_max_position_embeddings": 9}"#,
                "rope_scaling.short_factor: [1.0, 0.0]",
            ),
            (
                r#"{"rope_type": "longrope", "short_factor": [1, 1], "long_factor": [1, 1], "factor": 8,
                   "original_max_position_embeddings": 1}"#,
                "rope_scaling.original_max_position_embeddings: 1",
            ),
        ] {
            let scaling: RopeScaling = serde_json::from_str(scaling).unwrap();
            let error = scaling.validate("rope_scaling").unwrap_err().to_string();
            assert!(error.starts_with(words), "{error}");
        }
    }
}

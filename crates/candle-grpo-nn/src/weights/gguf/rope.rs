//! Scaled rotary frequencies, which a file states in its metadata or, for Llama 3, as a tensor.

use std::f64::consts::TAU;

use candle_core::{Result, bail};

use super::GgufValue;
use super::config::Keys;
use crate::{DecoderConfig, RopeScaling};

/// The name of the tensor of divisors of the frequencies.
pub(super) const FACTORS: &str = "rope_freqs.weight";

/// GGUF files state only the divisors of Llama 3's scaling. Llama 3.1, 3.2 and 3.3 have these
/// parameters.
const LLAMA3_LOW_FREQ_FACTOR: f64 = 1.0;
const LLAMA3_HIGH_FREQ_FACTOR: f64 = 4.0;
const LLAMA3_ORIGINAL_MAX_POSITION_EMBEDDINGS: f64 = 8192.0;

/// Reads the keys `rope.scaling.*`.
pub(super) fn metadata_scaling(keys: &Keys) -> Result<RopeScaling> {
    let architecture = keys.architecture;
    for (key, only) in [
        ("attn_factor", 1.0),
        ("yarn_ext_factor", 1.0),
        ("yarn_attn_factor", 1.0),
        ("yarn_log_multiplier", 0.0),
    ] {
        let key = format!("rope.scaling.{key}");
        if let Some(found) = keys.optional_number(&key)?
            && found != only
        {
            bail!("{architecture}.{key}: {found}, must be {only}");
        }
    }
    let factor = match keys.optional_number("rope.scaling.factor")? {
        // The key of old files.
        None => keys.optional_number("rope.scale_linear")?,
        found => found,
    }
    // In llama.cpp 0 means no factor.
    .filter(|&factor| factor != 0.0);
    // A factor without a type means linear scaling.
    let linear = GgufValue::String("linear".to_owned());
    let scaling_type = keys.get("rope.scaling.type").unwrap_or(&linear);
    match (scaling_type.as_str(), factor) {
        (Some("none"), _) => Ok(RopeScaling::Default),
        (Some("linear"), factor) => Ok(match factor.unwrap_or(1.0) {
            1.0 => RopeScaling::Default,
            factor => RopeScaling::Linear { factor },
        }),
        (Some("yarn"), Some(factor)) => {
            let key = "rope.scaling.original_context_length";
            let Some(original) = keys.optional_size(key)? else {
                bail!("{architecture}.{key}: absent, must be present for YaRN");
            };
            Ok(RopeScaling::Yarn {
                factor,
                original_max_position_embeddings: original,
                beta_fast: keys
                    .optional_number("rope.scaling.yarn_beta_fast")?
                    .unwrap_or(32.0),
                beta_slow: keys
                    .optional_number("rope.scaling.yarn_beta_slow")?
                    .unwrap_or(1.0),
                attention_factor: None,
            })
        }
        (Some("yarn"), None) => {
            bail!("{architecture}.rope.scaling.factor: absent, must be present for YaRN")
        }
        _ => bail!(
            "{architecture}.rope.scaling.type: {scaling_type}, must be \"none\", \"linear\" or \"yarn\""
        ),
    }
}

/// Finds the scaling with the divisors `factors`.
pub(super) fn tensor_scaling(config: &DecoderConfig, factors: &[f32]) -> Result<RopeScaling> {
    let head_dim = config.head_dim();
    if factors.len() != head_dim / 2 {
        bail!(
            "tensor {FACTORS}: {} numbers, must have half the width of a head, {}",
            factors.len(),
            head_dim / 2
        );
    }
    if config.rope_scaling != RopeScaling::Default {
        bail!("tensor {FACTORS}: present, must be absent with rope.scaling in the metadata");
    }
    let plain = RopeScaling::Default.frequencies(head_dim, config.rope_theta);
    let scaling = guess(factors, &plain);
    let scaled = scaling.frequencies(head_dim, config.rope_theta);
    let same = factors.iter().enumerate().all(|(pair, &found)| {
        let factor = plain[pair] / scaled[pair];
        // False for NaN.
        (f64::from(found) / factor - 1.0).abs() < 1e-4
    });
    if !same {
        bail!(
            "tensor {FACTORS}: {factors:?}, must be the divisors of Llama 3.1 with rope_theta {}",
            config.rope_theta
        );
    }
    Ok(scaling)
}

fn guess(factors: &[f32], plain: &[f64]) -> RopeScaling {
    let factor = factors.iter().copied().fold(1.0, f32::max).into();
    if factor == 1.0 {
        return RopeScaling::Default;
    }
    // A blended frequency determines its number of turns within the longest row of pretraining.
    let blended = |(&found, plain): (&f32, &f64)| {
        let kept = (1.0 / f64::from(found) - 1.0 / factor) / (1.0 - 1.0 / factor);
        let between = LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR;
        (0.01..0.99)
            .contains(&kept)
            .then(|| (LLAMA3_LOW_FREQ_FACTOR + kept * between) * TAU / plain)
    };
    let original = factors.iter().zip(plain).find_map(blended);
    RopeScaling::Llama3 {
        factor,
        low_freq_factor: LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor: LLAMA3_HIGH_FREQ_FACTOR,
        original_max_position_embeddings: original
            .unwrap_or(LLAMA3_ORIGINAL_MAX_POSITION_EMBEDDINGS)
            .round() as usize,
    }
}

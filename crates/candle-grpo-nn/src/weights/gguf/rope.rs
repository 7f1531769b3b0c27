//! Scaled rotary frequencies, which a file stores in its metadata or, for Llama 3, as a tensor.

use std::collections::BTreeMap;
use std::f64::consts::TAU;

use candle_core::{Result, bail};

use super::GgufValue;
use super::keys::Keys;
use crate::{DecoderConfig, RopeScaling};

/// Name of the tensor with frequency divisors.
const FACTORS: &str = "rope_freqs.weight";
/// Names of LongRoPE's tensors.
const SHORT: &str = "rope_factors_short.weight";
const LONG: &str = "rope_factors_long.weight";
const ORIGINAL: &str = "rope.scaling.original_context_length";
/// Multiplies cosines and sines.
const ATTENTION_FACTOR: &str = "rope.scaling.attn_factor";

/// Tensors with divisors.
pub(super) const TENSORS: [&str; 3] = [FACTORS, SHORT, LONG];

/// GGUF files store only the divisors for Llama 3's scaling. Llama 3.1, 3.2 and 3.3 use these
/// parameters.
const LLAMA3_LOW_FREQ_FACTOR: f64 = 1.0;
const LLAMA3_HIGH_FREQ_FACTOR: f64 = 4.0;
const LLAMA3_ORIGINAL_MAX_POSITION_EMBEDDINGS: f64 = 8192.0;

/// Reads the keys `rope.scaling.*`.
pub(super) fn metadata_scaling(keys: &Keys) -> Result<RopeScaling> {
    let architecture = keys.architecture();
    for (key, only) in [
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
        // The key in old files.
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
            let Some(original) = keys.optional_size(ORIGINAL)? else {
                bail!("{architecture}.{ORIGINAL}: absent, must be present for YaRN");
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

/// Metadata keys for the scaling in `config`, apart from [`divisors`].
pub(super) fn scaling_metadata(config: &DecoderConfig) -> Vec<(&'static str, GgufValue)> {
    let text = |text: &str| GgufValue::String(text.to_owned());
    let size = |size: usize| GgufValue::Integer(size as i128);
    let (kind, factor) = ("rope.scaling.type", "rope.scaling.factor");
    match config.rope_scaling {
        RopeScaling::Default | RopeScaling::Llama3 { .. } => Vec::new(),
        RopeScaling::Linear { factor: value } => {
            vec![(kind, text("linear")), (factor, GgufValue::Float(value))]
        }
        RopeScaling::Yarn {
            factor: value,
            original_max_position_embeddings: original,
            beta_fast,
            beta_slow,
            ..
        } => vec![
            (kind, text("yarn")),
            (factor, GgufValue::Float(value)),
            (ORIGINAL, size(original)),
            ("rope.scaling.yarn_beta_fast", GgufValue::Float(beta_fast)),
            ("rope.scaling.yarn_beta_slow", GgufValue::Float(beta_slow)),
        ],
        RopeScaling::LongRope {
            original_max_position_embeddings: original,
            ..
        } => vec![
            (ORIGINAL, size(original)),
            (
                ATTENTION_FACTOR,
                GgufValue::Float(config.rope_scaling.attention_factor()),
            ),
        ],
    }
}

/// Tensors with divisors for the scaling in `config`, by name.
pub(super) fn divisors(config: &DecoderConfig) -> BTreeMap<&'static str, Vec<f32>> {
    let (width, theta) = (config.rotary_width(), config.rope_theta);
    let numbers = |numbers: &[f64]| numbers.iter().map(|&x| x as f32).collect();
    match &config.rope_scaling {
        scaling @ RopeScaling::Llama3 { .. } => {
            [(FACTORS, numbers(&scaling.divisors(width, theta)))].into()
        }
        RopeScaling::LongRope {
            short_factor,
            long_factor,
            ..
        } => [(SHORT, numbers(short_factor)), (LONG, numbers(long_factor))].into(),
        _ => BTreeMap::new(),
    }
}

/// The same scaling with default cosine and sine factors made explicit.
pub(super) fn canonical(scaling: &RopeScaling) -> RopeScaling {
    let mut same = scaling.clone();
    if let RopeScaling::Yarn {
        attention_factor, ..
    }
    | RopeScaling::LongRope {
        attention_factor, ..
    } = &mut same
    {
        *attention_factor = Some(scaling.attention_factor());
    }
    same
}

/// Reads the scaling from a file's divisor tensors; `None` if it has none.
pub(super) fn tensor_scaling(
    keys: &Keys,
    config: &DecoderConfig,
    divisors: impl Fn(&str) -> Result<Option<Vec<f32>>>,
) -> Result<Option<RopeScaling>> {
    let pairs = config.rotary_width() / 2;
    let read = |name: &str| -> Result<Option<Vec<f32>>> {
        let Some(factors) = divisors(name)? else {
            return Ok(None);
        };
        if factors.len() != pairs {
            bail!(
                "tensor {name}: {} numbers, must have half the width of a head, {pairs}",
                factors.len()
            );
        }
        if config.rope_scaling != RopeScaling::Default {
            bail!("tensor {name}: present, must be absent with rope.scaling in the metadata");
        }
        Ok(Some(factors))
    };
    let attention_factor = keys.optional_number(ATTENTION_FACTOR)?;
    match (read(FACTORS)?, read(SHORT)?, read(LONG)?) {
        (None, Some(short), Some(long)) => {
            let found = longrope(keys, config, &short, &long, attention_factor)?;
            Ok(Some(found))
        }
        (Some(_), Some(_), _) | (_, Some(_), None) => {
            bail!("tensor {SHORT}: present, must be present with {LONG} alone")
        }
        (_, _, Some(_)) => bail!("tensor {LONG}: present, must be present with {SHORT} alone"),
        (factors, None, None) => {
            if let Some(found) = attention_factor.filter(|&found| found != 1.0) {
                let architecture = keys.architecture();
                bail!("{architecture}.{ATTENTION_FACTOR}: {found}, must be 1");
            }
            factors.map(|factors| llama3(config, &factors)).transpose()
        }
    }
}

fn longrope(
    keys: &Keys,
    config: &DecoderConfig,
    short: &[f32],
    long: &[f32],
    attention_factor: Option<f64>,
) -> Result<RopeScaling> {
    let Some(original) = keys.optional_size(ORIGINAL)? else {
        let architecture = keys.architecture();
        bail!("{architecture}.{ORIGINAL}: absent, must be present with {LONG}");
    };
    let numbers = |numbers: &[f32]| numbers.iter().map(|&x| x.into()).collect();
    let scaling = |attention_factor| RopeScaling::LongRope {
        short_factor: numbers(short),
        long_factor: numbers(long),
        original_max_position_embeddings: original,
        factor: config.max_position_embeddings as f64 / original as f64,
        attention_factor,
        short_rows: false,
    };
    // Files always contain it.
    let default = scaling(None).attention_factor() as f32;
    Ok(scaling(
        attention_factor.filter(|&found| found as f32 != default),
    ))
}

/// Finds the Llama 3 scaling with the divisors `factors`.
fn llama3(config: &DecoderConfig, factors: &[f32]) -> Result<RopeScaling> {
    let (width, theta) = (config.rotary_width(), config.rope_theta);
    let plain = RopeScaling::Default.frequencies(width, theta);
    let scaling = guess(factors, &plain);
    let mut divisors = factors.iter().zip(scaling.divisors(width, theta));
    // False for NaN.
    let same = divisors.all(|(&found, divisor)| (f64::from(found) / divisor - 1.0).abs() < 1e-4);
    if !same {
        bail!(
            "tensor {FACTORS}: {factors:?}, must be the divisors of Llama 3.1 with rope_theta {theta}"
        );
    }
    Ok(scaling)
}

fn guess(factors: &[f32], plain: &[f32]) -> RopeScaling {
    let factor = factors.iter().copied().fold(1.0, f32::max).into();
    if factor == 1.0 {
        return RopeScaling::Default;
    }
    // A blended frequency determines how many turns it makes within the longest pretraining row.
    let blended = |(&found, &plain): (&f32, &f32)| {
        let kept = (1.0 / f64::from(found) - 1.0 / factor) / (1.0 - 1.0 / factor);
        let between = LLAMA3_HIGH_FREQ_FACTOR - LLAMA3_LOW_FREQ_FACTOR;
        (0.01..0.99)
            .contains(&kept)
            .then(|| (LLAMA3_LOW_FREQ_FACTOR + kept * between) * TAU / f64::from(plain))
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

//! Decoder configuration in GGUF metadata.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Error, Result, bail};
use serde_json::{Map, Value};

use super::header::Header;
use super::keys::{COMMON, Keys};
use super::{GgufValue, rope};
use crate::config::families::GgufLayout;
use crate::{DecoderConfig, LayerType};

pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const OUTPUT: &str = "output.weight";
/// Present if all attention projections have biases. In Qwen2, three always have them.
const ATTENTION_BIAS: &str = "blk.0.attn_q.bias";
/// Present if the feed-forward projections have biases.
const MLP_BIAS: &str = "blk.0.ffn_gate.bias";
/// Number of elements in each head that rotate.
const ROTATED: &str = "rope.dimension_count";

/// Reads the configuration. `divisors` reads the tensor with this name, if it exists, which holds
/// rotary frequency divisors.
pub(super) fn read(
    header: &Header,
    divisors: impl Fn(&str) -> Result<Option<Vec<f32>>>,
) -> Result<DecoderConfig> {
    let keys = Keys::new(header)?;
    let (architecture, layout) = (keys.architecture(), keys.layout);
    refuse_other_computations(header, &keys)?;
    let mut config = DecoderConfig {
        model_type: keys.model_type,
        ..DecoderConfig::default()
    };
    let all = || COMMON.iter().chain(layout.keys);
    for key in all().filter(|key| key.is_required) {
        key.read(&keys, &mut config)?;
    }
    let tensors = header.tensors.len();
    if config.num_hidden_layers > tensors {
        bail!(
            "{architecture}.block_count: {}, must be at most the number of tensors, which is {tensors}",
            config.num_hidden_layers
        );
    }
    let Some(embedding) = header.tensors.get(EMBEDDING) else {
        bail!("tensor {EMBEDDING}: absent, must be present");
    };
    let &[vocab_size, _] = embedding.dims.as_slice() else {
        bail!(
            "tensor {EMBEDDING}: shape {:?}, must have two dimensions",
            embedding.dims
        );
    };
    config.vocab_size = vocab_size;
    if let Some(stated) = keys.optional_size("vocab_size")?
        && stated != vocab_size
    {
        bail!(
            "{architecture}.vocab_size: {stated}, must be the number of rows of {EMBEDDING}, which is {vocab_size}"
        );
    }
    // All expert names are listed before any weight is read.
    let bytes: usize = header.tensors.values().map(|place| place.length).sum();
    if config.num_hidden_layers.saturating_mul(config.num_experts) > bytes {
        bail!(
            "{architecture}.expert_count: {}, must be a number that the file has room for",
            config.num_experts
        );
    }
    config.num_key_value_heads = config.num_attention_heads;
    for key in all().filter(|key| !key.is_required) {
        key.read(&keys, &mut config)?;
    }
    let has_key = |key| keys.model_type.family().keys.contains(&key);
    let has_tensor = |name| header.tensors.contains_key(name);
    config.tie_word_embeddings = !has_tensor(OUTPUT);
    config.attention_bias = has_key("attention_bias") && has_tensor(ATTENTION_BIAS);
    config.mlp_bias = has_tensor(MLP_BIAS);
    config.rope_scaling = rope::metadata_scaling(&keys)?;
    (layout.complete)(&mut config);
    if let Some(width) = keys.optional_size(ROTATED)?
        && has_key("partial_rotary_factor")
    {
        config.partial_rotary_factor = width as f64 / config.head_dim() as f64;
    }
    config.validate()?;
    for (key, width, what) in [
        (
            "attention.value_length",
            config.head_dim(),
            "the width of a head",
        ),
        (ROTATED, config.rotary_width(), "the width of a head"),
    ] {
        if let Some(found) = keys.optional_size(key)?
            && found != width
        {
            bail!("{architecture}.{key}: {found}, must be {what}, which is {width}");
        }
    }
    if let Some(scaling) = rope::tensor_scaling(&keys, &config, divisors)? {
        config.rope_scaling = scaling;
        config.validate()?;
    }
    Ok(config)
}

/// Metadata that describes `config`, without what [`read`] infers from tensor names and shapes.
pub(super) fn metadata(
    layout: &GgufLayout,
    config: &DecoderConfig,
) -> Result<BTreeMap<String, GgufValue>> {
    let config = &canonical(config);
    let mut stated: Vec<(&str, GgufValue)> = COMMON
        .iter()
        .chain(layout.keys)
        .filter_map(|key| Some((key.name, key.value(config)?)))
        .collect();
    let size = |size: usize| GgufValue::Integer(size as i128);
    stated.extend([
        ("vocab_size", size(config.vocab_size)),
        ("attention.value_length", size(config.head_dim())),
        (ROTATED, size(config.rotary_width())),
    ]);
    stated.extend(rope::scaling_metadata(config));
    let architecture = layout.architecture;
    let mut metadata: BTreeMap<_, _> = stated
        .into_iter()
        .map(|(key, value)| (format!("{architecture}.{key}"), value))
        .collect();
    let name = GgufValue::String(architecture.to_owned());
    metadata.insert("general.architecture".to_owned(), name);
    Ok(metadata)
}

/// Checks that a file that reads as `found` computes the same as `config`.
pub(super) fn check_same(config: &DecoderConfig, found: &DecoderConfig) -> Result<()> {
    let fields = |config: &DecoderConfig| -> Result<Map<String, Value>> {
        let fields = serde_json::to_value(canonical(config)).map_err(Error::wrap)?;
        let fields = fields.as_object().into_iter().flatten();
        // Numbers in the file have 32 bits.
        Ok(fields
            .map(|(name, value)| (name.clone(), rounded(value)))
            .collect())
    };
    let (mut stated, mut found) = (fields(config)?, fields(found)?);
    for fields in [&mut stated, &mut found] {
        // Several families may share one architecture.
        fields.remove("model_type");
    }
    let names: BTreeSet<_> = stated.keys().chain(found.keys()).collect();
    for name in names {
        let (stated, found) = (stated.get(name), found.get(name));
        if stated != found {
            let text = |value: Option<&Value>| value.map_or("absent".to_owned(), Value::to_string);
            bail!(
                "{name}: {}, GGUF files of this architecture can only state {}",
                text(stated),
                text(found)
            );
        }
    }
    Ok(())
}

/// Rounds the numbers in `value` to f32.
fn rounded(value: &Value) -> Value {
    match value {
        Value::Array(values) => values.iter().map(rounded).collect(),
        Value::Object(fields) => {
            let fields = fields
                .iter()
                .map(|(name, value)| (name.clone(), rounded(value)));
            Value::Object(fields.collect())
        }
        Value::Number(number) if number.is_f64() => {
            number.as_f64().map_or(Value::Null, |x| (x as f32).into())
        }
        other => other.clone(),
    }
}

/// The same decoder with its defaults made explicit.
fn canonical(config: &DecoderConfig) -> DecoderConfig {
    let has_key = |key| config.model_type.family().keys.contains(&key);
    let head_dim = config.head_dim();
    let mut same = config.clone();
    same.head_dim = Some(head_dim);
    if head_dim > 0 {
        same.partial_rotary_factor = config.rotary_width() as f64 / head_dim as f64;
    }
    if has_key("query_pre_attn_scalar") {
        same.query_pre_attn_scalar.get_or_insert(head_dim as f64);
    }
    if has_key("rope_local_base_freq") {
        same.rope_local_base_freq.get_or_insert(config.rope_theta);
    }
    if has_key("layer_types") && config.layer_types.is_empty() {
        same.layer_types = vec![LayerType::FullAttention; config.num_hidden_layers];
    }
    if has_key("no_rope_layers") && config.no_rope_layers.is_empty() {
        same.no_rope_layers = vec![1; config.num_hidden_layers];
    }
    same.rope_scaling = rope::canonical(&config.rope_scaling);
    same
}

/// Rejects keys that change the computation.
fn refuse_other_computations(header: &Header, keys: &Keys) -> Result<()> {
    if let Some(value) = header.metadata.get("split.count")
        && value.as_u64().is_none_or(|count| count > 1)
    {
        bail!("split.count: {value}, must be 1");
    }
    for key in [
        "expert_count",
        "expert_shared_count",
        "expert_group_count",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "attention.max_alibi_bias",
        "attention.clamp_kqv",
        "attention.scale",
        "attention.temperature_scale",
        "logit_scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "residual_scale",
        "embedding_scale",
        "rope.freq_base_swa",
    ] {
        if let Some(value) = keys.get(key)
            && !keys.layout.keys.iter().any(|known| known.name == key)
            && value.as_f64() != Some(0.0)
        {
            bail!("{}.{key}: {value}, must be absent", keys.architecture());
        }
    }
    // Granite without rotation.
    let key = "rope.scaling.finetuned";
    if keys.get(key).and_then(GgufValue::as_bool) == Some(false) {
        bail!(
            "{}.{key}: false, must be true or absent",
            keys.architecture()
        );
    }
    Ok(())
}

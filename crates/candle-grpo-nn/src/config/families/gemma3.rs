//! Gemma 3 (<https://arxiv.org/abs/2503.19786>), text models.

use candle_core::{Result, bail};
use serde_json::{Map, Value, json};

use crate::config::architecture::{Architecture, AttentionPlan, Rotation};
use crate::config::families::{
    Family, GgufLayout, gemma2, interval, llama, set_default, set_default_rope_theta,
};
use crate::config::gguf_key::GgufField::OptionalNumber;
use crate::config::gguf_key::GgufKey;
use crate::{DecoderConfig, LayerType, RopeScaling};

pub(super) const FAMILY: Family = Family {
    name: "gemma3_text",
    transformers_class: "Gemma3ForCausalLM",
    keys: &[
        "attention_bias",
        "sliding_window",
        "layer_types",
        "rope_local_base_freq",
        "query_pre_attn_scalar",
        "final_logit_softcapping",
    ],
    defaults: || {
        json!({
            "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 131_072, "head_dim": 256, "tie_word_embeddings": true,
            "query_pre_attn_scalar": 256, "sliding_window": 4096,
        })
    },
    read,
    write: |model, config| {
        gemma2::write(model, config);
        // transformers would fall back to another base.
        let local = model.rope_local_base_freq.unwrap_or(model.rope_theta);
        config.insert("rope_local_base_freq".to_owned(), json!(local));
    },
    architecture,
    gguf: Some(GgufLayout {
        architecture: "gemma3",
        keys: &[
            gemma2::WINDOW,
            GgufKey::optional(
                "rope.freq_base_swa",
                OptionalNumber(|c| &mut c.rope_local_base_freq),
            ),
        ],
        complete: |config| {
            config.rope_local_base_freq.get_or_insert(1e4);
            // llama.cpp identifies the 27B model by its 62 blocks.
            gemma2::complete(config, 6, 62);
            if config.sliding_window.is_none() {
                config.layer_types.fill(LayerType::FullAttention);
            }
        },
        ..gemma2::GGUF
    }),
    ..llama::FAMILY
};

fn read(config: &mut Map<String, Value>) -> Result<()> {
    // Inherited from Gemma 2, but not used in Gemma 3.
    config.remove("attn_logit_softcapping");
    read_rotations(config)?;
    let full = interval(config, "sliding_window_pattern", 6)?;
    gemma2::read(config, full)
}

/// Replaces the rotations for both block types by `rope_parameters`, which is for full attention,
/// and `rope_local_base_freq`.
fn read_rotations(config: &mut Map<String, Value>) -> Result<()> {
    const LOCAL: &str = "rope_parameters.sliding_attention";
    let rotations = config.get_mut("rope_parameters");
    if let Some(rotations) = rotations.and_then(Value::as_object_mut) {
        let full = rotations.remove("full_attention");
        let mut local = match rotations.remove("sliding_attention").unwrap_or_default() {
            Value::Null => Map::new(),
            Value::Object(local) => local,
            other => bail!("{LOCAL}: {other}, must be an object"),
        };
        if let Some((key, value)) = rotations.iter().next() {
            bail!("rope_parameters.{key}: {value}, must be in full_attention or sliding_attention");
        }
        let base = local.remove("rope_theta").filter(|base| !base.is_null());
        local.retain(|key, value| !(value.is_null() || key == "rope_type" && value == "default"));
        if let Some((key, value)) = local.iter().next() {
            bail!("{LOCAL}.{key}: {value}, must be absent, or \"default\" for rope_type");
        }
        if let Some(base) = base {
            config.insert("rope_local_base_freq".to_owned(), base);
        }
        config.insert("rope_parameters".to_owned(), full.unwrap_or_default());
    }
    set_default_rope_theta(config, 1e6);
    set_default(config, "rope_local_base_freq", 1e4);
    Ok(())
}

/// Normalizes each query and key head. Blocks with a window have their own rotation, without
/// scaling.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = gemma2::architecture(config);
    architecture.rotations.push(Rotation {
        theta: config.rope_local_base_freq.unwrap_or(config.rope_theta),
        scaling: RopeScaling::Default,
        ..architecture.rotations[0].clone()
    });
    for (layer, attention) in architecture.attentions().enumerate() {
        attention.norms = Some(AttentionPlan::head_norms(config));
        attention.rotation = Some(usize::from(gemma2::has_window(config, layer)));
    }
    architecture.offset_norms();
    architecture
}

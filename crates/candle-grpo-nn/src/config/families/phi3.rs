//! Phi-3, Phi-3.5 and Phi-4 (<https://arxiv.org/abs/2404.14219>), text models.

use candle_core::Result;
use serde_json::{Map, Value, json};

use crate::config::architecture::{Architecture, ChannelPlan};
use crate::config::families::{Family, GgufLayout, PARTIAL, lift_partial_rotary_factor, llama};
use crate::config::gguf_key::GgufField::OptionalSize;
use crate::config::gguf_key::GgufKey;
use crate::config::rope_scaling::ORIGINAL;
use crate::{DecoderConfig, RopeScaling};

pub(super) const FAMILY: Family = Family {
    name: "phi3",
    transformers_class: "Phi3ForCausalLM",
    keys: &["sliding_window", "partial_rotary_factor"],
    defaults: || {
        json!({
            "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-05, "original_max_position_embeddings": 4096,
        })
    },
    read,
    write,
    architecture,
    gguf: Some(GgufLayout {
        architecture: "phi3",
        adjacent_pairs: false,
        names: &[
            ("self_attn.qkv_proj", "attn_qkv"),
            ("mlp.gate_up_proj", "ffn_up"),
        ],
        keys: &[GgufKey::optional(
            "attention.sliding_window",
            OptionalSize(|c| &mut c.sliding_window),
        )],
        ..llama::GGUF
    }),
    ..llama::FAMILY
};

/// A top-level `original_max_position_embeddings` takes precedence over the one inside the
/// rotation, which may also contain `partial_rotary_factor`.
fn read(config: &mut Map<String, Value>) -> Result<()> {
    let original = config.remove(ORIGINAL).filter(|x| !x.is_null());
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(Value::Object(rope)) = config.get_mut(key) else {
            continue;
        };
        for name in ["rope_type", "type"] {
            // Older names.
            if let Some(found) = rope.get_mut(name)
                && (found == "su" || found == "yarn")
            {
                *found = json!("longrope");
            }
            if rope.get(name) == Some(&json!("longrope"))
                && let Some(original) = &original
            {
                rope.insert(ORIGINAL.to_owned(), original.clone());
            }
        }
    }
    lift_partial_rotary_factor(config);
    Ok(())
}

fn write(model: &DecoderConfig, config: &mut Map<String, Value>) {
    config.insert(PARTIAL.to_owned(), json!(model.partial_rotary_factor));
    if let RopeScaling::LongRope {
        original_max_position_embeddings: original,
        factor,
        ..
    } = model.rope_scaling
        && let Some(Value::Object(rope)) = config.get_mut("rope_scaling")
    {
        // transformers 4 accepts only the type and both lists.
        rope.remove("rope_type");
        rope.insert("type".to_owned(), json!("longrope"));
        rope.remove(ORIGINAL);
        if factor == model.max_position_embeddings as f64 / original as f64 {
            rope.remove("factor");
        }
        config.insert(ORIGINAL.to_owned(), json!(original));
    }
}

/// Query, key and value are stored as one map, and so are gate and up.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    for attention in architecture.attentions() {
        attention.scores.window = config.sliding_window;
        attention.inputs.joined = Some("self_attn.qkv_proj");
    }
    for block in &mut architecture.blocks {
        if let ChannelPlan::Mlp(mlp) = &mut block.mlp.mixer {
            mlp.inputs.joined = Some("mlp.gate_up_proj");
        }
    }
    architecture
}

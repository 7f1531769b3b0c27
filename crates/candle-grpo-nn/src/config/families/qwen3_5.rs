//! Qwen3.5 text models. Three in four blocks mix tokens with the gated delta rule
//! (<https://arxiv.org/abs/2412.06464>).

use candle_core::{Result, bail};
use candle_grpo_kernels::DeltaHeads;
use serde_json::{Map, Value, json};

use crate::config::architecture::{Architecture, AttentionPlan, GatedDeltaPlan, TokenMixerPlan};
use crate::config::families::{
    Family, Multimodal, PARTIAL, absent, interval, lift_partial_rotary_factor, llama, periodic,
};
use crate::{DecoderConfig, LayerType};

pub(super) const FAMILY: Family = Family {
    name: "qwen3_5_text",
    transformers_class: "Qwen3_5ForCausalLM",
    keys: &[
        "attention_bias",
        "layer_types",
        "partial_rotary_factor",
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
    ],
    layer_types: &[LayerType::FullAttention, LayerType::LinearAttention],
    defaults: || {
        json!({
            "vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288,
            "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
            "max_position_embeddings": 32_768, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        })
    },
    read,
    architecture,
    multimodal: Some(Multimodal {
        name: "qwen3_5",
        prefix: "model.language_model.",
        // Vision and multi-token prediction.
        others: &["model.visual.", "mtp."],
    }),
    gguf: None,
    ..llama::FAMILY
};

/// Without `layer_types`, every `full_attention_interval`-th block has full attention.
fn read(config: &mut Map<String, Value>) -> Result<()> {
    if let Some(gate) = config
        .remove("attn_output_gate")
        .filter(|gate| *gate != true)
    {
        bail!("attn_output_gate: {gate}, must be true");
    }
    if absent(config, "head_dim") {
        config.insert("head_dim".to_owned(), json!(256));
    }
    for key in ["rope_parameters", "rope_scaling"] {
        if let Some(Value::Object(rope)) = config.get_mut(key) {
            // A text token's three positions are equal.
            rope.retain(|name, _| !name.starts_with("mrope_"));
        }
    }
    lift_partial_rotary_factor(config);
    if absent(config, PARTIAL) {
        config.insert(PARTIAL.to_owned(), json!(0.25));
    }
    if absent(config, "layer_types") {
        let full = interval(config, "full_attention_interval", 4)?;
        let (other, last) = (LayerType::LinearAttention, LayerType::FullAttention);
        let layers = periodic(config, full, other, last)?;
        config.insert("layer_types".to_owned(), layers);
    }
    Ok(())
}

/// Attention has head norms, output gates and partial rotation. Norms multiply by `1 + weight`,
/// except after the gated delta rule.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    let size = |size: Option<usize>| size.unwrap_or(0);
    let heads = DeltaHeads {
        key_heads: size(config.linear_num_key_heads),
        value_heads: size(config.linear_num_value_heads),
        key_dim: size(config.linear_key_head_dim),
        value_dim: size(config.linear_value_head_dim),
    };
    let delta = GatedDeltaPlan::new(config, heads, size(config.linear_conv_kernel_dim));
    for (block, layer_type) in architecture.blocks.iter_mut().zip(&config.layer_types) {
        if *layer_type == LayerType::LinearAttention {
            block.tokens.mixer = TokenMixerPlan::GatedDelta(delta.clone());
        }
    }
    for attention in architecture.attentions() {
        attention.norms = Some(AttentionPlan::head_norms(config));
        attention.output_gate = true;
        let [query, ..] = &mut attention.inputs.maps;
        query.outputs = query.outputs.saturating_mul(2);
    }
    architecture.offset_norms();
    architecture
}

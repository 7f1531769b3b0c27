//! Qwen3 (<https://arxiv.org/abs/2505.09388>).

use serde_json::json;

use crate::DecoderConfig;
use crate::config::architecture::{Architecture, AttentionPlan};
use crate::config::families::{Family, GgufLayout, absent, llama};

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    transformers_class: "Qwen3ForCausalLM",
    keys: &["attention_bias"],
    defaults: || {
        json!({
            "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 32_768, "use_sliding_window": false,
        })
    },
    read: |config| {
        if absent(config, "head_dim") {
            config.insert("head_dim".to_owned(), json!(128));
        }
        Ok(())
    },
    architecture,
    gguf: Some(GgufLayout {
        architecture: "qwen3",
        adjacent_pairs: false,
        ..llama::GGUF
    }),
    ..llama::FAMILY
};

/// Normalizes each query and key head.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    for attention in architecture.attentions() {
        attention.norms = Some(AttentionPlan::head_norms(config));
    }
    architecture
}

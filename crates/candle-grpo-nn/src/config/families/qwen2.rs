//! Qwen2 and Qwen2.5 (<https://arxiv.org/abs/2407.10671>).

use serde_json::json;

use crate::DecoderConfig;
use crate::config::architecture::Architecture;
use crate::config::families::{Family, GgufLayout, llama};

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    transformers_class: "Qwen2ForCausalLM",
    keys: &[],
    defaults: || {
        json!({
            "vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 32_768, "use_sliding_window": false,
        })
    },
    architecture,
    gguf: Some(GgufLayout {
        architecture: "qwen2",
        adjacent_pairs: false,
        ..llama::GGUF
    }),
    ..llama::FAMILY
};

/// Query, key and value always have biases.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    for attention in architecture.attentions() {
        for map in &mut attention.inputs.maps {
            map.bias = true;
        }
    }
    architecture
}

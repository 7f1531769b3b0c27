//! Llama (<https://arxiv.org/abs/2302.13971>), including SmolLM 1 and 2.

use serde_json::json;

use crate::LayerType;
use crate::config::architecture::Architecture;
use crate::config::families::{Family, GgufLayout};

pub(super) const FAMILY: Family = Family {
    name: "llama",
    transformers_class: "LlamaForCausalLM",
    keys: &["attention_bias", "mlp_bias"],
    layer_types: &[LayerType::FullAttention, LayerType::SlidingAttention],
    defaults: || {
        json!({
            "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        })
    },
    read: |_| Ok(()),
    write: |_, _| {},
    architecture: Architecture::llama,
    stacks: |_| Vec::new(),
    multimodal: None,
    gguf: Some(GGUF),
};

/// GGUF layout. Other families start from it.
pub(super) const GGUF: GgufLayout = GgufLayout {
    architecture: "llama",
    adjacent_pairs: true,
    names: &[],
    keys: &[],
    complete: |_| {},
};

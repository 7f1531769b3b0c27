//! Mistral (<https://arxiv.org/abs/2310.06825>).

use serde_json::json;

use crate::DecoderConfig;
use crate::config::architecture::Architecture;
use crate::config::families::{Family, llama};

pub(super) const FAMILY: Family = Family {
    name: "mistral",
    transformers_class: "MistralForCausalLM",
    keys: &["sliding_window"],
    defaults: || {
        json!({
            "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 131_072, "sliding_window": 4096,
        })
    },
    // transformers would fall back to 4096.
    write: |model, config| {
        let window = json!(model.sliding_window);
        config.insert("sliding_window".to_owned(), window);
    },
    architecture,
    // To llama.cpp a Mistral is a Llama without a window.
    gguf: Some(llama::GGUF),
    ..llama::FAMILY
};

/// All blocks have a window.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    for attention in architecture.attentions() {
        attention.scores.window = config.sliding_window;
    }
    architecture
}

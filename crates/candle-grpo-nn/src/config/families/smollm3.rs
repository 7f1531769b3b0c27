//! SmolLM3 (<https://huggingface.co/blog/smollm3>).

use candle_core::Result;
use serde_json::{Map, Value, json};

use crate::DecoderConfig;
use crate::config::architecture::Architecture;
use crate::config::families::{
    Family, GgufLayout, absent, every, interval, llama, periodic, set_default_rope_theta,
};

pub(super) const FAMILY: Family = Family {
    name: "smollm3",
    transformers_class: "SmolLM3ForCausalLM",
    keys: &["attention_bias", "mlp_bias", "no_rope_layers"],
    defaults: || {
        json!({
            "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008,
            "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
            "max_position_embeddings": 32_768, "use_sliding_window": false, "tie_word_embeddings": true,
        })
    },
    read,
    write,
    architecture,
    gguf: Some(GgufLayout {
        architecture: "smollm3",
        // In llama.cpp every fourth block has no rotation.
        complete: |config| config.no_rope_layers = every(config.num_hidden_layers, 4, 1, 0),
        ..llama::GGUF
    }),
    ..llama::FAMILY
};

/// Without `no_rope_layers`, every `no_rope_layer_interval`-th block has no rotation.
fn read(config: &mut Map<String, Value>) -> Result<()> {
    if absent(config, "no_rope_layers") {
        let interval = interval(config, "no_rope_layer_interval", 4)?;
        let layers = periodic(config, interval, 1, 0)?;
        config.insert("no_rope_layers".to_owned(), layers);
    }
    set_default_rope_theta(config, 2e6);
    Ok(())
}

/// Without this key, every fourth block has no rotation in transformers.
fn write(model: &DecoderConfig, config: &mut Map<String, Value>) {
    let layers: Vec<_> = (0..model.num_hidden_layers)
        .map(|layer| u8::from(rotates(model, layer)))
        .collect();
    config.insert("no_rope_layers".to_owned(), json!(layers));
}

fn rotates(model: &DecoderConfig, layer: usize) -> bool {
    model.no_rope_layers.get(layer) != Some(&0)
}

fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    for (layer, attention) in architecture.attentions().enumerate() {
        if !rotates(config, layer) {
            attention.rotation = None;
        }
    }
    architecture
}

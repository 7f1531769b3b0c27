//! SmolLM3 (<https://huggingface.co/blog/smollm3>).

use candle_core::{Result, bail};
use serde_json::{Map, Value, json};

use crate::DecoderConfig;
use crate::model::architecture::Architecture;
use crate::model::config::num_hidden_layers;
use crate::model::families::{Family, GgufLayout, absent, llama};

pub(super) const FAMILY: Family = Family {
    name: "smollm3",
    transformers_class: "SmolLM3ForCausalLM",
    keys: &["attention_bias", "mlp_bias", "no_rope_layers"],
    read,
    write,
    architecture,
    gguf: Some(GgufLayout {
        architecture: "smollm3",
        adjacent_pairs: true,
    }),
    ..llama::FAMILY
};

/// Without `no_rope_layers` every `no_rope_layer_interval`-th block does not rotate.
fn read(config: &mut Map<String, Value>) -> Result<()> {
    let interval = config.remove("no_rope_layer_interval");
    if !absent(config, "no_rope_layers") {
        return Ok(());
    }
    let interval = interval.filter(|x| !x.is_null()).unwrap_or(json!(4));
    let count = interval.as_u64().and_then(|x| usize::try_from(x).ok());
    let Some(count @ 1..) = count else {
        bail!("no_rope_layer_interval: {interval}, must be a whole number of at least 1");
    };
    let rotates = |layer: usize| u8::from(!(layer + 1).is_multiple_of(count));
    let layers: Vec<_> = (0..num_hidden_layers(config)?).map(rotates).collect();
    config.insert("no_rope_layers".to_owned(), json!(layers));
    Ok(())
}

/// Without the key, every fourth block of transformers does not rotate.
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

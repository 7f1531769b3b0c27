//! Qwen2 and Qwen2.5 (<https://arxiv.org/abs/2407.10671>).

use crate::DecoderConfig;
use crate::model::architecture::Architecture;
use crate::model::families::{Family, GgufLayout, llama};

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    transformers_class: "Qwen2ForCausalLM",
    keys: &[],
    architecture,
    gguf: Some(GgufLayout {
        architecture: "qwen2",
        adjacent_pairs: false,
        ..llama::GGUF
    }),
    ..llama::FAMILY
};

/// Query, key and value always have a bias.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    for attention in architecture.attentions() {
        for map in &mut attention.inputs.maps {
            map.bias = true;
        }
    }
    architecture
}

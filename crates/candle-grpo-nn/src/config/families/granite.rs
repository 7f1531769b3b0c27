//! Granite 3 (<https://github.com/ibm-granite/granite-3.0-language-models>), without its mixtures of
//! experts.

use crate::DecoderConfig;
use crate::config::architecture::Architecture;
use crate::config::families::{Family, GgufLayout, llama};
use crate::config::gguf_key::GgufField::Number;
use crate::config::gguf_key::GgufKey;

pub(super) const FAMILY: Family = Family {
    name: "granite",
    transformers_class: "GraniteForCausalLM",
    keys: &[
        "attention_bias",
        "mlp_bias",
        "embedding_multiplier",
        "residual_multiplier",
        "attention_multiplier",
        "logits_scaling",
    ],
    architecture,
    gguf: Some(GgufLayout {
        architecture: "granite",
        keys: &[
            GgufKey::required("attention.scale", Number(|c| &mut c.attention_multiplier)),
            GgufKey::required("logit_scale", Number(|c| &mut c.logits_scaling)),
            GgufKey::optional("embedding_scale", Number(|c| &mut c.embedding_multiplier)),
            GgufKey::optional("residual_scale", Number(|c| &mut c.residual_multiplier)),
        ],
        ..llama::GGUF
    }),
    ..llama::FAMILY
};

/// Scales the embedding, attention scores, residual sums and logits.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    architecture.embedding_scale = config.embedding_multiplier;
    architecture.output_scale = config.logits_scaling.recip();
    for block in &mut architecture.blocks {
        block.tokens.scale = config.residual_multiplier;
        block.mlp.scale = config.residual_multiplier;
    }
    for attention in architecture.attentions() {
        attention.scores.scale = config.attention_multiplier;
    }
    architecture
}

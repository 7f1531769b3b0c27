//! OLMo 2 (<https://arxiv.org/abs/2501.00656>).

use serde_json::json;

use crate::DecoderConfig;
use crate::config::architecture::{Architecture, NormPlan};
use crate::config::families::{Family, GgufLayout, llama};

pub(super) const FAMILY: Family = Family {
    name: "olmo2",
    transformers_class: "Olmo2ForCausalLM",
    keys: &["attention_bias"],
    defaults: || {
        json!({
            "vocab_size": 50_304, "hidden_size": 4096, "intermediate_size": 11_008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-05,
        })
    },
    architecture,
    gguf: Some(GgufLayout {
        architecture: "olmo2",
        adjacent_pairs: false,
        names: &[
            ("post_attention_layernorm", "post_attention_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ],
        ..llama::GGUF
    }),
    ..llama::FAMILY
};

/// Attention and feed-forward layers have a norm after them and none before. Query and key norms
/// span all heads.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    let norm = |name, width| NormPlan::new(config, name, width);
    for block in &mut architecture.blocks {
        block.tokens.before = None;
        block.tokens.after = Some(norm("post_attention_layernorm", config.hidden_size));
        block.mlp.before = None;
        block.mlp.after = Some(norm("post_feedforward_layernorm", config.hidden_size));
    }
    for attention in architecture.attentions() {
        let [query, key, _] = &attention.inputs.maps;
        attention.norms = Some([
            norm("self_attn.q_norm", query.outputs),
            norm("self_attn.k_norm", key.outputs),
        ]);
    }
    architecture
}

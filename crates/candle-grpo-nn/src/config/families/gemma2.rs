//! Gemma 2 (<https://arxiv.org/abs/2408.00118>).

use candle_core::{Result, bail};
use serde_json::{Map, Value, json};

use crate::config::architecture::{Architecture, ChannelPlan, Gate, NormPlan};
use crate::config::families::{Family, GgufLayout, absent, every, llama, periodic};
use crate::config::gguf_key::GgufField::{OptionalNumber, OptionalSize};
use crate::config::gguf_key::GgufKey;
use crate::{DecoderConfig, LayerType};

pub(super) const FAMILY: Family = Family {
    name: "gemma2",
    transformers_class: "Gemma2ForCausalLM",
    keys: &[
        "attention_bias",
        "sliding_window",
        "layer_types",
        "query_pre_attn_scalar",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ],
    defaults: || {
        json!({
            "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": true,
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        })
    },
    // Every second block is full.
    read: |config| read(config, 2),
    write: |model, config| {
        write(model, config);
        // An absent key would mean another cap.
        let cap = json!(model.attn_logit_softcapping);
        config.insert("attn_logit_softcapping".to_owned(), cap);
    },
    architecture: |config| {
        let mut architecture = architecture(config);
        for attention in architecture.attentions() {
            attention.scores.cap = config.attn_logit_softcapping;
        }
        architecture.offset_norms();
        architecture
    },
    gguf: Some(GgufLayout {
        architecture: "gemma2",
        keys: &[
            WINDOW,
            GgufKey::optional(
                "attn_logit_softcapping",
                OptionalNumber(|c| &mut c.attn_logit_softcapping),
            ),
            GgufKey::optional(
                "final_logit_softcapping",
                OptionalNumber(|c| &mut c.final_logit_softcapping),
            ),
        ],
        complete: |config| {
            config.sliding_window.get_or_insert(4096);
            config.attn_logit_softcapping.get_or_insert(50.0);
            config.final_logit_softcapping.get_or_insert(30.0);
            // In llama.cpp the model with 46 blocks is that of 27 billion parameters.
            complete(config, 2, 46);
        },
        ..GGUF
    }),
    ..llama::FAMILY
};

/// The part of the layout that Gemma 2 and 3 share.
pub(super) const GGUF: GgufLayout = GgufLayout {
    adjacent_pairs: false,
    names: &[
        ("post_attention_layernorm", "post_attention_norm"),
        ("pre_feedforward_layernorm", "ffn_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ],
    ..llama::GGUF
};

pub(super) const WINDOW: GgufKey = GgufKey::optional(
    "attention.sliding_window",
    OptionalSize(|c| &mut c.sliding_window),
);

/// Sets what GGUF files do not state: every `full`-th block has no window, the embedding is the
/// output layer, and the model with `large` blocks has another factor of the scores.
pub(super) fn complete(config: &mut DecoderConfig, full: usize, large: usize) {
    let (other, last) = (LayerType::SlidingAttention, LayerType::FullAttention);
    config.layer_types = every(config.num_hidden_layers, full, other, last);
    config.tie_word_embeddings = true;
    config.query_pre_attn_scalar = Some(if config.num_hidden_layers == large {
        (config.hidden_size / config.num_attention_heads.max(1)) as f64
    } else {
        config.head_dim() as f64
    });
}

const ACTIVATION: &str = "gelu_pytorch_tanh";

/// Replaces the keys that Gemma 2 and 3 share. Without `layer_types` every `full`-th block has no
/// window.
pub(super) fn read(config: &mut Map<String, Value>, full: usize) -> Result<()> {
    // The key that is read is hidden_activation.
    config.remove("hidden_act");
    match config.remove("hidden_activation") {
        None | Some(Value::Null) => {}
        Some(found) if found == ACTIVATION => {}
        Some(found) => bail!("hidden_activation: {found}, must be {ACTIVATION:?}"),
    }
    if absent(config, "layer_types") {
        let (other, last) = (LayerType::SlidingAttention, LayerType::FullAttention);
        let layers = periodic(config, full, other, last)?;
        config.insert("layer_types".to_owned(), layers);
    }
    Ok(())
}

/// Adds the keys whose defaults would be others.
pub(super) fn write(model: &DecoderConfig, config: &mut Map<String, Value>) {
    config.remove("hidden_act");
    let scalar = model
        .query_pre_attn_scalar
        .unwrap_or(model.head_dim() as f64);
    let layer_type = |layer| model.layer_types.get(layer).copied();
    let layers: Vec<_> = (0..model.num_hidden_layers)
        .map(|layer| layer_type(layer).unwrap_or(LayerType::FullAttention))
        .collect();
    for (key, value) in [
        ("hidden_activation", json!(ACTIVATION)),
        ("query_pre_attn_scalar", json!(scalar)),
        ("layer_types", json!(layers)),
        ("sliding_window", json!(model.sliding_window)),
        (
            "final_logit_softcapping",
            json!(model.final_logit_softcapping),
        ),
    ] {
        config.insert(key.to_owned(), value);
    }
}

/// The parts that Gemma 2 and 3 share. Their norms are not offset yet.
pub(super) fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = Architecture::llama(config);
    // As f32, in which transformers holds it.
    architecture.embedding_scale = f64::from((config.hidden_size as f32).sqrt());
    architecture.logit_cap = config.final_logit_softcapping;
    let norm = |name| Some(NormPlan::new(config, name, config.hidden_size));
    let scalar = config
        .query_pre_attn_scalar
        .unwrap_or(config.head_dim() as f64);
    for block in &mut architecture.blocks {
        block.tokens.after = norm("post_attention_layernorm");
        block.mlp.before = norm("pre_feedforward_layernorm");
        block.mlp.after = norm("post_feedforward_layernorm");
        if let ChannelPlan::Mlp(mlp) = &mut block.mlp.mixer {
            mlp.gate = Gate::GEGLU;
        }
    }
    for (layer, attention) in architecture.attentions().enumerate() {
        let scores = &mut attention.scores;
        scores.scale = scalar.powf(-0.5);
        scores.window = config.sliding_window.filter(|_| has_window(config, layer));
    }
    architecture
}

pub(super) fn has_window(config: &DecoderConfig, layer: usize) -> bool {
    config.layer_types.get(layer) == Some(&LayerType::SlidingAttention)
}

//! Qwen3's mixtures of experts (<https://arxiv.org/abs/2505.09388>).

use candle_core::{Result, bail};
use serde_json::{Map, Value, json};

use crate::DecoderConfig;
use crate::config::architecture::{Architecture, ChannelPlan, ExpertsPlan, MapPlan, MlpPlan};
use crate::config::decoder_config::num_hidden_layers;
use crate::config::families::{Family, GgufLayout, interval, qwen3, set_default};
use crate::config::gguf_key::GgufField::Size;
use crate::config::gguf_key::GgufKey;
use crate::config::stack::{Part, Stack};
use crate::router::Router;

pub(super) const FAMILY: Family = Family {
    name: "qwen3_moe",
    transformers_class: "Qwen3MoeForCausalLM",
    keys: &[
        "attention_bias",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "mlp_only_layers",
    ],
    defaults: || {
        json!({
            "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
            "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 4,
            "max_position_embeddings": 32_768, "use_sliding_window": false, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        })
    },
    read,
    write: |model, config| {
        for (key, value) in [
            ("norm_topk_prob", json!(model.norm_topk_prob)),
            ("mlp_only_layers", json!(model.mlp_only_layers)),
            ("decoder_sparse_step", json!(1)),
        ] {
            config.insert(key.to_owned(), value);
        }
    },
    architecture,
    stacks,
    gguf: Some(GgufLayout {
        architecture: "qwen3moe",
        adjacent_pairs: false,
        names: &[
            ("mlp.gate", "ffn_gate_inp"),
            ("mlp.experts.gate_proj", "ffn_gate_exps"),
            ("mlp.experts.up_proj", "ffn_up_exps"),
            ("mlp.experts.down_proj", "ffn_down_exps"),
        ],
        keys: &[
            GgufKey::required("expert_count", Size(|c| &mut c.num_experts)),
            GgufKey::required("expert_used_count", Size(|c| &mut c.num_experts_per_tok)),
            GgufKey::required(
                "expert_feed_forward_length",
                Size(|c| &mut c.moe_intermediate_size),
            ),
        ],
        // In llama.cpp all blocks have experts, whose gates are divided by their sum.
        complete: |config| config.norm_topk_prob = true,
    }),
    ..qwen3::FAMILY
};

/// Every `decoder_sparse_step`-th block has experts, unless it is one of `mlp_only_layers`.
fn read(config: &mut Map<String, Value>) -> Result<()> {
    // The name in files of transformers 5.
    if let Some(experts) = config.remove("num_local_experts").filter(|x| !x.is_null()) {
        let stated = config.entry("num_experts").or_insert(experts.clone());
        if *stated != experts {
            bail!("num_local_experts: {experts}, must equal num_experts, which is {stated}");
        }
    }
    set_default(config, "num_experts", 128);
    let step = interval(config, "decoder_sparse_step", 1)?;
    let stated = config.remove("mlp_only_layers").unwrap_or_default();
    let mut dense: Vec<usize> = match serde_json::from_value(stated.clone()) {
        Ok(layers) => layers,
        Err(_) if stated.is_null() => Vec::new(),
        Err(_) => bail!("mlp_only_layers: {stated}, must be a list of whole numbers"),
    };
    if step > 1 {
        let layers = 0..num_hidden_layers(config)?;
        dense.extend(layers.filter(|layer| !(layer + 1).is_multiple_of(step)));
        dense.sort_unstable();
        dense.dedup();
    }
    config.insert("mlp_only_layers".to_owned(), json!(dense));
    Ok(())
}

/// Qwen3 with a mixture of experts in most blocks.
fn architecture(config: &DecoderConfig) -> Architecture {
    let mut architecture = (qwen3::FAMILY.architecture)(config);
    let expert = |expert: usize| {
        let name = format!("mlp.experts.{expert}");
        MlpPlan::new(config, &name, config.moe_intermediate_size)
    };
    for (layer, block) in architecture.blocks.iter_mut().enumerate() {
        if config.mlp_only_layers.contains(&layer) {
            continue;
        }
        block.mlp.mixer = ChannelPlan::Experts(ExpertsPlan {
            router: MapPlan::new("mlp.gate", config.hidden_size, config.num_experts),
            experts: (0..config.num_experts).map(expert).collect(),
            routing: if config.norm_topk_prob {
                Router::new(config.num_experts_per_tok)
            } else {
                Router::over_all_experts(config.num_experts_per_tok)
            },
        });
    }
    architecture
}

/// transformers 5 can store the experts of a block as two tensors. They are read; what is saved has
/// a tensor for each matrix, as published models have.
fn stacks(config: &DecoderConfig) -> Vec<Stack> {
    let (experts, hidden) = (config.num_experts, config.hidden_size);
    let inner = config.moe_intermediate_size;
    let mut stacks = Vec::new();
    for layer in (0..config.num_hidden_layers).filter(|x| !config.mlp_only_layers.contains(x)) {
        let name = format!("model.layers.{layer}.mlp.experts");
        let part = |expert: usize, map: &str, first: usize, rows: usize| Part {
            name: format!("{name}.{expert}.{map}.weight"),
            index: expert,
            rows: first..first.saturating_add(rows),
        };
        stacks.push(Stack {
            name: format!("{name}.gate_up_proj"),
            shape: [experts, inner.saturating_mul(2), hidden],
            parts: (0..experts)
                .flat_map(|expert| {
                    [
                        part(expert, "gate_proj", 0, inner),
                        part(expert, "up_proj", inner, inner),
                    ]
                })
                .collect(),
        });
        stacks.push(Stack {
            name: format!("{name}.down_proj"),
            shape: [experts, hidden, inner],
            parts: (0..experts)
                .map(|expert| part(expert, "down_proj", 0, hidden))
                .collect(),
        });
    }
    stacks
}

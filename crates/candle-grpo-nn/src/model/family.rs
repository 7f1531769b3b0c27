//! The families of decoders: the one place that lists how each differs from Llama.

use serde::{Deserialize, Serialize};

/// The family of a decoder, named as `model_type` in a Hugging Face `config.json`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// Llama. SmolLM 1 and 2 are Llamas.
    #[default]
    Llama,
    /// Llama with biases on the query, key and value projections. Qwen2.5 is a Qwen2.
    Qwen2,
    /// Llama with an RMSNorm on each head of query and key, before the rotation.
    Qwen3,
    /// Llama with blocks that do not rotate, see
    /// [`DecoderConfig::no_rope_layers`](crate::DecoderConfig::no_rope_layers).
    SmolLm3,
}

/// The properties of a family.
pub(crate) struct Family {
    /// `model_type` in `config.json`, and `general.architecture` in GGUF files.
    pub(crate) name: &'static str,
    /// The class in transformers, an entry of `architectures` in `config.json`.
    pub(crate) transformers_class: &'static str,
    /// The query, key and value projections always have a bias.
    pub(crate) input_biases: bool,
    /// `attention_bias` may be set.
    pub(crate) optional_attention_bias: bool,
    /// `mlp_bias` may be set.
    pub(crate) optional_mlp_bias: bool,
    /// Each head of query and key is normalized.
    pub(crate) head_norms: bool,
    /// `no_rope_layers` may be set.
    pub(crate) no_rope_layers: bool,
    /// `head_dim` of a `config.json` without this key, if it is not `hidden_size /
    /// num_attention_heads`.
    pub(crate) default_head_dim: Option<usize>,
    /// GGUF files store the two rows of a rotated pair side by side.
    pub(crate) gguf_adjacent_pairs: bool,
}

const LLAMA: Family = Family {
    name: "llama",
    transformers_class: "LlamaForCausalLM",
    input_biases: false,
    optional_attention_bias: true,
    optional_mlp_bias: true,
    head_norms: false,
    no_rope_layers: false,
    default_head_dim: None,
    gguf_adjacent_pairs: true,
};

impl ModelType {
    const ALL: [Self; 4] = [Self::Llama, Self::Qwen2, Self::Qwen3, Self::SmolLm3];

    pub(crate) fn family(self) -> Family {
        match self {
            Self::Llama => LLAMA,
            Self::Qwen2 => Family {
                name: "qwen2",
                transformers_class: "Qwen2ForCausalLM",
                input_biases: true,
                optional_attention_bias: false,
                optional_mlp_bias: false,
                gguf_adjacent_pairs: false,
                ..LLAMA
            },
            Self::Qwen3 => Family {
                name: "qwen3",
                transformers_class: "Qwen3ForCausalLM",
                optional_mlp_bias: false,
                head_norms: true,
                default_head_dim: Some(128),
                gguf_adjacent_pairs: false,
                ..LLAMA
            },
            Self::SmolLm3 => Family {
                name: "smollm3",
                transformers_class: "SmolLM3ForCausalLM",
                no_rope_layers: true,
                ..LLAMA
            },
        }
    }

    /// The names of all families.
    pub(crate) fn names() -> [&'static str; 4] {
        Self::ALL.map(|model_type| model_type.family().name)
    }

    /// The family with this name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|model_type| model_type.family().name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_serialized_model_types() {
        for model_type in ModelType::ALL {
            let name = model_type.family().name;
            assert_eq!(serde_json::to_value(model_type).unwrap(), name);
            assert_eq!(ModelType::from_name(name), Some(model_type));
        }
    }
}

//! The shape of a decoder.

use std::collections::BTreeMap;

use candle_core::{Result, Shape, bail};
use serde::{Deserialize, Serialize};

use crate::RopeScaling;

/// The family of a decoder, as `model_type` of a Hugging Face `config.json` names it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelType {
    /// Llama, and SmolLM 1 and 2, which are Llamas.
    #[default]
    Llama,
    /// Llama with biases on the query, key and value projections. Qwen2.5 is a Qwen2.
    Qwen2,
    /// Llama with an RMSNorm on each head of query and key, before the rotation.
    Qwen3,
    /// Llama with blocks that do not rotate, see [`DecoderConfig::no_rope_layers`].
    SmolLm3,
}

/// More blocks than any model has. Names and shapes are listed block by block before a weight is looked for, so a file
/// cannot ask for more.
const MAX_LAYERS: usize = 10_000;

/// The shape of a Llama-style decoder. The fields are named as in a Hugging Face `config.json`.
///
/// This is the shape only: a key of `config.json` that is not a field here, such as `rope_parameters`, is not read.
/// Who reads such a file must refuse or translate what these fields cannot say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecoderConfig {
    /// The family, a Llama if it is not given.
    #[serde(default)]
    pub model_type: ModelType,
    /// Number of token ids (V).
    pub vocab_size: usize,
    /// Width of the hidden states (H).
    pub hidden_size: usize,
    /// Width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of transformer blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; each serves `num_attention_heads / num_key_value_heads` query heads.
    pub num_key_value_heads: usize,
    /// Width of one head. `None` means `hidden_size / num_attention_heads`.
    #[serde(default)]
    pub head_dim: Option<usize>,
    /// Added to the mean square in every RMSNorm.
    #[serde(default = "default_rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// What is done to the rotary frequencies for rows longer than those of pretraining.
    #[serde(default)]
    pub rope_scaling: RopeScaling,
    /// One number a block: 1 where positions rotate, 0 where they do not (SmolLM3's own key, the name notwithstanding).
    /// Empty means that all rotate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_rope_layers: Vec<u8>,
    /// The most positions that one row may have.
    pub max_position_embeddings: usize,
    /// Whether the output layer uses the embedding matrix instead of a matrix of its own.
    #[serde(default)]
    pub tie_word_embeddings: bool,
}

fn default_rms_norm_eps() -> f64 {
    1e-6
}

fn default_rope_theta() -> f64 {
    1e4
}

impl DecoderConfig {
    /// Checks that the numbers describe a decoder; the error names the first field that does not.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            if value == 0 {
                bail!("{name} is 0, it must be at least 1");
            }
        }
        if self.num_hidden_layers > MAX_LAYERS {
            bail!(
                "num_hidden_layers is {}, it must be at most {MAX_LAYERS}",
                self.num_hidden_layers
            );
        }
        if u32::try_from(self.vocab_size).is_err() {
            bail!("vocab_size is {}, it must fit in 32 bits", self.vocab_size);
        }
        if !self
            .num_attention_heads
            .is_multiple_of(self.num_key_value_heads)
        {
            bail!(
                "num_attention_heads is {}, it must be a multiple of num_key_value_heads, which is {}",
                self.num_attention_heads,
                self.num_key_value_heads
            );
        }
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            bail!(
                "hidden_size is {}, without head_dim it must be a multiple of num_attention_heads, which is {}",
                self.hidden_size,
                self.num_attention_heads
            );
        }
        let head_dim = self.head_dim();
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            bail!(
                "head_dim is {head_dim}, it must be even and at least 2, as rotary embedding turns pairs"
            );
        }
        for (name, value) in [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
        ] {
            if !(value.is_finite() && value > 0.0) {
                bail!("{name} is {value}, it must be finite and positive");
            }
        }
        if !self.no_rope_layers.is_empty() {
            if self.model_type != ModelType::SmolLm3 {
                bail!(
                    "no_rope_layers is {:?}, for model_type {:?} it must be empty",
                    self.no_rope_layers,
                    self.model_type
                );
            }
            if self.no_rope_layers.len() != self.num_hidden_layers
                || self.no_rope_layers.iter().any(|&rotates| rotates > 1)
            {
                bail!(
                    "no_rope_layers is {:?}, it must be empty or {} zeros and ones, one a block",
                    self.no_rope_layers,
                    self.num_hidden_layers
                );
            }
        }
        self.rope_scaling.validate()
    }

    /// Whether query, key and value projections have a bias.
    pub(crate) fn has_projection_biases(&self) -> bool {
        self.model_type == ModelType::Qwen2
    }

    /// Whether each head of query and key is normalised.
    pub(crate) fn has_head_norms(&self) -> bool {
        self.model_type == ModelType::Qwen3
    }

    /// Whether query and key of this block are rotated.
    pub(crate) fn rotates(&self, layer: usize) -> bool {
        self.no_rope_layers.get(layer) != Some(&0)
    }

    /// Width of one head: the field if it is given, else `hidden_size / num_attention_heads`.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or_else(|| {
            self.hidden_size
                .checked_div(self.num_attention_heads)
                .unwrap_or(0)
        })
    }

    /// The Hugging Face name and the shape of every parameter, in sorted order.
    ///
    /// With tied embeddings there is no `lm_head.weight`.
    pub fn parameter_shapes(&self) -> BTreeMap<String, Shape> {
        let hidden = self.hidden_size;
        let queries = self.num_attention_heads.saturating_mul(self.head_dim());
        let keys = self.num_key_value_heads.saturating_mul(self.head_dim());
        let mut shapes = BTreeMap::new();
        shapes.insert(
            "model.embed_tokens.weight".to_owned(),
            Shape::from((self.vocab_size, hidden)),
        );
        shapes.insert("model.norm.weight".to_owned(), Shape::from(hidden));
        if !self.tie_word_embeddings {
            shapes.insert(
                "lm_head.weight".to_owned(),
                Shape::from((self.vocab_size, hidden)),
            );
        }
        for layer in 0..self.num_hidden_layers {
            for (name, shape) in [
                ("input_layernorm", Shape::from(hidden)),
                ("post_attention_layernorm", Shape::from(hidden)),
                ("self_attn.q_proj", Shape::from((queries, hidden))),
                ("self_attn.k_proj", Shape::from((keys, hidden))),
                ("self_attn.v_proj", Shape::from((keys, hidden))),
                ("self_attn.o_proj", Shape::from((hidden, queries))),
                (
                    "mlp.gate_proj",
                    Shape::from((self.intermediate_size, hidden)),
                ),
                ("mlp.up_proj", Shape::from((self.intermediate_size, hidden))),
                (
                    "mlp.down_proj",
                    Shape::from((hidden, self.intermediate_size)),
                ),
            ] {
                shapes.insert(format!("model.layers.{layer}.{name}.weight"), shape);
            }
            let attention = format!("model.layers.{layer}.self_attn");
            if self.has_projection_biases() {
                for (name, width) in [("q_proj", queries), ("k_proj", keys), ("v_proj", keys)] {
                    shapes.insert(format!("{attention}.{name}.bias"), Shape::from(width));
                }
            }
            if self.has_head_norms() {
                for name in ["q_norm", "k_norm"] {
                    let shape = Shape::from(self.head_dim());
                    shapes.insert(format!("{attention}.{name}.weight"), shape);
                }
            }
        }
        shapes
    }
}

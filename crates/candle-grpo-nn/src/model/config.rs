//! The configuration of a decoder.

use std::collections::BTreeMap;

use candle_core::{Result, Shape};
use candle_grpo_core::validate::{self, Name, check};
use serde::{Deserialize, Serialize};

use crate::model::family::ModelType;
use crate::model::rope_scaling::RopeScaling;

/// Upper bound of `num_hidden_layers`. Parameter names are listed block by block before a weight is
/// read, so that a file cannot ask for a longer list.
const MAX_LAYERS: usize = 10_000;

/// The configuration of a Llama-style decoder. The fields are named as in a Hugging Face
/// `config.json`.
///
/// Deserializing it ignores keys that are not fields here. Use [`Self::from_hugging_face`] to read
/// a `config.json`: it translates or refuses every key that changes the computation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecoderConfig {
    /// The family. Default: Llama.
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
    /// Number of key and value heads; each serves `num_attention_heads / num_key_value_heads`
    /// query heads.
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
    /// The change of the rotary frequencies for rows longer than those of pretraining.
    #[serde(default)]
    pub rope_scaling: RopeScaling,
    /// One number for each block: 1 if its positions rotate, 0 if they do not. This is SmolLM3's
    /// own key, despite its name. Empty: all rotate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_rope_layers: Vec<u8>,
    /// Maximum number of positions of a row.
    pub max_position_embeddings: usize,
    /// Shares the embedding matrix with the output layer.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Adds a bias to all four projections of attention. Must be false for Qwen2, where three have
    /// one.
    #[serde(default, skip_serializing_if = "is_false")]
    pub attention_bias: bool,
    /// Adds a bias to the three projections of the feed-forward layer. Llama and SmolLM3 only.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mlp_bias: bool,
}

fn default_rms_norm_eps() -> f64 {
    1e-6
}

fn default_rope_theta() -> f64 {
    1e4
}

fn is_false(flag: &bool) -> bool {
    !flag
}

/// The defaults of Hugging Face's `LlamaConfig`, which is a Llama with 7 billion parameters.
impl Default for DecoderConfig {
    fn default() -> Self {
        Self {
            model_type: ModelType::Llama,
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: None,
            rms_norm_eps: default_rms_norm_eps(),
            rope_theta: default_rope_theta(),
            rope_scaling: RopeScaling::Default,
            no_rope_layers: Vec::new(),
            max_position_embeddings: 2048,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
        }
    }
}

impl DecoderConfig {
    /// Checks that the fields describe a decoder.
    ///
    /// # Errors
    ///
    /// Names the first field that does not fit, its value and what it must be.
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
            validate::at_least_one(name, value)?;
        }
        let family = self.model_type.family();
        let (heads, key_value_heads) = (self.num_attention_heads, self.num_key_value_heads);
        check(
            self.num_hidden_layers <= MAX_LAYERS,
            "num_hidden_layers",
            self.num_hidden_layers,
            &format!("be at most {MAX_LAYERS}"),
        )?;
        check(
            u32::try_from(self.vocab_size).is_ok(),
            "vocab_size",
            self.vocab_size,
            "fit in 32 bits",
        )?;
        check(
            heads.is_multiple_of(key_value_heads),
            "num_attention_heads",
            heads,
            &format!("be a multiple of num_key_value_heads, which is {key_value_heads}"),
        )?;
        check(
            self.head_dim.is_some() || self.hidden_size.is_multiple_of(heads),
            "hidden_size",
            self.hidden_size,
            &format!("be a multiple of num_attention_heads, which is {heads}, without head_dim"),
        )?;
        let head_dim = self.head_dim();
        check(
            head_dim > 0 && head_dim.is_multiple_of(2),
            "head_dim",
            head_dim,
            "be even and at least 2, as rotary embedding rotates pairs",
        )?;
        validate::positive("rms_norm_eps", self.rms_norm_eps)?;
        validate::positive("rope_theta", self.rope_theta)?;
        let rotates = format!("{:?}", self.no_rope_layers);
        check(
            self.no_rope_layers.is_empty() || family.no_rope_layers,
            "no_rope_layers",
            &rotates,
            &format!("be empty for model_type {}", Name(&self.model_type)),
        )?;
        check(
            self.no_rope_layers.is_empty()
                || self.no_rope_layers.len() == self.num_hidden_layers
                    && self.no_rope_layers.iter().all(|&rotates| rotates <= 1),
            "no_rope_layers",
            &rotates,
            &format!(
                "be empty or {} zeros and ones, one for each block",
                self.num_hidden_layers
            ),
        )?;
        for (name, value, possible) in [
            (
                "attention_bias",
                self.attention_bias,
                family.optional_attention_bias,
            ),
            ("mlp_bias", self.mlp_bias, family.optional_mlp_bias),
        ] {
            check(
                possible || !value,
                name,
                value,
                &format!("be false for model_type {}", Name(&self.model_type)),
            )?;
        }
        Ok(self.rope_scaling.validate("rope_scaling")?)
    }

    /// Returns whether the query, key and value projections have a bias. That of the output
    /// projection is `attention_bias`.
    pub(crate) fn has_input_biases(&self) -> bool {
        self.attention_bias || self.model_type.family().input_biases
    }

    /// Returns whether each head of query and key is normalized.
    pub(crate) fn has_head_norms(&self) -> bool {
        self.model_type.family().head_norms
    }

    /// Returns whether query and key of block `layer` are rotated.
    pub(crate) fn rotates(&self, layer: usize) -> bool {
        self.no_rope_layers.get(layer) != Some(&0)
    }

    /// Width of one head: the field if present, else `hidden_size / num_attention_heads`.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or_else(|| {
            self.hidden_size
                .checked_div(self.num_attention_heads)
                .unwrap_or(0)
        })
    }

    /// The factor of the scores of attention.
    pub(crate) fn attention_scale(&self) -> f64 {
        (self.head_dim() as f64).powf(-0.5)
    }

    /// The Hugging Face name and the shape of every parameter, in sorted order.
    ///
    /// With tied embeddings there is no `lm_head.weight`.
    pub fn parameter_shapes(&self) -> BTreeMap<String, Shape> {
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let queries = self.num_attention_heads.saturating_mul(self.head_dim());
        let keys = self.num_key_value_heads.saturating_mul(self.head_dim());
        let (input_bias, output_bias, mlp_bias) =
            (self.has_input_biases(), self.attention_bias, self.mlp_bias);
        let linear_maps = [
            ("self_attn.q_proj", queries, hidden, input_bias),
            ("self_attn.k_proj", keys, hidden, input_bias),
            ("self_attn.v_proj", keys, hidden, input_bias),
            ("self_attn.o_proj", hidden, queries, output_bias),
            ("mlp.gate_proj", inner, hidden, mlp_bias),
            ("mlp.up_proj", inner, hidden, mlp_bias),
            ("mlp.down_proj", hidden, inner, mlp_bias),
        ];
        let mut norms = vec![
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
        ];
        if self.has_head_norms() {
            norms.extend(
                ["self_attn.q_norm", "self_attn.k_norm"].map(|name| (name, self.head_dim())),
            );
        }
        let mut shapes = BTreeMap::new();
        let mut insert = |name: String, shape: Shape| shapes.insert(name, shape);
        insert(
            "model.embed_tokens.weight".to_owned(),
            Shape::from((self.vocab_size, hidden)),
        );
        insert("model.norm.weight".to_owned(), Shape::from(hidden));
        if !self.tie_word_embeddings {
            insert(
                "lm_head.weight".to_owned(),
                Shape::from((self.vocab_size, hidden)),
            );
        }
        for layer in 0..self.num_hidden_layers {
            let block = format!("model.layers.{layer}");
            for (name, outputs, inputs, bias) in linear_maps {
                insert(
                    format!("{block}.{name}.weight"),
                    Shape::from((outputs, inputs)),
                );
                if bias {
                    insert(format!("{block}.{name}.bias"), Shape::from(outputs));
                }
            }
            for (name, width) in &norms {
                insert(format!("{block}.{name}.weight"), Shape::from(*width));
            }
        }
        shapes
    }
}

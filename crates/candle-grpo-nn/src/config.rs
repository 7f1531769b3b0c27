//! The shape of a decoder.

use std::collections::BTreeMap;

use candle_core::{Result, Shape, bail};
use serde::{Deserialize, Serialize};

/// The shape of a Llama-style decoder. The fields are named as in a Hugging Face `config.json`.
///
/// This is the shape only: a key of `config.json` that is not a field here, such as `rope_scaling` or
/// `rope_parameters`, is not read. Who reads such a file must refuse or translate what these fields cannot say.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecoderConfig {
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
        Ok(())
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
        }
        shapes
    }
}

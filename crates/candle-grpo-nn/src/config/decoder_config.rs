//! Decoder configuration.

use std::collections::BTreeMap;

use candle_core::{Error, Result, Shape, bail};
use candle_grpo_core::validate::{self, Name, check};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config::architecture::{Architecture, BlockPlan, ChannelPlan, Parameter};
use crate::config::families::ModelType;
use crate::config::rope_scaling::RopeScaling;
use candle_grpo_base::json;

/// Upper bound for `num_hidden_layers`. Parameter names are listed block by block before any weight
/// is read, so this keeps a file from requesting an endless list.
const MAX_LAYERS: usize = 10_000;

/// Upper bound for `num_hidden_layers * num_experts`, for the same reason.
const MAX_EXPERTS: usize = 100_000;

/// Decoder configuration. Fields are named as in a Hugging Face `config.json`.
///
/// Deserialization ignores unknown keys. To read a `config.json`, use [`Self::from_hugging_face`],
/// which translates or rejects every key that changes the computation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DecoderConfig {
    /// Model family. Defaults to Llama.
    #[serde(default)]
    pub model_type: ModelType,
    /// Vocabulary size (V).
    pub vocab_size: usize,
    /// Hidden size (H).
    pub hidden_size: usize,
    /// Inner width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Number of transformer blocks.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads. Each serves `num_attention_heads / num_key_value_heads`
    /// query heads.
    pub num_key_value_heads: usize,
    /// Head width. `None` means `hidden_size / num_attention_heads`.
    #[serde(default)]
    pub head_dim: Option<usize>,
    /// Added to the mean square in every RMSNorm.
    #[serde(default = "default_rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Rotary frequency base.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Scales the rotary frequencies for rows longer than in pretraining.
    #[serde(default)]
    pub rope_scaling: RopeScaling,
    /// Fraction of each head that rotates, counted from its first element. Phi-3 and Qwen3.5 only.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub partial_rotary_factor: f64,
    /// One number per block: 1 if its positions rotate, 0 if they do not. The name is SmolLM3's.
    /// If empty, all blocks rotate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_rope_layers: Vec<u8>,
    /// Maximum row length in tokens.
    pub max_position_embeddings: usize,
    /// Shares the embedding matrix with the output layer.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Adds a bias to all four attention projections. Must be false for Qwen2, where three of them
    /// always have one, and for Mistral and Phi-3.
    #[serde(default, skip_serializing_if = "is_false")]
    pub attention_bias: bool,
    /// Adds a bias to the three feed-forward projections. Llama, SmolLM3 and Granite only.
    #[serde(default, skip_serializing_if = "is_false")]
    pub mlp_bias: bool,
    /// Attention window in tokens, including the current one. It applies to all blocks in Mistral
    /// and Phi-3, and to those that [`Self::layer_types`] selects in Gemma. `None` means full
    /// attention.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<usize>,
    /// One entry per block, for Gemma and Qwen3.5. If empty, all blocks have full attention.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layer_types: Vec<LayerType>,
    /// Rotary frequency base for blocks with a window. Gemma 3 only; `None` means
    /// [`Self::rope_theta`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_local_base_freq: Option<f64>,
    /// Width of the convolution before the gated delta rule. Qwen3.5 only, like the next four.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_conv_kernel_dim: Option<usize>,
    /// Query and key width in the gated delta rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_key_head_dim: Option<usize>,
    /// Value width in the gated delta rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_value_head_dim: Option<usize>,
    /// Number of query and key heads in the gated delta rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_num_key_heads: Option<usize>,
    /// Number of value heads in the gated delta rule, a multiple of the number of key heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linear_num_value_heads: Option<usize>,
    /// Attention scores are multiplied by `query_pre_attn_scalar^-1/2`. Gemma only; `None` means
    /// `head_dim`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub query_pre_attn_scalar: Option<f64>,
    /// Soft cap for attention scores, see [`Scores`](candle_grpo_kernels::Scores). Gemma 2 only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attn_logit_softcapping: Option<f64>,
    /// Soft cap for the logits, see [`soft_cap`](candle_grpo_kernels::soft_cap). Gemma only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub final_logit_softcapping: Option<f64>,
    /// Number of experts in a feed-forward layer. Mixtures of experts only, like the next four.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub num_experts: usize,
    /// Number of experts that process each token.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub num_experts_per_tok: usize,
    /// Inner width of an expert.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub moe_intermediate_size: usize,
    /// Normalizes each token's gates to sum to 1.
    #[serde(default, skip_serializing_if = "is_false")]
    pub norm_topk_prob: bool,
    /// Blocks with a dense layer of width [`Self::intermediate_size`] instead of experts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mlp_only_layers: Vec<usize>,
    /// Multiplies the embedding. Granite only.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub embedding_multiplier: f64,
    /// Multiplies each sublayer's output before it is added to the hidden states. Granite only.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub residual_multiplier: f64,
    /// Multiplies the attention scores, in place of `head_dim^-1/2`. Granite only.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub attention_multiplier: f64,
    /// Divides the logits, and the hidden states after the last norm. Granite only.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub logits_scaling: f64,
}

/// The tokens that a block attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LayerType {
    /// All tokens up to its own position.
    FullAttention,
    /// The nearest [`DecoderConfig::sliding_window`] tokens up to its own position. Gemma only.
    SlidingAttention,
    /// All tokens up to its own position, through a fixed-size state:
    /// [`gated_delta_rule`](candle_grpo_kernels::gated_delta_rule()). Qwen3.5 only.
    LinearAttention,
}

fn one() -> f64 {
    1.0
}

fn is_zero(x: &usize) -> bool {
    *x == 0
}

fn is_one(x: &f64) -> bool {
    *x == 1.0
}

/// Fields that every family has. [`Family::keys`](crate::config::families::Family) lists the
/// others.
const COMMON: [&str; 13] = [
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "tie_word_embeddings",
];

/// Reads `num_hidden_layers` from a `config.json`, to build a list with one entry per block.
pub(crate) fn num_hidden_layers(config: &Map<String, Value>) -> Result<usize> {
    const KEY: &str = "num_hidden_layers";
    let Some(found) = config.get(KEY) else {
        bail!("{KEY}: absent, must be given");
    };
    let layers = found
        .as_u64()
        .and_then(|layers| usize::try_from(layers).ok());
    let Some(layers) = layers else {
        bail!("{KEY}: {found}, must be {}", json::kind("usize"));
    };
    check_layers(layers)?;
    Ok(layers)
}

fn check_layers(layers: usize) -> validate::Checked {
    let must = format!("be at most {MAX_LAYERS}");
    check(layers <= MAX_LAYERS, "num_hidden_layers", layers, &must)
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

/// The defaults from Hugging Face's `LlamaConfig`, a Llama with 7 billion parameters.
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
            partial_rotary_factor: one(),
            no_rope_layers: Vec::new(),
            max_position_embeddings: 2048,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            sliding_window: None,
            layer_types: Vec::new(),
            rope_local_base_freq: None,
            linear_conv_kernel_dim: None,
            linear_key_head_dim: None,
            linear_value_head_dim: None,
            linear_num_key_heads: None,
            linear_num_value_heads: None,
            query_pre_attn_scalar: None,
            attn_logit_softcapping: None,
            final_logit_softcapping: None,
            num_experts: 0,
            num_experts_per_tok: 0,
            moe_intermediate_size: 0,
            norm_topk_prob: false,
            mlp_only_layers: Vec::new(),
            embedding_multiplier: one(),
            residual_multiplier: one(),
            attention_multiplier: one(),
            logits_scaling: one(),
        }
    }
}

impl DecoderConfig {
    /// Checks that the fields describe a valid decoder.
    ///
    /// # Errors
    ///
    /// Names the first invalid field, its value and the requirement.
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
        let (heads, key_value_heads) = (self.num_attention_heads, self.num_key_value_heads);
        check_layers(self.num_hidden_layers)?;
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
        let width = self.rotary_width();
        check(
            width > 0 && width.is_multiple_of(2) && width <= head_dim,
            "partial_rotary_factor",
            self.partial_rotary_factor,
            &format!("make an even number of at least 2 of head_dim, which is {head_dim}"),
        )?;
        validate::positive("rms_norm_eps", self.rms_norm_eps)?;
        validate::positive("rope_theta", self.rope_theta)?;
        self.check_keys()?;
        check(
            self.no_rope_layers.is_empty()
                || self.no_rope_layers.len() == self.num_hidden_layers
                    && self.no_rope_layers.iter().all(|&rotates| rotates <= 1),
            "no_rope_layers",
            format!("{:?}", self.no_rope_layers),
            &format!(
                "be empty or {} zeros and ones, one for each block",
                self.num_hidden_layers
            ),
        )?;
        check(
            self.layer_types.is_empty() || self.layer_types.len() == self.num_hidden_layers,
            "layer_types",
            format!("{} entries", self.layer_types.len()),
            &format!(
                "be empty or have {} entries, one for each block",
                self.num_hidden_layers
            ),
        )?;
        self.check_experts()?;
        validate::at_least_one("sliding_window", self.sliding_window.unwrap_or(1))?;
        self.check_layer_types()?;
        for (name, value) in [
            ("rope_local_base_freq", self.rope_local_base_freq),
            ("query_pre_attn_scalar", self.query_pre_attn_scalar),
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("embedding_multiplier", Some(self.embedding_multiplier)),
            ("residual_multiplier", Some(self.residual_multiplier)),
            ("attention_multiplier", Some(self.attention_multiplier)),
            ("logits_scaling", Some(self.logits_scaling)),
        ] {
            validate::positive(name, value.unwrap_or(1.0))?;
        }
        self.rope_scaling.validate("rope_scaling")?;
        Ok(self
            .rope_scaling
            .validate_pairs("rope_scaling", width / 2)?)
    }

    /// Prepares the configuration for rows with up to `tokens` tokens. With
    /// [`RopeScaling::LongRope`] it selects the short-row frequencies if the rows fit. Otherwise it
    /// changes nothing.
    #[must_use]
    pub fn for_rows_of(mut self, tokens: usize) -> Self {
        if let RopeScaling::LongRope {
            original_max_position_embeddings: original,
            short_rows,
            ..
        } = &mut self.rope_scaling
        {
            *short_rows = tokens <= *original;
        }
        self
    }

    /// Returns the maximum row length in tokens.
    pub fn longest_row(&self) -> usize {
        match self.rope_scaling {
            RopeScaling::LongRope {
                original_max_position_embeddings: original,
                short_rows: true,
                ..
            } => original.min(self.max_position_embeddings),
            _ => self.max_position_embeddings,
        }
    }

    /// Checks the block types and the sizes that they require.
    fn check_layer_types(&self) -> Result<()> {
        let known = self.model_type.family().layer_types;
        if let Some(other) = self.layer_types.iter().find(|x| !known.contains(x)) {
            let must = format!("be absent for model_type {}", Name(&self.model_type));
            check(false, "layer_types", Name(other), &must)?;
        }
        if !self.layer_types.contains(&LayerType::LinearAttention) {
            return Ok(());
        }
        for (name, size) in [
            ("linear_conv_kernel_dim", self.linear_conv_kernel_dim),
            ("linear_key_head_dim", self.linear_key_head_dim),
            ("linear_value_head_dim", self.linear_value_head_dim),
            ("linear_num_key_heads", self.linear_num_key_heads),
            ("linear_num_value_heads", self.linear_num_value_heads),
        ] {
            validate::at_least_one(name, size.unwrap_or(0))?;
        }
        let key_heads = self.linear_num_key_heads.unwrap_or(1);
        let value_heads = self.linear_num_value_heads.unwrap_or(1);
        check(
            value_heads.is_multiple_of(key_heads),
            "linear_num_value_heads",
            value_heads,
            &format!("be a multiple of linear_num_key_heads, which is {key_heads}"),
        )?;
        Ok(())
    }

    /// Checks that fields this family does not have are unset.
    fn check_keys(&self) -> Result<()> {
        let keys = self.model_type.family().keys;
        let fields = serde_json::to_value(self).map_err(Error::wrap)?;
        for (name, value) in fields.as_object().into_iter().flatten() {
            let must = match value {
                Value::Bool(_) => "be false",
                _ => "be absent",
            };
            check(
                COMMON.contains(&name.as_str()) || keys.contains(&name.as_str()),
                name,
                value,
                &format!("{must} for model_type {}", Name(&self.model_type)),
            )?;
        }
        Ok(())
    }

    /// Checks the mixture-of-experts fields, for a family that has them.
    fn check_experts(&self) -> Result<()> {
        if !self.model_type.family().keys.contains(&"num_experts") {
            return Ok(());
        }
        let (experts, chosen) = (self.num_experts, self.num_experts_per_tok);
        validate::at_least_one("num_experts", experts)?;
        validate::at_least_one("moe_intermediate_size", self.moe_intermediate_size)?;
        let layers = self.num_hidden_layers;
        let most = MAX_EXPERTS / layers;
        check(
            experts <= most,
            "num_experts",
            experts,
            &format!("be at most {most} with {layers} blocks"),
        )?;
        check(
            (1..=experts).contains(&chosen),
            "num_experts_per_tok",
            chosen,
            &format!("be at least 1 and at most num_experts, which is {experts}"),
        )?;
        Ok(())
    }

    /// Builds the decoder's architecture.
    pub(crate) fn architecture(&self) -> Architecture {
        (self.model_type.family().architecture)(self)
    }

    /// Returns whether any block is a mixture of experts.
    pub fn has_experts(&self) -> bool {
        let blocks = self.architecture().blocks;
        let is_mixture = |block: &BlockPlan| matches!(block.mlp.mixer, ChannelPlan::Experts(_));
        blocks.iter().any(is_mixture)
    }

    /// Returns whether any block has a recurrent state, as the gated delta rule.
    pub fn has_states(&self) -> bool {
        let blocks = self.architecture().blocks;
        let has_state = |block: &BlockPlan| block.tokens.mixer.has_state();
        blocks.iter().any(has_state)
    }

    /// Head width: the field if present, else `hidden_size / num_attention_heads`.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or_else(|| {
            self.hidden_size
                .checked_div(self.num_attention_heads)
                .unwrap_or(0)
        })
    }

    /// Number of elements in each head that rotate.
    pub(crate) fn rotary_width(&self) -> usize {
        (self.head_dim() as f64 * self.partial_rotary_factor) as usize
    }

    /// Every parameter's Hugging Face name and shape, in sorted order.
    ///
    /// With tied embeddings there is no `lm_head.weight`.
    pub fn parameter_shapes(&self) -> BTreeMap<String, Shape> {
        let parameters = self.architecture().parameters(self);
        let shape = |(name, parameter): (String, Parameter)| (name, parameter.shape);
        parameters.into_iter().map(shape).collect()
    }
}

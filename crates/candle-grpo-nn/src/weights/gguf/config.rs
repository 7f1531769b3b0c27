//! The configuration of a decoder from the metadata of its file.

use candle_core::{Result, bail};

use super::header::Header;
use super::{GgufValue, rope};
use crate::{DecoderConfig, ModelType};

pub(super) const EMBEDDING: &str = "token_embd.weight";
pub(super) const OUTPUT: &str = "output.weight";
/// Present if all projections of attention have biases; for Qwen2 three have them in any case.
const ATTENTION_BIAS: &str = "blk.0.attn_q.bias";
/// Present if the projections of feed-forward layers have biases.
const MLP_BIAS: &str = "blk.0.ffn_gate.bias";

/// The files of SmolLM3 do not state which blocks rotate. In llama.cpp every fourth does not.
const SMOLLM3_NO_ROPE_INTERVAL: usize = 4;

/// Reads the configuration. `rope_factors` reads the tensor of divisors of rotary frequencies, if
/// there is one.
pub(super) fn read(
    header: &Header,
    rope_factors: impl FnOnce() -> Result<Option<Vec<f32>>>,
) -> Result<DecoderConfig> {
    let keys = Keys::new(header)?;
    refuse_other_computations(&keys)?;
    let num_hidden_layers = keys.size("block_count")?;
    if num_hidden_layers > header.tensors.len() {
        bail!(
            "{}.block_count: {num_hidden_layers}, must be at most the number of tensors, which is {}",
            keys.architecture,
            header.tensors.len()
        );
    }
    let hidden_size = keys.size("embedding_length")?;
    let Some(embedding) = header.tensors.get(EMBEDDING) else {
        bail!("tensor {EMBEDDING}: absent, must be present");
    };
    let &[vocab_size, _] = embedding.dims.as_slice() else {
        bail!(
            "tensor {EMBEDDING}: shape {:?}, must have two dimensions",
            embedding.dims
        );
    };
    if let Some(stated) = keys.optional_size("vocab_size")?
        && stated != vocab_size
    {
        bail!(
            "{}.vocab_size: {stated}, must be the number of rows of {EMBEDDING}, which is {vocab_size}",
            keys.architecture
        );
    }
    let num_attention_heads = keys.size("attention.head_count")?;
    let head_dim = keys.optional_size("attention.key_length")?;
    let rope_theta = keys.optional_number("rope.freq_base")?.unwrap_or(1e4);
    let has_key = |key| keys.model_type.family().keys.contains(&key);
    let mut config = DecoderConfig {
        model_type: keys.model_type,
        vocab_size,
        hidden_size,
        intermediate_size: keys.size("feed_forward_length")?,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads: keys
            .optional_size("attention.head_count_kv")?
            .unwrap_or(num_attention_heads),
        head_dim,
        rms_norm_eps: keys.number("attention.layer_norm_rms_epsilon")?,
        rope_theta,
        rope_scaling: rope::metadata_scaling(&keys)?,
        no_rope_layers: if has_key("no_rope_layers") {
            (1..=num_hidden_layers)
                .map(|layer| u8::from(!layer.is_multiple_of(SMOLLM3_NO_ROPE_INTERVAL)))
                .collect()
        } else {
            Vec::new()
        },
        max_position_embeddings: keys.size("context_length")?,
        tie_word_embeddings: !header.tensors.contains_key(OUTPUT),
        attention_bias: has_key("attention_bias") && header.tensors.contains_key(ATTENTION_BIAS),
        mlp_bias: header.tensors.contains_key(MLP_BIAS),
        ..DecoderConfig::default()
    };
    config.validate()?;
    for key in ["attention.value_length", "rope.dimension_count"] {
        if let Some(width) = keys.optional_size(key)?
            && width != config.head_dim()
        {
            bail!(
                "{}.{key}: {width}, must be the width of a head, which is {}",
                keys.architecture,
                config.head_dim()
            );
        }
    }
    if let Some(factors) = rope_factors()? {
        config.rope_scaling = rope::tensor_scaling(&config, &factors)?;
        config.validate()?;
    }
    Ok(config)
}

/// Refuses keys of models with another computation.
fn refuse_other_computations(keys: &Keys) -> Result<()> {
    if let Some(value) = keys.header.metadata.get("split.count")
        && value.as_u64().is_none_or(|count| count > 1)
    {
        bail!("split.count: {value}, must be 1");
    }
    for key in [
        "expert_count",
        "attention.sliding_window",
        "attention.max_alibi_bias",
        "attention.clamp_kqv",
        "attention.scale",
        "logit_scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "residual_scale",
        "embedding_scale",
    ] {
        if let Some(value) = keys.get(key)
            && value.as_f64() != Some(0.0)
        {
            bail!("{}.{key}: {value}, must be absent", keys.architecture);
        }
    }
    Ok(())
}

/// The keys of one architecture.
pub(super) struct Keys<'a> {
    header: &'a Header,
    pub(super) architecture: &'static str,
    model_type: ModelType,
}

impl<'a> Keys<'a> {
    fn new(header: &'a Header) -> Result<Self> {
        const KEY: &str = "general.architecture";
        let known = ModelType::gguf_architectures();
        let Some(value) = header.metadata.get(KEY) else {
            bail!("{KEY}: absent, must be one of {known:?}");
        };
        let found = value.as_str().and_then(ModelType::from_gguf_architecture);
        let Some((model_type, layout)) = found else {
            bail!("{KEY}: {value}, must be one of {known:?}");
        };
        Ok(Self {
            header,
            architecture: layout.architecture,
            model_type,
        })
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a GgufValue> {
        self.header
            .metadata
            .get(&format!("{}.{key}", self.architecture))
    }

    fn size(&self, key: &str) -> Result<usize> {
        match self.optional_size(key)? {
            Some(size) => Ok(size),
            None => bail!("{}.{key}: absent, must be present", self.architecture),
        }
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|size| usize::try_from(size).ok()) {
            Some(size) => Ok(Some(size)),
            None => bail!(
                "{}.{key}: {value}, must be one whole number",
                self.architecture
            ),
        }
    }

    fn number(&self, key: &str) -> Result<f64> {
        match self.optional_number(key)? {
            Some(number) => Ok(number),
            None => bail!("{}.{key}: absent, must be present", self.architecture),
        }
    }

    pub(super) fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) => Ok(Some(number)),
            None => bail!("{}.{key}: {value}, must be a number", self.architecture),
        }
    }
}

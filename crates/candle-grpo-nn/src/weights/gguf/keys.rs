//! Metadata keys in a file.

use candle_core::{Result, bail};

use super::GgufValue;
use super::header::Header;
use crate::config::families::GgufLayout;
use crate::config::gguf_key::{GgufField, GgufKey};
use crate::{DecoderConfig, ModelType};

use GgufField::{Number, OptionalNumber, OptionalSize, Size};

/// Keys that all families share.
pub(super) const COMMON: [GgufKey; 9] = [
    GgufKey::required("block_count", Size(|c| &mut c.num_hidden_layers)),
    GgufKey::required("embedding_length", Size(|c| &mut c.hidden_size)),
    GgufKey::required("feed_forward_length", Size(|c| &mut c.intermediate_size)),
    GgufKey::required("context_length", Size(|c| &mut c.max_position_embeddings)),
    GgufKey::required("attention.head_count", Size(|c| &mut c.num_attention_heads)),
    GgufKey::optional(
        "attention.head_count_kv",
        Size(|c| &mut c.num_key_value_heads),
    ),
    GgufKey::optional("attention.key_length", OptionalSize(|c| &mut c.head_dim)),
    GgufKey::required(
        "attention.layer_norm_rms_epsilon",
        Number(|c| &mut c.rms_norm_eps),
    ),
    GgufKey::optional("rope.freq_base", Number(|c| &mut c.rope_theta)),
];

impl GgufKey {
    /// Sets the `config` field from the file's value.
    pub(super) fn read(&self, keys: &Keys, config: &mut DecoderConfig) -> Result<()> {
        let key = self.name;
        if keys.get(key).is_none() {
            if self.is_required {
                bail!("{}.{key}: absent, must be present", keys.architecture());
            }
            return Ok(());
        }
        let (size, number) = match self.field {
            Size(_) | OptionalSize(_) => (keys.optional_size(key)?, None),
            Number(_) | OptionalNumber(_) => (None, keys.optional_number(key)?),
        };
        match self.field {
            Size(field) => *field(config) = size.unwrap_or_default(),
            OptionalSize(field) => *field(config) = size.filter(|&size| size != 0),
            Number(field) => *field(config) = number.unwrap_or_default(),
            OptionalNumber(field) => *field(config) = number.filter(|&number| number != 0.0),
        }
        Ok(())
    }

    /// The `config` field's value, unless it is none.
    pub(super) fn value(&self, config: &DecoderConfig) -> Option<GgufValue> {
        let config = &mut config.clone();
        let size = |size: usize| GgufValue::Integer(size as i128);
        match self.field {
            Size(field) => Some(size(*field(config))),
            OptionalSize(field) => field(config).map(size),
            Number(field) => Some(GgufValue::Float(*field(config))),
            OptionalNumber(field) => field(config).map(GgufValue::Float),
        }
    }
}

/// One architecture's keys in a file.
pub(super) struct Keys<'a> {
    header: &'a Header,
    pub(super) layout: &'static GgufLayout,
    pub(super) model_type: ModelType,
}

impl<'a> Keys<'a> {
    pub(super) fn new(header: &'a Header) -> Result<Self> {
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
            layout,
            model_type,
        })
    }

    pub(super) fn architecture(&self) -> &'static str {
        self.layout.architecture
    }

    pub(super) fn get(&self, key: &str) -> Option<&'a GgufValue> {
        let key = format!("{}.{key}", self.architecture());
        self.header.metadata.get(&key)
    }

    pub(super) fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_u64().and_then(|size| usize::try_from(size).ok()) {
            Some(size) => Ok(Some(size)),
            None => bail!(
                "{}.{key}: {value}, must be one whole number",
                self.architecture()
            ),
        }
    }

    pub(super) fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) => Ok(Some(number)),
            None => bail!("{}.{key}: {value}, must be a number", self.architecture()),
        }
    }
}

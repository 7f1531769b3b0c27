//! Decoder families. Each has one file that lists how it differs from Llama.

mod gemma2;
mod gemma3;
mod granite;
mod llama;
mod mistral;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod smollm3;

use std::collections::BTreeSet;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::config::architecture::Architecture;
use crate::config::decoder_config::num_hidden_layers;
use crate::config::gguf_key::GgufKey;
use crate::config::stack::Stack;
use crate::{DecoderConfig, LayerType};

/// A family's properties. Most families start from Llama's.
#[derive(Debug)]
pub(crate) struct Family {
    /// `model_type` in `config.json`.
    pub(crate) name: &'static str,
    /// The transformers class, an entry in `architectures` in `config.json`.
    pub(crate) transformers_class: &'static str,
    /// [`DecoderConfig`] fields that only some families have. All others must keep their default.
    pub(crate) keys: &'static [&'static str],
    /// Block types that `layer_types` may contain.
    pub(crate) layer_types: &'static [LayerType],
    /// transformers' value for an absent `config.json` key, where [`DecoderConfig`] has no
    /// default or a different one.
    pub(crate) defaults: fn() -> Value,
    /// Converts `config.json` keys to [`DecoderConfig`] keys where they differ.
    pub(crate) read: fn(&mut Map<String, Value>) -> Result<()>,
    /// Converts [`DecoderConfig`] keys to `config.json` keys where they differ.
    pub(crate) write: fn(&DecoderConfig, &mut Map<String, Value>),
    /// Builds a decoder's architecture.
    pub(crate) architecture: fn(&DecoderConfig) -> Architecture,
    /// Parameters that files may store as one tensor.
    pub(crate) stacks: fn(&DecoderConfig) -> Vec<Stack>,
    /// Multimodal checkpoints with a text model from this family.
    pub(crate) multimodal: Option<Multimodal>,
    /// GGUF layout; `None` if GGUF is not supported.
    pub(crate) gguf: Option<GgufLayout>,
}

/// Checkpoints with a text model and other parts. In their `config.json`, `text_config` describes
/// the text model.
#[derive(Debug)]
pub(crate) struct Multimodal {
    /// `model_type` in `config.json`.
    pub(crate) name: &'static str,
    /// Tensor name prefix for the text model, in place of `model.`.
    pub(crate) prefix: &'static str,
    /// Tensor name prefixes for the other parts.
    pub(crate) others: &'static [&'static str],
}

impl Multimodal {
    /// Returns whether a tensor belongs to a part other than the text model.
    pub(crate) fn is_other(&self, name: &str) -> bool {
        self.others.iter().any(|part| name.starts_with(part))
    }
}

/// Layout of a family's weights and metadata in GGUF files, for reading and writing.
#[derive(Debug)]
pub(crate) struct GgufLayout {
    /// `general.architecture`. If several families share one, files are read as the first.
    pub(crate) architecture: &'static str,
    /// In query and key, the two rows of a rotated pair are adjacent.
    pub(crate) adjacent_pairs: bool,
    /// Hugging Face and GGUF names for block parts where they differ from Llama's. All experts in
    /// a block share one tensor, so their names have no expert number here.
    pub(crate) names: &'static [(&'static str, &'static str)],
    /// Keys that not all families share.
    pub(crate) keys: &'static [GgufKey],
    /// Sets what files omit, after their keys have been read.
    pub(crate) complete: fn(&mut DecoderConfig),
}

/// Declares [`ModelType`] and maps each variant to its family.
macro_rules! families {
    ($($(#[$meta:meta])* $model_type:ident: $family:expr,)*) => {
        /// A decoder family, serialized as `model_type` in a Hugging Face `config.json`.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "&'static str")]
        #[non_exhaustive]
        pub enum ModelType {
            $($(#[$meta])* $model_type,)*
        }

        impl ModelType {
            const ALL: &[Self] = &[$(Self::$model_type),*];

            pub(crate) fn family(self) -> &'static Family {
                match self {
                    $(Self::$model_type => &$family,)*
                }
            }
        }
    };
}

families! {
    /// Llama, including SmolLM 1 and 2.
    #[default]
    Llama: llama::FAMILY,
    /// Llama with query, key and value biases. Includes Qwen2.5.
    Qwen2: qwen2::FAMILY,
    /// Llama with an RMSNorm on each query and key head, before the rotation.
    Qwen3: qwen3::FAMILY,
    /// Qwen3.5 text models, which mix gated delta rule blocks and gated attention blocks, see
    /// [`DecoderConfig::layer_types`](crate::DecoderConfig::layer_types).
    Qwen3_5: qwen3_5::FAMILY,
    /// Llama with some blocks that do not rotate, see
    /// [`DecoderConfig::no_rope_layers`](crate::DecoderConfig::no_rope_layers).
    SmolLm3: smollm3::FAMILY,
    /// Llama with a window, see
    /// [`DecoderConfig::sliding_window`](crate::DecoderConfig::sliding_window).
    Mistral: mistral::FAMILY,
    /// Llama with four multipliers, such as
    /// [`DecoderConfig::embedding_multiplier`](crate::DecoderConfig::embedding_multiplier).
    Granite: granite::FAMILY,
    /// Llama with norms after attention and feed-forward layers instead of before, and with norms
    /// across the whole query and key.
    Olmo2: olmo2::FAMILY,
    /// Llama with GeGLU, norms before and after attention and feed-forward layers, windows in some
    /// blocks, and soft caps for scores and logits.
    Gemma2: gemma2::FAMILY,
    /// Gemma 2 without the score cap, with head norms, and with another rotation in blocks with a
    /// window. Text models only.
    Gemma3: gemma3::FAMILY,
    /// Llama with query, key and value in one map, gate and up in another, and possibly partial
    /// head rotation.
    Phi3: phi3::FAMILY,
    /// Qwen3 with mixtures of experts.
    Qwen3Moe: qwen3_moe::FAMILY,
}

impl ModelType {
    /// All family names.
    pub(crate) fn names() -> Vec<&'static str> {
        Self::ALL
            .iter()
            .map(|family| family.family().name)
            .collect()
    }

    /// Looks up a family by name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|model_type| model_type.family().name == name)
    }

    /// Returns whether checkpoints with this `model_type` contain a text model from a supported
    /// family.
    pub(crate) fn is_multimodal(name: &str) -> bool {
        let multimodal = |model_type: &Self| model_type.family().multimodal.as_ref();
        let mut all = Self::ALL.iter().filter_map(multimodal);
        all.any(|multimodal| multimodal.name == name)
    }

    /// Supported GGUF architectures.
    pub(crate) fn gguf_architectures() -> Vec<&'static str> {
        let layouts = Self::ALL.iter().filter_map(|x| x.family().gguf.as_ref());
        let names: BTreeSet<_> = layouts.map(|layout| layout.architecture).collect();
        names.into_iter().collect()
    }

    /// Looks up the family for a GGUF architecture.
    pub(crate) fn from_gguf_architecture(name: &str) -> Option<(Self, &'static GgufLayout)> {
        let mut all = Self::ALL.iter();
        all.find_map(|model_type| {
            let layout = model_type.family().gguf.as_ref()?;
            (layout.architecture == name).then_some((*model_type, layout))
        })
    }
}

impl From<ModelType> for &'static str {
    fn from(model_type: ModelType) -> Self {
        model_type.family().name
    }
}

impl TryFrom<String> for ModelType {
    type Error = String;

    fn try_from(name: String) -> std::result::Result<Self, String> {
        Self::from_name(&name).ok_or_else(|| format!("must be one of {:?}", Self::names()))
    }
}

/// Sets `key` to `value` if it is absent. Null counts as present.
fn set_default(config: &mut Map<String, Value>, key: &str, value: impl Into<Value>) {
    config.entry(key).or_insert_with(|| value.into());
}

/// Sets the rotary frequency base unless one of its two keys is present.
fn set_default_rope_theta(config: &mut Map<String, Value>, theta: f64) {
    let rope = config.get("rope_parameters").and_then(Value::as_object);
    let is_stated = rope.is_some_and(|rope| !absent(rope, "rope_theta"));
    if !is_stated && absent(config, "rope_theta") {
        config.insert("rope_theta".to_owned(), json!(theta));
    }
}

/// Reads the interval between blocks of one type, `default` if absent or null.
fn interval(config: &Map<String, Value>, key: &str, default: usize) -> Result<usize> {
    let Some(found) = config.get(key).filter(|x| !x.is_null()) else {
        return Ok(default);
    };
    match found.as_u64().and_then(|x| usize::try_from(x).ok()) {
        Some(interval @ 1..) => Ok(interval),
        _ => bail!("{key}: {found}, must be a whole number of at least 1"),
    }
}

/// Like [`every`], with the block count from a `config.json`.
fn periodic<T: Clone + Serialize>(
    config: &Map<String, Value>,
    interval: usize,
    other: T,
    last: T,
) -> Result<Value> {
    let layers = num_hidden_layers(config)?;
    Ok(json!(every(layers, interval, other, last)))
}

/// A list with one entry per block: `last` for every `interval`-th block, `other` for the rest.
fn every<T: Clone>(layers: usize, interval: usize, other: T, last: T) -> Vec<T> {
    let entry = |number: usize| {
        if number.is_multiple_of(interval) {
            last.clone()
        } else {
            other.clone()
        }
    };
    (1..=layers).map(entry).collect()
}

const PARTIAL: &str = "partial_rotary_factor";

/// Moves `partial_rotary_factor` out of the rotation objects, where some files have it.
fn lift_partial_rotary_factor(config: &mut Map<String, Value>) {
    for key in ["rope_scaling", "rope_parameters"] {
        if let Some(Value::Object(rope)) = config.get_mut(key)
            && let Some(factor) = rope.remove(PARTIAL)
            && !factor.is_null()
        {
            config.insert(PARTIAL.to_owned(), factor);
        }
    }
}

/// Returns whether a key is absent or null.
pub(crate) fn absent(config: &Map<String, Value>, key: &str) -> bool {
    config.get(key).is_none_or(Value::is_null)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_serialized_model_types() {
        for &model_type in ModelType::ALL {
            let name = model_type.family().name;
            assert_eq!(serde_json::to_value(model_type).unwrap(), name);
            assert_eq!(ModelType::from_name(name), Some(model_type));
            let read: ModelType = serde_json::from_value(name.into()).unwrap();
            assert_eq!(read, model_type);
        }
    }
}

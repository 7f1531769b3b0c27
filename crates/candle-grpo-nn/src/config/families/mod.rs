//! The families of decoders. Each has one file, which lists how it differs from Llama.

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

/// The properties of a family. Most start from those of Llama.
#[derive(Debug)]
pub(crate) struct Family {
    /// `model_type` in `config.json`.
    pub(crate) name: &'static str,
    /// The class in transformers, an entry of `architectures` in `config.json`.
    pub(crate) transformers_class: &'static str,
    /// The fields of [`DecoderConfig`] that only some families have. The others must have their
    /// default.
    pub(crate) keys: &'static [&'static str],
    /// The kinds of blocks that `layer_types` may name.
    pub(crate) layer_types: &'static [LayerType],
    /// The keys of a `config.json` and their values in transformers if they are absent, as far as
    /// [`DecoderConfig`] has no default, or another.
    pub(crate) defaults: fn() -> Value,
    /// Replaces the keys of a `config.json` by those of [`DecoderConfig`], as far as they differ.
    pub(crate) read: fn(&mut Map<String, Value>) -> Result<()>,
    /// Replaces the keys of [`DecoderConfig`] by those of a `config.json`, as far as they differ.
    pub(crate) write: fn(&DecoderConfig, &mut Map<String, Value>),
    /// The parts of a decoder.
    pub(crate) architecture: fn(&DecoderConfig) -> Architecture,
    /// The parameters that files may store as one tensor.
    pub(crate) stacks: fn(&DecoderConfig) -> Vec<Stack>,
    /// Checkpoints of several modalities that have a text model of this family.
    pub(crate) multimodal: Option<Multimodal>,
    /// The layout of GGUF files; `None` if they are neither read nor written.
    pub(crate) gguf: Option<GgufLayout>,
}

/// Checkpoints that have a text model beside other parts. Their `config.json` has that of the text
/// model in `text_config`.
#[derive(Debug)]
pub(crate) struct Multimodal {
    /// `model_type` in `config.json`.
    pub(crate) name: &'static str,
    /// The prefix of the tensors of the text model, in place of `model.`.
    pub(crate) prefix: &'static str,
    /// The prefixes of the tensors of the other parts.
    pub(crate) others: &'static [&'static str],
}

impl Multimodal {
    /// Returns whether a tensor is of another part than the text model.
    pub(crate) fn is_other(&self, name: &str) -> bool {
        self.others.iter().any(|part| name.starts_with(part))
    }
}

/// The layout of a family's weights and metadata in GGUF files, as read and as written.
#[derive(Debug)]
pub(crate) struct GgufLayout {
    /// `general.architecture`. Of several families with one architecture, files are read as the
    /// first.
    pub(crate) architecture: &'static str,
    /// The two rows of a rotated pair of query and key lie side by side.
    pub(crate) adjacent_pairs: bool,
    /// The Hugging Face and the GGUF names of parts of a block that differ from those of Llama.
    /// The matrices of the experts of a block are one tensor, and have no number here.
    pub(crate) names: &'static [(&'static str, &'static str)],
    /// The keys beside those of all families.
    pub(crate) keys: &'static [GgufKey],
    /// Sets what files do not state, after their keys have been read.
    pub(crate) complete: fn(&mut DecoderConfig),
}

/// Declares [`ModelType`] and lists the family of each.
macro_rules! families {
    ($($(#[$meta:meta])* $model_type:ident: $family:expr,)*) => {
        /// The family of a decoder. It is serialized as `model_type` in a Hugging Face
        /// `config.json`.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "&'static str")]
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
    /// Llama. SmolLM 1 and 2 are Llamas.
    #[default]
    Llama: llama::FAMILY,
    /// Llama with biases on the query, key and value projections. Qwen2.5 is a Qwen2.
    Qwen2: qwen2::FAMILY,
    /// Llama with an RMSNorm on each head of query and key, before the rotation.
    Qwen3: qwen3::FAMILY,
    /// The text models of Qwen3.5: blocks with the gated delta rule and blocks with gated
    /// attention, see [`DecoderConfig::layer_types`](crate::DecoderConfig::layer_types).
    Qwen3_5: qwen3_5::FAMILY,
    /// Llama with blocks that do not rotate, see
    /// [`DecoderConfig::no_rope_layers`](crate::DecoderConfig::no_rope_layers).
    SmolLm3: smollm3::FAMILY,
    /// Llama with a window, see
    /// [`DecoderConfig::sliding_window`](crate::DecoderConfig::sliding_window).
    Mistral: mistral::FAMILY,
    /// Llama with four multipliers, such as
    /// [`DecoderConfig::embedding_multiplier`](crate::DecoderConfig::embedding_multiplier).
    Granite: granite::FAMILY,
    /// Llama with norms after attention and feed-forward layer in place of those before, and norms
    /// of the whole query and key.
    Olmo2: olmo2::FAMILY,
    /// Llama with GeGLU, norms before and after attention and feed-forward layer, windows in some
    /// blocks, and soft caps of scores and logits.
    Gemma2: gemma2::FAMILY,
    /// Gemma 2 without the cap of the scores, with norms of each head, and another rotation in
    /// blocks with a window. Text models only.
    Gemma3: gemma3::FAMILY,
    /// Llama whose query, key and value are one map, as are gate and up, and whose heads may rotate
    /// in part.
    Phi3: phi3::FAMILY,
    /// Qwen3 with mixtures of experts.
    Qwen3Moe: qwen3_moe::FAMILY,
}

impl ModelType {
    /// The names of all families.
    pub(crate) fn names() -> Vec<&'static str> {
        Self::ALL
            .iter()
            .map(|family| family.family().name)
            .collect()
    }

    /// The family with this name.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|model_type| model_type.family().name == name)
    }

    /// Returns true if checkpoints with this `model_type` have a text model of some family.
    pub(crate) fn is_multimodal(name: &str) -> bool {
        let multimodal = |model_type: &Self| model_type.family().multimodal.as_ref();
        let mut all = Self::ALL.iter().filter_map(multimodal);
        all.any(|multimodal| multimodal.name == name)
    }

    /// The architectures of GGUF files that are read.
    pub(crate) fn gguf_architectures() -> Vec<&'static str> {
        let layouts = Self::ALL.iter().filter_map(|x| x.family().gguf.as_ref());
        let names: BTreeSet<_> = layouts.map(|layout| layout.architecture).collect();
        names.into_iter().collect()
    }

    /// The family of GGUF files with this architecture.
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

/// Sets `key` to `value` if it is absent. A null stays.
fn set_default(config: &mut Map<String, Value>, key: &str, value: impl Into<Value>) {
    config.entry(key).or_insert_with(|| value.into());
}

/// Sets the base of the rotary frequencies unless one of its two places states it.
fn set_default_rope_theta(config: &mut Map<String, Value>, theta: f64) {
    let rope = config.get("rope_parameters").and_then(Value::as_object);
    let is_stated = rope.is_some_and(|rope| !absent(rope, "rope_theta"));
    if !is_stated && absent(config, "rope_theta") {
        config.insert("rope_theta".to_owned(), json!(theta));
    }
}

/// Reads a distance between blocks of a kind, `default` if it is absent or null.
fn interval(config: &Map<String, Value>, key: &str, default: usize) -> Result<usize> {
    let Some(found) = config.get(key).filter(|x| !x.is_null()) else {
        return Ok(default);
    };
    match found.as_u64().and_then(|x| usize::try_from(x).ok()) {
        Some(interval @ 1..) => Ok(interval),
        _ => bail!("{key}: {found}, must be a whole number of at least 1"),
    }
}

/// [`every`] with the number of blocks of a `config.json`.
fn periodic<T: Clone + Serialize>(
    config: &Map<String, Value>,
    interval: usize,
    other: T,
    last: T,
) -> Result<Value> {
    let layers = num_hidden_layers(config)?;
    Ok(json!(every(layers, interval, other, last)))
}

/// A list with an entry for each block: `last` for every `interval`-th, `other` for the others.
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

/// Moves `partial_rotary_factor` out of the objects of the rotation, where files may have it.
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

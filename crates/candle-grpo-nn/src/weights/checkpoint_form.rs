//! Saves checkpoints with more than a text model in the form in which they were read.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::io;
use std::path::Path;

use candle_core::{Error, Result, bail};
use serde_json::{Map, Value, json};

use crate::DecoderConfig;
use crate::config::families::Multimodal;
use crate::weights::Export;
use crate::weights::export::unsaved;
use crate::weights::safetensors::read_folder;
use crate::weights::safetensors_writer::{self, LazyTensor};
use crate::weights::stored_tensor::StoredTensor;
use candle_grpo_base::atomic_file;

const CONFIG: &str = "config.json";
const TEXT_CONFIG: &str = "text_config";
const TIED: &str = "tie_word_embeddings";

/// Small files next to the weights that the other parts need.
const FILES: [&str; 3] = [
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

/// Describes a Hugging Face checkpoint with a text model and other parts, such as a vision tower.
/// It holds the text model's tensor names, `config.json`, and the other parts' tensors.
///
/// Tensor data stays in the files, which are kept open. You can copy it even after the folder was
/// moved or removed.
#[derive(Debug, Clone)]
pub struct CheckpointForm {
    /// `config.json`.
    config: Map<String, Value>,
    /// Tensor name prefix for the text model, in place of `model.`.
    prefix: Option<&'static str>,
    /// Tensors in the other parts.
    others: BTreeMap<String, StoredTensor>,
    /// Names and contents of the small files.
    files: Vec<(&'static str, Vec<u8>)>,
}

impl CheckpointForm {
    /// Reads the checkpoint in `folder`, whose text model is `config`. Returns `None` if it
    /// contains only a text model, named as in [`DecoderConfig::parameter_shapes`].
    ///
    /// # Errors
    ///
    /// If `config.json` or a safetensors header cannot be read.
    pub fn read(config: &DecoderConfig, folder: &Path) -> Result<Option<Self>> {
        let Some(multimodal) = &config.model_type.family().multimodal else {
            return Ok(None);
        };
        let read = || Self::read_as(multimodal, folder);
        read().map_err(|error| Error::msg(format!("cannot read {}: {error}", folder.display())))
    }

    fn read_as(multimodal: &'static Multimodal, folder: &Path) -> Result<Option<Self>> {
        let in_file = |name: &str, error: &dyn Display| Error::msg(format!("{name}: {error}"));
        let bytes = fs::read(folder.join(CONFIG)).map_err(|error| in_file(CONFIG, &error))?;
        let config: Map<String, Value> =
            serde_json::from_slice(&bytes).map_err(|error| in_file(CONFIG, &error))?;
        let mut others = BTreeMap::new();
        let mut has_prefix = false;
        for (name, tensor) in read_folder(folder, StoredTensor::read_file)? {
            has_prefix |= name.starts_with(multimodal.prefix);
            if multimodal.is_other(&name) {
                others.insert(name, tensor);
            }
        }
        let is_multimodal = config.get("model_type") == Some(&json!(multimodal.name));
        if !is_multimodal && !has_prefix && others.is_empty() {
            return Ok(None);
        }
        let mut files = Vec::new();
        for name in FILES {
            if folder.join(name).is_file() {
                let bytes = fs::read(folder.join(name)).map_err(|error| in_file(name, &error))?;
                files.push((name, bytes));
            }
        }
        Ok(Some(Self {
            config,
            prefix: has_prefix.then_some(multimodal.prefix),
            others,
            files,
        }))
    }

    /// Builds `config.json` with the text model `model` in f32. Everything else is unchanged.
    ///
    /// # Errors
    ///
    /// If `model` differs from the checkpoint's text model in more than
    /// [`DecoderConfig::tie_word_embeddings`].
    pub fn config(&self, model: &DecoderConfig) -> Result<Map<String, Value>> {
        let bytes = serde_json::to_vec(&self.config).map_err(Error::wrap)?;
        let mut own = DecoderConfig::from_hugging_face(&bytes)?;
        own.tie_word_embeddings = model.tie_word_embeddings;
        if own != *model {
            bail!("model: {model:?}, must be that of the checkpoint, {own:?}");
        }
        let mut config = self.config.clone();
        set_text_keys(&mut config, model);
        if let Some(Value::Object(text)) = config.get_mut(TEXT_CONFIG) {
            set_text_keys(text, model);
        }
        Ok(config)
    }

    /// Writes only the text model, under the checkpoint's names, like [`Export::save`].
    pub fn save_text(&self, weights: &Export<'_>, path: &Path) -> Result<()> {
        let tensors = weights.lazy_tensors(|name| self.name(name))?;
        safetensors_writer::write(path, tensors, || Ok(())).map_err(|error| unsaved(path, &error))
    }

    /// Writes one safetensors file with the text model under the checkpoint's names, and the other
    /// parts' original bytes. [`Parameters::load`] reads the text model.
    ///
    /// The file is written [atomically](crate::atomic_file).
    ///
    /// # Errors
    ///
    /// If a checkpoint file has changed since it was read. The error names it.
    ///
    /// [`Parameters::load`]: crate::Parameters::load
    pub fn save(&self, weights: &Export<'_>, path: &Path) -> Result<()> {
        let mut tensors = weights.lazy_tensors(|name| self.name(name))?;
        tensors.extend(self.others.iter().map(|(name, tensor)| {
            let kind = (tensor.dtype, tensor.shape.clone());
            LazyTensor::new(name.clone(), kind, |out| tensor.copy_to(out))
        }));
        safetensors_writer::write(path, tensors, || self.check_unchanged())
            .map_err(|error| unsaved(path, &error))
    }

    /// Writes the small files that the other parts need to a folder, each
    /// [atomically](crate::atomic_file).
    pub fn write_files(&self, folder: &Path) -> Result<()> {
        for (name, bytes) in &self.files {
            atomic_file::write(&folder.join(name), bytes)?;
        }
        Ok(())
    }

    /// Returns the checkpoint's name for the parameter `name`.
    pub fn name(&self, name: &str) -> String {
        match (self.prefix, name.strip_prefix("model.")) {
            (Some(prefix), Some(rest)) => format!("{prefix}{rest}"),
            _ => name.to_owned(),
        }
    }

    fn check_unchanged(&self) -> io::Result<()> {
        let mut others = self.others.values();
        others.try_for_each(StoredTensor::check_unchanged)
    }
}

/// Sets the text model keys that may differ from the checkpoint.
fn set_text_keys(config: &mut Map<String, Value>, model: &DecoderConfig) {
    for (key, value) in [
        ("dtype", json!("float32")),
        ("torch_dtype", json!("float32")),
        (TIED, json!(model.tie_word_embeddings)),
    ] {
        if let Some(found) = config.get_mut(key) {
            *found = value;
        }
    }
}

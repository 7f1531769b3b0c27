//! Checkpoints with more parts than a text model, which are saved as they were read.

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

/// Small files beside the weights, which the other parts need.
const FILES: [&str; 3] = [
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

/// The form of a Hugging Face checkpoint that has a text model beside other parts, such as a vision
/// tower: the names of the text model's tensors, `config.json`, and the tensors of the other parts.
///
/// The bytes of these tensors stay in the files, which are kept open. They can be copied from there
/// even after their folder was moved or removed.
#[derive(Debug, Clone)]
pub struct CheckpointForm {
    /// `config.json`.
    config: Map<String, Value>,
    /// The prefix of the text model's tensors, in place of `model.`.
    prefix: Option<&'static str>,
    /// The tensors of the other parts.
    others: BTreeMap<String, StoredTensor>,
    /// The names and contents of small files.
    files: Vec<(&'static str, Vec<u8>)>,
}

impl CheckpointForm {
    /// Reads the form of the checkpoint in `folder`, which has the text model `config`. Returns
    /// `None` if it has only a text model, under the names of
    /// [`DecoderConfig::parameter_shapes`].
    ///
    /// # Errors
    ///
    /// If `config.json` or the header of a safetensors file cannot be read.
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

    /// The contents of `config.json` with the text model `model` in f32. Everything else is as in
    /// the checkpoint.
    ///
    /// # Errors
    ///
    /// If `model` differs from the text model of the checkpoint in more than
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

    /// Writes the text model under the names of the checkpoint, without the other parts, as
    /// [`Export::save`] does.
    pub fn save_text(&self, weights: &Export<'_>, path: &Path) -> Result<()> {
        let tensors = weights.lazy_tensors(|name| self.name(name))?;
        safetensors_writer::write(path, tensors, || Ok(())).map_err(|error| unsaved(path, &error))
    }

    /// Writes the text model under the names of the checkpoint and the other parts, whose bytes are
    /// those of the checkpoint, into one safetensors file. [`Parameters::load`] reads the text
    /// model.
    ///
    /// The file is written [atomically](crate::atomic_file).
    ///
    /// # Errors
    ///
    /// If a file of the checkpoint has changed since it was read. The error names it.
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

    /// Writes the small files that the other parts need into a folder, each
    /// [atomically](crate::atomic_file).
    pub fn write_files(&self, folder: &Path) -> Result<()> {
        for (name, bytes) in &self.files {
            atomic_file::write(&folder.join(name), bytes)?;
        }
        Ok(())
    }

    /// The name in the checkpoint of the parameter `name`.
    fn name(&self, name: &str) -> String {
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

/// Sets the keys of a text model that may differ from those of its checkpoint.
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

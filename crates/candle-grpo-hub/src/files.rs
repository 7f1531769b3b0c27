//! A model's files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_grpo_base::json;
use serde::Deserialize;

use super::name::{is_file, is_gguf};

pub(super) const INDEX: &str = "model.safetensors.index.json";
const WEIGHTS: &str = "model.safetensors";
const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];
const OPTIONAL: [&str; 8] = [
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    // From models with vision, for checkpoints to keep.
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];
/// Folder for chat templates such as `tool_use.jinja`.
const ADDITIONAL_CHAT_TEMPLATES: &str = "additional_chat_templates/";
/// Maximum number of files in a message.
const SHOWN: usize = 8;

/// A model's files in its repository.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ModelFiles {
    /// Files to read before the weights.
    pub(super) small: Vec<String>,
    /// `None` if the index, which is one of `small`, lists them.
    pub(super) weights: Option<Vec<String>>,
}

impl ModelFiles {
    /// Selects from `files`.
    ///
    /// # Errors
    ///
    /// If a file is missing that every model needs.
    pub(super) fn select(files: &[String]) -> Result<Self> {
        let has = |name: &str| files.iter().any(|file| file == name);
        for name in REQUIRED {
            ensure!(has(name), "has no {name}{}", hint(files));
        }
        let names = REQUIRED.iter().chain(&OPTIONAL).filter(|name| has(name));
        let mut small: Vec<String> = names.map(|name| (*name).to_owned()).collect();
        let is_template = |file: &&String| {
            let name = file.strip_prefix(ADDITIONAL_CHAT_TEMPLATES);
            name.is_some_and(|name| name.ends_with(".jinja") && !name.contains('/'))
        };
        small.extend(files.iter().filter(is_template).cloned());
        // In the order in which weights are read.
        let weights = if has(WEIGHTS) {
            Some(vec![WEIGHTS.to_owned()])
        } else if has(INDEX) {
            small.push(INDEX.to_owned());
            None
        } else {
            bail!("has no {WEIGHTS} and no {INDEX}{}", hint(files));
        };
        Ok(Self { small, weights })
    }
}

fn hint(files: &[String]) -> String {
    let gguf: Vec<&str> = files
        .iter()
        .map(String::as_str)
        .filter(|file| is_gguf(Path::new(file)))
        .collect();
    if gguf.is_empty() {
        return ", must be a model in safetensors files with tokenizer.json".to_owned();
    }
    let more = if gguf.len() > SHOWN { ", ..." } else { "" };
    let shown = gguf[..gguf.len().min(SHOWN)].join(", ");
    format!("; it has GGUF files, one of which the name must end in: {shown}{more}")
}

/// Returns the files that a weight index lists.
pub(super) fn indexed(path: &Path) -> Result<Vec<String>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let Index { weight_map } = serde_json::from_slice(&bytes)
        .map_err(|error| anyhow!("{INDEX}: {}", json::message_with_place(&error)))?;
    let files: BTreeSet<String> = weight_map.into_values().collect();
    if let Some(file) = files
        .iter()
        .find(|file| !is_file(file) || file.contains('/'))
    {
        bail!("{INDEX}: {file:?}, must be the name of a file in the same directory");
    }
    Ok(files.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(files: &[&str]) -> Result<ModelFiles> {
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        ModelFiles::select(&files)
    }

    #[test]
    fn a_model_is_its_configuration_its_tokenizer_and_one_form_of_its_weights() {
        let files = [
            "README.md",
            "chat_template.jinja",
            "config.json",
            "consolidated.safetensors",
            "generation_config.json",
            "model.safetensors",
            INDEX,
            "onnx/model.onnx",
            "pytorch_model.bin",
            "tokenizer.json",
            "sub/config.json",
        ];
        let selected = select(&files).unwrap();
        let small = [
            "config.json",
            "tokenizer.json",
            "generation_config.json",
            "chat_template.jinja",
        ];
        assert_eq!(selected.small, small);
        assert_eq!(selected.weights.unwrap(), ["model.safetensors"]);
        let selected = select(&[
            "config.json",
            "tokenizer.json",
            INDEX,
            "model-1.safetensors",
        ])
        .unwrap();
        assert_eq!(selected.small.last().unwrap(), INDEX);
        assert_eq!(selected.weights, None);
    }

    #[test]
    fn a_repository_without_a_model_is_refused_with_its_gguf_files() {
        let error = |files: &[&str]| select(files).unwrap_err().to_string();
        assert_eq!(
            error(&["a.gguf", "B.GGUF", "config.json"]),
            "has no tokenizer.json; it has GGUF files, one of which the name must end in: a.gguf, B.GGUF"
        );
        let error = error(&["config.json", "tokenizer.json", "pytorch_model.bin"]);
        assert!(
            error.starts_with("has no model.safetensors and no "),
            "{error}"
        );
        assert!(
            error.ends_with("must be a model in safetensors files with tokenizer.json"),
            "{error}"
        );
    }

    #[test]
    fn an_index_names_files_of_its_own_folder_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(INDEX);
        let write = |file: &str| {
            let map = serde_json::json!({"weight_map": {"a": "1.safetensors", "b": file}});
            std::fs::write(&path, map.to_string()).unwrap();
            indexed(&path)
        };
        assert_eq!(write("1.safetensors").unwrap(), ["1.safetensors"]);
        for file in ["../2.safetensors", "d/2.safetensors", ""] {
            let error = write(file).unwrap_err().to_string();
            assert!(
                error.contains("must be the name of a file in the same directory"),
                "{error}"
            );
        }
        std::fs::write(&path, "{").unwrap();
        assert!(indexed(&path).is_err());
    }
}

//! The list of all files in a run or a saved model, used to remove only those.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candle_grpo_base::atomic_file::leftover_of;

use crate::folder_lock::LOCK;

/// A folder whose entries are known by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owned {
    /// A run directory.
    Run,
    /// Its checkpoint folder.
    Checkpoints,
    /// A checkpoint: a model with the trainer state.
    Checkpoint,
    /// A checkpoint's adapter.
    Adapter,
    /// A model folder in the Hugging Face layout, or PEFT adapters.
    Model,
    /// The folder with weights for an engine.
    EngineWeights,
    /// One version of these weights: a model or an adapter.
    EngineVersion,
}

enum Entry {
    File,
    Folder(Owned),
}

const RUN: &[&str] = &[
    "config.json",
    "inputs.json",
    "metrics.jsonl",
    "evaluations.jsonl",
    "samples.jsonl",
    "rollouts.jsonl",
    "samples.md",
    // Written by programs before the first release.
    "metrics.svg",
    LOCK,
];

/// The [`Owned::EngineWeights`] folder within a run.
pub(crate) const ENGINE_WEIGHTS: &str = "weights";
/// Each weight version is in a folder with this prefix and its number.
pub(crate) const ENGINE_VERSION: &str = "policy-";

const TRAINER_STATE: &[&str] = &[
    "trainer.json",
    "unfinished_groups.jsonl",
    "policy.safetensors",
    "optimizer.safetensors",
    "reference.safetensors",
    "teacher.safetensors",
    "critic.safetensors",
    "critic_optimizer.safetensors",
    "SHA256SUMS",
];

/// Configuration for PEFT adapters, and for a model in the Hugging Face layout.
pub(crate) const CONFIG: &str = "config.json";
/// Its weights, unless they are in several files.
pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";

const ADAPTER: &[&str] = &[ADAPTER_CONFIG, "adapter_model.safetensors"];

const MODEL: &[&str] = &[
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
];

/// A converted run's model card.
const CARD: &str = "README.md";

impl Owned {
    fn entry(self, name: &str) -> Option<Entry> {
        let file = |known: bool| known.then_some(Entry::File);
        match self {
            Self::Run if name == "checkpoint" => Some(Entry::Folder(Self::Checkpoint)),
            Self::Run if name == "checkpoints" => Some(Entry::Folder(Self::Checkpoints)),
            Self::Run if name == ENGINE_WEIGHTS => Some(Entry::Folder(Self::EngineWeights)),
            Self::Run => file(RUN.contains(&name) || name.starts_with("events.out.tfevents.")),
            Self::Checkpoints => {
                let step = name.strip_prefix("step-")?;
                is_number(step).then_some(Entry::Folder(Self::Checkpoint))
            }
            Self::Checkpoint if name == "adapter" => Some(Entry::Folder(Self::Adapter)),
            Self::Checkpoint => file(TRAINER_STATE.contains(&name) || is_model_file(name)),
            Self::Adapter => file(ADAPTER.contains(&name)),
            Self::Model => file(is_model_file(name) || ADAPTER.contains(&name) || name == CARD),
            Self::EngineWeights if name == LOCK => Some(Entry::File),
            Self::EngineWeights => {
                let version = name.strip_prefix(ENGINE_VERSION)?;
                is_number(version).then_some(Entry::Folder(Self::EngineVersion))
            }
            Self::EngineVersion => file(ADAPTER.contains(&name) || is_model_file(name)),
        }
    }

    /// Returns the first entry in or below `folder` that is not in the list.
    ///
    /// Links are never in the list. Leftovers from an interrupted write of a listed entry are.
    pub(crate) fn first_foreign(self, folder: &Path) -> Result<Option<PathBuf>> {
        for (path, entry) in self.entries(folder)? {
            let foreign = match entry {
                None => Some(path),
                Some(Entry::File) => None,
                Some(Entry::Folder(kind)) => kind.first_foreign(&path)?,
            };
            if foreign.is_some() {
                return Ok(foreign);
            }
        }
        Ok(None)
    }

    /// Returns whether `path` is a folder, and the list contains its name as a folder.
    #[cfg(feature = "engines")]
    pub(crate) fn owns_folder(self, path: &Path) -> bool {
        let name = path.file_name().and_then(|name| name.to_str());
        let listed = name.and_then(|name| self.entry(name));
        matches!(listed, Some(Entry::Folder(_))) && path.is_dir() && !path.is_symlink()
    }

    /// Returns whether `folder` contains model weights, or adapters, with their configuration.
    pub(crate) fn has_model(folder: &Path) -> Result<bool> {
        if ADAPTER.iter().all(|name| folder.join(name).is_file()) {
            return Ok(true);
        }
        if !folder.join(CONFIG).is_file() {
            return Ok(false);
        }
        let entries = Self::Model.entries(folder)?;
        let mut names = entries
            .iter()
            .filter_map(|(path, _)| path.file_name()?.to_str());
        Ok(names.any(|name| name.starts_with("model") && name.ends_with(".safetensors")))
    }

    /// Removes `folder` with everything in it.
    ///
    /// # Errors
    ///
    /// Removes nothing if the folder has an entry that is not in the list.
    pub(crate) fn remove(self, folder: &Path) -> Result<()> {
        if let Some(path) = self.first_foreign(folder)? {
            bail!("{}: is not of a run and is not removed", path.display());
        }
        self.remove_listed(folder)
            .with_context(|| format!("removing {}", folder.display()))
    }

    fn remove_listed(self, folder: &Path) -> Result<()> {
        for (path, entry) in self.entries(folder)? {
            match entry {
                Some(Entry::File) => fs::remove_file(path)?,
                Some(Entry::Folder(kind)) => kind.remove_listed(&path)?,
                None => {}
            }
        }
        // This fails if anything has appeared since the check.
        Ok(fs::remove_dir(folder)?)
    }

    /// Returns the entries in `folder`, sorted by name; those that are not in the list are `None`.
    fn entries(self, folder: &Path) -> Result<Vec<(PathBuf, Option<Entry>)>> {
        let read = || -> Result<Vec<_>> {
            let mut entries = Vec::new();
            for entry in fs::read_dir(folder)? {
                let entry = entry?;
                let name = entry.file_name();
                let listed = name
                    .to_str()
                    .and_then(|name| self.entry(name).or_else(|| self.entry(leftover_of(name)?)));
                let kind = entry.file_type()?;
                let fits = match listed {
                    Some(Entry::File) => kind.is_file(),
                    Some(Entry::Folder(_)) => kind.is_dir(),
                    None => false,
                };
                entries.push((entry.path(), listed.filter(|_| fits)));
            }
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
            Ok(entries)
        };
        read().with_context(|| format!("reading {}", folder.display()))
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn is_model_file(name: &str) -> bool {
    let is_shard = name.starts_with("model-") && name.ends_with(".safetensors");
    MODEL.contains(&name) || is_shard
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_entries_are_owned() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("run");
        let step = run.join("checkpoints/step-000010");
        fs::create_dir_all(step.join("adapter")).unwrap();
        fs::create_dir_all(run.join("checkpoints/.step-000020.77.tmp")).unwrap();
        for name in [
            "config.json",
            "metrics.jsonl",
            ".lock",
            ".config.json.8.tmp",
        ] {
            fs::write(run.join(name), "").unwrap();
        }
        let version = run.join("weights/policy-000003");
        fs::create_dir_all(&version).unwrap();
        fs::write(version.join("adapter_model.safetensors"), "").unwrap();
        for name in [
            "model.safetensors",
            "SHA256SUMS",
            "adapter/adapter_config.json",
        ] {
            fs::write(step.join(name), "").unwrap();
        }
        assert_eq!(Owned::Run.first_foreign(&run).unwrap(), None);

        let foreign = [
            "notes.txt",
            "checkpoints/step-000010/notes.txt",
            "checkpoints/best",
            "weights/policy-000003/notes.txt",
            ".notes.txt.8.tmp",
            "other/config.json",
        ];
        for name in foreign {
            let path = run.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "mine").unwrap();
            let error = format!("{:#}", Owned::Run.remove(&run).unwrap_err());
            let first = if name.starts_with("other") {
                "other"
            } else {
                name
            };
            assert!(
                error.starts_with(&run.join(first).display().to_string()),
                "{error}"
            );
            assert!(path.exists() && step.join("model.safetensors").exists());
            fs::remove_file(&path).unwrap();
            if first == "other" {
                fs::remove_dir(run.join("other")).unwrap();
            }
        }
        Owned::Run.remove(&run).unwrap();
        assert!(!run.exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_not_owned() {
        let folder = tempfile::tempdir().unwrap();
        let (run, elsewhere) = (folder.path().join("run"), folder.path().join("elsewhere"));
        fs::create_dir(&run).unwrap();
        fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, run.join("checkpoints")).unwrap();
        let foreign = Owned::Run.first_foreign(&run).unwrap();
        assert_eq!(foreign, Some(run.join("checkpoints")));
    }
}

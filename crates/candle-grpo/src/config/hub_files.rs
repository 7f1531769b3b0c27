//! A run's hub models and data.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_grpo_collective::Collective;
use candle_grpo_nn::{BaseWeights, WeightDivision};
use candle_grpo_train::hub::{HubContent, HubName, Located, MissingFile, TransferError};
use candle_grpo_train::{ComputeDType, Interrupted};
use serde_json::{Map, Value};

use super::document::{Document, is_within};
use super::error::ConfigError;
use super::run::{RunConfig, reward_key};
use super::sections::{ModelConfig, TeacherConfig};

const MODEL: &str = "model";

/// A run's hub files.
#[derive(Debug, Clone, Default)]
pub struct HubFiles {
    /// The commits by repository.
    commits: BTreeMap<String, String>,
    /// The weights that are not in the cache, by the file's key and the hub name.
    missing: Vec<(String, HubName, Vec<MissingFile>)>,
}

impl HubFiles {
    /// Returns whether a model's weights are not in the cache, for the model that `key`, or a key
    /// in it, names.
    pub(super) fn lacks_weights_of(&self, key: &str) -> bool {
        let mut missing = self.missing.iter();
        missing.any(|(lacking, ..)| is_within(lacking, key))
    }
}

/// Locates a hub file from its name, the needed content, and a commit if given.
pub type Locate<'a> = &'a mut dyn FnMut(&HubName, HubContent, Option<&str>) -> Result<Located>;

/// Replaces hub names with paths in a configuration's sections.
pub(super) struct Replacement<'a> {
    document: &'a Document,
    /// The commits that repositories must have.
    commits: &'a BTreeMap<String, String>,
    locate: Locate<'a>,
    /// The files that are located.
    pub(super) hub: HubFiles,
    /// The sections whose keys may be hub names.
    pub(super) sections: BTreeSet<String>,
}

impl<'a> Replacement<'a> {
    pub(super) fn new(
        document: &'a Document,
        commits: &'a BTreeMap<String, String>,
        locate: Locate<'a>,
    ) -> Self {
        Self {
            document,
            commits,
            locate,
            hub: HubFiles::default(),
            sections: BTreeSet::new(),
        }
    }

    /// Replaces the path at `key` if it is a hub name. A revision stands for one commit throughout
    /// the run.
    ///
    /// # Errors
    ///
    /// Returns [`Interrupted`] or [`TransferError`] if `locate` does. Otherwise returns a
    /// [`ConfigError`](super::ConfigError) with the name's line.
    pub(super) fn replace(
        &mut self,
        key: &str,
        content: HubContent,
        path: &mut PathBuf,
    ) -> Result<()> {
        let section = key.split(['.', '[']).next().unwrap_or(key);
        self.sections.insert(section.to_owned());
        self.try_replace(key, content, path).or_else(|error| {
            if error.is::<Interrupted>() || error.is::<TransferError>() {
                Err(error).context(key.to_owned())
            } else {
                Err(self.document.error(key, format!("{error:#}")).into())
            }
        })
    }

    fn try_replace(&mut self, key: &str, content: HubContent, path: &mut PathBuf) -> Result<()> {
        let name = match content {
            HubContent::Data => HubName::of_prefixed(path)?,
            HubContent::Model | HubContent::ModelWithoutWeights => HubName::of(path)?,
        };
        let Some(name) = name else {
            return Ok(());
        };
        let hub = &mut self.hub;
        let repository = name.repository();
        let commit = hub
            .commits
            .get(&repository)
            .or(self.commits.get(&repository));
        let located = (self.locate)(&name, content, commit.map(String::as_str))?;
        hub.commits.insert(repository, located.commit);
        if !located.missing.is_empty() {
            hub.missing.push((key.to_owned(), name, located.missing));
        }
        *path = located.path;
        Ok(())
    }

    /// Replaces the model and the data files, by key, as [`Self::replace`] does.
    pub(super) fn replace_model_and_data<'f>(
        &mut self,
        (model, content): (&mut PathBuf, HubContent),
        data: impl IntoIterator<Item = (&'static str, &'f mut Vec<PathBuf>)>,
    ) -> Result<()> {
        self.replace(MODEL, content, model)?;
        for (key, paths) in data {
            for path in paths {
                self.replace(key, HubContent::Data, path)?;
            }
        }
        Ok(())
    }
}

/// The parts of a configuration that the program handles alike for all trainers.
pub trait Configuration {
    /// Replaces each hub name with a path. `locate` returns the path for the name, the needed
    /// content, and the repository's commit in `commits` if there is one. `model` is the content
    /// that models need.
    ///
    /// # Errors
    ///
    /// Returns [`Interrupted`] or [`TransferError`] if `locate` does. Otherwise returns a
    /// [`ConfigError`](super::ConfigError) with the name's line.
    fn replace_hub_names(
        &mut self,
        model: HubContent,
        commits: &BTreeMap<String, String>,
        locate: Locate<'_>,
    ) -> Result<()>;

    /// Checks that the configured programs, scripts and folders exist.
    ///
    /// # Errors
    ///
    /// Returns an error with the key's line if one is missing.
    fn check_files(&self) -> Result<(), ConfigError>;

    /// Returns the hub files, once [they are located](Self::replace_hub_names).
    fn hub_files(&self) -> &HubFiles;

    /// Returns the commits of the hub repositories that the run reads, once their files are
    /// located. The keys are [their names](HubName::repository).
    fn hub_commits(&self) -> &BTreeMap<String, String> {
        &self.hub_files().commits
    }

    /// Returns the weights that still need to be downloaded, by model name.
    fn missing_weights(&self) -> impl Iterator<Item = (&HubName, &[MissingFile])> {
        let missing = self.hub_files().missing.iter();
        missing.map(|(_, name, files)| (name, files.as_slice()))
    }

    /// Returns whether the model's weights still need to be downloaded.
    fn lacks_model_weights(&self) -> bool {
        self.hub_files().lacks_weights_of(MODEL)
    }

    /// Returns the model to train.
    fn model(&self) -> &ModelConfig;

    /// Returns the model to train, to change it.
    fn model_mut(&mut self) -> &mut ModelConfig;

    /// Returns the form of the linear maps of the model in memory, and the dtype of its other
    /// weights.
    fn stored_form(&self) -> (BaseWeights, ComputeDType);

    /// Returns the division of the f32 weights between the ranks in `collective`, if they divide
    /// them.
    fn division(&self, collective: &Arc<dyn Collective>) -> Option<WeightDivision>;

    /// Returns the folder of the run.
    fn run_dir(&self) -> &Path;

    /// Returns the number of threads to compute with; absent: one for each core.
    fn threads(&self) -> Option<usize>;
}

impl Configuration for RunConfig {
    fn replace_hub_names(
        &mut self,
        model: HubContent,
        commits: &BTreeMap<String, String>,
        locate: Locate<'_>,
    ) -> Result<()> {
        let mut named = match self.to_value()? {
            Value::Object(keys) => keys,
            _ => Map::new(),
        };
        let document = self.document.clone();
        let mut replacement = Replacement::new(&document, commits, locate);
        let (path, data) = self.model_and_data_mut();
        replacement.replace_model_and_data((path, model), data)?;
        let teachers = self.teacher.iter_mut();
        for (key, path) in teachers.flat_map(TeacherConfig::models_mut) {
            replacement.replace(&key, model, path)?;
        }
        for (i, reward) in self.rewards.iter_mut().enumerate() {
            for (key, path) in reward.models_mut() {
                replacement.replace(&format!("{}.{key}", reward_key(i)), model, path)?;
            }
        }
        named.retain(|key, _| replacement.sections.contains(key));
        self.hub = replacement.hub;
        self.named = named;
        Ok(())
    }

    fn check_files(&self) -> Result<(), ConfigError> {
        Self::check_files(self)
    }

    fn hub_files(&self) -> &HubFiles {
        &self.hub
    }

    fn model(&self) -> &ModelConfig {
        &self.model
    }

    fn model_mut(&mut self) -> &mut ModelConfig {
        &mut self.model
    }

    fn stored_form(&self) -> (BaseWeights, ComputeDType) {
        self.train.stored_form()
    }

    fn division(&self, collective: &Arc<dyn Collective>) -> Option<WeightDivision> {
        self.train.division(collective)
    }

    fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    fn threads(&self) -> Option<usize> {
        self.threads
    }
}

impl RunConfig {
    /// Returns whether weights of the teacher at `key` are still to be downloaded.
    pub(crate) fn lacks_teacher_weights(&self, key: &str) -> bool {
        self.hub.lacks_weights_of(key)
    }
}

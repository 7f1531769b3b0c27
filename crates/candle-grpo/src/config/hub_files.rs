//! Models and data of a run that come from the hub.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_grpo_train::hub::{HubContent, HubName, Located, MissingFile, TransferError};
use candle_grpo_train::{DatasetConfig, Interrupted, RewardConfig};

use super::run::{RunConfig, reward_key};
use super::sections::{ModelConfig, TeacherConfig};

const MODEL: &str = "model";
const TEACHER: &str = "teacher.model";

/// The sections of a file that name models and data.
type NamedSections = (
    ModelConfig,
    Option<TeacherConfig>,
    DatasetConfig,
    Vec<RewardConfig>,
);

/// The files of a run that come from the hub.
#[derive(Debug, Clone, Default)]
pub(super) struct HubFiles {
    /// The sections with names in place of paths, once these are located.
    named: Option<NamedSections>,
    /// The commits by repository.
    commits: BTreeMap<String, String>,
    /// The weights that are not in the cache, by the key of the file and the name.
    missing: Vec<(String, HubName, Vec<MissingFile>)>,
}

impl HubFiles {
    /// Returns whether weights of a model that `key` names, or a key in it, are not in the cache.
    pub(super) fn lacks_weights_of(&self, key: &str) -> bool {
        let is_of_key = |lacking: &str| match lacking.strip_prefix(key) {
            Some(rest) => rest.is_empty() || rest.starts_with('.'),
            None => false,
        };
        self.missing.iter().any(|(lacking, ..)| is_of_key(lacking))
    }
}

impl RunConfig {
    /// Replaces each name of the hub by a path, which `locate` returns for the name, the needed
    /// content, and the commit in `commits` if there is one for the repository. A revision stands
    /// for one commit in the whole run.
    ///
    /// # Errors
    ///
    /// With [`Interrupted`] or [`TransferError`] if the error of `locate` is one. With
    /// [`ConfigError`](super::ConfigError) and the line of the name otherwise.
    pub(crate) fn replace_hub_names(
        &mut self,
        model: HubContent,
        commits: &BTreeMap<String, String>,
        mut locate: impl FnMut(&HubName, HubContent, Option<&str>) -> Result<Located>,
    ) -> Result<()> {
        let named = (
            self.model.clone(),
            self.teacher.clone(),
            self.data.clone(),
            self.rewards.clone(),
        );
        let mut hub = HubFiles::default();
        let mut replace = |key: &str, content: HubContent, path: &mut PathBuf| -> Result<()> {
            let name = match content {
                HubContent::Data => HubName::of_prefixed(path)?,
                HubContent::Model | HubContent::ModelWithoutWeights => HubName::of(path)?,
            };
            let Some(name) = name else {
                return Ok(());
            };
            let repository = name.repository();
            let commit = hub.commits.get(&repository).or(commits.get(&repository));
            let located = locate(&name, content, commit.map(String::as_str))?;
            hub.commits.insert(repository, located.commit);
            if !located.missing.is_empty() {
                hub.missing.push((key.to_owned(), name, located.missing));
            }
            *path = located.path;
            Ok(())
        };
        let document = self.document.clone();
        let of_key = |key: &str, replaced: Result<()>| {
            replaced.or_else(|error| {
                match error.is::<Interrupted>() || error.is::<TransferError>() {
                    true => Err(error).context(key.to_owned()),
                    false => Err(document.error(key, format!("{error:#}")).into()),
                }
            })
        };
        of_key(MODEL, replace(MODEL, model, &mut self.model.path))?;
        if let Some(teacher) = &mut self.teacher {
            of_key(TEACHER, replace(TEACHER, model, &mut teacher.model))?;
        }
        let data = &mut self.data;
        for (key, paths) in [
            ("data.train", &mut data.train),
            ("data.held_out", &mut data.held_out),
        ] {
            for path in paths {
                of_key(key, replace(key, HubContent::Data, path))?;
            }
        }
        for (i, reward) in self.rewards.iter_mut().enumerate() {
            for (key, path) in reward.models_mut() {
                let key = format!("{}.{key}", reward_key(i));
                of_key(&key, replace(&key, model, path))?;
            }
        }
        hub.named = Some(named);
        self.hub = hub;
        Ok(())
    }

    /// The sections with names of the hub, as the file has them.
    pub(super) fn named_sections(
        &self,
    ) -> (
        &ModelConfig,
        Option<&TeacherConfig>,
        &DatasetConfig,
        &[RewardConfig],
    ) {
        match &self.hub.named {
            Some((model, teacher, data, rewards)) => (model, teacher.as_ref(), data, rewards),
            None => (
                &self.model,
                self.teacher.as_ref(),
                &self.data,
                &self.rewards,
            ),
        }
    }

    /// Returns the commits of the repositories on the hub that the run reads, once their files are
    /// located. The keys are [their names](HubName::repository).
    pub fn hub_commits(&self) -> &BTreeMap<String, String> {
        &self.hub.commits
    }

    /// Returns the weights that are still to be downloaded, by the name of their model.
    pub fn missing_weights(&self) -> impl Iterator<Item = (&HubName, &[MissingFile])> {
        let missing = self.hub.missing.iter();
        missing.map(|(_, name, files)| (name, files.as_slice()))
    }

    /// Returns whether weights of the teacher are still to be downloaded.
    pub(crate) fn lacks_teacher_weights(&self) -> bool {
        self.hub.lacks_weights_of(TEACHER)
    }

    /// Returns whether the weights of the model are still to be downloaded.
    pub fn lacks_model_weights(&self) -> bool {
        self.hub.lacks_weights_of(MODEL)
    }
}

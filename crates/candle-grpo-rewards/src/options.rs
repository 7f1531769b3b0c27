//! The options of each kind of reward.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::Device;
use candle_grpo_base::within;
use serde_json::Value;

use super::function::RewardFunction;

/// The options of one kind of reward. A new kind must state which columns and files decide its
/// scores: a run compares them when it resumes.
pub(crate) trait RewardOptions {
    /// Checks the options but those of parts. Starts no program and opens no file.
    fn validate(&self) -> Result<()>;

    /// Makes the function of options that are valid, with models on `device`.
    fn build(&self, device: &Device) -> Result<Box<dyn RewardFunction>>;

    /// Checks that a row has the columns of the function, but not those of parts.
    fn check_row(&self, columns: &Value) -> Result<()>;

    /// The files and the other rewards that decide scores.
    fn inputs(&self) -> RewardInputs<'_>;

    /// Checks that the programs, files and keys of servers are there that the function needs.
    fn check_inputs(&self) -> Result<()> {
        Ok(())
    }

    /// The folder in which the reward keeps answers of servers.
    fn cache(&self) -> Option<&Path> {
        None
    }

    /// The paths of models, each with its key.
    fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        Vec::new()
    }
}

/// The files and the other rewards that decide the scores of a reward.
#[derive(Default)]
pub(crate) struct RewardInputs<'a> {
    files: Vec<PathBuf>,
    /// The rewards that it is made of, each with its key.
    parts: Vec<(String, &'a dyn RewardOptions)>,
}

impl<'a> RewardInputs<'a> {
    /// Neither: the options decide.
    pub(crate) fn none() -> Self {
        Self::default()
    }

    pub(crate) fn from_files(files: Vec<PathBuf>) -> Self {
        Self {
            files,
            ..Self::default()
        }
    }

    pub(crate) fn from_parts(parts: Vec<(String, &'a dyn RewardOptions)>) -> Self {
        Self {
            parts,
            ..Self::default()
        }
    }

    /// Checks each part. An error has its key.
    fn check_parts(&self, check: impl Fn(&dyn RewardOptions) -> Result<()>) -> Result<()> {
        let mut parts = self.parts.iter();
        parts.try_for_each(|(key, part)| check(*part).map_err(|error| within(key, error)))
    }
}

/// The options with those of all parts.
impl dyn RewardOptions + '_ {
    pub(crate) fn check(&self) -> Result<()> {
        self.validate()?;
        self.inputs().check_parts(|part| part.check())
    }

    pub(crate) fn check_columns(&self, columns: &Value) -> Result<()> {
        self.check_row(columns)?;
        let mut parts = self.inputs().parts.into_iter();
        parts.try_for_each(|(_, part)| part.check_columns(columns))
    }

    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let RewardInputs { mut files, parts } = self.inputs();
        files.extend(parts.into_iter().flat_map(|(_, part)| part.files()));
        files
    }

    pub(crate) fn check_files(&self) -> Result<()> {
        self.check_inputs()?;
        self.inputs().check_parts(|part| part.check_files())
    }

    pub(crate) fn caches(&self) -> Vec<&Path> {
        let parts = self.inputs().parts.into_iter();
        let of_parts = parts.flat_map(|(_, part)| part.caches());
        self.cache().into_iter().chain(of_parts).collect()
    }
}

/// Implements [`RewardOptions`] for a reward that is its own options, compares a completion with
/// the `expected` value of a column, and reads no file. The second argument checks it.
macro_rules! compares_column {
    ($reward:ty, $validate:expr) => {
        impl $crate::options::RewardOptions for $reward {
            fn validate(&self) -> anyhow::Result<()> {
                let validate: fn(&Self) -> anyhow::Result<()> = $validate;
                validate(self)
            }

            fn build(
                &self,
                _: &candle_core::Device,
            ) -> anyhow::Result<Box<dyn $crate::RewardFunction>> {
                Ok(Box::new(self.clone()))
            }

            fn check_row(&self, columns: &serde_json::Value) -> anyhow::Result<()> {
                self.expected(columns).map(drop)
            }

            fn inputs(&self) -> $crate::options::RewardInputs<'_> {
                $crate::options::RewardInputs::none()
            }
        }
    };
}
pub(crate) use compares_column;

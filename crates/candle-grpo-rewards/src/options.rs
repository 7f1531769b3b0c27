//! Options for each reward kind.

use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_core::Device;
use candle_grpo_base::within;
use serde_json::Value;

use super::function::RewardFunction;

/// Options for one reward kind. A new kind must state which columns and files determine its scores,
/// because a run compares them when it resumes.
pub(crate) trait RewardOptions {
    /// Checks the options, except those of its parts. Starts no program and opens no file.
    fn validate(&self) -> Result<()>;

    /// Builds the function from valid options, with models on `device`.
    fn build(&self, device: &Device) -> Result<Box<dyn RewardFunction>>;

    /// Checks that a row has the columns that the function needs, except those of its parts.
    fn check_row(&self, columns: &Value) -> Result<()>;

    /// Returns the files and other rewards that determine scores.
    fn inputs(&self) -> RewardInputs<'_>;

    /// Checks that the programs, files and server keys exist that the function needs.
    fn check_inputs(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the directory in which the reward caches server replies.
    fn cache(&self) -> Option<&Path> {
        None
    }

    /// Returns the model paths, each with its key.
    fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        Vec::new()
    }
}

/// The files and other rewards that determine a reward's scores.
#[derive(Default)]
pub(crate) struct RewardInputs<'a> {
    files: Vec<PathBuf>,
    /// The rewards that it consists of, each with its key.
    parts: Vec<(String, &'a dyn RewardOptions)>,
}

impl<'a> RewardInputs<'a> {
    /// Returns no inputs: the options alone determine scores.
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

    /// Checks each part. An error has the part's key.
    fn check_parts(&self, check: impl Fn(&dyn RewardOptions) -> Result<()>) -> Result<()> {
        let mut parts = self.parts.iter();
        parts.try_for_each(|(key, part)| check(*part).map_err(|error| within(key, error)))
    }
}

/// The options, including those of all parts.
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

/// Implements [`RewardOptions`] for a reward that is its own options, compares a completion with a
/// column's `expected` value, and reads no file. The second argument checks it.
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

//! A placeholder for reward models, which this crate does not run.

use std::fmt::Debug;
use std::path::PathBuf;

use anyhow::Result;
use candle_core::Device;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::options::{RewardInputs, RewardOptions};
use crate::RewardFunction;

/// Options for a reward model: `kind: reward_model` in [`RewardConfig`](crate::RewardConfig). A
/// trainer implements it for the models that it runs.
pub trait RewardModelOptions: Clone + Debug + PartialEq + Serialize + DeserializeOwned {
    /// Checks the options. Opens no file.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid.
    fn validate(&self) -> Result<()>;

    /// Checks the model's files without reading the weights.
    ///
    /// # Errors
    ///
    /// Fails if one is missing or invalid.
    fn check_files(&self) -> Result<()>;

    /// Returns the files that determine scores.
    fn files(&self) -> Vec<PathBuf>;

    /// Returns the model directory, so that a hub name can be replaced.
    fn path_mut(&mut self) -> &mut PathBuf;

    /// Loads the model onto `device`.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, or if the model cannot be loaded.
    fn load(&self, device: &Device) -> Result<Box<dyn RewardFunction>>;
}

impl<M: RewardModelOptions> RewardOptions for M {
    fn validate(&self) -> Result<()> {
        RewardModelOptions::validate(self)
    }

    fn build(&self, device: &Device) -> Result<Box<dyn RewardFunction>> {
        self.load(device)
    }

    fn check_row(&self, _: &Value) -> Result<()> {
        Ok(())
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::from_files(self.files())
    }

    fn check_inputs(&self) -> Result<()> {
        self.check_files()
    }

    fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        vec![("path".to_owned(), self.path_mut())]
    }
}

/// Options for a program without reward models: there are none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum NoRewardModel {}

impl<'de> Deserialize<'de> for NoRewardModel {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(D::Error::custom(
            "reward_model, must be another kind: this program has no reward models",
        ))
    }
}

impl RewardModelOptions for NoRewardModel {
    fn validate(&self) -> Result<()> {
        match *self {}
    }

    fn check_files(&self) -> Result<()> {
        match *self {}
    }

    fn files(&self) -> Vec<PathBuf> {
        match *self {}
    }

    fn path_mut(&mut self) -> &mut PathBuf {
        match *self {}
    }

    fn load(&self, _: &Device) -> Result<Box<dyn RewardFunction>> {
        match *self {}
    }
}

//! Scores from a language model behind a server.

#[cfg(feature = "judge")]
mod answer;
#[cfg(feature = "judge")]
mod cache;
mod config;
#[cfg(feature = "judge")]
mod limits;
#[cfg(feature = "judge")]
mod reward;
mod score;

use std::path::Path;

use anyhow::Result;
use candle_core::Device;
use serde_json::Value;

use crate::RewardFunction;
use crate::options::{RewardInputs, RewardOptions};

pub use config::{BudgetExhausted, JudgeConfig, OnBudget};
#[cfg(feature = "judge")]
pub use reward::JudgeReward;
pub use score::{JudgeScore, ScoreReader};

impl RewardOptions for Box<JudgeConfig> {
    fn validate(&self) -> Result<()> {
        JudgeConfig::validate(self)
    }

    #[cfg(feature = "judge")]
    fn build(&self, _: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(JudgeReward::new(JudgeConfig::clone(self))?))
    }

    #[cfg(not(feature = "judge"))]
    fn build(&self, _: &Device) -> Result<Box<dyn RewardFunction>> {
        anyhow::bail!(
            "kind: judge, must be another: this program was built without the feature judge"
        )
    }

    fn check_row(&self, columns: &Value) -> Result<()> {
        JudgeConfig::check_row(self, columns)
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::none()
    }

    fn check_inputs(&self) -> Result<()> {
        self.check_files()
    }

    fn cache(&self) -> Option<&Path> {
        self.cache.as_deref()
    }
}

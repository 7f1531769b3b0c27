//! Environments by name.

use std::path::PathBuf;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    AgentConfig, EnvironmentFactory, EnvironmentLimits, Environments, ProgramEnvironmentConfig,
    ProgramEnvironments, ToolsConfig,
};
use crate::Pretrained;
use candle_grpo_base::within;
use candle_grpo_core::validate::check;

/// The environment in a configuration file: `kind`, options for that kind, and `limits`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EnvironmentConfig {
    /// Trajectory limits.
    #[serde(default)]
    pub limits: EnvironmentLimits,
    /// If true, special token names in the environment's texts and messages become those tokens.
    /// Must be false if the environment passes on text from outside.
    #[serde(default)]
    pub special_tokens_in_text: bool,
    /// The environment and its options.
    #[serde(flatten)]
    pub kind: EnvironmentKind,
}

/// Environments that a configuration can select.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum EnvironmentKind {
    /// Your own program: [`ProgramEnvironments`].
    Program(ProgramEnvironmentConfig),
    /// Tools that are programs, or on MCP servers: [`ToolEnvironments`](super::ToolEnvironments).
    Tools(ToolsConfig),
    /// Programs that call the policy over HTTP. The crate `candle-grpo-agents` plays them.
    Agent(AgentConfig),
}

impl EnvironmentKind {
    /// Returns whether the environment gives rewards.
    pub fn gives_rewards(&self) -> bool {
        match self {
            Self::Program(_) => true,
            Self::Tools(_) => false,
            Self::Agent(config) => config.reports_rewards,
        }
    }
}

impl EnvironmentConfig {
    /// Checks the options. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// If an option is invalid.
    pub fn validate(&self) -> Result<()> {
        let limits = self.limits.validate();
        limits.map_err(|error| within("limits", error))?;
        match &self.kind {
            EnvironmentKind::Program(config) => config.validate(),
            EnvironmentKind::Tools(config) => config.validate(),
            EnvironmentKind::Agent(config) => {
                let must = "be false: messages of agents come from outside";
                check(
                    !self.special_tokens_in_text,
                    "special_tokens_in_text",
                    true,
                    must,
                )?;
                config.validate()
            }
        }
    }

    /// Checks that the programs and scripts exist.
    ///
    /// # Errors
    ///
    /// If one is missing.
    pub fn check_files(&self) -> Result<()> {
        match &self.kind {
            EnvironmentKind::Program(config) => config.program().check_files(),
            EnvironmentKind::Tools(config) => config.check_files(),
            EnvironmentKind::Agent(config) => config.check_files(),
        }
    }

    /// All programs and scripts.
    pub fn files(&self) -> Vec<PathBuf> {
        match &self.kind {
            EnvironmentKind::Program(config) => config.program().files(),
            EnvironmentKind::Tools(config) => config.files(),
            EnvironmentKind::Agent(config) => config.program().files(),
        }
    }

    /// Starts the MCP servers whose tools the policy can call, and lists their tools.
    ///
    /// # Errors
    ///
    /// If a server cannot be used, or two tools have the same name.
    pub fn list_tools(&self) -> Result<()> {
        match &self.kind {
            EnvironmentKind::Tools(config) => config.list().map(|_| ()),
            EnvironmentKind::Program(_) | EnvironmentKind::Agent(_) => Ok(()),
        }
    }

    /// Returns whether trajectories have a reward component of their own.
    pub fn gives_rewards(&self) -> bool {
        self.limits.gives_rewards(self.kind.gives_rewards())
    }

    /// The tool schemas for a prompt whose row has these columns, if there are tools.
    ///
    /// # Errors
    ///
    /// If the tools column is absent or invalid.
    pub fn schemas(&self, columns: &Value) -> Result<Option<Value>> {
        let EnvironmentKind::Tools(config) = &self.kind else {
            return Ok(None);
        };
        config.schemas(columns).map(|schemas| Some(schemas.into()))
    }

    /// Returns the column that lists a row's tools, if there is one.
    pub fn tools_column(&self) -> Option<&str> {
        match &self.kind {
            EnvironmentKind::Tools(config) => config.column.as_deref(),
            EnvironmentKind::Program(_) | EnvironmentKind::Agent(_) => None,
        }
    }

    /// Starts the programs for a model. `stop_token_ids` must match the sampler's.
    ///
    /// # Errors
    ///
    /// If an option is invalid, a program cannot be started, or the kind is
    /// [`EnvironmentKind::Agent`].
    pub fn build(&self, model: &Pretrained, stop_token_ids: &[u32]) -> Result<Environments> {
        self.validate()?;
        match &self.kind {
            EnvironmentKind::Program(config) => {
                self.with_factory(ProgramEnvironments::new(config)?, model, stop_token_ids)
            }
            EnvironmentKind::Tools(config) => {
                self.with_factory(config.build()?, model, stop_token_ids)
            }
            EnvironmentKind::Agent(_) => {
                bail!("kind: agent, must be program or tools: agents are no environments")
            }
        }
    }

    fn with_factory(
        &self,
        factory: impl EnvironmentFactory + 'static,
        model: &Pretrained,
        stop_token_ids: &[u32],
    ) -> Result<Environments> {
        let (limits, template) = (self.limits.clone(), model.chat_template.as_ref());
        let environments =
            Environments::new(factory, limits, &model.tokenizer, template, stop_token_ids)?;
        Ok(if self.special_tokens_in_text {
            environments.with_special_tokens_in_text()
        } else {
            environments
        })
    }
}

//! The options of agents: programs of their own, which call the policy over HTTP.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;
use candle_grpo_core::validate::{at_least_one, check};
use serde::{Deserialize, Serialize};

use super::ToolFormat;
use candle_grpo_rewards::program::Program;

/// The options of agents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AgentConfig {
    /// The program of an agent and its arguments. No shell is in between. Each trajectory has a
    /// process of its own. Empty: agents start by themselves and ask for episodes.
    pub command: Vec<String>,
    /// The folder that it runs in; absent: that of this process.
    pub folder: Option<PathBuf>,
    /// The address and the port of the server; port 0: one that is free. An address other than
    /// that of this machine lets other machines draw from the policy, with a key only.
    pub listen: SocketAddr,
    /// The environment variable with the key that agents ask for episodes with, if `command` is
    /// empty. Absent: the key is random, and logged.
    pub api_key_env: Option<String>,
    /// The notation in which the model calls tools.
    pub format: ToolFormat,
    /// If true, agents report rewards, and one that does not has failed. If false, the `rewards`
    /// of the run score the last answer.
    pub reports_rewards: bool,
    /// The maximum number of agents at the same time.
    pub max_concurrent: usize,
    /// The maximum number of requests of an agent, refused ones included.
    pub max_requests: usize,
    /// The maximum size of a request in bytes.
    pub max_request_bytes: usize,
    /// The maximum length of a request's prompt in tokens. Absent: no limit.
    pub max_prompt_tokens: Option<usize>,
    /// The longest time in seconds between two requests of an agent, before the first one and
    /// after the last one. The time of drawing does not count.
    pub time_limit_seconds: f64,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            folder: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            api_key_env: None,
            format: ToolFormat::default(),
            reports_rewards: true,
            max_concurrent: 64,
            max_requests: 1000,
            max_request_bytes: 8 << 20,
            max_prompt_tokens: None,
            time_limit_seconds: 300.,
        }
    }
}

impl AgentConfig {
    /// Checks the values. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// If one is out of range.
    pub fn validate(&self) -> Result<()> {
        if !self.command.is_empty() {
            self.program().validate()?;
        }
        let is_named = self.api_key_env.as_deref() != Some("");
        let must = "be the name of an environment variable, or absent";
        check(is_named, "api_key_env", "\"\"", must)?;
        self.format.validate()?;
        at_least_one("max_concurrent", self.max_concurrent)?;
        at_least_one("max_requests", self.max_requests)?;
        at_least_one("max_request_bytes", self.max_request_bytes)?;
        at_least_one("max_prompt_tokens", self.max_prompt_tokens.unwrap_or(1))?;
        let limit = self.time_limit_seconds;
        let valid = limit > 0. && limit <= 1e9;
        Ok(check(
            valid,
            "time_limit_seconds",
            limit,
            "be above 0 and at most 1e9",
        )?)
    }

    /// Checks that the program of an agent is there, if there is one.
    ///
    /// # Errors
    ///
    /// If it is missing.
    pub fn check_files(&self) -> Result<()> {
        if self.command.is_empty() {
            return Ok(());
        }
        self.program().check_files()
    }

    /// Returns the program of an agent.
    pub fn program(&self) -> Program {
        let limit = self.time_limit_seconds;
        Program::new(&self.command, self.folder.as_ref(), limit, limit)
    }
}

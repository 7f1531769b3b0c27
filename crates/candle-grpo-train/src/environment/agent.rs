//! Options for agents: your own programs, which call the policy over HTTP.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;
use candle_grpo_core::validate::{at_least_one, check};
use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer, Serialize};

use super::{SessionScope, ToolFormat};
use candle_grpo_rewards::program::{IsolationConfig, Network, Program};

/// Options for agents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AgentConfig {
    /// An agent's program and its arguments, started without a shell. Empty: agents start by
    /// themselves and request episodes.
    pub command: Vec<String>,
    /// `episode`: each trajectory has its own process. `shared`: `workers` processes start once,
    /// and request episodes.
    pub session: SessionScope,
    /// Number of processes with `session: shared`. Each may play several episodes at once.
    pub workers: usize,
    /// Working directory for the program; absent: this process's.
    pub folder: Option<PathBuf>,
    /// Isolation for the program, whose `network` must be `loopback` or `host`. Absent: none.
    pub isolation: Option<IsolationConfig>,
    /// Server address and port; port 0 selects a free one. An address other than this machine's
    /// lets other machines sample from the policy, with a key only.
    #[serde(deserialize_with = "address")]
    pub listen: SocketAddr,
    /// Environment variable with the key with which agents that start by themselves request
    /// episodes. Absent: a random key, which is logged.
    pub api_key_env: Option<String>,
    /// Notation in which the model calls tools.
    pub format: ToolFormat,
    /// Roles that the policy plays, each the model in an agent's requests. Rows and rewards have a
    /// role, and advantages compare a role with itself in other trajectories. Empty: requests may
    /// name any model.
    pub roles: Vec<String>,
    /// If true, agents report rewards, and an agent that reports none has failed. If false, the
    /// run's `rewards` score the last answer.
    pub reports_rewards: bool,
    /// Maximum number of concurrent agents.
    pub max_concurrent: usize,
    /// Maximum number of requests per agent, including refused ones.
    pub max_requests: usize,
    /// Maximum request size in bytes.
    pub max_request_bytes: usize,
    /// Maximum prompt length per request, in tokens. Absent: no limit.
    pub max_prompt_tokens: Option<usize>,
    /// Maximum time in seconds between two requests from an agent, before the first one and after
    /// the last one. Sampling time does not count.
    pub time_limit_seconds: f64,
}

impl Default for AgentConfig {
    fn default() -> Self {
        Self {
            command: Vec::new(),
            session: SessionScope::Episode,
            workers: 1,
            folder: None,
            isolation: None,
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            api_key_env: None,
            format: ToolFormat::default(),
            roles: Vec::new(),
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
    /// Fails if one is out of range.
    pub fn validate(&self) -> Result<()> {
        if !self.command.is_empty() {
            self.program().validate()?;
        }
        if let Some(isolation) = &self.isolation {
            let must = "be absent without a command: agents start by themselves";
            check(!self.command.is_empty(), "isolation", "given", must)?;
            let reaches = isolation.network != Network::None;
            let must = "be loopback or host: agents call the server of this process";
            check(reaches, "isolation.network", "none", must)?;
            let ip = self.listen.ip();
            let is_local = ip.is_loopback() || ip.is_unspecified();
            let fits = is_local || isolation.network == Network::Host;
            let must = "be a loopback address, 0.0.0.0 or :: with isolation.network: loopback";
            check(fits, "listen", self.listen, must)?;
        }
        let is_named = self.api_key_env.as_deref() != Some("");
        let must = "be the name of an environment variable, or absent";
        check(is_named, "api_key_env", "\"\"", must)?;
        self.format.validate()?;
        for (at, role) in self.roles.iter().enumerate() {
            let fits = !role.is_empty() && !self.roles[..at].contains(role);
            let must = "be a name that no other role has";
            check(fits, &format!("roles[{at}]"), format!("{role:?}"), must)?;
        }
        self.session.check_workers(self.workers)?;
        let fits = self.session == SessionScope::Episode || !self.command.is_empty();
        check(fits, "session", "shared", "be absent without a command")?;
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

    /// Checks that an agent's program exists, if there is one.
    ///
    /// # Errors
    ///
    /// Fails if it is missing.
    pub fn check_files(&self) -> Result<()> {
        if self.command.is_empty() {
            return Ok(());
        }
        self.program().check_files()
    }

    /// Returns an agent's program.
    pub fn program(&self) -> Program {
        let limit = self.time_limit_seconds;
        Program::new(&self.command, self.folder.as_ref(), limit, limit)
            .with_isolation(self.isolation.as_ref())
    }
}

fn address<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    let must = "an address with a port, such as 127.0.0.1:8000";
    text.parse()
        .map_err(|_| D::Error::invalid_value(Unexpected::Str(&text), &must))
}

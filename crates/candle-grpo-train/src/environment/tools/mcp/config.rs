//! Options for MCP servers.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use candle_grpo_base::{check_server_url, within};
use candle_grpo_core::Invalid;
use candle_grpo_core::validate::check;
use serde::{Deserialize, Serialize};

use super::super::super::SessionScope;
use super::super::super::program::{limit, workers};
use super::super::Tool;
use candle_grpo_rewards::program::{IsolationConfig, Program, check_limits};

/// Options for a server whose tools the policy can call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct McpServerConfig {
    /// The server's name in messages.
    pub name: String,
    /// The server's program and its arguments, started without a shell. It reads and writes
    /// messages on stdin and stdout. Either this or `url` must be given.
    #[serde(default)]
    pub command: Vec<String>,
    /// Working directory for the program; absent: this process's.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// Isolation for the program. Absent: none.
    #[serde(default)]
    pub isolation: Option<IsolationConfig>,
    /// URL of a server that speaks streamable HTTP.
    #[serde(default)]
    pub url: Option<String>,
    /// Environment variable with the key that the server at `url` receives as bearer token.
    #[serde(default)]
    pub api_key_env: Option<String>,
    /// `episode`: each trajectory that calls the server has its own process or HTTP session.
    /// `shared`: all trajectories share them.
    #[serde(default)]
    pub session: SessionScope,
    /// Number of processes or HTTP sessions with `session: shared`. Each answers one call at a
    /// time. All calls in a trajectory go to the same one.
    #[serde(default = "workers")]
    pub workers: usize,
    /// Names of the tools that the policy can call. Absent: all.
    #[serde(default)]
    pub allow: Option<Vec<String>>,
    /// Names of tools that the policy cannot call.
    #[serde(default)]
    pub deny: Vec<String>,
    /// Text before each tool name that the policy uses. Two servers may then have a tool with the
    /// same name.
    #[serde(default)]
    pub prefix: String,
    /// Maximum time for an output.
    #[serde(default = "limit")]
    pub time_limit_seconds: f64,
    /// Maximum time for each answer at the start of a session.
    #[serde(default = "limit")]
    pub start_limit_seconds: f64,
}

impl McpServerConfig {
    fn validate(&self) -> Result<()> {
        check(!self.name.is_empty(), "name", "\"\"", "be a text")?;
        match &self.url {
            Some(url) => {
                check_server_url("url", url)?;
                let must = "be empty with url";
                let command = format_args!("{:?}", self.command);
                check(self.command.is_empty(), "command", command, must)?;
                check(
                    self.folder.is_none(),
                    "folder",
                    "given",
                    "be absent with url",
                )?;
                let must = "be absent with url: the server runs elsewhere";
                check(self.isolation.is_none(), "isolation", "given", must)?;
            }
            None if self.command.is_empty() => {
                return Err(Invalid::new("command", "[]", "be given, or url").into());
            }
            None => {
                self.program().validate()?;
                let must = "be absent without url";
                check(self.api_key_env.is_none(), "api_key_env", "given", must)?;
            }
        }
        self.session.check_workers(self.workers)?;
        Ok(check_limits(
            self.time_limit_seconds,
            self.start_limit_seconds,
        )?)
    }

    fn has_program(&self) -> bool {
        self.url.is_none()
    }

    pub(super) fn program(&self) -> Program {
        let (limit, start_limit) = (self.time_limit_seconds, self.start_limit_seconds);
        Program::new(&self.command, self.folder.as_ref(), limit, start_limit)
            .with_isolation(self.isolation.as_ref())
    }
}

type Tools = Vec<Arc<dyn Tool>>;

/// MCP servers. Clones share their sessions.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct McpServers {
    configs: Vec<McpServerConfig>,
    /// Their tools, once they are listed.
    #[serde(skip)]
    tools: Arc<Mutex<Option<Tools>>>,
}

impl McpServers {
    /// Returns the options of the servers.
    pub fn configs(&self) -> &[McpServerConfig] {
        &self.configs
    }

    pub(in super::super) fn validate(&self) -> Result<()> {
        self.each(McpServerConfig::validate)?;
        for (i, config) in self.configs.iter().enumerate() {
            let mut before = self.configs[..i].iter();
            let field = format!("mcp[{i}].name");
            let must = "be the name of one server only";
            let is_new = before.all(|other| other.name != config.name);
            check(is_new, &field, format_args!("{:?}", config.name), must)?;
        }
        Ok(())
    }

    pub(in super::super) fn check_files(&self) -> Result<()> {
        self.each(|server| {
            if server.has_program() {
                server.program().check_files()?;
            }
            Ok(())
        })
    }

    pub(in super::super) fn files(&self) -> impl Iterator<Item = PathBuf> {
        let programs = self.configs.iter().filter(|server| server.has_program());
        programs.flat_map(|server| server.program().files())
    }

    fn each(&self, check: impl Fn(&McpServerConfig) -> Result<()>) -> Result<()> {
        let mut servers = self.configs.iter().enumerate();
        servers.try_for_each(|(i, server)| {
            check(server).map_err(|error| within(&format!("mcp[{i}]"), error))
        })
    }

    /// Returns the tools of all servers, in the order of the configuration and of each server's
    /// list. The first call asks the servers.
    pub(in super::super) fn tools(&self) -> Result<Tools> {
        let mut tools = self.tools.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tools) = &*tools {
            return Ok(tools.clone());
        }
        let mut all: Vec<(&str, Arc<dyn Tool>)> = Vec::new();
        for (i, config) in self.configs.iter().enumerate() {
            let listed = connect(config).map_err(|error| within(&format!("mcp[{i}]"), error))?;
            for tool in listed {
                let name = tool.name();
                if let Some((other, _)) = all.iter().find(|(_, other)| other.name() == name) {
                    let servers = format!("{name:?} of {other:?} and {:?}", config.name);
                    let must = "have a name of its own: set prefix, allow or deny";
                    return Err(Invalid::new(format!("mcp[{i}].tool"), servers, must).into());
                }
                all.push((&config.name, tool));
            }
        }
        let all: Tools = all.into_iter().map(|(_, tool)| tool).collect();
        *tools = Some(all.clone());
        Ok(all)
    }
}

impl From<Vec<McpServerConfig>> for McpServers {
    fn from(configs: Vec<McpServerConfig>) -> Self {
        Self {
            configs,
            tools: Arc::default(),
        }
    }
}

impl PartialEq for McpServers {
    fn eq(&self, other: &Self) -> bool {
        self.configs == other.configs
    }
}

impl fmt::Debug for McpServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.configs.fmt(f)
    }
}

#[cfg(feature = "mcp")]
fn connect(config: &McpServerConfig) -> Result<Tools> {
    super::server::connect(config)
}

#[cfg(not(feature = "mcp"))]
fn connect(_: &McpServerConfig) -> Result<Tools> {
    anyhow::bail!("must be absent: this program was built without the feature mcp")
}

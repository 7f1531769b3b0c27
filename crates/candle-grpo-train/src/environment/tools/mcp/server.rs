//! A server, its sessions and its tools.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, anyhow, bail};
use candle_grpo_base::NoProgress;
use candle_grpo_core::Invalid;
use serde_json::Value;

use super::McpServerConfig;
use super::output::Listed;
use super::session::{Address, Failure, Session};
use crate::environment::tools::{CallContext, Tool};
use crate::environment::{SessionScope, Unavailable};
use crate::{Interrupted, Progress};

/// A place for a session, which starts at its first call.
type Place = Arc<Mutex<Option<Session>>>;

/// A server whose tools the policy can call.
struct McpServer {
    config: McpServerConfig,
    address: Address,
    /// By trajectory or, if trajectories share them, by number.
    sessions: Mutex<HashMap<u64, Place>>,
}

/// A tool on a server.
struct McpTool {
    server: Arc<McpServer>,
    /// The name that the policy uses.
    name: String,
    listed: Listed,
}

/// Starts a server and returns its tools, in the server's order.
pub(super) fn connect(config: &McpServerConfig) -> Result<Vec<Arc<dyn Tool>>> {
    let address = Address::new(config)?;
    let (session, listed) = match address.list(&NoProgress) {
        Ok(listed) => listed,
        Err(failure) => bail!("server {:?}: {:#}", config.name, error(failure)),
    };
    let listed = selected(config, listed)?;
    let server = Arc::new(McpServer {
        config: config.clone(),
        address,
        sessions: Mutex::default(),
    });
    if config.session == SessionScope::Shared {
        *lock(&server.place(0)) = Some(session);
    }
    let tool = |listed: Listed| -> Arc<dyn Tool> {
        Arc::new(McpTool {
            server: Arc::clone(&server),
            name: format!("{}{}", config.prefix, listed.name),
            listed,
        })
    };
    Ok(listed.into_iter().map(tool).collect())
}

/// Returns the tools that the policy can call.
fn selected(config: &McpServerConfig, listed: Vec<Listed>) -> Result<Vec<Listed>> {
    let names: Vec<String> = listed
        .iter()
        .map(|tool| format!("{:?}", tool.name))
        .collect();
    let names = names.join(", ");
    for (field, chosen) in [
        ("allow", config.allow.as_ref()),
        ("deny", Some(&config.deny)),
    ] {
        let mut chosen = chosen.into_iter().flatten();
        if let Some(unknown) = chosen.find(|name| !listed.iter().any(|tool| tool.name == **name)) {
            let must = format!("name tools of the server: {names}");
            return Err(Invalid::new(field, format!("{unknown:?}"), must).into());
        }
    }
    let is_allowed = |name: &String| config.allow.as_ref().is_none_or(|all| all.contains(name));
    let mut selected = listed;
    selected.retain(|tool| is_allowed(&tool.name) && !config.deny.contains(&tool.name));
    if selected.is_empty() {
        bail!("server {:?}: no tool is left of {names}", config.name);
    }
    Ok(selected)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn error(failure: Failure) -> anyhow::Error {
    match failure {
        Failure::Rpc(error) => anyhow!("error {}: {}", error.code, error.message),
        Failure::Expired => anyhow!("the server has ended the session"),
        Failure::Interrupted => Interrupted.into(),
        Failure::Broken(error) => error,
    }
}

impl McpServer {
    fn place(&self, episode: u64) -> Place {
        let number = match self.config.session {
            SessionScope::Episode => episode,
            SessionScope::Shared => episode % self.config.workers as u64,
        };
        Arc::clone(lock(&self.sessions).entry(number).or_default())
    }

    /// Calls a tool in the trajectory's session. A session that fails is ended.
    fn call(
        &self,
        tool: &str,
        arguments: &Value,
        episode: u64,
        progress: &dyn Progress,
    ) -> Result<Result<String, String>, Failure> {
        let place = self.place(episode);
        let mut place = lock(&place);
        let mut session = match place.take() {
            Some(session) => session,
            None => self.address.start(progress)?,
        };
        let mut output = session.call(tool, arguments, progress);
        // The state of a trajectory's own session would be lost.
        let is_replaceable = self.config.session == SessionScope::Shared || !session.has_called();
        if matches!(output, Err(Failure::Expired)) && is_replaceable {
            session = self.address.start(progress)?;
            output = session.call(tool, arguments, progress);
        }
        match output {
            Ok(output) => {
                *place = Some(session);
                Ok(output)
            }
            Err(failure) => Err(session.stop(failure)),
        }
    }
}

impl Tool for McpTool {
    fn name(&self) -> &str {
        &self.name
    }

    fn description(&self) -> &str {
        &self.listed.description
    }

    fn parameters(&self) -> Value {
        self.listed.parameters.clone()
    }

    fn call(&self, call: &CallContext<'_>) -> Result<String> {
        let (server, tool) = (&self.server, &self.listed.name);
        match server.call(tool, call.arguments, call.episode, call.progress) {
            Ok(output) => output.map_err(|message| anyhow!(message)),
            Err(Failure::Interrupted) => Err(Interrupted.into()),
            Err(failure) => {
                let place = format!("tool {:?}, server {:?}", self.name, server.config.name);
                Err(error(failure).context(place).context(Unavailable))
            }
        }
    }

    fn end(&self, episode: u64) {
        if self.server.config.session == SessionScope::Episode {
            let place = lock(&self.server.sessions).remove(&episode);
            // Ending a session takes time, during which other trajectories need the lock.
            drop(place);
        }
    }
}

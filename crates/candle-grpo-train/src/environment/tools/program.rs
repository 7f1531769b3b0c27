//! Tools implemented by programs.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use candle_grpo_core::validate::{at_least_one, check};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::super::program::{limit, workers};
use super::{CallContext, Tool};
use candle_grpo_rewards::program::{
    Answer, Failure, IsolationConfig, Program, ProgramPool, check_limits, quoted,
};

/// Options for [`ProgramTool`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ProgramToolConfig {
    /// The name that the policy uses to call it.
    pub name: String,
    /// Its description in the prompt.
    #[serde(default)]
    pub description: String,
    /// The JSON schema for its arguments.
    #[serde(default = "no_parameters")]
    pub parameters: Value,
    /// The program and its arguments. No shell is involved.
    pub command: Vec<String>,
    /// Its working directory. Absent: this process's.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// Isolation for the program. Absent: none.
    #[serde(default)]
    pub isolation: Option<IsolationConfig>,
    /// Number of processes.
    #[serde(default = "workers")]
    pub workers: usize,
    /// Maximum time for an output.
    #[serde(default = "limit")]
    pub time_limit_seconds: f64,
    /// Maximum startup time, added to the limit for the first output.
    #[serde(default = "limit")]
    pub start_limit_seconds: f64,
}

fn no_parameters() -> Value {
    json!({"type": "object", "properties": {}})
}

impl ProgramToolConfig {
    pub(super) fn validate(&self) -> Result<()> {
        check(!self.name.is_empty(), "name", "\"\"", "be a text")?;
        check(
            self.parameters.is_object(),
            "parameters",
            &self.parameters,
            "be a JSON schema, an object",
        )?;
        self.program().validate()?;
        at_least_one("workers", self.workers)?;
        Ok(check_limits(
            self.time_limit_seconds,
            self.start_limit_seconds,
        )?)
    }

    pub(super) fn program(&self) -> Program {
        let (limit, start_limit) = (self.time_limit_seconds, self.start_limit_seconds);
        Program::new(&self.command, self.folder.as_ref(), limit, start_limit)
            .with_isolation(self.isolation.as_ref())
    }
}

/// A tool implemented by a program that reads one line of JSON per call and writes one line with
/// the output.
///
/// A request is an object with `id`, `name`, `arguments`, `columns` and `episode`. An answer is an
/// object that echoes `id`, and has `output` (text, or other JSON, which the policy gets as text)
/// or `error` (text).
///
/// If it exceeds its time or ends, it is restarted, and the call has failed. The policy gets a
/// short message, and the log gets its stderr. A program that has never answered, or that writes a
/// line nobody asked for, ends the run.
pub struct ProgramTool {
    config: ProgramToolConfig,
    pool: ProgramPool,
}

impl ProgramTool {
    /// Starts the program.
    ///
    /// # Errors
    ///
    /// Fails if `config` is invalid or the program cannot be started.
    pub fn new(config: ProgramToolConfig) -> Result<Self> {
        config.validate()?;
        let pool = ProgramPool::start(config.program(), config.workers);
        let pool = pool.with_context(|| format!("tool {:?}", config.name))?;
        Ok(Self { config, pool })
    }
}

impl Tool for ProgramTool {
    fn name(&self) -> &str {
        &self.config.name
    }

    fn description(&self) -> &str {
        &self.config.description
    }

    fn parameters(&self) -> Value {
        self.config.parameters.clone()
    }

    fn call(&self, call: &CallContext<'_>) -> Result<String> {
        let request = Map::from_iter([
            ("name".to_owned(), Value::from(self.name())),
            ("arguments".to_owned(), call.arguments.clone()),
            ("columns".to_owned(), call.columns.clone()),
            ("episode".to_owned(), call.episode.into()),
        ]);
        let failed = match self.pool.ask(call.episode, request, call.progress, read) {
            Ok(output) => return output.map_err(|message| anyhow!(message)),
            Err(failed) => failed,
        };
        // The policy reads the same text each time.
        let message = match &failed {
            Failure::Interrupted | Failure::Surplus(_) | Failure::Unusable(_) => {
                return Err(anyhow::Error::from(failed).context(format!("tool {:?}", self.name())));
            }
            Failure::Timeout(_) => {
                format!(
                    "no output within {} seconds",
                    self.config.time_limit_seconds
                )
            }
            Failure::Ended(_) => "the tool ended".to_owned(),
            Failure::Wrong(_) => "the tool gave a wrong answer".to_owned(),
        };
        tracing::warn!("tool {:?}: {:#}", self.name(), anyhow::Error::from(failed));
        Err(anyhow!(message))
    }
}

/// The output or error in a line.
fn read(line: &str) -> Result<Answer<Result<String, String>>> {
    let read = || -> Result<Answer<Result<String, String>>> {
        let mut fields: Map<String, Value> =
            serde_json::from_str(line).context("must be a JSON object")?;
        let id = Answer::take_id(&mut fields)?;
        let text = |value: Value| match value {
            Value::String(text) => text,
            value => value.to_string(),
        };
        let value = match (fields.remove("output"), fields.remove("error")) {
            (Some(output), None) => Ok(text(output)),
            (None, Some(error)) => Err(text(error)),
            _ => anyhow::bail!("must have \"output\" or \"error\""),
        };
        ensure!(fields.is_empty(), "{fields:?}: not keys of an answer");
        Ok(Answer { id, value })
    };
    read().with_context(|| quoted(line))
}

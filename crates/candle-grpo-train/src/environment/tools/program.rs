//! Tools as programs.

use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};
use candle_grpo_core::validate::{at_least_one, check};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::super::program::{limit, workers};
use super::{
    CallContext, MAX_OUTPUT_CHARS, OUTPUT_AFTER, OUTPUT_BEFORE, Tool, ToolEnvironments, ToolFormat,
    schema,
};
use candle_grpo_base::column::column;
use candle_grpo_base::within;
use candle_grpo_rewards::program::{Answer, Failure, Program, ProgramPool, check_limits, quoted};

/// The options of [`ToolEnvironments`] whose tools are programs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolsConfig {
    /// The tools, each with the keys of a tool.
    pub tools: Vec<ProgramToolConfig>,
    /// The notation of calls: `hermes` (Hermes, Qwen, SmolLM3), `llama` (Llama 3), or `marks`.
    #[serde(default)]
    pub format: ToolFormat,
    /// The column of the row with the tools for its prompt, as a list of names or schemas. Absent:
    /// all.
    #[serde(default)]
    pub column: Option<String>,
    /// The largest number of characters of an output. The rest of a longer one is left out.
    #[serde(default = "max_output_chars")]
    pub max_output_chars: usize,
    /// The text before an output, after a prompt of plain text.
    #[serde(default = "output_before")]
    pub output_before: String,
    /// The text after an output, after a prompt of plain text.
    #[serde(default = "output_after")]
    pub output_after: String,
}

/// The options of [`ProgramTool`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramToolConfig {
    /// The name by which the policy calls it.
    pub name: String,
    /// The description that the prompt gives.
    #[serde(default)]
    pub description: String,
    /// The JSON schema of its arguments.
    #[serde(default = "no_parameters")]
    pub parameters: Value,
    /// The program and its arguments. No shell is in between.
    pub command: Vec<String>,
    /// The folder that it runs in; absent: that of this process.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// The number of its processes.
    #[serde(default = "workers")]
    pub workers: usize,
    /// The longest time for an output.
    #[serde(default = "limit")]
    pub time_limit_seconds: f64,
    /// The longest time for its start, which the first output may take in addition.
    #[serde(default = "limit")]
    pub start_limit_seconds: f64,
}

fn max_output_chars() -> usize {
    MAX_OUTPUT_CHARS
}

fn output_before() -> String {
    OUTPUT_BEFORE.to_owned()
}

fn output_after() -> String {
    OUTPUT_AFTER.to_owned()
}

fn no_parameters() -> Value {
    json!({"type": "object", "properties": {}})
}

impl ToolsConfig {
    /// Checks the values. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// If there are no tools, or a value is out of range.
    pub fn validate(&self) -> Result<()> {
        check(!self.tools.is_empty(), "tools", "none", "be at least one")?;
        at_least_one("max_output_chars", self.max_output_chars)?;
        self.format
            .validate()
            .map_err(|error| within("format.marks", error))?;
        self.each(ProgramToolConfig::validate)
    }

    /// Checks that the programs are there.
    ///
    /// # Errors
    ///
    /// If one is missing.
    pub fn check_files(&self) -> Result<()> {
        self.each(|tool| tool.program().check_files())
    }

    /// The files that decide outputs.
    pub fn files(&self) -> Vec<PathBuf> {
        let tools = self.tools.iter();
        tools.flat_map(|tool| tool.program().files()).collect()
    }

    /// The schemas for the prompt of a row with these columns.
    ///
    /// # Errors
    ///
    /// If the column of the tools is absent or no list, or has a tool that is not there.
    pub fn schemas(&self, columns: &Value) -> Result<Vec<Value>> {
        let own =
            |tool: &ProgramToolConfig| schema(&tool.name, &tool.description, &tool.parameters);
        let Some(name) = &self.column else {
            return Ok(self.tools.iter().map(own).collect());
        };
        let value = column(columns, name)?;
        let list = value.as_array();
        let list = list.with_context(|| format!("column {name:?}: {value}, must be a list"))?;
        let find = |entry: &Value| {
            let function = entry.get("function").unwrap_or(entry);
            let name = entry.as_str().or_else(|| function.get("name")?.as_str());
            let name = name.with_context(|| format!("{entry}, must be a name or a schema"))?;
            let tool = self.tools.iter().find(|tool| tool.name == name);
            let tool = tool.with_context(|| format!("{name:?}, must be the name of a tool"))?;
            Ok(if entry.is_string() {
                own(tool)
            } else {
                entry.clone()
            })
        };
        let schemas = list.iter().map(find).collect::<Result<_>>();
        schemas.with_context(|| format!("column {name:?}"))
    }

    fn each(&self, check: impl Fn(&ProgramToolConfig) -> Result<()>) -> Result<()> {
        let mut tools = self.tools.iter().enumerate();
        tools.try_for_each(|(i, tool)| {
            check(tool).map_err(|error| within(&format!("tools[{i}]"), error))
        })
    }

    /// Starts the tools.
    ///
    /// # Errors
    ///
    /// If the options are not valid or a program cannot be started.
    pub fn build(&self) -> Result<ToolEnvironments> {
        self.validate()?;
        let tools = ToolEnvironments::new(self.format.clone())?
            .with_max_output_chars(self.max_output_chars)
            .with_output_marks(&self.output_before, &self.output_after);
        self.tools.iter().try_fold(tools, |tools, tool| {
            tools.with(ProgramTool::new(tool.clone())?)
        })
    }
}

impl ProgramToolConfig {
    fn validate(&self) -> Result<()> {
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

    fn program(&self) -> Program {
        let (limit, start_limit) = (self.time_limit_seconds, self.start_limit_seconds);
        Program::new(&self.command, self.folder.as_ref(), limit, start_limit)
    }
}

/// A tool from a program that reads one line of JSON for each call and writes one line with the
/// output.
///
/// A request is an object with `id`, `name`, `arguments`, `columns` and `episode`. An answer is an
/// object that echoes `id`, and has `output` (a text, or other JSON, which the policy gets as text)
/// or `error` (a text).
///
/// If it exceeds its time or ends, it is started again, and the call has failed. The policy gets a
/// short message, and the log its stderr. A program that has never answered, or that writes a line
/// which no call asked for, ends the run.
pub struct ProgramTool {
    config: ProgramToolConfig,
    pool: ProgramPool,
}

impl ProgramTool {
    /// Starts the program.
    ///
    /// # Errors
    ///
    /// If `config` is not valid or the program cannot be started.
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
        // The policy reads what is the same each time.
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

/// The output or the error in a line.
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

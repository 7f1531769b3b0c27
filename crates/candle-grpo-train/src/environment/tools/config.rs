//! Options for tools.

use std::path::PathBuf;

use anyhow::{Context, Result};
use candle_grpo_base::column::column;
use candle_grpo_base::within;
use candle_grpo_core::validate::{at_least_one, check};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    MAX_OUTPUT_CHARS, McpServers, OUTPUT_AFTER, OUTPUT_BEFORE, ProgramTool, ProgramToolConfig,
    ToolEnvironments, ToolFormat, schema,
};

/// Options for [`ToolEnvironments`] with programs and servers as tools.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ToolsConfig {
    /// Programs that the policy can call.
    #[serde(default)]
    pub tools: Vec<ProgramToolConfig>,
    /// MCP servers whose tools the policy can call. Their tools follow `tools` in the prompt.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schemars(with = "Vec<super::McpServerConfig>"))]
    pub mcp: McpServers,
    /// Tool call format: `hermes` (Hermes, Qwen, SmolLM3), `llama` (Llama 3), or `marks`.
    #[serde(default)]
    pub format: ToolFormat,
    /// Column with the tools for a row's prompt, as a list of names or schemas. Absent: all.
    #[serde(default)]
    pub column: Option<String>,
    /// Maximum number of characters in an output. The rest is cut off.
    #[serde(default = "max_output_chars")]
    pub max_output_chars: usize,
    /// Text before an output, after a plain text prompt.
    #[serde(default = "output_before")]
    pub output_before: String,
    /// Text after an output, after a plain text prompt.
    #[serde(default = "output_after")]
    pub output_after: String,
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

impl ToolsConfig {
    /// Checks the values. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// Fails if there are no tools, or a value is out of range.
    pub fn validate(&self) -> Result<()> {
        let has_tools = !self.tools.is_empty() || !self.mcp.configs().is_empty();
        check(has_tools, "tools", "none", "be at least one")?;
        at_least_one("max_output_chars", self.max_output_chars)?;
        self.format
            .validate()
            .map_err(|error| within("format.marks", error))?;
        self.each(ProgramToolConfig::validate)?;
        self.mcp.validate()
    }

    /// Checks that the programs exist.
    ///
    /// # Errors
    ///
    /// Fails if one is missing.
    pub fn check_files(&self) -> Result<()> {
        self.each(|tool| tool.program().check_files())?;
        self.mcp.check_files()
    }

    /// The files that determine outputs.
    pub fn files(&self) -> Vec<PathBuf> {
        let tools = self.tools.iter();
        let programs = tools.flat_map(|tool| tool.program().files());
        programs.chain(self.mcp.files()).collect()
    }

    /// The schemas for a prompt whose row has these columns. The first call starts the MCP servers.
    ///
    /// # Errors
    ///
    /// Fails as [`Self::list`], or if the tools column is absent or not a list, or contains an
    /// unknown tool.
    pub fn schemas(&self, columns: &Value) -> Result<Vec<Value>> {
        let all = self.list()?;
        let Some(name) = &self.column else {
            return Ok(all);
        };
        let value = column(columns, name)?;
        let list = value.as_array();
        let list = list.with_context(|| format!("column {name:?}: {value}, must be a list"))?;
        let find = |entry: &Value| {
            let function = entry.get("function").unwrap_or(entry);
            let name = entry.as_str().or_else(|| function.get("name")?.as_str());
            let name = name.with_context(|| format!("{entry}, must be a name or a schema"))?;
            let tool = all.iter().find(|tool| tool["function"]["name"] == name);
            let tool = tool.with_context(|| format!("{name:?}, must be the name of a tool"))?;
            Ok(if entry.is_string() { tool } else { entry }.clone())
        };
        let schemas = list.iter().map(find).collect::<Result<_>>();
        schemas.with_context(|| format!("column {name:?}"))
    }

    /// The schemas of all tools. The first call starts the MCP servers.
    ///
    /// # Errors
    ///
    /// Fails if a server cannot be used, or two tools have the same name.
    pub fn list(&self) -> Result<Vec<Value>> {
        let programs = self.tools.iter();
        let programs = programs.map(|tool| schema(&tool.name, &tool.description, &tool.parameters));
        let mut all: Vec<Value> = programs.collect();
        for tool in self.mcp.tools()? {
            let name = tool.name();
            let must = "have another name than each tool of an MCP server: set its prefix";
            let is_new = self.tools.iter().all(|program| program.name != name);
            check(is_new, "tools", format_args!("{name:?}"), must)?;
            all.push(schema(name, tool.description(), &tool.parameters()));
        }
        Ok(all)
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
    /// Fails if the options are invalid, or a program or server cannot be used.
    pub fn build(&self) -> Result<ToolEnvironments> {
        self.validate()?;
        let tools = ToolEnvironments::new(self.format.clone())?
            .with_max_output_chars(self.max_output_chars)
            .with_output_marks(&self.output_before, &self.output_after);
        let tools = self.tools.iter().try_fold(tools, |tools, tool| {
            tools.with(ProgramTool::new(tool.clone())?)
        })?;
        let servers = self.mcp.tools()?;
        servers
            .into_iter()
            .try_fold(tools, ToolEnvironments::with_shared)
    }
}

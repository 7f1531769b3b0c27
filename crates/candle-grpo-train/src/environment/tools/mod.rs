//! Tools that the policy calls.

mod config;
mod format;
mod mcp;
mod program;

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::{
    Append, Environment, EnvironmentFactory, EpisodeStart, Step, TextPart, Turn, Unavailable,
};
use crate::excerpt::excerpt;
use crate::{Interrupted, Progress};
use candle_grpo_rewards::program::Unusable;

pub use config::ToolsConfig;
pub use format::{ToolCall, ToolFormat};
pub use mcp::{McpServerConfig, McpServers};
pub use program::{ProgramTool, ProgramToolConfig};

/// Maximum number of calls per turn.
const MAX_CALLS: usize = 16;

const MAX_OUTPUT_CHARS: usize = 4000;
const OUTPUT_BEFORE: &str = "<tool_response>\n";
const OUTPUT_AFTER: &str = "\n</tool_response>\n";

/// A function that the policy can call. Several threads may call it at the same time.
pub trait Tool: Send + Sync {
    /// The name that the policy uses to call it.
    fn name(&self) -> &str;

    /// Its description in the prompt.
    fn description(&self) -> &str;

    /// The JSON schema for its arguments, an object.
    fn parameters(&self) -> Value;

    /// Returns the output for the policy.
    ///
    /// # Errors
    ///
    /// The policy gets the message as output, and the call counts as failed. With the context
    /// [`Unavailable`], the trajectory has failed instead. [`Interrupted`](crate::Interrupted) ends
    /// the step.
    fn call(&self, call: &CallContext<'_>) -> Result<String>;

    /// Ends a trajectory, even one without a call. The default does nothing.
    fn end(&self, episode: u64) {
        let _ = episode;
    }
}

/// A call to a [`Tool`].
#[derive(Clone, Copy)]
pub struct CallContext<'a> {
    /// The arguments, as the policy wrote them.
    pub arguments: &'a Value,
    /// The columns in the prompt's row.
    pub columns: &'a Value,
    /// A number that is the same for all calls in a trajectory.
    pub episode: u64,
    /// Can cancel a wait; the error is then [`Interrupted`](crate::Interrupted).
    pub progress: &'a dyn Progress,
}

/// Environments in which the policy calls tools until a turn has no call. They give no rewards: the
/// reward functions score that last turn.
///
/// After a prompt with messages, outputs are messages with role `tool`, which the chat template
/// renders. After plain text, they are text. Special token names in an output stay text.
///
/// Metrics count `tool_calls`, `tool_failures`, and calls to each tool as `tool_calls/NAME`.
///
/// ```
/// use candle_grpo_train::environment::{CallContext, Tool, ToolEnvironments, ToolFormat};
/// use serde_json::{Value, json};
///
/// struct Length;
///
/// impl Tool for Length {
///     fn name(&self) -> &str {
///         "length"
///     }
///     fn description(&self) -> &str {
///         "The number of letters of a word."
///     }
///     fn parameters(&self) -> Value {
///         json!({"type": "object", "properties": {"word": {"type": "string"}}})
///     }
///     fn call(&self, call: &CallContext<'_>) -> anyhow::Result<String> {
///         Ok(call.arguments["word"].as_str().unwrap_or_default().len().to_string())
///     }
/// }
///
/// let tools = ToolEnvironments::new(ToolFormat::Hermes)?.with(Length)?;
/// assert_eq!(tools.schemas()[0]["function"]["name"], "length");
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Clone)]
pub struct ToolEnvironments {
    /// In the order in which they were added, which is also their order in the prompt.
    tools: Vec<Arc<dyn Tool>>,
    format: ToolFormat,
    output: OutputForm,
}

/// The form in which the policy sees outputs.
#[derive(Debug, Clone)]
struct OutputForm {
    /// Text before an output, after a plain text prompt.
    before: String,
    after: String,
    max_chars: usize,
}

impl ToolEnvironments {
    /// Creates an environment without tools. Add at least one.
    ///
    /// # Errors
    ///
    /// Fails if one of the format's marks is empty.
    pub fn new(format: ToolFormat) -> Result<Self> {
        format.validate()?;
        Ok(Self {
            tools: Vec::new(),
            format,
            output: OutputForm {
                before: OUTPUT_BEFORE.to_owned(),
                after: OUTPUT_AFTER.to_owned(),
                max_chars: MAX_OUTPUT_CHARS,
            },
        })
    }

    /// Adds a tool.
    ///
    /// # Errors
    ///
    /// Fails if there is already one with the same name.
    pub fn with(self, tool: impl Tool + 'static) -> Result<Self> {
        self.with_shared(Arc::new(tool))
    }

    fn with_shared(mut self, tool: Arc<dyn Tool>) -> Result<Self> {
        let name = tool.name();
        ensure!(!name.is_empty(), "tools: a name is empty");
        ensure!(self.tool(name).is_none(), "tools: {name:?} is given twice");
        self.tools.push(tool);
        Ok(self)
    }

    /// Sets the text around an output, after a plain text prompt.
    #[must_use]
    pub fn with_output_marks(mut self, before: &str, after: &str) -> Self {
        self.output.before = before.to_owned();
        self.output.after = after.to_owned();
        self
    }

    /// Sets the maximum number of characters in an output. The rest is cut off.
    #[must_use]
    pub fn with_max_output_chars(mut self, max_chars: usize) -> Self {
        self.output.max_chars = max_chars;
        self
    }

    /// All tool schemas, for a chat template.
    pub fn schemas(&self) -> Vec<Value> {
        let tools = self.tools.iter();
        let schema =
            |tool: &Arc<dyn Tool>| schema(tool.name(), tool.description(), &tool.parameters());
        tools.map(schema).collect()
    }

    fn tool(&self, name: &str) -> Option<&Arc<dyn Tool>> {
        self.tools.iter().find(|tool| tool.name() == name)
    }

    fn names(&self) -> String {
        let names = self.tools.iter().map(|tool| format!("{:?}", tool.name()));
        names.collect::<Vec<_>>().join(", ")
    }
}

/// A tool's schema, in the format that OpenAI and transformers use.
fn schema(name: &str, description: &str, parameters: &Value) -> Value {
    json!({
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    })
}

impl EnvironmentFactory for ToolEnvironments {
    fn start(&self, start: &EpisodeStart<'_>) -> Result<Box<dyn Environment>> {
        ensure!(!self.tools.is_empty(), "tools: none, add at least one");
        Ok(Box::new(ToolEnvironment {
            tools: self.clone(),
            columns: start.prompt.columns.clone(),
            episode: start.episode,
            has_messages: !start.prompt.messages.is_empty(),
        }))
    }

    fn gives_rewards(&self) -> bool {
        false
    }
}

struct ToolEnvironment {
    tools: ToolEnvironments,
    columns: Value,
    episode: u64,
    has_messages: bool,
}

impl ToolEnvironment {
    /// A call's output, and whether it succeeded.
    fn output(
        &self,
        call: &Result<ToolCall, String>,
        progress: &dyn Progress,
    ) -> Result<(String, bool)> {
        let call = match call {
            Ok(call) => call,
            Err(message) => return Ok((format!("error: {message}"), false)),
        };
        let Some(tool) = self.tools.tool(&call.name) else {
            let names = self.tools.names();
            let message = format!("error: no tool {:?}, there are {names}", call.name);
            return Ok((message, false));
        };
        let context = CallContext {
            arguments: &call.arguments,
            columns: &self.columns,
            episode: self.episode,
            progress,
        };
        match tool.call(&context) {
            Ok(output) => Ok((output, true)),
            Err(error) if is_fatal(&error) => Err(error),
            Err(error) => Ok((format!("error: {error:#}"), false)),
        }
    }
}

/// Returns whether a call's error is not for the policy to read.
fn is_fatal(error: &anyhow::Error) -> bool {
    error.is::<Interrupted>() || error.is::<Unusable>() || error.is::<Unavailable>()
}

impl Drop for ToolEnvironment {
    fn drop(&mut self) {
        for tool in &self.tools.tools {
            tool.end(self.episode);
        }
    }
}

impl Environment for ToolEnvironment {
    fn step(&mut self, turn: &Turn<'_>) -> Result<Step> {
        let calls = self.tools.format.calls(turn.text);
        // Both exist even without a call, so that every step has them.
        let mut metrics =
            BTreeMap::from(["tool_calls", "tool_failures"].map(|name| (name.to_owned(), 0.)));
        if calls.is_empty() {
            return Ok(Step {
                done: true,
                metrics,
                ..Step::default()
            });
        }
        let mut count = |name: &str| *metrics.entry(name.to_owned()).or_default() += 1.;
        let mut outputs = Vec::new();
        for call in calls.iter().take(MAX_CALLS) {
            let (output, succeeded) = self.output(call, turn.progress)?;
            count("tool_calls");
            if !succeeded {
                count("tool_failures");
            }
            let name = call.as_ref().map_or("", |call| &call.name);
            if self.tools.tool(name).is_some() {
                count(&format!("tool_calls/{name}"));
            }
            outputs.push((name, excerpt(output, self.tools.output.max_chars)));
        }
        if calls.len() > MAX_CALLS {
            let message = format!("error: {} calls, only {MAX_CALLS} were run", calls.len());
            outputs.push(("", message));
        }
        let append = if self.has_messages {
            let message = |(name, output)| json!({"role": "tool", "name": name, "content": output});
            Append::Messages(outputs.into_iter().map(message).collect())
        } else {
            let OutputForm { before, after, .. } = &self.tools.output;
            let parts = outputs.into_iter().flat_map(|(_, output)| {
                [
                    TextPart::Markup(before.clone()),
                    TextPart::Content(output),
                    TextPart::Markup(after.clone()),
                ]
            });
            Append::Parts(parts.collect())
        };
        Ok(Step {
            metrics,
            ..Step::go_on(append)
        })
    }
}

//! Lists and outputs of tools.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

/// A tool in a server's list.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Listed {
    pub(super) name: String,
    pub(super) description: String,
    /// The JSON schema for its arguments, an object.
    pub(super) parameters: Value,
}

impl Listed {
    pub(super) fn read(tool: &Value) -> Result<Self> {
        let text = |key: &str| tool.get(key).and_then(Value::as_str);
        let name = text("name").filter(|name| !name.is_empty());
        let name = name.with_context(|| format!("{tool}: name: must be a text"))?;
        let parameters = tool.get("inputSchema").filter(|schema| schema.is_object());
        let parameters =
            parameters.with_context(|| format!("tool {name:?}: inputSchema: must be an object"))?;
        Ok(Self {
            name: name.to_owned(),
            description: text("description").unwrap_or_default().to_owned(),
            parameters: parameters.clone(),
        })
    }
}

/// Returns the output in a result, or the tool's own error.
pub(super) fn output(mut result: Map<String, Value>) -> Result<Result<String, String>> {
    if let Some(kind) = result.get("resultType") {
        let must = "must be \"complete\": no one can give further input";
        ensure!(kind == "complete", "resultType: {kind}, {must}");
    }
    let is_error = match result.get("isError") {
        None => false,
        Some(Value::Bool(is_error)) => *is_error,
        Some(other) => bail!("isError: {other}, must be true or false"),
    };
    let blocks = match result.remove("content") {
        None => Vec::new(),
        Some(Value::Array(blocks)) => blocks,
        Some(other) => bail!("content: {other}, must be a list"),
    };
    let texts: Vec<String> = blocks.iter().map(text).collect::<Result<_>>()?;
    let text = match result.remove("structuredContent") {
        // Servers repeat it as text, for clients that do not know it.
        Some(structured) if texts.is_empty() => structured.to_string(),
        _ => texts.join("\n"),
    };
    Ok(if is_error { Err(text) } else { Ok(text) })
}

/// The text of a block of content.
fn text(block: &Value) -> Result<String> {
    let field = |path: &str| block.pointer(path).and_then(Value::as_str);
    let kind = field("/type").with_context(|| format!("content: {block}, must have a type"))?;
    let text = match kind {
        "text" => Some(field("/text").context("content: a text block has no text")?),
        "resource" => field("/resource/text"),
        "resource_link" => field("/uri"),
        _ => None,
    };
    // Models for text read that there is something else.
    Ok(text.map_or_else(|| format!("[{kind}]"), str::to_owned))
}

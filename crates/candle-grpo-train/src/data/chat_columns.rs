//! Columns with chat template inputs.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};

use super::rows::kind;
use crate::model::Chat;
use candle_grpo_base::column::find;

/// The usual column for tool schemas.
pub const TOOLS: &str = "tools";

/// The column for chat template variables.
pub const VARIABLES: &str = "chat_template_kwargs";

/// Returns the tool schemas in a row's column `name`: a list, or its JSON text.
///
/// # Errors
///
/// Fails if the column holds anything else.
pub fn tools(columns: &Value, name: &str) -> Result<Option<Value>> {
    let tools = match find(columns, name) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => {
            serde_json::from_str(text).with_context(|| format!("column {name:?}: must be JSON"))?
        }
        Some(tools) => tools.clone(),
    };
    match &tools {
        Value::Array(list) if list.is_empty() => Ok(None),
        Value::Array(_) => Ok(Some(tools)),
        other => bail!(
            "column {name:?}: {}, must be a list of schemas of tools",
            kind(other)
        ),
    }
}

/// Returns a row's chat template variables.
///
/// # Errors
///
/// Fails if the column is not an object, or contains the name of another template input.
pub fn variables(columns: &Value) -> Result<Option<&Map<String, Value>>> {
    match columns.get(VARIABLES) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(variables)) => {
            let taken = Chat::RESERVED
                .iter()
                .find(|name| variables.contains_key(**name));
            match taken {
                Some(name) => bail!("column {VARIABLES:?}: {name:?}, must be absent"),
                None => Ok(Some(variables)),
            }
        }
        Some(other) => bail!("column {VARIABLES:?}: {}, must be an object", kind(other)),
    }
}

//! Columns with inputs of the chat template.

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};

use super::rows::kind;
use crate::model::Chat;
use candle_grpo_base::column::find;

/// The usual name of the column with schemas of tools.
pub const TOOLS: &str = "tools";

/// The column with variables of the chat template.
pub const VARIABLES: &str = "chat_template_kwargs";

/// Returns the schemas of the tools in the column `name` of a row: a list, or its JSON.
///
/// # Errors
///
/// If the column has something else.
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

/// Returns the variables of the chat template in a row.
///
/// # Errors
///
/// If the column is not an object, or has the name of another input of the template.
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

//! Access to the columns of a row.

use anyhow::{Result, bail};
use serde_json::Value;

/// Returns a column. The error lists the columns of the row.
pub(crate) fn column<'a>(columns: &'a Value, name: &str) -> Result<&'a Value> {
    if let Some(value) = columns.get(name) {
        return Ok(value);
    }
    let names: Vec<String> = columns
        .as_object()
        .map(|columns| columns.keys().map(|key| format!("{key:?}")).collect())
        .unwrap_or_default();
    if names.is_empty() {
        bail!("column {name:?}: absent, the row has no columns");
    }
    bail!("column {name:?}: absent, the row has {}", names.join(", "))
}

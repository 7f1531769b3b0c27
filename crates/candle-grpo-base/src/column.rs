//! Access to a row's columns.

use anyhow::{Result, bail};
use serde_json::Value;

/// Returns the column `name`, or the value at a path. For example, `reward_model.ground_truth` is
/// the key `ground_truth` of the object in the column `reward_model`, and `choices.0` is the first
/// list entry in the column `choices`. A column with the whole name takes precedence.
pub fn find<'a>(columns: &'a Value, name: &str) -> Option<&'a Value> {
    let at_path = || {
        name.split('.').try_fold(columns, |value, key| match value {
            Value::Array(entries) => entries.get(key.parse::<usize>().ok()?),
            value => value.get(key),
        })
    };
    columns.get(name).or_else(at_path)
}

/// Returns a column like [`find`].
///
/// # Errors
///
/// If the column does not exist. The error lists the row's columns.
pub fn column<'a>(columns: &'a Value, name: &str) -> Result<&'a Value> {
    if let Some(value) = find(columns, name) {
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

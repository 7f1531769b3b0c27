//! Rows from a file of JSON.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_grpo_nn::json;
use serde_json::Value;

use super::other_formats::other_format;
use super::unique_keys::UniqueKeys;

/// A row of a data set and its place.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The file.
    pub file: Arc<Path>,
    /// The line of its first character, from 1.
    pub line: usize,
    /// Its columns: an object.
    pub columns: Value,
}

impl Row {
    /// `file:line`, for messages.
    pub fn place(&self) -> String {
        format!("{}:{}", self.file.display(), self.line)
    }
}

/// Reads the rows of a file: one JSON object a line, or one array of objects. Blank lines are
/// skipped.
///
/// # Errors
///
/// With the file and the line if it has another format, or an object has a key twice.
pub fn read_rows(path: &Path) -> Result<Vec<Row>> {
    let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    if let Some(format) = other_format(path, &bytes) {
        bail!("{}: {format}", path.display());
    }
    let text = str::from_utf8(&bytes).map_err(|error| {
        let line = line_of(&bytes[..error.valid_up_to()]);
        anyhow!("{}:{line}: not UTF-8", path.display())
    })?;
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let file: Arc<Path> = PathBuf::from(path).into();
    let rows = if text.trim_start().starts_with('[') {
        array(&file, text)?
    } else {
        lines(&file, text)?
    };
    ensure!(!rows.is_empty(), "{}: has no rows", path.display());
    Ok(rows)
}

fn lines(file: &Arc<Path>, text: &str) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (i, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let UniqueKeys(columns) = serde_json::from_str(line)
            .map_err(|error| anyhow!("{}:{}: {}", file.display(), i + 1, in_line(&error)))?;
        rows.push(row(file, i + 1, columns)?);
    }
    Ok(rows)
}

/// Returns the message about a line, without the number of the line.
fn in_line(error: &serde_json::Error) -> String {
    format!(
        "must be a JSON object: {} at column {}",
        json::message(error),
        error.column()
    )
}

fn array(file: &Arc<Path>, text: &str) -> Result<Vec<Row>> {
    let wrong = |at: usize, what: &dyn std::fmt::Display| {
        let line = line_of(&text.as_bytes()[..at]);
        anyhow!("{}:{line}: {what}", file.display())
    };
    let skip = |at: usize| text.len() - text[at..].trim_start().len();
    let mut rows = Vec::new();
    let (mut line, mut counted) = (1, 0);
    // After the bracket that the text begins with, or the comma before a row.
    let mut at = skip(0) + 1;
    loop {
        at = skip(at);
        if rows.is_empty() && text[at..].starts_with(']') {
            at += 1;
            break;
        }
        let mut values = serde_json::Deserializer::from_str(&text[at..]).into_iter::<UniqueKeys>();
        let columns = match values.next() {
            Some(Ok(UniqueKeys(columns))) => columns,
            Some(Err(error)) => {
                let line = line_of(&text.as_bytes()[..at]) + error.line() - 1;
                bail!("{}:{line}: {}", file.display(), json::message(&error));
            }
            None => return Err(wrong(at, &"the array is not closed")),
        };
        line += newlines(&text.as_bytes()[counted..at]);
        counted = at;
        rows.push(row(file, line, columns)?);
        at = skip(at + values.byte_offset());
        match text.as_bytes().get(at) {
            Some(b',') => at += 1,
            Some(b']') => {
                at += 1;
                break;
            }
            _ => {
                return Err(wrong(
                    at,
                    &"after a row of the array there must be a comma or a bracket",
                ));
            }
        }
    }
    match skip(at) {
        end if end == text.len() => Ok(rows),
        end => Err(wrong(end, &"nothing may follow the array")),
    }
}

fn row(file: &Arc<Path>, line: usize, columns: Value) -> Result<Row> {
    ensure!(
        columns.is_object(),
        "{}:{line}: {}, must be a JSON object",
        file.display(),
        kind(&columns)
    );
    Ok(Row {
        file: Arc::clone(file),
        line,
        columns,
    })
}

/// The kind of a value, for messages.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

fn line_of(before: &[u8]) -> usize {
    newlines(before) + 1
}

fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&b| b == b'\n').count()
}

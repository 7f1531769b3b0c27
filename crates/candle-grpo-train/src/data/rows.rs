//! Rows from a file.

use std::borrow::Cow;
use std::fs::{self, File, FileType};
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_grpo_base::json;
use candle_grpo_base::large_integers::quoted;
use serde_json::Value;

use super::other_formats::{PARQUET, looks_separated, other_format, separator};
use super::unique_keys::UniqueKeys;

/// A data row and its location.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// The file.
    pub file: Arc<Path>,
    /// Line of its first character, starting at 1. In a Parquet file, its row number, starting at
    /// 1.
    pub line: usize,
    /// Its columns: an object.
    pub columns: Value,
}

impl Row {
    /// `file:line`, for messages.
    pub fn place(&self) -> String {
        format!("{}:{}", self.file.display(), self.line)
    }

    /// Returns its file's index in `files`, if it is one of them.
    pub fn source(&self, files: &[PathBuf]) -> Option<usize> {
        files.iter().position(|file| **file == *self.file)
    }
}

/// Returns the number in a column, which may be text, as the fields of separated values are.
pub(crate) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::String(text) => text.trim().parse().ok(),
        value => value.as_f64(),
    }
}

/// Reads a file's rows, like [`read_first_rows`].
///
/// # Errors
///
/// Same as [`read_first_rows`].
pub fn read_rows(path: &Path) -> Result<Vec<Row>> {
    read_first_rows(path, usize::MAX)
}

/// Reads a file's first `limit` rows.
///
/// - JSON: one object per line, or one array of objects. Blank lines are skipped. An integer
///   outside 64 bits becomes text with its digits.
/// - CSV, if the name ends in `.csv`, or in `.tsv` with tabs: the first line names the columns.
///   Values are the fields' text.
/// - Parquet, with the feature `parquet` and any name: lists are arrays, and structs and maps are
///   objects. Dates, times and decimals are text, and numbers that are not finite are null. Bytes
///   are text, or hexadecimal digits if they are not UTF-8. Codecs are Snappy, gzip and Zstandard.
///   Rows may take 1 GiB of memory, or 64 bytes per byte in a larger file.
///
/// # Errors
///
/// Fails if the file has another format, is damaged, takes too much memory, or a row has a
/// duplicate key. The error names the file and line, or the row and column in a Parquet file. Also
/// if it is a pipe, which cannot be read twice.
pub fn read_first_rows(path: &Path, limit: usize) -> Result<Vec<Row>> {
    let read = || -> Result<(File, Vec<u8>)> {
        let is_pipe = |kind: FileType| !kind.is_file() && !kind.is_dir();
        ensure!(
            !is_pipe(fs::metadata(path)?.file_type()),
            "it is a pipe or a device, must be a file"
        );
        let mut file = File::open(path)?;
        let mut start = Vec::new();
        (&mut file)
            .take(PARQUET.len() as u64)
            .read_to_end(&mut start)?;
        file.rewind()?;
        // Parts of a Parquet file are read on demand.
        if !(cfg!(feature = "parquet") && start == PARQUET) {
            start.clear();
            file.read_to_end(&mut start)?;
        }
        Ok((file, start))
    };
    #[cfg_attr(not(feature = "parquet"), expect(unused_variables))]
    let (source, bytes) = read().with_context(|| format!("reading {}", path.display()))?;
    let file: Arc<Path> = PathBuf::from(path).into();
    let rows = match bytes == PARQUET {
        #[cfg(feature = "parquet")]
        true => super::parquet_rows::rows(&file, source, limit)?,
        _ => text_rows(&file, &bytes, limit)?,
    };
    ensure!(!rows.is_empty(), "{}: has no rows", path.display());
    Ok(rows)
}

/// Returns a text without the byte order marks before the first character of each line: files may
/// have been joined.
fn without_marks(text: &str) -> Cow<'_, str> {
    const MARK: char = '\u{feff}';
    if !text.contains(MARK) {
        return Cow::Borrowed(text);
    }
    let lines = text.split_inclusive('\n').map(|line| {
        let rest = line.trim_start_matches(|c: char| c == MARK || c.is_whitespace());
        line[..line.len() - rest.len()].replace(MARK, "") + rest
    });
    Cow::Owned(lines.collect())
}

/// Reads JSON or CSV.
fn text_rows(file: &Arc<Path>, bytes: &[u8], limit: usize) -> Result<Vec<Row>> {
    let path = file.display();
    if let Some(format) = other_format(file, bytes) {
        bail!("{path}: {format}");
    }
    let text = str::from_utf8(bytes).map_err(|error| {
        let line = line_of(&bytes[..error.valid_up_to()]);
        anyhow!("{path}:{line}: not UTF-8")
    })?;
    let text = without_marks(text);
    let text = &*text;
    ensure!(
        separator(file).is_some() || !looks_separated(text),
        "{path}: a CSV file, must have a name that ends in .csv, or in .tsv with tabs"
    );
    let json = quoted(text);
    match (text.trim_start().chars().next(), separator(file)) {
        (Some('['), _) => array(file, &json, limit),
        // A JSON file may have any name.
        #[cfg(feature = "csv")]
        (Some(first), Some(separator)) if first != '{' => {
            super::csv_rows::rows(file, text, separator, limit)
        }
        #[cfg(not(feature = "csv"))]
        (Some(first), Some(_)) if first != '{' => {
            bail!("{path}: CSV, but this program was built without the feature csv")
        }
        _ => lines(file, &json, limit),
    }
}

fn lines(file: &Arc<Path>, text: &str, limit: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let lines = text.lines().enumerate();
    for (i, line) in lines
        .filter(|(_, line)| !line.trim().is_empty())
        .take(limit)
    {
        let UniqueKeys(columns) = serde_json::from_str(line)
            .map_err(|error| anyhow!("{}:{}: {}", file.display(), i + 1, in_line(&error)))?;
        rows.push(row(file, i + 1, columns)?);
    }
    Ok(rows)
}

/// Returns an error message about a line, without the line number.
fn in_line(error: &serde_json::Error) -> String {
    format!(
        "must be a JSON object: {} at column {}",
        json::message(error),
        error.column()
    )
}

fn array(file: &Arc<Path>, text: &str, limit: usize) -> Result<Vec<Row>> {
    let wrong = |at: usize, what: &dyn std::fmt::Display| {
        let line = line_of(&text.as_bytes()[..at]);
        anyhow!("{}:{line}: {what}", file.display())
    };
    let skip = |at: usize| text.len() - text[at..].trim_start().len();
    let mut rows = Vec::new();
    let (mut line, mut counted) = (1, 0);
    // After the text's opening bracket, or the comma before a row.
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
        if rows.len() == limit {
            return Ok(rows);
        }
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

pub(super) fn row(file: &Arc<Path>, line: usize, columns: Value) -> Result<Row> {
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

/// A value's kind, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
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

pub(super) fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&b| b == b'\n').count()
}

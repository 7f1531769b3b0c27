//! Rows from a file with separated values (RFC 4180).

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail, ensure};
use csv::{ErrorKind, Position, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};

use super::rows::{Row, newlines, row};

/// Separators that such files may use. Only files whose name matches are read.
const SEPARATORS: [u8; 4] = *b",;\t|";

/// Reads the first `limit` rows, whose fields are text separated by `separator`. The first line
/// names the columns.
///
/// A quotation mark within a field that does not begin with one is an ordinary character.
pub(super) fn rows(file: &Arc<Path>, text: &str, separator: u8, limit: usize) -> Result<Vec<Row>> {
    let path = file.display();
    check_quotes(text.as_bytes(), separator)
        .map_err(|(line, message)| anyhow!("{path}:{line}: {message}"))?;
    let mut lines = Lines {
        text: text.as_bytes(),
        at: 0,
        line: 1,
    };
    let mut builder = ReaderBuilder::new();
    let mut reader = builder.delimiter(separator).from_reader(text.as_bytes());
    let header = reader.headers().cloned();
    let header = header.map_err(|error| anyhow!("{path}: {error}"))?;
    for (i, name) in header.iter().enumerate() {
        let is_first = !header.iter().take(i).any(|earlier| earlier == name);
        ensure!(is_first, "{path}:1: column {name:?} twice");
    }
    if let (Some(name), 1) = (header.get(0), header.len())
        && !text.trim_start().starts_with('"')
        && let Some(other) = name.bytes().find(|byte| SEPARATORS.contains(byte))
    {
        bail!(
            "{path}:1: the only column is {name:?}, and {:?} does not separate columns; it must be {:?}, or the name must be in quotation marks",
            char::from(other),
            char::from(separator)
        );
    }
    let mut rows = Vec::new();
    for record in reader.into_records().take(limit) {
        let record = record.map_err(|error| match error.kind() {
            ErrorKind::UnequalLengths {
                pos: Some(position),
                expected_len,
                len,
            } => {
                let line = lines.of(position);
                anyhow!("{path}:{line}: {len} fields, must be {expected_len} as in the first line")
            }
            _ => anyhow!("{path}: {error}"),
        })?;
        let line = record.position().map_or(lines.line, |at| lines.of(at));
        rows.push(row(file, line, columns(&header, &record))?);
    }
    Ok(rows)
}

/// Checks quoted fields. The reader would append text after a closing quotation mark to the field,
/// and the rest of the file to an unclosed one. Errors include the line.
///
/// Spaces and tabs after a closing quotation mark are appended to the field, as in Python's `csv`
/// and pandas.
fn check_quotes(text: &[u8], separator: u8) -> Result<(), (usize, String)> {
    let ends = |byte: u8| byte == separator || matches!(byte, b'\r' | b'\n');
    let line_of = |at: usize| 1 + newlines(&text[..at]);
    let mut start = 0;
    while start < text.len() {
        let mut end = start;
        if text[start] == b'"' {
            end += 1;
            loop {
                match text[end..].iter().position(|&byte| byte == b'"') {
                    None => {
                        let message = "a field begins with a quotation mark, and none closes it";
                        return Err((line_of(start), message.to_owned()));
                    }
                    Some(length) => end += length + 1,
                }
                // Two quotation marks stand for one in the text.
                if text.get(end) != Some(&b'"') {
                    break;
                }
                end += 1;
            }
            let blank = |byte: &&u8| matches!(byte, b' ' | b'\t') && !ends(**byte);
            end += text[end..].iter().take_while(blank).count();
            if text.get(end).is_some_and(|&byte| !ends(byte)) {
                let message = format!(
                    "a text follows the quotation mark that closes the field of line {}; in such a field a quotation mark must be doubled",
                    line_of(start)
                );
                return Err((line_of(end), message));
            }
        } else {
            let length = text[end..].iter().position(|&byte| ends(byte));
            end += length.unwrap_or(text.len() - end);
        }
        start = end + 1;
    }
    Ok(())
}

/// Counts lines up to successive records.
struct Lines<'a> {
    text: &'a [u8],
    at: usize,
    line: usize,
}

impl Lines<'_> {
    /// The line with a record's first character. Its position may be before empty lines.
    fn of(&mut self, position: &Position) -> usize {
        let from = (position.byte() as usize).clamp(self.at, self.text.len());
        let rest = self.text[from..].iter();
        let breaks = rest.take_while(|byte| matches!(byte, b'\r' | b'\n'));
        let start = from + breaks.count();
        self.line += newlines(&self.text[self.at..start]);
        self.at = start;
        self.line
    }
}

fn columns(header: &StringRecord, record: &StringRecord) -> Value {
    let fields = header.iter().zip(record);
    let fields = fields.map(|(name, text)| (name.to_owned(), Value::from(text)));
    Value::Object(fields.collect::<Map<_, _>>())
}

//! Rows from a file of separated values (RFC 4180).

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail, ensure};
use csv::{ErrorKind, Position, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};

use super::rows::{Row, newlines, row};

/// Reads rows whose fields are texts between `separator`. The first line names the columns.
pub(super) fn rows(file: &Arc<Path>, text: &str, separator: u8) -> Result<Vec<Row>> {
    let path = file.display();
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
    let mut rows = Vec::new();
    for record in reader.into_records() {
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
    // The last field would contain the rest of the file.
    if !text.matches('"').count().is_multiple_of(2) {
        bail!(
            "{path}:{}: the file has an odd number of quotation marks, each must have its pair",
            lines.line
        );
    }
    Ok(rows)
}

/// Counts lines up to records in their order.
struct Lines<'a> {
    text: &'a [u8],
    at: usize,
    line: usize,
}

impl Lines<'_> {
    /// The line of the first character of a record. Its position may be before empty lines.
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

//! Formats values as in Python.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::MAX_TEXT;
use super::strings::is_space;

/// Maximum nesting of printed lists.
const MAX_DEPTH: usize = 200;

/// Formats like Python's `str(value)`. Undefined values print nothing.
pub(super) fn str(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.to_string()),
        _ => repr_of(value),
    }
}

/// Formats like Python's `repr(value)`.
pub(super) fn repr_of(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    repr(value, 0, &mut out)?;
    Ok(out)
}

/// Returns true for values with a length and items, including strings and dicts.
pub(super) fn is_sequence(value: &Value) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Map | ValueKind::String
    )
}

/// Returns true for values that `iter` accepts, which excludes `none`.
pub(super) fn is_iterable(value: &Value) -> bool {
    !matches!(
        value.kind(),
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Plain
    )
}

/// Returns true for numbers, which include booleans.
pub(super) fn is_number(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
}

/// Implements `str(value).strip(characters)`.
pub(super) fn trim(value: &Value, characters: Option<&str>) -> Result<String, Error> {
    let text = str(value)?;
    Ok(match characters {
        Some(characters) => text.trim_matches(|c| characters.contains(c)).to_owned(),
        None => text.trim_matches(is_space).to_owned(),
    })
}

fn repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    ensure_printable(depth, out)?;
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value, ["nan", "inf", "-inf"])),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            out.push('[');
            for (at, item) in value.try_iter()?.enumerate() {
                if at > 0 {
                    out.push_str(", ");
                }
                repr(&item, depth + 1, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                if at > 0 {
                    out.push_str(", ");
                }
                repr(&key, depth + 1, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        ValueKind::Undefined => out.push_str("Undefined"),
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

/// Returns an error for values that print as too much text. Lists may share elements, so a small
/// value can print as arbitrarily much.
fn ensure_printable(depth: usize, out: &str) -> Result<(), Error> {
    let message = if depth > MAX_DEPTH {
        format!("a value is nested more than {MAX_DEPTH} times")
    } else if out.len() > MAX_TEXT {
        format!("a value has more than {} MiB of text", MAX_TEXT >> 20)
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

/// Writes a string in single quotes, or in double quotes if it contains only single ones.
fn quote(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            _ if character == quote => {
                out.push('\\');
                out.push(character);
            }
            _ if character.is_control() || character == '\u{a0}' || character == '\u{ad}' => {
                let _ = write!(out, "\\x{:02x}", character as u32);
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
}

/// Formats a number as in Python; `special` has the text for NaN and the infinities.
fn number(value: &Value, special: [&str; 3]) -> String {
    let Ok(float) = f64::try_from(value.clone()) else {
        return value.to_string();
    };
    if value.is_integer() {
        return value.to_string();
    }
    if float.is_nan() {
        return special[0].to_owned();
    }
    if float.is_infinite() {
        return special[if float > 0.0 { 1 } else { 2 }].to_owned();
    }
    // Rust and Python write the shortest digits that parse to the same number. Python writes an
    // exponent from 1e16 and below 1e-4.
    let scientific = format!("{float:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{float:?}"),
    }
}

/// Implements Python's `json.dumps`, with `ensure_ascii=False` by default.
pub(super) fn tojson(
    value: &Value,
    ensure_ascii: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => {
                let width = usize::try_from(indent).map_err(|_| {
                    Error::new(
                        ErrorKind::InvalidOperation,
                        "tojson: indent must be a number or a text",
                    )
                })?;
                " ".repeat(width.min(64))
            }
        }),
    };
    let separators = match options.get::<Option<Vec<String>>>("separators")? {
        None => {
            let comma = if indent.is_some() { "," } else { ", " };
            [comma.to_owned(), ": ".to_owned()]
        }
        Some(separators) => separators.try_into().map_err(|_| {
            Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators must be two texts",
            )
        })?,
    };
    let writer = Json {
        indent,
        separators,
        ensure_ascii: ensure_ascii
            .or(options.get("ensure_ascii")?)
            .unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    writer.write(value, 0, &mut out)?;
    Ok(Value::from(out))
}

struct Json {
    indent: Option<String>,
    /// The separators between items, and between a key and its value.
    separators: [String; 2],
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Json {
    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        ensure_printable(depth, out)?;
        match value.kind() {
            ValueKind::None | ValueKind::Bool | ValueKind::Number => out.push_str(&scalar(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.map(|item| (None, item)).collect();
                self.items(items, ['[', ']'], depth, out)?;
            }
            ValueKind::Map => {
                let mut items = Vec::new();
                for key in value.try_iter()? {
                    let item = value.get_item(&key)?;
                    let name = match key.as_str() {
                        Some(name) => name.to_owned(),
                        None => scalar(&key),
                    };
                    items.push((Some(name), item));
                }
                if self.sort_keys {
                    items.sort_by(|(a, _), (b, _)| a.cmp(b));
                }
                self.items(items, ['{', '}'], depth, out)?;
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: a value that is {kind} cannot be written as JSON"),
                ));
            }
        }
        Ok(())
    }

    fn items(
        &self,
        items: Vec<(Option<String>, Value)>,
        [open, close]: [char; 2],
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        let new_line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.push_str(&indent.repeat(depth));
            }
        };
        out.push(open);
        let empty = items.is_empty();
        for (at, (name, item)) in items.into_iter().enumerate() {
            if at > 0 {
                out.push_str(&self.separators[0]);
            }
            new_line(depth + 1, out);
            if let Some(name) = name {
                self.string(&name, out);
                out.push_str(&self.separators[1]);
            }
            self.write(&item, depth + 1, out)?;
        }
        if !empty {
            new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                _ if character < ' ' || (self.ensure_ascii && !character.is_ascii()) => {
                    for unit in character.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                _ => out.push(character),
            }
        }
        out.push('"');
    }
}

fn scalar(value: &Value) -> String {
    match value.kind() {
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => value.is_true().to_string(),
        _ => number(value, ["NaN", "Infinity", "-Infinity"]),
    }
}

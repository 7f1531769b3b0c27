//! Configuration problems before their line is known.

use anyhow::Error;
use candle_grpo_core::Invalid;
use candle_grpo_train::find_invalid;
use serde_json::Value;

use super::document::{Document, join};
use super::error::ConfigError;

/// A value that is not valid, and the key that holds it.
#[derive(Debug)]
pub(super) struct Problem {
    /// A key, or the section around it.
    path: String,
    message: Message,
}

#[derive(Debug)]
enum Message {
    /// About the key at the path.
    Text(String),
    /// About an option that the file may set by another key.
    Option(Invalid),
    /// With the line.
    Located(ConfigError),
}

impl From<ConfigError> for Problem {
    fn from(error: ConfigError) -> Self {
        Self {
            path: String::new(),
            message: Message::Located(error),
        }
    }
}

impl Problem {
    /// The key at `path` is not valid.
    pub(super) fn at(path: &str, message: impl ToString) -> Self {
        Self {
            path: path.to_owned(),
            message: Message::Text(message.to_string()),
        }
    }

    /// A setting of a trainer is not valid. Its section is `section`, except for the fields that a
    /// file has `elsewhere`.
    pub(super) fn from_section(section: &str, elsewhere: &[(&str, &str)], error: &Error) -> Self {
        let Some(invalid) = find_invalid(error) else {
            return Self::at(section, format!("{error:#}"));
        };
        let field = &invalid.field;
        let first = field.split('.').next().unwrap_or(field);
        let place = elsewhere.iter().find(|(name, _)| *name == first);
        let path = match place {
            Some((_, place)) => format!("{place}{}", &field[first.len()..]),
            None => join(section, field),
        };
        Self {
            path,
            message: Message::Option(invalid.clone()),
        }
    }

    /// Returns the error with the line of its key.
    fn locate(self, document: &Document) -> ConfigError {
        match self.message {
            Message::Located(error) => error,
            Message::Text(text) => document.error(&self.path, text),
            Message::Option(Invalid { field, value, must }) => {
                // A key of another name may hold another number than the option that it sets.
                let text = match document.cause(&self.path) {
                    Some(cause) if !shows(cause, &value) => {
                        let name = field.rsplit('.').next().unwrap_or(&field);
                        format!("{cause}, makes {name} {value}, which must {must}")
                    }
                    _ => format!("{value}, must {must}"),
                };
                document.error(&self.path, text)
            }
        }
    }
}

impl Document {
    /// Gives a problem the line of its key.
    pub(super) fn locate<T>(&self, result: Result<T, Problem>) -> Result<T, ConfigError> {
        result.map_err(|problem| problem.locate(self))
    }
}

/// Makes an error about an option of `section` a problem of its key.
pub(super) fn within<T>(section: &str, result: Result<T, impl Into<Error>>) -> Result<T, Problem> {
    result.map_err(|error| Problem::from_section(section, &[], &error.into()))
}

/// Checks each entry in the list at `key`.
pub(super) fn each<T>(
    key: &str,
    entries: &[T],
    check: fn(&T) -> anyhow::Result<()>,
) -> Result<(), Problem> {
    let mut entries = entries.iter().enumerate();
    entries.try_for_each(|(i, entry)| within(&format!("{key}[{i}]"), check(entry)))
}

/// Returns whether `value` in a file is displayed as `text`.
fn shows(value: &Value, text: &str) -> bool {
    match value {
        Value::String(value) => value == text,
        Value::Number(value) => {
            value.to_string() == text || text.parse() == Ok(value.as_f64().unwrap_or(f64::NAN))
        }
        value => format!("{value}") == text,
    }
}

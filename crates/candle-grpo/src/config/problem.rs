//! Configuration problems before their line is known.

use anyhow::Error;
use candle_grpo_core::Invalid;
use candle_grpo_train::find_invalid;
use serde_json::Value;

use super::document::Document;
use super::error::ConfigError;
use super::run::{ELSEWHERE, SAMPLER_ELSEWHERE};

/// A value that is not valid, and the key that holds it as far as that is known.
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
    /// About an option of which only the text is known.
    Untyped(String),
    /// About a key of the effective configuration.
    Effective(String),
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

    /// The key at `path` of the effective configuration is not valid.
    pub(super) fn effective(path: &str, message: String) -> Self {
        Self {
            path: path.to_owned(),
            message: Message::Effective(message),
        }
    }

    /// An option of `section` is not valid.
    pub(super) fn within(section: &str, error: &Error) -> Self {
        match find_invalid(error) {
            Some(invalid) => Self {
                path: format!("{section}.{}", invalid.field),
                message: Message::Option(invalid.clone()),
            },
            None => Self {
                path: section.to_owned(),
                message: Message::Untyped(format!("{error:#}")),
            },
        }
    }

    /// A setting of the trainer is not valid.
    pub(super) fn from_settings(error: &Error) -> Self {
        Self::from_section("training", &ELSEWHERE, error)
    }

    /// A setting of a trainer is not valid. Its section is `section`, except for the fields that a
    /// file has `elsewhere`.
    pub(super) fn from_section(section: &str, elsewhere: &[(&str, &str)], error: &Error) -> Self {
        let Some(invalid) = find_invalid(error) else {
            return Self::within(section, error);
        };
        Self {
            path: place(section, elsewhere, &invalid.field),
            message: Message::Option(invalid.clone()),
        }
    }

    /// Returns whether this is about another option than `option`.
    fn is_other(&self, option: &Invalid) -> bool {
        matches!(&self.message, Message::Option(other) if other != option)
    }

    /// Returns the error about the key at the path.
    pub(super) fn locate_at_path(self, document: &Document) -> ConfigError {
        let path = self.path.clone();
        self.locate(document, |_| Err(Self::at(&path, "")))
    }

    /// Finds the key of the file that holds the value: the one at the path, or the one without
    /// which `check` finds nothing, or else another option that is not valid.
    pub(super) fn locate(
        self,
        document: &Document,
        check: impl Fn(&Document) -> Result<(), Self>,
    ) -> ConfigError {
        let given = document.get(&self.path);
        let is_given = given.is_some_and(|value| !value.is_null());
        let culprit = || {
            let mut second = None;
            for (path, _) in document.leaves() {
                match (check(&document.without(&path)), &self.message) {
                    (Ok(()), _) => return path,
                    (Err(other), Message::Option(option)) if other.is_other(option) => {
                        second.get_or_insert(path);
                    }
                    _ => {}
                }
            }
            second.unwrap_or_else(|| self.path.clone())
        };
        match &self.message {
            Message::Located(error) => error.clone(),
            Message::Text(text) => document.error(&self.path, text),
            Message::Effective(text) if is_given => document.error(&self.path, text),
            Message::Effective(text) | Message::Untyped(text) => document.error(&culprit(), text),
            Message::Option(option) => {
                let path = if is_given {
                    self.path.clone()
                } else {
                    culprit()
                };
                let Invalid { field, value, must } = option;
                // A key of another name may hold another number than the option that it sets.
                let text = match document.get(&path) {
                    Some(found) if !is_given && !shows(found, value) => {
                        let name = field.rsplit('.').next().unwrap_or(field);
                        format!("{found}, makes {name} {value}, which must {must}")
                    }
                    _ => format!("{value}, must {must}"),
                };
                document.error(&path, text)
            }
        }
    }
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

/// Returns the place in a file of a field of the settings of a trainer, such as
/// [`TrainConfig`](candle_grpo_train::TrainConfig).
fn place(section: &str, elsewhere: &[(&str, &str)], field: &str) -> String {
    let (first, rest) = match field.split_once('.') {
        Some((first, rest)) => (first, Some(rest)),
        None => (field, None),
    };
    if first == "sampling"
        && let Some(key) = rest
        && let Some((_, place)) = SAMPLER_ELSEWHERE.iter().find(|(name, _)| *name == key)
    {
        return (*place).to_owned();
    }
    let section = match elsewhere.iter().find(|(name, _)| *name == first) {
        Some((_, place)) => (*place).to_owned(),
        None => format!("{section}.{first}"),
    };
    match rest {
        Some(rest) => format!("{section}.{rest}"),
        None => section,
    }
}

//! A configuration file as a tree of values that know their lines.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use candle_grpo_core::with_nearest_key;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use toml::de::{DeTable, DeValue};

use super::error::ConfigError;

/// The longest path of a key, in bytes. Every key is kept with its path, so that long ones would take more memory than the file.
const LONGEST_PATH: usize = 500;

/// A configuration file: what it says, and on which line it says it.
#[derive(Debug, Clone, Default)]
pub struct Document {
    file: PathBuf,
    pub(super) value: Value,
    /// The line of each key, by its path (`algorithm.recipe.overlong`, `rewards[0].kind`).
    lines: BTreeMap<String, usize>,
}

impl Document {
    /// Reads a file: TOML where its name ends in `.toml`, YAML (of which JSON is a part) otherwise.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|error| ConfigError {
            file: path.to_path_buf(),
            line: None,
            message: format!("cannot be read: {error}"),
        })?;
        let is_toml = path
            .extension()
            .is_some_and(|end| end.eq_ignore_ascii_case("toml"));
        if is_toml {
            Self::from_toml(path, &text)
        } else {
            Self::from_yaml(path, &text)
        }
    }

    /// The document that a YAML text is; `file` is for messages.
    pub fn from_yaml(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let node: Node = serde_saphyr::from_str(text).map_err(|error| ConfigError {
            file: file.to_path_buf(),
            line: error.location().map(|place| place.line() as usize),
            message: plain_message(&error.to_string()),
        })?;
        Self::new(file, node)
    }

    /// The document that a TOML text is; `file` is for messages.
    pub fn from_toml(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let fail = |at: Option<usize>, message: &str| ConfigError {
            file: file.to_path_buf(),
            line: at.map(|at| line_at(text, at)),
            message: message.to_owned(),
        };
        let table = DeTable::parse(text)
            .map_err(|error| fail(error.span().map(|span| span.start), error.message()))?;
        let node =
            of_table(text, table.get_ref()).map_err(|(at, message)| fail(Some(at), &message))?;
        Self::new(file, node)
    }

    fn new(file: &Path, node: Node) -> Result<Self, ConfigError> {
        let mut lines = BTreeMap::new();
        let value = node.into_value(String::new(), &mut lines);
        let value = value.map_err(|LongPath { path, line }| ConfigError {
            file: file.to_path_buf(),
            line: Some(line),
            message: format!(
                "key {:?}...: its path has {} bytes, must have at most {LONGEST_PATH}",
                path.chars().take(40).collect::<String>(),
                path.len()
            ),
        })?;
        Ok(Self {
            file: file.to_path_buf(),
            value,
            lines,
        })
    }

    /// Where a run goes that does not say it: a folder of the name of the file, in `runs`.
    pub(super) fn run_dir(&self) -> PathBuf {
        let name = self.file.file_stem().unwrap_or("run".as_ref());
        Path::new("runs").join(name)
    }

    /// The same file with another value.
    pub(super) fn with_value(&self, value: Value) -> Self {
        Self {
            file: self.file.clone(),
            value,
            lines: BTreeMap::new(),
        }
    }

    /// The line of the key at a path.
    pub(super) fn line_of(&self, path: &str) -> Option<usize> {
        self.lines.get(path).copied()
    }

    /// Says on which line of the file the value at a path comes from.
    pub(super) fn note_line(&mut self, path: &str, line: Option<usize>) {
        if let Some(line) = line {
            self.lines.insert(path.to_owned(), line);
        }
    }

    /// The value at a path.
    pub(super) fn get(&self, path: &str) -> Option<&Value> {
        let mut steps = path.split('.');
        steps.try_fold(&self.value, |value, step| value.get(step))
    }

    /// An error about the key at `path`.
    pub(super) fn error(&self, path: &str, message: impl fmt::Display) -> ConfigError {
        let message = with_nearest_key(&message.to_string());
        let named = if path.is_empty() || message.starts_with(path) {
            message.clone()
        } else {
            format!("{path}: {message}")
        };
        ConfigError {
            file: self.file.clone(),
            line: self.line(path, &message),
            message: named,
        }
    }

    /// The line of a path, or of the nearest thing around it. Where the message is about an unknown field, that of the field.
    fn line(&self, path: &str, message: &str) -> Option<usize> {
        let unknown = ["unknown field `", "unknown variant `"]
            .iter()
            .find_map(|what| {
                let (_, rest) = message.split_once(what)?;
                Some(rest.split_once('`')?.0)
            });
        if let Some(name) = unknown {
            let end = format!(".{name}");
            let inside = self.lines.iter().find(|(at, _)| {
                at.starts_with(path) && (at.ends_with(&end) || at.as_str() == name)
            });
            if let Some((_, line)) = inside {
                return Some(*line);
            }
        }
        let mut around = path;
        loop {
            if let Some(line) = self.lines.get(around) {
                return Some(*line);
            }
            around = &around[..around.rfind(['.', '['])?];
        }
    }

    /// `value`, which stands at `path`, as a `T`.
    pub(super) fn parse<T: DeserializeOwned>(
        &self,
        path: &str,
        value: Value,
    ) -> Result<T, ConfigError> {
        serde_path_to_error::deserialize(value).map_err(|error| {
            let inner = error.path().to_string();
            // What has no name yet, such as an unknown key, is a question mark.
            let inner = inner.trim_end_matches('?').trim_end_matches('.');
            let inner = if inner.is_empty() { "." } else { inner };
            let at = match (path, inner) {
                (path, ".") => path.to_owned(),
                ("", inner) => inner.to_owned(),
                (path, inner) if inner.starts_with('[') => format!("{path}{inner}"),
                (path, inner) => format!("{path}.{inner}"),
            };
            self.error(&at, error.into_inner())
        })
    }
}

/// The first line of what serde-saphyr says, without the place, which is said by the error that carries it.
fn plain_message(message: &str) -> String {
    let first = message.lines().next().unwrap_or(message);
    let first = first.strip_prefix("error: ").unwrap_or(first);
    match first
        .strip_prefix("line ")
        .and_then(|rest| rest.split_once(": "))
    {
        Some((_, rest)) => rest.to_owned(),
        None => first.to_owned(),
    }
}

fn line_at(text: &str, at: usize) -> usize {
    let before = &text.as_bytes()[..at.min(text.len())];
    1 + before.iter().filter(|&&b| b == b'\n').count()
}

/// A value whose keys know their lines.
enum Node {
    Scalar(Value),
    Sequence(Vec<Node>),
    Mapping(Vec<(String, usize, Node)>),
}

/// A path that is longer than [`LONGEST_PATH`].
struct LongPath {
    path: String,
    line: usize,
}

impl Node {
    fn into_value(
        self,
        path: String,
        lines: &mut BTreeMap<String, usize>,
    ) -> Result<Value, LongPath> {
        Ok(match self {
            Self::Scalar(value) => value,
            Self::Sequence(items) => {
                let items = items.into_iter().enumerate();
                Value::Array(
                    items
                        .map(|(i, item)| item.into_value(format!("{path}[{i}]"), lines))
                        .collect::<Result<_, _>>()?,
                )
            }
            Self::Mapping(entries) => {
                let mut map = Map::new();
                for (key, line, node) in entries {
                    let at = if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    };
                    if at.len() > LONGEST_PATH {
                        return Err(LongPath { path: at, line });
                    }
                    lines.insert(at.clone(), line);
                    // An item of a sequence begins with its first key.
                    lines.entry(path.clone()).or_insert(line);
                    map.insert(key, node.into_value(at, lines)?);
                }
                Value::Object(map)
            }
        })
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E>(self, x: bool) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Bool(x)))
    }

    fn visit_i64<E>(self, x: i64) -> Result<Node, E> {
        Ok(Node::Scalar(x.into()))
    }

    fn visit_u64<E>(self, x: u64) -> Result<Node, E> {
        Ok(Node::Scalar(x.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, x: f64) -> Result<Node, E> {
        let number = Number::from_f64(x);
        let number = number.ok_or_else(|| E::custom(format!("{x}, must be finite")))?;
        Ok(Node::Scalar(Value::Number(number)))
    }

    fn visit_str<E>(self, x: &str) -> Result<Node, E> {
        Ok(Node::Scalar(Value::String(x.to_owned())))
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Null))
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        Node::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Node, A::Error> {
        let mut sequence = Vec::new();
        while let Some(item) = items.next_element()? {
            sequence.push(item);
        }
        Ok(Node::Sequence(sequence))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Node, A::Error> {
        let mut mapping = Vec::new();
        while let Some(key) = entries.next_key::<serde_saphyr::Spanned<String>>()? {
            if key.value.contains(['.', '[']) {
                return Err(A::Error::custom(format!(
                    "key {:?}, must have no dots and brackets in it",
                    key.value
                )));
            }
            let line = key.referenced.line() as usize;
            mapping.push((key.value, line, entries.next_value()?));
        }
        Ok(Node::Mapping(mapping))
    }
}

/// The error of a value that has no place in a tree: where it stands in the text, and what is wrong.
type Misplaced = (usize, String);

fn of_table(text: &str, table: &DeTable<'_>) -> Result<Node, Misplaced> {
    let mut mapping = Vec::with_capacity(table.len());
    for (key, value) in table.iter() {
        let at = key.span().start;
        let name = key.get_ref().to_string();
        if name.contains(['.', '[']) {
            return Err((
                at,
                format!("key {name:?}, must have no dots and brackets in it"),
            ));
        }
        let node = of_value(text, value.span().start, value.get_ref())?;
        mapping.push((name, line_at(text, at), node));
    }
    Ok(Node::Mapping(mapping))
}

fn of_value(text: &str, at: usize, value: &DeValue<'_>) -> Result<Node, Misplaced> {
    Ok(match value {
        DeValue::String(x) => Node::Scalar(Value::String(x.to_string())),
        DeValue::Boolean(x) => Node::Scalar(Value::Bool(*x)),
        DeValue::Integer(x) => {
            let number = i64::from_str_radix(x.as_str(), x.radix());
            let number = number.map_err(|error| (at, format!("{x}: {error}")))?;
            Node::Scalar(number.into())
        }
        DeValue::Float(x) => {
            let number = x.as_str().parse().ok().and_then(Number::from_f64);
            let number = number.ok_or_else(|| (at, format!("{x}, must be finite")))?;
            Node::Scalar(Value::Number(number))
        }
        DeValue::Datetime(x) => return Err((at, format!("{x}: a date, which no key holds"))),
        DeValue::Array(items) => {
            let items = items.iter();
            let nodes = items.map(|item| of_value(text, item.span().start, item.get_ref()));
            Node::Sequence(nodes.collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => of_table(text, table)?,
    })
}

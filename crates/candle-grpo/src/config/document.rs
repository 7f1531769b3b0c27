//! Configuration files as value trees that keep the lines.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use candle_grpo_train::hide_from_programs;
use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use toml::de::{DeTable, DeValue};

use super::culprit::culprit;
use super::error::ConfigError;
use super::import::{VERL_SIGN, overrides_of};
use super::preset::Preset;
use super::schema::kept_schema;
use super::sft::SftRunConfig;
use super::suggestions::{unknown_key, unknown_name, unknown_sft_key};
use super::syntax;
use super::tree::{QUOTE_HINT, Tree, TypeError};

/// The longest key path in bytes. It bounds the memory for paths.
pub(super) const LONGEST_PATH: usize = 500;

/// A configuration file: its values and its keys' lines.
#[derive(Debug, Clone, Default)]
pub struct Document {
    file: PathBuf,
    pub(super) value: Value,
    /// The line of each key, by its path (`recipe.overlong`, `rewards[0].kind`).
    lines: BTreeMap<String, usize>,
    /// The place in the file of each key that a translation has moved.
    origins: BTreeMap<String, Origin>,
}

/// The key of a file that a translation has moved, or from which it has made another.
#[derive(Debug, Clone)]
struct Origin {
    path: String,
    /// The value of the key, if another value follows from it.
    cause: Option<Value>,
}

/// Hides the environment variables that any `api_key_env` in `value` names from programs.
fn hide_keys(value: &Value) {
    match value {
        Value::Object(fields) => {
            if let Some(name) = fields.get("api_key_env").and_then(Value::as_str) {
                hide_from_programs(name);
            }
            fields.values().for_each(hide_keys);
        }
        Value::Array(entries) => entries.iter().for_each(hide_keys),
        _ => {}
    }
}

impl Document {
    /// Reads a file: TOML if its name ends in `.toml`, otherwise YAML, which includes JSON. From a
    /// script, `.sh`, it reads the keys that the script sets for verl or OpenRLHF.
    ///
    /// # Errors
    ///
    /// Returns an error with the line if the file cannot be read or is not valid.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = fs::read_to_string(path).map_err(|error| ConfigError {
            file: path.to_path_buf(),
            line: None,
            message: match error.kind() {
                io::ErrorKind::InvalidData => "must be a text in UTF-8".to_owned(),
                _ => format!("cannot be read: {error}"),
            },
        })?;
        let ends = |other: &str| {
            let end = path.extension();
            end.is_some_and(|end| end.eq_ignore_ascii_case(other))
        };
        if ends("toml") {
            Self::from_toml(path, &text)
        } else if ends("sh") {
            Self::from_script(path, &text)
        } else {
            Self::from_yaml(path, &text)
        }
    }

    /// Parses the keys that a shell script sets for verl or OpenRLHF.
    pub(super) fn from_script(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let mut document = Self {
            file: file.to_path_buf(),
            value: Value::Object(Map::new()),
            ..Self::default()
        };
        for (path, value, line) in overrides_of(text) {
            let sections = path.match_indices('.').map(|(end, _)| &path[..end]);
            let is_free = |section: &str| document.get(section).is_none_or(Value::is_object);
            if !sections.clone().all(is_free) {
                continue;
            }
            // A section has the line of its first key.
            for section in sections {
                document.lines.entry(section.to_owned()).or_insert(line);
            }
            document.insert(path, value, path, Some(line));
        }
        if document.lines.is_empty() {
            let message = "a shell script without keys such as data.train_files=a.parquet or --train.batch_size 8, must be a file of YAML or TOML";
            return Err(document.error("", message));
        }
        Ok(document)
    }

    /// Parses YAML text; `file` is for messages.
    ///
    /// # Errors
    ///
    /// Returns an error with the line if the text is not valid.
    pub fn from_yaml(file: &Path, text: &str) -> Result<Self, ConfigError> {
        // Numbers that are not finite are refused with their key.
        let policy = serde_saphyr::NonFiniteFloatPolicy::PassThrough;
        let options = serde_saphyr::options! { non_finite_float_policy: policy };
        let node = serde_saphyr::from_str_with_options(text, options);
        let node: Node = node.map_err(|error| ConfigError {
            file: file.to_path_buf(),
            line: error.location().map(|place| place.line() as usize),
            message: syntax::yaml(&error),
        })?;
        Self::new(file, node)
    }

    /// Parses TOML text; `file` is for messages.
    ///
    /// # Errors
    ///
    /// Returns an error with the line if the text is not valid.
    pub fn from_toml(file: &Path, text: &str) -> Result<Self, ConfigError> {
        let fail = |at: Option<usize>, message: &str| ConfigError {
            file: file.to_path_buf(),
            line: at.map(|at| line_at(text, at)),
            message: message.to_owned(),
        };
        let table = DeTable::parse(text).map_err(|error| {
            let start = error.span().map(|span| span.start);
            fail(start, &syntax::toml(text, &error))
        })?;
        let node =
            table_node(text, table.get_ref()).map_err(|(at, message)| fail(Some(at), &message))?;
        Self::new(file, node)
    }

    fn new(file: &Path, mut node: Node) -> Result<Self, ConfigError> {
        if let Node::Mapping(entries) = &mut node
            && entries.iter().any(|(key, ..)| key == VERL_SIGN)
        {
            // Hydra's list of files, in which keys have dots.
            entries.retain(|(key, ..)| key != "defaults");
        }
        let mut lines = BTreeMap::new();
        let value = node.into_value(String::new(), &mut lines);
        let value = value.map_err(|(line, message)| ConfigError {
            file: file.to_path_buf(),
            line: Some(line),
            message,
        })?;
        Ok(Self {
            file: file.to_path_buf(),
            value,
            lines,
            origins: BTreeMap::new(),
        })
    }

    /// Returns the file's values.
    pub fn value(&self) -> &Value {
        &self.value
    }

    /// Returns the default run directory: `runs/` and the file name.
    pub(super) fn run_dir(&self) -> PathBuf {
        let name = self.file.file_stem().unwrap_or("run".as_ref());
        Path::new("runs").join(name)
    }

    /// Returns a document with another value for the same file.
    pub(super) fn with_value(&self, value: Value) -> Self {
        Self {
            file: self.file.clone(),
            value,
            lines: BTreeMap::new(),
            origins: BTreeMap::new(),
        }
    }

    /// Returns the line where a path's key is.
    pub(super) fn line_of(&self, path: &str) -> Option<usize> {
        self.lines.get(path).copied()
    }

    /// Notes that the value at `path` stands at `origin` in the file, on that line.
    fn note_origin(&mut self, path: &str, origin: &str, line: Option<usize>) {
        let origin = Origin {
            path: origin.to_owned(),
            cause: None,
        };
        self.origins.insert(path.to_owned(), origin);
        if let Some(line) = line {
            self.lines.insert(path.to_owned(), line);
        }
    }

    /// Notes that the value at `path` follows from `value`, which the key at `cause` has in
    /// `other`, a document of the same file.
    pub(super) fn note_cause(&mut self, path: &str, other: &Self, cause: &str, value: &Value) {
        self.note_origin(path, &other.shown(cause), other.line(cause));
        if let Some(origin) = self.origins.get_mut(path) {
            origin.cause = Some(value.clone());
        }
    }

    /// Returns the value of the key from which the value at `path` follows.
    pub(super) fn cause(&self, path: &str) -> Option<&Value> {
        self.origins.get(path)?.cause.as_ref()
    }

    /// Returns the places of what the key at `path` in the file sets, without those inside others.
    pub(super) fn places_of(&self, path: &str) -> Vec<&str> {
        let mut places: Vec<&str> = Vec::new();
        for (place, origin) in &self.origins {
            let is_inside = places.iter().any(|around| is_within(place, around));
            if origin.path == path && self.get(place).is_some() && !is_inside {
                places.push(place);
            }
        }
        places
    }

    /// Returns the path in the file of the key at `path`.
    fn shown(&self, path: &str) -> String {
        let mut around = path;
        loop {
            match self.origins.get(around) {
                Some(origin) if origin.cause.is_none() || around == path => {
                    return format!("{}{}", origin.path, &path[around.len()..]);
                }
                _ => {}
            }
            match around.rfind(['.', '[']) {
                Some(end) => around = &around[..end],
                None => return path.to_owned(),
            }
        }
    }

    /// Moves the value at `from` to `to`, if there is one.
    ///
    /// # Errors
    ///
    /// Returns an error if there is a value at `to`, too.
    pub(super) fn rename(&mut self, from: &str, to: &str) -> Result<(), ConfigError> {
        if self.get(from).is_none() {
            return Ok(());
        }
        if self.get(to).is_some_and(|value| !value.is_null()) {
            let message = format!(
                "given, but {} is given, too; give one of them",
                self.shown(to)
            );
            return Err(self.error(from, message));
        }
        let paths = self.lines.range(from.to_owned()..).map(|(path, _)| path);
        let paths = paths.take_while(|path| path.starts_with(from));
        let paths: Vec<String> = paths
            .filter(|path| is_within(path, from))
            .cloned()
            .collect();
        for path in paths {
            let place = format!("{to}{}", &path[from.len()..]);
            self.note_origin(&place, &self.shown(&path), self.line(&path));
            self.lines.remove(&path);
        }
        let value = self.remove(from).unwrap_or_default();
        self.set(to, value);
        Ok(())
    }

    /// Removes the value at `path`.
    pub(super) fn remove(&mut self, path: &str) -> Option<Value> {
        let pointer = pointer(path);
        let (section, key) = pointer.rsplit_once('/')?;
        let section = self.value.pointer_mut(section)?.as_object_mut()?;
        section.shift_remove(key)
    }

    /// Sets the value at `path`, which stands at `origin` in the file, on that line. Mappings
    /// replace values on the way.
    pub(super) fn insert(&mut self, path: &str, value: Value, origin: &str, line: Option<usize>) {
        self.note_origin(path, origin, line);
        self.set(path, value);
    }

    /// Sets the value at `path`, which is not in the file.
    pub(super) fn set(&mut self, path: &str, value: Value) {
        let mut at = &mut self.value;
        let mut steps = path.split('.').peekable();
        while let Some(step) = steps.next() {
            if !at.is_object() {
                *at = Value::Object(Map::new());
            }
            let Value::Object(map) = at else { return };
            if steps.peek().is_none() {
                map.insert(step.to_owned(), value);
                return;
            }
            at = map.entry(step).or_insert(Value::Null);
        }
    }

    /// Returns every value that is not a mapping with its path, in file order.
    pub(super) fn leaves(&self) -> Vec<(String, &Value)> {
        let mut leaves = Vec::new();
        let mut open = vec![(String::new(), &self.value)];
        while let Some((path, value)) = open.pop() {
            match value {
                Value::Object(map) if !map.is_empty() => {
                    open.extend(map.iter().map(|(key, value)| (join(&path, key), value)));
                }
                value => leaves.push((path, value)),
            }
        }
        leaves.sort_by_key(|(path, _)| self.line_of(path));
        leaves
    }

    /// Returns the value at a path.
    pub(super) fn get(&self, path: &str) -> Option<&Value> {
        self.value.pointer(&pointer(path))
    }

    /// Returns an error about the key at `path`.
    pub(super) fn error(&self, path: &str, message: impl fmt::Display) -> ConfigError {
        let shown = self.shown(path);
        ConfigError {
            file: self.file.clone(),
            line: self.line(path),
            message: match shown.as_str() {
                "" => message.to_string(),
                shown => format!("{shown}: {message}"),
            },
        }
    }

    /// Returns the line of a path, or of the nearest key around it. An option of the recipe that
    /// the file does not have is of the preset.
    fn line(&self, path: &str) -> Option<usize> {
        let is_of_preset = path.rsplit_once('.').is_some_and(|(section, _)| {
            let given = |path| self.get(path).is_some();
            path.starts_with("recipe.") && !given(path) && (section == "recipe" || !given(section))
        });
        let preset = self.lines.get("preset").copied();
        let preset = preset.filter(|_| is_of_preset && !self.lines.contains_key(path));
        preset.or_else(|| nearest_line(&self.lines, path))
    }

    /// Parses `value`, found at `path`, as a `T`. If it names environment variables that hold
    /// secret keys, programs do not inherit them.
    pub(super) fn parse<T: DeserializeOwned + JsonSchema>(
        &self,
        path: &str,
        value: &Value,
    ) -> Result<T, ConfigError> {
        hide_keys(value);
        serde_path_to_error::deserialize(Tree(value)).map_err(|error| {
            let inner = error.path().to_string();
            // An unknown key is a question mark in the path, or its last step.
            let inner = inner.trim_end_matches('?').trim_end_matches('.');
            let error = error.into_inner();
            let (section, last) = inner.rsplit_once('.').unwrap_or(("", inner));
            let inner = match &error {
                TypeError::UnknownKey { key, .. } if key == last => section,
                _ => inner,
            };
            let culprit = culprit(&kept_schema::<T>(), value, inner, &error);
            self.type_error(&join(path, culprit.as_deref().unwrap_or(inner)), &error)
        })
    }

    fn type_error(&self, path: &str, error: &TypeError) -> ConfigError {
        match error {
            TypeError::UnknownKey { key, known } => {
                let message = if SftRunConfig::is_of(self) {
                    unknown_sft_key(path, key, known)
                } else {
                    unknown_key(path, key, known)
                };
                self.error(&join(path, key), message)
            }
            TypeError::UnknownName { name, known } => {
                // Some names are keys of a mapping and have a line.
                let at = join(path, name);
                let at = if self.lines.contains_key(&at) {
                    &at
                } else {
                    path
                };
                // Other trainers have these algorithms as estimators.
                let preset = serde_json::from_value::<Preset>(Value::from(name.as_str()));
                let hint = if path == "algorithm.adv_estimator" && preset.is_ok() {
                    format!(" (here it is `preset: {name}`)")
                } else {
                    String::new()
                };
                self.error(at, unknown_name(name, known) + &hint)
            }
            TypeError::Missing { key } => self.error(&join(path, key), "absent, must be given"),
            // The message of a key of several types does not have the value.
            TypeError::Other(message) => {
                let (at, found) = match self.get(path) {
                    // One of an item of a list is about the list.
                    Some(Value::Array(items)) if message.contains("text") => {
                        let item = items.iter().position(Value::is_boolean);
                        match item {
                            Some(i) => (format!("{path}[{i}]"), items.get(i)),
                            None => (path.to_owned(), None),
                        }
                    }
                    found => (path.to_owned(), found),
                };
                match found {
                    Some(found @ Value::Bool(_)) => {
                        self.error(&at, format_args!("{found}, {message}{QUOTE_HINT}"))
                    }
                    _ => self.error(&at, message),
                }
            }
            error => match self.share(path) {
                Some(share) => self.error(path, format_args!("{error} ({share})")),
                None => self.error(path, error),
            },
        }
    }

    /// Returns the number of steps that the value at `path` stands for, if the key counts steps and
    /// its value is a share, as in transformers.
    fn share(&self, path: &str) -> Option<String> {
        const COUNTS: [&str; 3] = [
            "schedule.warmup_steps",
            "evaluation.every_steps",
            "checkpoint.every_steps",
        ];
        let share = self.get(path)?.as_f64()?;
        let max_steps = self.get("max_steps")?.as_f64()?;
        (COUNTS.contains(&path) && share > 0. && share < 1.).then(|| {
            let steps = share_of(share, max_steps);
            format!("a share of max_steps: {share} of {max_steps} is {steps}")
        })
    }
}

/// Returns a share of `steps` as a whole number.
pub(super) fn share_of(share: f64, steps: f64) -> f64 {
    // Without the error of the last digits of the product.
    const DIGITS: f64 = 1e6;
    ((share * steps * DIGITS).round() / DIGITS).ceil()
}

fn nearest_line(lines: &BTreeMap<String, usize>, path: &str) -> Option<usize> {
    let mut around = path;
    loop {
        if let Some(line) = lines.get(around) {
            return Some(*line);
        }
        around = &around[..around.rfind(['.', '['])?];
    }
}

/// Returns a key's path as a JSON pointer.
fn pointer(path: &str) -> String {
    let steps = path
        .split(['.', '['])
        .map(|step| step.trim_end_matches(']'));
    let steps = steps.filter(|step| !step.is_empty());
    steps.flat_map(|step| ["/", step]).collect()
}

/// Returns how a key with dots is written, for an error: `, as in a: {b: ...}` for `a.b`.
fn nested(key: &str) -> String {
    let mut parts = key.rsplit('.');
    match parts.next() {
        Some(last) if !key.contains('[') && key.split('.').all(|part| !part.is_empty()) => {
            let value = format!("{last}: ...");
            let written = parts.fold(value, |value, part| format!("{part}: {{{value}}}"));
            format!(", as in {written}")
        }
        _ => String::new(),
    }
}

/// Returns the path of `key`, which may be a path or an index, in the section at `path`.
pub(super) fn join(path: &str, key: &str) -> String {
    match (path, key) {
        (path, "") => path.to_owned(),
        ("", key) => key.to_owned(),
        (path, key) if key.starts_with('[') => format!("{path}{key}"),
        (path, key) => format!("{path}.{key}"),
    }
}

/// Returns whether `path` is `around`, or inside it.
pub(super) fn is_within(path: &str, around: &str) -> bool {
    let rest = path.strip_prefix(around);
    rest.is_some_and(|rest| around.is_empty() || rest.is_empty() || rest.starts_with(['.', '[']))
}

fn line_at(text: &str, at: usize) -> usize {
    let before = &text.as_bytes()[..at.min(text.len())];
    1 + before.iter().filter(|&&b| b == b'\n').count()
}

/// A value with its keys' lines.
enum Node {
    Scalar(Value),
    /// A number that is not finite, as the file has it.
    NotFinite(String),
    Sequence(Vec<Node>),
    Mapping(Vec<(String, usize, Node)>),
}

impl Node {
    /// Returns the value, or the line and a message for a key that no path can have.
    fn into_value(
        self,
        path: String,
        lines: &mut BTreeMap<String, usize>,
    ) -> Result<Value, (usize, String)> {
        Ok(match self {
            Self::Scalar(value) => value,
            Self::NotFinite(number) => {
                let line = nearest_line(lines, &path).unwrap_or(1);
                let key = if path.is_empty() { path } else { path + ": " };
                return Err((line, format!("{key}{number}, must be finite")));
            }
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
                    if key.contains(['.', '[']) {
                        let message = format!(
                            "key {key:?}, must have no dots and brackets in it{}",
                            nested(&key)
                        );
                        return Err((line, message));
                    }
                    let at = if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    };
                    if at.len() > LONGEST_PATH {
                        let start: String = at.chars().take(40).collect();
                        let message = format!(
                            "key {start:?}...: its path has {} bytes, must have at most {LONGEST_PATH}",
                            at.len()
                        );
                        return Err((line, message));
                    }
                    lines.insert(at.clone(), line);
                    // An item of a sequence has the line of its first key.
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

    fn visit_f64<E>(self, x: f64) -> Result<Node, E> {
        Ok(match Number::from_f64(x) {
            Some(number) => Node::Scalar(Value::Number(number)),
            None => Node::NotFinite(format!("{x}").replace("inf", ".inf").replace("NaN", ".nan")),
        })
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
            let line = key.referenced.line() as usize;
            mapping.push((key.value, line, entries.next_value()?));
        }
        Ok(Node::Mapping(mapping))
    }
}

/// An error for a value that a tree cannot hold: its offset in the text, and the message.
type Misplaced = (usize, String);

fn table_node(text: &str, table: &DeTable<'_>) -> Result<Node, Misplaced> {
    let mut mapping = Vec::with_capacity(table.len());
    for (key, value) in table.iter() {
        let at = key.span().start;
        let node = value_node(text, value.span().start, value.get_ref())?;
        mapping.push((key.get_ref().to_string(), line_at(text, at), node));
    }
    Ok(Node::Mapping(mapping))
}

fn value_node(text: &str, at: usize, value: &DeValue<'_>) -> Result<Node, Misplaced> {
    Ok(match value {
        DeValue::String(x) => Node::Scalar(Value::String(x.to_string())),
        DeValue::Boolean(x) => Node::Scalar(Value::Bool(*x)),
        DeValue::Integer(x) => {
            let number = i64::from_str_radix(x.as_str(), x.radix());
            let number =
                number.map_err(|_| (at, format!("{x}, must be a whole number below 2^63")))?;
            Node::Scalar(number.into())
        }
        DeValue::Float(x) => match x.as_str().parse().ok().and_then(Number::from_f64) {
            Some(number) => Node::Scalar(Value::Number(number)),
            None => Node::NotFinite(x.to_string()),
        },
        DeValue::Datetime(x) => return Err((at, format!("{x}: a date, which no key takes"))),
        DeValue::Array(items) => {
            let items = items.iter();
            let nodes = items.map(|item| value_node(text, item.span().start, item.get_ref()));
            Node::Sequence(nodes.collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => table_node(text, table)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tool schema's keys appear in prompts.
    #[test]
    fn keys_of_a_toml_file_keep_their_order() {
        let text = "b = 1\na = {zeta = 1, alpha = {y = 2, x = 3}}\n";
        let document = Document::from_toml(Path::new("run.toml"), text).unwrap();
        let expected = r#"{"zeta":1,"alpha":{"y":2,"x":3}}"#;
        assert_eq!(document.get("a").unwrap().to_string(), expected);
    }
}

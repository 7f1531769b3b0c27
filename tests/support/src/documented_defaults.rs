//! Comparison of the defaults in doc comments with those of the code.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The default of each of these types, by its name, as a map for
/// [`assert_defaults_are_documented`].
///
/// # Panics
///
/// Panics if a default cannot be serialized.
#[macro_export]
macro_rules! defaults_of {
    ($($name:ident),* $(,)?) => {
        std::collections::BTreeMap::from([
            $((stringify!($name), $crate::serialized(&<$name>::default())),)*
        ])
    };
}

/// Returns a value as serde writes it.
///
/// # Panics
///
/// Panics if it cannot be serialized.
pub fn serialized<T: Serialize>(value: &T) -> Value {
    serde_json::to_value(value).expect("a configuration can be serialized")
}

/// Returns the fields of a configuration of type `T` that are not among the `given` ones, with
/// their defaults.
///
/// # Panics
///
/// Panics if the given fields are no configuration.
pub fn other_fields<T: Serialize + DeserializeOwned>(given: Value) -> Value {
    let keys: Vec<String> = given
        .as_object()
        .map(|fields| fields.keys().cloned().collect())
        .unwrap_or_default();
    let read: T = serde_json::from_value(given).expect("the required fields");
    let mut value = serialized(&read);
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|name, _| !keys.contains(name));
    }
    value
}

/// Checks that the doc comments of the crate at `folder` state the defaults of its options.
///
/// The last sentence of a field's comment is "Default 20.", "Default `token`.", "Default
/// \[`Kl::default`\].", the name of another value in `defaults`, or, for an absent value and an
/// empty list, "Absent by default." and "Empty by default.". A field without a default has no such
/// sentence. The comment of the default variant of an enum ends with "The default.", after
/// "Default 2." if the variant has a number.
///
/// `defaults` has the default of each struct that implements `Default` or has fields with
/// `#[serde(default)]`, of each enum whose `Default` is not derived, and of variants with such
/// fields under names such as `Outer::Variant`.
///
/// # Panics
///
/// Panics with a list of the fields and variants that break a rule.
#[track_caller]
pub fn assert_defaults_are_documented(folder: &str, defaults: &BTreeMap<&str, Value>) {
    let mut items = Vec::new();
    read_items(&Path::new(folder).join("src"), &mut items);
    assert!(!items.is_empty(), "no struct in {folder}");
    let mut wrong = Vec::new();
    for item in &items {
        item.check(defaults, &mut wrong);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A public struct, a public enum, or a variant that has named fields.
struct Item {
    name: String,
    is_enum: bool,
    derives_default: bool,
    implements_default: bool,
    members: Vec<Member>,
}

/// A public field, or a variant.
struct Member {
    name: String,
    comment: String,
    /// True for the attribute `#[default]`, and for one of serde with a default.
    has_default: bool,
}

fn read_items(folder: &Path, items: &mut Vec<Item>) {
    let mut paths: Vec<_> = fs::read_dir(folder)
        .expect("the folder of the sources")
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    for path in paths {
        if path.is_dir() {
            read_items(&path, items);
        } else if path.extension().is_some_and(|x| x == "rs") {
            items_of(&fs::read_to_string(&path).expect("a source file"), items);
        }
    }
}

fn items_of(source: &str, items: &mut Vec<Item>) {
    let mut lines = source.lines();
    // The attributes and comments above the next item.
    let mut above = String::new();
    while let Some(line) = lines.next() {
        let words = line.trim();
        let head = words
            .strip_suffix('{')
            .and_then(|head| head.strip_prefix("pub "));
        let kind = head.and_then(|head| head.split_once(' '));
        if let Some((kind @ ("struct" | "enum"), name)) = kind {
            let name = name.split(['<', ' ']).next().unwrap_or_default();
            let indent = line.len() - line.trim_start().len();
            let end = format!("{}}}", " ".repeat(indent));
            let body: Vec<&str> = lines
                .by_ref()
                .take_while(|line| !line.starts_with(&end))
                .collect();
            let implementation = format!("impl Default for {name} ");
            let implementation_of_borrowed = format!("impl Default for {name}<");
            let first = items.len();
            items.push(Item {
                name: name.to_owned(),
                is_enum: kind == "enum",
                derives_default: above.contains("derive(") && above.contains("Default"),
                implements_default: source.contains(&implementation)
                    || source.contains(&implementation_of_borrowed),
                members: Vec::new(),
            });
            if kind == "enum" {
                let (variants, with_fields) = variants(name, &body);
                items[first].members = variants;
                items.extend(with_fields);
            } else {
                items[first].members = members(&body, |line| line.strip_prefix("pub "));
            }
        }
        if words.starts_with("#[") || words.ends_with(")]") || above.ends_with(',') {
            above.push_str(words);
        } else if !words.starts_with("//") {
            above.clear();
        }
    }
}

/// The members whose line `start` accepts, with the comments and attributes above them.
fn members<'a>(lines: &[&'a str], start: impl Fn(&'a str) -> Option<&'a str>) -> Vec<Member> {
    let mut members = Vec::new();
    let (mut comment, mut has_default) = (String::new(), false);
    for line in lines.iter().map(|line| line.trim()) {
        if let Some(words) = line.strip_prefix("///") {
            comment.push_str(words);
        } else if line.starts_with("#[") {
            let serde = line.starts_with("#[serde(") && line.contains("default");
            has_default |= serde || line == "#[default]";
        } else {
            let name = start(line).and_then(|line| line.split([':', ',', ' ', '(']).next());
            if let Some(name) = name.filter(|name| !name.is_empty()) {
                members.push(Member {
                    name: name.to_owned(),
                    comment: comment.trim().to_owned(),
                    has_default,
                });
            }
            comment.clear();
            has_default = false;
        }
    }
    members
}

/// The variants of the enum `name`, and each variant with named fields as an item.
fn variants(name: &str, body: &[&str]) -> (Vec<Member>, Vec<Item>) {
    let indent_of = |line: &&str| line.len() - line.trim_start().len();
    let indent = body.iter().map(indent_of).min().unwrap_or(0);
    let is_outer = |line: &&&str| indent_of(line) == indent;
    let outer: Vec<&str> = body.iter().filter(is_outer).copied().collect();
    let is_variant = |line: &&str| line.starts_with(|c: char| c.is_ascii_uppercase());
    let variants = members(&outer, |line| Some(line).filter(is_variant));
    let mut with_fields = Vec::new();
    for (i, line) in body.iter().enumerate() {
        let head = line.trim();
        if indent_of(line) == indent && is_variant(&head) && head.ends_with('{') {
            let fields: Vec<&str> = body[i + 1..]
                .iter()
                .take_while(|line| indent_of(line) > indent)
                .copied()
                .collect();
            with_fields.push(Item {
                name: format!("{name}::{}", head.trim_end_matches([' ', '{'])),
                is_enum: false,
                derives_default: false,
                implements_default: false,
                members: members(&fields, Some),
            });
        }
    }
    (variants, with_fields)
}

impl Item {
    fn check(&self, defaults: &BTreeMap<&str, Value>, wrong: &mut Vec<String>) {
        let default = defaults.get(self.name.as_str());
        let needs_default = if self.is_enum {
            self.implements_default
        } else {
            self.derives_default
                || self.implements_default
                || self.members.iter().any(|member| member.has_default)
        };
        if needs_default && !self.members.is_empty() && default.is_none() {
            wrong.push(format!("{}: the test has no default of it", self.name));
            return;
        }
        for member in &self.members {
            let place = format!("{}::{}", self.name, member.name);
            if self.is_enum {
                let is_default = member.has_default
                    || default.is_some_and(|default| is_variant(default, &member.name));
                if is_default != member.comment.ends_with("The default.") {
                    let must = if is_default { "end" } else { "not end" };
                    wrong.push(format!(
                        "{place}: its comment must {must} with \"The default.\""
                    ));
                }
                // The number of a variant such as `Power(2.)`.
                let number = default
                    .filter(|_| is_default)
                    .and_then(|default| default.as_object()?.values().next())
                    .filter(|value| value.is_number());
                if let Some(number) = number {
                    let comment = member.comment.trim_end_matches("The default.").trim_end();
                    if !stated(comment).is_some_and(|stated| agrees(stated, number, defaults)) {
                        wrong.push(format!("{place}: its comment must state {number}"));
                    }
                }
                continue;
            }
            let value = default.and_then(|default| default.get(&member.name));
            match (value, stated(&member.comment)) {
                (None, None) => {}
                (None, Some(stated)) => {
                    wrong.push(format!("{place}: {stated:?}, but it has no default"));
                }
                (Some(value), None) => {
                    wrong.push(format!("{place}: no default in its comment, is {value}"));
                }
                (Some(value), Some(stated)) => {
                    if !agrees(stated, value, defaults) {
                        wrong.push(format!("{place}: {stated:?}, is {value}"));
                    }
                }
            }
        }
    }
}

/// Returns whether `default` is the variant `name`, in the snake or kebab case of serde.
fn is_variant(default: &Value, name: &str) -> bool {
    let tag = match default {
        Value::String(tag) => Some(tag),
        Value::Object(fields) => fields.keys().next(),
        _ => None,
    };
    tag.is_some_and(|tag| tag.replace(['_', '-'], "").eq_ignore_ascii_case(name))
}

/// The sentence of a comment that states its default, the last one, without its full stop.
fn stated(comment: &str) -> Option<&str> {
    let comment = comment.strip_suffix('.')?;
    if comment.ends_with(" by default") {
        return comment.rsplit(". ").next();
    }
    // A number may have a point, so the sentence starts at its first word.
    let start = comment.rfind("Default ")?;
    let before = &comment[..start];
    (before.is_empty() || before.ends_with([' ', '.'])).then(|| &comment[start..])
}

fn agrees(stated: &str, value: &Value, defaults: &BTreeMap<&str, Value>) -> bool {
    match value {
        Value::Null => return stated == "Absent by default",
        Value::Array(items) if items.is_empty() => return stated == "Empty by default",
        _ => {}
    }
    let Some(text) = stated.strip_prefix("Default ") else {
        return false;
    };
    let linked = text
        .strip_prefix("[`")
        .and_then(|text| text.strip_suffix("::default`]"));
    let code = text
        .strip_prefix('`')
        .and_then(|text| text.strip_suffix('`'));
    if let Some(name) = linked {
        defaults.get(name) == Some(value)
    } else if let Some(code) = code {
        match value {
            _ if defaults.get(code) == Some(value) => true,
            Value::String(name) => name == code,
            Value::Number(_) => false,
            _ => serde_json::from_str::<Value>(code).is_ok_and(|read| read == *value),
        }
    } else {
        value.is_number() && text.parse().ok() == value.as_f64()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SOURCE: &str = r#"
#[derive(Debug, Default, Serialize)]
pub struct Options {
    /// Needed. 1e-4 in TRL. Default 0.5.
    pub share: f64,
    /// A bound. Absent by default.
    pub bound: Option<f64>,
    /// The level. Default `token`.
    pub level: Level,
}

#[derive(Debug, Default)]
pub enum Level {
    /// A token. The default.
    #[default]
    Token,
    /// A sequence.
    Sequence {
        /// The bound. Default 2.
        #[serde(default = "two")]
        bound: f64,
        /// The width.
        width: f64,
    },
}

pub enum Power {
    /// A power. Default 3. The default.
    Of(f64),
}

impl Default for Power {
    fn default() -> Self {
        Self::Of(3.)
    }
}
"#;

    fn wrong(source: &str) -> Vec<String> {
        let defaults = BTreeMap::from([
            (
                "Options",
                json!({"share": 0.5, "bound": null, "level": "token"}),
            ),
            ("Level::Sequence", json!({"bound": 2.0})),
            ("Power", json!({"of": 3.0})),
        ]);
        let (mut items, mut wrong) = (Vec::new(), Vec::new());
        items_of(source, &mut items);
        for item in &items {
            item.check(&defaults, &mut wrong);
        }
        wrong
    }

    #[test]
    fn true_defaults_are_accepted() {
        assert_eq!(wrong(SOURCE), Vec::<String>::new());
    }

    #[test]
    fn a_false_a_missing_and_an_invented_default_are_found() {
        for (from, to, place) in [
            ("Default 0.5.", "Default 0.4.", "Options::share"),
            (" Default 0.5.", "", "Options::share"),
            ("Absent by default.", "Default 1.", "Options::bound"),
            (" Absent by default.", "", "Options::bound"),
            ("Default `token`.", "Default `sequence`.", "Options::level"),
            ("A token. The default.", "A token.", "Level::Token"),
            ("A sequence.", "A sequence. The default.", "Level::Sequence"),
            ("Default 2.", "Default 1.", "Level::Sequence::bound"),
            (
                "The width.",
                "The width. Default 2.",
                "Level::Sequence::width",
            ),
            ("Default 3.", "Default 4.", "Power::Of"),
            ("pub struct Options", "pub struct Other", "Other"),
        ] {
            assert!(SOURCE.contains(from));
            let wrong = wrong(&SOURCE.replace(from, to));
            assert!(
                wrong.len() == 1 && wrong[0].starts_with(&format!("{place}:")),
                "{from} {to}: {wrong:?}"
            );
        }
    }
}

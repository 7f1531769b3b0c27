//! Python string methods, and Jinja text filters that differ from minijinja's.
//!
//! Positions count characters.

use std::sync::LazyLock;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::{Captures, Regex};

use super::MAX_TEXT;
use super::format::str_format;
use super::python::str;

/// Calls a value's method as in Python.
pub(super) fn method(
    state: &State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), value.kind()) {
        (Some(text), ValueKind::String) => match name {
            "format" => Ok(Value::from(str_format(text, arguments)?)),
            _ => string_method(text, name, &Arguments::new(arguments)?),
        },
        (None, ValueKind::Seq) if name == "index" => {
            let item = Arguments::new(arguments)?.take(["item"])?[0].clone();
            let found = value.try_iter()?.position(|x| Some(x) == item);
            found
                .map(Value::from)
                .ok_or_else(|| wrong("index: the value is not in the list"))
        }
        _ => unknown_method_callback(state, value, name, arguments),
    }
}

pub(super) fn wrong(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Call arguments, by position or name.
struct Arguments(Vec<Value>, Kwargs);

impl Arguments {
    fn new(values: &[Value]) -> Result<Self, Error> {
        let (values, named): (Rest<Value>, Kwargs) = from_args(values)?;
        Ok(Self(values.0, named))
    }

    /// Returns the arguments with these names; `None` counts as absent.
    fn take<const N: usize>(&self, names: [&str; N]) -> Result<[Option<Value>; N], Error> {
        let Self(values, named) = self;
        if values.len() > N {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        let mut taken = [const { None }; N];
        for (at, name) in names.into_iter().enumerate() {
            let value = match values.get(at) {
                Some(value) => Some(value.clone()),
                None => named.get::<Option<Value>>(name)?,
            };
            taken[at] = value.filter(|value| !value.is_none());
        }
        named.assert_all_used()?;
        Ok(taken)
    }
}

fn text_of(value: Option<Value>, name: &str) -> Result<String, Error> {
    let text = value.as_ref().and_then(Value::as_str).map(str::to_owned);
    text.ok_or_else(|| wrong(format!("{name}: must be a text")))
}

fn optional_text(value: Option<Value>, name: &str) -> Result<Option<String>, Error> {
    value.map(|value| text_of(Some(value), name)).transpose()
}

fn number(value: &Option<Value>) -> Result<Option<i64>, Error> {
    value.clone().map(i64::try_from).transpose()
}

/// Width in characters to which a text is padded.
fn width(value: Option<Value>, name: &str, default: Option<i64>) -> Result<usize, Error> {
    let width = number(&value)?.or(default);
    let width = width.ok_or_else(|| wrong(format!("{name}: must be a number")))?;
    match usize::try_from(width.max(0)) {
        Ok(width) if width <= MAX_TEXT => Ok(width),
        _ => Err(wrong(format!(
            "{name}: {width}, must be at most {MAX_TEXT}"
        ))),
    }
}

/// Python's whitespace characters.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase()
}

/// A word's first letter.
fn title_case(c: char) -> impl Iterator<Item = char> {
    let mut upper = c.to_uppercase();
    let first = upper.next();
    first.into_iter().chain(upper.flat_map(char::to_lowercase))
}

fn capitalize(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().into_iter().flat_map(title_case);
    first
        .chain(characters.as_str().to_lowercase().chars())
        .collect()
}

fn title(text: &str) -> String {
    let mut after_letter = false;
    let mut titled = String::with_capacity(text.len());
    for c in text.chars() {
        if after_letter {
            titled.extend(c.to_lowercase())
        } else {
            titled.extend(title_case(c))
        }
        after_letter = is_cased(c);
    }
    titled
}

fn is_title(text: &str) -> bool {
    let (mut after_letter, mut any) = (false, false);
    for c in text.chars() {
        if c.is_uppercase() && after_letter || c.is_lowercase() && !after_letter {
            return false;
        }
        after_letter = is_cased(c);
        any |= after_letter;
    }
    any
}

/// The text between two positions, which count from the end if negative, and its offset in
/// characters. `None` if it starts after the text's end.
fn between(
    text: &str,
    start: Option<Value>,
    end: Option<Value>,
) -> Result<Option<(usize, &str)>, Error> {
    let length = text.chars().count();
    let place = |value: &Option<Value>, default: usize| -> Result<usize, Error> {
        Ok(match number(value)? {
            None => default,
            Some(at) if at < 0 => length.saturating_sub(at.unsigned_abs() as usize),
            Some(at) => at as usize,
        })
    };
    let (from, to) = (place(&start, 0)?, place(&end, length)?.min(length));
    if from > to {
        return Ok(None);
    }
    let mut bounds = text.char_indices().map(|(at, _)| at).chain([text.len()]);
    let from_byte = bounds.nth(from).unwrap_or(text.len());
    let to_byte = match to - from {
        0 => from_byte,
        more => bounds.nth(more - 1).unwrap_or(text.len()),
    };
    Ok(Some((from, &text[from_byte..to_byte])))
}

/// A substring's position, if found.
fn find(text: &str, arguments: &Arguments, last: bool) -> Result<Option<usize>, Error> {
    let [part, start, end] = arguments.take(["sub", "start", "end"])?;
    let part = text_of(part, "sub")?;
    let Some((before, inside)) = between(text, start, end)? else {
        return Ok(None);
    };
    let at = if last {
        inside.rfind(&part)
    } else {
        inside.find(&part)
    };
    Ok(at.map(|at| before + inside[..at].chars().count()))
}

/// Returns whether a text between two positions has any listed prefix or suffix.
fn has_edge(
    text: &str,
    arguments: &Arguments,
    is_edge: fn(&str, &str) -> bool,
) -> Result<bool, Error> {
    let [edges, start, end] = arguments.take(["prefix", "start", "end"])?;
    let Some((_, inside)) = between(text, start, end)? else {
        return Ok(false);
    };
    let Some(edges) = edges else {
        return Err(Error::from(ErrorKind::MissingArgument));
    };
    if let Some(edge) = edges.as_str() {
        return Ok(is_edge(inside, edge));
    }
    let mut found = false;
    for edge in edges.try_iter()? {
        let edge = edge
            .as_str()
            .ok_or_else(|| wrong("a beginning or end must be a text"))?;
        found |= is_edge(inside, edge);
    }
    Ok(found)
}

/// The parts that `str.split` and `str.rsplit` return.
fn split(text: &str, arguments: &Arguments, from_end: bool) -> Result<Value, Error> {
    let [separator, most] = arguments.take(["sep", "maxsplit"])?;
    let most = number(&most)?.and_then(|most| usize::try_from(most).ok());
    let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let parts: Vec<&str> = match optional_text(separator, "sep")? {
        Some(separator) if separator.is_empty() => return Err(wrong("split: empty separator")),
        Some(separator) if from_end => text.rsplitn(most, &separator).collect(),
        Some(separator) => text.splitn(most, &separator).collect(),
        None => words(text, most, from_end),
    };
    Ok(if from_end {
        parts.into_iter().rev().map(Value::from).collect()
    } else {
        parts.into_iter().map(Value::from).collect()
    })
}

/// At most `most` words, starting from the end in reverse order; the last part is everything else.
fn words(text: &str, most: usize, from_end: bool) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text;
    loop {
        rest = if from_end {
            rest.trim_end_matches(is_space)
        } else {
            rest.trim_start_matches(is_space)
        };
        if rest.is_empty() {
            return words;
        }
        let end = match (words.len() + 1 == most, from_end) {
            (true, _) => None,
            (false, false) => rest.find(is_space).map(|at| rest.split_at(at)),
            (false, true) => rest.rmatch_indices(is_space).next().map(|(at, space)| {
                let (before, word) = rest.split_at(at + space.len());
                (word, before)
            }),
        };
        match end {
            Some((word, more)) => {
                words.push(word);
                rest = more;
            }
            None => {
                words.push(rest);
                return words;
            }
        }
    }
}

fn split_lines(text: &str, keep_ends: bool) -> Value {
    const ENDS: [char; 9] = [
        '\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}',
    ];
    let is_end = |c: char| ENDS.contains(&c) || c == '\u{2029}';
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        let end = if rest[at..].starts_with("\r\n") {
            2
        } else {
            rest[at..].chars().next().map_or(0, char::len_utf8)
        };
        lines.push(Value::from(&rest[..at + if keep_ends { end } else { 0 }]));
        rest = &rest[at + end..];
    }
    if !rest.is_empty() {
        lines.push(Value::from(rest));
    }
    Value::from(lines)
}

/// The text before, the separator and the text after.
fn partition(text: &str, arguments: &Arguments, last: bool) -> Result<Value, Error> {
    let [separator] = arguments.take(["sep"])?;
    let separator = text_of(separator, "sep")?;
    if separator.is_empty() {
        return Err(wrong("partition: empty separator"));
    }
    let parts = if last {
        text.rsplit_once(&separator)
    } else {
        text.split_once(&separator)
    };
    let parts = match (parts, last) {
        (Some((before, after)), _) => [before, &separator, after],
        (None, false) => [text, "", ""],
        (None, true) => ["", "", text],
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Pads a text with spaces or another character: `left` of the missing ones go before it.
fn fill(
    text: &str,
    arguments: &Arguments,
    left: fn(usize, usize) -> usize,
) -> Result<Value, Error> {
    let [size, character] = arguments.take(["width", "fillchar"])?;
    let size = width(size, "width", None)?;
    let character = optional_text(character, "fillchar")?.unwrap_or_else(|| " ".to_owned());
    if character.chars().count() != 1 {
        return Err(wrong("fillchar: must be one character"));
    }
    let missing = size.saturating_sub(text.chars().count());
    let before = left(missing, size);
    let (before, after) = (character.repeat(before), character.repeat(missing - before));
    Ok(Value::from(format!("{before}{text}{after}")))
}

/// If the width is odd, Python puts the odd character on the left.
fn centered(missing: usize, width: usize) -> usize {
    missing / 2 + (missing & width & 1)
}

fn expand_tabs(text: &str, size: usize) -> Result<String, Error> {
    let (mut expanded, mut column) = (String::with_capacity(text.len()), 0);
    for c in text.chars() {
        match c {
            '\t' if size > 0 => {
                let spaces = size - column % size;
                if expanded.len() + spaces > MAX_TEXT {
                    return Err(wrong(format!("expandtabs: more than {MAX_TEXT} bytes")));
                }
                expanded.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            '\t' => {}
            _ => {
                expanded.push(c);
                column = match c {
                    '\n' | '\r' => 0,
                    _ => column + 1,
                };
            }
        }
    }
    Ok(expanded)
}

/// A character class that every character in a nonempty text must have.
macro_rules! class {
    ($pattern:literal, $text:expr) => {{
        static CLASS: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new($pattern).ok());
        CLASS.as_ref().is_some_and(|class| class.is_match($text))
    }};
}

/// Calls a method without arguments. `None` if there is no method with this name.
fn without_arguments(text: &str, name: &str) -> Option<Value> {
    let any = |is: fn(char) -> bool| text.chars().any(is);
    Some(match name {
        "upper" => Value::from(text.to_uppercase()),
        "lower" => Value::from(text.to_lowercase()),
        "casefold" => Value::from(text.to_lowercase().replace('ß', "ss").replace('ς', "σ")),
        "swapcase" => {
            let swapped = text.chars().flat_map(|c| {
                if c.is_uppercase() {
                    c.to_lowercase().collect::<Vec<_>>()
                } else {
                    c.to_uppercase().collect()
                }
            });
            Value::from(swapped.collect::<String>())
        }
        "capitalize" => Value::from(capitalize(text)),
        "title" => Value::from(title(text)),
        "islower" => Value::from(any(char::is_lowercase) && !any(char::is_uppercase)),
        "isupper" => Value::from(any(char::is_uppercase) && !any(char::is_lowercase)),
        "istitle" => Value::from(is_title(text)),
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        "isascii" => Value::from(text.is_ascii()),
        "isalpha" => Value::from(class!(r"^\p{L}+$", text)),
        "isdecimal" => Value::from(class!(r"^\p{Nd}+$", text)),
        "isdigit" => Value::from(class!(r"^[\p{Nd}²³¹⁰⁴-⁹₀-₉①-⑨]+$", text)),
        "isnumeric" => Value::from(class!(r"^\p{N}+$", text)),
        "isalnum" => Value::from(class!(r"^[\p{L}\p{N}]+$", text)),
        "isidentifier" => Value::from(class!(r"^[\p{XID_Start}_]\p{XID_Continue}*$", text)),
        "isprintable" => Value::from(class!(r"^[^\p{C}\p{Z}]*( [^\p{C}\p{Z}]*)*$", text)),
        _ => return None,
    })
}

fn string_method(text: &str, name: &str, arguments: &Arguments) -> Result<Value, Error> {
    if let Some(value) = without_arguments(text, name) {
        let [] = arguments.take([])?;
        return Ok(value);
    }
    Ok(match name {
        "strip" | "lstrip" | "rstrip" => {
            let [characters] = arguments.take(["chars"])?;
            let characters = optional_text(characters, "chars")?;
            let is_stripped = |c: char| match &characters {
                Some(characters) => characters.contains(c),
                None => is_space(c),
            };
            Value::from(match name {
                "strip" => text.trim_matches(is_stripped),
                "lstrip" => text.trim_start_matches(is_stripped),
                _ => text.trim_end_matches(is_stripped),
            })
        }
        "removeprefix" => {
            let [prefix] = arguments.take(["prefix"])?;
            Value::from(
                text.strip_prefix(&text_of(prefix, "prefix")?)
                    .unwrap_or(text),
            )
        }
        "removesuffix" => {
            let [suffix] = arguments.take(["suffix"])?;
            Value::from(
                text.strip_suffix(&text_of(suffix, "suffix")?)
                    .unwrap_or(text),
            )
        }
        "replace" => {
            let [old, new, count] = arguments.take(["old", "new", "count"])?;
            Value::from(replaced(
                text,
                &text_of(old, "old")?,
                &text_of(new, "new")?,
                &count,
            )?)
        }
        "split" => split(text, arguments, false)?,
        "rsplit" => split(text, arguments, true)?,
        "splitlines" => {
            let [keep_ends] = arguments.take(["keepends"])?;
            split_lines(text, keep_ends.is_some_and(|keep| keep.is_true()))
        }
        "partition" => partition(text, arguments, false)?,
        "rpartition" => partition(text, arguments, true)?,
        "find" | "rfind" => {
            let found = find(text, arguments, name == "rfind")?;
            Value::from(found.map_or(-1, |at| at as i64))
        }
        "index" | "rindex" => match find(text, arguments, name == "rindex")? {
            Some(at) => Value::from(at),
            None => return Err(wrong(format!("{name}: substring not found"))),
        },
        "count" => {
            let [part, start, end] = arguments.take(["sub", "start", "end"])?;
            let part = text_of(part, "sub")?;
            let inside = between(text, start, end)?;
            Value::from(inside.map_or(0, |(_, inside)| inside.matches(&part).count()))
        }
        "startswith" => Value::from(has_edge(text, arguments, |text, edge| {
            text.starts_with(edge)
        })?),
        "endswith" => Value::from(has_edge(text, arguments, |text, edge| {
            text.ends_with(edge)
        })?),
        "center" => fill(text, arguments, centered)?,
        "ljust" => fill(text, arguments, |_, _| 0)?,
        "rjust" => fill(text, arguments, |missing, _| missing)?,
        "zfill" => {
            let [size] = arguments.take(["width"])?;
            let missing = width(size, "width", None)?.saturating_sub(text.chars().count());
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            Value::from(format!("{sign}{}{digits}", "0".repeat(missing)))
        }
        "expandtabs" => {
            let [size] = arguments.take(["tabsize"])?;
            Value::from(expand_tabs(text, width(size, "tabsize", Some(8))?)?)
        }
        "join" => {
            let [items] = arguments.take(["iterable"])?;
            let mut texts = Vec::new();
            for item in items.unwrap_or_default().try_iter()? {
                texts.push(text_of(Some(item), "join")?);
            }
            Value::from(texts.join(text))
        }
        _ => return Err(Error::from(ErrorKind::UnknownMethod)),
    })
}

/// Implements `text.replace(old, new, count)`.
fn replaced(text: &str, old: &str, new: &str, count: &Option<Value>) -> Result<String, Error> {
    Ok(match number(count)?.map(usize::try_from) {
        Some(Ok(count)) => text.replacen(old, new, count),
        _ => text.replace(old, new),
    })
}

/// Implements the filter `replace`.
pub(super) fn replace(
    value: &Value,
    old: &Value,
    new: &Value,
    count: Option<Value>,
) -> Result<String, Error> {
    replaced(&str(value)?, &str(old)?, &str(new)?, &count)
}

/// Implements the filter `capitalize`.
pub(super) fn capitalize_filter(value: &Value) -> Result<String, Error> {
    Ok(capitalize(&str(value)?))
}

/// Implements the filter `title`, where words begin after white space and opening brackets.
pub(super) fn title_filter(value: &Value) -> Result<String, Error> {
    let mut begins = true;
    let mut titled = String::new();
    for c in str(value)?.chars() {
        if begins {
            titled.extend(c.to_uppercase())
        } else {
            titled.extend(c.to_lowercase())
        }
        begins = is_space(c) || ['-', '(', '{', '[', '<'].contains(&c);
    }
    Ok(titled)
}

/// Implements the filter `center`.
pub(super) fn center(value: &Value, size: Option<Value>) -> Result<Value, Error> {
    let size = Value::from(width(size, "width", Some(80))?);
    fill(&str(value)?, &Arguments::new(&[size])?, centered)
}

/// Implements the filter `wordcount`.
pub(super) fn word_count(value: &Value) -> Result<usize, Error> {
    let text = str(value)?;
    let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    Ok(words.filter(|word| !word.is_empty()).count())
}

/// Implements the filter `urlencode` for text, pairs, or a dict.
pub(super) fn url_encode(value: &Value) -> Result<String, Error> {
    let pair = |key: &Value, value: &Value| -> Result<String, Error> {
        let encoded = |value: &Value| Ok::<_, Error>(quoted(&str(value)?, "").replace("%20", "+"));
        Ok(format!("{}={}", encoded(key)?, encoded(value)?))
    };
    let mut pairs = Vec::new();
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()? {
                pairs.push(pair(&key, &value.get_item(&key)?)?);
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                pairs.push(pair(
                    &item.get_item(&Value::from(0))?,
                    &item.get_item(&Value::from(1))?,
                )?);
            }
        }
        _ => return Ok(quoted(&str(value)?, "/")),
    }
    Ok(pairs.join("&"))
}

fn quoted(text: &str, safe: &str) -> String {
    let mut quoted = String::new();
    for byte in text.bytes() {
        let c = char::from(byte);
        if c.is_ascii_alphanumeric() || "_.-~".contains(c) || byte.is_ascii() && safe.contains(c) {
            quoted.push(c)
        } else {
            quoted += &format!("%{byte:02X}")
        }
    }
    quoted
}

/// Implements the filter `striptags`: removes HTML comments and tags, collapses white space, and
/// replaces numeric entities and those for HTML characters.
pub(super) fn strip_tags(value: &Value) -> Result<String, Error> {
    let mut text = str(value)?;
    for (open, close) in [("<!--", "-->"), ("<", ">")] {
        let mut kept = String::with_capacity(text.len());
        let mut rest = text.as_str();
        while let Some((before, inside)) = rest.split_once(open)
            && let Some((_, after)) = inside.split_once(close)
        {
            kept += before;
            rest = after;
        }
        kept += rest;
        text = kept;
    }
    let words: Vec<&str> = text
        .split(is_space)
        .filter(|word| !word.is_empty())
        .collect();
    static ENTITY: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new("&(#[0-9]+|#[xX][0-9a-fA-F]+|amp|lt|gt|quot|apos|nbsp);").ok());
    let entity = |found: &Captures| {
        let name = &found[1];
        let numbered = match name.strip_prefix('#') {
            Some(number) => match number.strip_prefix(['x', 'X']) {
                Some(digits) => u32::from_str_radix(digits, 16).ok(),
                None => number.parse().ok(),
            },
            None => None,
        };
        match (numbered.and_then(char::from_u32), name) {
            (Some(c), _) => c.to_string(),
            (None, "amp") => "&".to_owned(),
            (None, "lt") => "<".to_owned(),
            (None, "gt") => ">".to_owned(),
            (None, "quot") => "\"".to_owned(),
            (None, "apos") => "'".to_owned(),
            (None, "nbsp") => "\u{a0}".to_owned(),
            (None, _) => char::REPLACEMENT_CHARACTER.to_string(),
        }
    };
    let joined = words.join(" ");
    Ok(match ENTITY.as_ref() {
        Some(pattern) => pattern.replace_all(&joined, entity).into_owned(),
        None => joined,
    })
}

/// Implements the filter `round`. Ties round to the even digit, as in Python.
pub(super) fn round(
    value: &Value,
    precision: Option<i32>,
    method: Option<&str>,
    named: Kwargs,
) -> Result<Value, Error> {
    let precision = precision.or(named.get("precision")?).unwrap_or(0);
    let method = method.or(named.get("method")?).unwrap_or("common");
    named.assert_all_used()?;
    let number = f64::try_from(value.clone())?;
    let factor = 10_f64.powi(precision);
    match method {
        "common" if value.is_integer() && precision >= 0 => Ok(value.clone()),
        "common" if precision >= 0 => {
            let digits = format!("{number:.*}", precision.min(400) as usize);
            Ok(Value::from(digits.parse().unwrap_or(number)))
        }
        "common" => {
            let rounded = (number * factor).round_ties_even() / factor;
            Ok(if value.is_integer() {
                Value::from(rounded as i64)
            } else {
                Value::from(rounded)
            })
        }
        "ceil" => Ok(Value::from((number * factor).ceil() / factor)),
        "floor" => Ok(Value::from((number * factor).floor() / factor)),
        other => Err(wrong(format!(
            "round: method {other:?}, must be common, ceil or floor"
        ))),
    }
}

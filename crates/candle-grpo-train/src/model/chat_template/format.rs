//! Python's two ways to format texts. Widths count characters, which minijinja counts in bytes.

use std::sync::LazyLock;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, FormatStyle, Value, format_filter};
use regex::{Captures, Regex};

use super::MAX_TEXT;
use super::python::{repr_of, str};
use super::strings::wrong;

/// Maximum number of digits after the point of a number.
const MAX_PRECISION: usize = 1000;

/// Implements the filter `format`: Python's `text % arguments`.
pub(super) fn printf(text: &str, arguments: Rest<Value>) -> Result<String, Error> {
    static FIELDS: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let size = r"(?P<width>[0-9]*)(?:\.(?P<precision>[0-9]*))?";
        Regex::new(&format!(
            r"%(?:\((?P<key>[^)]*)\))?(?P<flags>[-#0 +]*){size}[hlL]?(?P<kind>[a-zA-Z%])"
        ))
        .ok()
    });
    let (values, named): (Rest<Value>, Kwargs) = from_args(&arguments)?;
    let mut values = values.0.into_iter();
    let formatted = with_fields(text, FIELDS.as_ref(), &['%'], |field| {
        let kind = match &field["kind"] {
            "%" => return Ok("%".to_owned()),
            "i" | "u" => "d",
            kind => kind,
        };
        let value = match field.name("key") {
            Some(key) => named.get::<Option<Value>>(key.as_str())?,
            None => values.next(),
        };
        let value = value.ok_or_else(|| wrong(format!("format: {:?}, no argument", &field[0])))?;
        let width = size_of(field, "width", MAX_TEXT)?.unwrap_or(0);
        let flags = &field["flags"];
        let written = match kind {
            "s" | "r" => {
                let most = size_of(field, "precision", MAX_TEXT)?;
                let written = if kind == "s" { str } else { repr_of }(&value)?;
                written.chars().take(most.unwrap_or(usize::MAX)).collect()
            }
            "c" => format_filter(FormatStyle::Printf, "%c", &[value])?,
            _ => {
                let precision = size_of(field, "precision", MAX_PRECISION)?;
                let precision = precision.map_or(String::new(), |digits| format!(".{digits}"));
                let digits = &field["width"];
                let spec = format!("%{flags}{digits}{precision}{kind}");
                format_filter(FormatStyle::Printf, &spec, &[value])?
            }
        };
        Ok(padded(
            &written,
            width,
            ' ',
            if flags.contains('-') { '<' } else { '>' },
        ))
    })?;
    match values.next() {
        Some(value) => Err(wrong(format!("format: {value:?}, no place in {text:?}"))),
        None => Ok(formatted),
    }
}

/// Implements `text.format(arguments)`.
pub(super) fn str_format(text: &str, arguments: &[Value]) -> Result<String, Error> {
    static FIELDS: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let size = r"(?P<width>[0-9]*)(?P<group>[,_]?)(?:\.(?P<precision>[0-9]+))?";
        let spec = format!(
            r"(?:(?P<fill>[^{{}}])?(?P<align>[<>^=]))?(?P<flags>[-+ ]?#?0?){size}(?P<kind>[a-zA-Z]?)"
        );
        Regex::new(&format!(
            r"\{{\{{|\}}\}}|\{{(?P<name>[^{{}}:!.\[]*)(?P<path>[^{{}}:!]*)(?::{spec})?\}}"
        ))
        .ok()
    });
    let (values, named): (Rest<Value>, Kwargs) = from_args(arguments)?;
    let mut next = 0;
    with_fields(text, FIELDS.as_ref(), &['{', '}'], |field| {
        let Some(name) = field.name("name") else {
            return Ok(field[0][..1].to_owned());
        };
        let part = |name: &str| field.name(name).map_or("", |part| part.as_str());
        let value = match name.as_str() {
            "" => {
                next += 1;
                values.0.get(next - 1).cloned()
            }
            name => match name.parse::<usize>() {
                Ok(at) => values.0.get(at).cloned(),
                Err(_) => named.get(name)?,
            },
        };
        let value = value.ok_or_else(|| wrong(format!("format: {:?}, no argument", &field[0])))?;
        let path = part("path");
        let value = match (path, value.kind()) {
            ("", ValueKind::Bool | ValueKind::Number | ValueKind::String) => value,
            ("", _) if field.name("flags").is_some_and(|_| &field[0] != "{:}") => {
                return Err(wrong(format!(
                    "format: {:?}, must be without a format",
                    &field[0]
                )));
            }
            ("", _) => Value::from(str(&value)?),
            _ => value,
        };
        let precision = size_of(field, "precision", MAX_PRECISION)?;
        let precision = precision.map_or(String::new(), |digits| format!(".{digits}"));
        let width = size_of(field, "width", MAX_TEXT)?.unwrap_or(0);
        let (flags, after) = (
            part("flags"),
            [part("group"), &precision, part("kind")].concat(),
        );
        let written = |before: &str, width: &str| {
            let spec = format!("{{0{path}:{before}{flags}{width}{after}}}");
            format_filter(FormatStyle::StrFormat, &spec, std::slice::from_ref(&value))
        };
        let (fill, align) = (part("fill"), part("align"));
        let bare = written("", "")?;
        // No number has others.
        if bare.is_ascii() {
            return written(&format!("{fill}{align}"), part("width"));
        }
        let fill = fill.chars().next().unwrap_or(' ');
        Ok(padded(
            &bare,
            width,
            fill,
            align.chars().next().unwrap_or('<'),
        ))
    })
}

/// The size that a field has by this name, at most `most`.
fn size_of(field: &Captures, name: &str, most: usize) -> Result<Option<usize>, Error> {
    let digits = field.name(name).map(|digits| digits.as_str());
    let size = match digits {
        None => return Ok(None),
        Some("") => Some(0),
        Some(digits) => digits.parse().ok(),
    };
    match size.filter(|size| *size <= most) {
        Some(size) => Ok(Some(size)),
        None => Err(wrong(format!(
            "format: {name}: {}, must be at most {most}",
            digits.unwrap_or_default()
        ))),
    }
}

/// Fills a text up to a number of characters.
fn padded(text: &str, width: usize, fill: char, align: char) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let before = match align {
        '<' => 0,
        '^' => missing / 2,
        _ => missing,
    };
    let fill = |count| std::iter::repeat_n(fill, count);
    fill(before)
        .chain(text.chars())
        .chain(fill(missing - before))
        .collect()
}

/// Replaces the fields of a text. `marks` begin a field, and are in nothing else.
fn with_fields(
    text: &str,
    fields: Option<&Regex>,
    marks: &[char],
    mut replacement: impl FnMut(&Captures) -> Result<String, Error>,
) -> Result<String, Error> {
    let plain = |part: &str| {
        if part.contains(marks) {
            Err(wrong(format!("format: {text:?}, a field has another form")))
        } else {
            Ok(part.to_owned())
        }
    };
    let (mut formatted, mut end) = (String::new(), 0);
    for field in fields.iter().flat_map(|fields| fields.captures_iter(text)) {
        let Some(place) = field.get(0) else { continue };
        formatted += &plain(&text[end..place.start()])?;
        formatted += &replacement(&field)?;
        end = place.end();
        if formatted.len() > MAX_TEXT {
            return Err(wrong(format!("format: more than {MAX_TEXT} bytes")));
        }
    }
    Ok(formatted + &plain(&text[end..])?)
}

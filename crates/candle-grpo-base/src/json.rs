//! Plain messages about JSON, without parser jargon and Rust type names.

use candle_core::Result;
use serde::de::DeserializeOwned;
use serde_json::{Error, Value};

/// Beginnings of serde_json's syntax messages, each with a plain message.
const SYNTAX: [(&str, &str); 15] = [
    ("EOF", "it ends within a value"),
    ("expected value", "there must be a value"),
    ("expected ident", "there must be a value"),
    ("expected `,`", "there must be a comma or a closing bracket"),
    ("expected `:`", "there must be a colon"),
    ("key must be a string", "a key must be in double quotes"),
    ("trailing comma", "nothing follows a comma"),
    ("trailing characters", "nothing may follow the object"),
    (
        "control character",
        "a control character in a text must be escaped",
    ),
    ("invalid escape", "a backslash must begin a JSON escape"),
    ("lone leading surrogate", SURROGATE),
    ("unexpected end of hex escape", SURROGATE),
    ("invalid number", "a number is not valid"),
    ("number out of range", "a number is too large"),
    ("recursion limit", "the values are nested too deep"),
];

const SURROGATE: &str =
    "an escape from \\ud800 to \\udfff is half a character, and its other half must be beside it";

/// Returns an error's message without its location.
pub fn message(error: &Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or(&text);
    if !error.is_data() {
        let known = SYNTAX.iter().find(|(start, _)| text.starts_with(start));
        return known
            .map_or("not valid JSON", |(_, plain)| plain)
            .to_owned();
    }
    if let Some(key) = text.strip_prefix("missing field ") {
        return format!("{}: absent, must be given", key.trim_matches('`'));
    }
    match text.rsplit_once(", expected ") {
        Some((found, expected)) if found.starts_with("invalid ") => {
            format!("must be {}", kind(expected))
        }
        _ => text.to_owned(),
    }
}

/// Returns the message for an error in a file, with line and column.
pub fn message_with_place(error: &Error) -> String {
    let (line, column) = (error.line(), error.column());
    format!("{} at line {line} column {column}", message(error))
}

/// Returns the kind of value that serde calls `expected`.
pub fn kind(expected: &str) -> &str {
    match expected {
        "usize" | "u64" | "u32" | "u16" | "u8" => "a whole number, at least 0",
        "i64" | "i32" => "a whole number",
        "f64" | "f32" => "a number",
        "a boolean" => "true or false",
        "a string" | "path string" | "a character" => "a text",
        "a sequence" => "a list",
        "unit" | "unit variant" => "a name without options",
        "variant identifier" => "a name",
        name if name.starts_with("struct")
            || name.contains("internally tagged")
            || name == "a map" =>
        {
            "a mapping of keys"
        }
        name if name.starts_with("enum")
            || name.starts_with("variant")
            || name.contains("tagged enum") =>
        {
            "a name, or a mapping of a name to its options"
        }
        name if name.starts_with("tuple") || name.starts_with("an array") => "a list",
        name => name,
    }
}

/// Reads a value as a `T`.
///
/// # Errors
///
/// If it is not a `T`. The error names the key and its value.
pub fn typed<T: DeserializeOwned>(value: &Value) -> Result<T> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let path = error.path().to_string();
        let message = message(error.inner());
        let found = value.pointer(&format!("/{}", path.replace('.', "/")));
        candle_core::Error::msg(match found {
            _ if path == "." => message,
            Some(found) => format!("{path}: {found}, {message}"),
            None => format!("{path}: {message}"),
        })
    })
}

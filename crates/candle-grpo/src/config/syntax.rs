//! Plain messages about YAML and TOML syntax, without their parsers' jargon.

/// Returns the message for a YAML error, without the line.
pub(super) fn yaml(error: &serde_saphyr::Error) -> String {
    use serde_saphyr::Error;
    let mut cause = error;
    while let Error::WithSnippet { error, .. } | Error::AliasError { error, .. } = cause {
        cause = error;
    }
    match cause {
        Error::DuplicateMappingKey { key: Some(key), .. } => {
            return format!("{key}: given twice, must be given once");
        }
        Error::DuplicateMappingKey { key: None, .. } => {
            return "a key is given twice, must be given once".to_owned();
        }
        Error::Budget { .. } => {
            return "the file is too large, too deep or has too many aliases".to_owned();
        }
        // Of the visitor.
        Error::Message { msg, .. } => return msg.clone(),
        _ => {}
    }
    let plain = match cause {
        Error::MultipleDocuments { .. } => "a second document begins, must be one",
        Error::NullIntoString { .. } => "a key is null, must be a text",
        Error::Unexpected { .. } | Error::UnexpectedValueForUnit { .. } => {
            "a key is a list or a mapping, must be a text"
        }
        Error::RecursiveReferencesRequireWeakTypes { .. } => "an alias is part of its own value",
        Error::UnknownAnchor { .. } => "an alias has no anchor",
        Error::MergeValueNotMapOrSeqOfMaps { .. } => {
            "the value of << must be a mapping or a list of mappings"
        }
        Error::InvalidBinaryBase64 { .. } | Error::BinaryNotUtf8 { .. } => {
            "a value of !!binary must be base64 of a text"
        }
        Error::InvalidScalar { .. } => "a value must be of the type of its tag",
        Error::ExternalMessage { msg, .. } => plain(&YAML, msg),
        _ => "its structure",
    };
    format!("not valid YAML: {plain}")
}

/// Parts of YAML parser messages, with plain messages.
const YAML: [(&str, &str); 10] = [
    ("unclosed", "a bracket is not closed"),
    ("misplaced bracket", "a bracket is closed that is not open"),
    (
        "mapping values are not allowed",
        "a second colon on a line, or a wrong indentation",
    ),
    (
        "block sequence entries are not allowed",
        "a list begins on the line of its key",
    ),
    (
        "tabs disallowed",
        "a tab in the indentation, must be spaces",
    ),
    (
        "quoted scalar",
        "a text in quotes that is not closed, or not indented, or has a wrong escape",
    ),
    ("indent", "a wrong indentation"),
    ("unexpected character", "a character that must be in quotes"),
    ("directive", "a wrong directive"),
    ("anchor", "an alias has no anchor"),
];

/// Returns the message for a TOML error, without the line.
pub(super) fn toml(text: &str, error: &toml::de::Error) -> String {
    let span = error.span().unwrap_or_default();
    // What the parser expects has names of its grammar.
    let message = error.message().split(", expected ").next();
    let message = message.unwrap_or_default();
    if message == "duplicate key"
        && let Some(key) = text.get(span.clone())
    {
        return format!("{key}: given twice, must be given once");
    }
    let before = text.get(..span.start).unwrap_or(text);
    let column = before.chars().rev().take_while(|&c| c != '\n').count() + 1;
    format!("not valid TOML: column {column}: {}", plain(&TOML, message))
}

/// Parts of TOML parser messages, with plain messages.
const TOML: [(&str, &str); 22] = [
    ("unclosed", "a bracket is not closed"),
    ("missing comma", "a comma is missing"),
    ("extra comma", "a comma too many"),
    ("string values must be quoted", VALUE),
    ("missing value", VALUE),
    ("boolean", VALUE),
    ("with no value", "a key must be followed by = and a value"),
    (
        "unquoted",
        "there must be a key; characters other than letters, digits, - and _ need quotes",
    ),
    ("cannot extend", "the value of this key is complete"),
    (
        "key",
        "a key and its value must be on one line, as key = value",
    ),
    ("`=`", "an equals sign too many"),
    (
        "string",
        "a text in quotes that is not closed, or has a wrong escape",
    ),
    ("escape", "a wrong escape in a text"),
    ("unicode", "a wrong escape in a text"),
    ("number", "a wrong number"),
    ("integer", "a wrong number"),
    ("digits", "a wrong number"),
    ("float", "a wrong number"),
    ("zero", "a number begins with a zero"),
    ("date", "a wrong date"),
    ("recursion", "the values are nested too deep"),
    ("unexpected content", "only a comment may follow a value"),
];

const VALUE: &str = "there must be a value: true, false, a number, or a text in quotes";

/// Returns the plain message for a parser message.
fn plain(known: &[(&'static str, &'static str)], message: &str) -> &'static str {
    let known = known.iter().find(|(part, _)| message.contains(part));
    known.map_or("its syntax", |(_, plain)| plain)
}

//! Tool call formats.

use anyhow::Result;
use candle_grpo_base::large_integers::parsed;
use candle_grpo_core::validate::check;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The format in which a model calls tools.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, possibly several: Hermes,
    /// Qwen2.5, Qwen3, SmolLM3.
    #[default]
    Hermes,
    /// A turn that consists of `{"name": ..., "parameters": {...}}`, optionally after
    /// `<|python_tag|>`, or several separated by semicolons or line breaks: Llama 3.
    Llama,
    /// A tool's single argument between two marks, such as `[` and `]`. Useful for small models
    /// trained from scratch.
    Marks {
        /// Tool name.
        tool: String,
        /// Name of its text argument.
        argument: String,
        /// The mark before the argument.
        before: String,
        /// The mark after it.
        after: String,
    },
}

/// A call written by the policy.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// Tool name.
    pub name: String,
    /// Its arguments, an object.
    pub arguments: Value,
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const PYTHON_TAG: &str = "<|python_tag|>";

impl ToolFormat {
    pub(in crate::environment) fn validate(&self) -> Result<()> {
        if let Self::Marks { before, after, .. } = self {
            for (name, mark) in [("before", before), ("after", after)] {
                check(!mark.is_empty(), name, "\"\"", "be a text")?;
            }
        }
        Ok(())
    }

    /// Returns the calls in a turn, in order, or the reason why a call is invalid.
    ///
    /// ```
    /// use candle_grpo_train::environment::ToolFormat;
    ///
    /// let calls = ToolFormat::Hermes.calls(
    ///     r#"Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>"#,
    /// );
    /// assert_eq!(calls[0].as_ref().unwrap().name, "add");
    /// assert!(ToolFormat::Hermes.calls("It is 7.").is_empty());
    /// ```
    pub fn calls(&self, turn: &str) -> Vec<Result<ToolCall, String>> {
        match self {
            Self::Hermes => hermes(turn),
            Self::Llama => llama(turn),
            Self::Marks {
                tool,
                argument,
                before,
                after,
            } => between(turn, before, after)
                .map(|inside| {
                    let arguments = Map::from_iter([(argument.clone(), Value::from(inside))]);
                    Ok(ToolCall {
                        name: tool.clone(),
                        arguments: Value::Object(arguments),
                    })
                })
                .collect(),
        }
    }

    /// Returns the text of a turn before its first call: the whole turn if it has none.
    pub fn text_before_calls<'a>(&self, turn: &'a str) -> &'a str {
        match self {
            Self::Hermes => before(turn, OPEN),
            Self::Llama if llama(turn).is_empty() => turn,
            Self::Llama => "",
            Self::Marks { before: mark, .. } => before(turn, mark),
        }
    }
}

/// Returns the text before a mark, without spaces at its end.
fn before<'a>(text: &'a str, mark: &str) -> &'a str {
    text.split_once(mark)
        .map_or(text, |(before, _)| before.trim_end())
}

/// The texts between two marks. The last one may lack its end.
fn between<'a>(text: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(open).skip(1).map(move |rest| {
        let inside = rest.split(close).next();
        inside.unwrap_or(rest).trim()
    })
}

/// Each call is one JSON value, whose strings may contain the marks.
fn hermes(turn: &str) -> Vec<Result<ToolCall, String>> {
    let mut calls = Vec::new();
    let mut rest = turn;
    while let Some((_, inside)) = rest.split_once(OPEN) {
        let end = end_of_value(inside).filter(|end| {
            let behind = inside[*end..].trim_start();
            behind.is_empty() || behind.starts_with(OPEN) || behind.starts_with(CLOSE)
        });
        // Otherwise the reason is in what stands before the next mark.
        let end = end.unwrap_or_else(|| {
            let end = inside.find(OPEN).unwrap_or(inside.len());
            inside[..end].find(CLOSE).unwrap_or(end)
        });
        calls.push(call(inside[..end].trim()));
        rest = &inside[end..];
    }
    calls
}

/// The position after the JSON value that a text begins with.
fn end_of_value(text: &str) -> Option<usize> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<IgnoredAny>();
    values.next()?.ok()?;
    Some(values.byte_offset())
}

/// A call from its text.
fn call(text: &str) -> Result<ToolCall, String> {
    from_value(parsed(text).map_err(|error| format!("the call is not JSON: {error}"))?)
}

/// Reads a call from its JSON.
fn from_value(value: Value) -> Result<ToolCall, String> {
    let Value::Object(mut fields) = value else {
        return Err("the call is not a JSON object".to_owned());
    };
    let Some(Value::String(name)) = fields.remove("name") else {
        return Err("the call has no name".to_owned());
    };
    let arguments = fields.remove("arguments");
    let arguments = arguments.or_else(|| fields.remove("parameters"));
    let arguments = match arguments {
        None | Some(Value::Null) => Value::Object(Map::new()),
        // JSON in a string, as in OpenAI's API.
        Some(Value::String(text)) => parsed(&text).unwrap_or(Value::Null),
        Some(arguments) => arguments,
    };
    match arguments {
        Value::Object(_) => Ok(ToolCall { name, arguments }),
        _ => Err("the arguments of the call are not a JSON object".to_owned()),
    }
}

fn llama(turn: &str) -> Vec<Result<ToolCall, String>> {
    let turn = turn.trim();
    let tagged = turn.strip_prefix(PYTHON_TAG);
    let text = tagged.unwrap_or(turn).trim();
    if tagged.is_none() && !text.starts_with('{') {
        return Vec::new();
    }
    let mut calls = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let end = end_of_value(rest).unwrap_or(rest.len());
        calls.push(call(&rest[..end]));
        rest = rest[end..].trim_start_matches(|c: char| c == ';' || c.is_whitespace());
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn add(a: i64) -> Result<ToolCall, String> {
        Ok(ToolCall {
            name: "add".to_owned(),
            arguments: json!({"a": a}),
        })
    }

    const CALL: &str = r#"{"name": "add", "arguments": {"a": 1}}"#;

    #[rstest]
    #[case("The answer is 7.", vec![])]
    #[case(&format!("<tool_call>\n{CALL}\n</tool_call>"), vec![add(1)])]
    #[case(&format!("First <tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call> then"), vec![add(1), add(1)])]
    #[case(&format!("<tool_call>{CALL}"), vec![add(1)])]
    #[case(r#"<tool_call>{"name": "add", "arguments": "{\"a\": 2}"}</tool_call>"#, vec![add(2)])]
    #[case(&format!("<tool_call>{CALL} <tool_call>{CALL}"), vec![add(1), add(1)])]
    fn hermes_calls_are_read(#[case] turn: &str, #[case] calls: Vec<Result<ToolCall, String>>) {
        assert_eq!(ToolFormat::Hermes.calls(turn), calls);
    }

    #[rstest]
    #[case(
        ToolFormat::Hermes,
        r#"<tool_call>{"name": "f", "arguments": {"n": 123456789012345678901}}</tool_call>"#
    )]
    #[case(
        ToolFormat::Hermes,
        r#"<tool_call>{"name": "f", "arguments": "{\"n\": 123456789012345678901}"}</tool_call>"#
    )]
    #[case(
        ToolFormat::Llama,
        r#"{"name": "f", "parameters": {"n": 123456789012345678901}}"#
    )]
    fn integers_of_a_call_keep_their_digits(#[case] format: ToolFormat, #[case] turn: &str) {
        let call = ToolCall {
            name: "f".to_owned(),
            arguments: json!({"n": "123456789012345678901"}),
        };
        assert_eq!(format.calls(turn), vec![Ok(call)]);
    }

    #[test]
    fn texts_of_a_hermes_call_may_have_the_marks() {
        for text in ["a </tool_call> b", "<tool_call>", "\"</tool_call>\\"] {
            let arguments = json!({ "text": text });
            let written = json!({"name": "write", "arguments": arguments});
            let turn = format!("<tool_call>{written}</tool_call>\n<tool_call>{CALL}</tool_call>");
            let write = ToolCall {
                name: "write".to_owned(),
                arguments,
            };
            assert_eq!(ToolFormat::Hermes.calls(&turn), vec![Ok(write), add(1)]);
        }
        let calls = ToolFormat::Hermes.calls(&format!("<tool_call>{CALL} and</tool_call>"));
        assert!(calls.len() == 1 && calls[0].is_err(), "{calls:?}");
    }

    #[rstest]
    #[case("The answer is 7.", vec![])]
    #[case(r#"{"name": "add", "parameters": {"a": 1}}"#, vec![add(1)])]
    #[case(r#"<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}"#, vec![add(1), add(2)])]
    #[case("{\"name\": \"add\", \"parameters\": {\"a\": 1}}\n{\"name\": \"add\", \"parameters\": {\"a\": 2}}", vec![add(1), add(2)])]
    fn llama_calls_are_read(#[case] turn: &str, #[case] calls: Vec<Result<ToolCall, String>>) {
        assert_eq!(ToolFormat::Llama.calls(turn), calls);
    }

    #[rstest]
    #[case(ToolFormat::Hermes, "<tool_call></tool_call>", "not JSON")]
    #[case(ToolFormat::Hermes, "<tool_call>[1]</tool_call>", "not a JSON object")]
    #[case(
        ToolFormat::Hermes,
        "<tool_call>{\"arguments\": {}}</tool_call>",
        "no name"
    )]
    #[case(
        ToolFormat::Hermes,
        "<tool_call>{\"name\": \"a\", \"arguments\": [1]}</tool_call>",
        "arguments"
    )]
    #[case(ToolFormat::Llama, "{\"name\": \"a\"", "not JSON")]
    #[case(ToolFormat::Llama, "<|python_tag|>print(1)", "not JSON")]
    fn a_call_that_is_not_valid_has_a_reason(
        #[case] format: ToolFormat,
        #[case] turn: &str,
        #[case] words: &str,
    ) {
        let calls = format.calls(turn);
        let error = calls[0].as_ref().unwrap_err();
        assert!(error.contains(words), "{error}");
    }

    #[test]
    fn marks_hold_the_argument() {
        let format = ToolFormat::Marks {
            tool: "calculator".to_owned(),
            argument: "expression".to_owned(),
            before: "[".to_owned(),
            after: "]".to_owned(),
        };
        let calls = format.calls("so [12*34] and [5");
        let inside = |i: usize| calls[i].as_ref().unwrap().arguments["expression"].clone();
        assert_eq!(
            (inside(0), inside(1), calls.len()),
            (json!("12*34"), json!("5"), 2)
        );
    }

    #[test]
    fn hostile_turns_end() {
        let deep = "[".repeat(1_000_000);
        for format in [ToolFormat::Hermes, ToolFormat::Llama] {
            let calls = format.calls(&format!("<tool_call>{deep}</tool_call>"));
            assert!(calls.iter().all(Result::is_err));
            let calls = format.calls(&format!("{{\"name\": {deep}"));
            assert!(calls.iter().all(Result::is_err));
            format.calls(&"<tool_call>".repeat(100_000));
        }
    }
}

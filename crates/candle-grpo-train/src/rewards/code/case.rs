//! The tests of a row.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::column::column;

/// A test of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Case<'a> {
    /// Statements that follow the program and must reach their end.
    Assertions(&'a str),
    /// An input, and the output that the program must have for it.
    Output {
        input: Option<&'a str>,
        output: &'a str,
    },
}

impl<'a> Case<'a> {
    /// Returns the tests in the column `name`: a text with statements, or a list of such texts and
    /// of objects with `output` and perhaps `input`.
    ///
    /// # Errors
    ///
    /// If the column is absent, has no tests, or something else.
    pub(super) fn of_row(columns: &'a Value, name: &str) -> Result<Vec<Self>> {
        let value = column(columns, name)?;
        let read = || -> Result<Vec<Self>> {
            let cases = match value {
                Value::String(text) => vec![Self::Assertions(text)],
                Value::Array(cases) => {
                    let cases = cases.iter().enumerate();
                    let read = |(i, case)| Self::read(case).with_context(|| format!("test {i}"));
                    cases.map(read).collect::<Result<_>>()?
                }
                _ => bail!("must be a text or a list of tests"),
            };
            ensure!(!cases.is_empty(), "no tests, must be at least one");
            Ok(cases)
        };
        read().with_context(|| format!("column {name:?}"))
    }

    fn read(value: &'a Value) -> Result<Self> {
        if let Some(text) = value.as_str() {
            return Ok(Self::Assertions(text));
        }
        let form = "must be a text, or an object with the texts \"input\" and \"output\"";
        let fields = value.as_object().context(form)?;
        let output = fields.get("output").and_then(Value::as_str).context(form)?;
        let input = match fields.get("input") {
            None | Some(Value::Null) => None,
            Some(input) => Some(input.as_str().context(form)?),
        };
        let is_known = |key: &String| matches!(key.as_str(), "input" | "output");
        ensure!(fields.keys().all(is_known), "{form}");
        Ok(Self::Output { input, output })
    }
}

/// Returns true if both texts have the same lines without white space around each line, and without
/// empty lines at the beginning and at the end. Bytes that are not UTF-8 equal nothing.
pub(super) fn same_lines(output: &[u8], expected: &str) -> bool {
    let lines = |text: &'_ str| -> Vec<String> {
        let lines = text.trim().lines().map(|line| line.trim().to_owned());
        lines.collect()
    };
    str::from_utf8(output).is_ok_and(|output| lines(output) == lines(expected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[test]
    fn tests_are_texts_and_pairs() {
        let row = json!({
            "text": "assert f(1) == 2",
            "tests": ["assert f(1)", {"input": "1\n", "output": "2\n"}, {"output": "3"}],
        });
        let text = Case::of_row(&row, "text").unwrap();
        assert_eq!(text, [Case::Assertions("assert f(1) == 2")]);
        let expected = [
            Case::Assertions("assert f(1)"),
            Case::Output {
                input: Some("1\n"),
                output: "2\n",
            },
            Case::Output {
                input: None,
                output: "3",
            },
        ];
        assert_eq!(Case::of_row(&row, "tests").unwrap(), expected);
    }

    #[rstest]
    #[case(json!({}), "column \"tests\": absent")]
    #[case(json!({"tests": []}), "no tests, must be at least one")]
    #[case(json!({"tests": 3}), "must be a text or a list of tests")]
    #[case(json!({"tests": ["a", 3]}), "test 1: must be a text, or an object")]
    #[case(json!({"tests": [{"input": "1"}]}), "test 0: must be a text, or an object")]
    #[case(json!({"tests": [{"output": 1}]}), "test 0: must be a text, or an object")]
    #[case(json!({"tests": [{"output": "1", "in": "2"}]}), "test 0: must be a text, or an object")]
    fn other_columns_are_errors(#[case] row: Value, #[case] words: &str) {
        let error = format!("{:#}", Case::of_row(&row, "tests").unwrap_err());
        assert!(error.contains(words), "{error}");
    }

    #[rstest]
    #[case(b"1 2\n3\n", "1 2\n3", true)]
    #[case(b"\n  1 2 \r\n3\n\n", "1 2\n3", true)]
    #[case(b"1  2\n3", "1 2\n3", false)]
    #[case(b"1\n\n2", "1\n2", false)]
    #[case(b"", " \n", true)]
    #[case(b"a", "A", false)]
    #[case(b"\xff", "\u{fffd}", false)]
    fn lines_are_compared_without_white_space_around_them(
        #[case] output: &[u8],
        #[case] expected: &str,
        #[case] same: bool,
    ) {
        assert_eq!(same_lines(output, expected), same);
    }
}

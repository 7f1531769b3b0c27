//! A row's tests.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use super::statements::Statements;
use candle_grpo_base::column::{column, find};
use candle_grpo_base::large_integers::parsed;

/// A test for a program.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Case {
    /// Statements that follow the program and must run to their end.
    Assertions {
        text: String,
        /// In Python, the functions in the text that accept the program's function.
        candidates: Vec<String>,
        /// The program's function, if there are such functions.
        entry: Option<String>,
    },
    /// An input, with the output that the program must produce.
    Output { input: String, output: String },
    /// A call to a Python function, with its result.
    Call {
        function: String,
        /// A list, or a text with one argument per line, as JSON.
        arguments: Value,
        expected: Value,
    },
}

/// Columns and language, which determine how a row is parsed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form<'a> {
    /// The column with the tests.
    pub(super) column: &'a str,
    /// The column that names the function that tests call.
    pub(super) entry_point: &'a str,
    pub(super) is_python: bool,
}

/// Maximum nesting depth for lists and JSON texts.
const MAX_DEPTH: usize = 8;

/// Keys in addition to inputs and outputs.
const OPTIONS: [&str; 4] = ["fn_name", "func_name", "type", "testtype"];

const FORM: &str = "must be a text, an object with \"input\" and \"output\", or one with the lists \
     \"inputs\" and \"outputs\"";

impl Case {
    /// Returns a row's tests. They can be a text with statements, an object with `input` and
    /// `output` or with `inputs` and `outputs`, a list that holds these, or any of these as JSON
    /// text.
    ///
    /// # Errors
    ///
    /// Fails if the column is absent, has no tests, has a test that checks nothing, or has another
    /// form.
    pub(super) fn of_row(columns: &Value, form: Form<'_>) -> Result<Vec<Self>> {
        let value = column(columns, form.column)?;
        let entry = find(columns, form.entry_point).and_then(Value::as_str);
        let reader = Reader { form, entry };
        let read = || -> Result<Vec<Self>> {
            let cases = reader.read(value, 0)?;
            ensure!(!cases.is_empty(), "no tests, must be at least one");
            Ok(cases)
        };
        read().with_context(|| format!("column {:?}", form.column))
    }
}

struct Reader<'a> {
    form: Form<'a>,
    entry: Option<&'a str>,
}

impl Reader<'_> {
    fn read(&self, value: &Value, depth: usize) -> Result<Vec<Case>> {
        ensure!(
            depth < MAX_DEPTH,
            "lists and texts of JSON more than {MAX_DEPTH} deep in each other, must be at most that deep"
        );
        match value {
            Value::String(text) => match json_text(text) {
                Some(value) => self.read(&value, depth + 1),
                None => Ok(vec![self.statements(text)?]),
            },
            Value::Array(cases) => {
                let cases = cases.iter().enumerate();
                let read = |(i, case)| {
                    let read = self.read(case, depth + 1);
                    read.with_context(|| format!("test {i}"))
                };
                let cases: Result<Vec<Vec<Case>>> = cases.map(read).collect();
                Ok(cases?.concat())
            }
            Value::Object(fields) if fields.contains_key("inputs") => {
                self.columns(fields, ["inputs", "outputs"])
            }
            Value::Object(fields)
                if fields.get("output").is_some_and(Value::is_array)
                    && self.function(fields)?.is_none() =>
            {
                self.columns(fields, ["input", "output"])
            }
            Value::Object(fields) => Ok(vec![self.pair(fields)?]),
            _ => bail!("{FORM}, or a list of these"),
        }
    }

    fn statements(&self, text: &str) -> Result<Case> {
        let (mut candidates, mut entry) = (Vec::new(), None);
        if self.form.is_python {
            candidates = Statements::read(text).ensure_asserts()?;
            if let (false, Some(value)) = (candidates.is_empty(), self.entry) {
                let key = self.form.entry_point;
                ensure!(
                    is_entry(value),
                    "column {key:?}: {value:?}, must be the name of a function"
                );
                entry = Some(value.to_owned());
            }
        } else {
            let marks = ["#", "//", "--", ";", "%"];
            let mut lines = text.lines().map(str::trim);
            ensure!(
                !lines.all(|line| line.is_empty()
                    || marks.iter().any(|m| line.starts_with(m)) && !line.starts_with("#[")),
                "{text:?}: no statements, must have assertions"
            );
        }
        Ok(Case::Assertions {
            text: text.to_owned(),
            candidates,
            entry,
        })
    }

    /// Parses `input` and `output`, with their function if there is one.
    fn pair(&self, fields: &Map<String, Value>) -> Result<Case> {
        let is_known = |key: &String| {
            matches!(key.as_str(), "input" | "output") || OPTIONS.contains(&key.as_str())
        };
        ensure!(fields.keys().all(is_known), "{FORM}");
        let output = fields.get("output").context(FORM)?;
        let input = fields.get("input").unwrap_or(&Value::Null);
        self.case(self.function(fields)?, input, output)
    }

    /// Parses `inputs` and `outputs`, or lists under other names.
    fn columns(&self, fields: &Map<String, Value>, names: [&str; 2]) -> Result<Vec<Case>> {
        let known = [&names[..], &OPTIONS].concat();
        let is_known = |key: &String| known.contains(&key.as_str());
        let list = |key: &str| {
            let list = fields.get(key).and_then(Value::as_array);
            list.with_context(|| format!("{key}: must be a list"))
        };
        ensure!(
            fields.keys().all(is_known),
            "{:?}: must have the keys {}",
            fields.keys().collect::<Vec<_>>(),
            known.join(", ")
        );
        let (inputs, outputs) = (list(names[0])?, list(names[1])?);
        ensure!(
            inputs.len() == outputs.len(),
            "{} inputs and {} outputs, must be as many",
            inputs.len(),
            outputs.len()
        );
        let function = self.function(fields)?;
        let cases = inputs.iter().zip(outputs).enumerate();
        let read = |(i, (input, output))| {
            let case = self.case(function, input, output);
            case.with_context(|| format!("test {i}"))
        };
        cases.map(read).collect()
    }

    /// Returns the function to call, or `None` if the program reads its input.
    fn function<'f>(&self, fields: &'f Map<String, Value>) -> Result<Option<&'f str>> {
        let text = |keys: [&str; 2]| {
            let mut values = keys.iter().filter_map(|key| fields.get(*key));
            values.find(|value| !value.is_null())
        };
        let Some(name) = text(["fn_name", "func_name"]) else {
            let kind = text(["type", "testtype"]);
            let is_call = kind.is_some_and(|kind| kind == "functional" || kind == "call_based");
            ensure!(
                !is_call,
                "calls a function, must have its name at \"fn_name\""
            );
            return Ok(None);
        };
        let name = name.as_str().filter(|name| is_entry(name));
        let name = name.context("fn_name: must be the name of a function")?;
        ensure!(
            self.form.is_python,
            "fn_name: {name:?}, must be absent with the key \"command\": only functions of Python \
             are called"
        );
        Ok(Some(name))
    }

    fn case(&self, function: Option<&str>, input: &Value, output: &Value) -> Result<Case> {
        let Some(function) = function else {
            let input = match input {
                Value::Null => Some(String::new()),
                input => lines_of(input),
            };
            let words = "must be a text or a list of lines";
            return Ok(Case::Output {
                input: input.with_context(|| format!("input: {words}"))?,
                output: lines_of(output).with_context(|| format!("output: {words}"))?,
            });
        };
        match input {
            Value::Array(_) => {}
            Value::String(text) => {
                for line in text.lines().filter(|line| !line.trim().is_empty()) {
                    serde_json::from_str::<Value>(line)
                        .with_context(|| format!("input: {line:?}, must be JSON"))?;
                }
            }
            _ => bail!("input: must be a list of arguments, or a text with one on each line"),
        }
        Ok(Case::Call {
            function: function.to_owned(),
            arguments: input.clone(),
            expected: output.clone(),
        })
    }
}

/// Parses a text as JSON, if it is an object, a list or a text.
fn json_text(text: &str) -> Option<Value> {
    let text = text.trim();
    let begins = text.starts_with(['{', '[', '"']);
    begins.then(|| parsed(text).ok()).flatten()
}

/// Returns an input or output as text. It may be a list with one line each.
fn lines_of(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Array(lines) => {
            let lines: Option<Vec<&str>> = lines.iter().map(Value::as_str).collect();
            lines.map(|lines| lines.join("\n"))
        }
        _ => None,
    }
}

/// Returns true if the name is a function, or a method such as `Solution().add`.
fn is_entry(name: &str) -> bool {
    name.split('.').all(|part| {
        let part = part.strip_suffix("()").unwrap_or(part);
        let mut letters = part.chars();
        letters
            .next()
            .is_some_and(|c| c.is_alphabetic() || c == '_')
            && letters.all(|c| c.is_alphanumeric() || c == '_')
    })
}

/// Returns true if both texts have the same lines, ignoring white space around each line and empty
/// lines at both ends. Bytes that are not UTF-8 equal nothing.
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

    const FORM: Form<'_> = Form {
        column: "tests",
        entry_point: "entry_point",
        is_python: true,
    };

    fn cases(tests: Value) -> Result<Vec<Case>> {
        Case::of_row(&json!({"tests": tests, "entry_point": "add"}), FORM)
    }

    fn assertions(text: &str) -> Case {
        Case::Assertions {
            text: text.to_owned(),
            candidates: Vec::new(),
            entry: None,
        }
    }

    fn output(input: &str, output: &str) -> Case {
        Case::Output {
            input: input.to_owned(),
            output: output.to_owned(),
        }
    }

    fn call(arguments: Value, expected: Value) -> Case {
        Case::Call {
            function: "add".to_owned(),
            arguments,
            expected,
        }
    }

    #[rstest]
    #[case(json!("assert f(1) == 2"), &[assertions("assert f(1) == 2")])]
    #[case(
        json!(["assert f(1)", {"input": "1\n", "output": "2\n"}, {"output": "3"}]),
        &[assertions("assert f(1)"), output("1\n", "2\n"), output("", "3")]
    )]
    #[case(
        json!({"inputs": ["1", ["2", "3"]], "outputs": ["4", ["5", "6"]]}),
        &[output("1", "4"), output("2\n3", "5\n6")]
    )]
    #[case(
        json!({"input": ["1", "3"], "output": ["2", "4"]}),
        &[output("1", "2"), output("3", "4")]
    )]
    #[case(json!({"input": "1", "output": "2", "fn_name": null}), &[output("1", "2")])]
    #[case(
        json!({"input": "1", "output": "2", "type": "stdin_stdout"}),
        &[output("1", "2")]
    )]
    #[case(
        json!({"fn_name": "add", "inputs": [[1, [2]], "1\n[2]"], "outputs": [[3], "3"]}),
        &[call(json!([1, [2]]), json!([3])), call(json!("1\n[2]"), json!("3"))]
    )]
    #[case(
        json!([{"input": "1\n2", "output": "3", "testtype": "functional", "func_name": "add"}]),
        &[call(json!("1\n2"), json!("3"))]
    )]
    fn tests_have_several_forms_and_each_may_be_the_text_of_its_json(
        #[case] tests: Value,
        #[case] expected: &[Case],
    ) {
        assert_eq!(cases(tests.clone()).unwrap(), expected);
        let text = json!(tests.to_string());
        assert_eq!(cases(text.clone()).unwrap(), expected);
        assert_eq!(cases(json!(text.to_string())).unwrap(), expected);
    }

    #[test]
    fn integers_of_a_text_keep_their_digits() {
        let digits = "265252859812191058636308480000000";
        let text = format!(r#"{{"fn_name": "add", "inputs": [[30]], "outputs": [{digits}]}}"#);
        let expected = call(json!([30]), json!(digits));
        assert_eq!(cases(json!(text)).unwrap(), [expected]);
    }

    #[test]
    fn functions_that_take_a_candidate_are_called_with_the_entry_point() {
        let text = "def check(candidate):\n    assert candidate(1, 2) == 3\n";
        let expected = Case::Assertions {
            text: text.to_owned(),
            candidates: vec!["check".to_owned()],
            entry: Some("add".to_owned()),
        };
        assert_eq!(cases(json!(text)).unwrap(), [expected]);
        let called = format!("{text}check(add)");
        assert_eq!(cases(json!(called)).unwrap(), [assertions(&called)]);
        let without = Case::of_row(&json!({"tests": text}), FORM).unwrap();
        assert!(matches!(
            &without[..],
            [Case::Assertions { entry: None, .. }]
        ));
        for (name, valid) in [("Solution().add", true), ("add(1)", false), ("", false)] {
            let row = json!({"tests": text, "entry_point": name});
            assert_eq!(Case::of_row(&row, FORM).is_ok(), valid, "{name}");
        }
    }

    #[rstest]
    #[case(json!({}), "column \"tests\": absent")]
    #[case(json!({"tests": []}), "no tests, must be at least one")]
    #[case(json!({"tests": "[]"}), "no tests, must be at least one")]
    #[case(json!({"tests": {"inputs": [], "outputs": []}}), "no tests")]
    #[case(json!({"tests": 3}), "must be a text, an object")]
    #[case(json!({"tests": ["assert a", 3]}), "test 1: must be a text, an object")]
    #[case(json!({"tests": [{"input": "1"}]}), "test 0: must be a text, an object")]
    #[case(json!({"tests": [{"output": 1}]}), "test 0: output: must be a text or a list")]
    #[case(json!({"tests": [{"output": "1", "in": "2"}]}), "test 0: must be a text, an object")]
    #[case(json!({"tests": {"inputs": ["1"], "outputs": []}}), "1 inputs and 0 outputs")]
    #[case(json!({"tests": {"inputs": ["1"]}}), "outputs: must be a list")]
    #[case(json!({"tests": {"inputs": [], "outputs": [], "x": 1}}), "must have the keys inputs")]
    #[case(
        json!({"tests": {"fn_name": "f", "inputs": [3], "outputs": [3]}}),
        "test 0: input: must be a list of arguments"
    )]
    #[case(
        json!({"tests": {"fn_name": "f", "inputs": ["[1"], "outputs": [3]}}),
        "input: \"[1\", must be JSON"
    )]
    #[case(json!({"tests": {"fn_name": "f g", "inputs": [], "outputs": []}}), "fn_name")]
    #[case(
        json!({"tests": {"input": "1", "output": "2", "testtype": "functional"}}),
        "must have its name at \"fn_name\""
    )]
    #[case(json!({"tests": ["assert a", " \n"]}), "test 1: no statements")]
    fn other_columns_are_errors(#[case] row: Value, #[case] words: &str) {
        let error = format!("{:#}", Case::of_row(&row, FORM).unwrap_err());
        assert!(error.contains(words), "{error}");
    }

    #[test]
    fn other_languages_have_assertions_of_their_own_and_no_calls() {
        let form = Form {
            is_python: false,
            ..FORM
        };
        let read = |tests: Value| Case::of_row(&json!({"tests": tests}), form);
        assert!(read(json!("test 1 = 1")).is_ok());
        for tests in [
            json!(""),
            json!("# nothing\n"),
            json!("// nothing"),
            json!({"fn_name": "f", "inputs": [[1]], "outputs": [1]}),
        ] {
            assert!(read(tests.clone()).is_err(), "{tests}");
        }
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

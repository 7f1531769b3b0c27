//! The lines that a reward program reads and writes.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value, json};

use crate::Sample;
use crate::Score;
use crate::program::{Answer, quoted};

/// A completion's score, and what the program says about it.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Verdict {
    pub(super) score: Score,
    pub(super) feedback: Option<String>,
}

impl From<Score> for Verdict {
    fn from(score: Score) -> Self {
        let feedback = None;
        Self { score, feedback }
    }
}

/// Returns the request fields for scoring `sample`.
pub(super) fn request(sample: &Sample) -> Map<String, Value> {
    let fields = json!({
        "prompt": sample.prompt,
        "completion": sample.completion,
        "finish_reason": sample.finish_reason,
        "completion_tokens": sample.completion_tokens.len(),
        "columns": sample.columns,
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

/// Parses a line: a number or `null`, or an object with one in `score`, and perhaps `id` and
/// `feedback`.
pub(super) fn parse(line: &str) -> Result<Answer<Verdict>> {
    from_line(line.trim()).with_context(|| quoted(line))
}

fn from_line(line: &str) -> Result<Answer<Verdict>> {
    ensure!(!line.is_empty(), "an empty line, must be a score");
    match serde_json::from_str(line) {
        Ok(Value::Object(mut fields)) => {
            let id = Answer::take_id(&mut fields)?;
            let Some(value) = fields.remove("score") else {
                bail!("must be a number or null, or an object with the number \"score\"")
            };
            let score = score(&value).context("score")?;
            let feedback = match fields.remove("feedback") {
                None | Some(Value::Null) => None,
                Some(Value::String(text)) => Some(text),
                Some(other) => bail!("feedback: {other}, must be a text or null"),
            };
            let value = Verdict { score, feedback };
            Ok(Answer { id, value })
        }
        Ok(value) => Ok(Answer {
            id: None,
            value: score(&value)?.into(),
        }),
        Err(_) => match score_text(line) {
            Some(score) => Err(not_json(score)).context("score"),
            None => Err(not_json(line)),
        },
    }
}

fn score(value: &Value) -> Result<Score> {
    match value {
        Value::Number(number) => {
            let number = number.as_f64().unwrap_or(f64::INFINITY);
            ensure!((number as f32).is_finite(), OUT_OF_RANGE);
            Ok((number as f32).into())
        }
        Value::Null => Ok(Score::NONE),
        Value::Bool(_) => bail!(TRUE_OR_FALSE),
        Value::String(_) => bail!("a text, must be a number: write it without quotes"),
        Value::Array(_) => bail!("an array, must be one number on each line"),
        Value::Object(_) => bail!("an object, must be a number"),
    }
}

const OUT_OF_RANGE: &str = "outside the range of f32, must be from -3.4e38 to 3.4e38";
const NONE: &str = "None, must be null for a completion without a score";
const TRUE_OR_FALSE: &str = "true or false, must be a number: write 1 or 0";
const NOT_FINITE: &str = "NaN or an infinity, must be a finite number";

/// Returns the score's text in a line that is not valid JSON, if it looks like an object.
fn score_text(line: &str) -> Option<&str> {
    let (_, rest) = line.strip_prefix('{')?.split_once("\"score\"")?;
    let value = rest.trim_start().strip_prefix(':')?;
    Some(value.split([',', '}']).next().unwrap_or(value).trim())
}

/// Returns the error for a value that JSON lacks, such as Python's `nan` and `True`.
fn not_json(value: &str) -> anyhow::Error {
    let lower = value.to_ascii_lowercase();
    match lower.trim_start_matches(['-', '+']) {
        "nan" | "inf" | "infinity" => anyhow::anyhow!(NOT_FINITE),
        "none" | "null" => anyhow::anyhow!(NONE),
        "true" | "false" => anyhow::anyhow!(TRUE_OR_FALSE),
        // The syntax is JSON, but no f64 has the value.
        digits if digits.parse::<f64>().is_ok_and(f64::is_infinite) => {
            anyhow::anyhow!(OUT_OF_RANGE)
        }
        _ => anyhow::anyhow!("must be a number or a JSON object; other output belongs on stderr"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("0.5", None, 0.5)]
    #[case(" -3e2 \r", None, -300.)]
    #[case(r#"{"score": 1}"#, None, 1.)]
    #[case(r#"{"score": 1e-50, "id": 7, "why": "short"}"#, Some(7), 0.)]
    fn a_score_is_a_number_or_an_object_with_one(
        #[case] line: &str,
        #[case] id: Option<u64>,
        #[case] score: f32,
    ) {
        let value = Score::from(score).into();
        assert_eq!(parse(line).unwrap(), Answer { id, value });
    }

    #[test]
    fn an_object_may_have_feedback() {
        let feedback = |line: &str| parse(line).unwrap().value.feedback;
        let line = r#"{"score": null, "feedback": "Too long.", "id": 7}"#;
        assert_eq!(feedback(line).as_deref(), Some("Too long."));
        assert_eq!(feedback(r#"{"score": 1, "feedback": null}"#), None);
        let error = parse(r#"{"score": 1, "feedback": ["a"]}"#).unwrap_err();
        let words = "feedback: [\"a\"], must be a text or null";
        assert!(format!("{error:#}").ends_with(words), "{error:#}");
    }

    #[rstest]
    #[case("null", None)]
    #[case(r#"{"score": null, "id": 7}"#, Some(7))]
    fn null_is_no_score(#[case] line: &str, #[case] id: Option<u64>) {
        let value = Score::NONE.into();
        assert_eq!(parse(line).unwrap(), Answer { id, value });
    }

    #[rstest]
    #[case("", "an empty line")]
    #[case("None", NONE)]
    #[case("nan", NOT_FINITE)]
    #[case("NaN", NOT_FINITE)]
    #[case("-inf", NOT_FINITE)]
    #[case("Infinity", NOT_FINITE)]
    #[case("true", TRUE_OR_FALSE)]
    #[case("False", TRUE_OR_FALSE)]
    #[case("\"0.5\"", "without quotes")]
    #[case("[0.5]", "an array")]
    #[case("1e39", OUT_OF_RANGE)]
    #[case("-1e39", OUT_OF_RANGE)]
    #[case("1e999", OUT_OF_RANGE)]
    #[case("good", "other output belongs on stderr")]
    #[case("0.5 0.7", "other output belongs on stderr")]
    #[case("{}", "the number \"score\"")]
    #[case(r#"{"score": true}"#, "score: true or false")]
    #[case(r#"{"score": NaN}"#, "score: NaN or an infinity")]
    #[case(r#"{"score": nan}"#, "score: NaN or an infinity")]
    #[case(
        r#"{"id": 3, "score" : -inf, "why": "short"}"#,
        "score: NaN or an infinity"
    )]
    #[case(r#"{"score": 1e999}"#, "score: outside the range of f32")]
    #[case(r#"{"score": -1e999, "id": 1}"#, "score: outside the range of f32")]
    #[case(r#"{"score": None}"#, "score: None")]
    #[case(r#"{"score": True}"#, "score: true or false")]
    #[case(r#"{"score": }"#, "must be a number")]
    #[case(r#"{"score": 1"#, "must be a number")]
    #[case("{'score': 1}", "must be a number")]
    #[case(r#"{"score": "1"}"#, "score: a text")]
    #[case(r#"{"score": {"a": 1}}"#, "score: an object")]
    #[case(r#"{"score": 1, "id": "7"}"#, "id: \"7\"")]
    #[case(r#"{"score": 1, "id": null}"#, "id: null")]
    fn a_line_without_a_score_has_its_own_message(#[case] line: &str, #[case] words: &str) {
        let error = format!("{:#}", parse(line).unwrap_err());
        assert!(error.contains(words), "{error}");
        assert!(error.starts_with(&format!("{line:?}: ")), "{error}");
    }

    #[test]
    fn a_long_line_is_cut_in_messages() {
        let error = format!("{:#}", parse(&"é".repeat(5000)).unwrap_err());
        assert!(error.contains("é\" ...: ") && error.len() < 700, "{error}");
    }
}

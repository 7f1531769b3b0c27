//! JSON comparison.

use anyhow::{Result, bail};
use candle_grpo_base::column::column;
use candle_grpo_base::json;
use candle_grpo_base::large_integers::parsed;
use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};

use super::options::compares_column;
use super::right_or_wrong::right_or_wrong;
use super::score::Score;
use crate::{RewardFunction, Sample};

/// 1 if the completion is a JSON object or, with a column, equals that column's value; 0 otherwise.
///
/// Key order does not matter, and 1 equals 1.0.
///
/// ```
/// use candle_grpo_rewards::JsonReward;
/// use serde_json::json;
///
/// let valid = JsonReward::default();
/// assert!(valid.matches(r#" {"age": 7} "#, &json!({}))?);
/// assert!(!valid.matches(r#"Sure: {"age": 7}"#, &json!({}))?);
///
/// let exact = JsonReward { column: Some("person".into()), ..JsonReward::default() };
/// assert!(!exact.matches(r#"{"age": 7}"#, &json!({"person": {"age": 8}}))?);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct JsonReward {
    /// Column with the expected value, as JSON or as text; absent: any object is right.
    pub column: Option<String>,
    /// If true, the JSON may be in a fenced Markdown block with nothing outside it.
    pub allow_fence: bool,
}

impl JsonReward {
    /// Returns the value that a row expects, if the reward has a column.
    ///
    /// # Errors
    ///
    /// Fails if the row lacks the column, or if its text is not JSON.
    pub fn expected(&self, columns: &Value) -> Result<Option<Value>> {
        let Some(name) = &self.column else {
            return Ok(None);
        };
        match column(columns, name)? {
            Value::String(text) => match parsed(text) {
                Ok(value) => Ok(Some(value)),
                Err(error) => bail!(
                    "column {name:?}: {text:?}, must be JSON: {}",
                    json::message_with_place(&error)
                ),
            },
            value => Ok(Some(value.clone())),
        }
    }

    /// Returns true if `completion` scores 1.
    pub fn matches(&self, completion: &str, columns: &Value) -> Result<bool> {
        let expected = self.expected(columns)?;
        let text = if self.allow_fence {
            inside_fence(completion)
        } else {
            completion
        };
        let Ok(value) = parsed(text) else {
            return Ok(false);
        };
        Ok(match expected {
            None => value.is_object(),
            Some(expected) => same(&value, &expected),
        })
    }
}

impl RewardFunction for JsonReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        right_or_wrong(samples, |sample| {
            self.matches(sample.completion, sample.columns)
        })
    }
}

compares_column!(JsonReward, |_| Ok(()));

/// Returns what is inside a fenced Markdown block, if the block is all of `text`. Otherwise,
/// returns `text`.
pub(super) fn inside_fence(text: &str) -> &str {
    let inside = || {
        let rest = text.trim().strip_prefix("```")?.strip_suffix("```")?;
        let (_language, inside) = rest.split_once('\n')?;
        Some(inside)
    };
    inside().unwrap_or(text)
}

/// Compares two values, with numbers compared by value.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => match (integer(a), integer(b)) {
            (Some(a), Some(b)) => a == b,
            (None, None) => a.as_f64() == b.as_f64(),
            _ => false,
        },
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter()
                    .all(|(key, a)| b.get(key).is_some_and(|b| same(a, b)))
        }
        (a, b) => a == b,
    }
}

/// Returns an integer's value, also if it is written as `7.0`. A float does not have enough digits
/// for all integers.
fn integer(number: &Number) -> Option<i128> {
    const LIMIT: f64 = (1u128 << 100) as f64;
    let float = || {
        number
            .as_f64()
            .filter(|x| x.fract() == 0.0 && x.abs() < LIMIT)
    };
    number.as_i128().or_else(|| Some(float()? as i128))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case(r#"{"name": "Ann", "age": 7}"#, true, true)]
    #[case(r#"{"age": 7.0, "name": "Ann"}"#, true, true)]
    #[case(r#"{"age": "7", "name": "Ann"}"#, true, false)]
    #[case(r#"{"age": 7, "name": "Ann", "x": 1}"#, true, false)]
    #[case(r#"{"age": 7}"#, true, false)]
    #[case(r#"[1]"#, false, false)]
    #[case(r#"{"age": 7"#, false, false)]
    #[case("", false, false)]
    #[case("{99999999999999999999: 7}", false, false)]
    fn an_object_is_valid_and_equal_if_its_values_are(
        #[case] text: &str,
        #[case] valid: bool,
        #[case] exact: bool,
    ) {
        let row = json!({"as_json": {"name": "Ann", "age": 7}, "as_text": "{\"name\":\"Ann\",\"age\":7}"});
        assert_eq!(JsonReward::default().matches(text, &row).unwrap(), valid);
        for name in ["as_json", "as_text"] {
            let reward = JsonReward {
                column: Some(name.to_owned()),
                ..JsonReward::default()
            };
            assert_eq!(reward.matches(text, &row).unwrap(), exact);
        }
    }

    #[rstest]
    #[case("[10000000000000001]", "[10000000000000000]", false)]
    #[case("[9007199254740993]", "[9007199254740992.0]", false)]
    #[case("[9007199254740993]", "[9007199254740993]", true)]
    #[case("[18446744073709551615]", "[18446744073709551615]", true)]
    #[case("[18446744073709551615]", "[18446744073709551614]", false)]
    #[case("[1e3, -5, 0.5]", "[1000, -5.0, 5e-1]", true)]
    #[case("[1e300]", "[1e300]", true)]
    #[case("[1e300]", "[2e300]", false)]
    #[case("[0.5]", "[1]", false)]
    #[case("[18446744073709551616]", "[18446744073709551616]", true)]
    #[case("[18446744073709551616]", "[18446744073709551617]", false)]
    #[case("[-123456789012345678901]", "[-123456789012345678901]", true)]
    fn numbers_are_compared_by_value(
        #[case] expected: &str,
        #[case] text: &str,
        #[case] right: bool,
    ) {
        let reward = JsonReward {
            column: Some("answer".to_owned()),
            ..JsonReward::default()
        };
        let row = json!({ "answer": expected });
        assert_eq!(reward.matches(text, &row).unwrap(), right);
    }

    #[test]
    fn a_fence_is_allowed_if_it_is_asked_for() {
        let text = "```json\n{\"a\": 1}\n```";
        let mut reward = JsonReward::default();
        assert!(!reward.matches(text, &Value::Null).unwrap());
        reward.allow_fence = true;
        assert!(reward.matches(text, &Value::Null).unwrap());
        assert!(
            !reward
                .matches(&format!("Here: {text}"), &Value::Null)
                .unwrap()
        );
    }
}

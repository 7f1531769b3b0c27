//! Number comparison.

use anyhow::{Result, bail};
use candle_grpo_core::validate::non_negative;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Votes;
use super::answer::AnswerPlace;
use super::number::{FoundNumber, numbers};
use super::options::compares_column;
use super::right_or_wrong::right_or_wrong;
use super::score::Score;
use super::votes::votes;
use crate::{RewardFunction, Sample};
use candle_grpo_base::column::column;

/// 1 if the completion's number equals the number in a column, 0 otherwise.
///
/// `1,200`, `$1200`, `1200.0 dollars` and `2400/2` are equal. The column has a number, or a text
/// with one: the number after `####` as in GSM8K, otherwise the last one.
///
/// ```
/// use candle_grpo_rewards::NumericReward;
/// use serde_json::json;
///
/// let reward = NumericReward::default();
/// let row = json!({"answer": "30 each, so 2 * 30\n#### 1,060"});
/// assert!(reward.matches("That makes 1060 in all.", &row)?);
/// assert!(!reward.matches("That makes 1,060 or 1,070", &row)?);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct NumericReward {
    /// Column with the expected number.
    pub column: String,
    /// Where the answer is in the completion. The last number there counts. With `first_line` and
    /// `after`, and after `####`, the first one does.
    pub find: AnswerPlace,
    /// Largest accepted difference.
    pub tolerance: f64,
}

impl Default for NumericReward {
    fn default() -> Self {
        Self {
            column: "answer".to_owned(),
            find: AnswerPlace::Auto,
            tolerance: 1e-6,
        }
    }
}

impl NumericReward {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if the tolerance is negative or not finite.
    pub fn validate(&self) -> Result<()> {
        Ok(non_negative("tolerance", self.tolerance)?)
    }

    /// Returns the number that a row expects.
    ///
    /// # Errors
    ///
    /// Fails if the column is absent or has no finite number.
    pub fn expected(&self, columns: &Value) -> Result<f64> {
        Ok(self.expected_number(columns)?.value)
    }

    fn expected_number(&self, columns: &Value) -> Result<FoundNumber> {
        let value = column(columns, &self.column)?;
        let number = match value {
            Value::Number(number) => number
                .as_f64()
                .map(|value| FoundNumber::new(value, &number.to_string())),
            Value::String(text) => number(&AnswerPlace::Auto, text),
            _ => None,
        };
        match number.filter(|number| number.value.is_finite()) {
            Some(number) => Ok(number),
            None => bail!(
                "column {:?}: {value}, must be a number or a text with one",
                self.column
            ),
        }
    }

    /// Returns true if the number in `completion` equals the row's.
    pub fn matches(&self, completion: &str, columns: &Value) -> Result<bool> {
        let expected = self.expected_number(columns)?;
        let found = self.found(completion);
        Ok(found.is_some_and(|number| number.is_near(&expected, self.tolerance)))
    }

    /// Returns a completion's number.
    fn found(&self, completion: &str) -> Option<FoundNumber> {
        number(&self.find, completion)
    }
}

/// Returns the number at a place in a text.
fn number(place: &AnswerPlace, text: &str) -> Option<FoundNumber> {
    let (place, text) = place.without_thoughts(text)?;
    let numbers = numbers(place.find(text)?);
    if place.counts_last_number(text) {
        numbers.into_iter().next_back()
    } else {
        numbers.into_iter().next()
    }
}

impl RewardFunction for NumericReward {
    /// Numbers are equal up to the tolerance.
    fn votes(&self, completions: &[&str], _: &Value) -> Result<Option<Votes>> {
        let answers = completions.iter().map(|text| self.found(text));
        let equal = |a: &FoundNumber, b: &FoundNumber| a.is_near(b, self.tolerance);
        Ok(Some(votes(answers, equal)))
    }

    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        right_or_wrong(samples, |sample| {
            self.matches(sample.completion, sample.columns)
        })
    }
}

compares_column!(NumericReward, NumericReward::validate);

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case("The answer is 18.", json!(18), true)]
    #[case("18 - 3 = 15", json!(18), false)]
    #[case("#### 1,200\nSo 5", json!("1200"), true)]
    #[case(r"\boxed{-\frac{3}{4}}", json!(-0.75), true)]
    #[case("$80,000 dollars", json!("... #### 80000"), true)]
    #[case("0.333333", json!("1/3"), true)]
    #[case("0.33", json!("1/3"), false)]
    #[case("57500001", json!(57_500_000), false)]
    #[case("1e999", json!(1), false)]
    #[case("none", json!(0), false)]
    #[case(r"\boxed{42\text{ km}^2}", json!(42), true)]
    #[case(r"\boxed{42\,\mathrm{cm}^{3}}", json!(42), true)]
    #[case("42 m^2", json!("42 m^2"), true)]
    #[case(r"\boxed{1{,}234}", json!(1234), true)]
    #[case("#### 42 apples and 3 pears", json!(42), true)]
    #[case("#### 42 apples and 3 pears", json!(3), false)]
    #[case("42", json!("all of it\n#### 42 apples and 3 pears"), true)]
    #[case(r"First \boxed{42}. No, \boxed{4", json!(4), false)]
    #[case(r"First \boxed{42}. No, \boxed{4", json!(42), false)]
    #[case("", json!(0), false)]
    #[case("9007199254740993", json!(9_007_199_254_740_993_u64), true)]
    #[case("9007199254740992", json!(9_007_199_254_740_993_u64), false)]
    #[case("9,007,199,254,740,993.00", json!("9007199254740993"), true)]
    #[case("9,007,199,254,740,993", json!("9007199254740992"), false)]
    #[case("-9007199254740993", json!(-9_007_199_254_740_993_i64), true)]
    #[case("9007199254740993", json!(-9_007_199_254_740_993_i64), false)]
    #[case("9007199254740993", json!(9_007_199_254_740_992.0), false)]
    #[case("123456789012345678901234567890", json!("123456789012345678901234567890"), true)]
    #[case("123456789012345678901234567891", json!("123456789012345678901234567890"), false)]
    #[case("1000000000000000000000000000000000000000000001", json!("1000000000000000000000000000000000000000000000"), false)]
    #[case("1e20", json!("100000000000000000000"), true)]
    fn numbers_are_compared(#[case] completion: &str, #[case] answer: Value, #[case] right: bool) {
        let row = json!({ "answer": answer });
        let reward = NumericReward::default();
        assert_eq!(reward.matches(completion, &row).unwrap(), right);
    }

    #[test]
    fn large_integers_differ_by_exact_amounts() {
        let near = |tolerance| {
            let reward = NumericReward {
                tolerance,
                ..NumericReward::default()
            };
            let row = json!({"answer": 9_007_199_254_740_993_u64});
            reward.matches("9007199254740991", &row).unwrap()
        };
        assert!(!near(1.) && near(2.));
    }

    #[test]
    fn the_first_number_of_the_first_line_counts() {
        let reward = NumericReward {
            find: AnswerPlace::FirstLine,
            ..NumericReward::default()
        };
        let row = json!({"answer": 42});
        assert!(reward.matches(" 42, 43\n44", &row).unwrap());
        assert!(!reward.matches(" 41, 42\n42", &row).unwrap());
    }

    #[test]
    fn a_row_without_a_number_is_an_error() {
        let reward = NumericReward::default();
        let error = reward.expected(&json!({"answer": "none"})).unwrap_err();
        assert_eq!(
            error.to_string(),
            "column \"answer\": \"none\", must be a number or a text with one"
        );
        let error = reward.expected(&json!({"Answer": 1, "id": 2})).unwrap_err();
        assert_eq!(
            error.to_string(),
            "column \"answer\": absent, the row has \"Answer\", \"id\""
        );
    }
}

//! Comparison of numbers.

use anyhow::{Result, bail};
use candle_grpo_core::validate::non_negative;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Votes;
use super::answer::AnswerPlace;
use super::number::numbers;
use super::right_or_wrong::right_or_wrong;
use super::score::Score;
use super::votes::votes;
use crate::column::column;
use crate::{RewardFunction, Sample};

/// 1 if the number of the completion equals that of a column of its row, 0 otherwise.
///
/// `1,200`, `$1200`, `1200.0 dollars` and `2400/2` are equal. The column has a number or a text
/// with one: the number after `####` as in GSM8K, otherwise the last.
///
/// ```
/// use candle_grpo_train::rewards::NumericReward;
/// use serde_json::json;
///
/// let reward = NumericReward::default();
/// let row = json!({"answer": "30 each, so 2 * 30\n#### 1,060"});
/// assert!(reward.matches("That makes 1060 in all.", &row)?);
/// assert!(!reward.matches("That makes 1,060 or 1,070", &row)?);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NumericReward {
    /// The column with the expected number.
    pub column: String,
    /// The place of the answer in the completion. The last number there counts; with `first_line`
    /// and `after`, and after `####`, the first.
    pub find: AnswerPlace,
    /// The largest accepted difference.
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
    /// If the tolerance is negative or not finite.
    pub fn validate(&self) -> Result<()> {
        Ok(non_negative("tolerance", self.tolerance)?)
    }

    /// Returns the expected number of a row.
    ///
    /// # Errors
    ///
    /// If the column is absent or has no finite number.
    pub fn expected(&self, columns: &Value) -> Result<f64> {
        let value = column(columns, &self.column)?;
        let number = match value {
            Value::Number(number) => number.as_f64(),
            Value::String(text) => number(&AnswerPlace::Auto, text),
            _ => None,
        };
        match number.filter(|number| number.is_finite()) {
            Some(number) => Ok(number),
            None => bail!(
                "column {:?}: {value}, must be a number or a text with one",
                self.column
            ),
        }
    }

    /// Returns true if the number of `completion` is that of the row.
    pub fn matches(&self, completion: &str, columns: &Value) -> Result<bool> {
        let expected = self.expected(columns)?;
        let found = self.found(completion);
        Ok(found.is_some_and(|x| (x - expected).abs() <= self.tolerance))
    }

    /// Returns the number of a completion.
    fn found(&self, completion: &str) -> Option<f64> {
        number(&self.find, completion)
    }
}

/// Returns the number at a place of a text.
fn number(place: &AnswerPlace, text: &str) -> Option<f64> {
    let numbers = numbers(place.find(text)?);
    match place.counts_last_number(text) {
        true => numbers.last().copied(),
        false => numbers.first().copied(),
    }
}

impl RewardFunction for NumericReward {
    /// Numbers are equal up to the tolerance.
    fn votes(&self, completions: &[&str], _: &Value) -> Result<Option<Votes>> {
        let answers = completions.iter().map(|text| self.found(text));
        let equal = |a: &f64, b: &f64| a == b || (a - b).abs() <= self.tolerance;
        Ok(Some(votes(answers, equal)))
    }

    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        right_or_wrong(samples, |sample| {
            self.matches(sample.completion, sample.columns)
        })
    }
}

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
    fn numbers_are_compared(#[case] completion: &str, #[case] answer: Value, #[case] right: bool) {
        let row = json!({ "answer": answer });
        let reward = NumericReward::default();
        assert_eq!(reward.matches(completion, &row).unwrap(), right);
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

//! Text comparison.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Votes;
use super::answer::AnswerPlace;
use super::options::compares_column;
use super::right_or_wrong::right_or_wrong;
use super::score::Score;
use super::votes::votes;
use crate::{RewardFunction, Sample};
use candle_grpo_base::column::column;

/// 1 if the completion's answer equals the text in a column, 0 otherwise. A run of white space
/// equals one space, and white space at the ends is ignored.
///
/// ```
/// use candle_grpo_rewards::ExactReward;
/// use serde_json::json;
///
/// let reward = ExactReward { ignore_case: true, ..ExactReward::default() };
/// assert!(reward.matches("#### new  york", &json!({"answer": "New York"}))?);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ExactReward {
    /// Column with the expected value: a text, a number, true or false.
    pub column: String,
    /// Where the answer is in the completion.
    pub find: AnswerPlace,
    /// If true, upper and lower case are equal.
    pub ignore_case: bool,
}

impl Default for ExactReward {
    fn default() -> Self {
        Self {
            column: "answer".to_owned(),
            find: AnswerPlace::Auto,
            ignore_case: false,
        }
    }
}

impl ExactReward {
    /// Returns the text that a row expects.
    ///
    /// # Errors
    ///
    /// Fails if the column is absent, or is not a text, a number or a boolean.
    pub fn expected(&self, columns: &Value) -> Result<String> {
        match column(columns, &self.column)? {
            Value::String(text) => Ok(AnswerPlace::Auto.find(text).unwrap_or(text).to_owned()),
            value @ (Value::Number(_) | Value::Bool(_)) => Ok(value.to_string()),
            value => bail!(
                "column {:?}: {value}, must be a text, a number or true or false",
                self.column
            ),
        }
    }

    /// Returns true if the answer in `completion` is the row's text.
    pub fn matches(&self, completion: &str, columns: &Value) -> Result<bool> {
        let expected = self.normal(&self.expected(columns)?);
        let found = self.find.find(completion);
        Ok(found.is_some_and(|answer| self.normal(answer) == expected))
    }

    fn normal(&self, text: &str) -> String {
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if self.ignore_case {
            text.to_lowercase()
        } else {
            text
        }
    }
}

impl RewardFunction for ExactReward {
    fn votes(&self, completions: &[&str], _: &Value) -> Result<Option<Votes>> {
        let answer = |text: &&str| Some(self.normal(self.find.find(text)?));
        Ok(Some(votes(completions.iter().map(answer), |a, b| a == b)))
    }

    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        right_or_wrong(samples, |sample| {
            self.matches(sample.completion, sample.columns)
        })
    }
}

compares_column!(ExactReward, |_| Ok(()));

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn case_matters_and_spaces_do_not() {
        let reward = ExactReward::default();
        let row = json!({"answer": "New York"});
        assert!(reward.matches(" New\nYork ", &row).unwrap());
        assert!(reward.matches(r"It is \boxed{New York}", &row).unwrap());
        assert!(!reward.matches("new york", &row).unwrap());
        assert!(!reward.matches("It is New York", &row).unwrap());
        assert!(reward.matches("7", &json!({"answer": 7})).unwrap());
        let error = reward.matches("7", &json!({"answer": [7]})).unwrap_err();
        assert!(error.to_string().contains("must be a text"), "{error}");
    }
}

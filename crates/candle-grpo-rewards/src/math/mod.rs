//! Compares mathematical answers by value, in LaTeX and in plain text.
//!
//! No other Rust crate compares answers from language models as
//! [Math-Verify](https://github.com/huggingface/Math-Verify) does in Python. General computer
//! algebra systems only parse their own notation.

mod approximate;
mod boxes;
mod compare;
mod extract;
mod functions;
mod lexer;
mod limits;
mod parser;
mod polynomial;
#[cfg(test)]
mod tests;
mod value;

use anyhow::{Result, bail};
use candle_grpo_core::validate;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;

use self::compare::Comparison;
use self::extract::Answer;
use self::value::Value;
use super::Votes;
use super::answer::AnswerPlace;
use super::options::compares_column;
use super::right_or_wrong::right_or_wrong;
use super::score::Score;
use super::votes::votes;
use crate::{RewardFunction, Sample};
use candle_grpo_base::column::column;

/// Maximum number of decimal places that are compared.
const MAX_DECIMALS: u32 = 30;

/// 1 if the completion's answer has the same value as the answer in a column, 0 otherwise.
///
/// Use it for any mathematical answer; [`NumericReward`](crate::NumericReward) is enough if all
/// answers are plain numbers. Values can be numbers, roots, percentages, polynomials and other
/// expressions, tuples, sets, intervals, matrices, equations and inequalities, in LaTeX and in
/// plain text. An answer without a value is compared as text. Time and memory are limited for each
/// completion.
///
/// ```
/// use candle_grpo_rewards::MathReward;
/// use serde_json::json;
///
/// let reward = MathReward::default();
/// let row = json!({"answer": r"\frac{\sqrt{2}}{2}"});
/// assert!(reward.matches(r"So $x = \boxed{1/\sqrt 2}$.", &row)?);
/// assert!(!reward.matches(r"So $x = \boxed{1/2}$.", &row)?);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MathReward {
    /// Column with the expected answer: a number, or a text in LaTeX or plain text.
    pub column: String,
    /// Where the answer is in the completion. With `auto`, the first that exists: the last
    /// `\boxed{}`, or a later `the answer is`; the text after `####`; the last formula or number.
    pub find: AnswerPlace,
    /// Numbers are equal up to half a unit in this decimal place, if one of them is written with
    /// decimals.
    pub decimals: u32,
}

impl Default for MathReward {
    fn default() -> Self {
        Self {
            column: "answer".to_owned(),
            find: AnswerPlace::Auto,
            decimals: 6,
        }
    }
}

impl MathReward {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if `decimals` is greater than 30.
    pub fn validate(&self) -> Result<()> {
        Ok(validate::check(
            self.decimals <= MAX_DECIMALS,
            "decimals",
            self.decimals,
            &format!("be at most {MAX_DECIMALS}"),
        )?)
    }

    /// Returns the answer that a row expects, as written.
    ///
    /// # Errors
    ///
    /// Fails if the column is absent, or is neither a number nor a text with an answer.
    pub fn expected(&self, columns: &Json) -> Result<String> {
        match column(columns, &self.column)? {
            Json::String(text) if !text.trim().is_empty() => Ok(text.clone()),
            Json::Number(number) => Ok(number.to_string()),
            value => bail!(
                "column {:?}: {value}, must be a number or a text that is not empty",
                self.column
            ),
        }
    }

    /// Returns true if the answer in `completion` has the same value as the row's.
    ///
    /// # Errors
    ///
    /// Fails if the column is absent, or is neither a number nor a text with an answer.
    pub fn matches(&self, completion: &str, columns: &Json) -> Result<bool> {
        let expected = extract::expected(&self.expected(columns)?);
        let found = extract::find(&self.find, completion);
        let (Some(expected), Some(found)) = (expected, found) else {
            return Ok(false);
        };
        // A sentence that repeats the expected one, whatever number it contains.
        let repeats = || {
            let text = self.find.find(completion).unwrap_or_default();
            expected.value.is_none() && are_equal_texts(&expected.text, text)
        };
        Ok(are_equal(&expected, &found, self.decimals) || repeats())
    }
}

impl RewardFunction for MathReward {
    /// Answers are equal if their values are.
    fn votes(&self, completions: &[&str], _: &Json) -> Result<Option<Votes>> {
        let answers = completions
            .iter()
            .map(|text| extract::find(&self.find, text));
        let equal = |a: &Answer, b: &Answer| are_equal(a, b, self.decimals);
        Ok(Some(votes(answers, equal)))
    }

    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        right_or_wrong(samples, |sample| {
            self.matches(sample.completion, sample.columns)
        })
    }
}

compares_column!(MathReward, MathReward::validate);

fn are_equal_texts(a: &str, b: &str) -> bool {
    let text = letters(a);
    !text.is_empty() && text == letters(b)
}

fn are_equal(a: &Answer, b: &Answer, decimals: u32) -> bool {
    match (&a.value, &b.value) {
        (Some(Value::Text(_)) | None, _) | (_, Some(Value::Text(_)) | None) => {
            are_equal_texts(&a.text, &b.text)
        }
        (Some(value), Some(other)) => {
            let equal = |a: &Value, b: &Value| Comparison::new(decimals).equal(a, b);
            equal(value, other)
                || b.as_list.as_ref().is_some_and(|list| equal(value, list))
                || a.as_list.as_ref().is_some_and(|list| equal(list, other))
        }
    }
}

/// Returns a text in lower case, without text commands, white space, and one pair of brackets
/// around it.
fn letters(text: &str) -> String {
    let mut text = text.to_owned();
    for command in [
        "\\text", "\\textbf", "\\mathrm", "\\mbox", "\\left", "\\right",
    ] {
        text = text.replace(&format!("{command}{{"), "{");
    }
    text.retain(|c| !c.is_whitespace() && !matches!(c, '{' | '}' | '$'));
    let text = text.trim_end_matches(['.', ',']);
    let inside = text
        .strip_prefix('(')
        .and_then(|text| text.strip_suffix(')'));
    inside.unwrap_or(text).to_lowercase()
}

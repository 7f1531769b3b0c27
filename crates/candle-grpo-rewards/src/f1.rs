//! Word overlap.

use std::collections::HashMap;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::answer::AnswerPlace;
use super::options::compares_column;
use super::{RewardFunction, Sample, Score};
use candle_grpo_base::column::column;

/// The F1 score between the words in the answer and in a column, as in SQuAD
/// (<https://arxiv.org/abs/1606.05250>): the harmonic mean of precision and recall. Case,
/// punctuation and the articles a, an, the do not count. If there are several expected texts, the
/// best one counts.
///
/// ```
/// use candle_grpo_rewards::F1Reward;
/// use serde_json::json;
///
/// let reward = F1Reward::default();
/// let row = json!({"answer": ["the Eiffel Tower", "Tour Eiffel"]});
/// assert_eq!(reward.compute("Eiffel tower!", &row)?, 1.);
/// assert_eq!(reward.compute("a tower in Paris", &row)?, 0.4);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct F1Reward {
    /// Column with the expected text, or with a list of texts.
    pub column: String,
    /// Where the answer is in the completion.
    pub find: AnswerPlace,
}

impl Default for F1Reward {
    fn default() -> Self {
        Self {
            column: "answer".to_owned(),
            find: AnswerPlace::Auto,
        }
    }
}

impl F1Reward {
    /// Returns the texts that a row expects.
    ///
    /// # Errors
    ///
    /// Fails if the column is absent, or is neither a text nor a list of texts.
    pub fn expected<'a>(&self, columns: &'a Value) -> Result<Vec<&'a str>> {
        let value = column(columns, &self.column)?;
        let texts = match value {
            Value::String(text) => Some(vec![text.as_str()]),
            Value::Array(texts) => texts.iter().map(Value::as_str).collect(),
            _ => None,
        };
        match texts {
            Some(texts) if !texts.is_empty() => Ok(texts),
            _ => bail!(
                "column {:?}: {value}, must be a text or a list of texts",
                self.column
            ),
        }
    }

    /// Returns the score for `completion`, from 0 to 1.
    pub fn compute(&self, completion: &str, columns: &Value) -> Result<f32> {
        let expected = self.expected(columns)?;
        let Some(answer) = self.find.find(completion) else {
            return Ok(0.);
        };
        let answer = words(answer);
        let scores = expected.into_iter().map(|text| f1(&answer, &words(text)));
        Ok(scores.fold(0., f32::max))
    }
}

impl RewardFunction for F1Reward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let score = |sample: &Sample| Ok(self.compute(sample.completion, sample.columns)?.into());
        samples.iter().map(score).collect()
    }
}

compares_column!(F1Reward, |_| Ok(()));

fn words(text: &str) -> Vec<String> {
    let is_punctuation = |c: &char| c.is_ascii_punctuation();
    let text = text.to_lowercase();
    let text: String = text.chars().filter(|c| !is_punctuation(c)).collect();
    let words = text.split_whitespace();
    let words = words.filter(|word| !matches!(*word, "a" | "an" | "the"));
    words.map(str::to_owned).collect()
}

fn f1(found: &[String], expected: &[String]) -> f32 {
    if found.is_empty() || expected.is_empty() {
        return f32::from(found.is_empty() && expected.is_empty());
    }
    let mut left: HashMap<&str, usize> = HashMap::new();
    for word in expected {
        *left.entry(word).or_default() += 1;
    }
    let common = found
        .iter()
        .filter(|word| match left.get_mut(word.as_str()) {
            Some(count) if *count > 0 => {
                *count -= 1;
                true
            }
            _ => false,
        });
    // 2 / (1 / precision + 1 / recall)
    2. * common.count() as f32 / (found.len() + expected.len()) as f32
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    /// Values from SQuAD's evaluation script.
    #[rstest]
    #[case("in the 10th century", &["10th and 11th centuries"], 2. / 7.)]
    #[case("Denmark, Iceland and Norway", &["Denmark"], 0.4)]
    #[case("Denmark", &["Norway", "Denmark, Iceland and Norway"], 0.4)]
    #[case("the the the", &[""], 1.)]
    #[case("", &["x"], 0.)]
    #[case("x", &["the"], 0.)]
    #[case("cat cat cat", &["cat dog"], 0.4)]
    #[case("U.S.A.", &["usa"], 1.)]
    #[case("Antonín Dvořák", &["antonín dvořák"], 1.)]
    fn words_are_compared_as_in_squad(
        #[case] text: &str,
        #[case] expected: &[&str],
        #[case] score: f32,
    ) {
        let row = json!({"answer": expected});
        let found = F1Reward::default().compute(text, &row).unwrap();
        assert!((found - score).abs() < 1e-6, "{found}");
    }

    #[test]
    fn a_missing_place_scores_zero_and_a_wrong_column_is_an_error() {
        let reward = F1Reward {
            find: AnswerPlace::Boxed,
            ..F1Reward::default()
        };
        assert_eq!(
            reward
                .compute("Paris", &json!({"answer": "Paris"}))
                .unwrap(),
            0.
        );
        for value in [json!(7), json!([]), json!(["a", 7])] {
            let error = reward.expected(&json!({"answer": value})).unwrap_err();
            assert!(error.to_string().contains("a text or a list of texts"));
        }
    }
}

//! Format rewards.

use anyhow::Result;
use candle_core::Device;
use candle_grpo_core::validate::check;
use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::function::{RewardFunction, Sample};
use super::options::{RewardInputs, RewardOptions};
use super::pattern::compile;
use super::score::Score;

/// 1 if a regular expression (in the `regex` crate's syntax) matches the completion, 0 otherwise.
///
/// ```
/// use candle_grpo_rewards::RegexReward;
///
/// let boxed = RegexReward::search(r"\\boxed\{-?\d+\}")?;
/// assert!(boxed.matches(r"so it is \boxed{42}."));
///
/// let number = RegexReward::whole(r"\d+")?;
/// assert!(number.matches("42") && !number.matches("it is 42"));
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RegexReward {
    regex: Regex,
}

impl RegexReward {
    /// Creates a reward that matches the whole completion. A dot does not match a line break,
    /// unless the pattern has `(?s)`.
    pub fn whole(pattern: &str) -> Result<Self> {
        // Compiled alone first, so that no parenthesis in it closes the group.
        compile(pattern)?;
        Ok(Self {
            regex: compile(&format!(r"\A(?:{pattern})\z"))?,
        })
    }

    /// Creates a reward that matches anywhere in the completion.
    pub fn search(pattern: &str) -> Result<Self> {
        Ok(Self {
            regex: compile(pattern)?,
        })
    }

    /// Returns true if `completion` scores 1.
    pub fn matches(&self, completion: &str) -> bool {
        self.regex.is_match(completion)
    }
}

impl RewardFunction for RegexReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(zero_or_one(samples, |text| self.matches(text)))
    }
}

/// Options for [`RegexReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RegexOptions {
    /// Regular expression.
    pub pattern: String,
    /// If true, it must match the whole completion.
    #[serde(default)]
    pub whole: bool,
}

impl RegexOptions {
    fn function(&self) -> Result<RegexReward> {
        if self.whole {
            RegexReward::whole(&self.pattern)
        } else {
            RegexReward::search(&self.pattern)
        }
    }
}

impl RewardOptions for RegexOptions {
    fn validate(&self) -> Result<()> {
        self.function().map(drop)
    }

    fn build(&self, _: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(self.function()?))
    }

    fn check_row(&self, _: &Value) -> Result<()> {
        Ok(())
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::none()
    }
}

/// 1 if the completion opens and closes each tag exactly once, one tag after the other; 0
/// otherwise. DeepSeek-R1's format reward uses the tags `think` and `answer`
/// (<https://arxiv.org/abs/2501.12948>).
///
/// Give it a small weight: right answers should count more than the format.
///
/// ```
/// use candle_grpo_rewards::TagsReward;
///
/// let format = TagsReward::new(["think", "answer"])?;
/// assert!(format.matches("<think>2 and 2</think> so <answer>4</answer>"));
/// assert!(!format.matches("<answer>4</answer> <think>2 and 2</think>"));
///
/// let strict = format.nothing_else();
/// assert!(strict.matches("<think>2 and 2</think>\n<answer>4</answer>"));
/// assert!(!strict.matches("<think>2 and 2</think> so <answer>4</answer>"));
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TagsReward {
    /// Opening and closing tags in their required order.
    marks: Vec<String>,
    nothing_else: bool,
}

impl TagsReward {
    /// Creates a reward from tag names, in order and without brackets.
    ///
    /// # Errors
    ///
    /// Fails if there is no name, or if one is empty, has a bracket or occurs twice.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self> {
        let mut marks: Vec<String> = Vec::new();
        for name in names {
            let valid = !name.is_empty() && !name.contains(['<', '>', '/']);
            let check = |valid, must| check(valid, "tags", format_args!("{name:?}"), must);
            check(valid, "be a name without brackets and slashes")?;
            let open = format!("<{name}>");
            check(!marks.contains(&open), "be given once")?;
            marks.push(open);
            marks.push(format!("</{name}>"));
        }
        check(!marks.is_empty(), "tags", "none", "be at least one")?;
        Ok(Self {
            marks,
            nothing_else: false,
        })
    }

    /// Allows only white space before, between and after the tags.
    #[must_use]
    pub fn nothing_else(mut self) -> Self {
        self.nothing_else = true;
        self
    }

    /// Returns true if `completion` scores 1.
    pub fn matches(&self, completion: &str) -> bool {
        let mut rest = completion;
        for (i, mark) in self.marks.iter().enumerate() {
            let Some((before, after)) = rest.split_once(mark.as_str()) else {
                return false;
            };
            let outside = i % 2 == 0;
            if outside && self.nothing_else && !before.trim().is_empty() {
                return false;
            }
            rest = after;
        }
        let once = |mark: &String| completion.matches(mark.as_str()).count() == 1;
        self.marks.iter().all(once) && (!self.nothing_else || rest.trim().is_empty())
    }
}

impl RewardFunction for TagsReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        Ok(zero_or_one(samples, |text| self.matches(text)))
    }
}

/// Options for [`TagsReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TagsOptions {
    /// Tag names in their required order.
    pub tags: Vec<String>,
    /// If true, only white space may occur outside the tags.
    #[serde(default)]
    pub nothing_else: bool,
}

impl TagsOptions {
    fn function(&self) -> Result<TagsReward> {
        let tags = TagsReward::new(self.tags.iter().map(String::as_str))?;
        Ok(if self.nothing_else {
            tags.nothing_else()
        } else {
            tags
        })
    }
}

impl RewardOptions for TagsOptions {
    fn validate(&self) -> Result<()> {
        self.function().map(drop)
    }

    fn build(&self, _: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(self.function()?))
    }

    fn check_row(&self, _: &Value) -> Result<()> {
        Ok(())
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::none()
    }
}

fn zero_or_one(samples: &[Sample], matches: impl Fn(&str) -> bool) -> Vec<Score> {
    samples
        .iter()
        .map(|sample| f32::from(matches(sample.completion)).into())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FinishReason;
    use rstest::rstest;

    #[rstest]
    #[case("<a>x</a><b>y</b>", true, true)]
    #[case("  <a></a>\n<b>two\nlines</b>\n", true, true)]
    #[case("<a>x</a> and <b>y</b>", true, false)]
    #[case("so: <a>x</a><b>y</b>", true, false)]
    #[case("<a>x</a><b>y</b>!", true, false)]
    #[case("<a>x</a>", false, false)]
    #[case("<b>y</b><a>x</a>", false, false)]
    #[case("<a>x<b></a>y</b>", false, false)]
    #[case("</a>x<a><b>y</b>", false, false)]
    #[case("<a>x</a><a>x</a><b>y</b>", false, false)]
    #[case("<a>x</a><b>y</b></b>", false, false)]
    #[case("<a>x<a></a><b>y</b>", false, false)]
    #[case("", false, false)]
    fn tags_come_once_and_in_order(#[case] text: &str, #[case] matches: bool, #[case] alone: bool) {
        let tags = TagsReward::new(["a", "b"]).unwrap();
        assert_eq!(tags.matches(text), matches);
        assert_eq!(tags.nothing_else().matches(text), alone);
    }

    #[test]
    fn an_alternative_is_anchored_as_a_whole() {
        let reward = RegexReward::whole("yes|no").unwrap();
        assert!(reward.matches("yes") && reward.matches("no"));
        assert!(!reward.matches("yes!") && !reward.matches("oh no") && !reward.matches("no\n"));
        assert!(RegexReward::search("yes|no").unwrap().matches("oh no"));
    }

    #[test]
    fn a_pattern_or_tag_that_is_not_valid_is_an_error() {
        for pattern in ["(", "a)|(b"] {
            let error = RegexReward::whole(pattern).unwrap_err().to_string();
            let start = format!("pattern: {pattern:?}, must be a regular expression; character ");
            assert!(error.starts_with(&start), "{error}");
        }
        for (names, words) in [
            (vec![], "tags: none"),
            (vec!["a", ""], "tags: \"\""),
            (vec!["<a>"], "tags: \"<a>\""),
            (vec!["a", "a"], "tags: \"a\", must be given once"),
        ] {
            let error = TagsReward::new(names).unwrap_err().to_string();
            assert!(error.starts_with(words), "{error}");
        }
    }

    #[test]
    fn scores_are_zero_or_one() {
        let sample = |completion| Sample {
            prompt: "",
            messages: &[],
            completion,
            prompt_tokens: &[1],
            completion_tokens: &[2],
            finish_reason: FinishReason::StopToken,
            columns: &serde_json::Value::Null,
            group: 0,
        };
        let samples = [sample("<t>7</t>"), sample("7")];
        let tags = TagsReward::new(["t"]).unwrap();
        assert_eq!(tags.score(&samples).unwrap(), [1., 0.]);
        let digits = RegexReward::whole(r"\d+").unwrap();
        assert_eq!(digits.score(&samples).unwrap(), [0., 1.]);
    }
}

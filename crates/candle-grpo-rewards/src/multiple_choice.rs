//! Answers to multiple-choice questions.

use std::borrow::Cow;
use std::sync::LazyLock;

use anyhow::{Result, bail};
use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::answer::AnswerPlace;
use super::options::compares_column;
use super::pattern::compile;
use super::right_or_wrong::right_or_wrong;
use super::votes::votes;
use super::{RewardFunction, Sample, Score, Votes};
use candle_grpo_base::column::column;

/// 1 if the completion's answer is the right choice's letter, 0 otherwise.
///
/// The letter is a capital from A to Z. The first of these forms that occurs is the answer:
///
/// 1. The letter alone, also as `(B)`, `B.` or `**B**`.
/// 2. The last letter that is stated as the answer, as in `The answer is B` or `Answer: B`.
/// 3. The letter that is called correct or chosen, as in `B is correct` or `I choose B`.
/// 4. The only letter after `answer`, `option` or `choice`.
/// 5. A letter at the beginning, as in `B) Paris`.
///
/// If the row has the choices, a choice's text counts as its letter. Several letters, as in
/// `The answer is A or B`, are not an answer.
///
/// ```
/// use candle_grpo_rewards::MultipleChoiceReward;
/// use serde_json::json;
///
/// let reward = MultipleChoiceReward::default();
/// let row = json!({"answer": "B"});
/// assert!(reward.matches("A is in Spain, so the answer is (B).", &row)?);
/// assert!(reward.matches(r"\boxed{\text{B}}", &row)?);
/// assert!(!reward.matches("A or B", &row)?);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct MultipleChoiceReward {
    /// Column with the right choice: a letter, a number from 0, or a choice's text.
    pub column: String,
    /// Column with the list of choices as texts. Absent: only letters count.
    pub choices: Option<String>,
    /// Where the answer is in the completion.
    pub find: AnswerPlace,
}

impl Default for MultipleChoiceReward {
    fn default() -> Self {
        Self {
            column: "answer".to_owned(),
            choices: None,
            find: AnswerPlace::Auto,
        }
    }
}

impl MultipleChoiceReward {
    /// Returns a row's right letter.
    ///
    /// # Errors
    ///
    /// Fails if a column is absent, or if its value is not a choice.
    pub fn expected(&self, columns: &Value) -> Result<char> {
        let choices = self.choices(columns)?;
        let value = column(columns, &self.column)?;
        let found = match value {
            Value::String(text) => alone(text.trim()).or_else(|| of_text(text, &choices)),
            Value::Number(number) => number.as_u64().and_then(letter),
            _ => None,
        };
        match found {
            Some(letter) if choices.is_empty() || place(letter) < choices.len() => Ok(letter),
            _ => bail!(
                "column {:?}: {value}, must be a letter, a number or the text of one of the {} choices",
                self.column,
                match choices.len() {
                    0 => 26,
                    count => count,
                }
            ),
        }
    }

    /// Returns true if the answer in `completion` is the row's right choice.
    pub fn matches(&self, completion: &str, columns: &Value) -> Result<bool> {
        let expected = self.expected(columns)?;
        let choices = self.choices(columns)?;
        Ok(self.found(completion, &choices) == Some(expected))
    }

    /// Returns a completion's letter.
    fn found(&self, completion: &str, choices: &[&str]) -> Option<char> {
        let answer = self.find.find(completion)?;
        if let Some(letter) = alone(answer).or_else(|| of_text(answer, choices)) {
            return Some(letter);
        }
        let text = without_commands(answer);
        let read = stated(&text)
            .or_else(|| affirmed(&text))
            .or_else(|| named(&text));
        read.map_or_else(|| first(&text), Letters::only)
    }

    fn choices<'a>(&self, columns: &'a Value) -> Result<Vec<&'a str>> {
        let Some(name) = &self.choices else {
            return Ok(Vec::new());
        };
        let value = column(columns, name)?;
        let texts = value.as_array().and_then(|texts| {
            let texts = texts.iter().map(Value::as_str);
            texts.collect::<Option<Vec<_>>>()
        });
        match texts {
            Some(texts) if (1..=26).contains(&texts.len()) => Ok(texts),
            _ => bail!("column {name:?}: {value}, must be a list of 1 to 26 texts"),
        }
    }
}

impl RewardFunction for MultipleChoiceReward {
    fn votes(&self, completions: &[&str], columns: &Value) -> Result<Option<Votes>> {
        let choices = self.choices(columns)?;
        let answers = completions.iter().map(|text| self.found(text, &choices));
        Ok(Some(votes(answers, |a, b| a == b)))
    }

    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        right_or_wrong(samples, |sample| {
            self.matches(sample.completion, sample.columns)
        })
    }
}

compares_column!(MultipleChoiceReward, |_| Ok(()));

fn place(letter: char) -> usize {
    letter as usize - 'A' as usize
}

fn letter(place: u64) -> Option<char> {
    let place = u8::try_from(place).ok().filter(|place| *place < 26)?;
    Some(char::from(b'A' + place))
}

/// Returns the letter if `text` has only a letter, brackets, Markdown and LaTeX marks, and periods.
fn alone(text: &str) -> Option<char> {
    let text = without_commands(text);
    let around = |c: char| c.is_whitespace() || "()[]{}*_$.:,\"'`".contains(c);
    let mut letters = text.trim_matches(around).chars();
    match (letters.next(), letters.next()) {
        (Some(letter @ 'A'..='Z'), None) => Some(letter),
        (Some(letter @ 'a'..='z'), None) => Some(letter.to_ascii_uppercase()),
        _ => None,
    }
}

/// Returns the letter for the choice with this text.
fn of_text(text: &str, choices: &[&str]) -> Option<char> {
    let normal = |text: &str| {
        let text = text.trim().trim_end_matches('.').to_lowercase();
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let text = normal(text);
    let mut equal = (0..)
        .zip(choices)
        .filter(|(_, choice)| normal(choice) == text);
    equal.next().and_then(|(place, _)| letter(place))
}

/// Returns `text` without LaTeX commands.
fn without_commands(text: &str) -> Cow<'_, str> {
    static COMMAND: LazyLock<Option<Regex>> = LazyLock::new(|| compile(r"\\[a-zA-Z]+\s*").ok());
    match &*COMMAND {
        Some(command) => command.replace_all(text, ""),
        None => Cow::Borrowed(text),
    }
}

/// The letters that match a rule.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Letters {
    One(char),
    /// Several different letters, so there is no answer.
    Several,
}

impl Letters {
    /// Returns `None` if there are no letters.
    fn of(letters: impl IntoIterator<Item = char>) -> Option<Self> {
        let mut letters = letters.into_iter();
        let first = letters.next()?;
        Some(if letters.all(|letter| letter == first) {
            Self::One(first)
        } else {
            Self::Several
        })
    }

    fn only(self) -> Option<char> {
        match self {
            Self::One(letter) => Some(letter),
            Self::Several => None,
        }
    }
}

/// Words between a verb and the letter.
const ADVERB: &str = r"(?i:,?\s+(?:clearly|definitely|certainly|obviously|probably|likely|therefore|thus|hence|then|indeed|actually|simply),?)?";
/// Word before a letter.
const NOUN: &str = r"(?i:(?:the\s+)?(?:answer|option|choice|letter)\s+)?";
/// Marks around a letter.
const MARKS: &str = r#"[\s:=*_$({\["'`]*"#;

/// Returns the last letter that is stated as the answer: after a verb, a colon or a tag. After a
/// colon, a small letter alone on its line also counts.
fn stated(text: &str) -> Option<Letters> {
    static STATED: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let subject = r"(?i:\banswer|\b(?:correct|right|best|final)\s+(?:option|choice|letter))";
        let verb = r"(?i:\s+(?:is|was|(?:must|should)\s+be|(?:seems|appears)\s+to\s+be)\b)";
        let guess = r"(?i:\s+(?:would|could|may|might)\s+be\b)";
        let mark = r"[*_\s]*[:=>]";
        let small = r"([a-z])[)\].*]*[ \t]*(?m:$)";
        compile(&format!(
            r"{subject}(?:(?:{verb}|({guess})|{mark}){ADVERB}{MARKS}{NOUN}{MARKS}([A-Z])\b|{mark}{MARKS}{small})"
        ))
        .ok()
    });
    // A conditional answer, for some other case, does not count.
    static CONDITION: LazyLock<Option<Regex>> =
        LazyLock::new(|| compile(r"\A\W*(?i:if|had|were|when|unless)\b").ok());
    // Another letter in the same phrase, also after an explanation in parentheses.
    static LIST: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let closed = r"(?:[)\]}*$\s]*(?:\([^()]*\)\s*)?)";
        let joint = format!(r"(?:{closed}(?:[,/&]|(?i:\b(?:or|and)\b))[\s(\[{{*$]*)");
        compile(&format!(
            r"\A{joint}+{NOUN}[(\[*$]*([B-HJ-Z]\b|[AI]\s*(?:[.,;)\]/&]|(?i:or|and)\b|\z))"
        ))
        .ok()
    });
    let matches = STATED.as_ref()?.captures_iter(text);
    let letters = matches.filter_map(|found| {
        let letter = found.get(2).or_else(|| found.get(3))?;
        let rest = &text[letter.end()..];
        let is_condition = found.get(1).is_some() && CONDITION.as_ref()?.is_match(rest);
        if is_condition || is_denied(rest) {
            return None;
        }
        let first = letter.as_str().chars().next()?.to_ascii_uppercase();
        let other = LIST.as_ref()?.captures(rest);
        let other = other.and_then(|other| other.get(1)?.as_str().chars().next());
        Letters::of([first].into_iter().chain(other))
    });
    letters.last()
}

/// Returns the letter that is called correct, or that the text chooses.
fn affirmed(text: &str) -> Option<Letters> {
    static AFFIRMED: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let correct = format!(
            r"\b([A-Z])[)\]}}*$_]*(?i:\s+(?:is|was)){ADVERB}(?i:\s+(?:the\s+)?(?:correct|right|best))\b"
        );
        let choose = r"(?i:choose|chose|pick|picked|select|selected|go\s+with|go\s+for)";
        let not = r"((?i:not|n't|n\x{2019}t|never|cannot)\s+)?";
        compile(&format!(
            r"{correct}|{not}\b{choose}\b{MARKS}{NOUN}{MARKS}([A-Z])\b"
        ))
        .ok()
    });
    let found = AFFIRMED.as_ref()?.captures_iter(text);
    Letters::of(found.filter_map(|found| {
        let chosen = match found.get(2) {
            Some(_) => None,
            None => found.get(3),
        };
        found.get(1).or(chosen)?.as_str().chars().next()
    }))
}

/// Returns true if the text after a letter denies that it is the answer, or asks whether it is.
fn is_denied(after: &str) -> bool {
    static DENIED: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let verb = r"(?:(?:is|was|are|would\s+be|seems|looks)\s+)?";
        let wrong = r"(?:not|never|wrong|incorrect|false|impossible|too|out|a\s+(?:common\s+)?distractor)\b";
        compile(&format!(
            r#"\A[)\]}}*$_"']*(?:\s*\?|(?i:,?\s+{verb}{wrong}|\s+(?:is|was)n['\x{{2019}}]t\b))"#
        ))
        .ok()
    });
    DENIED.as_ref().is_some_and(|denied| denied.is_match(after))
}

/// Returns the letters after a word for a choice, without letters that the text denies.
fn named(text: &str) -> Option<Letters> {
    static NOT: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let words = "not|never|neither|nor|than|over|instead of|unlike|except|excludes?|excluding|eliminates?|eliminating|rejects?|rules? out|ruled out";
        compile(&format!(r"(?i:\b(?:{words})\s+(?:the\s+)?)\z")).ok()
    });
    static NAMED: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let pattern =
            r"(?i:\b(?:answer|option|choice)\b)(?i:\s+(?:is|was))?[\s:=*]*[(\[]?([A-Z])\b";
        compile(pattern).ok()
    });
    let found = NAMED.as_ref()?.captures_iter(text);
    Letters::of(found.filter_map(|found| {
        let (word, letter) = (found.get(0)?, found.get(1)?);
        // The longest words have fewer letters, so the search begins there, not at the first word.
        let before = &text[..word.start()];
        let near = before.char_indices().rev().nth(40);
        let before = near.map_or(before, |(at, _)| &before[at..]);
        let is_excluded = NOT.as_ref()?.is_match(before);
        let is_denied = is_excluded || is_denied(&text[letter.end()..]);
        letter.as_str().chars().next().filter(|_| !is_denied)
    }))
}

/// Returns the letter before a choice's text, or before the reason for it.
fn first(text: &str) -> Option<char> {
    static FIRST: LazyLock<Option<Regex>> = LazyLock::new(|| {
        compile(
            r"\A\W*([A-Z])(?:\s*[.):\]\*]|\s+[-\x{2013}\x{2014}]\s|,\s+(?:because|since|as|for)\b)",
        )
        .ok()
    });
    // A list with all choices names none.
    static LABEL: LazyLock<Option<Regex>> =
        LazyLock::new(|| compile(r"(?:\A|\s)[(*]*([A-Z])[*]*[.):](?:\s|\z)").ok());
    let found = FIRST.as_ref()?.captures(text)?.get(1)?.as_str();
    let mut labels = LABEL.as_ref()?.captures_iter(text);
    let is_other = |label: regex::Captures<'_>| label.get(1).is_some_and(|it| it.as_str() != found);
    found.chars().next().filter(|_| !labels.any(is_other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    #[rstest]
    #[case("B", true)]
    #[case("b", true)]
    #[case("(B)", true)]
    #[case("**B.**", true)]
    #[case(r"It is \boxed{B}.", true)]
    #[case(r"\boxed{\text{(B)}}", true)]
    #[case("The answer is B", true)]
    #[case("Answer: A? No. Final answer: **B**", true)]
    #[case("I choose option [B] because", true)]
    #[case("B) Paris", true)]
    #[case("B. Paris", true)]
    #[case("Paris", true)]
    #[case(" paris. ", true)]
    #[case("The answer is Berlin", false)]
    #[case("The answer is Both", false)]
    #[case("The answer is B. Option A is a common distractor.", true)]
    #[case("Answer: B\n\nExplanation: option A is wrong because", true)]
    #[case(
        "The answer is B, since option C is too small and choice A too large.",
        true
    )]
    #[case("Answer: B. (Choice A is for those who add.)", true)]
    #[case("The correct option is B. Answer A is a distractor.", true)]
    #[case("Option A: no. Option B: yes.\nAnswer: B", true)]
    #[case("Option A is wrong, so I choose option B.", true)]
    #[case("A. Berlin is in the north. I choose option B.", true)]
    #[case("ANSWER: b", true)]
    #[case("<answer>B</answer>", true)]
    #[case("The answer must be B", true)]
    #[case("Answer seems to be B", true)]
    #[case("The answer is $B$.", true)]
    #[case("B, because it is the capital", true)]
    #[case(r"\boxed{\textbf{(B)}}", true)]
    #[case(r"\boxed{\mathrm{B}}", true)]
    #[case(r"\boxed{B - the capital}", true)]
    #[case(r"\boxed{\text{B. Paris}}", true)]
    #[case("The answer is A. Option B is a common distractor.", false)]
    #[case("The answer is not B", false)]
    #[case(r"\boxed{B} or \boxed{", false)]
    #[case("A", false)]
    #[case("A, not B", false)]
    #[case("Berlin", false)]
    #[case("the answer is b", false)]
    #[case("", false)]
    #[case("The answer is option B. Option A is a common distractor.", true)]
    #[case("The correct answer is choice B, because choice A is too small.", true)]
    #[case("The answer is clearly B. Option A is wrong.", true)]
    #[case("B is correct. Option A is a distractor.", true)]
    #[case("(B) is the right choice; option A is not.", true)]
    #[case(
        "The answer is B. The answer would be A if the train were faster.",
        true
    )]
    #[case("The answer would be B.", true)]
    #[case("I pick B over option A.", true)]
    #[case("I would not choose option A, but option B.", false)]
    #[case("The answer is B, a city in France.", true)]
    #[case("The answer is B and it is the capital.", true)]
    #[case("The answer is B. A is a distractor.", true)]
    #[case("The answer is option A. Option B is a common distractor.", false)]
    #[case("The answer is clearly A. Option B is wrong.", false)]
    #[case("A is correct. Option B is a distractor.", false)]
    #[case("A is correct. B is correct.", false)]
    #[case(
        "The answer is A. The answer would be B if the train were faster.",
        false
    )]
    #[case("The answer is A or B.", false)]
    #[case("The answer is B or C.", false)]
    #[case("The answer is (A), (B) or (C).", false)]
    #[case("The answer is A, B, C or D.", false)]
    #[case("The answer is B, A.", false)]
    #[case("The answer is B/C", false)]
    #[case("Option A, option B, option C.", false)]
    #[case("The answer is, therefore, B. Option A is wrong.", true)]
    #[case("B is the right answer. Answer A is not.", true)]
    #[case("The answer is B, I think.", true)]
    #[case("The answer is B and A is wrong.", true)]
    #[case("The answer is A or B. The answer is B.", true)]
    #[case("I rule out option A, so option B.", true)]
    #[case("The answer is option B and option C.", false)]
    #[case("The answer is B (Paris) or C (Rome).", false)]
    #[case("The answer is B? No.", false)]
    #[case("The answer would be B if it were in France.", false)]
    #[case("The answer is not option B.", false)]
    #[case("Option B is wrong.", false)]
    #[case("Option B isn't right.", false)]
    #[case("I would not choose B.", false)]
    #[case("I rule out option B.", false)]
    #[case("B is not correct.", false)]
    #[case("I think A. Option B is wrong.", false)]
    #[case("A, rather than option B", false)]
    #[case("B) Paris\nC) Rome\nA) Berlin", false)]
    #[case("B) Paris C) Rome A) Berlin", false)]
    fn the_letter_is_found(#[case] text: &str, #[case] expected: bool) {
        let reward = MultipleChoiceReward {
            choices: Some("choices".to_owned()),
            ..MultipleChoiceReward::default()
        };
        let choices = ["Berlin", "Paris", "Rome"];
        for right in [json!("B"), json!("(b)"), json!(1), json!("Paris")] {
            let row = json!({"answer": right, "choices": choices});
            assert_eq!(reward.matches(text, &row).unwrap(), expected, "{right}");
        }
    }

    #[test]
    fn a_row_without_a_right_choice_is_an_error() {
        let reward = MultipleChoiceReward {
            choices: Some("choices".to_owned()),
            ..MultipleChoiceReward::default()
        };
        for (row, words) in [
            (
                json!({"answer": "D", "choices": ["x", "y"]}),
                "one of the 2 choices",
            ),
            (
                json!({"answer": 2, "choices": ["x", "y"]}),
                "one of the 2 choices",
            ),
            (
                json!({"answer": "z", "choices": []}),
                "list of 1 to 26 texts",
            ),
            (json!({"choices": ["x"]}), "\"answer\": absent"),
        ] {
            let error = reward.expected(&row).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let error = MultipleChoiceReward::default().expected(&json!({"answer": 26}));
        assert!(error.unwrap_err().to_string().contains("26 choices"));
    }
}

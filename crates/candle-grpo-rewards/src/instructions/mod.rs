//! Instructions about a text's form, which a program can check.

mod check;
mod text;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::options::compares_column;
use super::{RewardFunction, Sample, Score};
use candle_grpo_base::column::column;

/// The share of IFEval instructions (<https://arxiv.org/abs/2311.07911>) that a completion follows,
/// or 1 if it follows all.
///
/// The columns come from the data set: a list of names such as `length_constraints:number_words`,
/// and a list with each one's arguments. [`Instruction`] has all 25. The whole completion is
/// checked, as in the paper's strict accuracy. Sentences follow Unicode (UAX 29), and the crate
/// `whatlang` detects languages. IFEval's own program uses NLTK and langdetect.
///
/// ```
/// use candle_grpo_rewards::InstructionsReward;
/// use serde_json::json;
///
/// let row = json!({
///     "instruction_id_list": ["punctuation:no_comma", "detectable_format:title"],
///     "kwargs": [{}, {}],
/// });
/// let all = InstructionsReward::default();
/// assert_eq!(all.compute("<<Rain>> falls on the sea", &row)?, 1.);
/// assert_eq!(all.compute("Rain falls on the sea", &row)?, 0.);
/// let share = InstructionsReward { share: true, ..all };
/// assert_eq!(share.compute("Rain falls on the sea", &row)?, 0.5);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct InstructionsReward {
    /// Column with the list of names.
    pub column: String,
    /// Column with the list of arguments. Null arguments are ignored.
    pub arguments: String,
    /// If true, the score is the share of instructions that the completion follows. Otherwise, it
    /// is 1 if the completion follows all, and 0 if not.
    pub share: bool,
}

impl Default for InstructionsReward {
    fn default() -> Self {
        Self {
            column: "instruction_id_list".to_owned(),
            arguments: "kwargs".to_owned(),
            share: false,
        }
    }
}

impl InstructionsReward {
    /// Returns a row's instructions.
    ///
    /// # Errors
    ///
    /// Fails if a column is absent, an instruction is unknown, or an argument is missing or
    /// invalid.
    pub fn expected(&self, columns: &Value) -> Result<Vec<Instruction>> {
        let list = |name: &str| {
            let value = column(columns, name)?;
            let list = value.as_array();
            list.with_context(|| format!("column {name:?}: {value}, must be a list"))
        };
        let (names, arguments) = (list(&self.column)?, list(&self.arguments)?);
        ensure!(
            names.len() == arguments.len() && !names.is_empty(),
            "column {:?}: {} instructions and {} arguments in {:?}, must be as many, and at least one",
            self.column,
            names.len(),
            arguments.len(),
            self.arguments
        );
        let instruction = |(name, arguments): (&Value, &Value)| {
            let instruction = Instruction::new(name, arguments);
            instruction.with_context(|| format!("column {:?}: {name}", self.column))
        };
        names.iter().zip(arguments).map(instruction).collect()
    }

    /// Returns the score for `completion`, from 0 to 1.
    pub fn compute(&self, completion: &str, columns: &Value) -> Result<f32> {
        let instructions = self.expected(columns)?;
        let followed = instructions
            .iter()
            .filter(|instruction| instruction.is_followed(completion))
            .count();
        Ok(if self.share {
            followed as f32 / instructions.len() as f32
        } else {
            f32::from(followed == instructions.len())
        })
    }
}

impl RewardFunction for InstructionsReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        let score = |sample: &Sample| Ok(self.compute(sample.completion, sample.columns)?.into());
        samples.iter().map(score).collect()
    }
}

compares_column!(InstructionsReward, |_| Ok(()));

/// An IFEval instruction with its arguments.
///
/// Text arguments ignore case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "instruction")]
pub enum Instruction {
    /// Has all keywords.
    #[serde(rename = "keywords:existence")]
    Keywords {
        /// The keywords.
        keywords: Vec<String>,
    },
    /// Has a keyword fewer than, or at least, n times.
    #[serde(rename = "keywords:frequency")]
    KeywordFrequency {
        /// The keyword.
        keyword: String,
        /// The bound.
        frequency: usize,
        /// Its kind.
        relation: Relation,
    },
    /// Has none of these words.
    #[serde(rename = "keywords:forbidden_words")]
    ForbiddenWords {
        /// The words.
        forbidden_words: Vec<String>,
    },
    /// Has a letter fewer than, or at least, n times.
    #[serde(rename = "keywords:letter_frequency")]
    LetterFrequency {
        /// The letter.
        letter: char,
        /// The bound.
        let_frequency: usize,
        /// Its kind.
        let_relation: Relation,
    },
    /// Is in a language.
    #[serde(rename = "language:response_language")]
    Language {
        /// Language code (ISO 639-1), such as `de`.
        language: String,
    },
    /// Has fewer than, or at least, n sentences.
    #[serde(rename = "length_constraints:number_sentences")]
    Sentences {
        /// The bound.
        num_sentences: usize,
        /// Its kind.
        relation: Relation,
    },
    /// Has n paragraphs, separated by `***`.
    #[serde(rename = "length_constraints:number_paragraphs")]
    Paragraphs {
        /// The number.
        num_paragraphs: usize,
    },
    /// Has fewer than, or at least, n words.
    #[serde(rename = "length_constraints:number_words")]
    Words {
        /// The bound.
        num_words: usize,
        /// Its kind.
        relation: Relation,
    },
    /// Has n paragraphs, separated by blank lines, and one begins with a word.
    #[serde(rename = "length_constraints:nth_paragraph_first_word")]
    FirstWord {
        /// The number of paragraphs.
        num_paragraphs: usize,
        /// The paragraph's number, from 1.
        nth_paragraph: usize,
        /// The word.
        first_word: String,
    },
    /// Has at least n placeholders such as `[name]`.
    #[serde(rename = "detectable_content:number_placeholders")]
    Placeholders {
        /// The number.
        num_placeholders: usize,
    },
    /// Has a postscript.
    #[serde(rename = "detectable_content:postscript")]
    Postscript {
        /// Its beginning, such as `P.S.`
        postscript_marker: String,
    },
    /// Has n bullet-list lines.
    #[serde(rename = "detectable_format:number_bullet_lists")]
    Bullets {
        /// The number.
        num_bullets: usize,
    },
    /// Has `My answer is yes.`, `My answer is no.` or `My answer is maybe.`
    #[serde(rename = "detectable_format:constrained_response")]
    ConstrainedResponse {},
    /// Has at least n parts between asterisks.
    #[serde(rename = "detectable_format:number_highlighted_sections")]
    Highlights {
        /// The number.
        num_highlights: usize,
    },
    /// Has at least n numbered sections.
    #[serde(rename = "detectable_format:multiple_sections")]
    Sections {
        /// The word before a section's number. The data set spells the name this way.
        section_spliter: String,
        /// The number.
        num_sections: usize,
    },
    /// Is JSON, possibly in a fenced Markdown block.
    #[serde(rename = "detectable_format:json_format")]
    Json {},
    /// Has a title in double angle brackets.
    #[serde(rename = "detectable_format:title")]
    Title {},
    /// Has two different answers, separated by six asterisks.
    #[serde(rename = "combination:two_responses")]
    TwoResponses {},
    /// Begins with the request.
    #[serde(rename = "combination:repeat_prompt")]
    RepeatPrompt {
        /// The request.
        prompt_to_repeat: String,
    },
    /// Ends with a phrase.
    #[serde(rename = "startend:end_checker")]
    Ending {
        /// The phrase.
        end_phrase: String,
    },
    /// Is in double quotation marks.
    #[serde(rename = "startend:quotation")]
    Quotation {},
    /// Has fewer than, or at least, n words in capital letters.
    #[serde(rename = "change_case:capital_word_frequency")]
    CapitalWords {
        /// The bound.
        capital_frequency: usize,
        /// Its kind.
        capital_relation: Relation,
    },
    /// Is English, in capital letters.
    #[serde(rename = "change_case:english_capital")]
    EnglishCapital {},
    /// Is English, in small letters.
    #[serde(rename = "change_case:english_lowercase")]
    EnglishLowercase {},
    /// Has no comma.
    #[serde(rename = "punctuation:no_comma")]
    NoComma {},
}

/// Bound on a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Relation {
    /// The count is smaller.
    #[serde(rename = "less than")]
    LessThan,
    /// The count is equal or larger.
    #[serde(rename = "at least")]
    AtLeast,
}

impl Instruction {
    fn new(name: &Value, arguments: &Value) -> Result<Self> {
        let arguments = arguments.as_object().context("arguments: not an object")?;
        let given = arguments.iter().filter(|(_, value)| !value.is_null());
        let mut all: Map<String, Value> = given
            .map(|(key, value)| (key.clone(), whole_number(value)))
            .collect();
        all.insert("instruction".to_owned(), name.clone());
        let instruction: Self = serde_json::from_value(Value::Object(all))?;
        instruction.validate()?;
        Ok(instruction)
    }
}

/// Converts a number such as 3.0, as pandas writes it, to an integer.
fn whole_number(value: &Value) -> Value {
    match value.as_f64() {
        Some(number) if number.fract() == 0. && (0. ..1e15).contains(&number) => {
            Value::from(number as u64)
        }
        _ => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn follows(name: &str, arguments: Value, text: &str) -> bool {
        let row = json!({"instruction_id_list": [name], "kwargs": [arguments]});
        InstructionsReward::default().compute(text, &row).unwrap() == 1.
    }

    #[rstest]
    #[case("keywords:existence", json!({"keywords": ["Sun", "sea"]}), "the SEA and the sun", "sunny")]
    #[case(
        "keywords:frequency",
        json!({"keyword": "ha", "frequency": 2, "relation": "at least"}),
        "Ha, ha!",
        "ha"
    )]
    #[case(
        "keywords:frequency",
        json!({"keyword": "ha", "frequency": 2.0, "relation": "less than"}),
        "ha",
        "haha"
    )]
    #[case("keywords:forbidden_words", json!({"forbidden_words": ["cat"]}), "a category", "A Cat.")]
    #[case(
        "keywords:letter_frequency",
        json!({"letter": "E", "let_frequency": 3, "let_relation": "at least"}),
        "Eeyore",
        "ease, no"
    )]
    #[case(
        "language:response_language",
        json!({"language": "de"}),
        "Der Regen fällt auf die Dächer der kleinen Stadt.",
        "The rain falls on the roofs of the small town."
    )]
    #[case(
        "length_constraints:number_sentences",
        json!({"num_sentences": 3, "relation": "less than"}),
        "One is here. Two is there!",
        "One. Two! Three? Four."
    )]
    #[case(
        "length_constraints:number_paragraphs",
        json!({"num_paragraphs": 2}),
        "one\n***\ntwo",
        "one\n\ntwo"
    )]
    #[case(
        "length_constraints:number_words",
        json!({"num_words": 3, "relation": "at least"}),
        "one, two - three",
        "one two"
    )]
    #[case(
        "length_constraints:nth_paragraph_first_word",
        json!({"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "rain"}),
        "Sun.\n\n\"Rain, again\"",
        "Rain.\n\nSun"
    )]
    #[case(
        "detectable_content:number_placeholders",
        json!({"num_placeholders": 2}),
        "[name], [street]",
        "[name"
    )]
    #[case(
        "detectable_content:postscript",
        json!({"postscript_marker": "P.P.S"}),
        "Bye\nP. P. S more",
        "P.S. more"
    )]
    #[case(
        "detectable_content:postscript",
        json!({"postscript_marker": "P.S."}),
        "Bye\np.s. more",
        "Bye"
    )]
    #[case(
        "detectable_format:number_bullet_lists",
        json!({"num_bullets": 2}),
        "* one\n - two\n**three**",
        "* one"
    )]
    #[case("detectable_format:constrained_response", json!({}), "My answer is no.", "My answer: no")]
    #[case(
        "detectable_format:number_highlighted_sections",
        json!({"num_highlights": 2}),
        "*one* and **two**",
        "*one* and ** **"
    )]
    #[case(
        "detectable_format:multiple_sections",
        json!({"section_spliter": "Section", "num_sections": 2}),
        "Section 1\na\nSection 2\nb",
        "Section 1\na\nSection b"
    )]
    #[case("detectable_format:json_format", json!({}), "```json\n[1]\n```", "[1")]
    #[case("detectable_format:title", json!({}), "<<Rain>>\nfalls", "<< >>")]
    #[case("combination:two_responses", json!({}), "one\n******\ntwo", "one\n******\none")]
    #[case(
        "combination:repeat_prompt",
        json!({"prompt_to_repeat": "Say it."}),
        "  say it. Rain.",
        "Rain. Say it."
    )]
    #[case(
        "startend:end_checker",
        json!({"end_phrase": "The end."}),
        "\"So. the end.\" ",
        "The end. No."
    )]
    #[case("startend:quotation", json!({}), " \"rain\" ", "\"")]
    #[case(
        "change_case:capital_word_frequency",
        json!({"capital_frequency": 2, "capital_relation": "less than"}),
        "RAIN falls",
        "RAIN FALLS"
    )]
    #[case(
        "change_case:english_capital",
        json!({}),
        "THE RAIN FALLS ON THE ROOFS OF THE TOWN.",
        "THE RAIN FALLS on the roofs of the town."
    )]
    #[case(
        "change_case:english_lowercase",
        json!({}),
        "the rain falls on the roofs of the town.",
        "The rain falls on the roofs of the town."
    )]
    #[case("punctuation:no_comma", json!({}), "rain; sun", "rain, sun")]
    fn each_instruction_is_followed_or_not(
        #[case] name: &str,
        #[case] arguments: Value,
        #[case] right: &str,
        #[case] wrong: &str,
    ) {
        assert!(follows(name, arguments.clone(), right), "{right}");
        assert!(!follows(name, arguments.clone(), wrong), "{wrong}");
        // Nulls, as in table columns.
        let mut wide = arguments;
        wide["end_word"] = Value::Null;
        assert!(follows(name, wide, right), "{right}");
    }

    #[test]
    fn a_row_that_is_not_valid_is_an_error() {
        let reward = InstructionsReward::default();
        let row = |name: Value, arguments: Value| json!({"instruction_id_list": [name], "kwargs": arguments});
        for (row, words) in [
            (
                row(json!("no:such"), json!([{}])),
                "unknown variant `no:such`",
            ),
            (
                row(json!("keywords:existence"), json!([{}])),
                "missing field `keywords`",
            ),
            (
                row(
                    json!("language:response_language"),
                    json!([{"language": "xx"}]),
                ),
                "language: \"xx\", must be one of",
            ),
            (
                row(json!("punctuation:no_comma"), json!([])),
                "1 instructions and 0",
            ),
            (
                row(json!("punctuation:no_comma"), json!([7])),
                "not an object",
            ),
            (json!({"instruction_id_list": []}), "\"kwargs\": absent"),
        ] {
            let error = format!("{:#}", reward.expected(&row).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn hostile_texts_end() {
        let text = "*[<<\"P.S.".repeat(100_000);
        for (name, arguments) in [
            (
                "detectable_format:number_highlighted_sections",
                json!({"num_highlights": 2}),
            ),
            (
                "detectable_content:number_placeholders",
                json!({"num_placeholders": 2}),
            ),
            ("detectable_format:title", json!({})),
            (
                "detectable_content:postscript",
                json!({"postscript_marker": "P.S."}),
            ),
            ("detectable_format:json_format", json!({})),
        ] {
            follows(name, arguments, &text);
        }
        assert!(!follows(
            "detectable_format:json_format",
            json!({}),
            &"[".repeat(1_000_000)
        ));
    }
}

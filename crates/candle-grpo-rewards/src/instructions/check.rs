//! The check for each instruction.

use anyhow::Result;
use candle_grpo_core::validate;
use regex::{Regex, RegexBuilder, escape};
use serde_json::Value;

use super::text::{is_in_language, is_lower, is_upper, languages, sentences, words};
use super::{Instruction, Relation};

const CONSTRAINED: [&str; 3] = [
    "My answer is yes.",
    "My answer is no.",
    "My answer is maybe.",
];

impl Relation {
    fn holds(self, count: usize, bound: usize) -> bool {
        match self {
            Self::LessThan => count < bound,
            Self::AtLeast => count >= bound,
        }
    }
}

impl Instruction {
    pub(super) fn validate(&self) -> Result<()> {
        if let Self::Language { language } = self {
            let all: Vec<&str> = languages().collect();
            validate::check(
                all.contains(&language.as_str()),
                "language",
                format_args!("{language:?}"),
                &format!("be one of {}", all.join(", ")),
            )?;
        }
        Ok(())
    }

    /// Returns whether a text follows the instruction.
    pub fn is_followed(&self, text: &str) -> bool {
        match self {
            Self::Keywords { keywords } => {
                let text = text.to_lowercase();
                let mut keywords = keywords.iter();
                keywords.all(|keyword| text.contains(&keyword.to_lowercase()))
            }
            Self::KeywordFrequency {
                keyword,
                frequency,
                relation,
            } => {
                let text = text.to_lowercase();
                let count = text.matches(&keyword.to_lowercase()).count();
                relation.holds(count, *frequency)
            }
            Self::ForbiddenWords { forbidden_words } => {
                let mut forbidden = forbidden_words.iter();
                forbidden.all(|word| count(text, &format!(r"\b{}\b", escape(word))) == 0)
            }
            Self::LetterFrequency {
                letter,
                let_frequency,
                let_relation,
            } => {
                let (text, letter) = (text.to_lowercase(), letter.to_lowercase().to_string());
                let_relation.holds(text.matches(&letter).count(), *let_frequency)
            }
            Self::Language { language } => is_in_language(text, language),
            Self::Sentences {
                num_sentences,
                relation,
            } => relation.holds(sentences(text), *num_sentences),
            Self::Paragraphs { num_paragraphs } => {
                let parts: Vec<&str> = text.split("***").map(str::trim).collect();
                filled_between_ends(&parts) == Some(*num_paragraphs)
            }
            Self::Words {
                num_words,
                relation,
            } => relation.holds(words(text).count(), *num_words),
            Self::FirstWord {
                num_paragraphs,
                nth_paragraph,
                first_word,
            } => {
                let parts: Vec<&str> = text.split("\n\n").map(str::trim).collect();
                let filled = parts.iter().filter(|part| !part.is_empty()).count();
                let nth = nth_paragraph.checked_sub(1).and_then(|at| parts.get(at));
                let first = nth.and_then(|part| plain_first_word(part));
                filled == *num_paragraphs && first == Some(first_word.to_lowercase())
            }
            Self::Placeholders { num_placeholders } => count(text, r"\[.*?\]") >= *num_placeholders,
            Self::Postscript { postscript_marker } => {
                count(text, &postscript_pattern(postscript_marker)) > 0
            }
            Self::Bullets { num_bullets } => {
                count(text, r"^\s*\*[^*].*$") + count(text, r"^\s*-.*$") == *num_bullets
            }
            Self::ConstrainedResponse {} => CONSTRAINED.iter().any(|answer| text.contains(answer)),
            Self::Highlights { num_highlights } => {
                let filled = |pattern| count_filled(text, pattern, &['*', ' ']);
                filled(r"\*[^\n*]*\*") + filled(r"\*\*[^\n*]*\*\*") >= *num_highlights
            }
            Self::Sections {
                section_spliter,
                num_sections,
            } => {
                let pattern = format!(r"\s?(?-i:{})\s?\d+\s?", escape(section_spliter));
                count(text, &pattern) >= *num_sections
            }
            Self::Json {} => serde_json::from_str::<Value>(without_fences(text)).is_ok(),
            Self::Title {} => count_filled(text, r"<<[^\n]+>>", &['<', '>', ' ']) > 0,
            Self::TwoResponses {} => has_two_responses(text),
            Self::RepeatPrompt { prompt_to_repeat } => {
                let request = prompt_to_repeat.trim().to_lowercase();
                text.trim().to_lowercase().starts_with(&request)
            }
            Self::Ending { end_phrase } => {
                let text = text.trim().trim_matches('"').to_lowercase();
                text.ends_with(&end_phrase.trim().to_lowercase())
            }
            Self::Quotation {} => {
                let text = text.trim();
                text.len() > 1 && text.starts_with('"') && text.ends_with('"')
            }
            Self::CapitalWords {
                capital_frequency,
                capital_relation,
            } => {
                let capitals = words(text).filter(|word| is_upper(word)).count();
                capital_relation.holds(capitals, *capital_frequency)
            }
            Self::EnglishCapital {} => is_upper(text) && is_in_language(text, "en"),
            Self::EnglishLowercase {} => is_lower(text) && is_in_language(text, "en"),
            Self::NoComma {} => !text.contains(','),
        }
    }
}

/// Returns a text's first word in lower case, without quotation marks, up to a punctuation mark.
fn plain_first_word(text: &str) -> Option<String> {
    let word = text.split_whitespace().next()?;
    let word = word.trim_start_matches(['\'', '"']).to_lowercase();
    let end = word.find(['.', ',', '?', '!', '\'', '"']);
    Some(word[..end.unwrap_or(word.len())].to_owned())
}

/// Returns the pattern for a postscript marker.
fn postscript_pattern(marker: &str) -> String {
    match marker.trim_end_matches('.') {
        "P.P.S" => r"p\.\s?p\.\s?s".to_owned(),
        "P.S" => r"p\.\s?s\.".to_owned(),
        _ => escape(marker),
    }
}

fn has_two_responses(text: &str) -> bool {
    let parts: Vec<&str> = text.split("******").map(str::trim).collect();
    let mut filled = parts.iter().filter(|part| !part.is_empty());
    filled_between_ends(&parts) == Some(2) && filled.next() != filled.next()
}

/// Returns a text without the fences of a code block around it.
fn without_fences(text: &str) -> &str {
    let text = text.trim();
    let fences = ["```json", "```Json", "```JSON", "```"];
    let inside = fences.iter().find_map(|fence| text.strip_prefix(fence));
    let inside = inside.unwrap_or(text);
    inside.strip_suffix("```").unwrap_or(inside).trim()
}

/// Counts the parts with text, if all between the first and the last have some.
fn filled_between_ends(parts: &[&str]) -> Option<usize> {
    let is_end = |place: usize| place == 0 || place + 1 == parts.len();
    let mut places = parts.iter().enumerate();
    places
        .all(|(place, part)| !part.is_empty() || is_end(place))
        .then(|| parts.iter().filter(|part| !part.is_empty()).count())
}

/// Counts a pattern's matches, ignoring case. `^` and `$` match at each line.
fn count(text: &str, pattern: &str) -> usize {
    regex(pattern).map_or(0, |regex| regex.find_iter(text).count())
}

/// Counts a pattern's matches that contain more than `marks`.
fn count_filled(text: &str, pattern: &str, marks: &[char]) -> usize {
    let found = regex(pattern);
    let found = found.iter().flat_map(|regex| regex.find_iter(text));
    found
        .filter(|part| !part.as_str().trim_matches(marks).is_empty())
        .count()
}

fn regex(pattern: &str) -> Option<Regex> {
    let mut builder = RegexBuilder::new(pattern);
    builder.case_insensitive(true).multi_line(true).build().ok()
}

//! The score in a judge's reply.

use std::collections::BTreeMap;

use anyhow::Result;
use candle_grpo_core::Invalid;
use candle_grpo_core::validate::{check, finite};
use regex::Regex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::json::inside_fence;
use crate::number::whole;
use crate::pattern::compile;

/// Where the score is in a reply: set either `regex` or `json`, or `words` alone.
///
/// A verdict in words is the most robust choice for small judges.
///
/// ```
/// use candle_grpo_rewards::JudgeScore;
///
/// let score: JudgeScore = serde_json::from_str(r#"{"regex": "Score: (\\d+)", "scale": [1, 5]}"#)?;
/// let reader = score.reader()?;
/// assert_eq!(reader.read("Score: 1? No. Score: 4"), Some(0.75));
/// assert_eq!(reader.read("Score: 9"), None);
///
/// let verdict: JudgeScore = serde_json::from_str(r#"{"words": {"yes": 1, "no": 0}}"#)?;
/// assert_eq!(verdict.reader()?.read("No doubt: YES."), Some(1.));
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct JudgeScore {
    /// Regular expression whose first group is the score. The last match counts.
    pub regex: Option<String>,
    /// Key in a JSON object in the reply, or the path to a value, such as `/scores/0`. The last
    /// object counts.
    pub json: Option<String>,
    /// Scores for verdicts in words, such as `{yes: 1, no: 0}`. Case does not matter. Without
    /// `regex` and `json`, the last of these words in the reply counts.
    pub words: BTreeMap<String, f64>,
    /// Two numbers that map linearly to 0 and 1, such as `[1, 10]`. A number outside them is not a
    /// score. Scores from `words` stay as they are. Absent: numbers stay as they are.
    pub scale: Option<[f64; 2]>,
}

/// Reads scores in replies, see [`JudgeScore::reader`].
#[derive(Debug, Clone)]
pub struct ScoreReader {
    place: Place,
    /// In lower case.
    words: BTreeMap<String, f64>,
    scale: Option<[f64; 2]>,
}

#[derive(Debug, Clone)]
enum Place {
    Group(Regex),
    Json(String),
    Words(Regex),
}

impl JudgeScore {
    /// Creates a reader.
    ///
    /// # Errors
    ///
    /// Fails if there is no place or more than one, the regular expression is invalid or has no
    /// group, a word is empty or repeated, or a number is not finite.
    pub fn reader(&self) -> Result<ScoreReader> {
        let mut words = BTreeMap::new();
        for (word, &score) in &self.words {
            let field = format!("words.{word}");
            check(
                !word.trim().is_empty(),
                "words",
                "an empty word",
                "be words",
            )?;
            let valid = (score as f32).is_finite();
            check(valid, &field, score, "be a finite f32")?;
            let known = words.insert(word.trim().to_lowercase(), score);
            check(known.is_none(), &field, score, "be given once")?;
        }
        if let Some([low, high]) = self.scale {
            finite("scale[0]", low)?;
            finite("scale[1]", high)?;
            let valid = low != high && (high - low).is_finite();
            check(
                valid,
                "scale",
                format_args!("[{low}, {high}]"),
                "be two numbers",
            )?;
        }
        let place = match (&self.regex, &self.json) {
            (Some(pattern), None) => {
                let within = |error: Invalid| Invalid {
                    field: "regex".to_owned(),
                    ..error
                };
                let regex = compile(pattern).map_err(within)?;
                let must = "have a group in parentheses, which is the score";
                let value = format_args!("{pattern:?}");
                check(regex.captures_len() > 1, "regex", value, must)?;
                Place::Group(regex)
            }
            (None, Some(key)) => Place::Json(key.clone()),
            (None, None) if !words.is_empty() => Place::Words(any_of(words.keys())?),
            (regex, _) => {
                let given = match regex {
                    Some(_) => "regex and json",
                    None => "nothing",
                };
                check(false, "score", given, "be regex, json or words")?;
                Place::Json(String::new())
            }
        };
        Ok(ScoreReader {
            place,
            words,
            scale: self.scale,
        })
    }
}

/// Returns a regular expression for whole words. At each place, the longest word wins.
fn any_of<'a>(words: impl Iterator<Item = &'a String>) -> Result<Regex> {
    let mut words: Vec<&String> = words.collect();
    words.sort_by_key(|word| std::cmp::Reverse(word.len()));
    let whole = |word: &&String| {
        let boundary = |end: Option<char>| match end {
            Some(c) if c.is_alphanumeric() || c == '_' => r"\b",
            _ => "",
        };
        let (first, last) = (word.chars().next(), word.chars().next_back());
        let text = regex::escape(word);
        format!("{}{text}{}", boundary(first), boundary(last))
    };
    let words: Vec<String> = words.iter().map(whole).collect();
    Ok(compile(&format!("(?i){}", words.join("|")))?)
}

impl ScoreReader {
    /// Returns the score in a reply, or `None` if there is none.
    pub fn read(&self, reply: &str) -> Option<f32> {
        let score = match &self.place {
            Place::Group(regex) => {
                let groups = regex.captures_iter(reply);
                let last = groups.filter_map(|groups| groups.get(1)).last()?;
                self.of_text(last.as_str())?
            }
            Place::Words(regex) => self.of_text(regex.find_iter(reply).last()?.as_str())?,
            Place::Json(path) => match value_at(&last_object(reply)?, path)? {
                Value::Number(number) => self.scaled(number.as_f64()?)?,
                Value::String(text) => self.of_text(text)?,
                value @ Value::Bool(_) => self.of_word(&value.to_string())?,
                _ => return None,
            },
        };
        let score = score as f32;
        score.is_finite().then_some(score)
    }

    fn of_text(&self, text: &str) -> Option<f64> {
        let number = || self.scaled(whole(text)?);
        self.of_word(text).or_else(number)
    }

    fn of_word(&self, text: &str) -> Option<f64> {
        self.words.get(&text.trim().to_lowercase()).copied()
    }

    fn scaled(&self, number: f64) -> Option<f64> {
        let Some([low, high]) = self.scale else {
            return Some(number);
        };
        let inside = (low.min(high)..=low.max(high)).contains(&number);
        inside.then(|| (number - low) / (high - low))
    }
}

fn value_at<'a>(object: &'a Value, path: &str) -> Option<&'a Value> {
    if path.starts_with('/') {
        object.pointer(path)
    } else {
        object.get(path)
    }
}

/// Returns the JSON object that is all of `text`, or else the last one in it.
fn last_object(text: &str) -> Option<Value> {
    if let Ok(object @ Value::Object(_)) = serde_json::from_str(inside_fence(text)) {
        return Some(object);
    }
    let mut last = None;
    let mut at = 0;
    while let Some(start) = text[at..].find('{') {
        at += start;
        let mut values = serde_json::Deserializer::from_str(&text[at..]).into_iter::<Value>();
        match values.next() {
            Some(Ok(object)) => {
                at += values.byte_offset();
                last = Some(object);
            }
            _ => at += 1,
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;
    use serde_json::json;

    fn reader(options: Value) -> Result<ScoreReader> {
        serde_json::from_value::<JudgeScore>(options)?.reader()
    }

    #[rstest]
    #[case(json!({"regex": r"Score: (\S+)"}), "Score: 3, then Score: 4.5", Some(4.5))]
    #[case(json!({"regex": r"Score: (\S+)"}), "score: 3", None)]
    #[case(json!({"regex": r"Score: (\S+)"}), "Score: four", None)]
    #[case(json!({"regex": r"(\d+)/10"}), "7/10", Some(7.))]
    #[case(json!({"regex": r"(\d+)"}), "٣", None)]
    #[case(json!({"regex": r"(\d+)"}), "4 ٣", None)]
    #[case(json!({"regex": r"A(\d)?"}), "A7 A", Some(7.))]
    #[case(json!({"regex": r"(-?[\d,.]+)"}), "-1,200.5", Some(-1200.5))]
    #[case(json!({"regex": r"(\S+)", "scale": [1, 5]}), "2", Some(0.25))]
    #[case(json!({"regex": r"(\S+)", "scale": [1, 5]}), "5.5", None)]
    #[case(json!({"regex": r"(\S+)", "scale": [1, 5]}), "0", None)]
    #[case(json!({"regex": r"(\S+)", "scale": [5, 1]}), "5", Some(0.))]
    #[case(json!({"regex": r"(\S+)"}), "1e999", None)]
    #[case(json!({"regex": r"(\S+)"}), "1e39", None)]
    #[case(json!({"regex": r"(\S+)"}), "nan", None)]
    #[case(json!({"regex": r"(\S+)"}), "inf", None)]
    #[case(json!({"regex": r"is (.+)\.", "words": {"right": 1, "wrong": -1}}), "It is WRONG.", Some(-1.))]
    #[case(json!({"regex": r"is (.+)\.", "words": {"right": 1}}), "It is 3.", Some(3.))]
    #[case(json!({"words": {"yes": 1, "no": 0}}), "yes and no", Some(0.))]
    #[case(json!({"words": {"yes": 1, "no": 0}}), "Yes. I know, nobody objects.", Some(1.))]
    #[case(json!({"words": {"yes": 1, "no": 0}}), "not at all", None)]
    #[case(json!({"words": {"good": 1, "not good": 0}}), "not good", Some(0.))]
    #[case(json!({"words": {"[[A]]": 1, "[[B]]": 0}}), "Better is [[a]]", Some(1.))]
    #[case(json!({"words": {"sì": 1}}), "SÌ", Some(1.))]
    #[case(json!({"words": {"5": 3}, "scale": [0, 1]}), "5", Some(3.))]
    #[case(json!({"json": "score"}), r#"{"score": 4}"#, Some(4.))]
    #[case(json!({"json": "score", "scale": [0, 8]}), "```json\n{\"score\": \"4\"}\n```", Some(0.5))]
    #[case(json!({"json": "score"}), r#"First {"score": 1}, then {"why": {"score": 2}, "score": 3}."#, Some(3.))]
    #[case(json!({"json": "score"}), r#"{"score": 1} {"why": 2}"#, None)]
    #[case(json!({"json": "/scores/1"}), r#"{"scores": [1, 2]}"#, Some(2.))]
    #[case(json!({"json": "ok", "words": {"true": 1, "false": 0}}), r#"{"ok": true}"#, Some(1.))]
    #[case(json!({"json": "ok"}), r#"{"ok": true}"#, None)]
    #[case(json!({"json": "ok"}), r#"{"ok": null}"#, None)]
    #[case(json!({"json": "ok"}), r#"{"ok": 1e999}"#, None)]
    #[case(json!({"json": "ok"}), r#"{"ok": 1"#, None)]
    #[case(json!({"json": "ok"}), "", None)]
    fn a_score_is_read_at_its_place(
        #[case] options: Value,
        #[case] reply: &str,
        #[case] expected: Option<f32>,
    ) {
        assert_eq!(reader(options).unwrap().read(reply), expected);
    }

    #[rstest]
    #[case(json!({}), "score: nothing, must be regex, json or words")]
    #[case(json!({"regex": "(a)", "json": "a"}), "score: regex and json, must be")]
    #[case(json!({"regex": "a"}), r#"regex: "a", must have a group"#)]
    #[case(json!({"regex": "(a"}), r#"regex: "(a", must be a regular expression; character 1"#)]
    #[case(json!({"words": {" ": 1}}), "words: an empty word")]
    #[case(json!({"words": {"Yes": 1, "yes": 1}}), "words.yes: 1, must be given once")]
    #[case(json!({"words": {"yes": 1e39}}), "words.yes: 1")]
    #[case(json!({"json": "a", "scale": [1, 1]}), "scale: [1, 1], must be two numbers")]
    fn options_that_are_not_valid_are_named(#[case] options: Value, #[case] words: &str) {
        let error = reader(options).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }

    #[test]
    fn long_replies_take_linear_time() {
        let digits = "1".repeat(4 << 20);
        assert_eq!(
            reader(json!({"regex": r"(\d+)"})).unwrap().read(&digits),
            None
        );
        let json = reader(json!({"json": "a"})).unwrap();
        for hostile in ["{", "{\"", "{\"a\":[", "{\"a\":{", "{\"x"] {
            assert_eq!(json.read(&hostile.repeat((1 << 20) / hostile.len())), None);
        }
    }

    proptest! {
        #[test]
        fn no_reply_makes_the_reader_panic(reply in ".*", tail in "[{}\":,0-9a]*") {
            let reply = format!("{reply}{tail}");
            for options in [
                json!({"regex": r"(?s)(.+)", "scale": [0, 1]}),
                json!({"json": "a"}),
                json!({"words": {"yes": 1, "a": 0}}),
            ] {
                if let Some(score) = reader(options).unwrap().read(&reply) {
                    prop_assert!(score.is_finite());
                }
            }
        }
    }
}

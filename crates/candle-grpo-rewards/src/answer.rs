//! Where a completion's answer is.

use std::sync::LazyLock;

use regex::Regex;
use serde::de::{Deserializer, Error};
use serde::{Deserialize, Serialize};

/// Where a completion's answer is.
///
/// Start with `Auto`. If your prompt asks for a form, such as a tag, name that place: text
/// elsewhere then scores nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AnswerPlace {
    /// The first place that exists: the last `\boxed{}`, the text after the last `####`, or the
    /// whole completion. If the last `\boxed{` is not closed, as in a truncated completion, there
    /// is no answer.
    #[default]
    Auto,
    /// Inside the last `\boxed{}`.
    Boxed,
    /// After the last occurrence of this text, such as `####` (GSM8K) or `The answer is`, up to the
    /// end of its line.
    After(String),
    /// Between the last `<name>` and the `</name>` after it.
    Tag(String),
    /// On the first nonempty line.
    FirstLine,
    /// On the last nonempty line.
    LastLine,
    /// The whole completion.
    Whole,
    /// At another place, searched in the text after the last `</think>`, such as
    /// `{after_thinking: boxed}`. If there is no `</think>`, or a `<think>` after it, the model is
    /// still thinking and there is no answer.
    #[serde(deserialize_with = "place_after_thinking")]
    AfterThinking(Box<AnswerPlace>),
}

fn place_after_thinking<'de, D: Deserializer<'de>>(place: D) -> Result<Box<AnswerPlace>, D::Error> {
    match Box::deserialize(place)? {
        place if matches!(*place, AnswerPlace::AfterThinking(_)) => Err(D::Error::custom(
            "after_thinking: given in after_thinking, must be another place",
        )),
        place => Ok(place),
    }
}

/// Returns the text after a model's thoughts, which may have begun in the prompt.
fn after_thoughts(text: &str) -> Option<&str> {
    let (_, rest) = text.rsplit_once("</think>")?;
    (!rest.contains("<think>")).then_some(rest)
}

impl AnswerPlace {
    /// Returns the answer in `text`, trimmed, or `None` if there is no such place.
    ///
    /// ```
    /// use candle_grpo_rewards::AnswerPlace;
    ///
    /// assert_eq!(AnswerPlace::Auto.find(r"so \boxed{\frac{1}{2}}."), Some(r"\frac{1}{2}"));
    /// assert_eq!(AnswerPlace::Auto.find("6 * 7\n#### 42\n"), Some("42"));
    /// assert_eq!(AnswerPlace::Tag("answer".into()).find("42"), None);
    /// ```
    pub fn find<'a>(&self, text: &'a str) -> Option<&'a str> {
        let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
        match self {
            Self::Auto if boxes(text).next().is_some() => boxed(text),
            Self::Auto => match marked(text) {
                Some(Marked::Line("")) => None,
                Some(Marked::Line(answer) | Marked::Section(answer)) => Some(answer),
                None => Some(text.trim()),
            },
            Self::Boxed => boxed(text),
            Self::After(mark) => after(text, mark),
            Self::Tag(name) => {
                let opening = format!("<{name}>");
                // The text ends inside the next answer's tag, so that answer is unknown.
                let is_cut = |end: usize| {
                    let begun = opening.get(..end);
                    begun.is_some_and(|begun| text.trim_end().ends_with(begun))
                };
                if (2..opening.len()).any(is_cut) {
                    return None;
                }
                let (_, inside) = text.rsplit_once(&opening)?;
                let (inside, _) = inside.split_once(&format!("</{name}>"))?;
                Some(inside.trim())
            }
            Self::FirstLine => lines().next(),
            Self::LastLine => lines().next_back(),
            Self::Whole => Some(text.trim()),
            Self::AfterThinking(place) => place.find(after_thoughts(text)?),
        }
    }

    /// Returns the place without its thoughts, and the text to search, or `None` if the model is
    /// still thinking.
    pub(super) fn without_thoughts<'a>(&self, text: &'a str) -> Option<(&Self, &'a str)> {
        match self {
            Self::AfterThinking(place) => place.without_thoughts(after_thoughts(text)?),
            place => Some((place, text)),
        }
    }

    /// Returns true if the last number at this place in `text` counts, as in a chain of thought,
    /// and false if the first one does, as on a line.
    pub(super) fn counts_last_number(&self, text: &str) -> bool {
        match self {
            Self::FirstLine | Self::After(_) => false,
            Self::Auto => {
                boxes(text).next().is_some() || !matches!(marked(text), Some(Marked::Line(_)))
            }
            _ => true,
        }
    }
}

/// The text after the last `####`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Marked<'a> {
    /// The rest of its line, or the next one.
    Line(&'a str),
    /// The text under a heading, such as `#### Final Answer` or `#### Step 2: add`.
    Section(&'a str),
}

/// Returns the text after the last `####` that has text after it, or `None` without `####`.
pub(super) fn marked(text: &str) -> Option<Marked<'_>> {
    static HEADING: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let number = r"[*_]*(?:[0-9]{1,2}[.)]\s+)?[*_]*";
        let part = r"(?:step|part|case)\s+[0-9]+\b";
        let answer = r"(?:the\s+)?(?:final\s+|correct\s+)?(?:answer|solution|result|conclusion|summary)s?[*_:.\s]*$";
        Regex::new(&format!("(?i)^{number}(?:{part}|{answer})")).ok()
    });
    let (mut before, mut after) = text.rsplit_once("####")?;
    while after.trim().is_empty()
        && let Some((earlier, marked)) = before.rsplit_once("####")
    {
        (before, after) = (earlier, marked);
    }
    let (line, rest) = match after.trim().split_once('\n') {
        Some((line, rest)) => (line.trim_end(), rest.trim()),
        None => (after.trim(), ""),
    };
    let is_heading = HEADING.as_ref()?.is_match(line);
    Some(if is_heading && !rest.is_empty() {
        Marked::Section(rest)
    } else {
        Marked::Line(line)
    })
}

fn after<'a>(text: &'a str, mark: &str) -> Option<&'a str> {
    let (_, rest) = text.rsplit_once(mark)?;
    Some(rest.split('\n').next().unwrap_or(rest).trim())
}

/// Returns the text inside the last box.
fn boxed(text: &str) -> Option<&str> {
    let last = boxes(text).next()?;
    Some(last.inside(text.len())?.trim())
}

/// The start of `\boxed{}`, `\fbox{}`, or a number without braces, as in `\boxed 8`.
#[derive(Debug, Clone, Copy)]
pub(super) struct OpenBox<'a> {
    /// Position where its command starts.
    #[cfg_attr(not(feature = "math"), expect(dead_code, reason = "for sets of boxes"))]
    pub(super) start: usize,
    /// The text from its content on, which is empty if the text ends earlier.
    pub(super) rest: &'a str,
    /// Content length in bytes, for content without braces.
    bare: Option<usize>,
}

impl<'a> OpenBox<'a> {
    /// Returns the content, or `None` if it does not end within the first `limit` bytes.
    pub(super) fn inside(&self, limit: usize) -> Option<&'a str> {
        let text = &self.rest[..limit.min(self.rest.len())];
        let length = match self.bare {
            Some(length) => length,
            None => closing(text)?,
        };
        text.get(..length)
    }

    /// Returns how many bytes after the content belong to the box.
    #[cfg_attr(not(feature = "math"), expect(dead_code, reason = "for sets of boxes"))]
    pub(super) fn brace(&self) -> usize {
        usize::from(self.bare.is_none())
    }
}

/// Returns all boxes, last one first. If the text ends before a box's brace, that box has no text.
pub(super) fn boxes(text: &str) -> impl Iterator<Item = OpenBox<'_>> {
    static BARE: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"^(?:[-−+]?[0-9]+(?:[.,/][0-9]+)*|[A-Z]\b)").ok());
    const NAME: &str = "box";
    let end = text.trim_end();
    let cut = ["\\box", "\\boxe", "\\fbo"].into_iter();
    let cut = cut.filter_map(move |begun| {
        Some(OpenBox {
            start: end.strip_suffix(begun)?.len(),
            rest: "",
            bare: None,
        })
    });
    let whole = text.rmatch_indices(NAME).filter_map(|(at, _)| {
        let (before, after) = (&text[..at], &text[at + NAME.len()..]);
        let (start, after) = match (before.strip_suffix("\\f"), after.strip_prefix("ed")) {
            (Some(before), _) => (before.len(), after),
            (_, Some(after)) => (before.strip_suffix('\\')?.len(), after),
            _ => return None,
        };
        let rest = after.trim_start();
        let braced = if rest.is_empty() {
            Some(rest)
        } else {
            rest.strip_prefix('{')
        };
        if let Some(rest) = braced {
            let bare = None;
            return Some(OpenBox { start, rest, bare });
        }
        let rest = after.trim_start_matches(' ');
        let bare = Some(BARE.as_ref()?.find(rest)?.len());
        Some(OpenBox { start, rest, bare })
    });
    cut.chain(whole)
}

/// Returns the position of the brace that closes a group, in the text after its opening brace. `\{`
/// and `\}` are characters.
pub(super) fn closing(text: &str) -> Option<usize> {
    let mut depth = 1;
    let mut is_escaped = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if is_escaped => {
                is_escaped = false;
                continue;
            }
            '\\' => is_escaped = true,
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn after_thinking(place: &str) -> AnswerPlace {
        serde_json::from_value(json!({"after_thinking": place})).unwrap()
    }

    #[test]
    fn thoughts_are_left_out_once() {
        let read = |place| serde_json::from_value::<AnswerPlace>(place);
        let after = AnswerPlace::After("####".into());
        assert_eq!(
            read(json!({"after_thinking": {"after": "####"}})).unwrap(),
            AnswerPlace::AfterThinking(Box::new(after))
        );
        let nested = json!({"after_thinking": {"after_thinking": "boxed"}});
        let error = read(nested).unwrap_err().to_string();
        assert!(error.contains("must be another place"), "{error}");
    }

    #[rstest]
    #[case(AnswerPlace::Auto, r"\boxed{1} then \boxed{ 2 } #### 3", Some("2"))]
    #[case(AnswerPlace::Auto, "#### 1\n#### 3 \nmore", Some("3"))]
    #[case(AnswerPlace::Auto, " 42 ", Some("42"))]
    #[case(AnswerPlace::Auto, "Let us see.\n####\n7\n", Some("7"))]
    #[case(AnswerPlace::Auto, "####", None)]
    #[case(AnswerPlace::Auto, "#### 42\n####", Some("42"))]
    #[case(AnswerPlace::Auto, "#### Final Answer\n\n42\n", Some("42"))]
    #[case(AnswerPlace::Auto, "#### **2. The answer:**\n42", Some("42"))]
    #[case(AnswerPlace::Auto, "#### Step 2: add 3\nIt is 42", Some("It is 42"))]
    #[case(AnswerPlace::Auto, "#### Final Answer", Some("Final Answer"))]
    #[case(
        AnswerPlace::Auto,
        "#### The answer is blue\nmore",
        Some("The answer is blue")
    )]
    #[case(AnswerPlace::Boxed, r"\boxed{a{b}{c}}", Some("a{b}{c}"))]
    #[case(AnswerPlace::Boxed, r"\boxed{a", None)]
    #[case(AnswerPlace::Boxed, r"\boxed{7} wait, \boxed{8", None)]
    #[case(AnswerPlace::Auto, r"\boxed{7} wait, \boxed{8", None)]
    #[case(AnswerPlace::Boxed, r"\boxed{7} wait, \boxed", None)]
    #[case(AnswerPlace::Auto, "\\boxed{7} wait, \\boxed \n", None)]
    #[case(AnswerPlace::Auto, r"\boxed{7} wait, \boxe", None)]
    #[case(AnswerPlace::Auto, r"\boxed{7} wait, \box", None)]
    #[case(AnswerPlace::Auto, r"\boxed{7} wait, \boxed {8}", Some("8"))]
    #[case(AnswerPlace::Auto, r"\boxed{7} wait, \boxed 8.", Some("8"))]
    #[case(AnswerPlace::Auto, r"\boxed{7} wait, $\boxed-3,5$", Some("-3,5"))]
    #[case(AnswerPlace::Auto, r"\boxed{7} wait, \fbox{8}", Some("8"))]
    #[case(AnswerPlace::Auto, r"\boxed{7} wait, \fbox", None)]
    #[case(AnswerPlace::Auto, r"\boxed{7} wait, \fbo", None)]
    #[case(AnswerPlace::Auto, r"\boxed{A} wait, \boxed B", Some("B"))]
    #[case(AnswerPlace::Auto, r"\boxed{7} is in a box, not a \mbox{8}", Some("7"))]
    #[case(AnswerPlace::Auto, r"\boxed{7} is in a \boxed command", Some("7"))]
    #[case(
        AnswerPlace::Boxed,
        r"\boxed{\left\{1 \\ 2\right.}",
        Some(r"\left\{1 \\ 2\right.")
    )]
    #[case(AnswerPlace::Boxed, "42", None)]
    #[case(AnswerPlace::After("answer is".into()), "The answer is 5.\nWell", Some("5."))]
    #[case(AnswerPlace::Tag("a".into()), "<a>1</a><a> 2 </a>", Some("2"))]
    #[case(AnswerPlace::Tag("a".into()), "<a>1", None)]
    #[case(AnswerPlace::Tag("answer".into()), "<answer>7</answer> Wait <answer>", None)]
    #[case(AnswerPlace::Tag("answer".into()), "<answer>7</answer> Wait <answer", None)]
    #[case(AnswerPlace::Tag("answer".into()), "<answer>7</answer> Wait <a ", None)]
    #[case(AnswerPlace::Tag("answer".into()), "<answer>7</answer>, which is 3 <", Some("7"))]
    #[case(AnswerPlace::FirstLine, "\n 1 \n2", Some("1"))]
    #[case(AnswerPlace::LastLine, "1\n 2 \n\n", Some("2"))]
    #[case(AnswerPlace::LastLine, "", None)]
    #[case(AnswerPlace::Whole, "a\nb ", Some("a\nb"))]
    #[case(
        after_thinking("boxed"),
        r"<think>\boxed{1}</think> \boxed{2}",
        Some("2")
    )]
    #[case(after_thinking("boxed"), r"<think>\boxed{1}</think> 2", None)]
    #[case(after_thinking("boxed"), r"<think>\boxed{1}", None)]
    // The prompt may have opened the block.
    #[case(after_thinking("boxed"), r"so \boxed{1}</think>\boxed{2}", Some("2"))]
    #[case(after_thinking("boxed"), r"so \boxed{1}", None)]
    #[case(after_thinking("whole"), "<think>a</think>b<think>c", None)]
    #[case(
        after_thinking("whole"),
        "<think>a</think>b<think>c</think> d",
        Some("d")
    )]
    #[case(after_thinking("auto"), "<think>#### 1</think>#### 2", Some("2"))]
    #[case(after_thinking("last_line"), "<think>a</think>", None)]
    fn the_answer_is_found_at_its_place(
        #[case] place: AnswerPlace,
        #[case] text: &str,
        #[case] expected: Option<&str>,
    ) {
        assert_eq!(place.find(text), expected);
    }
}

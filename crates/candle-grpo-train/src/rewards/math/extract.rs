//! The place of a mathematical answer in a text, and its value.

use std::sync::LazyLock;

use regex::Regex;

use super::limits::{MAX_EXPRESSION_BYTES, MAX_FORMULAS, SEARCHED_BYTES};
use super::parser::parse;
use super::value::Value;
use crate::rewards::answer::{AnswerPlace, BOX, last_boxes};

/// An answer as it is written, and its value.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) text: String,
    /// None if the text is not understood or beyond a bound.
    pub(super) value: Option<Value>,
    /// The value of a number with a decimal comma, such as `2,74`, as a list.
    pub(super) as_list: Option<Value>,
}

/// A number in plain text, with its separators of thousands and decimals.
static NUMBER: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let number =
        r"-?[1-9][0-9]{0,2}(?:[ ,][0-9]{3})+(?:\.[0-9]+|\b)|-?[0-9]+[.,][0-9]+|-?\.[0-9]+|-?[0-9]+";
    let percent = r"(?P<percent>\s*(?:%|[Pp]ercent|[Pp]ct))?";
    // On one line.
    let expression = r"-?\(?-?[0-9][0-9. \t+\-*/^()×÷]*[+\-*/^×÷][0-9. \t+\-*/^()×÷]*[0-9)]";
    Regex::new(&format!(
        r"(?:^|[\s=(:*])[$€£¥₹]?(?:(?P<expression>{expression})(?:[.,:\s)$]|$)|(?P<number>{number}){percent})"
    ))
    .ok()
});

/// A phrase that announces an answer.
static FINAL: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r"(?i)(?:final answer[^\n]{0,100}?\sis|answer is|answer:)[:\s]").ok()
});

/// Returns the expected answer in the text of a row. `2,3` alone is a list there.
pub(super) fn expected(text: &str) -> Option<Answer> {
    let mut answer = find(&AnswerPlace::Auto, text)?;
    if answer.text == text.trim()
        && let Some(list) = answer.as_list.take()
    {
        answer.value = Some(list);
    }
    Some(answer)
}

/// Returns the answer at a place of a text.
pub(super) fn find(place: &AnswerPlace, text: &str) -> Option<Answer> {
    let (place, text) = place.without_thoughts(text)?;
    match place {
        AnswerPlace::Auto => automatic(text),
        AnswerPlace::Boxed => Some(boxed(text)?.0),
        place => within(place.find(text)?),
    }
}

/// Returns the first that exists of: the last boxes, or the last announced answer if it is later;
/// the text after `####`; the last formula or number. None if the last box is not closed.
fn automatic(text: &str) -> Option<Answer> {
    let boxes = boxed(text);
    let after_boxes = boxes.as_ref().map_or(0, |(_, end)| *end);
    let last = FINAL.as_ref()?.find_iter(&text[after_boxes..]).last();
    let announced = || {
        let rest = text[after_boxes + last?.end()..].trim_start();
        let mut end = rest.len().min(2 * MAX_EXPRESSION_BYTES);
        while !rest.is_char_boundary(end) {
            end -= 1;
        }
        first_in(&rest[..end])
    };
    if let Some((boxes, _)) = boxes {
        return announced().or(Some(boxes));
    }
    if text.contains(BOX) {
        return None;
    }
    if let Some((_, after)) = text.rsplit_once("####") {
        let line = after.trim_start().split('\n').next().unwrap_or(after);
        // Marks of Markdown.
        return within(line.trim_matches(|c: char| c.is_whitespace() || "*_`".contains(c)));
    }
    announced().or_else(|| within(text.trim()))
}

/// Returns the last boxed values, and the position after them. Several that belong together are one
/// set.
fn boxed(text: &str) -> Option<(Answer, usize)> {
    let boxes = last_boxes(text)?;
    let after = &text[boxes.end..];
    let after = after.trim_start_matches(['$', ' ']);
    let mut written = boxes.inside.join(" , ");
    let percent = ["\\%", "%", "percent", "pct"];
    if boxes.inside.len() == 1
        && !written.contains('%')
        && percent.iter().any(|sign| after.starts_with(sign))
    {
        written.push('%');
    }
    Some((formula(&written), boxes.end))
}

/// Returns the answer of a formula.
fn formula(written: &str) -> Answer {
    // `x = 1/3 \approx 0.33` is `x = 1/3`.
    let exact = match written.split_once("\\approx") {
        Some((exact, _)) if exact.contains('=') => exact,
        _ => written,
    };
    Answer {
        text: written.to_owned(),
        value: parse(exact).or_else(|| parse(last_side(exact)?)),
        as_list: None,
    }
}

/// Returns the last side of equations.
fn last_side(written: &str) -> Option<&str> {
    if written.contains([',', ';']) {
        return None;
    }
    Some(written.rsplit_once('=')?.1)
}

/// Returns the answer in a text: all of it, or the last formula or number in it.
fn within(text: &str) -> Option<Answer> {
    if let Some(number) = plain_number(text) {
        return Some(Answer {
            text: text.to_owned(),
            ..number
        });
    }
    let spans = formulas(text);
    let number = last_number(text);
    if spans.is_empty() {
        if text.len() <= MAX_EXPRESSION_BYTES && !has_words(text) {
            return Some(formula(text));
        }
    } else if let Some(group) = last_group(text, &spans)
        && number.as_ref().is_none_or(|(end, _)| *end <= group.0)
    {
        return Some(group.1);
    }
    match number {
        Some((_, value)) => Some(value),
        None => Some(Answer {
            text: text.to_owned(),
            value: None,
            as_list: None,
        }),
    }
}

/// Returns the first formula or number of a text, with those that `and`, `or` or a comma join.
fn first_in(text: &str) -> Option<Answer> {
    let line = text.split("\n\n").next().unwrap_or(text);
    let spans = formulas(line);
    let number = NUMBER.as_ref()?.captures(line);
    let number_at = number
        .as_ref()
        .and_then(|found| found.get(0))
        .map(|found| found.start());
    match spans.first() {
        Some(first) if number_at.is_none_or(|at| first.start <= at + 2) && first.start < 100 => {
            let mut count = 1;
            while count < spans.len() && joins(&line[spans[count - 1].end..spans[count].start]) {
                count += 1;
            }
            Some(group(line, &spans[..count]))
        }
        _ if number_at.is_some_and(|at| at < 100) => Some(number_of(&number?)),
        _ => None,
    }
}

/// A formula between marks such as `$`.
struct Span {
    start: usize,
    end: usize,
    inside: (usize, usize),
}

/// Returns the formulas between `$`, `$$`, `\(` and `\[`.
fn formulas(text: &str) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut unclosed = [false; 4];
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        let rest = &text[at..];
        let kinds = [("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$")];
        let Some(kind) = kinds.iter().position(|(open, _)| rest.starts_with(open)) else {
            at += match bytes[at] {
                b'\\' => 1 + text[at + 1..].chars().next().map_or(0, char::len_utf8),
                _ => rest.chars().next().map_or(1, char::len_utf8),
            };
            continue;
        };
        let (open, close) = kinds[kind];
        let from = at + open.len();
        let end = match kind {
            3 => closing_dollar(&text[from..]),
            _ if unclosed[kind] => None,
            _ => text[from..].find(close),
        };
        match end.filter(|length| *length > 0) {
            Some(length) => {
                spans.push(Span {
                    start: at,
                    end: from + length + close.len(),
                    inside: (from, from + length),
                });
                at = from + length + close.len();
            }
            None => {
                unclosed[kind] = true;
                at = from;
            }
        }
    }
    spans
}

/// Returns the position of the next `$` of the line without a backslash.
fn closing_dollar(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let line = bytes.iter().take_while(|byte| **byte != b'\n');
    let mut marks = line.enumerate().filter(|(_, byte)| **byte == b'$');
    marks
        .find(|(at, _)| *at == 0 || bytes[at - 1] != b'\\')
        .map(|(at, _)| at)
}

/// Returns true for a text between formulas that belong together.
fn joins(between: &str) -> bool {
    let words = between.trim().trim_matches(',').trim();
    matches!(words, "" | "and" | "or")
}

/// Returns the last formulas that belong together, and the position after them.
fn last_group(text: &str, spans: &[Span]) -> Option<(usize, Answer)> {
    let last = spans.last()?;
    let mut from = spans.len() - 1;
    while from > 0
        && spans.len() - from < MAX_FORMULAS
        && joins(&text[spans[from - 1].end..spans[from].start])
    {
        from -= 1;
    }
    Some((last.end, group(text, &spans[from..])))
}

fn group(text: &str, spans: &[Span]) -> Answer {
    let inside: Vec<&str> = spans
        .iter()
        .map(|span| text[span.inside.0..span.inside.1].trim())
        .collect();
    let mut written = inside.join(" , ");
    let after = spans
        .last()
        .map_or("", |span| text[span.end..].trim_start());
    let percent = ["\\%", "%", "percent", "pct"];
    if percent.iter().any(|sign| after.starts_with(sign)) && !written.contains('%') {
        written.push('%');
    }
    match last_boxes(&written) {
        Some(_) => boxed(&written).map_or_else(|| formula(&written), |(answer, _)| answer),
        None => formula(&written),
    }
}

/// Returns true for words of three letters that are not the names of commands, for short words that
/// are no products of variables, and for a label such as `A:`.
fn has_words(text: &str) -> bool {
    static WORD: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let short = r"(?i:it|is|so|ok|we|he|my|no|of|to|on|by|if|up)";
        Regex::new(&format!(
            r"\\[a-zA-Z]+\s*(?:\{{[a-zA-Z*.,\s]*\}})?|_\{{[^}}]*\}}|(?P<word>[a-zA-Z]{{3,}}|\b{short}\b|^[A-Z][a-z]?:\s)"
        ))
        .ok()
    });
    let known = [
        "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "abs", "and", "pct",
        "percent", "inf", "infinity",
    ];
    WORD.as_ref().is_some_and(|word| {
        let mut words = word
            .captures_iter(text)
            .filter_map(|found| found.name("word"));
        words.any(|word| !known.contains(&word.as_str()))
    })
}

/// Returns the value of a text that is one number.
fn plain_number(text: &str) -> Option<Answer> {
    if text.len() > SEARCHED_BYTES {
        return None;
    }
    let found = NUMBER.as_ref()?.captures(text)?;
    let number = found.name("number")?;
    let whole = found.get(0)?;
    (whole.start() == 0 && number.start() == 0 && whole.end() == text.len())
        .then(|| number_of(&found))
        .filter(|answer| answer.value.is_some())
}

/// Returns the last number or expression of plain text, and the position after it.
fn last_number(text: &str) -> Option<(usize, Answer)> {
    let mut from = text.len().saturating_sub(SEARCHED_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let found = NUMBER.as_ref()?.captures_iter(&text[from..]).last()?;
    Some((from + found.get(0)?.end(), number_of(&found)))
}

fn number_of(found: &regex::Captures<'_>) -> Answer {
    if let Some(expression) = found.name("expression") {
        return calculation(expression.as_str().trim());
    }
    let mut written = found
        .name("number")
        .map_or("", |number| number.as_str())
        .to_owned();
    let groups = written.split([',', ' ']).skip(1);
    let is_grouped = !written.starts_with("-0")
        && !written.starts_with('0')
        && groups.clone().count() > 0
        && groups.clone().all(|group| {
            group
                .split('.')
                .next()
                .is_some_and(|group| group.len() == 3)
        })
        && written
            .split([',', ' '])
            .next()
            .is_some_and(|first| first.trim_start_matches('-').len() <= 3);
    let mut as_list = None;
    written = match is_grouped {
        true => written.replace([',', ' '], ""),
        false if written.contains(',') => {
            as_list = parse(&written);
            written.replace(',', ".")
        }
        false => written,
    };
    if found.name("percent").is_some() {
        written.push('%');
    }
    Answer {
        as_list,
        ..formula(&written)
    }
}

/// Returns the value of numbers with operators in plain text. A remark in brackets after a number
/// is not a factor, and a date has no value.
fn calculation(written: &str) -> Answer {
    static DATE: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"^[0-9]{4}(?:-[0-9]{2}-|/[0-9]{2}/)[0-9]{2}$").ok());
    static REMARK: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[0-9)][ \t]+\(").ok());
    if DATE.as_ref().is_some_and(|date| date.is_match(written)) {
        return Answer {
            text: written.to_owned(),
            value: None,
            as_list: None,
        };
    }
    let remark = REMARK.as_ref().and_then(|remark| remark.find(written));
    formula(remark.map_or(written, |remark| &written[..=remark.start()]))
}

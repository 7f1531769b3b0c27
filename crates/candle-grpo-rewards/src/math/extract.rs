//! Where a mathematical answer is in a text, and its value.

use std::borrow::Cow;
use std::sync::LazyLock;

use regex::Regex;

use super::boxes::last_boxes;
use super::limits::{MAX_EXPRESSION_BYTES, MAX_FORMULAS, MAX_UNIT_BYTES, SEARCHED_BYTES};
use super::parser::parse;
use super::value::Value;
use crate::answer::{self, AnswerPlace, Marked};

/// An answer as written, and its value.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) text: String,
    /// `None` if the text is not understood or beyond a limit.
    pub(super) value: Option<Value>,
    /// A number with a decimal comma, such as `2,74`, read as a list.
    pub(super) as_list: Option<Value>,
}

/// The numbers from zero to twenty in words.
const SMALL: [&str; 21] = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
];
/// The tens from thirty, as a pattern.
const TENS: &str = "(?:thir|for|fif|six|seven|eigh|nine)ty";
const SCALES: &str = "(?:hundred|thousand|million|billion|trillion)";
/// Parts, as in `2 thirds`.
const PARTS: &str = "(?:half|halves|quarters?|thirds?|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf|hundred|thousand|million|billion)ths?)";
/// Words for one operand after a number.
const OPERATORS: &str = "(?:squared|cubed|factorial|dozens?|minus|plus|below|above|(?:divided|multiplied) by|choose|mod|modulo)";
/// The start of an operand in words after `times`, or of a comparison as in `3 times as many`.
const FACTOR: &str = r"(?:[b-z]\b|as|the|more|[0-9]+)";
/// The end of a sentence, after Markdown marks.
const SENTENCE_END: &str = r#"["'”’*_`$]{0,3}(?:[.!?;](?:\s|$)|\s*$|\n)"#;

/// A number in plain text. `inner` is a date, an amount in two units, or one of the groups
/// `expression` and `number` with what follows it. With `changed` or `more`, it is a different
/// number.
static NUMBER: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let european = r"[1-9][0-9]{0,2}(?:(?:\.[0-9]{3})+,[0-9]+|(?:\.[0-9]{3}){2,}\b)";
    let spaces = r"[1-9][0-9]{0,2}(?:[ \u00a0\u202f'’][0-9]{3})+(?:[.,][0-9]+|\b)";
    let commas = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+|\b)";
    let plain = r"[0-9]+(?:\.[0-9]+)?[eE][-−+]?[0-9]{1,4}\b|[0-9]+[.,][0-9]+|\.[0-9]+|[0-9]+";
    let number = format!(
        r"[-−]?(?:(?P<european>{european})|(?P<spaces>{spaces})|(?P<commas>{commas})|(?P<list>[0-9]+(?:,[0-9]+){{2,}})|{plain})"
    );
    // More digits, a suffix or a variable, which make it a different number.
    let term = r"(?:[xyzni]\b|[π√])";
    let more = format!(
        r"(?P<more>(?:[.,:'’-][0-9]+)+|[½⅓⅔¼¾⅛²³⁴⁵√π^]|[kKMB]\b|{term}|\s(?:pi\b|[π√]|out of\b)|\s?\\(?:[dt]?frac|sqrt|pi)\b|[ \t][xyzn]\b|[ \t]?[-−+*·×/]\s?[0-9.]*{term})"
    );
    let scale = format!(r"(?:\s(?P<scale>(?i:{SCALES}))\b)");
    let percent = r"(?P<percent>\s*(?:%|[Pp]er ?cent|[Pp]ct))";
    let changed = changed();
    // A variable after a space. Before a number or a bracket, `x` is an operator.
    let variable = r"[ \t](?:[yzn]\b|x(?:[ \t]+[^0-9(\s]|[^\w\s]|[ \t]*(?m:$)))";
    // Not an imaginary number.
    let that_is = r"\s?[-−]\s?i\.\s?e\.";
    let date = r"[0-9]{4}(?:-[0-9]{1,2}-|/[0-9]{1,2}/)[0-9]{1,2}|[0-9]{1,2}(?:-[0-9]{1,2}-|/[0-9]{1,2}/|\.[0-9]{1,2}\.)[0-9]{4}";
    let large = r"(?:years?|months?|weeks?|days?|hours?|hrs?|minutes?|mins?|dollars?|euros?|pounds?|lbs?|feet|foot|ft|yards?|met(?:er|re)s?)";
    let small = r"(?:months?|weeks?|days?|hours?|hrs?|minutes?|mins?|seconds?|secs?|cents?|ounces?|oz|inch(?:es)?|feet|centimet(?:er|re)s?)";
    // Two units, as in `3 hours and 20 minutes`.
    let compound = format!(r"[0-9.,]*[0-9] ?{large}(?:,? and|,)? [0-9.]+ ?{small}");
    // On one line. `x` is a multiplication sign between a space and a number or a bracket.
    let part = r"(?:[-0-9. \t+−*/^()×÷·]|[ \t]x[ \t]+[0-9(])";
    let last = format!(r"(?:[-+−*/^×÷·]{part}*[0-9)]|[ \t]x[ \t]+(?:[0-9(]{part}*[0-9)]|[0-9]))");
    let calculation = format!(r"[-−]?\(?[-−]?[0-9]{part}*{last}");
    let expression = format!(r"{calculation}|[0-9]+(?::[0-9]+)+(?: ?[aApP]\.?[mM]\b\.?)?");
    Regex::new(&format!(
        r#"(?:^|[\s=(:*≈~])(?:["'“‘`_]{{0,3}})(?:\\?[$€£¥₹])?(?P<inner>(?:{date}|{compound})\b|(?P<changed_expression>(?:{calculation})(?:{changed}|{variable}))|(?P<expression>{expression})(?:[.,:;!?\s)$*_"'”’`]|$)|(?P<number>{number})(?:{that_is}|(?P<changed>{changed})|{more}|{scale}?{percent}?))"#
    ))
    .ok()
});

/// Returns the pattern for words and amounts after a number that make it a different number, as in
/// `5 dozen`, `18 to 19` and `$18 - $3`.
fn changed() -> String {
    let small = SMALL.join("|");
    let than = "(?:more|less|fewer|greater|smaller|larger) than";
    let words = format!(
        r"{PARTS}|{OPERATORS}|{than}|degrees? (?:below|above)|times (?:{FACTOR}|{small})|and (?:a |an |one |two |three )?{PARTS}|or (?:more|less|fewer|{small}|{TENS})|(?:to|point) (?:{small}|{TENS})"
    );
    // The second number in a range, and an amount after an operator.
    let second = r"\\?[$€£¥₹]?[0-9](?:[0-9.,]*[0-9])?";
    let amount = r"[-−+*·×/÷] ?\\?[$€£¥₹] ?[0-9](?:[0-9.,]*[0-9])?";
    let range = format!(r"(?: ?%)?(?: {SCALES})?(?: ?– ?|—| (?:to|through) ){second}");
    // The first scale belongs to the number.
    format!(r"(?i:[ ~-](?:(?:{SCALES} )?(?:{words})|{SCALES} {SCALES})\b|{range}| ?{amount})")
}

/// A phrase that announces an answer.
static FINAL: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r"(?i)final answer[^\n]{0,100}?\sis\b|answers? (?:is|are)\b|answers?\s?[:=]").ok()
});

/// Returns the answer that a row's text expects. There, `2,3` is a list. A sentence that no single
/// number expresses, such as `3 boys and 4 girls` or `not 5`, is compared as text.
pub(super) fn expected(text: &str) -> Option<Answer> {
    static BOUND: LazyLock<Option<Regex>> = LazyLock::new(|| {
        Regex::new(r"(?i)\b(?:not|no|all|any|than|least|most|between|except|from|above|below)\b")
            .ok()
    });
    let mut answer = find(&AnswerPlace::Auto, text)?;
    let is_whole = answer.text == text.trim();
    let has_formulas = !formulas(text).is_empty();
    if (is_whole || !has_formulas)
        && let Some(list) = answer.as_list.take()
    {
        answer.value = Some(list);
    }
    let is_marked = has_formulas
        || text.contains(['=', '\n'])
        || text.contains("####")
        || answer::boxes(text).next().is_some()
        || FINAL.as_ref()?.is_match(text);
    let says_more = || Some(numbers(text).nth(1).is_some() || BOUND.as_ref()?.is_match(text));
    if !is_whole && !is_marked && says_more()? {
        return Some(unknown(text.trim()));
    }
    Some(answer)
}

/// Returns the answer at a place in a text.
pub(super) fn find(place: &AnswerPlace, text: &str) -> Option<Answer> {
    let (place, text) = place.without_thoughts(text)?;
    match place {
        AnswerPlace::Auto => automatic(text),
        AnswerPlace::Boxed => Some(boxed(text)?.0),
        place => within(place.find(text)?),
    }
}

/// Returns the first that exists: the last boxes, or a later announced value; the text after
/// `####`; or the last formula or number, searched after the announcement if there is any text.
/// Returns `None` if the last box is not closed.
fn automatic(text: &str) -> Option<Answer> {
    let boxes = boxed(text);
    let after_boxes = boxes.as_ref().map_or(0, |(_, end)| *end);
    let last = FINAL.as_ref()?.find_iter(&text[after_boxes..]).last();
    let rest = last.map(|last| text[after_boxes + last.end()..].trim_start_matches(is_mark));
    let announced = || {
        let rest = rest?;
        let mut end = rest.len().min(2 * MAX_EXPRESSION_BYTES);
        while !rest.is_char_boundary(end) {
            end -= 1;
        }
        first_in(&rest[..end])
    };
    if let Some((boxes, _)) = boxes {
        let value = announced().filter(|answer| answer.value.is_some());
        return value.or(Some(boxes));
    }
    if answer::boxes(text).next().is_some() {
        return None;
    }
    match answer::marked(text) {
        Some(Marked::Line(line)) => return within(without_struck(line).trim_matches(is_mark)),
        Some(Marked::Section(section)) => return automatic(section),
        None => {}
    }
    let has_digits = |text: &&str| text.contains(|c: char| c.is_ascii_digit());
    announced().or_else(|| within(rest.filter(has_digits).unwrap_or(text).trim()))
}

/// Removes what Markdown strikes out in a line, as in `~~41~~ 42`.
fn without_struck(line: &str) -> Cow<'_, str> {
    static STRUCK: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new("~~[^~]+~~").ok());
    match STRUCK.as_ref() {
        Some(struck) => struck.replace_all(line, ""),
        None => line.into(),
    }
}

/// Returns true for white space, Markdown marks and a colon.
fn is_mark(c: char) -> bool {
    c.is_whitespace() || "*_`:".contains(c)
}

/// Returns the last boxed values, and the position after them. Several that belong together form
/// one set.
fn boxed(text: &str) -> Option<(Answer, usize)> {
    let boxes = last_boxes(text)?;
    let after = &text[boxes.end..];
    let after = after.trim_start_matches(['$', ' ']);
    let mut written = boxes.inside.join(" , ");
    let percent = ["\\%", "%", "percent", "per cent", "pct"];
    if boxes.inside.len() == 1
        && !written.contains('%')
        && percent.iter().any(|sign| after.starts_with(sign))
    {
        written.push('%');
    }
    Some((formula(&written), boxes.end))
}

/// Returns a formula's answer, which may be a number with a unit. A time of day has no value.
fn formula(written: &str) -> Answer {
    static TIME: LazyLock<Option<Regex>> = LazyLock::new(|| {
        Regex::new(r"(?:^|[^0-9:.])[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?(?:$|[^0-9:])").ok()
    });
    static TEXT: LazyLock<Option<Regex>> = LazyLock::new(|| {
        Regex::new(r"[0-9})](?:\s|~|\\[ ,;:!])*\\(?:text|textbf|textrm|mathrm|mbox)\{([^{}]*)\}")
            .ok()
    });
    static MIXED: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"^\s*([-−]?[0-9]+) ([0-9]+)/([0-9]+)\s*$").ok());
    static SCIENTIFIC: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"^\s*([-−]?[0-9.]+) x (10\^\S+)\s*$").ok());
    static CONCLUSION: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let commands = r"\\(?:implies|therefore|to|(?:R|r|Longr|longr)ightarrow)\b";
        Regex::new(&format!(r"^\s*(?:(?:[-=]{{1,2}}>|[→⇒⟹⟶∴]|{commands})\s*)+")).ok()
    });
    let arrow = CONCLUSION.as_ref().and_then(|arrow| arrow.find(written));
    let written = arrow.map_or(written, |arrow| &written[arrow.end()..]);
    let bold = written.trim().strip_prefix("**");
    let bold = bold.and_then(|bold| bold.strip_suffix("**"));
    let written = bold.filter(|bold| !bold.contains('*')).unwrap_or(written);
    if let Some(ratio) = labeled_ratio(written) {
        return Answer {
            value: parse(written),
            ..unknown(ratio)
        };
    }
    if TIME.as_ref().is_some_and(|time| time.is_match(written)) {
        return unknown(written);
    }
    if let Some(number) = quantity(written) {
        return Answer {
            text: written.to_owned(),
            ..number
        };
    }
    let is_joint = |text: &str| matches!(text.trim(), "and" | "or");
    let mut texts = TEXT.iter().flat_map(|text| text.captures_iter(written));
    if texts.any(|text| !is_joint(&text[1]) && changes(&text[1])) {
        return unknown(written);
    }
    let capture = |pattern: &'static LazyLock<Option<Regex>>| pattern.as_ref()?.captures(written);
    let rewritten = if let Some(mixed) = capture(&MIXED) {
        Some(format!(
            r"{}\frac{{{}}}{{{}}}",
            &mixed[1], &mixed[2], &mixed[3]
        ))
    } else {
        capture(&SCIENTIFIC).map(|number| format!("{} * {}", &number[1], &number[2]))
    };
    if let Some(value) = rewritten.and_then(|rewritten| parse(&rewritten)) {
        return Answer {
            value: Some(value),
            ..unknown(written)
        };
    }
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

/// Returns the last side in `V_1:V_2 = 11:21`. Without the label, it may be a time, so both its
/// text and its value count.
fn labeled_ratio(written: &str) -> Option<&str> {
    static RATIO: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let name = r"[A-Za-z\\][^=:0-9]*(?:_\{?[0-9]+\}?[^=:0-9]*)?";
        let colon = r"(?::|\\colon\b)";
        Regex::new(&format!(
            r"^\s*(?P<label>{name}{colon}\s*{name})=\s*(?P<ratio>[0-9]+\s*{colon}\s*[0-9]+)\s*$"
        ))
        .ok()
    });
    let found = RATIO.as_ref()?.captures(written)?;
    let label = found.name("label")?.as_str();
    let is_name = !has_words(label) || !label.contains(|c: char| c.is_ascii_lowercase());
    Some(found.name("ratio")?.as_str()).filter(|_| is_name)
}

/// Returns true for words after a number in a formula that may make it a different number.
fn changes(words: &str) -> bool {
    static WORDS: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let small = SMALL.join("|");
        Regex::new(&format!(
            r"(?i)\b(?:{PARTS}|{OPERATORS}|{SCALES}|{small}|{TENS}|or|and|than|over|to|point|remainder|times\s+{FACTOR})\b"
        ))
        .ok()
    });
    WORDS
        .as_ref()
        .is_some_and(|pattern| pattern.is_match(words))
}

/// Returns the number in `12 miles per hour`, also inside `\text{}`, and in `1.234,50`.
fn quantity(written: &str) -> Option<Answer> {
    static TEXT: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"^\\(?:text|textbf|textrm|mathrm|mbox)\{([^{}]*)\}$").ok());
    static UNIT_TEXT: LazyLock<Option<Regex>> = LazyLock::new(|| {
        Regex::new(
            r"^([-−]?[0-9.,]+)(?:[ ~]|\\[ ,;:!])*\\(?:text|textbf|textrm|mathrm|mbox)\{([^{}]*)\}$",
        )
        .ok()
    });
    static UNIT: LazyLock<Option<Regex>> = LazyLock::new(|| {
        Regex::new(r"^[ ~][A-Za-z][-A-Za-z ]*(?:/ ?[A-Za-z]+|\^\{?[23]\}?|[²³])?\.?$").ok()
    });
    if written.len() > MAX_UNIT_BYTES {
        return None;
    }
    let written = written.trim();
    let text = TEXT.as_ref()?.captures(written);
    let written = text.map_or(written, |text| text.get(1).map_or("", |text| text.as_str()));
    let joined = UNIT_TEXT.as_ref()?.captures(written);
    let joined = joined.map(|parts| format!("{} {}", &parts[1], parts[2].trim()));
    let written = joined.as_deref().unwrap_or(written);
    let found = NUMBER.as_ref()?.captures(written)?;
    let (inner, _) = (found.name("inner")?, found.name("number")?);
    let before = &written[..inner.start()];
    let after = &written[inner.end()..];
    let is_quantity = UNIT.as_ref()?.is_match(after) && has_words(after) && !changes(after);
    let is_scaled = after.is_empty()
        && (found.name("scale").is_some()
            || found
                .name("percent")
                .is_some_and(|sign| has_words(sign.as_str())));
    let is_european = found.name("european").is_some() && after.is_empty();
    let is_money = matches!(before, "" | "$" | "\\$" | "€" | "£" | "¥" | "₹");
    (is_money && (is_quantity || is_scaled || is_european)).then(|| number_of(&found))
}

/// Returns the last side in a chain of equations.
fn last_side(written: &str) -> Option<&str> {
    if written.contains([',', ';']) {
        return None;
    }
    Some(written.rsplit_once('=')?.1)
}

/// Returns the answer in a text: all of it, or its last formula or number.
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
        if is_hyphenated(text) {
            return Some(unknown(text));
        }
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
        None => Some(unknown(text)),
    }
}

/// Returns a text's first formula or number, with those that `and`, `or` or a comma join.
fn first_in(text: &str) -> Option<Answer> {
    let line = text.split("\n\n").next().unwrap_or(text);
    if let Some(answer) = in_words(line) {
        return Some(answer);
    }
    let spans = formulas(line);
    if let Some(sides) = equation(line)
        && spans.first().is_none_or(|first| first.start >= sides)
    {
        let number = numbers(&line[sides..]).next();
        let is_next = |found: &regex::Captures<'_>| found.get(0).is_some_and(|at| at.start() < 3);
        let side = number.filter(is_next).map(|number| number_of(&number));
        return side.or_else(|| Some(unknown(line)));
    }
    let number = numbers(line).next();
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
        _ if number_at.is_some_and(|at| at < 100) => {
            if is_changed(&line[..number_at?]) {
                return Some(unknown(line));
            }
            let number = number?;
            if is_other(&number) {
                return Some(unknown(line));
            }
            enumerated(line).or_else(|| Some(number_of(&number)))
        }
        _ => None,
    }
}

/// Returns true for a number with words or an operator that make it a different number.
fn is_other(found: &regex::Captures<'_>) -> bool {
    found.name("changed").is_some() || found.name("changed_expression").is_some()
}

/// Returns the position after the last `=` in a line that begins with amounts, as in
/// `$18 - $3 = $15`.
fn equation(line: &str) -> Option<usize> {
    static SIDES: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let operand = r"[(\\$€£¥₹]*[0-9][0-9.,]*%?\)?(?: [a-z]+)?";
        let operator = r"[ \t]?[-−–+*/×·÷^x][ \t]?";
        Regex::new(&format!(
            r"^[ \t*_]*(?:{operand}(?:{operator}{operand})*[ \t]?=[ \t]?)+"
        ))
        .ok()
    });
    // The space before the next number stays.
    Some(SIDES.as_ref()?.find(line)?.as_str().trim_end().len())
}

/// Returns an answer without a value.
fn unknown(text: &str) -> Answer {
    Answer {
        text: text.to_owned(),
        value: None,
        as_list: None,
    }
}

/// Returns true if a text ends with words that make the next number a different one.
fn is_changed(before: &str) -> bool {
    static WORDS: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let than = r"(?:more|less|fewer|greater|smaller|larger) than";
        Regex::new(&format!(
            r"(?i)\b(?:(?:half|third|quarter)(?: of)?|twice|double|triple|thrice|not|between|{than})\W*$"
        ))
        .ok()
    });
    WORDS.as_ref().is_some_and(|words| words.is_match(before))
}

/// Returns the answer in a text that begins with a number in words. It has a value if it is at most
/// twenty and ends the sentence, or if the same number follows in digits, as in `five (5)`.
fn in_words(text: &str) -> Option<Answer> {
    static ANY: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let small = SMALL.join("|");
        Regex::new(&format!(
            r"(?i)^\W*(?:{small}|{TENS}|none|a (?:{SCALES}|dozen|half|third|quarter))\b"
        ))
        .ok()
    });
    static ALONE: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let small = SMALL.join("|");
        Regex::new(&format!(
            r#"(?i)^[\s"'“‘*_`]*(?P<word>{small})[*_`]*(?P<unit> [a-z]+)?{SENTENCE_END}"#
        ))
        .ok()
    });
    static DIGITS: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let small = SMALL.join("|");
        Regex::new(&format!(
            r#"(?i)^[\s"'“‘*_`]*(?P<words>(?:(?:{small}|{TENS}|{SCALES}|and|a)[\s*_-]+)+)\((?P<digits>[0-9][0-9,]*)\)[*_]*(?: [a-z]+)?{SENTENCE_END}"#
        ))
        .ok()
    });
    let small = |word: &str| {
        SMALL
            .iter()
            .position(|small| small.eq_ignore_ascii_case(word))
    };
    ANY.as_ref()?.find(text)?;
    let number = |digits: &str, text: &str| Answer {
        value: parse(digits),
        ..unknown(text)
    };
    if let Some(found) = DIGITS.as_ref()?.captures(text) {
        let digits = found["digits"].replace(',', "");
        let word = small(found["words"].trim_matches(is_mark));
        if word.is_none_or(|word| word.to_string() == digits) {
            return Some(number(&digits, &digits));
        }
    } else if let Some(found) = ALONE.as_ref()?.captures(text) {
        let unit = found.name("unit").map_or("", |unit| unit.as_str());
        let word = &found["word"];
        let is_amount = !word.eq_ignore_ascii_case("one") && !changes(unit);
        if unit.is_empty() || (is_amount && !matches!(unit.trim(), "percent" | "pct" | "times")) {
            return Some(number(&small(word)?.to_string(), &format!("{word}{unit}")));
        }
    }
    Some(unknown(text))
}

/// Returns the numbers at the start of a line that end a sentence together, such as
/// `2, 3 or 4 apples.`, or `None` for a single number.
fn enumerated(line: &str) -> Option<Answer> {
    static END: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(&format!("^(?: [A-Za-z]+)?{SENTENCE_END}")).ok());
    let mut written = Vec::new();
    let mut end = 0;
    for found in numbers(line).take(MAX_FORMULAS) {
        if is_other(&found) {
            break;
        }
        // The mark before a number may be a space.
        let between =
            line[end..found.name("inner")?.start()].trim_end_matches(['$', '€', '£', '\\']);
        let words = between.trim().trim_start_matches(',').trim_start();
        let is_next =
            matches!(words, "" | "and" | "or") && (!words.is_empty() || between.contains(','));
        if !written.is_empty() && !is_next {
            break;
        }
        written.push(number_of(&found));
        end = found.name("inner")?.end();
    }
    (written.len() > 1 && END.as_ref()?.is_match(&line[end..])).then(|| together(&written))
}

/// Returns a set of numbers in plain text, without a value if one of them has none.
fn together(numbers: &[Answer]) -> Answer {
    let written: Vec<&str> = numbers.iter().map(|number| number.text.as_str()).collect();
    let written = written.join(" , ");
    if numbers.iter().all(|number| number.value.is_some()) {
        formula(&written)
    } else {
        unknown(&written)
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
        // `$3, $4` are two amounts.
        let is_money = |length: &usize| {
            let after = &text[from + length + close.len()..];
            kind == 3
                && text[from..from + length].ends_with(char::is_whitespace)
                && after.starts_with(|c: char| c.is_ascii_digit())
        };
        match end.filter(|length| *length > 0 && !is_money(length)) {
            Some(length) => {
                spans.push(Span {
                    start: at,
                    end: from + length + close.len(),
                    inside: (from, from + length),
                });
                at = from + length + close.len();
            }
            None => {
                unclosed[kind] |= end.is_none();
                at = from;
            }
        }
    }
    spans
}

/// Returns the position where the line's next `$` without a backslash is.
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
    let before = from.checked_sub(1).and_then(|from| spans.get(from));
    let between = before.map_or("", |before| &text[before.end..spans[from].start]);
    if matches!(between.trim(), "to" | "through" | "–" | "—") {
        return Some((last.end, unknown(text)));
    }
    Some((last.end, group(text, &spans[from..])))
}

fn group(text: &str, spans: &[Span]) -> Answer {
    static CHANGED: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(&format!(r"^(?:{}|(?i: {SCALES})\b)", changed())).ok());
    let after = spans.last().map_or("", |last| &text[last.end..]);
    if CHANGED.as_ref().is_some_and(|words| words.is_match(after)) {
        return unknown(text);
    }
    let inside: Vec<&str> = spans
        .iter()
        .map(|span| text[span.inside.0..span.inside.1].trim())
        .collect();
    let mut written = inside.join(" , ");
    let after = after.trim_start();
    let percent = ["\\%", "%", "percent", "pct"];
    if percent.iter().any(|sign| after.starts_with(sign)) && !written.contains('%') {
        written.push('%');
    }
    match last_boxes(&written) {
        Some(_) => boxed(&written).map_or_else(|| formula(&written), |(answer, _)| answer),
        None => formula(&written),
    }
}

/// Returns true for words with at least three letters that are not command names, for short words
/// that are not products of variables, and for a label such as `A:`.
fn has_words(text: &str) -> bool {
    static WORD: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let short = r"(?i:it|is|so|ok|we|he|my|no|of|to|on|by|if|up|oh|um|uh|hm|do|go|me|us|hi)";
        // Before a number, these are not products of variables.
        let before = "(?i:ah|at|be|as|am|an|er|eh|ha)";
        Regex::new(&format!(
            r"\\[a-zA-Z]+\s*(?:\{{[a-zA-Z*.,\s]*\}})?|_\{{[^}}]*\}}|(?P<word>[a-zA-Z]{{3,}}|\b{short}\b|\bI['’]|^\s*{before}[,!.…]*\s+[$0-9]|^[A-Za-z][a-z]?:\s)"
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

/// Returns the value if a text is one number.
fn plain_number(text: &str) -> Option<Answer> {
    if text.len() > SEARCHED_BYTES {
        return None;
    }
    let found = NUMBER.as_ref()?.captures(text)?;
    let inner = found.name("inner")?;
    let outside = [&text[..inner.start()], &text[inner.end()..]];
    let is_quoted = |text: &str| text.chars().all(|c| "\"'“”‘’`".contains(c));
    (found.name("number").is_some() && outside.into_iter().all(is_quoted))
        .then(|| number_of(&found))
        .filter(|answer| answer.value.is_some())
}

/// Finds numbers and expressions in plain text. The mark after one may be the mark before the next.
fn numbers(text: &str) -> impl Iterator<Item = regex::Captures<'_>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let found = NUMBER.as_ref()?.captures_at(text, at)?;
        let group = |name| found.name(name).map(|found| found.end());
        at = group("expression").or_else(|| group("inner"))?;
        Some(found)
    })
}

/// Returns the last number or expression in plain text, and the position after it.
fn last_number(text: &str) -> Option<(usize, Answer)> {
    static EACH: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"^ (?:each|per|every|a)\b").ok());
    static BETWEEN: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"(?i)\bbetween\W*$").ok());
    let mut from = text.len().saturating_sub(SEARCHED_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let (mut last, mut before): (Option<regex::Captures<'_>>, _) = (None, None);
    for found in numbers(&text[from..]) {
        before = last.replace(found);
    }
    let found = last?;
    if is_other(&found) {
        return Some((from + found.get(0)?.end(), unknown(text)));
    }
    let mut answer = number_of(&found);
    // `5 days, 3 hours each day` has two amounts.
    let inner = found.name("inner")?;
    let is_single = found.name("number").is_some() || found.name("expression").is_some();
    if !is_single
        && EACH.as_ref()?.is_match(&text[from + inner.end()..])
        && let Some((_, second)) = inner.as_str().split_once(", ")
        && let Some(second) = numbers(second).next()
    {
        answer = number_of(&second);
    }
    if let Some(before) = before {
        let first = before.name("inner")?;
        let between = &text[from + first.end()..from + inner.start()];
        let between = between.trim_matches(|c: char| c.is_whitespace() || "$€£".contains(c));
        let start = &text[from..from + first.start()];
        if between == "and" && BETWEEN.as_ref()?.is_match(start) {
            answer = unknown(text);
        }
        // In `16 or 17`, neither is the answer.
        if between == "or" {
            answer = together(&[number_of(&before), answer]);
        }
    }
    Some((from + found.get(0)?.end(), answer))
}

fn number_of(found: &regex::Captures<'_>) -> Answer {
    let group = |name| found.name(name).map(|found| found.as_str());
    if let Some(expression) = group("expression") {
        return calculation(expression.trim());
    }
    let is_number = !is_other(found) && group("more").is_none();
    let Some(number) = group("number").filter(|_| is_number) else {
        return unknown(group("inner").unwrap_or_default());
    };
    let mut written = number.replace('−', "-");
    let mut as_list = None;
    if group("commas").is_some() {
        written = written.replace(',', "");
    } else if group("spaces").is_some() {
        written.retain(|c| c.is_ascii_digit() || "-.,".contains(c));
        written = written.replace(',', ".");
    } else if group("european").is_some() {
        written = written.replace('.', "").replace(',', ".");
    } else if group("list").is_none() && written.contains(',') {
        as_list = parse(&written);
        written = written.replace(',', ".");
    }
    let scale = group("scale").map(str::to_ascii_lowercase);
    let power = match scale.as_deref() {
        Some("hundred") => 2,
        Some("thousand") => 3,
        Some("million") => 6,
        Some("billion") => 9,
        Some(_) => 12,
        None => 0,
    };
    if power > 0 {
        written = format!("{written} \\cdot 10^{{{power}}}");
    }
    if group("percent").is_some() {
        written.push('%');
    }
    Answer {
        as_list,
        ..formula(&written)
    }
}

/// Returns true for numbers joined by hyphens without spaces: a score such as `3-2`, a range, a
/// phone number or a triangle's sides, more often than a difference.
fn is_hyphenated(text: &str) -> bool {
    static HYPHENATED: LazyLock<Option<Regex>> = LazyLock::new(|| {
        let number = "[0-9](?:[0-9.,/]*[0-9])?";
        Regex::new(&format!(r"^\(?-?{number}(?:-{number})+\)?[.,]?$")).ok()
    });
    HYPHENATED
        .as_ref()
        .is_some_and(|hyphenated| hyphenated.is_match(text))
}

/// Returns the value for numbers with operators in plain text. A remark in parentheses after a
/// number is not a factor. Hyphenated numbers have no value.
fn calculation(written: &str) -> Answer {
    static REMARK: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"[0-9)][ \t]+\(").ok());
    if is_hyphenated(written) {
        return unknown(written);
    }
    let remark = REMARK.as_ref().and_then(|remark| remark.find(written));
    let written = remark.map_or(written, |remark| &written[..=remark.start()]);
    formula(&written.replace('x', "*"))
}

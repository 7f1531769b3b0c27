//! Numbers in texts.

/// Characters in marks between groups of three digits.
const GROUP_MARKS: &str = r"{,}\!; ";

/// A number in a text.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct FoundNumber {
    /// Its value, rounded to an f64.
    pub(super) value: f64,
    /// Sign and digits, for an integer from 2^52 on. From 2^53 on, an f64 does not represent all
    /// integers.
    digits: Option<String>,
}

impl FoundNumber {
    /// Creates a number with this value, written as `text`.
    pub(super) fn new(value: f64, text: &str) -> Self {
        const LARGE: f64 = (1u64 << 52) as f64;
        let digits = || {
            let integer = match text.split_once('.') {
                Some((integer, decimals)) if decimals.bytes().all(|b| b == b'0') => integer,
                Some(_) => return None,
                None => text,
            };
            let digits: String = integer.chars().filter(char::is_ascii_digit).collect();
            let marks = |c: char| c.is_ascii_digit() || c == '-' || GROUP_MARKS.contains(c);
            integer.chars().all(marks).then(|| {
                let sign = if value < 0. { "-" } else { "" };
                format!("{sign}{}", digits.trim_start_matches('0'))
            })
        };
        Self {
            value,
            digits: (value.abs() >= LARGE).then(digits).flatten(),
        }
    }

    /// Returns whether the numbers differ by at most `tolerance`.
    pub(super) fn is_near(&self, other: &Self, tolerance: f64) -> bool {
        let near = || self.value == other.value || (self.value - other.value).abs() <= tolerance;
        match (&self.digits, &other.digits) {
            (Some(a), Some(b)) => match (a.parse::<i128>(), b.parse::<i128>()) {
                (Ok(a), Ok(b)) => a.abs_diff(b) as f64 <= tolerance,
                _ => a == b || tolerance >= 1. && near(),
            },
            _ => near(),
        }
    }
}

/// Returns the numbers in `text` in order: `-1,200.50`, `$18`, `3/4`, `1 1/2` and `\frac{3}{4}` are
/// one number each, and so are `2^{10}` and `1.5 \times 10^3`. Ignores units with their powers, and
/// percent signs.
pub(super) fn numbers(text: &str) -> Vec<FoundNumber> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        match number_at(text, at) {
            Some((number, end)) => {
                if !is_power_of_unit(&text[..at]) {
                    found.push(number);
                }
                at = end;
            }
            None => at += c.len_utf8(),
        }
    }
    found
}

/// Returns true if a number after this text is a letter's power, as in `m^2` or `\text{km}^{2}`.
fn is_power_of_unit(before: &str) -> bool {
    let base = before.strip_suffix("^{").or(before.strip_suffix('^'));
    let last = base.and_then(|base| base.trim_end().chars().next_back());
    last.is_some_and(|c| c.is_alphabetic() || c == '}')
}

/// Parses a number at `at`, where a character begins. Returns it and its end.
fn number_at(text: &str, at: usize) -> Option<(FoundNumber, usize)> {
    let (negative, unsigned) = sign(text, at);
    let unsigned = skip(text, unsigned, |c| matches!(c, '$' | '€' | '£' | '¥'));
    // "$-5" as well as "-$5".
    let (negative, unsigned) = if unsigned > at && !negative {
        sign(text, unsigned)
    } else {
        (negative, unsigned)
    };
    let (value, end) = latex_fraction(text, unsigned)
        .or_else(|| power(text, unsigned))
        .or_else(|| plain_or_fraction(text, unsigned))?;
    let value = if negative { -value } else { value };
    Some((FoundNumber::new(value, &text[unsigned..end]), end))
}

/// Returns whether there is a minus sign at `at`, and the position after it. A sign directly after
/// a digit, a letter or a bracket is a subtraction and does not count.
fn sign(text: &str, at: usize) -> (bool, usize) {
    let before = text[..at].chars().next_back();
    let operation = before.is_some_and(|c| c.is_alphanumeric() || c == ')' || c == '}');
    match text[at..].chars().next() {
        Some(c @ ('-' | '−')) if !operation => (true, at + c.len_utf8()),
        _ => (false, at),
    }
}

fn skip(text: &str, at: usize, is: impl Fn(char) -> bool) -> usize {
    match text[at..].chars().next() {
        Some(c) if is(c) => at + c.len_utf8(),
        _ => at,
    }
}

/// Parses `\frac{a}{b}`, `\dfrac{a}{b}`, `\tfrac{a}{b}`.
fn latex_fraction(text: &str, at: usize) -> Option<(f64, usize)> {
    let rest = &text[at..];
    let name = ["\\frac{", "\\dfrac{", "\\tfrac{"]
        .into_iter()
        .find(|name| rest.starts_with(name))?;
    let inside = &rest[name.len()..];
    let (numerator, after) = inside.split_once("}{")?;
    let (denominator, _) = after.split_once('}')?;
    let end = at + name.len() + numerator.len() + "}{".len() + denominator.len() + "}".len();
    Some((quotient(whole(numerator)?, whole(denominator)?)?, end))
}

/// Parses `a^b`, `a^{b}`, or `a \times 10^b`, with an integer b.
fn power(text: &str, at: usize) -> Option<(f64, usize)> {
    let (first, end) = plain(text, at)?;
    let rest = &text[end..];
    let times = || {
        let signs = ["\\times", "\\cdot", "×", "·", "*"];
        let rest = rest.trim_start();
        let rest = signs.into_iter().find_map(|sign| rest.strip_prefix(sign))?;
        rest.trim_start().strip_prefix("10")
    };
    let tens = times();
    let rest = tens.unwrap_or(rest).strip_prefix('^')?;
    let braced = rest.strip_prefix('{');
    let rest = braced.unwrap_or(rest).trim_start();
    let unsigned = rest.trim_start_matches(['-', '−']);
    let digits = unsigned.bytes().take_while(u8::is_ascii_digit).count();
    let (exponent, after) = rest.split_at(rest.len() - unsigned.len() + digits);
    let after = match braced {
        Some(_) => after.trim_start().strip_prefix('}')?,
        None => after,
    };
    let number: i32 = exponent.replace('−', "-").parse().ok()?;
    let value = match tens {
        Some(_) => format!("{first}e{number}").parse().ok()?,
        None => first.powi(number),
    };
    let end = text.len() - after.len();
    value.is_finite().then_some((value, end))
}

/// Parses a number, `a/b`, or `n a/b`.
fn plain_or_fraction(text: &str, at: usize) -> Option<(f64, usize)> {
    let (first, end) = plain(text, at)?;
    if let Some((value, end)) = over(text, first, end) {
        return Some((value, end));
    }
    let integer = text[at..end].bytes().all(|b| b.is_ascii_digit());
    if integer
        && text[end..].starts_with(' ')
        && let Some((numerator, after)) = plain(text, end + 1)
        && text[end + 1..after].bytes().all(|b| b.is_ascii_digit())
        && let Some((fraction, after)) = over(text, numerator, after)
        && fraction < 1.
    {
        return Some((first + fraction, after));
    }
    Some((first, end))
}

/// Parses the rest of a fraction: `/b` at `at`.
fn over(text: &str, numerator: f64, at: usize) -> Option<(f64, usize)> {
    if !text[at..].starts_with('/') {
        return None;
    }
    let (denominator, end) = plain(text, at + 1)?;
    Some((quotient(numerator, denominator)?, end))
}

fn quotient(numerator: f64, denominator: f64) -> Option<f64> {
    (denominator != 0.).then(|| numerator / denominator)
}

/// Returns the number if it is all of `text`.
pub(super) fn whole(text: &str) -> Option<f64> {
    let text = text.trim();
    let (negative, at) = sign(text, 0);
    let (value, end) = plain(text, at)?;
    (end == text.len()).then_some(if negative { -value } else { value })
}

/// Parses digits, perhaps in groups of three, decimals and an exponent.
fn plain(text: &str, at: usize) -> Option<(f64, usize)> {
    let bytes = text.as_bytes();
    let digits = |from: usize| -> usize {
        bytes[from.min(bytes.len())..]
            .iter()
            .take_while(|b| b.is_ascii_digit())
            .count()
    };
    let first = digits(at);
    let mut end = at + first;
    if (1..=3).contains(&first) {
        let mut grouped = end;
        // LaTeX uses `{,}` and `,\!` for a comma without a space, and `\,` for a narrow space.
        while let Some(mark) = [",\\!", ",", "{,}\\!", "{,}", "\\,", "\\;", "\\ "]
            .into_iter()
            .find(|mark| text[grouped..].starts_with(mark) && digits(grouped + mark.len()) == 3)
        {
            grouped += mark.len() + 3;
        }
        // "1,2345" is two numbers and not "1,234" with a 5 after it.
        if digits(grouped) == 0 {
            end = grouped;
        }
    }
    let decimals = if bytes.get(end) == Some(&b'.') {
        digits(end + 1)
    } else {
        0
    };
    if decimals > 0 {
        end += 1 + decimals;
    } else if first == 0 {
        return None;
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let signed = end + 1 + usize::from(matches!(bytes.get(end + 1), Some(b'-' | b'+')));
        let exponent = digits(signed);
        if exponent > 0 {
            end = signed + exponent;
        }
    }
    let is_mark = |c: char| GROUP_MARKS.contains(c);
    let value = text[at..end].replace(is_mark, "").parse().ok()?;
    Some((value, end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn values(text: &str) -> Vec<f64> {
        numbers(text).iter().map(|number| number.value).collect()
    }

    #[rstest]
    #[case("42", &[42.])]
    #[case("it is 1,234,567.", &[1_234_567.])]
    #[case("1,2345 and 1,200kg", &[1., 2345., 1200.])]
    #[case("1, 2, 3", &[1., 2., 3.])]
    #[case("1{,}234{,}567 and 1{,}2", &[1_234_567., 1., 2.])]
    #[case(r"10,\!000, 1\,234\,567 and 10{,}\!000", &[10_000., 1_234_567., 10_000.])]
    #[case(r"1\,23 and 4\; 567", &[1., 23., 4., 567.])]
    #[case(r"3 m^2, \text{km}^{3} and 2^3", &[3., 8.])]
    #[case(r"2^{10}, 2^{-1}, 10^-1 and 2^n", &[1024., 0.5, 0.1, 2.])]
    #[case(r"1.5 \times 10^{3}, -2\cdot 10^2, 3 × 10^−1", &[1500., -200., 0.3])]
    #[case("2 * 10 and 10^9999", &[2., 10., 10., 9999.])]
    #[case("2^{ 3 }, 2^{3, 2^{--3}", &[8., 2., 3., 2., -3.])]
    #[case("-7, −8, $-9 and -$10.50", &[-7., -8., -9., -10.5])]
    #[case("17-5=12", &[17., 5., 12.])]
    #[case("x -5", &[-5.])]
    #[case("3/4 of 1/3", &[0.75, 1. / 3.])]
    #[case("2 1/2 cups, 2 3 4", &[2.5, 2., 3., 4.])]
    #[case(r"-\frac{1}{2} or \dfrac{-6}{4}", &[-0.5, -1.5])]
    #[case("1/0", &[1., 0.])]
    #[case(".5 0.25 5. 1e3 2e", &[0.5, 0.25, 5., 1000., 2.])]
    #[case("50% of 3.5kg", &[50., 3.5])]
    #[case("€12 £3", &[12., 3.])]
    #[case("none - , . / \\frac{1", &[1.])]
    #[case("", &[])]
    fn numbers_are_found_in_text(#[case] text: &str, #[case] expected: &[f64]) {
        assert_eq!(values(text), expected, "{text:?}");
    }

    #[test]
    fn a_number_too_large_for_a_float_is_one_number_all_the_same() {
        assert_eq!(values("1e999"), [f64::INFINITY]);
    }

    proptest! {
        #[test]
        fn a_written_number_is_read_back(x in -1e9f64..1e9) {
            let read = values(&format!("so: {x}."));
            prop_assert_eq!(read, vec![x]);
        }

        #[test]
        fn no_text_makes_the_parser_panic(text in ".*") {
            let _ = numbers(&text);
        }
    }
}

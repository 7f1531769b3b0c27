//! JSON integers that do not fit in 64 bits.

use std::borrow::Cow;

use serde_json::Value;

/// The largest u64, 18446744073709551615, has one digit more. A shorter integer always fits in 64
/// bits.
const FEWEST_DIGITS: usize = 19;

/// Returns the text with each such integer in quotation marks, because [`serde_json`] numbers would
/// lose digits.
pub fn quoted(text: &str) -> Cow<'_, str> {
    let bytes = text.as_bytes();
    let mut quoted = String::new();
    let (mut copied, mut at) = (0, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = end_of_text(bytes, at),
            b'-' | b'0'..=b'9' => {
                let is_of_number =
                    |byte: &u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
                let length = bytes[at..].iter().take_while(|byte| is_of_number(byte));
                let end = at + length.count();
                if is_large(&text[at..end]) {
                    quoted.extend([&text[copied..at], "\"", &text[at..end], "\""]);
                    copied = end;
                }
                at = end;
            }
            _ => at += 1,
        }
    }
    match copied {
        0 => Cow::Borrowed(text),
        _ => Cow::Owned(quoted + &text[copied..]),
    }
}

/// Parses JSON, with each such integer as a string.
///
/// # Errors
///
/// If the text is not JSON.
pub fn parsed(text: &str) -> serde_json::Result<Value> {
    let value = serde_json::from_str(text)?;
    match quoted(text) {
        Cow::Borrowed(_) => Ok(value),
        Cow::Owned(text) => serde_json::from_str(&text),
    }
}

/// Returns the position after the string that begins at `start`, or the end of its line.
fn end_of_text(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\n' => return at,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Returns whether a number is a JSON integer outside i64 and u64.
fn is_large(number: &str) -> bool {
    let digits = number.strip_prefix('-').unwrap_or(number);
    digits.len() >= FEWEST_DIGITS
        && !digits.starts_with('0')
        && digits.bytes().all(|byte| byte.is_ascii_digit())
        && number.parse::<i64>().is_err()
        && number.parse::<u64>().is_err()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("[18446744073709551616]", "[\"18446744073709551616\"]")]
    #[case("[-9223372036854775809]", "[\"-9223372036854775809\"]")]
    #[case(
        r#"{"a": 123456789012345678901234567890, "b": [1, 99999999999999999999]}"#,
        r#"{"a": "123456789012345678901234567890", "b": [1, "99999999999999999999"]}"#
    )]
    fn an_integer_of_more_than_64_bits_becomes_a_text(#[case] text: &str, #[case] expected: &str) {
        assert_eq!(quoted(text), expected);
    }

    #[test]
    fn a_text_that_is_not_json_stays_an_error() {
        let value = parsed("[18446744073709551616, 1]").unwrap();
        assert_eq!(value, serde_json::json!(["18446744073709551616", 1]));
        assert!(parsed("{18446744073709551616: 1}").is_err());
    }

    #[rstest]
    #[case("[18446744073709551615, -9223372036854775808]")]
    #[case(r#"{"a \" 99999999999999999999": "99999999999999999999"}"#)]
    #[case("[99999999999999999999.5, 99999999999999999999e2, 1e99]")]
    #[case("[00000000000000000000001]")]
    #[case("[99999999999999999999-1]")]
    #[case("\"99999999999999999999\\")]
    fn other_texts_stay_as_they_are(#[case] text: &str) {
        assert_eq!(quoted(text), text);
    }
}

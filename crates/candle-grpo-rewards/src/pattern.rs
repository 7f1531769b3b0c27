//! Regular expressions, with plain error messages.

use candle_grpo_core::Invalid;
use regex::Regex;
use regex_syntax::ast::{ErrorKind, Span};
use regex_syntax::hir;

/// Compiles the option `pattern`.
///
/// # Errors
///
/// Fails if the pattern is invalid, with the position and the reason, or if it needs too much
/// memory.
pub fn compile(pattern: &str) -> Result<Regex, Invalid> {
    Regex::new(pattern).map_err(|error| {
        let must = match (error, regex_syntax::parse(pattern)) {
            (_, Err(error)) => format!("be a regular expression; {}", reason(&error)),
            (regex::Error::CompiledTooBig(bytes), _) => {
                format!("be a regular expression that compiles to at most {bytes} bytes")
            }
            _ => "be a regular expression".to_owned(),
        };
        Invalid::new("pattern", format_args!("{pattern:?}"), must)
    })
}

fn reason(error: &regex_syntax::Error) -> String {
    let (pattern, span, what) = match error {
        regex_syntax::Error::Parse(error) => (error.pattern(), error.span(), syntax(error.kind())),
        regex_syntax::Error::Translate(error) => {
            (error.pattern(), error.span(), meaning(error.kind()))
        }
        _ => return "its syntax is wrong".to_owned(),
    };
    format!("character {}: {what}", character(pattern, span))
}

/// Returns the number, counted from 1, of the character at which the span begins.
fn character(pattern: &str, span: &Span) -> usize {
    let before = pattern.get(..span.start.offset).unwrap_or(pattern);
    before.chars().count() + 1
}

fn syntax(kind: &ErrorKind) -> &'static str {
    use ErrorKind as Kind;
    match kind {
        Kind::GroupUnclosed => "a parenthesis is not closed",
        Kind::GroupUnopened => "a parenthesis is closed that is not open",
        Kind::ClassUnclosed => "a square bracket is not closed",
        Kind::ClassRangeInvalid => "a range of characters must begin with the smaller one",
        Kind::ClassRangeLiteral | Kind::ClassEscapeInvalid => {
            "a character between square brackets is not valid"
        }
        Kind::RepetitionMissing => "there is nothing to repeat",
        Kind::RepetitionCountUnclosed => {
            "a curly bracket is not closed; write \\{ for the character"
        }
        Kind::RepetitionCountInvalid => "a range of counts must begin with the smaller one",
        Kind::RepetitionCountDecimalEmpty | Kind::DecimalEmpty | Kind::DecimalInvalid => {
            "curly brackets must hold a count; write \\{ for the character"
        }
        Kind::EscapeUnexpectedEof => "a backslash ends the pattern; write \\\\ for the character",
        Kind::EscapeUnrecognized => "there is no such escape; write \\\\ for a backslash",
        Kind::EscapeHexEmpty | Kind::EscapeHexInvalid | Kind::EscapeHexInvalidDigit => {
            "an escape must have the number of a character in hexadecimal digits"
        }
        Kind::FlagDanglingNegation
        | Kind::FlagDuplicate { .. }
        | Kind::FlagRepeatedNegation { .. }
        | Kind::FlagUnexpectedEof
        | Kind::FlagUnrecognized => "a flag after (? must be one of i, m, s, R, U, u, x, each once",
        Kind::GroupNameDuplicate { .. } => "a name of a group is given twice",
        Kind::GroupNameEmpty | Kind::GroupNameInvalid | Kind::GroupNameUnexpectedEof => {
            "the name of a group must be of letters, digits and _, as in (?<name>...)"
        }
        Kind::UnicodeClassInvalid => "a class of characters is not valid",
        Kind::UnsupportedBackreference => "references to groups, such as \\1, are not supported",
        Kind::UnsupportedLookAround => {
            "conditions on the text before or after, such as (?=...), are not supported"
        }
        Kind::NestLimitExceeded(_) | Kind::CaptureLimitExceeded => "there are too many groups",
        _ => "the syntax is wrong",
    }
}

fn meaning(kind: &hir::ErrorKind) -> &'static str {
    use hir::ErrorKind as Kind;
    match kind {
        Kind::InvalidUtf8 => "it could match a part of a character",
        Kind::UnicodePropertyNotFound | Kind::UnicodePropertyValueNotFound => {
            "there is no such class of characters"
        }
        _ => "the syntax is wrong",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("ab(c", "character 3: a parenthesis is not closed")]
    #[case("a)|(b", "character 2: a parenthesis is closed that is not open")]
    #[case("é[a", "character 2: a square bracket is not closed")]
    #[case("*a", "character 1: there is nothing to repeat")]
    #[case(
        "[z-a]",
        "character 2: a range of characters must begin with the smaller one"
    )]
    #[case("a{3", "character 2: a curly bracket is not closed")]
    #[case("a{x}", "character 3: curly brackets must hold a count")]
    #[case(
        "a{3,2}",
        "character 2: a range of counts must begin with the smaller one"
    )]
    #[case("a\\", "character 2: a backslash ends the pattern")]
    #[case(r"\y", "character 1: there is no such escape")]
    #[case(
        r"\x{110000}",
        "character 4: an escape must have the number of a character"
    )]
    #[case("(?P<1>a)", "character 5: the name of a group must be of letters")]
    #[case("(?<a>b)(?<a>c)", "character 11: a name of a group is given twice")]
    #[case("(?z)", "character 3: a flag after (? must be one of")]
    #[case(r"(a)\1", "character 4: references to groups, such as")]
    #[case("(?=a)", "character 1: conditions on the text before or after")]
    #[case(r"\p{Klingon}", "character 1: there is no such class of characters")]
    #[case(r"(?-u)\xFF", "character 6: it could match a part of a character")]
    #[case("(?:a{1000}){1000}", "that compiles to at most 10485760 bytes")]
    fn a_pattern_that_is_not_valid_has_a_position_and_a_reason(
        #[case] pattern: &str,
        #[case] words: &str,
    ) {
        let error = compile(pattern).unwrap_err();
        assert_eq!(
            (error.field.as_str(), error.value),
            ("pattern", format!("{pattern:?}"))
        );
        assert!(error.must.contains(words), "{}", error.must);
    }
}

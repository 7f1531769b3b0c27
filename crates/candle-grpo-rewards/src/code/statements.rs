//! The statements in a Python test, as far as they determine whether it asserts something.

use std::sync::LazyLock;

use anyhow::{Result, bail};
use regex::Regex;

/// Functions that fail unless something holds, in addition to those that begin with `assert`.
pub(super) const CHECKS: [&str; 2] = ["raises", "warns"];

/// Functions that end a test.
pub(super) const EXITS: [&str; 4] = ["exit", "_exit", "quit", "fail"];

/// An assertion, a failure, or a call to a function that is one.
static MARK: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let names = [&CHECKS[..], &EXITS[..]].concat().join("|");
    Regex::new(&format!(
        r"\b(?:assert|raise)\b|\b(?:assert\w*|{names})\s*\("
    ))
    .ok()
});

static DEFINITION: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r"^(?:async\s+)?(def|class)\s+(\w+)\s*(?:\(\s*(\w*)\s*([,:=)])?)?").ok()
});

static NAME: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"\w+").ok());

/// A top-level function or class.
#[derive(Debug, Default)]
struct Definition {
    name: String,
    /// True if it contains an assertion.
    asserts: bool,
    /// True for a unittest or pytest class.
    is_case: bool,
    /// True if test runners call it: a function, or a class with a test method.
    is_test: bool,
    /// True for a function whose only parameter is the program's function.
    takes_candidate: bool,
}

/// Facts about a test's statements that determine whether it asserts something.
#[derive(Debug, Default)]
pub(super) struct Statements {
    /// True if there are statements.
    exist: bool,
    /// True if a statement outside any definition asserts something.
    assert: bool,
    definitions: Vec<Definition>,
    /// Names that statements outside definitions use, such as functions that they call or pass on.
    uses: Vec<String>,
}

impl Statements {
    pub(super) fn read(text: &str) -> Self {
        let mut all = Self::default();
        // Each open block's indentation, and whether it is a definition.
        let mut open: Vec<(usize, bool)> = Vec::new();
        for Line { indent, code } in lines(text) {
            if code.trim_matches(['\'', ' ', ';']).is_empty() {
                continue;
            }
            all.exist = true;
            while open.last().is_some_and(|(at, _)| *at >= indent) {
                open.pop();
            }
            let is_inside = open.iter().any(|(_, is_definition)| *is_definition);
            let asserts = MARK.as_ref().is_some_and(|mark| mark.is_match(&code));
            let definition = DEFINITION.as_ref().and_then(|form| form.captures(&code));
            let word = |at: usize| {
                let captures = definition.as_ref();
                captures
                    .and_then(|found| found.get(at))
                    .map_or("", |word| word.as_str())
            };
            if definition.is_some() && !is_inside {
                let (name, is_class) = (word(2).to_owned(), word(1) == "class");
                let is_base = |known: &Definition| known.is_case && code.contains(&known.name);
                all.definitions.push(Definition {
                    is_case: is_class
                        && (name.starts_with("Test")
                            || code.contains("TestCase")
                            || all.definitions.iter().any(is_base)),
                    is_test: !is_class && name.starts_with("test"),
                    takes_candidate: !is_class && word(3) == "candidate" && word(4) != ",",
                    asserts: false,
                    name,
                });
            } else if let (Some(_), Some(owner)) = (&definition, all.definitions.last_mut()) {
                owner.is_test |= owner.is_case && word(2).starts_with("test");
            } else if !is_inside {
                let names = NAME.iter().flat_map(|name| name.find_iter(&code));
                all.uses.extend(names.map(|name| name.as_str().to_owned()));
            }
            open.push((indent, definition.is_some()));
            match all.definitions.last_mut() {
                Some(last) if is_inside || definition.is_some() => last.asserts |= asserts,
                _ => all.assert |= asserts,
            }
        }
        all
    }

    /// Returns the functions that must be called with the program's function.
    ///
    /// # Errors
    ///
    /// Fails if nothing is asserted, or if nothing calls the code that asserts.
    pub(super) fn ensure_asserts(self) -> Result<Vec<String>> {
        let is_called = |definition: &Definition| self.uses.contains(&definition.name);
        let candidates = self.definitions.iter();
        let candidates = candidates.filter(|it| it.takes_candidate && !is_called(it));
        let candidates: Vec<String> = candidates.map(|it| it.name.clone()).collect();
        let asserting = self.definitions.iter().find(|it| it.asserts);
        let mut all = self.definitions.iter();
        let runs = all.any(|definition| definition.is_test || is_called(definition));
        match asserting {
            _ if !self.exist => bail!("no statements, must have an assertion"),
            _ if self.assert => {}
            Some(_) if runs || !candidates.is_empty() => {}
            Some(Definition { name, .. }) => bail!(
                "{name}: nothing calls it; the text must call it, or its name must begin with \
                 \"test\""
            ),
            None => bail!(
                "asserts nothing, must have an assertion: a statement with assert or raise, or a \
                 test of unittest or pytest"
            ),
        }
        Ok(candidates)
    }
}

/// A statement, or a block's head, on one line.
struct Line {
    /// The column at which it begins.
    indent: usize,
    /// Its text, without comments and string contents.
    code: String,
}

/// Splits a text into statements.
fn lines(text: &str) -> Vec<Line> {
    let mut lines = Vec::new();
    let (mut indent, mut code, mut depth) = (0, String::new(), 0usize);
    let mut is_begin = true;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        rest = &rest[c.len_utf8()..];
        match c {
            ' ' if is_begin => indent += 1,
            '\t' if is_begin => indent = (indent / 8 + 1) * 8,
            '\n' | '\r' | ';' if depth == 0 => {
                let is_end = c != ';';
                lines.push(Line {
                    indent,
                    code: std::mem::take(&mut code),
                });
                (is_begin, indent) = if is_end { (true, 0) } else { (false, indent) };
            }
            '\\' if rest.starts_with(['\n', '\r']) => {
                rest = rest.trim_start_matches('\r');
                rest = rest.strip_prefix('\n').unwrap_or(rest);
            }
            // A Rust attribute is not a comment.
            '#' if !rest.starts_with(['[', '!']) => {
                rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
            }
            '\'' | '"' => {
                is_begin = false;
                // Letters before a string are its prefix.
                while code.ends_with(|c: char| "rRbBuUfF".contains(c)) {
                    code.pop();
                }
                code.push_str("''");
                rest = after_string(rest, c);
            }
            _ => {
                is_begin = false;
                match c {
                    '(' | '[' | '{' => depth += 1,
                    ')' | ']' | '}' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                code.push(if c.is_whitespace() { ' ' } else { c });
            }
        }
    }
    lines.push(Line { indent, code });
    lines
}

/// Returns the text after the string that begins before `rest` with `quote`.
fn after_string(rest: &str, quote: char) -> &str {
    let triple = [quote; 2].iter().collect::<String>();
    let is_triple = rest.starts_with(&triple);
    let end = if is_triple {
        [quote; 3].iter().collect()
    } else {
        quote.to_string()
    };
    let from = if is_triple { 2 } else { 0 };
    let mut at = from;
    while let Some(c) = rest[at..].chars().next() {
        if rest[at..].starts_with(&end) {
            return &rest[at + end.len()..];
        }
        if c == '\n' && !is_triple {
            break;
        }
        at += c.len_utf8();
        if c == '\\' {
            at += rest[at..].chars().next().map_or(0, char::len_utf8);
        }
    }
    &rest[at..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("assert f(2) == 4")]
    #[case("x = 1; assert f(x)")]
    #[case("if True:\n    assert f(2)")]
    #[case("for i in range(3): assert f(i)")]
    #[case("if f(2) != 4:\n\traise ValueError('no')")]
    #[case("if f(2) != 4: import sys; sys.exit(1)")]
    #[case("np.testing.assert_allclose(f(2), 4)")]
    #[case("with pytest.raises(ValueError):\n    f(2)")]
    #[case("def check(candidate):\n    assert candidate(2) == 4\n\ncheck(f)")]
    #[case("def run():\n    helper()\ndef helper():\n    assert f(2)\nrun()")]
    #[case("def test_f():\n    assert f(2) == 4")]
    #[case("class A(TestCase):\n  pass\nclass B(A):\n  def test(self):\n    self.fail()")]
    #[case("async def test_f():\n    assert f(2) == 4")]
    #[case("class TestF:\n    def test_f(self):\n        assert f(2) == 4")]
    #[case(
        "import unittest\nclass A(unittest.TestCase):\n  def test(self):\n    self.assertEqual(1, f(1))"
    )]
    #[case("'''text'''\nassert f('#') == \"a\\\"b\"")]
    #[case("x = [\n  1,\n]\nassert x")]
    #[case("text = 'it''s'\nassert \\\n  f(2)")]
    fn a_text_may_assert(#[case] text: &str) {
        assert_eq!(
            Statements::read(text).ensure_asserts().unwrap(),
            [""; 0],
            "{text}"
        );
    }

    #[rstest]
    #[case("", "no statements")]
    #[case(" \n\t\n", "no statements")]
    #[case("# assert f(2) == 4\n", "no statements")]
    #[case("'''\nassert f(2) == 4\n'''", "no statements")]
    #[case("\"assert f(2)\"", "no statements")]
    #[case("pass", "asserts nothing")]
    #[case("f(2)\nprint('assert', f(2) == 4)", "asserts nothing")]
    #[case("x = '''\nassert f(2)\n'''", "asserts nothing")]
    #[case("f(2) == 4  # assert", "asserts nothing")]
    #[case("['assert f(2) == 4', 'assert f(3) == 9']", "asserts nothing")]
    #[case("def test_f():\n    f(2)", "asserts nothing")]
    #[case("def run():\n    assert f(2)", "run: nothing calls it")]
    #[case("def check(g):\n    assert g(2)", "check: nothing calls it")]
    #[case(
        "class A(B):\n    def test(self):\n        assert f(2)",
        "A: nothing calls it"
    )]
    #[case(
        "class TestA:\n    def run(self):\n        assert f(2)",
        "TestA: nothing calls it"
    )]
    #[case(
        "def run():\n    def inner():\n        assert f(2)\nx = 3",
        "run: nothing calls it"
    )]
    fn a_text_that_asserts_nothing_is_an_error(#[case] text: &str, #[case] words: &str) {
        let error = Statements::read(text).ensure_asserts().unwrap_err();
        assert!(error.to_string().contains(words), "{text}: {error}");
    }

    #[rstest]
    #[case("def check(candidate):\n    assert candidate(2)", &["check"])]
    #[case("METADATA = {}\n\n\ndef test(candidate: int = 3):\n  if not candidate(2): raise A", &["test"])]
    #[case("def same(a, b):\n    assert a == b\ndef check(candidate):\n    same(candidate(2), 4)", &["check"])]
    #[case("def one(candidate): assert candidate(1)\ndef two(candidate):\n  assert candidate(2)", &["one", "two"])]
    fn functions_of_a_candidate_are_called_by_the_reward(
        #[case] text: &str,
        #[case] expected: &[&str],
    ) {
        assert_eq!(Statements::read(text).ensure_asserts().unwrap(), expected);
    }
}

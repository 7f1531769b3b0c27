//! An answer's boxes.

use crate::answer;

/// The last `\boxed{}` values that belong together.
pub(super) struct Boxes<'a> {
    /// Box contents.
    pub(super) inside: Vec<&'a str>,
    /// Position after the last box.
    pub(super) end: usize,
}

/// Returns the last `\boxed{}`, and earlier ones in the same formula, or joined by a comma, `and`
/// or `or` without other words: at most 64. Returns `None` if the last one is not closed.
pub(super) fn last_boxes(text: &str) -> Option<Boxes<'_>> {
    let mut boxes: Vec<(usize, usize, &str)> = Vec::new();
    let mut end = text.len();
    for open in answer::boxes(text).take(64) {
        let start = open.start;
        let from = text.len() - open.rest.len();
        let Some(inside) = open.inside(end.saturating_sub(from)) else {
            // The text ends inside the last box, so its answer is unknown.
            if boxes.is_empty() {
                return None;
            }
            continue;
        };
        let after = from + inside.len() + open.brace();
        match boxes.last() {
            Some((next, ..)) if !belong_together(text, after, *next) => break,
            _ => boxes.push((start, after, inside.trim())),
        }
        end = start;
    }
    boxes.reverse();
    let end = boxes.last()?.1;
    let inside = boxes.into_iter().map(|(_, _, inside)| inside).collect();
    Some(Boxes { inside, end })
}

/// Returns true if the text between two boxes joins them.
fn belong_together(text: &str, after: usize, next: usize) -> bool {
    let between = &text[after..next];
    if between.contains("\n\n") || between.split_whitespace().nth(6).is_some() {
        return false;
    }
    // Without commands, and without names as in `x =`.
    let words = between.split(|c: char| !c.is_alphabetic());
    let words = words.filter(|word| {
        let is_name = word.len() < 2;
        !is_name && !matches!(*word, "text" | "quad" | "qquad")
    });
    let (joints, others): (Vec<_>, Vec<_>) =
        words.partition(|word| matches!(*word, "and" | "or" | "和" | "或"));
    let is_joined = !joints.is_empty() || between.contains([',', ';']);
    if between.trim().is_empty() || (is_joined && others.is_empty()) {
        return !between.contains(". ");
    }
    // In one formula, which an empty line would end.
    let before = text[..after].rsplit("\n\n").next().unwrap_or_default();
    let later = text[next..].split("\n\n").next().unwrap_or_default();
    let line = before.rsplit('\n').next().unwrap_or_default();
    let later_line = later.split('\n').next().unwrap_or_default();
    let is_dollars = line
        .replace("\\$", "")
        .replace("$$", "$")
        .matches('$')
        .count()
        % 2
        == 1;
    let is_open = |open: &str, close: &str| {
        last_mark(before, open) > last_mark(before, close) && last_mark(later, close).is_some()
    };
    let opened = (is_dollars && last_mark(later_line, "$").is_some())
        || is_open("\\(", "\\)")
        || is_open("\\[", "\\]");
    opened
        && !["$", "\\)", "\\]"]
            .iter()
            .any(|close| between.contains(close))
}

/// Returns the position where an unescaped mark last occurs: `\\[4pt]` is a line break with a
/// space.
fn last_mark(text: &str, mark: &str) -> Option<usize> {
    let mut marks = text.rmatch_indices(mark).map(|(at, _)| at);
    marks.find(|at| !text[..*at].ends_with('\\'))
}

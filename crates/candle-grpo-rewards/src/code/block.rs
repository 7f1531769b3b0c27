//! Fenced Markdown code blocks.

/// A line that starts with three or more backticks or tildes.
struct Fence<'a> {
    indent: usize,
    mark: char,
    length: usize,
    /// The rest of the line.
    info: &'a str,
}

impl<'a> Fence<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let text = line.trim_start_matches([' ', '\t']);
        let mark = text.chars().next().filter(|c| matches!(c, '`' | '~'))?;
        let info = text.trim_start_matches(mark);
        let length = text.len() - info.len();
        // `` ```x``` `` is inline code.
        let is_fence = length >= 3 && !(mark == '`' && info.contains('`'));
        is_fence.then(|| Self {
            indent: line.len() - text.len(),
            mark,
            length,
            info: info.trim(),
        })
    }

    fn closes(&self, opening: &Self) -> bool {
        self.mark == opening.mark && self.length >= opening.length && self.info.is_empty()
    }

    /// Returns true if its language is one of `languages`, or if `languages` is empty.
    fn has_language(&self, languages: &[String]) -> bool {
        let language = self.info.split([' ', '\t', '{', ',']).next();
        let language = language.unwrap_or_default();
        languages.is_empty()
            || languages
                .iter()
                .any(|name| name.eq_ignore_ascii_case(language))
    }
}

/// Returns the last fenced code block in `text` whose language is one of `languages`, or the last
/// block in any language if `languages` is empty.
///
/// Blocks follow CommonMark: an unclosed block ends with the text. In addition, a fence may have
/// any indentation, as in lists. Its lines are dedented by the same amount.
pub(super) fn last_block(text: &str, languages: &[String]) -> Option<String> {
    let mut last = None;
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let Some(opening) = Fence::read(line) else {
            continue;
        };
        let mut block = String::new();
        for line in lines.by_ref() {
            if Fence::read(line).is_some_and(|fence| fence.closes(&opening)) {
                break;
            }
            let white = line.len() - line.trim_start_matches([' ', '\t']).len();
            block += &line[white.min(opening.indent)..];
            block.push('\n');
        }
        if opening.has_language(languages) {
            last = Some(block);
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("no block", &[], None)]
    #[case("```\na\n```", &[], Some("a\n"))]
    #[case("```py\na\n```\nor\n~~~\nb\n~~~\nend", &[], Some("b\n"))]
    #[case("```py\na\n```\nor\n~~~\nb\n~~~\nend", &["py"], Some("a\n"))]
    #[case("```Python title=x\na\n```", &["py", "python"], Some("a\n"))]
    #[case("```sh\na\n```", &["python"], None)]
    #[case("```\na\n```", &["python"], None)]
    // A block is not closed by fences that are shorter, have another character, or name a language.
    #[case("````\n```\na\n```\n````", &[], Some("```\na\n```\n"))]
    #[case("~~~\n```\na\n~~~", &[], Some("```\na\n"))]
    #[case("```\na\n```py\nb\n```", &[], Some("a\n```py\nb\n"))]
    #[case("```\na\n````", &[], Some("a\n"))]
    // An unclosed block ends with the text.
    #[case("```python\na\nb", &[], Some("a\nb\n"))]
    #[case("```\n```", &[], Some(""))]
    #[case("a ```b``` c\n```b``` c", &[], None)]
    // In a list.
    #[case("1. so\n   ```\n   if a:\n       b\n\n   ```", &[], Some("if a:\n    b\n\n"))]
    #[case("```\r\na\r\n```\r\n", &[], Some("a\n"))]
    fn the_last_block_counts(
        #[case] text: &str,
        #[case] languages: &[&str],
        #[case] expected: Option<&str>,
    ) {
        let languages: Vec<String> = languages.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(last_block(text, &languages).as_deref(), expected);
    }
}

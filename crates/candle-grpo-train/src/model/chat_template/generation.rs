//! Support for `{% generation %}` blocks, which Jinja lacks.
//!
//! The tags are replaced by standard tags that write a marker at each end of the block. The markers
//! are then found in the text and removed.

use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use regex::{Captures, Regex};

use super::RenderedChat;

/// Two Unicode noncharacters, which are reserved for internal use by programs.
const CANDIDATES: Range<u32> = 0xFDD0..0xFDF0;

#[derive(Debug, Clone, Copy)]
pub(super) struct Marks {
    begin: char,
    end: char,
}

impl Marks {
    pub(super) fn absent_from(source: &str) -> Result<Self> {
        let mut absent = CANDIDATES
            .filter_map(char::from_u32)
            .filter(|&mark| !source.contains(mark));
        let (Some(begin), Some(end)) = (absent.next(), absent.next()) else {
            bail!("chat template: has every character from U+FDD0 to U+FDEF");
        };
        Ok(Self { begin, end })
    }

    /// The outer tag in each pair keeps the block's white space control and scope. Only the marker
    /// is between the outer and the inner tag.
    pub(super) fn replace_tags(&self, source: &str) -> Result<String> {
        let tag = Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")?;
        let replacement = |found: &Captures| {
            let (left, right) = (&found[1], &found[3]);
            match found.get(2) {
                None => format!(
                    "{{%{left} with %}}{{{{ '{}' }}}}{{% if true {right}%}}",
                    self.begin
                ),
                Some(_) => format!(
                    "{{%{left} endif %}}{{{{ '{}' }}}}{{% endwith {right}%}}",
                    self.end
                ),
            }
        };
        Ok(tag.replace_all(source, replacement).into_owned())
    }

    pub(super) fn take_out(&self, rendered: &str) -> Result<RenderedChat> {
        let (mut text, mut assistant) = (String::with_capacity(rendered.len()), Vec::new());
        let mut begins = Vec::new();
        for character in rendered.chars() {
            if character == self.begin {
                begins.push(text.len());
            } else if character == self.end {
                let begin = begins.pop().context(STRAY)?;
                assistant.push(begin..text.len());
            } else {
                text.push(character);
            }
        }
        ensure!(begins.is_empty(), STRAY);
        Ok(RenderedChat { text, assistant })
    }
}

const STRAY: &str = "chat template: one of the characters U+FDD0 to U+FDEF is in a message, or the template leaves a \
     generation block before its end";

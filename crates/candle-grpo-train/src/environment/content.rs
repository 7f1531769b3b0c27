//! Text from outside, in which special token names stay text.

use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, Tokenizer};

/// Marks where a text is cut before it is encoded. Unicode reserves this character for internal
/// use.
const CUT: char = '\u{fdd0}';

/// Encodes text with content from outside, such as tool outputs.
///
/// A tokenizer splits text at its added tokens' names. So content is cut within each such name, and
/// the pieces are encoded separately. No piece then contains the whole name.
pub(super) struct ContentEncoder {
    tokenizer: Arc<Tokenizer>,
    /// Names that content must not contain.
    names: Vec<Name>,
    /// True if content may contain them.
    allows_special_tokens: bool,
}

/// The name of a token that content must not become.
struct Name {
    text: String,
    /// The name after normalization, if the tokenizer searches for that.
    normalized: Option<String>,
}

impl ContentEncoder {
    pub(super) fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let added = tokenizer.get_added_tokens_decoder().into_values();
        // Some tokenizers have added tokens for spaces and accented letters.
        let is_markup = |text: &str| text.chars().count() > 1 && !text.trim().is_empty();
        let names = added
            .filter(|token| !token.content.is_empty())
            .filter(|token| token.special || is_markup(&token.content))
            .map(|token| Name {
                normalized: token
                    .normalized
                    .then(|| normalize(&tokenizer, &token.content)),
                text: token.content,
            });
        Self {
            names: names.collect(),
            tokenizer,
            allows_special_tokens: false,
        }
    }

    pub(super) fn allow_special_tokens(&mut self) {
        self.allows_special_tokens = true;
    }

    /// Returns content, with cuts, to be part of a text for [`Self::encode`].
    ///
    /// # Errors
    ///
    /// Fails if it contains a single-character special token, which cannot be cut.
    pub(super) fn content(&self, content: &str) -> Result<String> {
        if self.allows_special_tokens || content.is_empty() {
            return Ok(content.to_owned());
        }
        let everywhere = self.has_normalized_name(content);
        // The text around the content may contain the rest of a name. Templates remove spaces.
        let body = content.trim();
        let start = content.len() - content.trim_start().len();
        let end = start + body.len();
        let ends_a_name = self.names.iter().any(|name| name.may_end_in(body));
        let begins_a_name = self.names.iter().any(|name| name.may_begin_in(body));
        let mut cut = String::with_capacity(content.len());
        for (at, character) in content.char_indices() {
            let rest = &content[at..];
            let name = self.names.iter().find(|name| rest.starts_with(&name.text));
            if let Some(name) = name {
                ensure!(
                    name.text.chars().nth(1).is_some(),
                    "text: has {:?}, a special token of one character, which cannot be encoded as text",
                    name.text
                );
            }
            if ends_a_name && at == start {
                cut.push(CUT);
            }
            cut.push(match character {
                CUT => char::REPLACEMENT_CHARACTER,
                other => other,
            });
            let next = at + character.len_utf8();
            if everywhere || name.is_some() || begins_a_name && next == end {
                cut.push(CUT);
            }
        }
        Ok(cut)
    }

    /// Applies [`Self::content`] to all texts in `value`.
    pub(super) fn contents(&self, value: &Value) -> Result<Value> {
        Ok(match value {
            Value::String(text) => Value::String(self.content(text)?),
            Value::Array(items) => {
                let items = items.iter().map(|item| self.contents(item));
                Value::Array(items.collect::<Result<_>>()?)
            }
            Value::Object(fields) => {
                let fields = fields.iter();
                let fields = fields.map(|(name, x)| Ok((self.content(name)?, self.contents(x)?)));
                Value::Object(fields.collect::<Result<_>>()?)
            }
            other => other.clone(),
        })
    }

    /// Encodes a text. Outside content, special token names become those tokens.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = Vec::new();
        for piece in text.split(CUT).filter(|piece| !piece.is_empty()) {
            let encoding = self
                .tokenizer
                .encode(piece, false)
                .map_err(|_| anyhow!("{piece:?}: the tokenizer has no token for a part of it"))?;
            tokens.extend(encoding.get_ids());
        }
        Ok(tokens)
    }

    /// Returns whether the content contains a name after normalization, where no position in the
    /// original content is known.
    fn has_normalized_name(&self, content: &str) -> bool {
        let mut names = self
            .names
            .iter()
            .filter_map(|name| name.normalized.as_ref());
        if self.tokenizer.get_normalizer().is_none() || names.clone().next().is_none() {
            return false;
        }
        let content = normalize(&self.tokenizer, content);
        names.any(|name| content.contains(name))
    }
}

impl Name {
    /// Returns whether `content` can complete this name, which starts before it.
    fn may_end_in(&self, content: &str) -> bool {
        let ends = self.text.char_indices().skip(1);
        self.text.contains(content)
            || ends
                .map(|(at, _)| &self.text[at..])
                .any(|end| content.starts_with(end))
    }

    /// Returns whether `content` can start this name, which continues after it.
    fn may_begin_in(&self, content: &str) -> bool {
        let beginnings = self.text.char_indices().skip(1);
        beginnings
            .map(|(at, _)| &self.text[..at])
            .any(|beginning| content.ends_with(beginning))
    }
}

/// Applies the tokenizer's normalizer.
fn normalize(tokenizer: &Tokenizer, text: &str) -> String {
    let mut normalized = NormalizedString::from(text);
    match tokenizer.get_normalizer() {
        Some(normalizer) if normalizer.normalize(&mut normalized).is_ok() => {
            normalized.get().to_owned()
        }
        _ => text.to_owned(),
    }
}

//! Stop strings.

use anyhow::{Context, Result};

use super::{DecodeText, GenerationBatch};

/// Number of bytes that may be wrong at the start of a decoded text. It may begin within a
/// character, which decodes to up to three replacement characters with three bytes each, or lack a
/// space.
const GARBLED: usize = 10;

/// Strings that end a completion.
pub(super) struct StopStrings<'a> {
    strings: &'a [String],
    decode: &'a DecodeText,
}

impl<'a> StopStrings<'a> {
    /// Returns the stop strings in `batch`, if it has any.
    pub(super) fn new(batch: &GenerationBatch<'a>) -> Result<Option<Self>> {
        let strings = &batch.sampling.stop_strings;
        if strings.is_empty() {
            return Ok(None);
        }
        let decode = batch.decode.context(
            "stop_strings: the sampler cannot decode text, it needs with_tokenizer or with_text_decoder",
        )?;
        Ok(Some(Self { strings, decode }))
    }

    /// Returns the number of tokens in the shortest prefix of `tokens` whose text contains one of
    /// the strings. The first `searched` tokens must contain none.
    #[cfg(any(test, feature = "engines"))]
    pub(super) fn first_end(&self, tokens: &[u32], searched: usize) -> Result<Option<usize>> {
        for len in searched + 1..=tokens.len() {
            if self.end(&tokens[..len])? {
                return Ok(Some(len));
            }
        }
        Ok(None)
    }

    /// Returns true if the text for `tokens` contains one of the strings. Without the last token,
    /// it must contain none.
    pub(super) fn end(&self, tokens: &[u32]) -> Result<bool> {
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0);
        // The end of the text is enough. It may need many tokens, because some have no text.
        let before = match tokens.split_last() {
            Some((last, _)) => (self.decode)(&[*last])?.len(),
            None => 0,
        };
        let mut len = 1;
        loop {
            let len_now = len.min(tokens.len());
            let text = (self.decode)(&tokens[tokens.len() - len_now..])?;
            if len_now == tokens.len() || text.len() >= before + longest + GARBLED {
                return Ok(self.strings.iter().any(|stop| text.contains(stop)));
            }
            len *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    /// Bytes are tokens; 256 has no text, 257 is "END".
    fn decode(tokens: &[u32]) -> Result<String> {
        let mut bytes = Vec::new();
        for &token in tokens {
            match token {
                256 => (),
                257 => bytes.extend(b"END"),
                _ => bytes.push(u8::try_from(token).map_err(|e| anyhow!(e))?),
            }
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn strings(strings: &[&str]) -> Vec<String> {
        strings.iter().map(|s| (*s).to_owned()).collect()
    }

    fn stops(strings: &[String]) -> StopStrings<'_> {
        StopStrings {
            strings,
            decode: &decode,
        }
    }

    /// Where a completion ends, if it does.
    fn end(stops: &StopStrings, tokens: &[u32]) -> Option<usize> {
        stops.first_end(tokens, 0).unwrap()
    }

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[test]
    fn a_string_may_cross_tokens_and_end_inside_one() {
        let words = strings(&["</answer>", "EN", "é"]);
        let stops = stops(&words);
        assert_eq!(end(&stops, &bytes("is 42</answer>, so")), Some(14));
        assert_eq!(end(&stops, &bytes("is 42</answe r>")), None);
        assert_eq!(
            end(
                &stops,
                &[bytes("a long beginning "), vec![257, 65]].concat()
            ),
            Some(18)
        );
        assert_eq!(end(&stops, &bytes("caf\u{e9}s")), Some(5));
        assert_eq!(end(&stops, &bytes("É")), None);
        assert_eq!(end(&stops, &[]), None);
        // After tokens that were searched before.
        let end = stops.first_end(&bytes("is 42</answer>, so"), 9).unwrap();
        assert_eq!(end, Some(14));
    }

    #[test]
    fn tokens_without_text_may_stand_between() {
        let words = strings(&["end"]);
        let stops = stops(&words);
        let tokens = [
            bytes("something else, e"),
            vec![256; 50],
            bytes("n"),
            vec![256; 9],
            bytes("d"),
        ];
        let tokens = tokens.concat();
        assert_eq!(end(&stops, &tokens), Some(tokens.len()));
    }
}

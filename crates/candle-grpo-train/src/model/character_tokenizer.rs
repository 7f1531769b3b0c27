//! A tokenizer for small tasks, with one token per character.

use anyhow::{Result, anyhow, ensure};
use serde_json::json;
use tokenizers::Tokenizer;

/// Builds a tokenizer with the tokens `<eos>` (token 0) and the characters in `alphabet`, in order.
///
/// Text with other characters cannot be encoded. You can save it as a `tokenizer.json` that other
/// programs read.
///
/// # Errors
///
/// Fails if `alphabet` is empty or repeats a character.
pub fn character_tokenizer(alphabet: &str) -> Result<Tokenizer> {
    ensure!(
        !alphabet.is_empty(),
        "alphabet: empty, must have a character"
    );
    let mut vocabulary = serde_json::Map::new();
    vocabulary.insert(EOS.to_owned(), json!(EOS_ID));
    for (i, character) in alphabet.chars().enumerate() {
        let previous = vocabulary.insert(character.to_string(), json!(i + 1));
        ensure!(previous.is_none(), "alphabet: has {character:?} twice");
    }
    let description = json!({
        "version": "1.0",
        "added_tokens": [{
            "id": EOS_ID, "content": EOS, "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        }],
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Split", "pattern": { "Regex": "[\\s\\S]" }, "behavior": "Isolated", "invert": false,
        },
        "post_processor": null,
        "decoder": { "type": "Fuse" },
        "model": { "type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>" },
    });
    Tokenizer::from_bytes(description.to_string()).map_err(|e| anyhow!("alphabet: {e}"))
}

const EOS: &str = "<eos>";
const EOS_ID: u32 = 0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encodes_and_decodes_characters() {
        let tokenizer = character_tokenizer("01 é\n").unwrap();
        let encoding = tokenizer.encode("10 é\n0", false).unwrap();
        assert_eq!(encoding.get_ids(), [2, 1, 3, 4, 5, 1]);
        assert_eq!(
            tokenizer.decode(encoding.get_ids(), true).unwrap(),
            "10 é\n0"
        );
        assert_eq!(tokenizer.decode(&[2, 0], true).unwrap(), "1");
        assert_eq!(tokenizer.token_to_id("<eos>"), Some(0));
        assert_eq!(tokenizer.get_vocab_size(true), 6);
    }

    #[test]
    fn unknown_characters_and_bad_alphabets_are_errors() {
        assert!(
            character_tokenizer("01")
                .unwrap()
                .encode("2", false)
                .is_err()
        );
        assert!(character_tokenizer("").is_err());
        let error = character_tokenizer("010").unwrap_err().to_string();
        assert_eq!(error, "alphabet: has '0' twice");
    }
}

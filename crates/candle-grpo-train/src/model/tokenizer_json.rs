//! Tokenizers from the text of a `tokenizer.json`.

use anyhow::{Context, Result, anyhow, ensure};
use candle_grpo_base::json::{message, message_with_place};
use serde_json::Value;
use tokenizers::Tokenizer;
use tokenizers::normalizers::Precompiled;

/// The greatest factor by which the parts of a tokenizer may lengthen a text. Those of known ones
/// make a space three bytes, and compose or decompose letters once or twice.
const MAX_GROWTH: f64 = 4096.;

/// The most pieces around and between texts. Those of known tokenizers are fewer than ten.
const MAX_PIECES: usize = 64;

/// Builds the tokenizer of `json`, without the truncation and the padding that it may have: the
/// library transformers ignores them unless it is asked to truncate or to pad.
///
/// Refuses some invalid texts first, on which `tokenizers` panics, and those that could lengthen a
/// text until memory is exhausted.
pub(crate) fn tokenizer_from_json(json: &[u8]) -> Result<Tokenizer> {
    let value: Value =
        serde_json::from_slice(json).map_err(|error| anyhow!(message_with_place(&error)))?;
    ensure_normalizer(&value["normalizer"]).context("normalizer")?;
    for part in ["normalizer", "pre_tokenizer", "decoder"] {
        ensure_bounded(&value[part]).context(part)?;
    }
    ensure_few_pieces(&value["post_processor"]).context("post_processor")?;
    let read = Tokenizer::from_bytes(json);
    let mut tokenizer = read.map_err(|error| {
        if error.is::<serde_json::Error>() {
            anyhow!(
                "must be a file of Hugging Face tokenizers; its model has the type {}",
                value["model"]["type"]
            )
        } else {
            anyhow!("{error}")
        }
    })?;
    tokenizer.with_padding(None);
    let removed = tokenizer.with_truncation(None);
    removed.map_err(|error| anyhow!("truncation: {error}"))?;
    Ok(tokenizer)
}

fn ensure_normalizer(normalizer: &Value) -> Result<()> {
    match (normalizer["type"].as_str(), &normalizer["normalizers"]) {
        (Some("Precompiled"), _) => {
            serde_json::from_value::<Precompiled>(normalizer.clone())
                .map_err(|error| anyhow!("Precompiled: {}", message(&error)))?;
        }
        (_, Value::Array(parts)) => parts.iter().try_for_each(ensure_normalizer)?,
        _ => {}
    }
    Ok(())
}

/// Refuses parts that could lengthen a text by more than [`MAX_GROWTH`].
fn ensure_bounded(part: &Value) -> Result<()> {
    let growth = growth(part);
    ensure!(
        growth <= MAX_GROWTH,
        "could make a text {growth:.0} times as long, must be at most {MAX_GROWTH:.0}"
    );
    Ok(())
}

/// The greatest factor by which a part of a tokenizer lengthens a text.
fn growth(part: &Value) -> f64 {
    let parts = ["normalizers", "pretokenizers", "decoders"].map(|name| part[name].as_array());
    if let Some(parts) = parts.into_iter().flatten().next() {
        return parts.iter().map(growth).product();
    }
    match part["type"].as_str() {
        Some("Replace") => {}
        // A byte becomes a letter of up to two bytes.
        Some("ByteLevel") => return 2.,
        // A space becomes `▁`.
        Some("Metaspace") => return 3.,
        // U+0390 becomes three letters, and U+FDFA, of three bytes, 33 bytes.
        Some("NFC" | "NFD" | "BertNormalizer") => return 3.,
        Some("NFKC" | "NFKD" | "Nmt" | "Precompiled") => return 11.,
        _ => return 1.,
    }
    let content = part["content"].as_str().map_or(0, str::len) as f64;
    match part["pattern"]["String"].as_str().map(str::len) {
        Some(pattern) if pattern > 0 => (content / pattern as f64).max(1.),
        // An expression may match nothing before each byte.
        _ => content + 1.,
    }
}

/// Refuses templates that repeat a text, or add special tokens, too often.
fn ensure_few_pieces(part: &Value) -> Result<()> {
    if let Some(parts) = part["processors"].as_array() {
        return parts.iter().try_for_each(ensure_few_pieces);
    }
    let ids = |piece: &Value| {
        let name = piece["SpecialToken"]["id"].as_str()?;
        Some(part["special_tokens"][name]["ids"].as_array()?.len())
    };
    for name in ["single", "pair"] {
        let pieces = part[name].as_array().into_iter().flatten();
        let count: usize = pieces.map(|piece| ids(piece).unwrap_or(1)).sum();
        ensure!(
            count <= MAX_PIECES,
            "{name}: {count} pieces, must be at most {MAX_PIECES}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use serde_json::json;

    fn tokenizer(part: &str, value: Value) -> Result<Tokenizer> {
        let mut json = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
        });
        json[part] = value;
        tokenizer_from_json(json.to_string().as_bytes())
    }

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    #[rstest]
    #[case("normalizer", "normalizers", replace(json!({"String": "a"}), "aa"), 40)]
    #[case("normalizer", "normalizers", replace(json!({"Regex": ""}), &"x".repeat(1000)), 6)]
    #[case("decoder", "decoders", replace(json!({"String": "a"}), "aa"), 40)]
    #[case("normalizer", "normalizers", json!({"type": "ByteLevel"}), 40)]
    #[case("normalizer", "normalizers", json!({"type": "NFKD"}), 20)]
    #[case(
        "pre_tokenizer",
        "pretokenizers",
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": false}),
        40
    )]
    fn parts_that_grow_without_a_bound_are_refused(
        #[case] part: &str,
        #[case] parts: &str,
        #[case] replacement: Value,
        #[case] count: usize,
    ) {
        let all = json!({"type": "Sequence", parts: vec![replacement; count]});
        let error = format!("{:#}", tokenizer(part, all).unwrap_err());
        assert!(
            error.contains(part) && error.contains("must be at most 4096"),
            "{error}"
        );
    }

    #[test]
    fn a_template_that_repeats_the_text_is_refused() {
        let piece = json!({"Sequence": {"id": "A", "type_id": 0}});
        let template = |count: usize| {
            json!({"type": "TemplateProcessing", "single": vec![piece.clone(); count],
                "pair": [piece, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {}})
        };
        let nested = json!({"type": "Sequence", "processors": [template(200_000)]});
        for template in [template(200_000), nested] {
            let error = format!("{:#}", tokenizer("post_processor", template).unwrap_err());
            assert!(error.contains("single: 200000 pieces"), "{error}");
        }
        assert!(tokenizer("post_processor", template(1)).is_ok());
    }

    /// Gemma's and T5's replacements of spaces, and Llama's prefix.
    #[test]
    fn replacements_of_known_tokenizers_are_accepted() {
        let parts = [
            json!({"type": "NFKC"}),
            json!({"type": "Prepend", "prepend": "▁"}),
            replace(json!({"String": " "}), "▁"),
            replace(json!({"Regex": " {2,}"}), "▁"),
            replace(json!({"String": "``"}), "\""),
        ];
        let all = json!({"type": "Sequence", "normalizers": parts});
        assert!(tokenizer("normalizer", all).is_ok());
    }
}

//! Tokenizers from the text of a `tokenizer.json`.

use anyhow::{Context, Result, anyhow};
use candle_grpo_nn::json::{message, message_with_place};
use serde_json::Value;
use tokenizers::Tokenizer;
use tokenizers::normalizers::Precompiled;

/// Builds the tokenizer of `json`, without the truncation and the padding that it may have: the
/// library transformers ignores them unless it is asked to truncate or to pad.
///
/// Refuses some invalid texts first, on which `tokenizers` panics.
pub(crate) fn tokenizer_from_json(json: &[u8]) -> Result<Tokenizer> {
    let value: Value =
        serde_json::from_slice(json).map_err(|error| anyhow!(message_with_place(&error)))?;
    ensure_normalizer(&value["normalizer"]).context("normalizer")?;
    let read = Tokenizer::from_bytes(json);
    let mut tokenizer = read.map_err(|error| match error.is::<serde_json::Error>() {
        true => anyhow!(
            "must be a file of Hugging Face tokenizers; its model has the type {}",
            value["model"]["type"]
        ),
        false => anyhow!("{error}"),
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

//! The text of a row, with marks around what trains.

use anyhow::Result;
use tokenizers::Tokenizer;

use crate::Sequence;
use crate::rollout::decode::decode_tokens;

/// Returns the text of the first `max_tokens` tokens of `row`, with `⟦` and `⟧` around what trains.
///
/// # Errors
///
/// If the tokenizer cannot decode the tokens.
pub fn marked_text(row: &Sequence, tokenizer: &Tokenizer, max_tokens: usize) -> Result<String> {
    let all = row.tokens();
    let shown = all.len().min(max_tokens);
    let trains: Vec<bool> = row.weights().iter().map(|&weight| weight > 0.).collect();
    let (mut text, mut start) = (String::new(), 0);
    for run in trains[..shown].chunk_by(|a, b| a == b) {
        let tokens = &all[start..start + run.len()];
        start += run.len();
        let piece = decode_tokens(tokens, tokenizer)?;
        match run[0] {
            true => text.extend(["⟦", piece.as_str(), "⟧"]),
            false => text.push_str(&piece),
        }
    }
    if shown < all.len() {
        text.push('…');
    }
    Ok(text)
}

//! A row's text, with marks around what trains.

use anyhow::Result;
use tokenizers::Tokenizer;

use crate::Sequence;
use crate::rollout::decode::decode_tokens;

/// Returns the text of the first `max_tokens` tokens in `row`, with `⟦` and `⟧` around what trains.
///
/// # Errors
///
/// Fails if the tokenizer cannot decode the tokens.
pub fn marked_text(row: &Sequence, tokenizer: &Tokenizer, max_tokens: usize) -> Result<String> {
    let all = row.tokens();
    let shown = all.len().min(max_tokens);
    let trains: Vec<bool> = row.weights().iter().map(|&weight| weight > 0.).collect();
    let (mut text, mut start) = (String::new(), 0);
    for run in trains[..shown].chunk_by(|a, b| a == b) {
        let tokens = &all[start..start + run.len()];
        start += run.len();
        let piece = decode_tokens(tokens, tokenizer)?;
        if run[0] {
            text.extend(["⟦", piece.as_str(), "⟧"])
        } else {
            text.push_str(&piece)
        }
    }
    if shown < all.len() {
        text.push('…');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::character_tokenizer;

    #[test]
    fn what_trains_has_marks_and_a_cut_text_ends_in_dots() {
        let tokenizer = character_tokenizer("abcd").unwrap();
        let tokens = tokenizer.encode("abcd", false).unwrap().get_ids().to_vec();
        let row = Sequence::new(tokens, vec![0., 1., 1., 0.]).unwrap();
        let text = |most| marked_text(&row, &tokenizer, most).unwrap();
        assert_eq!([text(2), text(4)], ["a⟦b⟧…", "a⟦bc⟧d"]);
    }
}

//! The beginning of a long text.

/// The first `max_chars` characters in `text`, and a mark if there are more.
pub(crate) fn excerpt(mut text: String, max_chars: usize) -> String {
    if let Some((end, _)) = text.char_indices().nth(max_chars) {
        text.truncate(end);
        text.push_str(" ...");
    }
    text
}

//! Text for HTML.

/// Escapes `text` for a page or an attribute.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // HTML does not allow it.
            c if c.is_control() && !matches!(c, '\n' | '\t') => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Returns a number with few digits.
pub(super) fn short(x: f64) -> String {
    let size = x.abs();
    if x == 0. {
        "0".to_owned()
    } else if !(1e-3..1e6).contains(&size) {
        format!("{x:.1e}")
    } else {
        let decimals = if size < 0.1 {
            4
        } else if size < 10. {
            2
        } else if size < 100. {
            1
        } else {
            0
        };
        let text = format!("{x:.decimals$}");
        if decimals > 0 {
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        } else {
            text
        }
    }
}

//! Errors about unknown keys that say which key was probably meant.

/// Adds the nearest of the expected names to serde's message about an unknown field or variant; any
/// other message, and one that has it already, stays as it is.
///
/// ```
/// use candle_grpo_core::{GroupAdvantage, with_nearest_key};
///
/// let error = serde_json::from_str::<GroupAdvantage>(r#"{"epsilom": 1e-4}"#).unwrap_err();
/// assert!(with_nearest_key(&error.to_string()).ends_with("did you mean `epsilon`?"));
/// ```
pub fn with_nearest_key(message: &str) -> String {
    match nearest_key(message) {
        Some(key) if !message.contains(SUGGESTION) => format!("{message}; {SUGGESTION} `{key}`?"),
        _ => message.to_owned(),
    }
}

const SUGGESTION: &str = "did you mean";

fn nearest_key(message: &str) -> Option<&str> {
    let start = ["unknown field `", "unknown variant `"]
        .iter()
        .find_map(|what| message.find(what).map(|at| at + what.len()))?;
    let (unknown, rest) = message[start..].split_once('`')?;
    // Every second piece between backticks is a name.
    let names = rest.split('`').skip(1).step_by(2);
    let (distance, name) = names
        .map(|name| (edit_distance(unknown, name), name))
        .min()?;
    (distance <= 1 + unknown.chars().count() / 3).then_some(name)
}

/// Returns the Levenshtein distance.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_near_name_is_suggested() {
        let unknown = |key: &str| {
            format!("unknown field `{key}`, expected one of `low`, `high`, `dual_clip` at line 1")
        };
        assert!(with_nearest_key(&unknown("hihg")).ends_with("; did you mean `high`?"));
        assert!(with_nearest_key(&unknown("dual-clip")).ends_with("; did you mean `dual_clip`?"));
        assert_eq!(
            with_nearest_key(&unknown("temperature")),
            unknown("temperature")
        );
        let twice = with_nearest_key(&with_nearest_key(&unknown("lo")));
        assert_eq!(twice.matches("did you mean").count(), 1);
        assert_eq!(with_nearest_key("expected a number"), "expected a number");
    }

    #[test]
    fn distances() {
        assert_eq!(edit_distance("kitten", "sitting"), 3);
        assert_eq!(edit_distance("", "abc"), 3);
        assert_eq!(edit_distance("same", "same"), 0);
    }
}

//! Lists in configuration files.

use serde::{Deserialize, Deserializer};

/// Deserializes a string or a list of strings. Null is an empty list.
pub(crate) fn one_or_more<'de, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected a text or a list of texts")]
    enum Texts<T> {
        One(T),
        More(Vec<T>),
    }
    Ok(match Option::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Texts::One(text)) => vec![text],
        Some(Texts::More(texts)) => texts,
    })
}

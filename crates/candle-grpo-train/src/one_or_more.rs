//! Lists in configuration files.

use serde::{Deserialize, Deserializer};

/// A string or a list of strings.
#[derive(Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(inline))]
#[serde(untagged, expecting = "expected a text or a list of texts")]
pub(crate) enum Texts<T> {
    One(T),
    More(Vec<T>),
}

/// Deserializes a string or a list of strings. Null is an empty list.
pub(crate) fn one_or_more<'de, T, D>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Ok(match Option::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Texts::One(text)) => vec![text],
        Some(Texts::More(texts)) => texts,
    })
}

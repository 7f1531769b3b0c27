//! JSON that does not depend on the order of keys.

use serde_json::Value;

/// Returns `value` as JSON with sorted keys, for digests: the order in which a file or a program
/// writes the keys of an object has no meaning.
pub(crate) fn canonical_json(value: &Value) -> String {
    let mut sorted = value.clone();
    sorted.sort_all_objects();
    sorted.to_string()
}

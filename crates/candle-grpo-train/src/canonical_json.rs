//! JSON that does not depend on key order.

use serde_json::Value;

/// Returns `value` as JSON with sorted keys, for digests, since the key order within an object has
/// no meaning.
pub(crate) fn canonical_json(value: &Value) -> String {
    let mut sorted = value.clone();
    sorted.sort_all_objects();
    sorted.to_string()
}

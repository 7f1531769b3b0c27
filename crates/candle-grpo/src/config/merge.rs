//! Merges part of a section with its defaults.

use serde_json::Value;

/// Lays `patch` over `base`: replaces a mapping's keys one by one, and keeps the others.
///
/// A different kind of mapping replaces the whole mapping: one with another `name` or `kind`, or
/// with a key that `base` lacks. Such a key is another enum variant. In a struct it would be
/// unknown, and deserialization rejects it.
pub(super) fn merge(base: Value, patch: Value) -> Value {
    match (base, patch) {
        (Value::Object(mut base), Value::Object(patch)) => {
            let another = |key: &str| patch.get(key).is_some_and(|tag| base.get(key) != Some(tag));
            let foreign = patch.keys().any(|key| !base.contains_key(key));
            if foreign || another("name") || another("kind") {
                return Value::Object(patch);
            }
            for (key, value) in patch {
                let under = base.get_mut(&key).map_or(Value::Null, Value::take);
                base.insert(key, merge(under, value));
            }
            Value::Object(base)
        }
        (_, patch) => patch,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn single_keys_are_replaced() {
        let base = json!({"a": 1, "b": {"c": 2, "d": 3}, "e": null});
        let patch = json!({"b": {"d": 4}, "e": {"f": 5}});
        assert_eq!(
            merge(base, patch),
            json!({"a": 1, "b": {"c": 2, "d": 4}, "e": {"f": 5}})
        );
    }

    #[test]
    fn another_kind_replaces_the_whole() {
        let base = json!({"name": "grpo", "scale": "group"});
        assert_eq!(
            merge(base.clone(), json!({"name": "rloo"})),
            json!({"name": "rloo"})
        );
        assert_eq!(
            merge(base, json!({"name": "grpo", "scale": "batch"})),
            json!({"name": "grpo", "scale": "batch"})
        );
        let base = json!({"clip": {"low": 0.2, "high": 0.2}});
        assert_eq!(merge(base, json!({"topr": {}})), json!({"topr": {}}));
    }
}

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

/// Returns the smallest patch that [`merge`] lays over `base` to get `value`; `None` if they are
/// equal.
pub(super) fn patch_of(base: &Value, value: Value) -> Option<Value> {
    if *base == value {
        return None;
    }
    Some(match (base, value) {
        (Value::Object(base), Value::Object(value))
            if base.len() == value.len()
                && value.keys().all(|key| base.contains_key(key))
                && ["name", "kind"]
                    .iter()
                    .all(|tag| base.get(*tag) == value.get(*tag)) =>
        {
            let entries = value.into_iter();
            let differing = entries.filter_map(|(key, value)| {
                let patch = patch_of(&base[&key], value)?;
                Some((key, patch))
            });
            Value::Object(differing.collect())
        }
        (_, value) => value,
    })
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
    fn a_patch_has_the_differences_alone() {
        let base = json!({"a": 1, "b": {"c": 2, "d": 3}, "e": {"name": "x", "f": 4}});
        for (value, patch) in [
            (
                json!({"a": 1, "b": {"c": 2, "d": 5}, "e": {"name": "x", "f": 4}}),
                json!({"b": {"d": 5}}),
            ),
            (
                json!({"a": 1, "b": {"g": 2}, "e": {"name": "y", "f": 4}}),
                json!({"b": {"g": 2}, "e": {"name": "y", "f": 4}}),
            ),
            (
                json!({"a": null, "b": {"c": 2, "d": 3}, "e": null}),
                json!({"a": null, "e": null}),
            ),
        ] {
            assert_eq!(patch_of(&base, value.clone()), Some(patch.clone()));
            assert_eq!(merge(base.clone(), patch), value);
        }
        assert_eq!(patch_of(&base, base.clone()), None);
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

//! `config.json` files without a key, or with a null, against what Hugging Face transformers reads.
//!
//! The files are in `tests/golden/families`. Those of `scripts/test-config-defaults` are in the
//! folder that `GRPO_GOLDEN_FAMILIES_DIR` names.

use std::path::Path;

use candle_grpo_nn::DecoderConfig;
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Case {
    name: String,
    config: Value,
    /// The fields of the decoder. Absent ones have the default of [`DecoderConfig`].
    expected: Map<String, Value>,
    changes: Vec<Change>,
}

/// Another file.
#[derive(Deserialize)]
struct Change {
    /// The key that is absent, with the objects around it.
    path: Vec<String>,
    /// The key has a null instead.
    is_null: bool,
    /// The fields with other values; null for absent ones.
    differ: Map<String, Value>,
}

impl Change {
    /// Makes the change in a file.
    fn config(&self, whole: &Value) -> Value {
        let mut config = whole.clone();
        let (key, outer) = self.path.split_last().unwrap();
        let inner = outer.iter().fold(&mut config, |at, key| &mut at[key]);
        if self.is_null {
            inner[key] = Value::Null
        } else {
            drop(inner.as_object_mut().unwrap().remove(key))
        }
        config
    }

    fn expected(&self, whole: &Map<String, Value>) -> Map<String, Value> {
        let mut expected = whole.clone();
        expected.extend(self.differ.clone());
        expected.retain(|_, value| !value.is_null());
        expected
    }
}

/// Returns how the decoder of a file differs from the expected one.
fn difference(config: &Value, expected: &Map<String, Value>) -> Option<String> {
    let expected: DecoderConfig = serde_json::from_value(expected.clone().into()).unwrap();
    let mut model = match DecoderConfig::from_hugging_face(config.to_string().as_bytes()) {
        Ok(model) => model,
        Err(error) => return Some(error.to_string()),
    };
    model.head_dim = Some(model.head_dim());
    let fields = |model| serde_json::to_value(model).unwrap();
    let (ours, theirs) = (fields(&model), fields(&expected));
    let keys = ours.as_object().into_iter().chain(theirs.as_object());
    keys.flat_map(Map::keys)
        .find(|&key| ours.get(key) != theirs.get(key))
        .map(|key| format!("{key}: {:?}, must be {:?}", ours.get(key), theirs.get(key)))
}

#[test]
fn absent_keys_have_the_values_of_transformers() {
    let folder = std::env::var_os("GRPO_GOLDEN_FAMILIES_DIR");
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/families");
    let path = folder.map_or(own, Into::into).join("config_defaults.json");
    let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let mut differ = Vec::new();
    let mut count = 0;
    for case in &cases {
        let whole = difference(&case.config, &case.expected);
        differ.extend(whole.map(|words| format!("{}: {words}", case.name)));
        for change in &case.changes {
            let words = difference(
                &change.config(&case.config),
                &change.expected(&case.expected),
            );
            let how = if change.is_null { "null" } else { "absent" };
            differ.extend(
                words.map(|words| format!("{}, {:?} {how}: {words}", case.name, change.path)),
            );
        }
        count += 1 + case.changes.len();
    }
    assert!(
        differ.is_empty(),
        "{} of {count}:\n{}",
        differ.len(),
        differ.join("\n")
    );
    assert!(count > 100, "only {count} files");
}

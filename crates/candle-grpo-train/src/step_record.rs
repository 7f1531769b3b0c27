//! One step's metrics, for any trainer.

use anyhow::Result;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// One step's metrics: a line in `metrics.jsonl`. [`RunDir`](crate::RunDir) and trackers support
/// any trainer's.
pub trait StepRecord: Serialize + DeserializeOwned {
    /// Step number, starting at 1.
    fn step(&self) -> usize;

    /// Returns the metrics by name, nested ones with a slash (`seconds/train`).
    ///
    /// # Errors
    ///
    /// Fails if they cannot be written as JSON.
    fn scalars(&self) -> Result<Vec<(String, f64)>> {
        let mut scalars = Vec::new();
        collect("", &serde_json::to_value(self)?, &mut scalars);
        scalars.retain(|(name, _)| name != "step");
        Ok(scalars)
    }
}

/// Collects the numbers in `value`, keyed by path.
fn collect(path: &str, value: &Value, scalars: &mut Vec<(String, f64)>) {
    let inside = |name: &str| {
        if path.is_empty() {
            name.to_owned()
        } else {
            format!("{path}/{name}")
        }
    };
    match value {
        Value::Object(map) => map
            .iter()
            .for_each(|(name, value)| collect(&inside(name), value, scalars)),
        Value::Array(items) => {
            let items = items.iter().enumerate();
            items.for_each(|(i, value)| collect(&inside(&i.to_string()), value, scalars));
        }
        value => scalars.extend(value.as_f64().map(|number| (path.to_owned(), number))),
    }
}

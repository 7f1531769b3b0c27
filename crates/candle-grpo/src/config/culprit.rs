//! Finds the value that a type error is about. Serde reads a kind's options before it has their
//! types, so the path in its errors ends at the kind.

use serde_json::Value;

use super::document::{is_within, join};
use super::schema::alternatives;
use super::tree::{TypeError, shown};

/// Returns the path to the first value at or below `path` that `schema` rejects for the reason in
/// `error`. If the schema accepts them all, as it does a text that is no address, returns the path
/// to the first value that the error shows.
pub(super) fn culprit(
    schema: &Value,
    value: &Value,
    path: &str,
    error: &TypeError,
) -> Option<String> {
    let rejected = find(schema, value, path, |schemas, value| {
        rejects(schemas, value, error)
    });
    rejected.or_else(|| find(schema, value, path, |_, value| shows(error, value)))
}

/// Returns the path to the first value at or below `path` for which `is_found` returns true.
fn find(
    schema: &Value,
    value: &Value,
    path: &str,
    is_found: impl Fn(&[&Value], &Value) -> bool,
) -> Option<String> {
    let mut open = vec![(String::new(), value, vec![schema])];
    while let Some((at, value, schemas)) = open.pop() {
        let schemas = of_kind(alternatives(schema, schemas), value);
        if is_within(&at, path) && is_found(&schemas, value) {
            return Some(at);
        }
        let schemas = schemas.iter().copied();
        // The first one is the last in.
        match value {
            Value::Object(map) => open.extend(map.iter().rev().map(|(key, value)| {
                let of_key = schemas.clone().filter_map(|schema| {
                    option(schema, key).or_else(|| schema.get("additionalProperties"))
                });
                (join(&at, key), value, of_key.collect())
            })),
            Value::Array(items) => open.extend(items.iter().enumerate().rev().map(|(i, item)| {
                let of_items = schemas.clone().filter_map(|schema| schema.get("items"));
                (format!("{at}[{i}]"), item, of_items.collect())
            })),
            _ => {}
        }
    }
    None
}

/// Returns the schema of a key in a section.
fn option<'a>(schema: &'a Value, key: &str) -> Option<&'a Value> {
    schema.get("properties")?.get(key)
}

/// Leaves out the schemas of kinds other than the one that `value` names, if there is such a kind.
fn of_kind<'a>(mut schemas: Vec<&'a Value>, value: &Value) -> Vec<&'a Value> {
    let is_of = |schema: &Value, is_kind: &dyn Fn(&Value, &Value) -> bool| {
        let given = value.as_object().into_iter().flatten();
        let mut kinds =
            given.filter_map(|(key, name)| Some((name, option(schema, key)?.get("const")?)));
        kinds.any(|(name, kind)| is_kind(name, kind))
    };
    if schemas
        .iter()
        .any(|schema| is_of(schema, &|name, kind| name == kind))
    {
        schemas.retain(|schema| !is_of(schema, &|name, kind| name != kind));
    }
    schemas
}

fn rejects(schemas: &[&Value], value: &Value, error: &TypeError) -> bool {
    let any = |is: &dyn Fn(&Value) -> bool| schemas.iter().any(|schema| is(schema));
    let lists = |list: &Value, name: &str| {
        list.as_array()
            .is_some_and(|list| list.iter().any(|item| item == name))
    };
    let has_key = |key: &str| any(&|schema| option(schema, key).is_some());
    let has_name = |name: &str| {
        has_key(name) || any(&|schema| schema["const"] == name || lists(&schema["enum"], name))
    };
    let fits = || schemas.is_empty() || any(&|schema| has_type(schema, value));
    match error {
        TypeError::UnknownKey { key, .. } => {
            let is_closed = any(&|schema| schema["additionalProperties"] == false);
            is_closed && value.get(key).is_some() && !has_key(key)
        }
        TypeError::UnknownName { name, known } => {
            let is_named = value == name || value.get(name).is_some();
            is_named && known.iter().any(|name| has_name(name)) && !has_name(name)
        }
        TypeError::Missing { key } => {
            let is_required = any(&|schema| lists(&schema["required"], key));
            is_required && value.is_object() && value.get(key).is_none()
        }
        TypeError::WrongKind { found, .. } => *found == shown(value) && !fits(),
        TypeError::Other(_) => !fits(),
    }
}

/// Returns whether the error begins with a value that is not a section or a list.
fn shows(error: &TypeError, value: &Value) -> bool {
    let is_scalar = !value.is_object() && !value.is_array() && !value.is_null();
    is_scalar
        && match error {
            TypeError::WrongKind { found, .. } => *found == shown(value),
            TypeError::Other(message) => message.starts_with(&format!("{}, must", shown(value))),
            _ => false,
        }
}

/// Returns whether a schema has the type of `value`, or none.
fn has_type(schema: &Value, value: &Value) -> bool {
    let types = match &schema["type"] {
        Value::Array(types) => types.as_slice(),
        Value::Null => {
            return ["$ref", "anyOf", "oneOf"]
                .iter()
                .all(|key| schema.get(key).is_none());
        }
        one => std::slice::from_ref(one),
    };
    types.iter().any(|name| match (name.as_str(), value) {
        (Some("null"), Value::Null) | (Some("boolean"), Value::Bool(_)) => true,
        (Some("string"), Value::String(_)) | (Some("array"), Value::Array(_)) => true,
        (Some("object"), Value::Object(_)) | (Some("number"), Value::Number(_)) => true,
        (Some("integer"), Value::Number(number)) => {
            let most = (schema["format"] == "uint32").then_some(f64::from(u32::MAX));
            let is_below = number.as_f64() < schema["minimum"].as_f64();
            let is_above = most.is_some() && number.as_f64() > most;
            !number.is_f64() && !is_below && !is_above
        }
        _ => false,
    })
}

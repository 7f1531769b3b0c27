//! A validator for the part of JSON Schema that the schemas of configuration files use.

use serde_json::{Map, Value};

/// Returns the schema with this `$ref`.
pub(super) fn definition<'a>(root: &'a Value, name: &str) -> &'a Value {
    root.pointer(name.strip_prefix('#').unwrap()).unwrap()
}

/// Returns why `value` at `path` does not fit `schema`; nothing if it does.
pub(super) fn problems(root: &Value, schema: &Value, value: &Value, path: &str) -> Vec<String> {
    match schema {
        Value::Bool(true) => Vec::new(),
        Value::Object(keywords) => {
            let keyword = |(keyword, argument): (&String, &Value)| {
                broken(root, keywords, keyword, argument, value, path)
            };
            keywords.iter().flat_map(keyword).collect()
        }
        other => panic!("{other} is no schema"),
    }
}

/// Returns what one keyword rejects.
fn broken(
    root: &Value,
    keywords: &Map<String, Value>,
    keyword: &str,
    argument: &Value,
    value: &Value,
    path: &str,
) -> Vec<String> {
    let must = |holds: bool| {
        if holds {
            Vec::new()
        } else {
            vec![format!("{path}: {value}, {keyword} is {argument}")]
        }
    };
    let list = || argument.as_array().unwrap().iter();
    let limit = || argument.as_f64().unwrap();
    match keyword {
        "$schema" | "$defs" | "title" | "description" | "default" | "format" => Vec::new(),
        "type" => match argument {
            Value::String(kind) => must(is_of(value, kind)),
            _ => must(list().any(|kind| is_of(value, kind.as_str().unwrap()))),
        },
        "const" => must(value == argument),
        "enum" => must(list().any(|one| one == value)),
        "minimum" => must(value.as_f64().is_none_or(|x| x >= limit())),
        "maximum" => must(value.as_f64().is_none_or(|x| x <= limit())),
        "minItems" => must(value.as_array().is_none_or(|x| x.len() as f64 >= limit())),
        "maxItems" => must(value.as_array().is_none_or(|x| x.len() as f64 <= limit())),
        "required" => {
            let is_given = |key: &Value| value.get(key.as_str().unwrap()).is_some();
            must(!value.is_object() || list().all(is_given))
        }
        "$ref" => {
            let schema = definition(root, argument.as_str().unwrap());
            problems(root, schema, value, path)
        }
        "anyOf" | "oneOf" => {
            let tried = list().map(|choice| problems(root, choice, value, path));
            let tried: Vec<Vec<String>> = tried.collect();
            let fitting = tried.iter().filter(|problems| problems.is_empty()).count();
            match fitting {
                0 => tried.into_iter().flatten().collect(),
                fitting => must(fitting == 1 || keyword == "anyOf"),
            }
        }
        "items" => {
            let items = value.as_array().into_iter().flatten().enumerate();
            let item = |(i, item)| problems(root, argument, item, &format!("{path}[{i}]"));
            items.flat_map(item).collect()
        }
        "prefixItems" => {
            let items = value
                .as_array()
                .into_iter()
                .flatten()
                .zip(list())
                .enumerate();
            let item = |(i, (item, schema))| problems(root, schema, item, &format!("{path}[{i}]"));
            items.flat_map(item).collect()
        }
        "properties" | "additionalProperties" => {
            let known = keywords.get("properties").and_then(Value::as_object);
            let is_known = |key: &str| known.is_some_and(|known| known.contains_key(key));
            let entries = value.as_object().into_iter().flatten();
            let mut found = Vec::new();
            for (key, value) in entries {
                let path = format!("{path}.{key}");
                match (keyword, argument) {
                    ("properties", keys) if is_known(key) => {
                        found.extend(problems(root, &keys[key], value, &path));
                    }
                    ("additionalProperties", Value::Bool(false)) if !is_known(key) => {
                        found.push(format!("{path}: unknown key"));
                    }
                    ("additionalProperties", schema) if !is_known(key) => {
                        found.extend(problems(root, schema, value, &path));
                    }
                    _ => {}
                }
            }
            found
        }
        other => panic!("{other} is no known keyword"),
    }
}

fn is_of(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        kind => panic!("{kind} is no type"),
    }
}

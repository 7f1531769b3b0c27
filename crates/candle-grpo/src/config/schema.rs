//! JSON schemas of configuration files.

use candle_grpo_train::TrainConfig;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::run::{RunKeys, SAMPLER_ELSEWHERE};
use super::sft::{SFT_ELSEWHERE, Sections};
use super::suite::SuiteKeys;

/// Returns the JSON schema (draft 2020-12) of a configuration file for `grpo train`.
///
/// ```
/// let schema = candle_grpo::config::run_schema();
/// assert_eq!(schema["properties"]["prompts_per_step"]["default"], 32);
/// assert_eq!(schema["additionalProperties"], false);
/// ```
pub fn run_schema() -> Value {
    let mut schema = generated::<RunKeys>();
    let mut settings = generated::<TrainConfig>();
    each(&mut settings, &mut make_optional);
    for part in ["properties", "$defs"] {
        if let (Some(Value::Object(all)), Value::Object(more)) =
            (schema.get_mut(part), settings[part].take())
        {
            all.extend(more);
        }
    }
    finished(schema, "A run of grpo train")
}

/// Returns the JSON schema of a configuration file for `grpo sft`.
pub fn sft_schema() -> Value {
    finished(generated::<Sections>(), "A run of grpo sft")
}

/// Returns the JSON schema of a suite file for `grpo eval --suite`.
pub fn suite_schema() -> Value {
    finished(generated::<SuiteKeys>(), "A suite of grpo eval")
}

/// Returns the JSON schema of one section, for documentation.
pub fn section_schema<T: JsonSchema>() -> Value {
    finished(generated::<T>(), &T::schema_name())
}

fn generated<T: JsonSchema>() -> Value {
    let generator = SchemaSettings::draft2020_12().into_generator();
    generator.into_root_schema_for::<T>().into()
}

fn properties(schema: &mut Value) -> Option<&mut Map<String, Value>> {
    schema.get_mut("properties")?.as_object_mut()
}

/// Leaves out fields that are keys elsewhere, closes flattened options, and makes comments plain
/// text.
fn finished(mut schema: Value, title: &str) -> Value {
    let elsewhere: [(&str, &[(&str, &str)]); 2] = [
        ("SamplingConfig", &SAMPLER_ELSEWHERE),
        ("SftConfig", &SFT_ELSEWHERE),
    ];
    for (name, fields) in elsewhere {
        let definition = schema.pointer_mut(&format!("/$defs/{name}"));
        if let Some(keys) = definition.and_then(properties) {
            keys.retain(|key, _| !fields.iter().any(|(field, _)| field == key));
        }
    }
    let definitions = schema["$defs"].clone();
    each(&mut schema, &mut |schema| {
        own_defaults(schema, &definitions)
    });
    each(&mut schema, &mut |schema| {
        close(schema);
        if let Some(Value::String(text)) = schema.get_mut("description") {
            *text = plain(text);
        }
    });
    let definitions = schema.get_mut("$defs").and_then(Value::as_object_mut);
    for definition in definitions.into_iter().flat_map(Map::values_mut) {
        if let Some(Value::String(text)) = definition.get_mut("description") {
            // What follows is about the Rust type.
            text.truncate(text.find("\n\n").unwrap_or(text.len()));
        }
    }
    schema["title"] = json!(title);
    schema
}

/// Calls `change` on each object of a schema.
fn each(schema: &mut Value, change: &mut impl FnMut(&mut Map<String, Value>)) {
    match schema {
        Value::Object(map) => {
            change(map);
            // Defaults are values, not schemas.
            let parts = map.iter_mut().filter(|(key, _)| *key != "default");
            parts.for_each(|(_, part)| each(part, change));
        }
        Value::Array(parts) => parts.iter_mut().for_each(|part| each(part, change)),
        _ => {}
    }
}

/// Makes keys optional in a section that is laid over the preset, which may have them. Required
/// are only a kind and the name of a variant, which is the only key.
fn make_optional(schema: &mut Map<String, Value>) {
    let Some(Value::Object(keys)) = schema.get("properties") else {
        return;
    };
    if keys.len() == 1 {
        return;
    }
    let is_kind = |key: &String| keys[key].get("const").is_some();
    let kinds: Vec<String> = keys.keys().filter(|key| is_kind(key)).cloned().collect();
    schema.insert("required".to_owned(), json!(kinds));
}

/// Gives a section a definition of its own if the defaults of its keys differ there.
fn own_defaults(schema: &mut Map<String, Value>, definitions: &Value) {
    let name = schema.get("$ref").and_then(Value::as_str);
    let name = name.and_then(|name| name.strip_prefix("#/$defs/"));
    let mut own = name.map_or(Value::Null, |name| definitions[name].clone());
    let (Some(Value::Object(section)), Some(keys)) = (schema.get("default"), properties(&mut own))
    else {
        return;
    };
    let mut differs = false;
    for (key, default) in section {
        let place = keys.get_mut(key).and_then(|key| key.get_mut("default"));
        if let Some(place) = place.filter(|place| *place != default) {
            *place = default.clone();
            differs = true;
        }
    }
    if let (true, Value::Object(own)) = (differs, own) {
        schema.remove("$ref");
        for (keyword, argument) in own {
            schema.entry(keyword).or_insert(argument);
        }
    }
}

/// Rejects unknown keys in a struct with a flattened enum. Each variant also accepts the keys of
/// the struct, whose schemas are beside the variants.
fn close(schema: &mut Map<String, Value>) {
    let Some(shared) = schema.get("properties").and_then(Value::as_object) else {
        return;
    };
    let shared: Vec<String> = shared.keys().cloned().collect();
    let variants = schema.get_mut("oneOf").and_then(Value::as_array_mut);
    for variant in variants.into_iter().flatten() {
        if let Some(keys) = properties(variant) {
            keys.extend(shared.iter().map(|key| (key.clone(), json!(true))));
        }
        variant["additionalProperties"] = json!(false);
    }
}

/// Returns a comment without rustdoc links and line breaks inside paragraphs.
fn plain(comment: &str) -> String {
    let paragraphs = comment.split("\n\n").map(|lines| lines.replace('\n', " "));
    let mut text = paragraphs.collect::<Vec<_>>().join("\n\n");
    while let Some(start) = text.find("[`") {
        let Some(end) = text[start..].find("`]").map(|end| start + end) else {
            break;
        };
        let rest = &text[end + 2..];
        let target = rest.starts_with('(').then(|| rest.find(')')).flatten();
        let rest = &rest[target.map_or(0, |end| end + 1)..];
        text = format!("{}{}{rest}", &text[..start], &text[start + 1..=end]);
    }
    text.replace("`Self::", "`")
}

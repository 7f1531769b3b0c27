//! JSON schemas of configuration files.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_grpo_train::TrainConfig;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::document::join;
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

/// Returns the JSON schema of one section, which is generated once.
pub(super) fn kept_schema<T: JsonSchema>() -> Arc<Value> {
    static SCHEMAS: Kept<Value> = Kept::new();
    SCHEMAS.get::<T>(section_schema::<T>)
}

/// Values of types with a schema, each computed once.
struct Kept<V>(Mutex<BTreeMap<Cow<'static, str>, Arc<V>>>);

impl<V> Kept<V> {
    const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    fn get<T: JsonSchema>(&self, value: impl FnOnce() -> V) -> Arc<V> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let value_of_type = kept.entry(T::schema_id());
        Arc::clone(value_of_type.or_insert_with(|| Arc::new(value())))
    }
}

/// The keys of sections that every file has, by the section's path, with their schemas. Keys at the
/// top are those of the section "".
pub(super) type SectionKeys = BTreeMap<String, Map<String, Value>>;

/// Returns the sections of a file for `grpo train`.
pub(super) fn run_sections() -> &'static SectionKeys {
    static SECTIONS: LazyLock<SectionKeys> = LazyLock::new(|| sections(&run_schema()));
    &SECTIONS
}

/// Returns the sections of a file for `grpo sft`.
pub(super) fn sft_sections() -> &'static SectionKeys {
    static SECTIONS: LazyLock<SectionKeys> = LazyLock::new(|| sections(&sft_schema()));
    &SECTIONS
}

/// Returns the sections of a suite file.
pub(super) fn suite_sections() -> &'static SectionKeys {
    static SECTIONS: LazyLock<SectionKeys> = LazyLock::new(|| sections(&suite_schema()));
    &SECTIONS
}

/// Leaves out sections without keys at the top of a file: they have their defaults.
pub(super) fn without_empty_sections(mut file: Value, sections: &SectionKeys) -> Value {
    if let Value::Object(keys) = &mut file {
        let is_section = |key: &str| sections[""].get(key).is_some_and(is_section);
        keys.retain(|key, value| !value.is_null() || !is_section(key));
    }
    file
}

/// Returns whether a key has keys by default.
fn is_section(key: &Value) -> bool {
    key["default"].is_object()
}

fn sections(root: &Value) -> SectionKeys {
    let mut sections = SectionKeys::new();
    let mut open = vec![(String::new(), root)];
    while let Some((path, section)) = open.pop() {
        let mut alternatives = alternatives(root, vec![section]).into_iter();
        let keys = alternatives.find_map(|schema| schema["properties"].as_object());
        for (name, key) in keys.into_iter().flatten() {
            // Other sections are absent by default.
            if is_section(key) {
                open.push((join(&path, name), key));
            }
        }
        sections.insert(path, keys.cloned().unwrap_or_default());
    }
    sections
}

/// Returns the schemas of a value that has one of these: they, their definitions and alternatives.
pub(super) fn alternatives<'a>(root: &'a Value, mut all: Vec<&'a Value>) -> Vec<&'a Value> {
    let mut next = 0;
    while let Some(&schema) = all.get(next) {
        let definition = schema["$ref"].as_str();
        let definition = definition.and_then(|name| root.pointer(name.strip_prefix('#')?));
        let choices = ["anyOf", "oneOf"].map(|keyword| schema[keyword].as_array());
        for schema in definition
            .into_iter()
            .chain(choices.into_iter().flatten().flatten())
        {
            // A kind may hold its own kind.
            if !all.iter().any(|other| ptr::eq(*other, schema)) {
                all.push(schema);
            }
        }
        next += 1;
    }
    all
}

/// Returns whether a file with this schema may have a key at `path`.
#[cfg(test)]
pub(super) fn has_key(root: &Value, path: &str) -> bool {
    let mut found = vec![root];
    for step in path.split('.') {
        found = alternatives(root, found)
            .into_iter()
            .filter_map(|schema| schema["properties"].get(step))
            .collect();
    }
    !found.is_empty()
}

/// Returns the names of the keys of one section.
pub(super) fn keys_of<T: JsonSchema>() -> Arc<BTreeSet<String>> {
    static KEYS: Kept<BTreeSet<String>> = Kept::new();
    KEYS.get::<T>(|| {
        let schema = generated::<T>();
        let keys = schema["properties"].as_object();
        keys.into_iter().flat_map(Map::keys).cloned().collect()
    })
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
        add_aliases(schema);
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
    let keys = properties(&mut schema);
    for key in keys.into_iter().flat_map(Map::values_mut) {
        if is_section(key) {
            allow_null(key);
        }
    }
    schema["title"] = json!(title);
    schema
}

/// Makes a section in a file optional.
fn allow_null(key: &mut Value) {
    let Some(key) = key.as_object_mut() else {
        return;
    };
    match key.shift_remove("$ref") {
        Some(definition) => {
            let choices = json!([{"$ref": definition}, {"type": "null"}]);
            key.insert("anyOf".to_owned(), choices);
        }
        None => drop(key.insert("type".to_owned(), json!(["object", "null"]))),
    }
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

/// Adds the second names of keys and variants, which have the attribute `aliases`. Editors show
/// that the first names are better.
fn add_aliases(schema: &mut Map<String, Value>) {
    if let Some(Value::Array(variants)) = schema.get_mut("oneOf") {
        let added: Vec<_> = variants.iter_mut().filter_map(take_aliases).collect();
        for (aliases, variant) in added {
            variants.extend(
                aliases
                    .into_iter()
                    .map(|name| renamed(variant.clone(), &name)),
            );
        }
    }
    if let Some(Value::Object(keys)) = schema.get_mut("properties") {
        let added: Vec<_> = keys.values_mut().filter_map(take_aliases).collect();
        for (aliases, key) in added {
            keys.extend(aliases.into_iter().map(|name| (name, key.clone())));
        }
    }
}

/// Removes the second names of a key or variant. Returns them, and the schema for them.
fn take_aliases(schema: &mut Value) -> Option<(Vec<String>, Value)> {
    let aliases = schema.as_object_mut()?.shift_remove("aliases")?;
    let mut same = schema.clone();
    same["deprecated"] = json!(true);
    Some((serde_json::from_value(aliases).ok()?, same))
}

/// Returns a variant's schema with another name: its constant, or its only key.
fn renamed(mut variant: Value, name: &str) -> Value {
    match properties(&mut variant) {
        Some(keys) => {
            let options = std::mem::take(keys).into_values();
            *keys = options.map(|options| (name.to_owned(), options)).collect();
            variant["required"] = json!([name]);
        }
        None => variant["const"] = json!(name),
    }
    variant
}

/// Rejects unknown keys in a struct with a flattened enum. Each variant also accepts the keys of
/// the struct, whose schemas are next to the variants.
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

//! The JSON schemas of configuration files agree with the parser.

use std::fs;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use candle_grpo::config::{
    Document, Import, Preset, RunConfig, SftRunConfig, SuiteConfig, run_schema, sft_schema,
    suite_schema,
};
use serde_json::{Map, Value, json};

use super::validator::Validator;
use crate::support::succeeds;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Each YAML file in a folder and in the folders below it.
fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(yaml_files(&path));
        } else if path
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            files.push(path);
        }
    }
    files
}

/// Returns the schema with this `$ref`.
fn definition<'a>(root: &'a Value, name: &str) -> &'a Value {
    root.pointer(name.strip_prefix('#').unwrap()).unwrap()
}

#[track_caller]
fn fits(schema: &Validator, value: &Value, place: &str) {
    if let Some(problem) = schema.problem(value) {
        panic!("{place}: {problem}");
    }
}

/// The schemas of both kinds of runs.
struct Validators {
    run: Validator,
    sft: Validator,
}

impl Validators {
    fn new() -> Self {
        Self {
            run: Validator::new(&run_schema()),
            sft: Validator::new(&sft_schema()),
        }
    }
}

/// Checks a document that the parser accepts. Returns whether it is a native file.
#[track_caller]
fn fits_its_schema(schemas: &Validators, document: &Document, place: &str) -> bool {
    let value = document.value();
    if SftRunConfig::is_of(document) {
        fits(&schemas.sft, value, place);
    } else if Import::new(document).is_none() && !document.is_former() {
        fits(&schemas.run, value, place);
    } else {
        return false;
    }
    true
}

#[test]
fn every_configuration_of_the_examples_fits() {
    let files = yaml_files(&root().join("examples"));
    let schemas = Validators::new();
    let mut checked = 0;
    for file in files {
        let document = Document::read(&file).unwrap();
        if document.value().get("model").is_some() {
            checked += usize::from(fits_its_schema(
                &schemas,
                &document,
                &file.display().to_string(),
            ));
        }
    }
    assert!(checked >= 5, "{checked}");
}

#[test]
fn every_configuration_of_the_pages_fits() {
    let schemas = Validators::new();
    let mut checked = 0;
    for page in fs::read_dir(root().join("docs")).unwrap() {
        let page = page.unwrap().path();
        if page.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let text = fs::read_to_string(&page).unwrap();
        let blocks = text.split("```").skip(1).step_by(2);
        for block in blocks.filter_map(|block| block.strip_prefix("yaml\n")) {
            let Ok(document) = Document::from_yaml(Path::new("x.yaml"), block) else {
                continue;
            };
            let is_valid =
                RunConfig::new(&document).is_ok() || SftRunConfig::new(&document).is_ok();
            if is_valid {
                let place = format!("{}: {block}", page.display());
                checked += usize::from(fits_its_schema(&schemas, &document, &place));
            }
        }
    }
    assert!(checked >= 15, "{checked}");
}

#[test]
fn every_built_in_suite_fits() {
    let schema = Validator::new(&suite_schema());
    for file in yaml_files(&root().join("crates/candle-grpo/src/suite/built_in")) {
        let document = Document::read(&file).unwrap();
        fits(&schema, document.value(), &file.display().to_string());
    }
}

/// The smallest files of each kind.
fn smallest_run() -> Value {
    json!({"model": "m", "data": {"train": "d"}, "rewards": [{"kind": "json"}]})
}

fn smallest_sft() -> Value {
    json!({"model": "m", "data": {"train": "d"}, "sft": {}})
}

fn smallest_suite() -> Value {
    json!({"data": {"held_out": "d"}, "rewards": [{"kind": "json"}]})
}

fn document(value: &Value) -> Document {
    Document::from_yaml(Path::new("x.yaml"), &value.to_string()).unwrap()
}

#[test]
fn every_setting_that_check_prints_fits() {
    let schemas = Validators::new();
    for preset in Preset::ALL {
        let mut file = smallest_run();
        file["preset"] = json!(preset);
        if preset == Preset::Gkd {
            file["teacher"] = json!({"model": "t"});
        }
        let run = RunConfig::new(&document(&file)).unwrap();
        fits(&schemas.run, &run.to_value().unwrap(), &preset.to_string());
    }
    let run = SftRunConfig::new(&document(&smallest_sft())).unwrap();
    fits(&schemas.sft, &run.to_value().unwrap(), "sft");
}

/// A mapping in a file: its path, the keys that select the variant, whether it has the
/// name of a variant alone, its own keys, and the way from
/// its value to that of the file.
struct Section<'a> {
    path: String,
    selected: Map<String, Value>,
    is_variant: bool,
    keys: Vec<String>,
    file: Box<dyn Fn(Value) -> Value + 'a>,
}

impl Section<'_> {
    /// Returns the file with `key` alone in this mapping.
    fn with(&self, key: &str, value: Value) -> Value {
        let mut section = self.selected.clone();
        section.insert(key.to_owned(), value);
        (self.file)(Value::Object(section))
    }
}

/// Lists the mappings in a file with this schema. `open` has the definitions around it, so that a
/// definition inside itself has no further mappings.
fn sections<'a>(
    root: &'a Value,
    schema: &'a Value,
    path: &str,
    open: &[&'a str],
    shared: &Map<String, Value>,
    file: &Rc<dyn Fn(Value) -> Value + 'a>,
    list: &mut Vec<Section<'a>>,
) {
    if let Some(name) = schema.get("$ref").and_then(Value::as_str)
        && !open.contains(&name)
    {
        let (open, schema) = ([open, &[name]].concat(), definition(root, name));
        sections(root, schema, path, &open, shared, file, list);
    }
    if let Some(items) = schema.get("items") {
        let file = Rc::clone(file);
        let file: Rc<dyn Fn(Value) -> Value> = Rc::new(move |x| file(json!([x])));
        sections(root, items, &format!("{path}[]"), open, shared, &file, list);
    }
    let keys = schema.get("properties").and_then(Value::as_object);
    for choice in ["anyOf", "oneOf"] {
        let choices = schema.get(choice).and_then(Value::as_array);
        for choice in choices.into_iter().flatten() {
            let first = list.len();
            sections(root, choice, path, open, shared, file, list);
            // A variant by its name: another name is an unknown variant, not an unknown key.
            let required = choice.get("required").and_then(Value::as_array);
            if let Some(section) = list.get_mut(first) {
                section.is_variant |= section.path == path
                    && section.keys.len() == 1
                    && required.is_some_and(|keys| *keys == [json!(section.keys[0])]);
            }
        }
    }
    let Some(keys) = keys else { return };
    let mut selected = shared.clone();
    let fixed =
        |(key, schema): (&String, &Value)| Some((key.clone(), schema.get("const")?.clone()));
    selected.extend(keys.iter().filter_map(fixed));
    if schema.get("oneOf").is_none() {
        let own = Rc::clone(file);
        list.push(Section {
            path: path.to_owned(),
            selected: selected.clone(),
            is_variant: false,
            keys: keys
                .keys()
                .filter(|key| !selected.contains_key(*key))
                .cloned()
                .collect(),
            file: Box::new(move |value| own(value)),
        });
    }
    for (key, schema) in keys {
        let (file, selected, name) = (Rc::clone(file), selected.clone(), key.clone());
        let file: Rc<dyn Fn(Value) -> Value> = Rc::new(move |value| {
            let mut section = selected.clone();
            section.insert(name.clone(), value);
            file(Value::Object(section))
        });
        let path = join(path, key);
        sections(root, schema, &path, open, &Map::new(), &file, list);
    }
}

/// Lists the mappings in a file with this schema, which has the keys of the `smallest` file.
fn sections_of<'a>(schema: &'a Value, smallest: &'a Value) -> Vec<Section<'a>> {
    let file: Rc<dyn Fn(Value) -> Value> = Rc::new(|value: Value| {
        let mut file = smallest.clone();
        let keys = value.as_object().unwrap().clone();
        file.as_object_mut().unwrap().extend(keys);
        file
    });
    let mut list = Vec::new();
    sections(schema, schema, "", &[], &Map::new(), &file, &mut list);
    list
}

fn is_unknown(error: &str) -> bool {
    error.contains("unknown key") || error.contains("unknown field")
}

/// Each key of the schema is a key for the parser; another key is one for neither.
#[track_caller]
fn keys_agree(schema: &Value, smallest: &Value, least: usize, parse: impl Fn(&Document) -> String) {
    let validator = Validator::new(schema);
    let mut keys = 0;
    for section in sections_of(schema, smallest) {
        for key in &section.keys {
            let error = parse(&document(&section.with(key, Value::Null)));
            let place = format!("{}.{key}: {error}", section.path);
            assert!(!is_unknown(&error), "{place}");
            keys += 1;
        }
        if section.is_variant {
            continue;
        }
        let file = section.with("kee", Value::Null);
        let error = parse(&document(&file));
        let names_it = is_unknown(&error) && error.contains("kee");
        assert!(names_it, "{}: {error}", section.path);
        let found = validator.unknown_keys(&file);
        let names_it = found.iter().any(|key| key == "kee");
        assert!(names_it, "{}: {found:?}", section.path);
    }
    assert!(keys >= least, "{keys}");
}

/// A value of each type.
fn values() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(1),
        json!(-1),
        json!(0.5),
        json!("x"),
        json!([]),
        json!([1]),
        json!(["x"]),
        json!([null]),
        json!([{}]),
        json!({}),
        json!({"kee": 1}),
    ]
}

/// The parser's words for a value of another type or name.
const TYPES: [&str; 8] = [
    "must be a whole number",
    "must be a number",
    "must be true or false",
    "must be a text",
    "must be a list",
    "must be a mapping",
    "must be a name",
    "must be one of",
];

/// Returns whether the parser accepts a value that does not fit, on purpose or because of serde.
fn is_lenient(path: &str, value: &Value) -> bool {
    // A mapping without keys changes nothing in what lies below it.
    let is_unchanged = path == "recipe.policy_loss.surrogate" && *value == json!({});
    // Serde reads a list in place of a mapping inside a kind.
    let is_in_kind = path.starts_with("rewards[]") && value.is_array();
    is_unchanged || is_in_kind
}

/// A value that the parser accepts fits; one of another type for the parser does not.
#[track_caller]
fn types_agree(
    schema: &Value,
    smallest: &Value,
    least: usize,
    parse: impl Fn(&Document) -> String,
) {
    let validator = Validator::new(schema);
    let (mut accepted, mut refused) = (0, 0);
    for section in sections_of(schema, smallest) {
        for key in &section.keys {
            for value in values() {
                let path = join(&section.path, key);
                let file = section.with(key, value.clone());
                let error = parse(&document(&file));
                let problem = validator.problem(&file);
                if error.is_empty() && !is_lenient(&path, &value) {
                    assert_eq!(problem, None, "{path}: {value}");
                    accepted += 1;
                }
                if is_unknown(&error) || TYPES.iter().any(|kind| error.contains(kind)) {
                    assert!(problem.is_some(), "{path}: {value}: {error}");
                    refused += 1;
                }
            }
        }
    }
    assert!(accepted.min(refused) >= least, "{accepted} {refused}");
}

fn join(section: &str, key: &str) -> String {
    if section.is_empty() {
        key.to_owned()
    } else {
        format!("{section}.{key}")
    }
}

fn parse_run(document: &Document) -> String {
    RunConfig::new(document).map_or_else(|error| error.to_string(), |_| String::new())
}

fn parse_sft(document: &Document) -> String {
    SftRunConfig::new(document).map_or_else(|error| error.to_string(), |_| String::new())
}

fn parse_suite(document: &Document) -> String {
    let suite = SuiteConfig::new(document, Path::new("x.yaml"));
    suite.map_or_else(|error| error.to_string(), |_| String::new())
}

#[test]
fn the_keys_of_a_run_agree() {
    keys_agree(&run_schema(), &smallest_run(), 400, parse_run);
}

#[test]
fn the_keys_of_supervised_training_agree() {
    keys_agree(&sft_schema(), &smallest_sft(), 60, parse_sft);
}

#[test]
fn the_keys_of_a_suite_agree() {
    keys_agree(&suite_schema(), &smallest_suite(), 60, parse_suite);
}

#[test]
fn the_types_of_a_run_agree() {
    types_agree(&run_schema(), &smallest_run(), 500, parse_run);
}

#[test]
fn the_types_of_supervised_training_agree() {
    types_agree(&sft_schema(), &smallest_sft(), 40, parse_sft);
}

#[test]
fn the_types_of_a_suite_agree() {
    types_agree(&suite_schema(), &smallest_suite(), 100, parse_suite);
}

/// The defaults of a section's keys are those of the file, not of the section's type.
#[test]
fn the_defaults_are_those_of_the_file() {
    let learning_rate = "/properties/optimizer/properties/learning_rate/default";
    assert_eq!(run_schema().pointer(learning_rate), Some(&json!(1e-6)));
    assert_eq!(sft_schema().pointer(learning_rate), Some(&json!(2e-5)));
    let every_steps = "/properties/checkpoint/properties/every_steps/default";
    assert_eq!(sft_schema().pointer(every_steps), Some(&json!(100)));
}

/// A section that is laid over a preset has the other keys of the preset.
#[test]
fn a_section_over_a_preset_needs_no_keys() {
    let mut file = smallest_run();
    file["preset"] = json!("dapo");
    file["recipe"] = json!({"overlong": {"factor": 0.5}});
    let run = RunConfig::new(&document(&file)).unwrap();
    let overlong = run.train.recipe.overlong.unwrap();
    assert_eq!(overlong.factor, 0.5);
    assert!(overlong.buffer > 0);
    fits(&Validators::new().run, &file, "dapo");
}

/// A second name of a value, a variant and a key.
#[test]
fn second_names_fit() {
    let schemas = Validators::new();
    for loss in [
        json!({"kl": {"coef": 0.1, "kl": {"estimator": "low_var_kl"}}}),
        json!({"surrogate": {"cispo": {}}}),
        json!({"rollout_correction": {"weight": {"outside": "mask"}}}),
    ] {
        let mut file = smallest_run();
        file["recipe"] = json!({"policy_loss": loss});
        RunConfig::new(&document(&file)).unwrap();
        fits(&schemas.run, &file, &loss.to_string());
    }
}

#[test]
fn types_are_described_in_one_paragraph() {
    for schema in [run_schema(), sft_schema(), suite_schema()] {
        for (name, definition) in schema["$defs"].as_object().unwrap() {
            let text = definition["description"].as_str().unwrap_or_default();
            assert!(!text.contains("\n\n"), "{name}: {text}");
        }
    }
}

#[test]
fn the_program_prints_each_schema() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, expected) in [
        (&["schema"] as &[&str], run_schema()),
        (&["schema", "run"], run_schema()),
        (&["schema", "sft"], sft_schema()),
        (&["schema", "suite"], suite_schema()),
    ] {
        let printed: Value = serde_json::from_str(&succeeds(folder.path(), arguments)).unwrap();
        assert_eq!(printed, expected, "{arguments:?}");
    }
}

/// A wrong type, a wrong name, a value below the minimum, and a key that must be given.
#[test]
fn wrong_values_do_not_fit() {
    let schema = Validator::new(&run_schema());
    for (key, value) in [
        ("max_steps", json!("many")),
        ("max_steps", json!(-1)),
        ("max_steps", json!(1.5)),
        ("preset", json!("grop")),
        ("rewards", json!([{"kind": "numerical"}])),
        ("rewards", json!([{"kind": "regex"}])),
        ("rewards", json!([{"column": "answer"}])),
        ("sampling", json!({"seed": 1})),
        (
            "recipe",
            json!({"policy_loss": {"surrogate": {"clip": {}, "topr": {}}}}),
        ),
        ("model", json!({"chat_template": "t"})),
    ] {
        let mut file = smallest_run();
        fits(&schema, &file, "the smallest file");
        file[key] = value.clone();
        assert!(schema.problem(&file).is_some(), "{key}: {value}");
    }
}

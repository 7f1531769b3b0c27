//! The tables in docs/configuration.md are made from the JSON schemas of the files.
//!
//! `UPDATE_DOCS=1 cargo test --release -p candle-grpo documentation` rewrites them.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use candle_grpo::config::{
    AlgorithmConfig, Document, Import, Preset, RunConfig, SftRunConfig, run_schema, section_schema,
    sft_schema, suite_schema,
};
use candle_grpo::train::rewards::RewardKind;
use serde_json::{Map, Value};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Returns the schema at a path such as `run.rewards.numeric.find`: the kind of file, then keys and
/// variants.
fn schema_at(path: &str) -> (Value, Value) {
    let mut steps = path.split('.');
    let root = match steps.next().unwrap() {
        "run" => run_schema(),
        "sft" => sft_schema(),
        "suite" => suite_schema(),
        "algorithm" => section_schema::<AlgorithmConfig>(),
        other => panic!("{other} is no kind of file"),
    };
    let mut place = root.clone();
    for step in steps {
        place = part(&root, &place, step)
            .unwrap_or_else(|| panic!("{path}: no {step} in {place:#}"))
            .clone();
    }
    (root, place)
}

/// Returns the schemas that `schema` refers to or selects from, and itself.
fn parts<'a>(root: &'a Value, schema: &'a Value) -> Vec<&'a Value> {
    let mut parts = vec![schema];
    if let Some(definition) = schema.get("$ref").and_then(Value::as_str) {
        parts.push(root.pointer(&definition[1..]).unwrap());
    }
    parts.extend(schema.get("items"));
    for choice in ["anyOf", "oneOf"] {
        parts.extend(
            schema
                .get(choice)
                .and_then(Value::as_array)
                .into_iter()
                .flatten(),
        );
    }
    let nested = parts
        .split_off(1)
        .into_iter()
        .flat_map(|part| self::parts(root, part));
    let nested: Vec<&Value> = nested.collect();
    parts.extend(nested);
    parts
}

/// Returns the schema of a key or of a kind.
fn part<'a>(root: &'a Value, schema: &'a Value, step: &str) -> Option<&'a Value> {
    let own = schema.get("properties").and_then(|keys| keys.get(step));
    let parts = parts(root, schema).into_iter();
    let mut found = parts.filter_map(|part| {
        let keys = part.get("properties")?;
        let is_kind = keys.pointer("/kind/const").is_some_and(|kind| kind == step);
        if is_kind { Some(part) } else { keys.get(step) }
    });
    own.or_else(|| found.next())
}

/// Returns the keys of a section.
fn keys_of<'a>(root: &'a Value, schema: &'a Value) -> &'a Map<String, Value> {
    let keys = |part: &'a Value| part.get("properties")?.as_object();
    parts(root, schema).into_iter().find_map(keys).unwrap()
}

/// A comment without its last sentence, if that one states the default, which has a column.
fn without_default(comment: &str) -> &str {
    let is_value = |text: &str| !text.contains(' ') || text.starts_with('`');
    let start = comment.rfind("Default ").filter(|start| {
        let value = comment[start + "Default ".len()..].strip_suffix('.');
        value.is_some_and(is_value)
    });
    match start {
        Some(start) => comment[..start].trim_end(),
        None => comment
            .strip_suffix("Absent by default.")
            .or_else(|| comment.strip_suffix("Empty by default."))
            .map_or(comment, str::trim_end),
    }
}

/// Returns the line above the table of the keys at `path`.
fn mark(path: &str) -> String {
    format!("<!-- keys of {path} -->\n")
}

/// Returns the table of the keys at `path` in the schemas, for a page whose text is `page`. A key
/// with a section of its own has no row at the top, and one with a table no default.
fn render(page: &str, path: &str) -> String {
    let (root, schema) = schema_at(path);
    let is_file = matches!(path, "run" | "sft");
    let has_section = |key: &str| page.contains(&format!("\n## {key}\n"));
    let mut rows = Vec::new();
    for (key, schema) in keys_of(&root, &schema) {
        // A kind has its table, and shared keys are in the table above.
        let is_elsewhere = schema.get("const").is_some() || *schema == Value::Bool(true);
        if is_elsewhere || is_file && has_section(key) {
            continue;
        }
        let comment = schema["description"].as_str();
        let comment = comment.unwrap_or_else(|| panic!("{path}.{key} has no comment"));
        let comment = comment.replace("\n\n", " ").replace('|', "\\|");
        let has_table = page.contains(&mark(&format!("{path}.{key}")));
        let default = match &schema["default"] {
            Value::Null => String::new(),
            Value::Array(items) if items.is_empty() => String::new(),
            Value::Object(map) if map.is_empty() || has_table || path == "suite" => String::new(),
            Value::String(default) if default.is_empty() => String::new(),
            Value::String(default) => format!("`{}`", default.replace('\n', "\\n")),
            default => format!("`{default}`"),
        };
        rows.push((key, default, comment));
    }
    assert!(!rows.is_empty(), "{path}");
    let has_defaults = rows.iter().any(|(_, default, _)| !default.is_empty());
    let mut text = String::from(if has_defaults {
        "| key | default | |\n| --- | --- | --- |\n"
    } else {
        "| key | |\n| --- | --- |\n"
    });
    for (key, default, comment) in rows {
        text += &if has_defaults {
            let comment = without_default(&comment);
            format!("| `{key}` | {default} | {comment} |\n")
        } else {
            format!("| `{key}` | {comment} |\n")
        };
    }
    text
}

#[test]
fn each_kind_of_reward_has_a_section_and_a_table() {
    let text = fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let kinds = RewardKind::NAMES;
    for kind in kinds {
        let mark = mark(&format!("run.rewards.{kind}"));
        assert!(text.contains(&mark), "{mark}");
        assert!(text.contains(&format!("\n### kind: {kind}\n")), "{kind}");
    }
    let sections = text.matches("\n### kind: ").count();
    assert_eq!(sections, kinds.len());
}

/// Returns the preset table.
fn presets() -> String {
    let mut text = String::from("| preset | algorithm | source |\n| --- | --- | --- |\n");
    for preset in Preset::ALL {
        let source = preset.source();
        let name = source.trim_start_matches("https://");
        text += &format!("| `{preset}` | {} | [{name}]({source}) |\n", preset.title());
    }
    text
}

#[test]
fn every_table_is_made_from_its_schema() {
    let path = root().join("docs/configuration.md");
    let text = fs::read_to_string(&path).unwrap();
    let mut updated = text.clone();
    let marks = text
        .lines()
        .filter_map(|line| line.strip_prefix("<!-- keys of "));
    let paths = marks.filter_map(|mark| mark.strip_suffix(" -->"));
    let tables = paths.map(|path| (mark(path), render(&text, path)));
    for (mark, table) in tables.chain([("<!-- presets -->\n".to_owned(), presets())]) {
        let start = updated.find(&mark).unwrap() + mark.len();
        let length: usize = updated[start..]
            .split_inclusive('\n')
            .take_while(|line| line.starts_with('|'))
            .map(str::len)
            .sum();
        updated.replace_range(start..start + length, &table);
    }
    if env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &updated).unwrap();
    } else {
        assert!(
            updated == text,
            "docs/configuration.md is not what the schemas say: run this test with UPDATE_DOCS=1"
        );
    }
}

/// Checks that a document is a configuration.
fn accepted(document: &Document, block: &str) {
    let checked = if SftRunConfig::is_of(document) {
        SftRunConfig::new(document).map(drop)
    } else {
        RunConfig::new(document).map(drop)
    };
    checked.unwrap_or_else(|error| panic!("{error}\n{block}"));
}

/// Every example on the page about supervised training is accepted.
#[test]
fn every_example_of_supervised_training_is_accepted() {
    let text = fs::read_to_string(root().join("docs/sft.md")).unwrap();
    let blocks = text.split("```").skip(1).step_by(2);
    let blocks: Vec<&str> = blocks.filter_map(|x| x.strip_prefix("yaml\n")).collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        accepted(
            &Document::from_yaml(Path::new("docs.yaml"), block).unwrap(),
            block,
        );
    }
}

/// Every example on the page is accepted.
#[test]
fn every_example_is_accepted() {
    let text = fs::read_to_string(root().join("docs/configuration.md")).unwrap();
    let mut examples = 0;
    for (language, block) in text
        .split("```")
        .skip(1)
        .step_by(2)
        .filter_map(|block| block.split_once('\n'))
    {
        let document = match language {
            "yaml" => Document::from_yaml(Path::new("docs.yaml"), block),
            "toml" => Document::from_toml(Path::new("docs.toml"), block),
            _ => continue,
        };
        let document = document.unwrap();
        let document = Import::new(&document).map_or(document, |import| import.document);
        accepted(&document, block);
        examples += 1;
    }
    assert!(examples >= 4, "{examples}");
}

//! YAML examples in the pages, and the pages for users coming from other trainers.

use std::fs;
use std::path::Path;

use candle_grpo::config::{Document, Import, RunConfig};
use candle_grpo::loss::Recipe;
use rstest::rstest;

fn page(name: &str) -> String {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    fs::read_to_string(docs.join(name)).unwrap()
}

/// Returns the runs in a page's YAML examples.
fn examples(page: &str) -> Vec<RunConfig> {
    let blocks = page.split("```").skip(1).step_by(2);
    let blocks = blocks.filter_map(|block| block.strip_prefix("yaml\n"));
    let read = |block: &str| {
        let document = Document::from_yaml(Path::new("docs.yaml"), block).unwrap();
        let document = Import::new(&document).map_or(document, |import| import.document);
        RunConfig::new(&document).unwrap_or_else(|error| panic!("{error}\n{block}"))
    };
    blocks.map(read).collect()
}

/// The sections that every run needs, for examples without them.
const SECTIONS: [(&str, &str); 3] = [
    ("model", "model: m"),
    ("data", "data: {train: train.jsonl, held_out_rows: 8}"),
    ("rewards", "rewards: [{kind: numeric}]"),
];

/// Examples are in today's words, so that a reader can copy them.
#[rstest]
#[case("../README.md", 1)]
#[case("agents.md", 1)]
#[case("algorithms.md", 1)]
#[case("code.md", 1)]
#[case("configuration.md", 10)]
#[case("engines.md", 5)]
#[case("environments.md", 3)]
#[case("guide.md", 4)]
#[case("math.md", 1)]
#[case("scaling.md", 2)]
fn every_example_of_a_page_is_a_configuration(#[case] name: &str, #[case] least: usize) {
    let text = page(name);
    let blocks = text.split("```yaml\n").skip(1);
    let blocks = blocks.map(|rest| rest.split("```").next().unwrap());
    let runs: Vec<&str> = blocks.filter(|block| !block.contains("sft:")).collect();
    assert!(runs.len() >= least, "{}", runs.len());
    for block in runs {
        // A list has examples in it.
        let indent = block.len() - block.trim_start_matches(' ').len();
        let lines = block
            .lines()
            .map(|line| line.get(indent..).unwrap_or_default());
        let mut lines: Vec<&str> = lines.collect();
        for (key, section) in SECTIONS {
            if !lines
                .iter()
                .any(|line| line.starts_with(&format!("{key}:")))
            {
                lines.push(section);
            }
        }
        let text = lines.join("\n");
        let document = Document::from_yaml(Path::new("docs.yaml"), &text).unwrap();
        if Import::new(&document).is_some() {
            continue; // Another trainer's words.
        }
        assert!(!document.is_former(), "former words in\n{text}");
        RunConfig::new(&document).unwrap_or_else(|error| panic!("{error}\n{text}"));
    }
}

#[rstest]
#[case("from-trl.md", 2)]
#[case("from-verl.md", 1)]
#[case("from-roll.md", 3)]
#[case("from-openrlhf.md", 1)]
fn every_example_is_accepted(#[case] name: &str, #[case] number: usize) {
    assert_eq!(examples(&page(name)).len(), number);
}

#[test]
fn the_two_examples_of_roll_are_the_same_run() {
    let runs = examples(&page("from-roll.md"));
    let mut values = runs.iter().map(|run| run.to_value().unwrap());
    let (theirs, ours) = (values.next().unwrap(), values.next().unwrap());
    assert_eq!(theirs, ours);
}

/// Each key in the column "here" is in docs/configuration.md.
#[rstest]
#[case("from-trl.md")]
#[case("from-verl.md")]
#[case("from-roll.md")]
#[case("from-openrlhf.md")]
fn every_key_exists(#[case] name: &str) {
    let text = page(name);
    let configuration = page("configuration.md");
    let recipe = serde_json::json!(Recipe::default());
    let mut keys = 0;
    for row in text.lines().filter(|line| line.starts_with("| `")) {
        let here = row.split('|').nth(2).unwrap();
        for path in here.split('`').skip(1).step_by(2) {
            keys += 1;
            if let Some(option) = path.strip_prefix("recipe.") {
                let field = option.split(['.', ':']).next().unwrap();
                assert!(recipe.get(field).is_some(), "{path}");
                continue;
            }
            let (section, key) = path.split_once('.').unwrap_or(("", path));
            let is_section = configuration.contains(&format!("\n## {section}\n"));
            assert!(section.is_empty() || is_section, "{path}");
            let is_key = configuration.contains(&format!("| `{key}` |"));
            let is_top = configuration.contains(&format!("\n## {key}\n"));
            assert!(is_key || section.is_empty() && is_top, "{path}");
        }
    }
    assert!(keys > 15, "{keys}");
}

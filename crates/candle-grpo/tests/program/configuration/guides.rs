//! The pages for users coming from other trainers.

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

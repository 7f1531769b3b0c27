//! The configurations in `examples/`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_grpo::config::RunConfig;
use candle_grpo::train::data::{Question, Row};
use candle_grpo::train::{Dataset, RewardConfig, RewardFunction};
use rstest::rstest;
use serde_json::{Value, json};

use crate::support::sample;

/// Reads a configuration in `examples/`, and its data.
fn read(file: &str) -> (RunConfig, Dataset) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut config = RunConfig::read(&root.join("examples").join(file)).unwrap();
    let in_root = |paths: &[PathBuf]| paths.iter().map(|path| root.join(path)).collect();
    config.data.train = in_root(&config.data.train);
    config.data.held_out = in_root(&config.data.held_out);
    let data = config.data.load(config.seed()).unwrap();
    (config, data)
}

fn score(config: &RunConfig, row: &Row, completion: &str) -> f32 {
    let rewards = RewardConfig::build(&config.rewards, &Device::Cpu).unwrap();
    let sample = sample(&row.columns, completion, 0);
    rewards.score(&[sample]).unwrap()[0].value().unwrap()
}

fn numbers(row: &Row) -> [u64; 3] {
    ["a", "b", "sum"].map(|column| row.columns[column].as_u64().unwrap())
}

#[test]
fn addition_data_is_correct_and_no_held_out_row_is_trained_on() {
    let (config, data) = read("addition-llm/run.yaml");
    let trained: HashSet<[u64; 2]> = data.train.iter().map(in_order).collect();
    assert_eq!((data.train.len(), data.held_out.len()), (2000, 200));
    for row in data.train.iter().chain(&data.held_out) {
        let [a, b, sum] = numbers(row);
        assert_eq!(a + b, sum, "{}", row.place());
    }
    for row in &data.held_out {
        assert!(!trained.contains(&in_order(row)), "{}", row.place());
    }
    let row = &data.held_out[0];
    let [a, b, sum] = numbers(row);
    let prompt = format!(
        "<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n{a} + {b} ="
    );
    assert_eq!(data.question(row).unwrap(), Question::Text(prompt));
    for (completion, right) in [
        (format!(" {sum}, {a}"), 1.0),
        (format!(" {sum}\n1"), 1.0),
        (format!(" {sum}1"), 0.0),
        (format!(" {a} {sum}"), 0.0),
        (format!(" .\n{sum}"), 0.0),
    ] {
        assert_eq!(score(&config, row, &completion), right, "{completion:?}");
    }
}

/// The two numbers, which are the same sum in either order.
fn in_order(row: &Row) -> [u64; 2] {
    let [a, b, _] = numbers(row);
    [a.min(b), a.max(b)]
}

/// The questions are the same facts in other words.
#[test]
fn facts_are_the_same_in_both_files() {
    let fact = |row: &Row| ["town", "code"].map(|column| row.columns[column].clone());
    for file in ["facts-llm/run.yaml", "facts-llm/self_teacher.yaml"] {
        let (config, data) = read(file);
        let facts = |rows: &[Row]| rows.iter().map(fact).collect::<Vec<_>>();
        assert_eq!(facts(&data.train), facts(&data.held_out));
        assert_eq!(data.train.len(), config.train.prompts_per_step);
        let row = &data.held_out[0];
        let [town, code] = fact(row);
        let (town, code) = (town.as_str().unwrap(), code.as_u64().unwrap());
        let prompt = format!(
            "<|im_start|>user\nWhich code does {town} have?<|im_end|>\n<|im_start|>assistant\n{town} has the code"
        );
        assert_eq!(data.question(row).unwrap(), Question::Text(prompt));
        assert_eq!(score(&config, row, &format!(" {code}.")), 1.0);
        assert_eq!(score(&config, row, &format!(" {code}1.")), 0.0);
    }
}

#[test]
fn json_data_is_correct_and_no_held_out_name_is_trained_on() {
    let (config, data) = read("json-llm/run.yaml");
    let name = |row: &Row| row.columns["name"].as_str().unwrap().to_owned();
    let trained: HashSet<String> = data.train.iter().map(name).collect();
    for row in &data.held_out {
        assert!(!trained.contains(&name(row)), "{}", row.place());
    }
    for row in data.train.iter().chain(&data.held_out) {
        let columns = &row.columns;
        let person = &columns["person"];
        assert_eq!(person["name"], columns["name"], "{}", row.place());
        assert_eq!(person["age"], columns["age"], "{}", row.place());
    }
    let row = &data.held_out[0];
    let person: &Value = &row.columns["person"];
    for (completion, reward) in [
        (person.to_string(), 1.0),
        (format!("{person}."), 0.0),
        ("{\"name\": 1}".to_owned(), 0.2),
        (String::new(), 0.0),
    ] {
        assert_eq!(score(&config, row, &completion), reward, "{completion:?}");
    }
}

#[test]
fn the_agent_reports_the_reward_and_begins_with_the_prompt() {
    let (config, data) = read("agent/run.yaml");
    let environment = config.environment.as_ref().unwrap();
    assert!(environment.gives_rewards() && config.rewards.is_empty());
    let row = &data.train[0];
    let [a, b, _] = numbers(row);
    let message = json!({"role": "user", "content": format!("What is {a} + {b}?")});
    assert_eq!(
        data.question(row).unwrap(),
        Question::Messages(vec![message])
    );
}

#[rstest]
#[case("word-problems/gsm8k.yaml")]
#[case("word-problems/qwen2.5-7b.yaml")]
#[case("word-problems/qwen3.5-4b.yaml")]
#[case("word-problems/svamp.yaml")]
fn a_configuration_without_its_data_is_valid(#[case] file: &str) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    RunConfig::read(&root.join(file)).unwrap();
}

//! Data sets from files.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use candle_grpo_train::rewards::NumericReward;
use candle_grpo_train::{Dataset, DatasetConfig, Question, read_rows};
use rstest::rstest;
use serde_json::json;
use tempfile::TempDir;

fn file(contents: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.jsonl");
    fs::write(&path, contents).unwrap();
    (folder, path)
}

fn of(path: &Path) -> DatasetConfig {
    DatasetConfig {
        train: vec![path.to_path_buf()],
        ..DatasetConfig::default()
    }
}

fn questions(dataset: &Dataset) -> Vec<Question> {
    let questions = dataset
        .train
        .iter()
        .map(|row| dataset.question(row).unwrap());
    questions.collect()
}

fn user(text: &str) -> Question {
    Question::Messages(vec![message("user", text)])
}

fn message(role: &str, content: &str) -> serde_json::Value {
    json!({"role": role, "content": content})
}

#[test]
fn rows_know_their_lines() {
    let (_folder, path) =
        file("\u{feff}{\"prompt\": \"a\"}\n\n  \n{\"prompt\": \"b\", \"x\": 1}\r\n");
    let rows = read_rows(&path).unwrap();
    let lines: Vec<usize> = rows.iter().map(|row| row.line).collect();
    assert_eq!(lines, [1, 4]);
    assert_eq!(rows[1].columns, json!({"prompt": "b", "x": 1}));
    assert!(rows[1].place().ends_with("data.jsonl:4"));

    let (_folder, path) = file("[\n {\"prompt\":\n \"a\"},\n\n {\"prompt\": \"b\"}\n]\n");
    let lines: Vec<usize> = read_rows(&path)
        .unwrap()
        .iter()
        .map(|row| row.line)
        .collect();
    assert_eq!(lines, [2, 5]);
}

#[rstest]
#[case(
    "{\"a\": 1}\n{\"a\": }\n",
    "data.jsonl:2: must be a JSON object: expected value at column 7"
)]
#[case("{\"a\": 1}\n7\n", "data.jsonl:2: a number, must be a JSON object")]
#[case("[{\"a\": 1},\n 7]", "data.jsonl:2: a number, must be a JSON object")]
#[case("[{\"a\": 1},\n", "data.jsonl:2: the array is not closed")]
#[case("[{\"a\": 1},\n {\"b\": \n}]", "data.jsonl:3: expected value")]
#[case("[{\"a\": 1}\n {}]", "data.jsonl:2: after a row")]
#[case("[{\"a\": 1}]\n {}", "data.jsonl:2: nothing may follow")]
#[case("[,]", "data.jsonl:1: expected value")]
#[case("", "has no rows")]
#[case("[]", "has no rows")]
fn what_cannot_be_read_names_its_line(#[case] contents: &str, #[case] words: &str) {
    let (_folder, path) = file(contents);
    let error = format!("{:#}", read_rows(&path).unwrap_err());
    assert!(error.contains(words), "{error}");
}

#[test]
fn bytes_that_are_not_text_name_their_line() {
    let (_folder, path) = file(b"{}\n{\"a\": \"\xff\"}\n");
    let error = read_rows(&path).unwrap_err().to_string();
    assert!(error.ends_with("data.jsonl:2: not UTF-8"), "{error}");
    let error = read_rows(Path::new("/no/such.jsonl")).unwrap_err();
    assert!(error.to_string().contains("/no/such.jsonl"));
}

#[test]
fn the_columns_that_hold_the_prompt() {
    let (_folder, path) = file(
        [
            r#"{"prompt": "Once"}"#,
            r#"{"prompt": [{"role": "user", "content": "Hi"}]}"#,
            r#"{"messages": [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]}"#,
            r#"{"question": "Why?", "answer": "because"}"#,
            r#"{"Body": "Ann has 2", "Question": "How many?"}"#,
            r#"{"Body": "Ann has 2. ", "Question": " How many?"}"#,
        ]
        .join("\n"),
    );
    let dataset = of(&path).load(0).unwrap();
    let conversation = vec![message("system", "Be"), message("user", "Hi")];
    assert_eq!(
        questions(&dataset),
        [
            Question::Text("Once".to_owned()),
            user("Hi"),
            Question::Messages(conversation),
            user("Why?"),
            user("Ann has 2. How many?"),
            user("Ann has 2. How many?"),
        ]
    );
    assert_eq!(dataset.prefill(&dataset.train[0]).unwrap(), "");
}

#[test]
fn templates_system_and_prefill() {
    let (_folder, path) = file(r#"{"a": 2, "b": 3}"#);
    let config = DatasetConfig {
        prompt: Some("What is {a} + {b}?".to_owned()),
        prefill: Some("{a} + {b} =".to_owned()),
        system: Some("Add.".to_owned()),
        ..of(&path)
    };
    let dataset = config.load(0).unwrap();
    let messages = vec![message("system", "Add."), message("user", "What is 2 + 3?")];
    assert_eq!(questions(&dataset), [Question::Messages(messages)]);
    assert_eq!(dataset.prefill(&dataset.train[0]).unwrap(), "2 + 3 =");

    let plain = DatasetConfig {
        chat: Some(false),
        system: None,
        ..config.clone()
    };
    let text = Question::Text("What is 2 + 3?".to_owned());
    assert_eq!(questions(&plain.load(0).unwrap()), [text]);

    let contradiction = DatasetConfig {
        chat: Some(false),
        ..config
    };
    let error = format!("{:#}", contradiction.load(0).unwrap_err());
    assert!(
        error.contains("data.jsonl:1: data.system: given"),
        "{error}"
    );
}

#[test]
fn what_a_row_lacks_is_named_with_its_line() {
    let (_folder, path) = file("{\"prompt\": \"a\"}\n{\"text\": \"b\"}\n");
    let error = format!("{:#}", of(&path).load(0).unwrap_err());
    assert!(
        error.contains("data.jsonl:2: no column \"prompt\""),
        "{error}"
    );
    let config = DatasetConfig {
        prefill: Some("{x}".to_owned()),
        max_rows: Some(1),
        ..of(&path)
    };
    let error = format!("{:#}", config.load(0).unwrap_err());
    assert!(error.contains("data.jsonl:1: column \"x\""), "{error}");
    let (_folder, path) = file("{\"messages\": [{\"role\": \"user\"}, {\"content\": \"b\"}]}\n");
    let error = format!("{:#}", of(&path).load(0).unwrap_err());
    assert!(
        error.contains("data.jsonl:1: column \"messages\": message 1 is"),
        "{error}"
    );
}

#[test]
fn the_held_out_split_depends_on_the_seed_alone() {
    let rows: Vec<String> = (0..50)
        .map(|i| format!("{{\"prompt\": \"{i}\"}}"))
        .collect();
    let (_folder, path) = file(rows.join("\n"));
    let config = DatasetConfig {
        held_out_rows: Some(10),
        ..of(&path)
    };
    let lines = |seed: u64| {
        let dataset = config.load(seed).unwrap();
        let lines = |rows: &[candle_grpo_train::Row]| -> Vec<usize> {
            rows.iter().map(|row| row.line).collect()
        };
        (lines(&dataset.train), lines(&dataset.held_out))
    };
    let (train, held_out) = lines(1);
    assert_eq!((train.len(), held_out.len()), (40, 10));
    let mut all = [train, held_out].concat();
    all.sort_unstable();
    assert_eq!(all, (1..=50).collect::<Vec<_>>());
    assert_eq!(lines(1), lines(1));
    assert_ne!(lines(1), lines(2));
}

#[rstest]
#[case(DatasetConfig::default(), "train: absent")]
#[case(DatasetConfig { held_out: vec!["b".into()], held_out_rows: Some(1), ..of(Path::new("a")) }, "held_out_rows: given together")]
#[case(DatasetConfig { held_out_rows: Some(0), ..of(Path::new("a")) }, "held_out_rows: 0")]
#[case(DatasetConfig { max_rows: Some(0), ..of(Path::new("a")) }, "max_rows: 0")]
#[case(DatasetConfig { prompt: Some("{a".into()), ..of(Path::new("a")) }, "prompt: \"{a\"")]
#[case(DatasetConfig { prefill: Some("a}".into()), ..of(Path::new("a")) }, "prefill: \"a}\"")]
fn keys_that_contradict_each_other(#[case] config: DatasetConfig, #[case] words: &str) {
    let error = format!("{:#}", config.validate().unwrap_err());
    assert!(error.contains(words), "{error}");
}

#[test]
fn one_path_or_several() {
    let one: DatasetConfig = serde_json::from_value(json!({"train": "a"})).unwrap();
    let more: DatasetConfig = serde_json::from_value(json!({"train": ["a", "b"]})).unwrap();
    assert_eq!((one.train.len(), more.train.len()), (1, 2));
    let error = serde_json::from_value::<DatasetConfig>(json!({"train": 7})).unwrap_err();
    assert!(
        error.to_string().contains("a path or a list of paths"),
        "{error}"
    );
}

/// The folder with GSM8K and SVAMP, if the environment names it.
fn published() -> Option<PathBuf> {
    let folder = env::var_os("CANDLE_GRPO_DATA").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("skipped: CANDLE_GRPO_DATA names no folder with gsm8k/ and svamp/");
    }
    folder
}

#[test]
fn gsm8k_and_svamp_load_as_they_are() {
    let Some(folder) = published() else { return };
    for (name, column, rows) in [
        ("gsm8k/train.jsonl", "answer", 7473),
        ("gsm8k/test.jsonl", "answer", 1319),
        ("svamp/SVAMP.json", "Answer", 1000),
    ] {
        let dataset = of(&folder.join(name)).load(0).unwrap();
        assert_eq!(dataset.train.len(), rows);
        let reward = NumericReward {
            column: column.to_owned(),
            ..NumericReward::default()
        };
        for row in &dataset.train {
            let answer = reward.expected(&row.columns).unwrap();
            assert_eq!(answer, answer.trunc(), "{}", row.place());
            // The worked solution itself is right, and a number beside it is not.
            let solution = match &row.columns[column] {
                serde_json::Value::String(text) => text.clone(),
                number => number.to_string(),
            };
            assert!(reward.matches(&solution, &row.columns).unwrap());
            assert!(
                !reward
                    .matches(&format!("{}", answer + 1.), &row.columns)
                    .unwrap()
            );
        }
    }
}

//! Data sets from files.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use candle_grpo_train::data::{Question, read_rows};
use candle_grpo_train::rewards::NumericReward;
use candle_grpo_train::{Dataset, DatasetConfig};
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
fn rows_have_the_lines_of_the_file() {
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
    "data.jsonl:2: must be a JSON object: there must be a value at column 7"
)]
#[case("{\"a\": 1}\n7\n", "data.jsonl:2: a number, must be a JSON object")]
#[case("[{\"a\": 1},\n 7]", "data.jsonl:2: a number, must be a JSON object")]
#[case("[{\"a\": 1},\n", "data.jsonl:2: the array is not closed")]
#[case("[{\"a\": 1},\n {\"b\": \n}]", "data.jsonl:3: there must be a value")]
#[case(
    "{\"a\": 1",
    "data.jsonl:1: must be a JSON object: it ends within a value at column 7"
)]
#[case("{a: 1}", "a key must be in double quotes at column 2")]
#[case("{\"a\": 1} {\"b\": 2}", "nothing may follow the object at column 10")]
#[case("{\"a\" 1}", "there must be a colon at column 6")]
#[case("{\"a\": 1e999}", "a number is too large at column 11")]
#[case("{\"a\": \"\\q\"}", "a backslash must begin a JSON escape")]
#[case(
    "{\"a\": \"b\\ud83d\"}",
    "an escape from \\ud800 to \\udfff is half a character"
)]
#[case(
    "{\"a\": \"b\\ud83dc\"}",
    "an escape from \\ud800 to \\udfff is half a character"
)]
#[case(
    "{\"a\": \"\\ude00\"}",
    "an escape from \\ud800 to \\udfff is half a character"
)]
#[case(
    "[{\"a\": \"\\ud83d\\u0041\"}]",
    "an escape from \\ud800 to \\udfff is half a character"
)]
#[case("[{\"a\": 1}\n {}]", "data.jsonl:2: after a row")]
#[case("[{\"a\": 1}]\n {}", "data.jsonl:2: nothing may follow")]
#[case("[,]", "data.jsonl:1: there must be a value")]
#[case("", "has no rows")]
#[case("[]", "has no rows")]
fn an_unreadable_row_names_its_line(#[case] contents: &str, #[case] words: &str) {
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
fn the_prompt_comes_from_the_first_known_column() {
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
fn templates_fill_the_prompt_the_system_message_and_the_prefill() {
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
fn a_missing_column_is_named_with_its_line() {
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
        let lines = |rows: &[candle_grpo_train::data::Row]| -> Vec<usize> {
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
#[case(DatasetConfig { held_out: vec!["b".into()], held_out_rows: Some(1), ..of(Path::new("a")) }, "held_out_rows: given, must be absent with held_out")]
#[case(DatasetConfig { held_out_rows: Some(0), ..of(Path::new("a")) }, "held_out_rows: 0")]
#[case(DatasetConfig { max_rows: Some(0), ..of(Path::new("a")) }, "max_rows: 0")]
#[case(DatasetConfig { prompt: Some("{a".into()), ..of(Path::new("a")) }, "prompt: \"{a\"")]
#[case(DatasetConfig { prefill: Some("a}".into()), ..of(Path::new("a")) }, "prefill: \"a}\"")]
fn keys_that_contradict_each_other_are_refused(#[case] config: DatasetConfig, #[case] words: &str) {
    let error = format!("{:#}", config.validate().unwrap_err());
    assert!(error.contains(words), "{error}");
}

#[test]
fn a_key_takes_one_path_or_several() {
    let one: DatasetConfig = serde_json::from_value(json!({"train": "a"})).unwrap();
    let more: DatasetConfig = serde_json::from_value(json!({"train": ["a", "b"]})).unwrap();
    assert_eq!((one.train.len(), more.train.len()), (1, 2));
    let error = serde_json::from_value::<DatasetConfig>(json!({"train": 7})).unwrap_err();
    assert!(
        error.to_string().contains("a text or a list of texts"),
        "{error}"
    );
}

/// The folder with GSM8K and SVAMP, if the environment names it.
fn published() -> Option<PathBuf> {
    let folder = env::var_os("CANDLE_GRPO_DATA").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("skipped: CANDLE_GRPO_DATA names no directory with gsm8k/ and svamp/");
    }
    folder
}

#[test]
fn gsm8k_and_svamp_load_unchanged() {
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

#[rstest]
#[case(
    "{\"a\": 1, \"b\": 2, \"a\": 3}\n",
    "data.jsonl:1: must be a JSON object: key \"a\" twice"
)]
#[case(
    "{\"a\": 1}\n{\"b\": {\"c\": [{\"d\": 1, \"d\": 1}]}}\n",
    "data.jsonl:2: must be a JSON object: key \"d\" twice"
)]
#[case(
    "[{\"a\": 1},\n {\"b\": 1,\n \"b\": 2}]",
    "data.jsonl:3: key \"b\" twice"
)]
fn a_duplicate_key_is_an_error_with_its_line(#[case] contents: &str, #[case] words: &str) {
    let (_folder, path) = file(contents);
    let error = format!("{:#}", read_rows(&path).unwrap_err());
    assert!(error.contains(words), "{error}");
}

#[test]
fn rows_have_the_values_of_the_file() {
    let text = r#"{"a": null, "b": [true, -7, 18446744073709551615, 0.1, 1e300], "c": {"d": "é\n", "e": {}}}"#;
    let (_folder, path) = file(text);
    let expected: serde_json::Value = serde_json::from_str(text).unwrap();
    assert_eq!(read_rows(&path).unwrap()[0].columns, expected);
}

#[rstest]
#[case(b"ARROW1\x00\x00", "an Arrow file")]
#[case(b"\x1f\x8b\x08\x00", "a gzip file")]
#[case(b"\x28\xb5\x2f\xfd", "a Zstandard file")]
#[case(b"\xfd7zXZ\x00\x00", "an xz file")]
#[case(b"BZh91AY", "a bzip2 file")]
#[case(b"PK\x03\x04", "a ZIP file")]
#[case(b"\xff\xfe{\x00}\x00", "a file in UTF-16")]
fn another_format_is_named(#[case] contents: &[u8], #[case] words: &str) {
    let (_folder, path) = file(contents);
    let error = format!("{:#}", read_rows(&path).unwrap_err());
    assert!(
        error.contains("data.jsonl: ") && error.contains(words),
        "{error}"
    );
    // The command does not overwrite the file.
    assert!(error.contains("to convert it: "), "{error}");
    let is_written = error.contains("data.converted.jsonl") || error.contains("unzip ");
    assert!(is_written, "{error}");
}

#[cfg(not(feature = "parquet"))]
#[test]
fn a_parquet_file_names_the_feature() {
    let (_folder, path) = file(b"PAR1\x15\x04");
    let error = format!("{:#}", read_rows(&path).unwrap_err());
    assert!(error.contains("with the feature parquet"), "{error}");
    assert!(error.contains("read_parquet"), "{error}");
}

#[rstest]
#[case("question,answer\nWhy?,because\n")]
#[case("question\tanswer\nWhy?\tbecause\n")]
fn a_csv_file_must_be_named_as_one(#[case] contents: &str) {
    let (_folder, path) = file(contents);
    let error = format!("{:#}", read_rows(&path).unwrap_err());
    let must = "a CSV file, must have a name that ends in .csv, or in .tsv with tabs";
    assert!(error.ends_with(must), "{error}");
}

#[rstest]
#[case("\u{feff}{\"a\": 1, \"b\": 2}\n")]
#[case("\u{feff}[{\"a\": 1, \"b\": 2}]")]
#[case("\u{feff}\u{feff}{\"a\": 1, \"b\": 2}\n")]
#[case("\n\u{feff}{\"a\": 1, \"b\": 2}\n")]
fn json_with_a_byte_order_mark_is_read(#[case] contents: &str) {
    let (_folder, path) = file(contents);
    assert_eq!(
        read_rows(&path).unwrap()[0].columns,
        json!({"a": 1, "b": 2})
    );
}

#[rstest]
#[case("{\"a\": 1}\n\u{feff}{\"a\": 2}\n \u{feff}\r\n\u{feff}{\"a\": \"\u{feff}3\"}")]
#[case("\u{feff}[{\"a\": 1},\n\u{feff}{\"a\": 2},\n{\"a\":\u{20}\"\u{feff}3\"}\n\u{feff}]")]
fn files_of_json_that_are_joined_with_their_byte_order_marks_are_read(#[case] contents: &str) {
    let (_folder, path) = file(contents);
    let rows: Vec<serde_json::Value> = (read_rows(&path).unwrap().into_iter())
        .map(|row| row.columns)
        .collect();
    // A mark in a text is a part of it.
    assert_eq!(json!(rows), json!([{"a": 1}, {"a": 2}, {"a": "\u{feff}3"}]));
}

#[test]
fn bytes_that_are_no_text_are_not_called_csv() {
    let (_folder, path) = file(b"\x00\x9c,\xff\t,\n");
    let error = read_rows(&path).unwrap_err().to_string();
    assert!(error.ends_with("data.jsonl:1: not UTF-8"), "{error}");
}

#[test]
fn a_file_named_csv_is_csv_unless_it_is_json() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.CSV");
    fs::write(&path, "question\nWhy?\n").unwrap();
    assert_eq!(
        read_rows(&path).unwrap()[0].columns,
        json!({"question": "Why?"})
    );
    fs::write(&path, "{\"prompt\": \"a, b\"}\n").unwrap();
    assert_eq!(read_rows(&path).unwrap().len(), 1);
}

#[test]
fn messages_may_be_json_in_a_text_as_in_files_of_roll() {
    let messages = [message("system", "Be brief."), message("user", "1 + 1?")];
    let text = serde_json::to_string(&messages).unwrap();
    let (_folder, path) = file(json!({"prompt": "1 + 1?", "messages": text}).to_string());
    let dataset = of(&path).load(0).unwrap();
    assert_eq!(questions(&dataset), [Question::Messages(messages.to_vec())]);
    // Rewards have the column as it is.
    assert_eq!(dataset.train[0].columns["messages"], text);

    let (_folder, path) = file(json!({"messages": "[{"}).to_string());
    let error = format!("{:#}", of(&path).load(0).unwrap_err());
    assert!(
        error.contains("column \"messages\": a text, must be messages or their JSON"),
        "{error}"
    );
}

#[test]
fn conversations_may_have_the_keys_of_sharegpt() {
    let said = |from: &str, value: &str| json!({"from": from, "value": value});
    let talk = [
        said("system", "Be brief."),
        said("human", "1 + 1?"),
        said("gpt", "2"),
    ];
    let (_folder, path) = file(json!({"conversations": talk}).to_string());
    let config = DatasetConfig {
        cut_answer: true,
        ..of(&path)
    };
    let messages = [message("system", "Be brief."), message("user", "1 + 1?")];
    assert_eq!(
        questions(&config.load(0).unwrap()),
        [Question::Messages(messages.to_vec())]
    );
    let error = format!("{:#}", of(&path).load(0).unwrap_err());
    assert!(
        error.contains("column \"conversations\": ends with a message of the assistant"),
        "{error}"
    );
    for message in [json!({"from": "human"}), json!({"from": 1, "value": "x"})] {
        let (_folder, path) = file(json!({"conversations": [message]}).to_string());
        let error = format!("{:#}", of(&path).load(0).unwrap_err());
        let must = "must be an object with texts at \"role\" and \"content\", or at \"from\" and \"value\"";
        assert!(
            error.contains("column \"conversations\": message 0 is"),
            "{error}"
        );
        assert!(error.contains(must), "{error}");
    }
}

#[test]
fn an_answer_at_the_end_of_a_conversation_is_an_error_or_cut() {
    let (_folder, path) = file(
        [
            r#"{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}"#,
            r#"{"prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}, {"role": "assistant", "content": "4"}, {"role": "assistant", "content": "5"}]}"#,
        ]
        .join("\n"),
    );
    let error = format!("{:#}", of(&path).load(0).unwrap_err());
    for words in [
        "data.jsonl:1: column \"messages\": ends with a message of the assistant",
        "set data.cut_answer to true",
    ] {
        assert!(error.contains(words), "{error}");
    }
    let config = DatasetConfig {
        cut_answer: true,
        ..of(&path)
    };
    let dataset = config.load(0).unwrap();
    let second =
        ["1", "2", "3"].map(|text| message(if text == "2" { "assistant" } else { "user" }, text));
    assert_eq!(
        questions(&dataset),
        [user("2 + 2?"), Question::Messages(second.to_vec())]
    );
    // Rewards still have it.
    assert_eq!(dataset.train[0].columns["messages"][1]["content"], "4");

    for role in ["Assistant", "model", "gpt"] {
        let row = json!({"prompt": [message("user", "2 + 2?"), message(role, "4")]});
        let (_folder, path) = file(row.to_string());
        let error = format!("{:#}", of(&path).load(0).unwrap_err());
        assert!(
            error.contains("ends with a message of the assistant"),
            "{error}"
        );
    }

    let (_folder, path) = file(
        r#"{"messages": [{"role": "system", "content": "Be"}, {"role": "assistant", "content": "4"}]}"#,
    );
    let config = DatasetConfig {
        cut_answer: true,
        ..of(&path)
    };
    let error = format!("{:#}", config.load(0).unwrap_err());
    assert!(
        error.contains("no message of the user before the answer"),
        "{error}"
    );
}

#[test]
fn multimodal_content_is_named_and_text_parts_are_joined() {
    let conversation = |content: serde_json::Value| {
        json!({"messages": [{"role": "user", "content": content}]}).to_string()
    };
    for (content, words) in [
        (
            json!([{"type": "text", "text": "What is"}, {"type": "image_url", "image_url": {}}]),
            "type \"image_url\"",
        ),
        (json!([{"type": "image"}]), "type \"image\""),
        (
            json!([{"type": "input_audio", "input_audio": {}}]),
            "type \"input_audio\"",
        ),
        (json!([{"type": "video", "text": "x"}]), "type \"video\""),
        (json!(["text"]), "the part \"text\""),
        (json!({"text": "x"}), "content: an object, must be text"),
        (json!(7), "content: a number, must be text"),
    ] {
        let (_folder, path) = file(conversation(content));
        let error = format!("{:#}", of(&path).load(0).unwrap_err());
        assert!(
            error.contains("data.jsonl:1: column \"messages\": message 0"),
            "{error}"
        );
        assert!(error.contains(words), "{words:?} in {error}");
    }
    let parts = json!([{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]);
    let (_folder, path) = file(conversation(parts));
    assert_eq!(
        questions(&of(&path).load(0).unwrap()),
        [user("What is this?")]
    );
}

#[rstest]
#[case(json!({"prompt": "What is this?", "images": ["a.png"]}), Some("images"))]
#[case(json!({"messages": [{"role": "user", "content": "hi"}], "Image": {"bytes": "iVBO"}}), Some("Image"))]
#[case(json!({"question": "Who speaks?", "audio": "a.wav"}), Some("audio"))]
#[case(json!({"prompt": "p", "video": "a.mp4"}), Some("video"))]
#[case(json!({"prompt": "p", "multi_modal_data": {"image": ["a"]}}), Some("multi_modal_data"))]
#[case(json!({"prompt": "p", "images": [null], "audio": null, "videos": [], "image": ""}), None)]
#[case(json!({"prompt": "p", "image_count": 2}), None)]
#[case(json!({"prompt": "p", "image": {"bytes": null, "path": null}}), None)]
#[case(json!({"prompt": "p", "images": [{"bytes": null, "path": ""}, null]}), None)]
#[case(json!({"prompt": "p", "multi_modal_data": {"image": [], "video": null}}), None)]
#[case(json!({"prompt": "p", "image": {"bytes": null, "path": "a.png"}}), Some("image"))]
fn a_column_of_media_beside_the_prompt_is_refused(
    #[case] row: serde_json::Value,
    #[case] refused: Option<&str>,
) {
    let (_folder, path) = file(row.to_string());
    let loaded = of(&path).load(0);
    match refused {
        Some(name) => assert_eq!(
            format!("{:#}", loaded.unwrap_err()),
            format!(
                "{}:1: content: column {name:?}, must be absent or a part of data.prompt: only text is supported",
                path.display()
            )
        ),
        None => assert_eq!(loaded.unwrap().train.len(), 1),
    }
}

#[test]
fn a_column_of_media_in_the_template_of_the_prompt_is_text() {
    let (_folder, path) = file(json!({"image": "a.png", "n": 1}).to_string());
    let load = |prompt: &str| {
        let config = DatasetConfig {
            prompt: Some(prompt.to_owned()),
            ..of(&path)
        };
        config.load(0).map(|dataset| questions(&dataset))
    };
    assert_eq!(load("Open {image}").unwrap(), [user("Open a.png")]);
    let error = format!("{:#}", load("Open {n}").unwrap_err());
    assert!(
        error.contains("column \"image\", must be absent"),
        "{error}"
    );
}

#[rstest]
#[case(json!({"answer": "4", "problem": "2 + 2?"}), r#"["answer", "problem"]"#)]
#[case(json!({"text": "4", "q": "2 + 2"}), r#"["text", "q"]"#)]
#[case(json!({}), "[]")]
fn an_error_about_columns_lists_all_of_them_and_proposes_none(
    #[case] row: serde_json::Value,
    #[case] names: &str,
) {
    let (_folder, path) = file(row.to_string());
    let error = format!("{:#}", of(&path).load(0).unwrap_err());
    let expected = format!("among {names}: name those of the question with data.prompt");
    assert!(error.ends_with(&expected), "{error}");
}

#[rstest]
#[case(json!({"question": null, "answer": "1"}), "column \"question\": null, must be a text")]
#[case(json!({"question": 3}), "column \"question\": a number, must be a text")]
#[case(json!({"Body": "b", "Question": ["q"]}), "column \"Question\": an array, must be a text")]
#[case(json!({"prompt": null}), "column \"prompt\": null, must be a text or messages")]
fn a_question_that_is_no_text_is_named(#[case] row: serde_json::Value, #[case] words: &str) {
    let (_folder, path) = file(row.to_string());
    let error = format!("{:#}", of(&path).load(0).unwrap_err());
    assert!(error.ends_with(words), "{error}");
}

#[test]
fn rows_after_the_greatest_number_are_not_read() {
    let (_folder, path) = file("{\"question\": \"a\"}\n\n{\"question\": \"b\"}\nno JSON\n");
    let config = DatasetConfig {
        max_rows: Some(2),
        ..of(&path)
    };
    assert_eq!(config.load(0).unwrap().train.len(), 2);
    let (_folder, path) = file("[{\"question\": \"a\"}, {\"question\": \"b\"}, no JSON");
    let config = DatasetConfig {
        train: vec![path],
        ..config
    };
    assert_eq!(config.load(0).unwrap().train.len(), 2);
}

#[cfg(unix)]
#[test]
fn a_pipe_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    let made = std::process::Command::new("mkfifo").arg(&path).status();
    assert!(made.unwrap().success());
    let error = format!("{:#}", of(&path).load(0).unwrap_err());
    assert!(
        error.ends_with("it is a pipe or a device, must be a file"),
        "{error}"
    );
}

#[test]
fn a_prompt_that_is_the_same_for_all_rows_is_an_error() {
    let (_folder, path) = file("{\"a\": 1}\n{\"a\": 2}\n");
    let config = DatasetConfig {
        prompt: Some("What is a?".to_owned()),
        ..of(&path)
    };
    let error = format!("{:#}", config.load(0).unwrap_err());
    assert!(error.contains("prompt: the same for all 2 rows"), "{error}");
    let prefilled = DatasetConfig {
        prefill: Some("{a}".to_owned()),
        ..config.clone()
    };
    assert_eq!(prefilled.load(0).unwrap().train.len(), 2);
    // One row, however often it occurs, is one choice.
    fs::write(&path, "{\"a\": 1}\n{\"a\": 1}\n").unwrap();
    assert_eq!(config.load(0).unwrap().train.len(), 2);
}

#[test]
fn rows_that_are_held_out_and_trained_on_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, prompts: &[&str]| {
        let rows = prompts.iter().enumerate();
        let rows: String = rows
            .map(|(i, prompt)| json!({"prompt": prompt, "row": i}).to_string() + "\n")
            .collect();
        let path = folder.path().join(name);
        fs::write(&path, rows).unwrap();
        path
    };
    let load = |held_out: &[&str]| {
        let config = DatasetConfig {
            train: vec![write("train.jsonl", &["a", "b", "c"])],
            held_out: vec![write("held_out.jsonl", held_out)],
            ..DatasetConfig::default()
        };
        config.load(0)
    };
    assert_eq!(load(&["d", "e"]).unwrap().held_out_in_train, 0);
    assert_eq!(load(&["d", "b", "a"]).unwrap().held_out_in_train, 2);
    let error = load(&["c", "a", "c"]).unwrap_err().to_string();
    assert!(
        error.contains("data.held_out: all 3 rows ask the same as rows of train"),
        "{error}"
    );
    let config = DatasetConfig {
        held_out_rows: Some(1),
        ..of(&write("train.jsonl", &["a", "b", "a", "b"]))
    };
    let error = config.load(0).unwrap_err().to_string();
    assert!(
        error.starts_with("data.held_out_rows: all 1 rows ask"),
        "{error}"
    );
}

#[test]
fn keys_keep_their_order_and_digests_do_not_depend_on_it() {
    let prompt = |keys: &str| {
        let row =
            format!(r#"{{"prompt": [{{"role": "user", "content": "{{}}", "call": {{{keys}}}}}]}}"#);
        let (_folder, path) = file(row);
        let dataset = of(&path).load(0).unwrap();
        let id = dataset.question_id(&dataset.train[0]).unwrap();
        let digest = candle_grpo_train::run::row_digest(&dataset.train[0].columns);
        (questions(&dataset).remove(0), id, digest)
    };
    let (one, id, digest) = prompt(r#""zeta": 1, "alpha": 2"#);
    let Question::Messages(messages) = &one else {
        panic!("{one:?}");
    };
    assert_eq!(
        messages[0].to_string(),
        r#"{"role":"user","content":"{}","call":{"zeta":1,"alpha":2}}"#
    );
    let (two, id_two, digest_two) = prompt(r#""alpha": 2, "zeta": 1"#);
    assert_eq!(one, two);
    assert_eq!((id, digest), (id_two, digest_two));
}

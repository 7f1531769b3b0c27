//! Data rows as tokens and weights.

use std::path::PathBuf;

use candle_grpo_train::sft::{SftDataConfig, SftDataset, TrainOn, Truncation, marked_text};
use candle_grpo_train::{Prompt, find_invalid};
use rstest::rstest;
use serde_json::{Value, json};
use tokenizers::processors::template::TemplateProcessing;

use super::{chat_model, decode};
use crate::environment::templates::CHATML;

fn write(folder: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn lines(rows: &[Value]) -> String {
    rows.iter().map(|row| row.to_string() + "\n").collect()
}

fn load(config: SftDataConfig) -> anyhow::Result<SftDataset> {
    let model = chat_model(CHATML);
    config.load(&model, model.chat_template.as_ref(), 7)
}

fn load_rows(config: SftDataConfig, rows: &[Value]) -> anyhow::Result<SftDataset> {
    let folder = tempfile::tempdir().unwrap();
    load(SftDataConfig {
        train: vec![write(&folder, "rows.jsonl", &lines(rows))],
        ..config
    })
}

/// The rows as text, with marks around what trains.
fn texts(dataset: &SftDataset) -> Vec<String> {
    let tokenizer = chat_model(CHATML).tokenizer;
    let examples = dataset.train.examples.iter();
    examples
        .map(|example| marked_text(example, &tokenizer, usize::MAX).unwrap())
        .collect()
}

fn error(config: SftDataConfig, rows: &[Value]) -> String {
    format!("{:#}", load_rows(config, rows).unwrap_err())
}

/// A question and its answer in [`CHATML`] format.
fn chat(question: &str, answer: &str) -> String {
    format!("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n⟦{answer}<|im_end|>⟧\n")
}

#[test]
fn a_row_is_a_conversation_a_prompt_with_its_completion_or_a_text() {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let (user, assistant) = (message("user", "q"), message("assistant", "a"));
    let rows = [
        json!({"messages": [user, assistant], "text": "not this"}),
        json!({"prompt": [user], "completion": [assistant]}),
        json!({"prompt": [user], "completion": "a"}),
        json!({"question": "q", "completion": "a"}),
        // Text in the column `prompt` is what the model continues.
        json!({"prompt": "q ", "completion": "a"}),
        json!({"text": "ab12"}),
        // ShareGPT.
        json!({"conversations": [
            {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
        ]}),
    ];
    let dataset = load_rows(SftDataConfig::default(), &rows).unwrap();
    let of_chat = chat("q", "a");
    assert_eq!(
        texts(&dataset),
        [
            &*of_chat,
            &of_chat,
            &of_chat,
            &of_chat,
            "q ⟦a<|im_end|>⟧",
            "ab⟦12<|im_end|>⟧",
            &of_chat,
        ]
    );
    let tokenizer = chat_model(CHATML).tokenizer;
    let last = &dataset.train.examples[5];
    assert_eq!(decode(&tokenizer, &last.tokens()[..1]), "ab");
    assert_eq!(last.weights(), [0., 1., 1.]);
    // The answer and the end of its turn.
    assert_eq!(dataset.train.examples[0].num_trained_tokens(), 2);
}

#[test]
fn columns_have_the_names_that_the_file_gives() {
    let rows = [json!({"q": "x", "extra": {"a": "y"}, "talk": [
        {"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}
    ], "doc": "12"})];
    let some = |text: &str| Some(text.to_owned());
    for (config, expected) in [
        (
            SftDataConfig {
                prompt: some("Q: {q}"),
                completion: some("{extra.a}!"),
                ..SftDataConfig::default()
            },
            chat("Q: x", "y!"),
        ),
        (
            SftDataConfig {
                prompt: some("Q: {q}"),
                completion: some(" {extra.a}"),
                chat: Some(false),
                append_eos: false,
                ..SftDataConfig::default()
            },
            "Q: x⟦ y⟧".to_owned(),
        ),
        (
            SftDataConfig {
                messages: some("talk"),
                system: some("s"),
                ..SftDataConfig::default()
            },
            format!("<|im_start|>system\ns<|im_end|>\n{}", chat("u", "v")),
        ),
        (
            SftDataConfig {
                text: some("a{doc}"),
                ..SftDataConfig::default()
            },
            "a⟦12<|im_end|>⟧".to_owned(),
        ),
        (
            SftDataConfig {
                prompt: some("{q}"),
                completion: some("{doc}"),
                chat: Some(false),
                train_on: TrainOn::All,
                ..SftDataConfig::default()
            },
            "x⟦12<|im_end|>⟧".to_owned(),
        ),
    ] {
        let dataset = load_rows(config, &rows).unwrap();
        assert_eq!(texts(&dataset), [expected]);
    }
}

#[test]
fn rows_come_from_files_of_all_formats_with_shares() {
    let folder = tempfile::tempdir().unwrap();
    let csv = write(&folder, "a.csv", "prompt,completion,w\nq,a,0.5\nr,b,0\n");
    let array = json!([{"prompt": "s", "completion": "c", "w": 2}]).to_string();
    let json = write(&folder, "b.json", &array);
    let dataset = load(SftDataConfig {
        train: vec![csv, json],
        weight: Some("w".to_owned()),
        weights: Some(vec![1., 3.]),
        ..SftDataConfig::default()
    })
    .unwrap();
    assert_eq!(texts(&dataset), ["q⟦a<|im_end|>⟧", "s⟦c<|im_end|>⟧"]);
    assert_eq!(dataset.train.without_weight, 1);
    let weights = dataset.train.examples.iter().map(|row| row.weights());
    assert_eq!(weights.collect::<Vec<_>>(), [[0., 0.5, 0.5], [0., 2., 2.]]);
    let order = dataset.order.slice(0, 40);
    assert_eq!(order.iter().filter(|&&row| row == 1).count(), 30);
}

#[test]
fn long_rows_are_dropped_or_cut_off_and_counted() {
    let row = |answer: &str| json!({"prompt": "12", "completion": answer});
    // 1 prompt token, the answer's tokens, and the end.
    let rows = [
        row("xyz"),
        row("x"),
        row("xyzxyz"),
        json!({"prompt": "qqqq", "completion": "x"}),
    ];
    let config = SftDataConfig {
        max_length: Some(4),
        ..SftDataConfig::default()
    };
    let dropped = load_rows(config.clone(), &rows).unwrap();
    assert_eq!(texts(&dropped), ["12⟦x<|im_end|>⟧"]);
    let train = &dropped.train;
    assert_eq!((train.too_long, train.truncated, train.longest), (3, 0, 8));

    let config = SftDataConfig {
        truncation: Truncation::Truncate,
        ..config
    };
    let cut = load_rows(config.clone(), &rows).unwrap();
    // Nothing in the last row trains.
    assert_eq!(texts(&cut), ["12⟦xyz⟧", "12⟦x<|im_end|>⟧", "12⟦xyz⟧"]);
    let train = &cut.train;
    assert_eq!((train.too_long, train.truncated, train.longest), (1, 2, 8));
    assert_eq!((train.num_tokens(), train.num_trained_tokens()), (11, 8));

    let one = SftDataConfig {
        max_length: Some(1),
        ..config.clone()
    };
    let error = load_rows(one, &rows).unwrap_err();
    let invalid = find_invalid(&error).unwrap();
    assert_eq!((&*invalid.field, &*invalid.value), ("max_length", "1"));
    let longer = SftDataConfig {
        max_length: Some(513),
        ..config
    };
    let error = format!("{:#}", load_rows(longer, &rows).unwrap_err());
    assert_eq!(
        error,
        "max_length: 513, must be at most 512, the positions of the model"
    );
}

#[test]
fn held_out_rows_do_not_train() {
    let rows: Vec<Value> = (0..10)
        .map(|i| json!({"prompt": i.to_string(), "completion": "x"}))
        .collect();
    let config = SftDataConfig {
        held_out_rows: Some(3),
        ..SftDataConfig::default()
    };
    let dataset = load_rows(config, &rows).unwrap();
    let (train, held_out) = (&dataset.train.examples, &dataset.held_out.examples);
    assert_eq!((train.len(), held_out.len()), (7, 3));
    assert!(held_out.iter().all(|row| !train.contains(row)));
    assert_eq!(dataset.held_out_in_train, 0);
    let folder = tempfile::tempdir().unwrap();
    let dataset = load(SftDataConfig {
        train: vec![write(&folder, "a.jsonl", &lines(&rows))],
        held_out: vec![write(&folder, "b.jsonl", &lines(&rows[2..4]))],
        ..SftDataConfig::default()
    });
    assert_eq!(dataset.unwrap().held_out_in_train, 2);
}

#[rstest]
#[case::no_column(json!({"a": 1}), "rows.jsonl:2: no column \"messages\", \"completion\" or \"text\" among [\"a\"]")]
#[case::no_prompt(json!({"completion": "x"}), "rows.jsonl:2: no column \"prompt\"")]
#[case::empty_text(json!({"text": ""}), "rows.jsonl:2: column \"text\": the text is empty")]
#[case::text_that_is_a_number(json!({"text": 3}), "rows.jsonl:2: column \"text\": a number, must be a text")]
#[case::one_token(json!({"text": "<|im_end|>"}), "rows.jsonl:2: 1 tokens, none of which trains")]
#[case::empty_completion(json!({"prompt": "x", "completion": ""}), "rows.jsonl:2: completion: empty")]
#[case::completion_that_is_null(json!({"prompt": "x", "completion": null}), "rows.jsonl:2: column \"completion\": null, must be a text or messages")]
#[case::messages_after_a_text(json!({"prompt": "x", "completion": [{"role": "assistant", "content": "y"}]}), "rows.jsonl:2: column \"completion\": messages, but the prompt is a plain text; set data.chat to true")]
#[case::no_messages(json!({"messages": []}), "rows.jsonl:2: column \"messages\": no messages")]
#[case::messages_that_are_a_text(json!({"messages": "x"}), "rows.jsonl:2: column \"messages\": a text, must be messages")]
#[case::no_role(json!({"messages": [{"content": "x"}]}), "rows.jsonl:2: column \"messages\": message 0 is {\"content\":\"x\"}, must be an object")]
#[case::nothing_said(json!({"messages": [{"role": "user", "content": "x"}]}), "rows.jsonl:2: column \"messages\": no message of the assistant")]
#[case::images(json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "rows.jsonl:2: column \"messages\": message 0: content: a part of type \"image\"")]
#[case::tools(json!({"messages": [{"role": "assistant", "content": "x"}], "tools": {}}), "rows.jsonl:2: column \"messages\": column \"tools\": an object, must be a list")]
#[case::tools_that_are_no_json(json!({"messages": [{"role": "assistant", "content": "x"}], "tools": "x"}), "rows.jsonl:2: column \"messages\": column \"tools\": must be JSON")]
#[case::variables(json!({"messages": [{"role": "assistant", "content": "x"}], "chat_template_kwargs": 1}), "rows.jsonl:2: column \"messages\": column \"chat_template_kwargs\": a number, must be an object")]
#[case::reserved_variables(json!({"messages": [{"role": "assistant", "content": "x"}], "chat_template_kwargs": {"tools": 1}}), "rows.jsonl:2: column \"messages\": column \"chat_template_kwargs\": \"tools\", must be absent")]
fn a_malformed_row_is_an_error_with_its_place_and_column(
    #[case] row: Value,
    #[case] expected: &str,
) {
    let found = error(SftDataConfig::default(), &[json!({"text": "fine"}), row]);
    let place = found.find("rows.jsonl").unwrap();
    assert!(found[place..].starts_with(expected), "{found}");
}

#[rstest]
#[case(json!(-1), "-1, must be a number of at least 0")]
#[case(json!("x"), "\"x\", must be a number of at least 0")]
#[case(json!(null), "null, must be a number of at least 0")]
fn a_weight_that_is_none_is_an_error(#[case] weight: Value, #[case] expected: &str) {
    let config = SftDataConfig {
        weight: Some("w".to_owned()),
        ..SftDataConfig::default()
    };
    let found = error(config.clone(), &[json!({"text": "ab12", "w": weight})]);
    assert!(
        found.ends_with(&format!("rows.jsonl:1: column \"w\": {expected}")),
        "{found}"
    );
    let found = error(config.clone(), &[json!({"text": "ab12"})]);
    assert!(
        found.contains("rows.jsonl:1: column \"w\": absent"),
        "{found}"
    );
    let found = error(config, &[json!({"text": "ab12", "w": 0})]);
    assert!(
        found.starts_with("train: all rows have the weight 0"),
        "{found}"
    );
}

#[test]
fn a_model_without_a_template_has_a_way_out() {
    let folder = tempfile::tempdir().unwrap();
    let row = json!({"question": "q", "completion": "a"});
    let config = SftDataConfig {
        train: vec![write(&folder, "rows.jsonl", &lines(&[row]))],
        ..SftDataConfig::default()
    };
    let model = chat_model(CHATML);
    let error = format!("{:#}", config.load(&model, None, 0).unwrap_err());
    assert!(
        error.contains("rows.jsonl:1: the model has no chat template: give model.chat_template"),
        "{error}"
    );
}

#[rstest]
#[case(r#"{}"#, "train: absent")]
#[case(r#"{"train": "a", "max_length": 0}"#, "max_length: 0")]
#[case(
    r#"{"train": "a", "text": "x", "messages": "y"}"#,
    "messages: given, must be absent"
)]
#[case(
    r#"{"train": "a", "text": "x", "prompt": "y"}"#,
    "completion: given, must be absent"
)]
#[case(
    r#"{"train": "a", "messages": "x", "completion": "y"}"#,
    "completion: given, must be absent"
)]
#[case(r#"{"train": "a", "completion": "{"}"#, "completion: ")]
#[case(r#"{"train": ["a", "b"], "weights": [1]}"#, "weights: 1 weights")]
#[case(
    r#"{"train": "a", "chat_template_kwargs": {"messages": 1}}"#,
    "chat_template_kwargs.messages: given"
)]
fn keys_that_contradict_each_other_are_errors(#[case] config: &str, #[case] expected: &str) {
    let config: SftDataConfig = serde_json::from_str(config).unwrap();
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with(expected), "{error}");
}

/// transformers renders `{{ x | tojson }}` with the row's key order.
#[test]
fn calls_and_tools_keep_the_order_of_their_keys() {
    let template = "{{ tools | tojson }}{% for m in messages %}[{% generation %}{{ m.tool_calls | tojson }}\
                    {{ m.content }}{% endgeneration %}]{% endfor %}";
    let model = chat_model(template);
    let row = r#"{"messages": [{"role": "assistant", "tool_calls": [{"b": 1, "a": 2}], "content": "c"}],
        "tools": [{"type": "function", "function": {"name": "n"}}]}"#;
    let folder = tempfile::tempdir().unwrap();
    let config = SftDataConfig {
        train: vec![write(&folder, "rows.jsonl", &row.replace('\n', ""))],
        append_eos: false,
        ..SftDataConfig::default()
    };
    let dataset = config
        .load(&model, model.chat_template.as_ref(), 7)
        .unwrap();
    assert_eq!(
        marked_text(&dataset.train.examples[0], &model.tokenizer, usize::MAX).unwrap(),
        r#"[{"type": "function", "function": {"name": "n"}}][⟦[{"b": 1, "a": 2}]c⟧]"#
    );
}

/// Token ids from transformers 5.24 for the post-processors `<s> $A`, `<s> $A </s>` and `$A </s>`.
/// Its EOS corresponds to `append_eos` here.
#[rstest]
#[case("<s> $A", "<s>")]
#[case("<s> $A </s>", "<s>")]
#[case("$A </s>", "")]
fn plain_texts_begin_as_the_tokenizer_begins_them(#[case] template: &str, #[case] begin: &str) {
    let mut model = chat_model(CHATML);
    let special = ["<s>", "</s>"].map(|name| {
        let id = model.tokenizer.token_to_id(name).unwrap();
        (name.to_owned(), id)
    });
    let mut builder = TemplateProcessing::builder();
    let template = builder.try_single(template).unwrap();
    let processor = template.special_tokens(special.to_vec()).build().unwrap();
    model.tokenizer.with_post_processor(Some(processor));
    let rows = [
        json!({"text": "ab"}),
        json!({"text": "<s>ab"}),
        json!({"prompt": "ab", "completion": "12"}),
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}),
    ];
    let folder = tempfile::tempdir().unwrap();
    let config = SftDataConfig {
        train: vec![write(&folder, "rows.jsonl", &lines(&rows))],
        ..SftDataConfig::default()
    };
    let dataset = config
        .load(&model, model.chat_template.as_ref(), 7)
        .unwrap();
    let examples = dataset.train.examples.iter();
    let texts: Vec<String> = examples
        .map(|example| decode(&model.tokenizer, example.tokens()))
        .collect();
    assert_eq!(texts[0], format!("{begin}ab<|im_end|>"));
    assert_eq!(texts[1], format!("{begin}<s>ab<|im_end|>"));
    assert_eq!(texts[2], format!("{begin}ab12<|im_end|>"));
    assert!(texts[3].starts_with("<|im_start|>user"), "{}", texts[3]);
    let prompt = |text: &str| Prompt::plain(0, text, Value::Null, &model.tokenizer).unwrap();
    for (text, expected) in [("ab", "ab"), ("<s>ab", "<s>ab")] {
        let tokens = prompt(text).tokens;
        assert_eq!(
            decode(&model.tokenizer, &tokens),
            format!("{begin}{expected}")
        );
    }
}

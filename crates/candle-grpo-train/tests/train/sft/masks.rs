//! Compares which conversation tokens train with positions found by hand.

use candle_grpo_train::ChatTemplate;
use candle_grpo_train::sft::{SftDataConfig, TrainOn, marked_text};
use rstest::rstest;
use serde_json::{Value, json};

use super::chat_model;
use crate::environment::templates::{CHATML, LLAMA, MISTRAL};

/// Qwen3's format: reasoning is written only after the last user message.
const THINKING: &str = r#"{%- set ns = namespace(last=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}{%- if message.role == 'assistant' and loop.index0 > ns.last %}{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{- message.content + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"#;

/// Gemma's format: a different role name, no system messages, alternating roles, and a turn ending
/// that is not a stop token.
const GEMMA: &str = r#"{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}{{- '<start>' + ('model' if message.role == 'assistant' else message.role) + '\n' + message.content | trim + '<end>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<start>model\n' }}{%- endif %}"#;

/// CHATML with generation blocks, which exclude the line feed.
const MARKED: &str = r#"{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}{%- if message.role == 'assistant' %}{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"#;

/// Tool calls as in Hermes, which tool messages must follow.
const CALLS: &str = r#"{%- for message in messages %}{%- if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{%- endif %}{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}{%- for call in message.tool_calls or [] %}{{- '<call>' + (call.function | tojson) + '</call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"#;

/// The first row as text, with marks around what trains.
fn try_marked(template: &str, config: SftDataConfig, row: &Value) -> anyhow::Result<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rows.jsonl");
    std::fs::write(&file, row.to_string()).unwrap();
    let model = chat_model(template);
    let config = SftDataConfig {
        train: vec![file],
        ..config
    };
    let template: Option<ChatTemplate> = model.chat_template.clone();
    let dataset = config.load(&model, template.as_ref(), 0)?;
    marked_text(&dataset.train.examples[0], &model.tokenizer, usize::MAX)
}

fn marked(template: &str, train_on: TrainOn, row: &Value) -> String {
    let config = SftDataConfig {
        train_on,
        ..SftDataConfig::default()
    };
    try_marked(template, config, row).unwrap()
}

/// Two questions and two answers.
fn two_turns() -> Value {
    json!({"messages": [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one", "reasoning_content": "hm"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "two", "reasoning_content": "ah"},
    ]})
}

#[rstest]
#[case::chatml(
    CHATML,
    "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n\
     <|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n⟦two<|im_end|>⟧\n"
)]
#[case::llama(
    LLAMA,
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n1?<|eot_id|>\
     <|start_header_id|>assistant<|end_header_id|>\n\n⟦one<|eot_id|>⟧\
     <|start_header_id|>user<|end_header_id|>\n\n2?<|eot_id|>\
     <|start_header_id|>assistant<|end_header_id|>\n\n⟦two<|eot_id|>⟧"
)]
#[case::mistral(MISTRAL, "<s>[INST] 1?[/INST]⟦one</s>⟧[INST] 2?[/INST]⟦two</s>⟧")]
// The first answer is written without its reasoning.
#[case::thinking(
    THINKING,
    "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n\
     <|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n⟦<think>\nah\n</think>\n\ntwo<|im_end|>⟧\n"
)]
// Without a stop token the text that ends the turn trains.
#[case::gemma(
    GEMMA,
    "<start>user\n1?<end>\n<start>model\n⟦one<end>\n⟧<start>user\n2?<end>\n<start>model\n⟦two<end>\n⟧"
)]
#[case::generation_blocks(
    MARKED,
    "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n⟦one<|im_end|>⟧\n\
     <|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n⟦two<|im_end|>⟧\n"
)]
fn the_turns_of_the_assistant_train(#[case] template: &str, #[case] expected: &str) {
    assert_eq!(marked(template, TrainOn::Answers, &two_turns()), expected);
    // The last answer alone, and everything.
    let (first, last) = (expected.find('⟧').unwrap(), expected.rfind('⟦').unwrap());
    let only_last = expected[..first].replace('⟦', "") + &expected[first + '⟧'.len_utf8()..];
    assert!(first < last);
    assert_eq!(
        marked(template, TrainOn::LastAnswer, &two_turns()),
        only_last
    );
    // Nothing predicts the first token.
    let all = marked(template, TrainOn::All, &two_turns());
    let plain = expected.replace(['⟦', '⟧'], "");
    assert_eq!(all.replace(['⟦', '⟧'], ""), plain);
    assert!(all.ends_with('⟧') && all.matches('⟦').count() == 1, "{all}");
    assert!(all.find('⟦').unwrap() < 20, "{all}");
}

#[test]
fn the_answers_of_a_prompt_do_not_train_but_those_of_its_completion() {
    let mut row = two_turns();
    let messages = row["messages"].take();
    let messages = messages.as_array().unwrap();
    let row = json!({"prompt": messages[..3], "completion": messages[3..]});
    for template in [CHATML, MARKED] {
        assert_eq!(
            marked(template, TrainOn::Answers, &row),
            "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n\
             <|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n⟦two<|im_end|>⟧\n"
        );
    }
}

#[test]
fn calls_of_tools_train_and_their_outputs_do_not() {
    let row = json!({
        "messages": [
            {"role": "user", "content": "6*7"},
            {"role": "assistant", "content": null, "tool_calls": [
                {"type": "function", "function": {"name": "mul", "arguments": {"a": 6, "b": 7}}}
            ]},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "It is 42."},
        ],
        "tools": [{"type": "function", "function": {"name": "mul"}}],
    });
    let expected = "<|im_start|>user\n6*7<|im_end|>\n\
         <|im_start|>assistant\n⟦<call>{\"name\": \"mul\", \"arguments\": {\"a\": 6, \"b\": 7}}</call><|im_end|>⟧\n\
         <|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n⟦It is 42.<|im_end|>⟧\n";
    assert_eq!(marked(CALLS, TrainOn::Answers, &row), expected);
    // The schemas are in the text, also from a JSON text, and from another column.
    let schemas = "<|im_start|>system\nTools:\n{\"name\": \"mul\"}\n<|im_end|>\n<|im_start|>user\n";
    let rest = "x<|im_end|>\n<|im_start|>assistant\n⟦y<|im_end|>⟧\n";
    let messages = json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]);
    for (column, tools) in [
        ("tools", json!([{"name": "mul"}])),
        ("tools", json!("[{\"name\": \"mul\"}]")),
        ("functions", json!([{"name": "mul"}])),
    ] {
        let row = json!({"messages": messages, column: tools});
        let config = SftDataConfig {
            tools: column.to_owned(),
            ..SftDataConfig::default()
        };
        let found = try_marked(CHATML, config, &row).unwrap();
        assert_eq!(found, format!("{schemas}{rest}"));
    }
}

#[test]
fn variables_of_the_template_come_from_the_row() {
    let row = json!({
        "prompt": [{"role": "user", "content": "1?"}],
        "completion": [{"role": "assistant", "content": "one"}],
        "chat_template_kwargs": {"enable_thinking": false},
    });
    // The empty reasoning belongs to the prompt.
    assert_eq!(
        marked(THINKING, TrainOn::Answers, &row),
        "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n⟦one<|im_end|>⟧\n"
    );
}

#[test]
fn an_answer_whose_place_is_not_certain_is_an_error_that_names_the_ways_out() {
    // Without reasoning in the first answer, but with it in the prompt.
    let mut row = two_turns();
    row["chat_template_kwargs"] = json!({"enable_thinking": false});
    let error = try_marked(THINKING, SftDataConfig::default(), &row).unwrap_err();
    let error = format!("{error:#}");
    for part in [
        "rows.jsonl:1: column \"messages\": message 1: its place",
        "generation blocks",
        "data.train_on to last_answer",
    ] {
        assert!(error.contains(part), "{error}");
    }
    // The template that writes messages by their number from the end.
    let backward = "{% for m in messages %}{{ loop.revindex }}{{ m.content }}|{% endfor %}";
    let error = try_marked(backward, SftDataConfig::default(), &two_turns()).unwrap_err();
    assert!(
        format!("{error:#}").contains("message 1: its place"),
        "{error:#}"
    );
}

#[test]
fn the_end_of_a_turn_that_is_a_stop_token_in_the_text_of_the_answer_is_the_last_one() {
    let row = json!({"messages": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "a<|im_end|>b"},
    ]});
    assert_eq!(
        marked(CHATML, TrainOn::Answers, &row),
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>b<|im_end|>⟧\n"
    );
}

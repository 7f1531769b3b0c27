//! Tools that the policy calls.

use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};
use candle_grpo_base::NoProgress;
use candle_grpo_train::environment::{
    CallContext, EnvironmentLimits, Environments, EpisodeEnd, ProgramTool, Tool, ToolEnvironments,
    ToolFormat, ToolsConfig,
};
use candle_grpo_train::model::Chat;
use candle_grpo_train::{
    ChatTemplate, FinishReason, Progress, Prompt, Rollout, Sampler, SamplingConfig,
};
use rstest::rstest;
use serde_json::{Value, json};

use super::templates::{CHATML, LLAMA, Scripted, bpe, encode};

/// Reverses a text.
struct Reverse;

impl Tool for Reverse {
    fn name(&self) -> &str {
        "reverse"
    }

    fn description(&self) -> &str {
        "Reverses a text."
    }

    fn parameters(&self) -> Value {
        json!({"type": "object", "properties": {"text": {"type": "string"}}})
    }

    fn call(&self, call: &CallContext<'_>) -> Result<String> {
        let text = call.arguments["text"].as_str().unwrap_or_default();
        ensure!(!text.is_empty(), "text: absent");
        Ok(text.chars().rev().collect())
    }
}

/// Plays scripted turns with tools, after a prompt with messages or plain text.
pub(super) fn play(
    tools: ToolEnvironments,
    template: &str,
    stop: &str,
    turns: &[&str],
    chat: bool,
) -> Rollout {
    play_until(tools, (template, stop), turns, chat, Arc::new(NoProgress)).unwrap()
}

/// [`play`], which `progress` can cancel.
pub(super) fn play_until(
    tools: ToolEnvironments,
    (template, stop): (&str, &str),
    turns: &[&str],
    chat: bool,
    progress: Arc<dyn Progress>,
) -> Result<Rollout> {
    let tokenizer = bpe();
    let template = ChatTemplate::new(template).unwrap();
    let stop_id = tokenizer.token_to_id(stop).unwrap();
    let messages = vec![json!({"role": "user", "content": "abc?"})];
    let schemas = json!(tools.schemas());
    let prompt = if chat {
        let chat = Chat::new(&messages).tools(&schemas).generation_prompt();
        let text = template.render(&chat).unwrap();
        let prompt = Prompt::new(0, &text, Value::Null, &tokenizer).unwrap();
        prompt.with_messages(messages).with_tools(Some(schemas))
    } else {
        Prompt::new(0, "abc?", Value::Null, &tokenizer).unwrap()
    };
    let limits = EnvironmentLimits::default();
    let environments =
        Environments::new(tools, limits, &tokenizer, Some(&template), &[stop_id]).unwrap();
    let turns = turns.iter().map(|turn| encode(&format!("{turn}{stop}")));
    let scripted = Scripted(Mutex::new(turns.collect()), FinishReason::StopToken);
    let sampling = SamplingConfig {
        max_new_tokens: 5000,
        stop_token_ids: vec![stop_id],
        ..SamplingConfig::default()
    };
    let mut rollouts = Sampler::from_generator(Arc::new(scripted), 300, sampling)?
        .with_environments(Arc::new(environments))
        .with_progress(progress)
        .sample(&[&prompt], 1, 0)?;
    Ok(rollouts.remove(0))
}

/// The texts that the policy did not write.
pub(super) fn outputs(rollout: &Rollout) -> String {
    let Some(written) = &rollout.completion.written else {
        return String::new();
    };
    let tokens = rollout.completion.tokens.iter().zip(written);
    let others: Vec<u32> = tokens.filter(|(_, w)| !**w).map(|(t, _)| *t).collect();
    bpe().decode(&others, false).unwrap()
}

fn tools(format: ToolFormat) -> ToolEnvironments {
    ToolEnvironments::new(format)
        .unwrap()
        .with(Reverse)
        .unwrap()
}

const HERMES_CALL: &str =
    r#"<tool_call>{"name": "reverse", "arguments": {"text": "abc"}}</tool_call>"#;

#[rstest]
#[case::hermes(
    ToolFormat::Hermes,
    CHATML,
    "<|im_end|>",
    HERMES_CALL,
    "\n<|im_start|>user\n<tool_response>\ncba\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)]
#[case::llama(
    ToolFormat::Llama,
    LLAMA,
    "<|eot_id|>",
    r#"{"name": "reverse", "parameters": {"text": "abc"}}"#,
    "<|start_header_id|>ipython<|end_header_id|>\n\ncba<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)]
fn an_output_is_a_message_of_the_template(
    #[case] format: ToolFormat,
    #[case] template: &str,
    #[case] stop: &str,
    #[case] call: &str,
    #[case] expected: &str,
) {
    let rollout = play(tools(format), template, stop, &[call, "It is cba."], true);
    assert_eq!(outputs(&rollout), expected);
    let episode = rollout.episode.unwrap();
    assert_eq!((episode.end, episode.turns.len()), (EpisodeEnd::Done, 2));
    assert!(!episode.gives_rewards);
    assert_eq!(episode.metrics["tool_calls"], 1.);
    assert_eq!(episode.metrics["tool_calls/reverse"], 1.);
    assert_eq!(episode.metrics["tool_failures"], 0.);
}

#[test]
fn a_plain_text_gets_outputs_between_marks() {
    let tools = tools(ToolFormat::Hermes).with_output_marks("[", "] ");
    let twice = format!("{HERMES_CALL}{HERMES_CALL}");
    let rollout = play(tools, CHATML, "<|im_end|>", &[&twice, "cba"], false);
    assert_eq!(outputs(&rollout), "[cba] [cba] ");
}

#[rstest]
#[case("<tool_call>{</tool_call>", "error: the call is not JSON")]
#[case(
    r#"<tool_call>{"name": "other"}</tool_call>"#,
    "error: no tool \"other\", there are \"reverse\""
)]
#[case(r#"<tool_call>{"name": "reverse"}</tool_call>"#, "error: text: absent")]
fn the_policy_reads_what_failed(#[case] call: &str, #[case] words: &str) {
    let tools = tools(ToolFormat::Hermes);
    let rollout = play(tools, CHATML, "<|im_end|>", &[call, "no"], false);
    assert!(outputs(&rollout).contains(words), "{}", outputs(&rollout));
    let episode = rollout.episode.unwrap();
    assert_eq!(
        (episode.end, episode.metrics["tool_failures"]),
        (EpisodeEnd::Done, 1.)
    );
}

#[test]
fn many_calls_and_long_outputs_are_cut() {
    let tools = tools(ToolFormat::Hermes)
        .with_max_output_chars(2)
        .with_output_marks("", ";");
    let calls = HERMES_CALL.repeat(20);
    let rollout = play(tools, CHATML, "<|im_end|>", &[&calls, "no"], false);
    let expected = "cb ...;".repeat(16) + "error: 20 calls, only 16 were run;";
    assert_eq!(outputs(&rollout), expected);
    assert_eq!(rollout.episode.unwrap().metrics["tool_calls"], 16.);
}

const PROGRAM: &str = r#"
import json, os, sys, time
for line in sys.stdin:
    request = json.loads(line)
    text = request["arguments"]["text"]
    if text == "hang": time.sleep(600)
    if text == "crash": os._exit(3)
    if text == "large": answer = {"output": "x" * 1000000}
    elif text == "json": answer = {"output": {"a": 1}}
    elif text == "error": answer = {"error": "no such text"}
    else: answer = {"output": text[::-1]}
    print(json.dumps({"id": request["id"], **answer}), flush=True)
"#;

fn config() -> ToolsConfig {
    serde_json::from_value(json!({
        "tools": [
            {"name": "reverse", "command": ["python3", "-c", PROGRAM], "time_limit_seconds": 1, "start_limit_seconds": 20},
            {"name": "other", "command": ["cat"]},
        ],
        "max_output_chars": 12, "output_before": "", "output_after": ";",
    }))
    .unwrap()
}

#[test]
fn a_tool_is_a_program_that_may_fail() {
    let call = |text: &str| HERMES_CALL.replace("abc", text);
    let texts = ["abc", "hang", "crash", "json", "error", "large", "abc"];
    let mut turns: Vec<String> = texts.iter().map(|text| call(text)).collect();
    turns.push("so".to_owned());
    let turns: Vec<&str> = turns.iter().map(String::as_str).collect();
    let tools = config().build().unwrap().with_max_output_chars(60);
    let rollout = play(tools, CHATML, "<|im_end|>", &turns, false);
    let outputs = outputs(&rollout);
    let outputs: Vec<&str> = outputs.split_terminator(';').collect();
    let large = "x".repeat(60) + " ...";
    let expected = [
        "cba",
        "error: no output within 1 seconds",
        "error: the tool ended",
        "{\"a\":1}",
        "error: no such text",
        &large,
        "cba",
    ];
    assert_eq!(outputs, expected);
    let episode = rollout.episode.unwrap();
    assert_eq!(episode.metrics["tool_failures"], 3.);
}

#[test]
fn a_row_names_its_tools() {
    let names = |column: Option<&str>, columns: Value| -> Result<Vec<String>> {
        let config = ToolsConfig {
            column: column.map(str::to_owned),
            ..config()
        };
        let schemas = config.schemas(&columns)?.into_iter();
        let name = |schema: Value| schema["function"]["name"].as_str().map(str::to_owned);
        Ok(schemas.filter_map(name).collect())
    };
    assert_eq!(names(None, json!({})).unwrap(), ["reverse", "other"]);
    let named = |tools: Value| names(Some("tools"), json!({ "tools": tools }));
    assert_eq!(named(json!(["other"])).unwrap(), ["other"]);
    let own = json!([{"type": "function", "function": {"name": "reverse", "description": "mine"}}]);
    assert_eq!(named(own).unwrap(), ["reverse"]);
    for (tools, words) in [
        (json!(["third"]), "\"third\", must be the name of a tool"),
        (json!("other"), "must be a list"),
        (json!([7]), "7, must be a name or a schema"),
    ] {
        let error = format!("{:#}", named(tools).unwrap_err());
        assert!(error.contains(words), "{error}");
    }
    let error = names(Some("tools"), json!({})).unwrap_err().to_string();
    assert!(error.contains("\"tools\": absent"), "{error}");
}

#[test]
fn a_name_is_given_once() {
    let error = tools(ToolFormat::Hermes).with(Reverse).err().unwrap();
    assert_eq!(error.to_string(), "tools: \"reverse\" is given twice");
    let missing = serde_json::from_value(json!({"name": "a", "command": ["/no/such/program"]}));
    assert!(ProgramTool::new(missing.unwrap()).is_err());
}

#[test]
fn schemas_have_the_order_of_the_configuration() {
    let parameters = r#"{"type":"object","properties":{"zeta":{"type":"string"},"alpha":{"type":"integer"}},"required":["zeta"]}"#;
    let tool = |name: &str| {
        format!(
            r#"{{"name": "{name}", "description": "d", "command": ["cat"], "parameters": {parameters}}}"#
        )
    };
    let text = format!(r#"{{"tools": [{}, {}]}}"#, tool("second"), tool("first"));
    let config: ToolsConfig = serde_json::from_str(&text).unwrap();
    let schema = |name: &str| {
        format!(
            r#"{{"type":"function","function":{{"name":"{name}","description":"d","parameters":{parameters}}}}}"#
        )
    };
    let expected = format!("[{},{}]", schema("second"), schema("first"));
    let of_config = config.schemas(&Value::Null).unwrap();
    assert_eq!(Value::from(of_config).to_string(), expected);
    let of_environment = config.build().unwrap().schemas();
    assert_eq!(Value::from(of_environment).to_string(), expected);
}

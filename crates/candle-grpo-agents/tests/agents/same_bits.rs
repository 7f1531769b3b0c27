//! The same conversation has the same tokens as with built-in tools.

use std::sync::Arc;

use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_train::environment::{
    AgentConfig, CallContext, EnvironmentLimits, Environments, Tool, ToolEnvironments, ToolFormat,
};
use candle_grpo_train::model::Chat;
use candle_grpo_train::{ChatTemplate, Prompt, Rollout, Sampler, SamplingConfig};
use serde_json::{Value, json};

use super::client::Client;
use super::drawer::{STOP, TEMPLATE, VOCAB_SIZE, agents, tokenizer};

/// Counts the characters in a text.
struct Count;

impl Tool for Count {
    fn name(&self) -> &str {
        "count"
    }

    fn description(&self) -> &str {
        "Counts characters."
    }

    fn parameters(&self) -> Value {
        json!({"type": "object", "properties": {"text": {"type": "string"}}})
    }

    fn call(&self, call: &CallContext<'_>) -> anyhow::Result<String> {
        Ok(count(&call.arguments["text"]))
    }
}

fn count(text: &Value) -> String {
    text.as_str().unwrap().chars().count().to_string()
}

/// A notation that a policy with random weights writes by chance: letters between two frequent
/// bytes.
fn format() -> ToolFormat {
    let mark = |text: &str| text.to_owned();
    ToolFormat::Marks {
        tool: mark("count"),
        argument: mark("text"),
        before: mark("\u{fffd}"),
        after: mark("\u{fffd}"),
    }
}

fn sampler() -> Sampler {
    let text = candle_grpo_test_support::TINY_DECODER;
    let mut config: Value = serde_json::from_str(text).unwrap();
    config["vocab_size"] = VOCAB_SIZE.into();
    config["max_position_embeddings"] = 4096.into();
    let config: DecoderConfig = serde_json::from_value(config).unwrap();
    let device = candle_core::Device::Cpu;
    let parameters = Parameters::init(&config, 5, &device).unwrap();
    let sampling = SamplingConfig {
        max_new_tokens: 1000,
        stop_token_ids: vec![STOP],
        seed: 11,
        ..SamplingConfig::default()
    };
    Sampler::new(&config, &parameters, sampling)
        .unwrap()
        .with_tokenizer(&tokenizer())
}

fn limits() -> EnvironmentLimits {
    EnvironmentLimits {
        max_turns: 4,
        max_turn_tokens: Some(12),
        ..EnvironmentLimits::default()
    }
}

/// An agent that does the same as [`ToolEnvironments`].
fn count_agent(client: &Client, schemas: &Value) {
    let mut messages = vec![json!({"role": "user", "content": client.row["question"]})];
    loop {
        let answer = client.chat(json!({"messages": messages, "tools": schemas}));
        if answer.get("error").is_some() {
            break;
        }
        let message = answer["choices"][0]["message"].clone();
        let calls = message["tool_calls"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        messages.push(message);
        if calls.is_empty() {
            break;
        }
        for call in calls.iter().take(16) {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            let output = count(&arguments["text"]);
            messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": output}));
        }
    }
    client.post("/reward", &json!({"done": true}));
}

#[test]
fn the_same_conversation_has_the_same_bits_as_with_built_in_tools() {
    let tools = ToolEnvironments::new(format())
        .unwrap()
        .with(Count)
        .unwrap();
    let schemas = json!(tools.schemas());
    let template = ChatTemplate::new(TEMPLATE).unwrap();
    let prompts: Vec<Prompt> = (0..3)
        .map(|index| {
            let question = format!("so {index}?");
            let messages = vec![json!({"role": "user", "content": question})];
            let chat = Chat::new(&messages).tools(&schemas).generation_prompt();
            let text = template.render(&chat).unwrap();
            let columns = json!({"question": question});
            let prompt = Prompt::new(index, &text, columns, &tokenizer()).unwrap();
            prompt
                .with_messages(messages)
                .with_tools(Some(schemas.clone()))
        })
        .collect();
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let environments =
        Environments::new(tools, limits(), &tokenizer(), Some(&template), &[STOP]).unwrap();
    let built_in = sampler().with_environments(Arc::new(environments));
    let built_in = built_in.sample(&prompts, 4, 1).unwrap();

    let config = AgentConfig {
        format: format(),
        reports_rewards: false,
        ..AgentConfig::default()
    };
    let agents = Arc::new(agents(config, limits()));
    let sampler = sampler().with_environments(agents.clone());
    let rollouts = std::thread::scope(|scope| {
        let played = scope.spawn(|| sampler.sample(&prompts, 4, 1).unwrap());
        let (agents, schemas) = (&agents, &schemas);
        for _ in 0..12 {
            scope.spawn(move || count_agent(&Client::new(agents.address(), agents.key()), schemas));
        }
        played.join().unwrap()
    });
    let turns = |rollout: &Rollout| rollout.episode.as_ref().unwrap().turns.len();
    assert!(built_in.iter().any(|rollout| turns(rollout) > 1));
    assert_eq!(rollouts.len(), built_in.len());
    for (rollout, expected) in rollouts.iter().zip(&built_in) {
        assert_eq!(rollout.prompt_tokens, expected.prompt_tokens);
        let index = (rollout.prompt_index, rollout.sample_index);
        assert_eq!(index, (expected.prompt_index, expected.sample_index));
        assert_eq!(rollout.completion, expected.completion, "{index:?}");
        assert!(rollout.branches.is_empty());
        let place = |rollout: &Rollout| -> Vec<_> {
            let turns = &rollout.episode.as_ref().unwrap().turns;
            turns.iter().map(|turn| turn.tokens.clone()).collect()
        };
        assert_eq!(place(rollout), place(expected));
    }
}

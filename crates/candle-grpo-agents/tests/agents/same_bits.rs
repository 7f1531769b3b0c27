//! The same conversation has the same tokens as with built-in tools.

use std::sync::Arc;

use candle_grpo_agents::Agents;
use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_train::environment::{
    AgentConfig, CallContext, EnvironmentLimits, Environments, Tool, ToolEnvironments, ToolFormat,
};
use candle_grpo_train::model::Chat;
use candle_grpo_train::rollout::Trajectories;
use candle_grpo_train::{
    ChatTemplate, Generator, Prompt, Rollout, Sample, Sampler, SamplingConfig, TrainConfig,
    Trainer, TrainerParts,
};
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

pub(crate) fn policy() -> (DecoderConfig, Parameters) {
    let text = candle_grpo_test_support::TINY_DECODER;
    let mut config: Value = serde_json::from_str(text).unwrap();
    config["vocab_size"] = VOCAB_SIZE.into();
    config["max_position_embeddings"] = 4096.into();
    let config: DecoderConfig = serde_json::from_value(config).unwrap();
    let device = candle_core::Device::Cpu;
    let parameters = Parameters::init(&config, 5, &device).unwrap();
    (config, parameters)
}

pub(crate) fn sampling() -> SamplingConfig {
    SamplingConfig {
        max_new_tokens: 1000,
        stop_token_ids: vec![STOP],
        seed: 11,
        ..SamplingConfig::default()
    }
}

fn sampler() -> Sampler {
    let (model, parameters) = policy();
    Sampler::new(&model, &parameters, sampling())
        .unwrap()
        .with_tokenizer(&tokenizer())
}

pub(crate) fn limits() -> EnvironmentLimits {
    EnvironmentLimits {
        max_turns: 4,
        max_turn_tokens: Some(12),
        ..EnvironmentLimits::default()
    }
}

/// An agent that does the same as [`ToolEnvironments`], with further fields in its requests.
pub(crate) fn count_agent(client: &Client, schemas: &Value, fields: &Value) {
    let mut messages = vec![json!({"role": "user", "content": client.row["question"]})];
    loop {
        let mut request = json!({"messages": messages, "tools": schemas});
        let fields = fields.as_object().unwrap().clone();
        request.as_object_mut().unwrap().extend(fields);
        let answer = client.chat(request);
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

/// The built-in tool, its schemas, and prompts that have them.
pub(crate) fn environments() -> (Environments, Value, Vec<Prompt>) {
    let tools = ToolEnvironments::new(format())
        .unwrap()
        .with(Count)
        .unwrap();
    let schemas = json!(tools.schemas());
    let template = ChatTemplate::new(TEMPLATE).unwrap();
    let prompts = (0..3).map(|index| {
        let question = format!("so {index}?");
        let messages = vec![json!({"role": "user", "content": question})];
        let chat = Chat::new(&messages).tools(&schemas).generation_prompt();
        let text = template.render(&chat).unwrap();
        let columns = json!({"question": question});
        let prompt = Prompt::new(index, &text, columns, &tokenizer()).unwrap();
        prompt
            .with_messages(messages)
            .with_tools(Some(schemas.clone()))
    });
    let prompts = prompts.collect();
    let environments = Environments::new(tools, limits(), &tokenizer(), Some(&template), &[STOP]);
    (environments.unwrap(), schemas, prompts)
}

/// Runs `run` while twelve threads play `episodes` episodes each with `agent`.
pub(crate) fn with_agents<T: Send>(
    agent: &(impl Fn(&Client) + Sync),
    episodes: usize,
    run: impl FnOnce(Arc<Agents>) -> T + Send,
) -> T {
    let config = AgentConfig {
        format: format(),
        reports_rewards: false,
        ..AgentConfig::default()
    };
    let agents = Arc::new(agents(config, limits()));
    std::thread::scope(|scope| {
        let (address, key) = (agents.address(), agents.key().to_owned());
        let ran = scope.spawn(move || run(agents));
        for _ in 0..12 {
            let key = key.clone();
            scope.spawn(move || {
                for _ in 0..episodes {
                    agent(&Client::new(address, &key));
                }
            });
        }
        ran.join().unwrap()
    })
}

#[test]
fn the_same_conversation_has_the_same_bits_as_with_built_in_tools() {
    let (environments, schemas, prompts) = environments();
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let built_in = sampler().with_environments(Arc::new(environments));
    let built_in = built_in.sample(&prompts, 4, 1).unwrap();
    let agent = |client: &Client| count_agent(client, &schemas, &json!({}));
    let rollouts = with_agents(&agent, 1, |agents| {
        let sampler = sampler().with_environments(agents);
        sampler.sample(&prompts, 4, 1).unwrap()
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

/// The gradient norms of some steps, and the bits of the weights after them.
pub(crate) type Trained = (Vec<f64>, Vec<(String, Vec<u32>)>);

/// Makes `steps` steps with trajectories, which the policy in this process samples, or `generator`.
pub(crate) fn trained(
    environments: Arc<dyn Trajectories>,
    prompts: &[Prompt],
    steps: usize,
    generator: Option<Arc<dyn Generator>>,
) -> Trained {
    let config = TrainConfig {
        prompts_per_step: 3,
        num_generations: 4,
        sampling: sampling(),
        micro_batch_size: 5,
        ..TrainConfig::default()
    };
    let reward = |sample: &Sample| sample.completion.chars().filter(|&c| c < 'a').count() as f32;
    let (model, parameters) = policy();
    let prompts = prompts.to_vec();
    let parts = TrainerParts {
        environments: Some(environments),
        generator,
        ..TrainerParts::new(model, parameters, tokenizer(), prompts, reward, config)
    };
    let mut trainer = Trainer::new(parts).unwrap();
    let step = |_| trainer.step().unwrap();
    let norms: Vec<f64> = (0..steps).map(step).filter_map(|m| m.grad_norm).collect();
    let weights = trainer.actor().parameters().iter();
    let weights = weights.map(|(name, weight)| {
        let bits = weight.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let bits = bits.into_iter().map(f32::to_bits);
        (name.to_owned(), bits.collect::<Vec<u32>>())
    });
    (norms, weights.collect())
}

/// Three steps on the same conversations.
#[test]
fn a_policy_trains_to_the_same_bits_as_with_built_in_tools() {
    const STEPS: usize = 3;
    let (environments, schemas, prompts) = environments();
    let built_in = trained(Arc::new(environments), &prompts, STEPS, None);
    assert_eq!(built_in.0.len(), STEPS);
    let agent = |client: &Client| count_agent(client, &schemas, &json!({}));
    let with_agents = with_agents(&agent, STEPS, |agents| {
        trained(agents, &prompts, STEPS, None)
    });
    assert!(
        with_agents == built_in,
        "{:?} {:?}",
        with_agents.0,
        built_in.0
    );
}

//! Plays episodes with a Python agent, and prints their rows.
//!
//! The policy has random weights, so the example needs no download. Pass a model directory to use a
//! real model: `cargo run --example agents -- FOLDER`.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::Device;
use candle_grpo_agents::Agents;
use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_train::environment::{AgentConfig, EnvironmentLimits};
use candle_grpo_train::model::{Chat, character_tokenizer};
use candle_grpo_train::{ChatTemplate, Pretrained, Prompt, Sampler, SamplingConfig};
use serde_json::json;
use tokenizers::Tokenizer;

/// Chat template for the characters in [`tiny`].
const TEMPLATE: &str = "{% for m in messages %}{{ m.content }}\n{% endfor %}";

struct Policy {
    model: DecoderConfig,
    parameters: Parameters,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    stop_token_ids: Vec<u32>,
}

fn main() -> Result<()> {
    let policy = match std::env::args().nth(1) {
        Some(folder) => pretrained(Path::new(&folder))?,
        None => tiny()?,
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/agents");
    let config = AgentConfig {
        command: vec!["python3".to_owned(), "calculator.py".to_owned()],
        folder: Some(folder),
        ..AgentConfig::default()
    };
    let agents = Agents::new(
        config,
        EnvironmentLimits::default(),
        &policy.tokenizer,
        Some(&policy.template),
        &policy.stop_token_ids,
    )?;
    let sampling = SamplingConfig {
        max_new_tokens: 64,
        stop_token_ids: policy.stop_token_ids.clone(),
        ..SamplingConfig::default()
    };
    let sampler = Sampler::new(&policy.model, &policy.parameters, sampling)?
        .with_tokenizer(&policy.tokenizer)
        .with_environments(Arc::new(agents));

    let messages = vec![json!({"role": "user", "content": "12*34="})];
    let chat = Chat::new(&messages).generation_prompt();
    let text = policy.template.render(&chat)?;
    let columns = json!({"question": "12*34=", "answer": "408"});
    let prompt = Prompt::new(0, &text, columns, &policy.tokenizer)?.with_messages(messages);
    for rollout in sampler.sample(&[&prompt], 2, 0)? {
        let episode = rollout.episode.as_ref().context("episode: absent")?;
        println!(
            "{:?}, reward {}, {} drawn tokens in {} rows",
            episode.end,
            episode.turns.iter().map(|turn| turn.reward).sum::<f64>(),
            rollout.completion.tokens.len(),
            1 + rollout.branches.len()
        );
    }
    Ok(())
}

/// Policy with random weights.
fn tiny() -> Result<Policy> {
    let tokenizer = character_tokenizer("0123456789*=\n ")?;
    let model: DecoderConfig = serde_json::from_value(json!({
        "model_type": "llama", "vocab_size": 15, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 1024, "tie_word_embeddings": false,
    }))?;
    Ok(Policy {
        parameters: Parameters::init(&model, 0, &Device::Cpu)?,
        model,
        tokenizer,
        template: ChatTemplate::new(TEMPLATE)?,
        stop_token_ids: vec![0],
    })
}

/// Loads the model in a directory.
fn pretrained(folder: &Path) -> Result<Policy> {
    let model = Pretrained::load(folder, &Device::Cpu)?;
    Ok(Policy {
        stop_token_ids: model.special_tokens.stop_token_ids.clone(),
        template: model.chat_template.context("chat template: absent")?,
        model: model.model,
        parameters: model.parameters,
        tokenizer: model.tokenizer,
    })
}

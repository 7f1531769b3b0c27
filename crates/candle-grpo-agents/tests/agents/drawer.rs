//! A tokenizer whose tokens cut characters, a chat template, and the test's policy.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use candle_core::Device;
use candle_grpo_agents::Agents;
use candle_grpo_train::environment::{AgentConfig, EnvironmentLimits};
use candle_grpo_train::learn::rollout_log_probs;
use candle_grpo_train::model::Chat;
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::{
    Completion, CompletionSeed, Play, PromptRequest, Rollout, SamplingConfig, Trajectories,
};
use candle_grpo_train::{ChatTemplate, FinishReason, Prompt, TokenBatch};
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use super::client::Client;

pub(crate) const TEMPLATE: &str = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

const SPECIAL: [&str; 4] = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"];

/// The token that ends a turn.
pub(crate) const STOP: u32 = 257;

pub(crate) const VOCAB_SIZE: usize = 300;

/// A byte-level tokenizer's character for each byte.
fn byte_character(byte: u8) -> char {
    let is_plain = |byte: u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    if is_plain(byte) {
        char::from(byte)
    } else {
        let number = (0..byte).filter(|&before| !is_plain(before)).count();
        char::from_u32(256 + number as u32).unwrap()
    }
}

/// A byte-level tokenizer: byte `b` is token `b`, then the special tokens, then merges.
pub(crate) fn tokenizer() -> Tokenizer {
    let mut vocabulary = Map::new();
    for byte in 0..=255_u8 {
        vocabulary.insert(byte_character(byte).to_string(), json!(byte));
    }
    for (at, name) in SPECIAL.iter().enumerate() {
        vocabulary.insert((*name).to_owned(), json!(256 + at));
    }
    let merges = ["a b", "ab a", "s o", "u s"];
    for (at, merge) in merges.iter().enumerate() {
        vocabulary.insert(merge.replace(' ', ""), json!(260 + at));
    }
    let added = SPECIAL.iter().enumerate().map(|(at, name)| {
        json!({
            "id": 256 + at, "content": name, "special": true, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false,
        })
    });
    let description = json!({
        "version": "1.0",
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    });
    Tokenizer::from_bytes(description.to_string()).unwrap()
}

pub(crate) fn decode(tokens: &[u32]) -> String {
    tokenizer().decode(tokens, false).unwrap()
}

/// A conversation's text before its next answer, by the template alone.
pub(crate) fn rendered(messages: &Value, tools: Option<&Value>) -> String {
    let chat = Chat::new(messages).generation_prompt();
    let chat = match tools {
        Some(tools) => chat.tools(tools),
        None => chat,
    };
    ChatTemplate::new(TEMPLATE).unwrap().render(&chat).unwrap()
}

/// A turn's tokens: one for each byte, which the tokenizer would merge, and the stop token.
pub(crate) fn spelled(text: &str) -> Vec<u32> {
    let bytes = text.bytes().map(u32::from);
    bytes.chain([STOP]).collect()
}

/// A prompt with one message.
pub(crate) fn prompt(question: &str) -> Prompt {
    let messages = vec![json!({"role": "user", "content": question})];
    let text = rendered(&json!(messages), None);
    let columns = json!({"question": question});
    let prompt = Prompt::new(3, &text, columns, &tokenizer()).unwrap();
    prompt.with_messages(messages)
}

/// A sample: its seed, the tokens before it, and the sampled tokens.
#[derive(Debug, Clone)]
pub(crate) struct Draw {
    pub(crate) seed: CompletionSeed,
    pub(crate) before: Vec<u32>,
    pub(crate) stop: Vec<String>,
    pub(crate) completion: Completion,
}

/// Answers a request with tokens and the finish reason.
pub(crate) type Policy<'a> = dyn Fn(&PromptRequest<'_>, &[String]) -> (Vec<u32>, FinishReason) + 'a;

/// The policy that says these texts in turn.
pub(crate) fn says<'a>(
    texts: &'a [&'a str],
) -> impl Fn(&PromptRequest<'_>, &[String]) -> (Vec<u32>, FinishReason) + 'a {
    let next = Mutex::new(texts.iter());
    move |_, _| {
        let text = next.lock().unwrap().next().expect("no text is left");
        (spelled(text), FinishReason::StopToken)
    }
}

pub(crate) fn sampling() -> SamplingConfig {
    SamplingConfig {
        max_new_tokens: 100_000,
        stop_token_ids: vec![STOP],
        ..SamplingConfig::default()
    }
}

pub(crate) fn limits() -> EnvironmentLimits {
    EnvironmentLimits {
        max_turns: 1000,
        ..EnvironmentLimits::default()
    }
}

pub(crate) fn agents(config: AgentConfig, limits: EnvironmentLimits) -> Agents {
    let template = ChatTemplate::new(TEMPLATE).unwrap();
    Agents::new(config, limits, &tokenizer(), Some(&template), &[STOP]).unwrap()
}

/// Plays `count` episodes from a prompt.
pub(crate) fn play(
    agents: &Agents,
    prompt: &Prompt,
    count: u64,
    sampling: &SamplingConfig,
    policy: &Policy<'_>,
) -> (Result<Vec<Rollout>>, Vec<Draw>) {
    let seeds = (0..count).map(|sample| CompletionSeed {
        seed: 7,
        stream: 2,
        prompt: prompt.index,
        sample,
        turn: 0,
    });
    let request = PromptRequest {
        tokens: &prompt.tokens,
        seeds: seeds.collect(),
        max_new_tokens: sampling.max_new_tokens,
    };
    let draws = Mutex::new(Vec::new());
    let draw = |requests: &[PromptRequest<'_>], stop: &[String]| -> Result<Vec<Completion>> {
        let mut completions = Vec::new();
        for request in requests {
            let (tokens, finish_reason) = policy(request, stop);
            assert!(tokens.len() <= request.max_new_tokens);
            let mut draws = draws.lock().unwrap_or_else(PoisonError::into_inner);
            let number = draws.len() as u64;
            // Each sampled token has its own log-prob and version.
            let log_probs = (0..tokens.len()).map(|at| -((number * 1000 + at as u64) as f32) / 64.);
            let log_probs: Vec<f32> = log_probs.collect();
            let completion = Completion {
                drawn_log_probs: log_probs.clone(),
                log_probs: Some(log_probs),
                written: None,
                weight_versions: vec![number; tokens.len()],
                tokens,
                finish_reason,
                experts: None,
            };
            draws.push(Draw {
                seed: request.seeds[0],
                before: request.tokens.to_vec(),
                stop: stop.to_vec(),
                completion: completion.clone(),
            });
            completions.push(completion);
        }
        Ok(completions)
    };
    let played = agents.play(&Play {
        prompts: &[prompt],
        requests: &[request],
        vocab_size: VOCAB_SIZE,
        sampling,
        draw: &draw,
        progress: &NoProgress,
    });
    (played, draws.into_inner().unwrap())
}

/// Plays one episode of "so?" with `agent`, which runs meanwhile.
pub(crate) fn episode(
    policy: &(impl Fn(&PromptRequest<'_>, &[String]) -> (Vec<u32>, FinishReason) + Sync),
    agent: impl FnOnce(Client) + Send,
) -> (Rollout, Vec<Draw>) {
    let agents = agents(AgentConfig::default(), limits());
    episode_with(&agents, &sampling(), policy, agent)
}

/// Plays an episode as [`episode`] does, with these agents and settings.
pub(crate) fn episode_with(
    agents: &Agents,
    sampling: &SamplingConfig,
    policy: &(impl Fn(&PromptRequest<'_>, &[String]) -> (Vec<u32>, FinishReason) + Sync),
    agent: impl FnOnce(Client) + Send,
) -> (Rollout, Vec<Draw>) {
    let prompt = prompt("so?");
    std::thread::scope(|scope| {
        let played = scope.spawn(|| play(agents, &prompt, 1, sampling, policy));
        let client = Client::new(agents.address(), agents.key());
        let agent = scope.spawn(move || agent(client));
        let (rollouts, draws) = played.join().unwrap();
        agent.join().unwrap();
        (rollouts.unwrap().remove(0), draws)
    })
}

/// Checks that the rows have exactly the sampled tokens: each once, after the tokens that preceded
/// it, with its log-prob and version. A step trains exactly these tokens.
pub(crate) fn assert_rows_have_draws(rollout: &Rollout, draws: &[Draw]) {
    let mut found: BTreeMap<u64, usize> = BTreeMap::new();
    for (prompt, completion) in rollout.rows() {
        let tokens = [prompt, &completion.tokens].concat();
        let all = vec![true; completion.tokens.len()];
        let written = completion.written.as_ref().unwrap_or(&all);
        let log_probs = completion.log_probs.as_ref().unwrap();
        let mut at = 0;
        while at < written.len() {
            if !written[at] {
                assert_eq!(log_probs[at], 0.);
                at += 1;
                continue;
            }
            let number = completion.weight_versions[at];
            let draw = &draws[number as usize];
            let end = at + draw.completion.tokens.len();
            assert_eq!(&tokens[..prompt.len() + at], draw.before, "draw {number}");
            assert_eq!(completion.tokens[at..end], draw.completion.tokens);
            assert_eq!(
                Some(&log_probs[at..end]),
                draw.completion.log_probs.as_deref()
            );
            assert_eq!(
                completion.weight_versions[at..end],
                draw.completion.weight_versions
            );
            assert!(written[at..end].iter().all(|written| *written));
            *found.entry(number).or_default() += 1;
            at = end;
        }
        assert_eq!(completion.drawn_log_probs, *log_probs);
    }
    let each = (0..draws.len() as u64).map(|number| (number, 1));
    assert!(found.into_iter().eq(each), "each draw is in one row");
    let mut trained = trained_tokens(rollout);
    let drawn = draws.iter().flat_map(|draw| {
        let log_probs = draw.completion.drawn_log_probs.iter();
        let tokens = draw.completion.tokens.iter().zip(log_probs);
        let versions = draw.completion.weight_versions.iter();
        tokens
            .zip(versions)
            .map(|((&token, log_prob), &version)| (version, log_prob.to_bits(), token))
    });
    let mut drawn: Vec<(u64, u32, u32)> = drawn.collect();
    trained.sort_unstable();
    drawn.sort_unstable();
    assert_eq!(trained, drawn);
}

/// The version, the bits of the log-prob, and the id of each token that a step trains.
fn trained_tokens(rollout: &Rollout) -> Vec<(u64, u32, u32)> {
    let rollout = std::slice::from_ref(rollout);
    let batch = TokenBatch::from_rollouts(rollout, &Device::Cpu).unwrap();
    let log_probs = rollout_log_probs(rollout, &Device::Cpu).unwrap();
    let log_probs: Vec<Vec<f32>> = log_probs.to_vec2().unwrap();
    let mask: Vec<Vec<u32>> = batch.response_mask().to_vec2().unwrap();
    let targets: Vec<Vec<u32>> = batch.targets().to_vec2().unwrap();
    let mut trained = Vec::new();
    for (row, sequence) in batch.sequences().iter().enumerate() {
        let versions = sequence.weight_versions().unwrap();
        let places = (0..mask[row].len()).filter(|&at| mask[row][at] == 1);
        trained.extend(places.map(|at| {
            let log_prob = log_probs[row][at].to_bits();
            (versions[at], log_prob, targets[row][at])
        }));
    }
    trained
}

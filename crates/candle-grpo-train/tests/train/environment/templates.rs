//! Tokens in trajectories and chat templates.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_grpo_train::environment::{
    Append, Environment, EnvironmentLimits, Environments, EpisodeStart, Observation, Step, Turn,
};
use candle_grpo_train::model::Chat;
use candle_grpo_train::rewards::TagsReward;
use candle_grpo_train::rollout::{Deliver, GenerationBatch, answer_text};
use candle_grpo_train::{
    ChatTemplate, Completion, FinishReason, Generator, Prompt, Rollout, Sampler, SamplingConfig,
    evaluate,
};
use rstest::rstest;
use serde_json::{Value, json};
use tokenizers::{AddedToken, Tokenizer};

/// Qwen2.5's format, with tools.
pub(crate) const CHATML: &str = r#"{%- if tools %}{{- '<|im_start|>system\nTools:\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}{%- for message in messages %}{%- if message.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"#;

/// Llama 3.1's format.
pub(crate) const LLAMA: &str = r#"{{- '<|begin_of_text|>' }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\n' + (tools | tojson) + '<|eot_id|>' }}{%- endif %}{%- for message in messages %}{%- if message.role == 'tool' or message.role == 'ipython' %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}{%- else %}{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"#;

/// Mistral's format: no generation prompt, and tools before the last user message.
pub(crate) const MISTRAL: &str = r#"{{- '<s>' }}{%- for message in messages %}{%- if message.role == 'user' %}{%- if tools and loop.last %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}{{- '[INST] ' + message.content + '[/INST]' }}{%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}{%- elif message.role == 'assistant' %}{{- message.content + '</s>' }}{%- else %}{{- raise_exception('role') }}{%- endif %}{%- endfor %}"#;

pub(super) const SPECIAL: [&str; 13] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]",
];

/// Text pieces in the Llama 3 and Qwen tokenizers, without contractions.
const SPLIT: &str =
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A byte tokenizer with a few merges, so that a text has more than one tokenization.
pub(crate) fn bpe() -> Tokenizer {
    bpe_with(Value::Null, &[])
}

/// [`bpe`] with a normalizer and with more added tokens, which are not special.
pub(super) fn bpe_with(normalizer: Value, more: &[&str]) -> Tokenizer {
    let mut vocabulary = serde_json::Map::new();
    let mut add = |token: &str| {
        let id = vocabulary.len();
        vocabulary.insert(token.to_owned(), json!(id));
    };
    for byte in 33u8..127 {
        add(&(byte as char).to_string());
    }
    // How byte-level vocabularies write space and line feed.
    for token in ["Ġ", "Ċ", "12", "ab", "ĊĊ", "Ġa"] {
        add(token);
    }
    let names = SPECIAL.iter().map(|name| (name, true));
    let names = names.chain(more.iter().map(|name| (name, false)));
    let added: Vec<Value> = names
        .enumerate()
        .map(|(i, (content, special))| {
            json!({
                "id": 200 + i, "content": content, "special": special,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": !special,
            })
        })
        .collect();
    let description = json!({
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocabulary, "merges": ["1 2", "a b", "Ċ Ċ", "Ġ a"],
        },
    });
    Tokenizer::from_bytes(description.to_string()).unwrap()
}

pub(super) fn encode(text: &str) -> Vec<u32> {
    bpe().encode(text, false).unwrap().get_ids().to_vec()
}

/// Samples the given turns in order.
pub(super) struct Scripted(pub(super) Mutex<Vec<Vec<u32>>>, pub(super) FinishReason);

impl Generator for Scripted {
    fn generate(&self, _: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let tokens = self.0.lock().unwrap().remove(0);
        let length = tokens.len();
        let completion = Completion {
            tokens,
            drawn_log_probs: vec![-1.; length],
            log_probs: Some(vec![-1.; length]),
            written: None,
            weight_versions: vec![0; length],
            finish_reason: self.1,
            experts: None,
        };
        deliver(0, completion)
    }
}

/// Responds with the given messages.
struct Says {
    first: Option<Vec<Value>>,
    messages: Vec<Vec<Value>>,
    heard: Arc<Mutex<Vec<String>>>,
}

impl Environment for Says {
    fn reset(&mut self) -> Result<Observation> {
        Ok(Observation {
            append: self.first.take().map_or(Append::Nothing, Append::Messages),
            ..Observation::default()
        })
    }

    fn step(&mut self, turn: &Turn<'_>) -> Result<Step> {
        self.heard.lock().unwrap().push(turn.text.to_owned());
        match self.messages.get(turn.number) {
            Some(messages) => Ok(Step::go_on(Append::Messages(messages.clone()))),
            None => Ok(Step::done(1.)),
        }
    }
}

fn answers() -> Vec<Vec<Value>> {
    vec![
        vec![
            json!({"role": "tool", "content": "12"}),
            json!({"role": "tool", "content": "ab a"}),
        ],
        vec![json!({"role": "user", "content": "and now?"})],
    ]
}

fn tools() -> Value {
    json!([{"name": "add"}])
}

/// Plays turns with these tokens, and returns the trajectory and what the environment received.
fn play(
    template: &str,
    stop: &str,
    turns: Vec<Vec<u32>>,
    reset: Option<Vec<Value>>,
) -> (Rollout, Vec<String>) {
    let tokenizer = bpe();
    let template = ChatTemplate::new(template).unwrap();
    let stop = tokenizer.token_to_id(stop).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let recorder = Arc::clone(&heard);
    let factory = move |_: &EpisodeStart<'_>| -> Result<Says> {
        Ok(Says {
            first: reset.clone(),
            messages: answers(),
            heard: Arc::clone(&recorder),
        })
    };
    let limits = EnvironmentLimits::default();
    let environments =
        Environments::new(factory, limits, &tokenizer, Some(&template), &[stop]).unwrap();
    let messages = vec![json!({"role": "user", "content": "1 and 2?"})];
    let chat = Chat::new(&messages).tools(tools()).generation_prompt();
    let text = template.render(&chat).unwrap();
    let prompt = Prompt::new(0, &text, Value::Null, &tokenizer).unwrap();
    let prompt = prompt.with_messages(messages).with_tools(Some(tools()));
    let generator = Scripted(Mutex::new(turns), FinishReason::StopToken);
    let sampling = SamplingConfig {
        max_new_tokens: 1000,
        stop_token_ids: vec![stop],
        ..SamplingConfig::default()
    };
    let sampler = Sampler::from_generator(Arc::new(generator), 300, sampling)
        .unwrap()
        .with_environments(Arc::new(environments));
    let rollout = sampler.sample(&[&prompt], 1, 0).unwrap().remove(0);
    let heard = heard.lock().unwrap().clone();
    (rollout, heard)
}

fn all_tokens(rollout: &Rollout) -> Vec<u32> {
    [&rollout.prompt_tokens[..], &rollout.completion.tokens].concat()
}

/// The whole conversation's text, up to the end of its last turn.
fn conversation(template: &str, turns: [&str; 3], first: Option<Vec<Value>>) -> String {
    let assistant = |text: &str| json!({"role": "assistant", "content": text});
    let mut messages = vec![json!({"role": "user", "content": "1 and 2?"})];
    messages.extend(first.into_iter().flatten());
    let mut answers = answers().into_iter();
    for turn in turns {
        messages.push(assistant(turn));
        messages.extend(answers.next().into_iter().flatten());
    }
    let template = ChatTemplate::new(template).unwrap();
    // The templates print tools in another place once there are more turns, except these two.
    let chat = Chat::new(&messages).tools(tools());
    template.render(&chat).unwrap()
}

#[rstest]
#[case::chatml(CHATML, "<|im_end|>", "\n")]
#[case::llama(LLAMA, "<|eot_id|>", "")]
fn a_trajectory_has_the_tokens_of_the_whole_conversation(
    #[case] template: &str,
    #[case] stop: &str,
    #[case] after: &str,
) {
    let texts = ["12 ab", "so 3", "12"];
    let turns = texts.map(|text| encode(&format!("{text}{stop}"))).to_vec();
    for first in [
        None,
        Some(vec![json!({"role": "user", "content": "quick"})]),
    ] {
        let (rollout, heard) = play(template, stop, turns.clone(), first.clone());
        let whole = conversation(template, texts, first);
        let whole = whole.strip_suffix(after).unwrap();
        assert_eq!(all_tokens(&rollout), encode(whole), "{template}");
        assert_eq!(heard, texts);
    }
}

#[test]
fn tools_that_a_template_moves_stay_where_they_were() {
    let texts = ["12 ab", "so 3", "12"];
    let turns = texts.map(|text| encode(&format!("{text}</s>"))).to_vec();
    let (rollout, _) = play(MISTRAL, "</s>", turns, None);
    let expected = "<s>[AVAILABLE_TOOLS] [{\"name\": \"add\"}][/AVAILABLE_TOOLS][INST] 1 and 2?[/INST]12 ab</s>[TOOL_RESULTS] 12[/TOOL_RESULTS][TOOL_RESULTS] ab a[/TOOL_RESULTS]so 3</s>[INST] and now?[/INST]12</s>";
    assert_eq!(all_tokens(&rollout), encode(expected));
}

#[rstest]
#[case::chatml(CHATML, "<|im_end|>")]
#[case::llama(LLAMA, "<|eot_id|>")]
#[case::mistral(MISTRAL, "</s>")]
fn the_tokens_of_the_policy_are_never_encoded_again(#[case] template: &str, #[case] stop: &str) {
    let tokenizer = bpe();
    // "1" and "2" as two tokens, which the tokenizer would join.
    let letters = |text: &str| -> Vec<u32> {
        let ids = text.chars().map(|c| tokenizer.token_to_id(&c.to_string()));
        ids.map(Option::unwrap).collect()
    };
    let stop_id = tokenizer.token_to_id(stop).unwrap();
    let turn = |text: &str| [letters(text), vec![stop_id]].concat();
    let turns = vec![turn("12ab"), turn("ab12"), turn("1212")];
    assert_ne!(turns[0], encode(&format!("12ab{stop}")));
    let (rollout, heard) = play(template, stop, turns.clone(), None);
    let episode = rollout.episode.as_ref().unwrap();
    for (turn, tokens) in episode.turns.iter().zip(&turns) {
        assert_eq!(&rollout.completion.tokens[turn.tokens.clone()], tokens);
    }
    assert_eq!(heard, ["12ab", "ab12", "1212"]);
    // The other tokens match the template's.
    let canonical = [
        encode(&format!("12ab{stop}")),
        encode(&format!("ab12{stop}")),
        encode(&format!("1212{stop}")),
    ];
    let (expected, _) = play(template, stop, canonical.to_vec(), None);
    let others = |rollout: &Rollout| -> Vec<u32> {
        let written = rollout.completion.written.clone().unwrap();
        let tokens = rollout.completion.tokens.iter().zip(written);
        tokens
            .filter(|(_, w)| !w)
            .map(|(token, _)| *token)
            .collect()
    };
    assert_eq!(others(&rollout), others(&expected));
}

#[rstest]
#[case::chatml(CHATML, "<|im_end|>")]
#[case::llama(LLAMA, "<|eot_id|>")]
#[case::mistral(MISTRAL, "</s>")]
fn a_turn_without_its_end_gets_one(#[case] template: &str, #[case] stop: &str) {
    let whole = vec![encode(&format!("12{stop}")), encode(stop), encode(stop)];
    let mut cut = whole.clone();
    cut[0].pop();
    let (expected, _) = play(template, stop, whole, None);
    let (found, _) = play(template, stop, cut, None);
    assert_eq!(all_tokens(&found), all_tokens(&expected));
    let written = |rollout: &Rollout| rollout.completion.written.clone().unwrap();
    let differ = written(&found)
        .into_iter()
        .zip(written(&expected))
        .filter(|(a, b)| a != b);
    // The end of the first turn is not the policy's.
    assert_eq!(differ.collect::<Vec<_>>(), [(false, true)]);
}

/// [`bpe`] with special tokens for tags, as transformers' `add_special_tokens` adds them.
fn bpe_with_tags() -> Tokenizer {
    let mut tokenizer = bpe();
    let tags = ["<think>", "</think>", "<answer>", "</answer>"];
    let tags = tags.map(|tag| AddedToken::from(tag, true));
    tokenizer.add_special_tokens(tags).unwrap();
    tokenizer
}

#[rstest]
#[case::stop_token("<think>ab</think><answer>12</answer><|im_end|>", "<|im_end|>", &[], "")]
#[case::cut("<think>ab</think><answer>12</answer>", "<|im_end|>", &[], "")]
#[case::other_special_tokens("<s>ab<|eot_id|>12<think>", "<|im_end|>", &[], "")]
#[case::stop_string("12<|im_end|>", "</s>", &["<|im_end|>"], "<|im_end|>")]
#[case::closing_tag("<answer>12</answer>", "</s>", &["</answer>"], "")]
#[case::longer_stop_string("12 ab<|im_end|>", "</s>", &["ab<|im_end|>"], "")]
#[case::text_stop_token("12ab", "ab", &[], "")]
fn an_answer_keeps_all_special_tokens_but_its_end(
    #[case] written: &str,
    #[case] stop: &str,
    #[case] stop_strings: &[&str],
    #[case] end: &str,
) {
    let tokenizer = bpe_with_tags();
    let tokens = tokenizer.encode(written, false).unwrap();
    let sampling = SamplingConfig {
        stop_token_ids: vec![tokenizer.token_to_id(stop).unwrap()],
        stop_strings: stop_strings.iter().map(|&text| text.to_owned()).collect(),
        ..SamplingConfig::default()
    };
    let text = answer_text(tokens.get_ids(), &sampling, &tokenizer).unwrap();
    let expected = written
        .strip_suffix("<|im_end|>")
        .filter(|_| stop == "<|im_end|>");
    let expected = expected.or(written.strip_suffix(end)).unwrap();
    assert_eq!(text, expected);
}

#[test]
fn rewards_see_tags_that_are_special_tokens() {
    let tokenizer = bpe_with_tags();
    let answer = "<think>\nab\n</think>\n<answer>\n12\n</answer>";
    let turn = tokenizer
        .encode(format!("{answer}<|im_end|>"), false)
        .unwrap();
    let generator = Scripted(
        Mutex::new(vec![turn.get_ids().to_vec()]),
        FinishReason::StopToken,
    );
    let sampling = SamplingConfig {
        max_new_tokens: 100,
        stop_token_ids: vec![tokenizer.token_to_id("<|im_end|>").unwrap()],
        ..SamplingConfig::default()
    };
    let sampler = Sampler::from_generator(Arc::new(generator), 300, sampling).unwrap();
    let prompt = Prompt::new(0, "1?", Value::Null, &tokenizer).unwrap();
    let reward = TagsReward::new(["think", "answer"]).unwrap();
    let evaluation = evaluate(&sampler, &[prompt], 1, &reward, &tokenizer, 0).unwrap();
    let sample = &evaluation.samples[0];
    assert_eq!(
        (sample.completion.as_str(), sample.reward),
        (answer, Some(1.))
    );
}

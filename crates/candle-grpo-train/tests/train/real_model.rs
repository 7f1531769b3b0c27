//! SmolLM2-135M-Instruct, which `make model` downloads. `make test-model` runs these tests.
//!
//! `GRPO_MODEL_DIR` is the folder with `SmolLM2-135M-Instruct` and the GGUF file, if it is not
//! `target/models`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Result;
use candle_core::{Device, IndexOp, Tensor};
use candle_grpo_nn::Decoder;
use candle_grpo_train::model::Chat;
use candle_grpo_train::{FinishReason, Pretrained, Prompt, Sampler, SamplingConfig};
use serde::Deserialize;
use serde_json::json;

const NAME: &str = "SmolLM2-135M-Instruct";

fn models() -> PathBuf {
    std::env::var_os("GRPO_MODEL_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/models"),
        PathBuf::from,
    )
}

/// The model in the GGUF file, loaded once for all tests.
fn model() -> &'static Pretrained {
    static MODEL: OnceLock<Pretrained> = OnceLock::new();
    let file = models().join(format!("{NAME}.Q4_1.gguf"));
    MODEL.get_or_init(|| Pretrained::load(&file, &Device::Cpu).unwrap())
}

fn golden<T: for<'a> Deserialize<'a>>(file: &str) -> Result<T> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models");
    Ok(serde_json::from_slice(&fs::read(folder.join(file))?)?)
}

fn encode(model: &Pretrained, text: &str) -> Vec<u32> {
    let encoding = model.tokenizer.encode(text, false).unwrap();
    encoding.get_ids().to_vec()
}

#[test]
#[ignore = "needs make model"]
fn next_token_log_probs_equal_those_of_a_numpy_implementation() -> Result<()> {
    let model = model();
    let ids = encode(model, "The capital of France is");
    assert_eq!(ids, [504, 3575, 282, 4649, 314]);
    let decoder = Decoder::new(&model.model, model.parameters.detached_var_builder())?;
    let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
    let hidden = decoder.padded_hidden_states(&ids, &ids.ones_like()?)?;
    let logits = decoder.logits(&hidden.i((.., 4))?)?;
    let log_probs = candle_nn::ops::log_softmax(&logits, 1)?.squeeze(0)?;
    // A forward pass in NumPy and f64 on the same file.
    for (token, text, expected) in [
        (7042, " Paris", -0.2581),
        (260, " the", -2.7408),
        (4528, " London", -4.3844),
        (2250, " Le", -4.6199),
        (1315, " New", -4.6778),
    ] {
        assert_eq!(encode(model, text), [token]);
        let found = log_probs.i(token as usize)?.to_scalar::<f32>()?;
        assert!(
            (found - expected).abs() < 5e-4,
            "{text}: {found}, not {expected}"
        );
    }
    Ok(())
}

#[derive(Deserialize)]
struct Texts {
    cases: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    decoded_skip_special: String,
}

#[test]
#[ignore = "needs make model"]
fn golden_models_texts_become_the_tokens_of_the_cases() -> Result<()> {
    let model = model();
    let Texts { cases } = golden("smollm2_tokenizer.json")?;
    assert!(cases.len() > 10);
    for case in cases {
        assert_eq!(encode(model, &case.text), case.ids, "{:?}", case.text);
        let decode = |skip| model.tokenizer.decode(&case.ids, skip).unwrap();
        assert_eq!(decode(false), case.text);
        assert_eq!(decode(true), case.decoded_skip_special);
    }
    assert_eq!(
        encode(model, "17 + 25 = 42"),
        [33, 39, 1232, 216, 34, 37, 446, 216, 36, 34]
    );
    Ok(())
}

#[test]
#[ignore = "needs make model"]
fn special_tokens_and_chat_template_are_read() -> Result<()> {
    let model = model();
    assert_eq!(model.license.as_deref(), Some("apache-2.0"));
    assert_eq!(model.parameters.num_elements(), 134_515_008);
    let tokens = &model.special_tokens;
    assert_eq!(tokens.bos.as_ref().unwrap().text, "<|im_start|>");
    assert_eq!(tokens.eos.as_ref().unwrap().id, 2);
    assert_eq!(tokens.stop_token_ids, [2, 0]);
    let chat =
        Chat::new(json!([{"role": "user", "content": "What is 17 + 25? Answer with a number."}]));
    let template = model.chat_template.as_ref().unwrap();
    let chat = template.encode(&chat.generation_prompt(), &model.tokenizer)?;
    assert_eq!(chat.tokens.len(), 45);
    Ok(())
}

/// transformers' greedy completions, recorded by `benches/peers/greedy.py`.
#[derive(Deserialize)]
struct Continuation {
    prompt: String,
    ids: Vec<u32>,
    /// Ends where f32 cannot distinguish the best token from the second.
    greedy: Vec<u32>,
}

#[test]
#[ignore = "needs make model"]
fn greedy_tokens_are_those_of_transformers() -> Result<()> {
    let model = model();
    let cases: Vec<Continuation> = golden("smollm2_greedy.json")?;
    assert_eq!(cases.len(), 20);
    let config = SamplingConfig {
        greedy: true,
        max_new_tokens: cases.iter().map(|case| case.greedy.len()).max().unwrap(),
        stop_token_ids: vec![2],
        ..SamplingConfig::default()
    };
    let sampler = Sampler::new(&model.model, &model.parameters, config)?;
    let mut prompts = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let prompt = Prompt::new(index as u64, &case.prompt, json!({}), &model.tokenizer)?;
        assert_eq!(prompt.tokens, case.ids, "{:?}", case.prompt);
        prompts.push(prompt);
    }
    let rollouts = sampler.sample(&prompts.iter().collect::<Vec<_>>(), 1, 0)?;
    for (case, rollout) in cases.iter().zip(rollouts) {
        let ours = &rollout.completion.tokens;
        let ours = &ours[..ours.len().min(case.greedy.len())];
        assert_eq!(ours, case.greedy, "{:?}", case.prompt);
    }
    Ok(())
}

#[test]
#[ignore = "needs make model"]
fn a_greedy_answer_ends_at_a_stop_token() -> Result<()> {
    let model = model();
    let chat = Chat::new(json!([{"role": "user", "content": "What is 17 + 25?"}]));
    let template = model.chat_template.as_ref().unwrap();
    let text = template.render(&chat.generation_prompt())?;
    let config = SamplingConfig {
        greedy: true,
        max_new_tokens: 24,
        stop_token_ids: model.special_tokens.stop_token_ids.clone(),
        ..SamplingConfig::default()
    };
    let sampler = Sampler::new(&model.model, &model.parameters, config)?;
    let prompt = Prompt::new(0, &text, json!({}), &model.tokenizer)?;
    let rollout = &sampler.sample(&[&prompt], 1, 0)?[0];
    let answer = model
        .tokenizer
        .decode(&rollout.completion.tokens, true)
        .unwrap();
    println!("What is 17 + 25? {answer}");
    // Wrong by ten, as in other programs.
    assert_eq!(answer, "17 + 25 = 32.");
    assert_eq!(rollout.completion.finish_reason, FinishReason::StopToken);
    Ok(())
}

#[test]
#[ignore = "needs make model"]
fn the_converted_folder_holds_the_same_model() -> Result<()> {
    let model = model();
    let folder = models().join(NAME);
    let converted = Pretrained::load(&folder, &Device::Cpu)?;
    assert_eq!(converted.special_tokens, model.special_tokens);
    for (name, weight) in model.parameters.iter() {
        let other = converted.parameters.get(name).unwrap();
        let differing = weight
            .ne(other.as_tensor())?
            .to_dtype(candle_core::DType::U32)?;
        assert_eq!(differing.sum_all()?.to_scalar::<u32>()?, 0, "{name}");
    }
    let text = "Janet has 3 apples; she gives 1/2 away.\n\nHow many?";
    assert_eq!(encode(&converted, text), encode(model, text));
    let source = |model: &Pretrained| model.chat_template.as_ref().unwrap().source().to_owned();
    assert_eq!(source(&converted), source(model));
    Ok(())
}

//! A tiny policy and a few prompts.

use candle_core::{Device, Tensor};
use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_test_support::TINY_DECODER;
use candle_grpo_train::model::{SpecialTokens, character_tokenizer};
use candle_grpo_train::{Pretrained, Prompt, Sampler, SamplingConfig};
use serde_json::json;
use tokenizers::Tokenizer;

pub(crate) const END: u32 = 0;

pub(crate) fn model() -> DecoderConfig {
    serde_json::from_str(TINY_DECODER).unwrap()
}

/// Weights ten times larger than at the start of training, so that the distributions are far from
/// uniform.
pub(crate) fn parameters() -> Parameters {
    let fresh = Parameters::init(&model(), 3, &Device::Cpu).unwrap();
    let larger = fresh
        .frozen_copy()
        .unwrap()
        .into_iter()
        .map(|(name, x)| {
            let factor = if x.rank() == 2 { 10. } else { 1. };
            (name, (x * factor).unwrap())
        })
        .collect();
    Parameters::from_tensors(&model(), larger, &Device::Cpu).unwrap()
}

pub(crate) fn pretrained() -> Pretrained {
    Pretrained {
        model: model(),
        parameters: parameters(),
        tokenizer: tokenizer(),
        special_tokens: SpecialTokens {
            stop_token_ids: vec![END],
            ..SpecialTokens::default()
        },
        chat_template: None,
        license: None,
    }
}

pub(crate) fn tokenizer() -> Tokenizer {
    character_tokenizer("abcde").unwrap()
}

pub(crate) fn prompts(texts: &[&str]) -> Vec<Prompt> {
    let tokenizer = tokenizer();
    texts
        .iter()
        .enumerate()
        .map(|(i, text)| Prompt::new(i as u64, text, json!({ "row": i }), &tokenizer).unwrap())
        .collect()
}

pub(crate) fn sampling() -> SamplingConfig {
    SamplingConfig {
        max_new_tokens: 8,
        stop_token_ids: vec![END],
        seed: 11,
        ..SamplingConfig::default()
    }
}

pub(crate) fn sampler(config: SamplingConfig) -> Sampler {
    Sampler::new(&model(), &parameters(), config).unwrap()
}

pub(crate) fn max_difference(a: &Tensor, b: &Tensor) -> f32 {
    let difference = (a - b).unwrap().abs().unwrap();
    difference
        .flatten_all()
        .unwrap()
        .max(0)
        .unwrap()
        .to_scalar()
        .unwrap()
}

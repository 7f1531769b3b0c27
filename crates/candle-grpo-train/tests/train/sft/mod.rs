//! Supervised fine-tuning.

mod gradients;
mod masks;
mod rows;
mod steps;

use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_test_support::device;
use candle_grpo_train::model::SpecialTokens;
use candle_grpo_train::{ChatTemplate, Pretrained};
use tokenizers::Tokenizer;

use crate::common::model;
use crate::environment::templates::bpe;

/// A model with the tokenizer of [`bpe`], whose turns end with `<|im_end|>`, `<|eot_id|>` and
/// `</s>`.
fn chat_model(template: &str) -> Pretrained {
    let tokenizer = bpe();
    let model = DecoderConfig {
        vocab_size: 256,
        max_position_embeddings: 512,
        ..model()
    };
    let id = |name: &str| tokenizer.token_to_id(name).unwrap();
    let parameters = Parameters::init(&model, 3, device()).unwrap();
    Pretrained {
        special_tokens: SpecialTokens {
            stop_token_ids: ["<|im_end|>", "<|eot_id|>", "</s>"].map(id).to_vec(),
            ..SpecialTokens::default()
        },
        chat_template: Some(ChatTemplate::new(template).unwrap()),
        ..Pretrained::new(model, parameters, tokenizer)
    }
}

fn decode(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    tokenizer.decode(tokens, false).unwrap()
}

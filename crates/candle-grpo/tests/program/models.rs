//! A reward model, and a model with a chat template.

use std::fs;
use std::path::Path;

use candle_core::Device;
use candle_grpo::nn::{DecoderConfig, Parameters, SequenceClassifierConfig};
use candle_grpo::train::model::{SpecialTokens, character_tokenizer};
use candle_grpo::train::{ChatTemplate, Pretrained};

use super::support::{model, write_model};

/// Writes a reward model with a token for each character in `alphabet`.
pub(crate) fn write_reward_model(folder: &Path, alphabet: &str) {
    write_model(folder, alphabet);
    let model = Pretrained::load_without_weights(folder).unwrap().model;
    let config = SequenceClassifierConfig {
        decoder: model,
        num_labels: 1,
        pad_token_id: Some(0),
    };
    let parameters = config.init(3, &Device::Cpu).unwrap();
    parameters.save(&folder.join("model.safetensors")).unwrap();
    let keys = config.to_hugging_face(&[]).unwrap();
    fs::write(folder.join("config.json"), keys.to_string()).unwrap();
}

/// The chat template for [`chat_model`].
const TEMPLATE: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}\
    {% if enable_thinking %}think|{% endif %}{% if add_generation_prompt %}assistant: {% endif %}";

/// Writes a model for all printable characters, with a chat template.
pub(crate) fn chat_model(path: &Path, positions: usize) {
    let model = DecoderConfig {
        vocab_size: 96,
        max_position_embeddings: positions,
        ..model()
    };
    let alphabet: String = (' '..='~').collect();
    let parameters = Parameters::init(&model, 3, &Device::Cpu).unwrap();
    let tokenizer = character_tokenizer(&alphabet).unwrap();
    let pretrained = Pretrained {
        special_tokens: SpecialTokens {
            stop_token_ids: vec![0],
            ..SpecialTokens::default()
        },
        chat_template: Some(ChatTemplate::new(TEMPLATE).unwrap()),
        ..Pretrained::new(model, parameters, tokenizer)
    };
    pretrained.save(path).unwrap();
}

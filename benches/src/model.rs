//! Benchmark models: those in `benches/models`, and a small one.

use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{DType, Device};
use candle_grpo_nn::{Decoder, DecoderConfig, Parameters};
use candle_grpo_train::Pretrained;
use candle_grpo_train::model::{SpecialTokens, character_tokenizer};
use serde_json::json;

/// Reads a `config.json`. Without a file: the dimensions of SmolLM2-135M.
pub fn read_model(file: Option<&Path>) -> Result<DecoderConfig> {
    let Some(file) = file else {
        return Ok(DecoderConfig::from_hugging_face(include_bytes!(
            "../models/smollm2-135m.json"
        ))?);
    };
    let name = file.display();
    let config = std::fs::read(file).with_context(|| format!("{name}"))?;
    DecoderConfig::from_hugging_face(&config).with_context(|| format!("{name}"))
}

/// Returns a decoder that computes in `dtype`: with the variables in `parameters` for f32, and with
/// copies for other dtypes.
pub fn decoder_in(model: &DecoderConfig, parameters: &Parameters, dtype: DType) -> Result<Decoder> {
    let vb = match dtype {
        DType::F32 => parameters.detached_var_builder(),
        dtype => parameters.copied_var_builder(dtype)?.0,
    };
    Ok(Decoder::new(model, vb)?)
}

/// Returns a model with 0.3 million parameters, whose tokens are characters for arithmetic. Token 0
/// ends a text.
pub fn small_model() -> Result<Pretrained> {
    let model: DecoderConfig = serde_json::from_value(json!({
        "model_type": "llama", "vocab_size": 15, "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": false,
    }))?;
    let parameters = Parameters::init(&model, 3, &Device::Cpu)?;
    let tokenizer = character_tokenizer("0123456789*=\n ")?;
    Ok(Pretrained {
        special_tokens: SpecialTokens {
            stop_token_ids: vec![0],
            ..SpecialTokens::default()
        },
        ..Pretrained::new(model, parameters, tokenizer)
    })
}

//! Benchmark models, in `benches/models`.

use std::path::Path;

use anyhow::{Context, Result};
use candle_core::DType;
use candle_grpo_nn::{Decoder, DecoderConfig, Parameters};

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

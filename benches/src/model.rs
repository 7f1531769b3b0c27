//! The models of the benchmarks, in `benches/models`.

use std::path::Path;

use anyhow::{Context, Result};
use candle_grpo_nn::DecoderConfig;

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

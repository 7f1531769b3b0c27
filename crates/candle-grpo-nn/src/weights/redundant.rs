//! Tensors that checkpoints hold beyond their parameters, and that say nothing new.

use std::collections::HashMap;

use candle_core::{DType, Result, Tensor, bail};

use crate::DecoderConfig;

const EMBEDDING: &str = "model.embed_tokens.weight";
const OUTPUT: &str = "lm_head.weight";

/// Removes rotary frequencies, which follow from the configuration, and the output layer of a model that is tied, which
/// must be the embedding.
pub(crate) fn remove_redundant(
    config: &DecoderConfig,
    tensors: &mut HashMap<String, Tensor>,
) -> Result<()> {
    tensors.retain(|name, _| !name.ends_with("rotary_emb.inv_freq"));
    if config.tie_word_embeddings
        && let (Some(embedding), Some(output)) = (tensors.get(EMBEDDING), tensors.get(OUTPUT))
    {
        if !equal(embedding, output)? {
            bail!(
                "{OUTPUT}: differs from {EMBEDDING}, must be equal or absent with tie_word_embeddings"
            );
        }
        tensors.remove(OUTPUT);
    }
    Ok(())
}

fn equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.dims() != b.dims() || a.dtype() != b.dtype() {
        return Ok(false);
    }
    let differing = a.ne(b)?.to_dtype(DType::F32)?.sum_all()?;
    Ok(differing.to_scalar::<f32>()? == 0.0)
}

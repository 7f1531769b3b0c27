//! Models with weights that get no gradients.

use anyhow::Result;
use candle_grpo_nn::{ComputeCopies, ComputeDType, LanguageModel, Lora, ModelConfig, Parameters};
use candle_nn::VarBuilder;

/// Returns a detached model with `parameters` and `adapters`, and its low-precision copies.
pub(crate) fn model_in<C: ModelConfig>(
    model: &C,
    parameters: &Parameters,
    adapters: Option<&Lora>,
    dtype: ComputeDType,
) -> Result<(C::Model, ComputeCopies)> {
    let (vb, copies) = detached_weights(parameters, adapters, dtype)?;
    Ok((model.build(vb)?.gathering(parameters)?, copies))
}

/// Returns a builder for detached `parameters` with `adapters` in `dtype`, and its low-precision
/// copies.
pub(crate) fn detached_weights(
    parameters: &Parameters,
    adapters: Option<&Lora>,
    dtype: ComputeDType,
) -> Result<(VarBuilder<'static>, ComputeCopies)> {
    Ok(match (dtype, adapters) {
        (ComputeDType::F32, None) => (parameters.detached_var_builder(), ComputeCopies::default()),
        (ComputeDType::F32, Some(adapters)) => (
            adapters.detached_var_builder(parameters)?,
            ComputeCopies::default(),
        ),
        (dtype, None) => parameters.copied_var_builder(dtype.into())?,
        (dtype, Some(adapters)) => adapters.copied_var_builder(parameters, dtype.into())?,
    })
}

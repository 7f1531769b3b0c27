//! Learning from examples, to give reinforcement learning something to reinforce.

use std::ops::ControlFlow;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_grpo_loss::{Aggregation, Mask, StepTotals};
use candle_grpo_nn::{AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, Parameters};
use serde::{Deserialize, Serialize};

use crate::response::response_log_probs;
use crate::{ShuffledOrder, TokenBatch};

/// A prompt and the answer to learn, as tokens. The answer should end with a stop token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// What is asked.
    pub prompt: Vec<u32>,
    /// What to answer.
    pub answer: Vec<u32>,
}

/// How [`pretrain`] learns.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PretrainConfig {
    /// The greatest number of optimiser steps.
    pub max_steps: usize,
    /// Examples for each step.
    pub batch_size: usize,
    /// The optimiser.
    pub optimizer: AdamWConfig,
    /// Gradients are scaled down to this norm.
    pub max_grad_norm: f64,
    /// What the order of the examples comes from.
    pub seed: u64,
}

impl Default for PretrainConfig {
    fn default() -> Self {
        Self {
            max_steps: 1000,
            batch_size: 64,
            optimizer: AdamWConfig::default(),
            max_grad_norm: 1.,
            seed: 0,
        }
    }
}

/// Trains `parameters` on `examples` by the cross-entropy of the answer tokens.
///
/// `after_step` is called with the number of steps made and the loss of the last one; it may end the training.
/// Returns the number of steps made.
///
/// Errs if there are no examples, one is empty, or `batch_size` is 0.
pub fn pretrain(
    model: &DecoderConfig,
    parameters: &Parameters,
    examples: &[Example],
    config: &PretrainConfig,
    mut after_step: impl FnMut(usize, f64) -> Result<ControlFlow<()>>,
) -> Result<usize> {
    ensure!(
        !examples.is_empty(),
        "examples: none, there must be at least one"
    );
    ensure!(config.batch_size > 0, "batch_size: 0, must be at least 1");
    let decoder = Decoder::new(model, parameters.var_builder())?;
    let mut optimizer = AdamW::new(config.optimizer.clone(), parameters)?;
    let order = ShuffledOrder::new(examples.len(), config.seed)?;
    for step in 0..config.max_steps {
        let pairs: Vec<(&[u32], &[u32])> = order
            .slice(step * config.batch_size, config.batch_size)
            .into_iter()
            .map(|i| (examples[i].prompt.as_slice(), examples[i].answer.as_slice()))
            .collect();
        let batch = TokenBatch::new(&pairs, parameters.device())?;
        let loss = learn(
            &decoder,
            parameters,
            &mut optimizer,
            &batch,
            config.max_grad_norm,
        )
        .with_context(|| format!("pretraining step {}", step + 1))?;
        if after_step(step + 1, loss)?.is_break() {
            return Ok(step + 1);
        }
    }
    Ok(config.max_steps)
}

/// One step; returns the mean loss of the answer tokens before it.
fn learn(
    decoder: &Decoder,
    parameters: &Parameters,
    optimizer: &mut AdamW,
    batch: &TokenBatch,
    max_grad_norm: f64,
) -> Result<f64> {
    let log_probs = response_log_probs(decoder, batch, 1.)?.log_probs;
    let loss = cross_entropy(&log_probs, &batch.response_mask)?;
    drop(log_probs);
    let value = f64::from(loss.to_scalar::<f32>()?);
    let mut gradients = Gradients::new();
    gradients.accumulate(&loss, parameters)?;
    drop(loss);
    gradients.clip_by_global_norm(max_grad_norm)?;
    optimizer.step(parameters, &gradients)?;
    Ok(value)
}

/// The mean over the tokens of the mask; what stands elsewhere does not matter, finite or not.
fn cross_entropy(log_probs: &Tensor, response_mask: &Tensor) -> Result<Tensor> {
    let totals = StepTotals::to_host(response_mask)?;
    let mask = Mask::new(response_mask)?;
    Ok(Aggregation::TokenMean.apply(&log_probs.neg()?, &mask, &totals)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn padding_does_not_matter_even_if_it_is_impossible() {
        let impossible = f32::NEG_INFINITY;
        let log_probs = Var::new(&[[-1f32, -3.], [-2., impossible]], &Device::Cpu).unwrap();
        let mask = Tensor::new(&[[1u32, 1], [1, 0]], &Device::Cpu).unwrap();
        let loss = cross_entropy(&log_probs, &mask).unwrap();
        assert_eq!(loss.to_scalar::<f32>().unwrap(), 2.);
        let gradients = loss.backward().unwrap();
        let gradient = gradients.get(&log_probs).unwrap();
        let third = -1f32 / 3.;
        assert_eq!(
            gradient.to_vec2::<f32>().unwrap(),
            [[third, third], [third, 0.]]
        );
    }
}

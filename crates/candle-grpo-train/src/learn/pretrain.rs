//! Supervised training on examples, as a warm-up for reinforcement learning.

use std::ops::ControlFlow;

use anyhow::{Context, Result, ensure};
use candle_core::{Tensor, bail};
use candle_grpo_loss::TokenLogProbs;
use candle_grpo_nn::{
    AdamW, AdamWConfig, ComputeCopies, Decoder, DecoderConfig, Gradients, Parameters,
};
use serde::{Deserialize, Serialize};

use super::response_forward::{RecordedResponses, output_layer, output_weight};
use crate::TokenBatch;
use crate::data::ShuffledOrder;

/// A prompt and its answer as tokens. The answer should end with a stop token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Tokens of the answer.
    pub answer: Vec<u32>,
}

/// Configuration of [`pretrain`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PretrainConfig {
    /// Maximum number of optimizer steps.
    pub max_steps: usize,
    /// Number of examples per step.
    pub batch_size: usize,
    /// The optimizer.
    pub optimizer: AdamWConfig,
    /// Gradients are clipped to this norm.
    pub max_grad_norm: f64,
    /// Seed of the order of the examples.
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

/// Trains `parameters` on `examples` with the cross-entropy of the answer tokens.
///
/// Calls `after_step` with the number of steps and the last loss; it may end the training. Returns
/// the number of steps.
///
/// # Errors
///
/// Returns an error if `examples` is empty, an example is empty, or `batch_size` is 0.
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
    let decoder = Decoder::new(model, parameters.detached_var_builder())?;
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

/// Makes one step and returns the mean loss of the answer tokens before it.
fn learn(
    decoder: &Decoder,
    parameters: &Parameters,
    optimizer: &mut AdamW,
    batch: &TokenBatch,
    max_grad_norm: f64,
) -> Result<f64> {
    let mut gradients = Gradients::new();
    let recorded = RecordedResponses::new(decoder, batch)?;
    let weight = output_weight(decoder, parameters);
    let layer = output_layer(decoder, &recorded.states, &weight, batch, 1.)?;
    let tokens = layer.forward()?;
    let (loss, derivatives) = cross_entropy(&tokens, &batch.response_mask)?;
    let found = layer.backward(&tokens, &derivatives)?;
    drop(layer);
    if let Some(gradient) = found.weight {
        gradients.add(decoder.output_name(), &gradient)?;
    }
    recorded.backward(found.hidden, parameters, &mut gradients)?;
    let (_, factor) = gradients.clip_factor(max_grad_norm)?;
    optimizer.scaled_step(parameters, &gradients, factor, &ComputeCopies::default())?;
    Ok(loss)
}

/// Returns the negative mean log-prob of unmasked tokens, and its derivatives.
fn cross_entropy(
    tokens: &TokenLogProbs,
    response_mask: &Tensor,
) -> candle_core::Result<(f64, TokenLogProbs)> {
    let none = tokens.entropy.zeros_like()?;
    let counts = response_mask.ne(0f64)?.to_dtype(none.dtype())?;
    let number = f64::from(counts.sum_all()?.to_scalar::<f32>()?);
    if number == 0. {
        bail!("response_mask: all 0, must have a token");
    }
    let sum = f64::from(tokens.log_probs.sum_all()?.to_scalar::<f32>()?);
    let derivatives = TokenLogProbs {
        log_probs: (counts * (-1. / number))?,
        entropy: none.clone(),
        log_sum_exp: none,
    };
    Ok((-sum / number, derivatives))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn the_mean_is_over_the_tokens_of_the_mask() {
        let log_probs = Tensor::new(&[[-1f32, -3.], [-2., 0.]], &Device::Cpu).unwrap();
        let tokens = TokenLogProbs {
            entropy: log_probs.clone(),
            log_sum_exp: log_probs.clone(),
            log_probs,
        };
        let mask = Tensor::new(&[[1u32, 1], [7, 0]], &Device::Cpu).unwrap();
        let (loss, derivatives) = cross_entropy(&tokens, &mask).unwrap();
        assert_eq!(loss, 2.);
        let third = -1f32 / 3.;
        assert_eq!(
            derivatives.log_probs.to_vec2::<f32>().unwrap(),
            [[third, third], [third, 0.]]
        );
        let none = cross_entropy(&tokens, &mask.zeros_like().unwrap());
        assert!(
            none.unwrap_err()
                .to_string()
                .starts_with("response_mask: all 0")
        );
    }
}

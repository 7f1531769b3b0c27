//! The critic, which estimates the return at each token.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use candle_grpo_collective::Collective;
use candle_grpo_core::{MetricValues, validate};
use candle_grpo_loss::{StepTotals, ValueLoss};
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{
    AdamW, AdamWConfig, ComputeCopies, Decoder, DecoderConfig, DividedModel, LanguageModel,
    Parameters, ValueHead,
};
use serde::{Deserialize, Serialize};

use super::gradient_descent::GradientDescent;
use super::{Ranks, StepStats};
use crate::sequence::response_forward::{Packed, RecordedResponses, predicting_values};
use crate::{TokenBatch, TrainingBatch};

/// Configuration of a [`Critic`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CriticConfig {
    /// The loss.
    pub value_loss: ValueLoss,
    /// The optimizer.
    pub optimizer: AdamWConfig,
    /// Gradients are clipped to this norm.
    pub max_grad_norm: f64,
    /// Number of first steps that train only the critic, until its values are meaningful.
    pub warmup_steps: usize,
}

impl Default for CriticConfig {
    fn default() -> Self {
        Self {
            value_loss: ValueLoss::default(),
            optimizer: AdamWConfig {
                learning_rate: 1e-5,
                ..AdamWConfig::default()
            },
            max_grad_norm: 1.,
            warmup_steps: 0,
        }
    }
}

impl CriticConfig {
    /// Checks all fields.
    ///
    /// # Errors
    ///
    /// Returns an error that names the field, its value and the requirement.
    pub fn validate(&self) -> Result<()> {
        validate::positive("max_grad_norm", self.max_grad_norm)?;
        if let Some(clip) = self.value_loss.clip {
            validate::positive("value_loss.clip", clip)?;
        }
        Ok(())
    }
}

/// A decoder with a value head, its loss and its optimizer.
///
/// It learns the returns of tokens for generalized advantage estimation (GAE,
/// <https://arxiv.org/abs/1506.02438>). The value of a token is the value of the position that predicts it.
pub struct Critic {
    parameters: Parameters,
    /// A detached decoder that shares the parameters.
    decoder: Decoder,
    /// A detached value head that shares the parameters.
    head: ValueHead,
    /// The trained value head.
    training_head: ValueHead,
    config: CriticConfig,
    pub(super) descent: GradientDescent,
}

impl Critic {
    /// Creates a critic from a copy of the `policy` of shape `model`, without its output layer.
    ///
    /// All values are initially 0.
    ///
    /// # Errors
    ///
    /// If `config` is not valid, or `policy` lacks a weight of the decoder.
    pub fn new(model: &DecoderConfig, policy: &Parameters, config: CriticConfig) -> Result<Self> {
        Self::sharded(model, policy, config, Ranks::default().undivided())
    }

    /// Creates a critic on one of the ranks in `collective`, which divide the state of the
    /// optimizer, the gradients with [`Sharding::Resident`], and also the weights with
    /// [`Sharding::Full`]: [`AdamW::sharded`].
    ///
    /// All ranks must call it together: the f32 weights of a [divided](AdamWConfig::divide)
    /// `policy` come from all of them.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`].
    pub fn sharded(
        model: &DecoderConfig,
        policy: &Parameters,
        config: CriticConfig,
        ranks: (&Arc<dyn Collective>, Sharding),
    ) -> Result<Self> {
        config.validate()?;
        // A tied decoder avoids an unused output layer.
        let model = DecoderConfig {
            tie_word_embeddings: true,
            ..model.clone()
        };
        let parameters = match config.optimizer.division(DType::F32, ranks) {
            Some(division) => policy.copy_divided(&model, &division)?,
            None => {
                let shapes = model.parameter_shapes();
                let tensors = policy
                    .iter()
                    .filter(|(name, _)| shapes.contains_key(*name))
                    .map(|(name, _)| Ok((name.to_owned(), policy.whole(name)?)))
                    .collect::<Result<_>>()?;
                Parameters::from_tensors(&model, tensors, policy.device())?
            }
        };
        let parameters = ValueHead::add_to(parameters, model.hidden_size)?;
        let head = |vb| ValueHead::new(model.hidden_size, vb);
        Ok(Self {
            decoder: Decoder::new(&model, parameters.detached_var_builder())?
                .gathering(&parameters)?,
            head: head(parameters.detached_var_builder())?,
            training_head: head(parameters.var_builder())?,
            descent: GradientDescent::new(config.optimizer.clone(), &parameters, ranks)?,
            parameters,
            config,
        })
    }

    /// The weights, if ranks divide them.
    pub(super) fn divided(&self) -> Option<&DividedModel> {
        self.decoder.divided()
    }

    /// Returns the values of the responses of `batch`, f32 `[B, T]`, detached.
    pub fn values(&self, batch: &TokenBatch) -> Result<Tensor> {
        predicting_values(&self.decoder, &batch.without_experts(), |states| {
            Ok(self.head.forward(states)?)
        })
    }

    /// Accumulates the gradient of the value loss of `batch`, one micro-batch of the step that
    /// `totals` counts.
    ///
    /// Returns the loss and its metrics.
    ///
    /// # Errors
    ///
    /// Returns an error if the batch has no returns, or no values and the loss clips.
    pub fn forward_backward(
        &mut self,
        batch: &TrainingBatch,
        totals: &StepTotals,
    ) -> Result<(f64, MetricValues)> {
        batch.dims()?;
        let returns = batch
            .returns
            .as_ref()
            .context("returns: absent, a critic needs what it should have expected")?;
        let packed = Packed::of_batch(&batch.tokens().without_experts())?;
        let recorded = RecordedResponses::new(&self.decoder, packed)?;
        let values = self.training_head.forward(&recorded.states)?;
        let (loss, (value, metrics)) = recorded.cells.loss(&values, |values| {
            Ok(self.config.value_loss.compute(
                values,
                batch.policy().values.as_ref(),
                returns,
                batch.tokens().response_mask(),
                totals,
            )?)
        })?;
        drop(values);
        let gradients = &mut self.descent.gradients;
        let states_gradient = gradients
            .add_reached(&loss, &self.parameters)?
            .remove(&recorded.states);
        let value = f64::from(value.to_scalar::<f32>()?);
        drop(loss);
        recorded.backward(states_gradient, &self.parameters, gradients)?;
        Ok((value, metrics.to_host()?))
    }

    /// Clips the gradients to [`CriticConfig::max_grad_norm`], makes an optimizer step and clears
    /// them.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no gradients, and [`NotFinite`](crate::NotFinite) if one is
    /// not finite. The parameters are then unchanged.
    pub fn clip_grad_and_step(&mut self) -> Result<StepStats> {
        let (none, max_norm) = (ComputeCopies::default(), self.config.max_grad_norm);
        let stats = self
            .descent
            .step(&self.parameters, &none, max_norm, "the critic's ");
        stats.context("optimizer step of the critic")
    }

    /// Sums the gradients over all ranks while the next [`Self::forward_backward`] runs, which must
    /// be the last of the optimizer step unless [`Self::reduces_each_pass`]. All ranks call it, and
    /// the step of all is the same.
    ///
    /// # Errors
    ///
    /// If the thread that sums cannot be started.
    pub fn begin_reduction(&mut self, collective: &Arc<dyn Collective>) -> Result<()> {
        self.descent.begin_reduction(collective)
    }

    /// Returns whether every [`Self::forward_backward`] must follow a
    /// [`Self::begin_reduction`], as with [`Sharding::Resident`] and [`Sharding::Full`].
    pub fn reduces_each_pass(&self) -> bool {
        self.descent.reduces_each_pass()
    }

    /// Clears the accumulated gradients.
    pub fn zero_grad(&mut self) {
        self.descent.gradients.clear();
    }

    /// Sets the learning rate of the next steps to the configured one times `factor`.
    pub fn scale_learning_rate(&mut self, factor: f64) {
        let learning_rate = self.config.optimizer.learning_rate * factor;
        self.descent.optimizer.set_learning_rate(learning_rate);
    }

    /// Returns the parameters of the decoder, and `score.weight` and `score.bias`.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Returns the optimizer.
    pub fn optimizer(&self) -> &AdamW {
        &self.descent.optimizer
    }

    /// Returns the mutable optimizer, for example to load its state.
    pub fn optimizer_mut(&mut self) -> &mut AdamW {
        &mut self.descent.optimizer
    }

    /// Returns the configuration.
    pub fn config(&self) -> &CriticConfig {
        &self.config
    }
}

/// Returns the share of the variance of `returns` `[B, T]` over the `response_mask` that `values`
/// explain.
///
/// 1 if they differ by a constant; `None` if the returns do not vary. Synchronizes with the device.
pub fn explained_variance(
    values: &Tensor,
    returns: &Tensor,
    response_mask: &Tensor,
) -> Result<Option<f64>> {
    let numbers = |x: &Tensor| -> Result<Vec<f64>> {
        Ok(x.flatten_all()?
            .to_device(&candle_core::Device::Cpu)?
            .to_dtype(candle_core::DType::F64)?
            .to_vec1::<f64>()?)
    };
    let mask = numbers(response_mask)?;
    let (values, returns) = (numbers(values)?, numbers(returns)?);
    ensure!(
        values.len() == mask.len() && returns.len() == mask.len(),
        "values, returns and response_mask: {}, {} and {} numbers, must be as many",
        values.len(),
        returns.len(),
        mask.len()
    );
    let inside = || (0..mask.len()).filter(|&i| mask[i] != 0.);
    let variance = |of: &dyn Fn(usize) -> f64| {
        let n = inside().count().max(1) as f64;
        let mean = inside().map(of).sum::<f64>() / n;
        inside().map(|i| (of(i) - mean).powi(2)).sum::<f64>() / n
    };
    let total = variance(&|i| returns[i]);
    let left = variance(&|i| returns[i] - values[i]);
    Ok((total > 0.).then(|| 1. - left / total))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn explained_variance_is_that_of_the_mask() {
        let tensor = |x: [f32; 4]| Tensor::new(&[x], &Device::Cpu).unwrap();
        let mask = Tensor::new(&[[1u32, 1, 1, 0]], &Device::Cpu).unwrap();
        let of =
            |values, returns| explained_variance(&tensor(values), &tensor(returns), &mask).unwrap();
        let returns = [1., 2., 3., f32::NAN];
        assert_eq!(of([11., 12., 13., 0.], returns), Some(1.));
        assert_eq!(of([5., 5., 5., f32::INFINITY], returns), Some(0.));
        assert_eq!(of([3., 2., 1., 0.], returns), Some(-3.));
        assert_eq!(of([1., 2., 3., 0.], [7., 7., 7., 0.]), None);
    }
}

//! The policy that is trained.

use anyhow::{Context, Result, bail};
use candle_core::Tensor;
use candle_grpo_core::MetricValues;
use candle_grpo_loss::{Aggregation, PolicyBatch, PolicyLoss, PositiveIf, StepTotals, Surrogate};
use candle_grpo_nn::{AdamW, AdamWConfig, Decoder, DecoderConfig, Gradients, Parameters};
use serde::{Deserialize, Serialize};

use crate::response::response_log_probs;
use crate::sampler::ensure_temperature;
use crate::{Reference, Sampler, SamplingConfig, TokenBatch, TrainingBatch};

/// How an [`Actor`] learns.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ActorConfig {
    /// What is minimised.
    pub policy_loss: PolicyLoss,
    /// The optimiser.
    pub optimizer: AdamWConfig,
    /// The temperature at which completions are drawn: log-probs are those of the distribution drawn from.
    pub temperature: f64,
}

/// What an optimiser step did.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct StepStats {
    /// The norm of all gradients together, before clipping.
    pub grad_norm: f64,
    /// The learning rate of the step.
    pub learning_rate: f64,
}

/// A policy with its loss and its optimiser.
///
/// Any number of [`Actor::forward_backward`], then [`Actor::clip_grad_and_step`]:
/// gradients add up over the calls in between.
pub struct Actor {
    model: DecoderConfig,
    parameters: Parameters,
    /// Records a graph.
    training: Decoder,
    /// Shares the parameters and records none.
    inference: Decoder,
    config: ActorConfig,
    optimizer: AdamW,
    gradients: Gradients,
}

impl Actor {
    /// An actor whose policy starts from `parameters`, of shape `model`.
    ///
    /// Errs if `config` is not valid or its loss needs what a [`TrainingBatch`] cannot hold.
    pub fn new(model: DecoderConfig, parameters: Parameters, config: ActorConfig) -> Result<Self> {
        ensure_temperature(config.temperature)?;
        ensure_can_be_fed(&config.policy_loss)?;
        Ok(Self {
            training: Decoder::new(&model, parameters.var_builder())?,
            inference: Decoder::new(&model, parameters.detached_var_builder())?,
            optimizer: AdamW::new(config.optimizer.clone(), &parameters)?,
            gradients: Gradients::new(),
            model,
            parameters,
            config,
        })
    }

    /// A sampler of this policy; it follows the updates.
    pub fn sampler(&self, config: SamplingConfig) -> Result<Sampler> {
        Sampler::new(&self.model, &self.parameters, config)
    }

    /// A copy of this policy as it is now.
    pub fn reference(&self) -> Result<Reference> {
        Reference::new(&self.model, &self.parameters)
    }

    /// The log-probs of the responses of `batch`, f32 `[B, T]`, without a graph.
    pub fn log_probs(&self, batch: &TokenBatch) -> Result<Tensor> {
        Ok(response_log_probs(&self.inference, batch, self.config.temperature)?.log_probs)
    }

    /// Adds the gradient of the loss of `batch`, a part of the step that `totals` counts.
    pub fn forward_backward(
        &mut self,
        batch: &TrainingBatch,
        totals: &StepTotals,
    ) -> Result<MetricValues> {
        batch.dims()?;
        let now = response_log_probs(&self.training, &batch.tokens, self.config.temperature)?;
        let mut inputs = PolicyBatch::new(
            &now.log_probs,
            &batch.advantages,
            &batch.tokens.response_mask,
        )
        .entropy(&now.entropy);
        if let Some(old) = &batch.old_log_probs {
            inputs = inputs.old_log_probs(old);
        }
        if let Some(reference) = &batch.ref_log_probs {
            inputs = inputs.ref_log_probs(reference);
        }
        let output = self.config.policy_loss.compute(&inputs, totals)?;
        self.gradients.accumulate(&output.loss, &self.parameters)?;
        Ok(output.metrics.to_host()?)
    }

    /// Scales the gradients down to `max_norm` if their norm is above it, makes an optimiser step and forgets them.
    ///
    /// Errs if there are no gradients or their norm is not finite; then the parameters are as before.
    pub fn clip_grad_and_step(&mut self, max_norm: f64) -> Result<StepStats> {
        let result = self.clip_and_step(max_norm);
        self.zero_grad();
        result.context("optimiser step")
    }

    fn clip_and_step(&mut self, max_norm: f64) -> Result<StepStats> {
        let grad_norm = self.gradients.clip_by_global_norm(max_norm)?;
        let learning_rate = self.optimizer.learning_rate();
        self.optimizer.step(&self.parameters, &self.gradients)?;
        Ok(StepStats {
            grad_norm,
            learning_rate,
        })
    }

    /// Forgets the gradients added up since the last step.
    pub fn zero_grad(&mut self) {
        self.gradients.clear();
    }

    /// Sets the learning rate of the next steps.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.optimizer.set_learning_rate(learning_rate);
    }

    /// The shape of the policy.
    pub fn model(&self) -> &DecoderConfig {
        &self.model
    }

    /// The parameters of the policy.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The gradients added up since the last step.
    pub fn gradients(&self) -> &Gradients {
        &self.gradients
    }

    /// The optimiser, for its state.
    pub fn optimizer(&self) -> &AdamW {
        &self.optimizer
    }

    /// The optimiser, to load a state.
    pub fn optimizer_mut(&mut self) -> &mut AdamW {
        &mut self.optimizer
    }

    /// How this actor learns.
    pub fn config(&self) -> &ActorConfig {
        &self.config
    }
}

/// Errs if `loss` is not valid, or needs or asks for what [`Actor::forward_backward`] does not give it.
pub(crate) fn ensure_can_be_fed(loss: &PolicyLoss) -> Result<()> {
    loss.validate().context("policy_loss")?;
    let refuse = |name: &str, needs: &str| -> Result<()> {
        bail!(
            "policy_loss.{name}: needs {needs}, which training does not compute yet; choose another"
        )
    };
    if loss.rollout_correction.is_some() {
        bail!(
            "policy_loss.rollout_correction: needs importance weights, which training does not compute yet; leave it out"
        );
    }
    if loss.positive_nll.is_some() {
        bail!(
            "policy_loss.positive_nll: needs the scores of samples, which training does not hand on yet; leave it out"
        );
    }
    match loss.surrogate {
        Surrogate::ClipCov(_) => refuse("surrogate.clip_cov", "tokens selected over the step")?,
        Surrogate::KlCov(_) => refuse("surrogate.kl_cov", "tokens selected over the step")?,
        Surrogate::Topr(topr) if matches!(topr.positive_if, PositiveIf::ScoreAbove(_)) => refuse(
            "surrogate.topr.positive_if.score_above",
            "the scores of samples",
        )?,
        _ => {}
    }
    for (name, aggregation) in [
        ("aggregation", Some(loss.aggregation)),
        ("entropy_aggregation", loss.entropy_aggregation),
    ] {
        if aggregation == Some(Aggregation::PromptMeanTokenMean) {
            refuse(
                &format!("{name}.prompt-mean-token-mean"),
                "the tokens of each prompt",
            )?;
        }
    }
    Ok(())
}

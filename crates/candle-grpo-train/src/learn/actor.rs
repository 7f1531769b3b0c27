//! The trained policy.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use candle_grpo_collective::Collective;
use candle_grpo_core::validate::{self as check, Name};
use candle_grpo_core::{MetricValue, MetricValues};
use candle_grpo_kernels::soft_cap;
use candle_grpo_loss::{
    DistillationLoss, LinearDistillationOutput, LinearLogProb, OutputLayer, PolicyBatch,
    PolicyLoss, StepTotals, TokenLogProbs, linear_distillation_loss, linear_policy_loss,
    linear_policy_loss_of_part, sum_of_squared_probs,
};
use candle_grpo_nn::model::ExpertBalance;
use candle_grpo_nn::optim::{GradientDType, MasterWeights, Sharding, StateMemory};
use candle_grpo_nn::{
    ActivationCheckpointing, AdamW, AdamWConfig, BaseWeights, ComputeCopies, ComputeDType, Decoder,
    DecoderConfig, DividedModel, Gradients, Held, LanguageModel, Lora, ModelConfig, Parameters,
    WeightDivision,
};
use candle_nn::VarBuilder;
use serde::{Deserialize, Serialize};

use super::blame::{blame, blame_teacher};
use super::gradient_descent::GradientDescent;
use super::{Ranks, Reference};
use crate::detached::detached_weights;
use crate::rollout::LocalGenerator;
use crate::rollout::sampling_config::ensure_temperature;
use crate::sequence::response_forward::{
    Packed, RecordedResponses, hold_output, output_layer, output_weight, predicting_values,
    read_tokens, response_log_probs, states_at_once,
};
use crate::teacher::TeacherDistributions;
use crate::{Sampler, SamplingConfig, TokenBatch, TrainingBatch};

/// Configuration of an [`Actor`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ActorConfig {
    /// The loss.
    pub policy_loss: PolicyLoss,
    /// The optimizer.
    pub optimizer: AdamWConfig,
    /// The sampling temperature. Log-probs refer to the distribution at this temperature.
    pub temperature: f64,
    /// The layers of which the forward pass keeps only the input, and which the backward pass
    /// recomputes.
    #[serde(default)]
    pub activation_checkpointing: ActivationCheckpointing,
    /// Moves the inputs of these layers to main memory until then, if the policy is on a GPU.
    #[serde(default)]
    pub activation_offloading: bool,
    /// The dtype of the policy's computation. Trained weights are f32, unless
    /// [`AdamWConfig::master_weights`] is bf16.
    #[serde(default)]
    pub compute_dtype: ComputeDType,
    /// Coefficient of the load-balancing loss of a model with experts, see
    /// [`TrainConfig::router_aux_loss_coef`](crate::TrainConfig::router_aux_loss_coef).
    #[serde(default)]
    pub router_aux_loss_coef: f64,
    /// The divergence from [`TrainingBatch::teachers`], which is added to the loss. Absent: none.
    #[serde(default)]
    pub distillation_loss: Option<DistillationLoss>,
}

/// The result of an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepStats {
    /// The norm of all gradients before clipping.
    pub grad_norm: f64,
    /// The learning rate of the step.
    pub learning_rate: f64,
}

/// A policy with its loss and its optimizer.
///
/// Call [`Actor::forward_backward`] any number of times, then [`Actor::clip_grad_and_step`].
/// Gradients accumulate over the calls.
///
/// The policy is a [`Decoder`] or a custom model: [`Actor::from_model`].
pub struct Actor<M = Decoder> {
    /// The model, which shares the parameters.
    policy: M,
    parameters: Parameters,
    /// The adapters, which train in place of the parameters.
    adapters: Option<Lora>,
    /// Low-precision copies of the parameters, unless the policy computes in f32.
    copies: ComputeCopies,
    config: ActorConfig,
    pub(super) descent: GradientDescent,
}

impl Actor {
    /// Returns a sampler that shares the parameters of this policy. On a GPU it records steps
    /// ([`LocalGenerator::with_recorded_steps`]): no other thread may use the GPU while it samples.
    /// With [`Sharding::Full`], [hold](Self::hold_weights) the weights meanwhile.
    pub fn sampler(&self, config: SamplingConfig) -> Result<Sampler> {
        self.sampler_of(self.model(), config)
    }

    /// Creates a reference that does not change: a [copy](Reference::fixed) of this policy or, with
    /// adapters, the policy without them, which [shares](Reference::shared) the parameters.
    pub fn reference(&self) -> Result<Reference> {
        self.reference_of(self.model(), false)
    }

    /// Returns the configuration of the policy's decoder.
    pub fn model(&self) -> &DecoderConfig {
        self.policy.config()
    }
}

impl<M: LanguageModel> Actor<M> {
    /// Creates an actor whose policy starts from `parameters`, of shape `model`.
    ///
    /// # Errors
    ///
    /// Returns an error if `config` is not valid, or not for a custom model.
    pub fn new<C: ModelConfig<Model = M>>(
        model: C,
        parameters: Parameters,
        config: ActorConfig,
    ) -> Result<Self> {
        let ranks = Ranks::default();
        Self::sharded(model, parameters, None, config, ranks.undivided())
    }

    /// Creates an actor on one of the ranks in `collective`, which divide the state of the
    /// optimizer, and the gradients with [`Sharding::Resident`] and [`Sharding::Full`]:
    /// [`AdamW::sharded`]. With `adapters` these train: [`Self::with_adapters`].
    ///
    /// To divide the weights, too, call [`AdamWConfig::divide`] first, or [`Parameters::divided`]
    /// for the frozen ones under adapters. With [`StateMemory::Host`] it is called here, unless
    /// they are divided already.
    ///
    /// # Errors
    ///
    /// As in [`Self::new`] and [`Self::with_adapters`].
    pub fn sharded<C: ModelConfig<Model = M>>(
        model: C,
        parameters: Parameters,
        adapters: Option<Lora>,
        config: ActorConfig,
        ranks: (&Arc<dyn Collective>, Sharding),
    ) -> Result<Self> {
        ensure_memory(&config.optimizer, adapters.is_some(), ranks.1)?;
        match adapters {
            Some(adapters) => Self::with_trained(model, parameters, adapters, config, ranks),
            None => Self::with_weights(model, parameters, config, ranks),
        }
    }

    fn with_weights<C: ModelConfig<Model = M>>(
        model: C,
        parameters: Parameters,
        config: ActorConfig,
        ranks: (&Arc<dyn Collective>, Sharding),
    ) -> Result<Self> {
        ensure_dtypes(&config.optimizer, config.compute_dtype, false)?;
        let parameters = match (config.optimizer.master_weights, parameters.dtype()) {
            (MasterWeights::F32, _) | (_, DType::BF16) => parameters,
            (MasterWeights::Bf16, _) => parameters.to_dtype(DType::BF16)?,
        };
        let parameters = match config.optimizer.memory {
            StateMemory::Host if model.decoder().is_some() => {
                let dtype = config.compute_dtype.into();
                config.optimizer.divide(parameters, dtype, ranks)?
            }
            _ => parameters,
        };
        let (vb, copies) = match model.decoder() {
            Some(decoder) => {
                ensure_balanced(decoder, &config)?;
                detached_weights(&parameters, None, config.compute_dtype)?
            }
            None => {
                ensure_f32(&config)?;
                (parameters.var_builder(), ComputeCopies::default())
            }
        };
        let policy = build(&model, vb, &config)?.gathering(&parameters)?;
        Self::from_policy(policy, (parameters, None), copies, config, ranks)
    }

    /// Creates an actor that trains `adapters` and freezes `parameters`, in the dtype that the
    /// policy computes in. In bf16 they take 2 bytes each, which the reference and the sampler
    /// share. Parameters in [blocks](candle_grpo_nn::BaseWeights) of quantized numbers stay so.
    ///
    /// Optimizer state and gradients have the size of the adapters.
    ///
    /// # Errors
    ///
    /// Returns an error if `config` is not valid or the adapters belong to another model.
    pub fn with_adapters<C: ModelConfig<Model = M>>(
        model: C,
        parameters: Parameters,
        adapters: Lora,
        config: ActorConfig,
    ) -> Result<Self> {
        let ranks = Ranks::default();
        Self::sharded(model, parameters, Some(adapters), config, ranks.undivided())
    }

    fn with_trained<C: ModelConfig<Model = M>>(
        model: C,
        parameters: Parameters,
        adapters: Lora,
        config: ActorConfig,
        ranks: (&Arc<dyn Collective>, Sharding),
    ) -> Result<Self> {
        let decoder = model
            .decoder()
            .context("adapters: given, must be absent for a custom model")?;
        adapters.config().validate(decoder).context("adapters")?;
        ensure_balanced(decoder, &config)?;
        ensure_dtypes(&config.optimizer, config.compute_dtype, true)?;
        let dtype = config.compute_dtype;
        let parameters = parameters.frozen_as(decoder, BaseWeights::Stored, dtype.into())?;
        let (vb, copies) = detached_weights(&parameters, Some(&adapters), dtype)?;
        let policy = build(&model, vb, &config)?.gathering(&parameters)?;
        let weights = (parameters, Some(adapters));
        Self::from_policy(policy, weights, copies, config, ranks)
    }

    /// [`Self::sampler`] of a policy of shape `model`.
    pub(super) fn sampler_of<C: ModelConfig<Model = M>>(
        &self,
        model: &C,
        config: SamplingConfig,
    ) -> Result<Sampler<C>>
    where
        M: Clone,
    {
        let generator = match model.decoder() {
            // A clone shares the copies of the parameters in the dtype of the computation.
            Some(_) => LocalGenerator::from_model(model.clone(), self.policy.clone()),
            // The policy records a graph.
            None => LocalGenerator::new(model, &self.parameters)?,
        };
        let generator = Arc::new(generator.with_recorded_steps(true));
        Sampler::from_generator(generator, model.vocab_size(), config)
    }

    /// [`Self::reference`] of a policy of shape `model`, or one that `follows` what trains.
    pub(super) fn reference_of<C: ModelConfig<Model = M>>(
        &self,
        model: &C,
        follows: bool,
    ) -> Result<Reference<M>> {
        let (parameters, dtype) = (&self.parameters, self.config.compute_dtype);
        match (self.adapters.as_ref(), follows) {
            (adapters, true) => Reference::following(model, parameters, adapters, dtype),
            (Some(_), false) => Reference::shared(model, parameters, dtype),
            (None, false) => Reference::fixed(model, parameters, dtype),
        }
    }

    /// Creates an actor for a custom model that uses `variables`, so that updates change the model.
    ///
    /// [`ActorConfig::activation_checkpointing`] and [`ActorConfig::compute_dtype`] do not apply.
    ///
    /// # Errors
    ///
    /// Returns an error if `config` is not valid.
    pub fn from_model(model: M, variables: Parameters, config: ActorConfig) -> Result<Self> {
        check::check(
            config.activation_checkpointing.is_off(),
            "activation_checkpointing",
            config.activation_checkpointing,
            "be false for a custom model",
        )?;
        ensure_offloading(
            config.activation_checkpointing,
            config.activation_offloading,
        )?;
        ensure_f32(&config)?;
        let copies = ComputeCopies::default();
        let ranks = Ranks::default();
        Self::from_policy(model, (variables, None), copies, config, ranks.undivided())
    }

    fn from_policy(
        policy: M,
        (parameters, adapters): (Parameters, Option<Lora>),
        copies: ComputeCopies,
        config: ActorConfig,
        ranks: (&Arc<dyn Collective>, Sharding),
    ) -> Result<Self> {
        ensure_temperature(config.temperature)?;
        check::non_negative("router_aux_loss_coef", config.router_aux_loss_coef)?;
        config.policy_loss.validate().context("policy_loss")?;
        if let Some(loss) = &config.distillation_loss {
            loss.validate()?;
        }
        let trained = trained(&adapters, &parameters);
        Ok(Self {
            descent: GradientDescent::new(config.optimizer.clone(), trained, ranks)?,
            policy,
            parameters,
            adapters,
            copies,
            config,
        })
    }

    /// Returns the policy.
    pub fn policy(&self) -> &M {
        &self.policy
    }

    /// Gathers all weights until the result is dropped, to sample from them or to export them.
    /// `None` unless ranks divide them ([`Sharding::Full`]). All ranks must call it together, and
    /// drop the result before the next optimizer step.
    ///
    /// # Errors
    ///
    /// If there is not enough memory, or another rank has ended.
    pub fn hold_weights(&self) -> Result<Option<Held>> {
        let divided = self.policy.divided();
        Ok(divided.map(DividedModel::hold_all).transpose()?)
    }

    /// Returns log-probs and entropies, as [`Self::log_probs`] and [`Self::entropy`] do.
    pub(super) fn response_log_probs(&self, batch: &TokenBatch) -> Result<TokenLogProbs> {
        response_log_probs(&self.policy, batch, self.config.temperature)
    }

    /// Returns the log-probs of the responses of `batch`, f32 `[B, T]`, detached.
    pub fn log_probs(&self, batch: &TokenBatch) -> Result<Tensor> {
        Ok(self.response_log_probs(batch)?.log_probs)
    }

    /// Returns the entropy at each response position of `batch`, in nats, f32 `[B, T]`, detached.
    pub fn entropy(&self, batch: &TokenBatch) -> Result<Tensor> {
        Ok(self.response_log_probs(batch)?.entropy)
    }

    /// Returns the sum of squared probabilities at each response position of `batch`, f32 `[B, T]`,
    /// detached. The optimal token baseline needs it.
    pub fn sum_of_squared_probs(&self, batch: &TokenBatch) -> Result<Tensor> {
        predicting_values(&self.policy, batch, |states| {
            let (b, t, width) = states.dims3()?;
            let _held = hold_output(&self.policy)?;
            let weight = self.policy.output_weight().detach();
            let rows = states.reshape((b * t, width))?;
            let (temperature, size) = (self.config.temperature, states_at_once(weight.dim(0)?));
            let layer = (&weight, self.policy.logit_cap());
            let sums = squared_probs_in_pieces(&rows, layer, temperature, size)?;
            Ok(sums.reshape((b, t))?)
        })
    }

    /// Accumulates the gradient of the loss of `batch`, one micro-batch of the step that `totals`
    /// counts.
    ///
    /// With [`ActorConfig::router_aux_loss_coef`] the load-balancing loss of `batch` is added as
    /// that of a whole step. [`Self::forward_backward_of`] weights it in a step of several
    /// micro-batches.
    ///
    /// # Errors
    ///
    /// Returns an error if the batch lacks a tensor that the loss needs, and
    /// [`NotFinite`](crate::NotFinite) if the loss is not finite. An error may clear all gradients.
    pub fn forward_backward(
        &mut self,
        batch: &TrainingBatch,
        totals: &StepTotals,
    ) -> Result<MetricValues> {
        self.forward_backward_of(batch, totals, read_tokens(batch.tokens()))
    }

    /// [`Self::forward_backward`], for a micro-batch of a step that reads `read_tokens` tokens, see
    /// [`read_tokens`](super::read_tokens).
    ///
    /// The load-balancing loss of a micro-batch has the weight of its share of them. Without this
    /// loss the number is not needed.
    ///
    /// # Errors
    ///
    /// As in [`Self::forward_backward`].
    pub fn forward_backward_of(
        &mut self,
        batch: &TrainingBatch,
        totals: &StepTotals,
        read_tokens: f64,
    ) -> Result<MetricValues> {
        batch.dims()?;
        let packed = Packed::of_batch(batch.tokens())?;
        let cells = packed.cells.clone();
        let ((losses, metrics), balance) = self.accumulate(packed, read_tokens, |mut output| {
            let tokens = batch.tokens();
            let (targets, mask) = cells.responses(tokens.targets(), &tokens.predicted_mask()?)?;
            let layer = output.layer((&targets, Some(&mask)), output.config.temperature)?;
            let (policy_loss, policy) = (&output.config.policy_loss, batch.policy());
            let loss = linear_policy_loss_of_part(policy_loss, &layer, policy, totals, &cells)?;
            drop(layer);
            output.add(loss.gradients.weight)?;
            let (mut hidden, mut metrics) = (loss.gradients.hidden, loss.output.metrics);
            let mut losses = vec![loss.output.loss];
            if let Some(loss) = &output.config.distillation_loss {
                for (name, teacher) in batch.teachers_of_tokens()? {
                    let distilled = output.distill(loss, (name, teacher), tokens, totals)?;
                    output.add(distilled.gradients.weight)?;
                    hidden = match (hidden, distilled.gradients.hidden) {
                        (Some(a), Some(b)) => Some((a + b)?),
                        (a, b) => a.or(b),
                    };
                    losses.push(distilled.loss);
                    if !name.is_empty() {
                        metrics.extend(distilled.metrics.clone().with_suffix(name));
                    }
                    metrics.extend(distilled.metrics);
                }
            }
            Ok((hidden, (losses, metrics)))
        })?;
        for (number, loss) in losses.iter().enumerate() {
            let loss = loss.to_dtype(DType::F32)?.to_scalar::<f32>()?;
            if !loss.is_finite() {
                self.zero_grad();
                let cause = match number {
                    0 => blame(batch)?,
                    _ => blame_teacher(batch)?,
                };
                return Err(cause.into());
            }
        }
        let mut metrics = metrics.to_host()?;
        if let Some((balance, own_tokens)) = balance {
            for (name, value) in [
                ("router_aux_loss", balance.loss),
                ("router_max_load", balance.max_load),
            ] {
                let (sum, count) = (value * own_tokens, own_tokens);
                metrics.insert(name, MetricValue::Mean { sum, count });
            }
        }
        Ok(metrics)
    }

    /// Accumulates the gradient of `loss`, a function of the output layer of the policy in a pass
    /// over `packed`, and that of the load-balancing loss with the share of the pass in
    /// `read_tokens`. `loss` returns the gradient of the states, and its own result. Returns the
    /// latter, and the balance of the experts with the number of tokens that the pass reads.
    ///
    /// An error of `loss` clears all gradients.
    pub(super) fn accumulate<T>(
        &mut self,
        packed: Packed,
        read_tokens: f64,
        loss: impl FnOnce(Output<'_, M>) -> Result<(Option<Tensor>, T)>,
    ) -> Result<(T, Option<(ExpertBalance, f64)>)> {
        let trained = trained(&self.adapters, &self.parameters);
        let mut recorded = RecordedResponses::new(&self.policy, packed)?;
        let own_tokens = recorded.read_tokens();
        let coef = match self.config.router_aux_loss_coef {
            0. => 0.,
            coef => coef * own_tokens / read_tokens,
        };
        let balance = recorded.balance_experts(coef)?;
        let held = hold_output(&self.policy)?;
        let weight = output_weight(&self.policy, trained);
        let output = Output {
            policy: &self.policy,
            config: &self.config,
            states: &recorded.states,
            weight: &weight,
            gradients: &mut self.descent.gradients,
        };
        let found = loss(output);
        drop((weight, held));
        let gradients = &mut self.descent.gradients;
        let (states_gradient, result) = found.inspect_err(|_| gradients.clear())?;
        recorded.backward(states_gradient, trained, gradients)?;
        Ok((result, balance.map(|balance| (balance, own_tokens))))
    }

    /// Clips the gradients to the norm `max_norm`, makes an optimizer step and clears the
    /// gradients.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no gradients, and [`NotFinite`](crate::NotFinite) if one is
    /// not finite. The parameters are then unchanged.
    pub fn clip_grad_and_step(&mut self, max_norm: f64) -> Result<StepStats> {
        let trained = trained(&self.adapters, &self.parameters);
        let stats = self.descent.step(trained, &self.copies, max_norm, "");
        stats.context("optimizer step")
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

    /// Multiplies the accumulated gradients by `factor`.
    ///
    /// # Errors
    ///
    /// If the device has no memory for one more gradient.
    pub fn scale_grad(&mut self, factor: f64) -> Result<()> {
        Ok(self.descent.gradients.scale(factor)?)
    }

    /// Clears the accumulated gradients.
    pub fn zero_grad(&mut self) {
        self.descent.gradients.clear();
    }

    /// Sets the learning rate of the next steps.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.descent.optimizer.set_learning_rate(learning_rate);
    }

    /// Sets the coefficient of the entropy bonus for the next steps, see
    /// [`AdaptiveEntropy`](candle_grpo_loss::AdaptiveEntropy).
    pub fn set_entropy_coef(&mut self, entropy_coef: f64) {
        self.config.policy_loss.entropy_coef = entropy_coef;
    }

    /// Returns the parameters of the policy; with adapters, the frozen base. If ranks
    /// [divide](AdamWConfig::divide) the f32 weights, these are rounded. If they divide
    /// [all weights](Parameters::is_full), these have values only while they are
    /// [held](Self::hold_weights).
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Returns the adapters, if they train in place of the parameters.
    pub fn adapters(&self) -> Option<&Lora> {
        self.adapters.as_ref()
    }

    /// Returns the accumulated gradients.
    pub fn gradients(&self) -> &Gradients {
        &self.descent.gradients
    }

    /// Returns the optimizer.
    pub fn optimizer(&self) -> &AdamW {
        &self.descent.optimizer
    }

    /// Returns the mutable optimizer, for example to load its state.
    pub fn optimizer_mut(&mut self) -> &mut AdamW {
        &mut self.descent.optimizer
    }

    /// Sets all trained parameters to `values`.
    pub(crate) fn set_trained(&self, values: &HashMap<String, Tensor>) -> Result<()> {
        self.trained().set_values(values)?;
        Ok(self.copies.refresh()?)
    }

    /// Sets all trained parameters to those in a safetensors file, of a model with this decoder.
    pub(crate) fn set_trained_from(
        &self,
        path: &Path,
        decoder: Option<&DecoderConfig>,
    ) -> Result<()> {
        self.trained().set_values_from(path, decoder)?;
        Ok(self.copies.refresh()?)
    }

    /// Returns the trained parameters: the adapters, if there are any.
    pub(crate) fn trained(&self) -> &Parameters {
        trained(&self.adapters, &self.parameters)
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ActorConfig {
        &self.config
    }
}

impl Actor {
    /// Computes `loss` of the output layer of the policy at `states`, in a pass of several
    /// policies with adapters.
    pub(super) fn at_states<T>(
        &mut self,
        states: &Tensor,
        loss: impl FnOnce(Output<'_, Decoder>) -> Result<T>,
    ) -> Result<T> {
        let weight = output_weight(&self.policy, self.trained());
        loss(Output {
            policy: &self.policy,
            config: &self.config,
            states,
            weight: &weight,
            gradients: &mut self.descent.gradients,
        })
    }

    /// Returns the adapters with their accumulated gradients.
    pub(super) fn adapters_and_gradients(&mut self) -> Result<(&Lora, &mut Gradients)> {
        let adapters = self.adapters.as_ref();
        let adapters = adapters.context("adapters: absent, must be given")?;
        Ok((adapters, &mut self.descent.gradients))
    }
}

/// The output layer of a policy in a pass that trains it.
pub(super) struct Output<'a, M> {
    pub(super) policy: &'a M,
    pub(super) config: &'a ActorConfig,
    /// The states that predict the trained tokens, `[B, T, H]`, as a variable.
    pub(super) states: &'a Tensor,
    /// The output weight, as a variable if it trains.
    pub(super) weight: &'a Tensor,
    gradients: &'a mut Gradients,
}

impl<M: LanguageModel> Output<'_, M> {
    /// Creates the layer, see [`output_layer`]. It adds the gradient of its weight to that of
    /// earlier passes, if there is one.
    pub(super) fn layer(
        &self,
        responses: (&Tensor, Option<&Tensor>),
        temperature: f64,
    ) -> Result<LinearLogProb> {
        let layer = output_layer(
            self.policy,
            self.states,
            self.weight,
            responses,
            temperature,
        )?;
        match self.gradients.get(self.policy.output_name()) {
            Some(sum) => Ok(layer.with_weight_sum(sum)?),
            None => Ok(layer),
        }
    }

    /// Computes `policy_loss` at `targets` `[1, M]`, and accumulates the gradient of the output
    /// weight. Returns the gradient of the states, and the loss with the log-probs `[1, M]`.
    pub(super) fn policy_loss(
        mut self,
        policy_loss: &PolicyLoss,
        targets: &Tensor,
        batch: &PolicyBatch,
        totals: &StepTotals,
    ) -> Result<(Option<Tensor>, (Tensor, Tensor))> {
        let layer = self.layer((targets, None), 1.)?;
        let found = linear_policy_loss(policy_loss, &layer, batch, totals)?;
        drop(layer);
        self.add(found.gradients.weight)?;
        let result = (found.output.loss, found.tokens.log_probs);
        Ok((found.gradients.hidden, result))
    }

    /// Accumulates a gradient of the output weight.
    pub(super) fn add(&mut self, weight_gradient: Option<Tensor>) -> Result<()> {
        if let Some(gradient) = weight_gradient {
            self.gradients.add(self.policy.output_name(), &gradient)?;
        }
        Ok(())
    }

    /// Computes the divergence of `tokens` from one of their teachers.
    fn distill(
        &self,
        loss: &DistillationLoss,
        (name, teacher): (&str, &TeacherDistributions),
        tokens: &TokenBatch,
        totals: &StepTotals,
    ) -> Result<LinearDistillationOutput> {
        let student = OutputLayer {
            logit_cap: self.policy.logit_cap(),
            ..OutputLayer::new(self.states, self.weight)
        };
        let mask = tokens.mask_of(|sequence| sequence.teacher() == Some(name))?;
        teacher.over(self.weight.dim(0)?, loss.support, |teacher| {
            let found = linear_distillation_loss(loss, &student, &teacher, &mask, totals);
            Ok(found?)
        })
    }
}

/// Returns the parameters that train: the adapters, if there are any.
fn trained<'a>(adapters: &'a Option<Lora>, parameters: &'a Parameters) -> &'a Parameters {
    adapters.as_ref().map_or(parameters, Lora::parameters)
}

/// Builds the policy that trains.
fn build<C: ModelConfig>(model: &C, vb: VarBuilder, config: &ActorConfig) -> Result<C::Model> {
    let (checkpointing, offloading) = (
        config.activation_checkpointing,
        config.activation_offloading,
    );
    ensure_offloading(checkpointing, offloading)?;
    Ok(match checkpointing {
        checkpointing if checkpointing.is_off() => model.build(vb)?,
        checkpointing => model.build_checkpointed(vb, checkpointing, offloading)?,
    })
}

/// Checks that there are inputs of layers to move to main memory.
pub(crate) fn ensure_offloading(
    checkpointing: ActivationCheckpointing,
    offloading: bool,
) -> Result<()> {
    Ok(check::check(
        !offloading || !checkpointing.is_off(),
        "activation_offloading",
        offloading,
        "be false unless activation_checkpointing is true or a number of layers",
    )?)
}

fn ensure_f32(config: &ActorConfig) -> Result<()> {
    Ok(check::check(
        config.compute_dtype == ComputeDType::F32,
        "compute_dtype",
        format!("{:?}", config.compute_dtype),
        "be F32 for a custom model",
    )?)
}

/// The options of an optimizer that are bf16, of those that may be f32 or bf16.
pub(crate) fn in_bf16(optimizer: &AdamWConfig) -> impl Iterator<Item = &'static str> {
    let AdamWConfig {
        master_weights,
        gradient_dtype,
        ..
    } = optimizer;
    let options = [
        ("master_weights", *master_weights == MasterWeights::Bf16),
        ("gradient_dtype", *gradient_dtype == GradientDType::Bf16),
    ];
    options
        .into_iter()
        .filter_map(|(option, is_bf16)| is_bf16.then_some(option))
}

/// Checks that an optimizer with master weights or gradient sums in bf16 trains all weights of a
/// policy that computes in bf16.
pub(crate) fn ensure_dtypes(
    optimizer: &AdamWConfig,
    compute_dtype: ComputeDType,
    has_adapters: bool,
) -> Result<()> {
    for option in in_bf16(optimizer) {
        let field = format!("optimizer.{option}");
        let must = "be f32 with adapters, which are small";
        check::check(!has_adapters, &field, "bf16", must)?;
        let valid = compute_dtype == ComputeDType::Bf16;
        let must = format!(
            "be f32 unless compute_dtype is bf16; it is {}",
            Name(&compute_dtype)
        );
        check::check(valid, &field, "bf16", &must)?;
    }
    Ok(())
}

/// Checks the settings of an optimizer in host memory.
pub(crate) fn ensure_memory(
    optimizer: &AdamWConfig,
    has_adapters: bool,
    sharding: Sharding,
) -> Result<()> {
    if optimizer.memory == StateMemory::Device {
        return Ok(());
    }
    let refuse = |valid: bool, must: &str| check::check(valid, "optimizer.memory", "host", must);
    refuse(
        !has_adapters,
        "be device with adapters, whose state is small",
    )?;
    Ok(refuse(
        sharding != Sharding::Optimizer,
        "be device with sharding: optimizer; resident and full divide what is in host memory, too",
    )?)
}

/// Returns whether ranks divide the weights of a policy that train, if there is more than one.
pub(crate) fn divides_weights(
    optimizer: &AdamWConfig,
    compute_dtype: ComputeDType,
    has_adapters: bool,
    sharding: Sharding,
) -> bool {
    match sharding {
        _ if has_adapters => false,
        Sharding::Full => true,
        Sharding::Resident => {
            compute_dtype != ComputeDType::F32 && optimizer.master_weights == MasterWeights::F32
        }
        _ => false,
    }
}

/// Returns the division of the weights of a policy, which trains with `optimizer` and computes in
/// `dtype`, between ranks; of the frozen ones under adapters. `None` if they do not divide them.
pub(crate) fn division(
    optimizer: &AdamWConfig,
    dtype: ComputeDType,
    has_adapters: bool,
    ranks: (&Arc<dyn Collective>, Sharding),
) -> Option<WeightDivision> {
    match (has_adapters, ranks.1) {
        (false, _) => optimizer.division(dtype.into(), ranks),
        (true, Sharding::Full) => WeightDivision::frozen(dtype.into(), ranks.0),
        (true, _) => None,
    }
}

/// Checks the settings of ranks that divide all weights, if they do.
pub(crate) fn ensure_dense(sharding: Sharding, base_weights: BaseWeights) -> Result<()> {
    Ok(check::check(
        sharding != Sharding::Full || base_weights == BaseWeights::Dense,
        "base_weights",
        Name(&base_weights),
        "be dense with sharding: full, which divides numbers, not blocks of them",
    )?)
}

/// Returns the form of the linear maps of a policy in memory, and the dtype of its other weights:
/// that of the computation under adapters, otherwise that of the master weights.
pub(crate) fn stored_form(
    base_weights: BaseWeights,
    compute_dtype: ComputeDType,
    has_adapters: bool,
    optimizer: &AdamWConfig,
) -> (BaseWeights, ComputeDType) {
    match (has_adapters, optimizer.master_weights) {
        (true, _) => (base_weights, compute_dtype),
        (false, MasterWeights::F32) => (BaseWeights::Dense, ComputeDType::F32),
        (false, MasterWeights::Bf16) => (BaseWeights::Dense, ComputeDType::Bf16),
    }
}

/// Checks that a model whose experts are balanced has some.
fn ensure_balanced(model: &DecoderConfig, config: &ActorConfig) -> Result<()> {
    Ok(check::check(
        config.router_aux_loss_coef == 0. || model.has_experts(),
        "router_aux_loss_coef",
        config.router_aux_loss_coef,
        "be 0 for a model without experts",
    )?)
}

/// Computes [`sum_of_squared_probs`] of `states` `[N, H]` under the output weight `[V, H]` and the
/// soft cap of the logits, in pieces of `size` rows, without the logits of all rows at once.
fn squared_probs_in_pieces(
    states: &Tensor,
    (weight, logit_cap): (&Tensor, Option<f64>),
    temperature: f64,
    size: usize,
) -> candle_core::Result<Tensor> {
    let n = states.dim(0)?;
    let pieces = (0..n)
        .step_by(size)
        .map(|start| {
            let states = states.narrow(0, start, size.min(n - start))?;
            let logits = states.matmul(&weight.t()?)?;
            let logits = soft_cap(&logits, logit_cap)?;
            sum_of_squared_probs(&logits, temperature)
        })
        .collect::<candle_core::Result<Vec<_>>>()?;
    Tensor::cat(&pieces, 0)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn pieces_make_what_one_product_makes() -> candle_core::Result<()> {
        let states = Tensor::randn(0f32, 1., (7, 4), &Device::Cpu)?;
        let weight = Tensor::randn(0f32, 1., (5, 4), &Device::Cpu)?;
        let whole = sum_of_squared_probs(&states.matmul(&weight.t()?)?, 0.7)?.to_vec1::<f32>()?;
        for size in [1, 2, 7, 20] {
            let found = squared_probs_in_pieces(&states, (&weight, None), 0.7, size)?;
            for (found, whole) in found.to_vec1::<f32>()?.iter().zip(&whole) {
                assert!((found - whole).abs() < 1e-6);
            }
            assert_eq!(found.dims(), [7]);
        }
        Ok(())
    }
}

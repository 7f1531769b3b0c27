//! The models of a run.

use std::cell::OnceCell;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use candle_grpo_collective::{Alone, Collective};
use candle_grpo_core::validate::check;
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{BaseWeights, DecoderConfig, Lora, LoraConfig, ModelConfig, Parameters};

use super::actor::{division, ensure_dense};
use super::needs::{Needs, Source};
use super::teachers::{TeacherPart, Teachers};
use super::{Ranks, Reference, ReferenceRefresh};
use crate::checksums::{sha256_of_parameters, sha256_of_whole_parameters};
use crate::rollout::PolicyWeights;
use crate::{
    Actor, ActorConfig, Critic, Interrupted, Progress, Sampler, SamplingConfig, TrainConfig,
};

/// The policy that trains, and the models that its update is computed from.
pub struct Models<C: ModelConfig = DecoderConfig> {
    pub(crate) model: C,
    /// The policy.
    pub actor: Actor<C::Model>,
    /// The reference, if an input comes from it.
    pub reference: Option<Reference<C::Model>>,
    /// Schedule that moves the reference toward the policy; absent if the reference is frozen.
    pub(crate) reference_refresh: Option<ReferenceRefresh>,
    /// The policies to learn from.
    pub(crate) teachers: Teachers<C::Model>,
    /// The critic of [`TrainConfig::critic`].
    pub critic: Option<Critic>,
    /// True if the last [`update`](super::step::update) has changed weights.
    pub(super) updated: bool,
    /// The hash of the weights at the start of the run, once it is computed.
    pub(crate) base_sha256: OnceCell<String>,
}

impl<C: ModelConfig> Models<C> {
    /// Creates the models of the settings, of which the policy starts from `parameters`, of shape
    /// `model`.
    ///
    /// # Errors
    ///
    /// If the settings are not valid for the model.
    pub fn new(model: C, parameters: Parameters, config: &TrainConfig) -> Result<Self> {
        let alone: Arc<dyn Collective> = Arc::new(Alone);
        Self::with_needs(model, parameters, config, Needs::new(config, None), &alone)
    }

    /// [`Self::new`] for an algorithm with these needs, on one of the ranks in `collective`.
    pub(super) fn with_needs(
        model: C,
        parameters: Parameters,
        config: &TrainConfig,
        needs: Needs,
        collective: &Arc<dyn Collective>,
    ) -> Result<Self> {
        config.validate_with(needs)?;
        config.micro_batches()?;
        if model.decoder().is_none() {
            config.validate_custom_model()?;
        }
        check(
            !config.router_replay || model.decoder().is_some_and(DecoderConfig::has_experts),
            "router_replay",
            true,
            "be false for a model without experts",
        )?;
        let has_states = model.decoder().is_some_and(DecoderConfig::has_states);
        check(
            config.sequence_ranks == 1 || !has_states,
            "sequence_ranks",
            config.sequence_ranks,
            "be 1 for a model with a gated delta rule, whose states follow one another",
        )?;
        let adapters = config.adapters.clone();
        let adapters = adapters.map(|adapters| (adapters, config.base_weights));
        let seed = config.sampling.seed;
        let ranks = (collective, config.sharding);
        let actor = new_actor(&model, parameters, adapters, seed, config.actor(), ranks)?;
        let critic = model.decoder().zip(config.critic.clone());
        let critic = critic
            .map(|(model, critic)| Critic::sharded(model, actor.parameters(), critic, ranks))
            .transpose()?;
        let reference = needs
            .reads(Source::Reference)
            .then(|| actor.reference_of(&model, config.reference_refresh.is_some()));
        let reference = reference.transpose()?;
        let models = Self {
            reference,
            reference_refresh: config.reference_refresh,
            critic,
            ..Self::of_actor(model, actor)
        };
        models.hash_divided_base()?;
        Ok(models)
    }

    /// A policy of shape `model` without other models.
    pub(crate) fn of_actor(model: C, actor: Actor<C::Model>) -> Self {
        Self {
            model,
            actor,
            reference: None,
            reference_refresh: None,
            teachers: Teachers::default(),
            critic: None,
            updated: false,
            base_sha256: OnceCell::new(),
        }
    }

    /// Checks that all ranks have the weights of rank 0 after `steps` steps, bit-identically.
    ///
    /// # Errors
    ///
    /// If a rank differs.
    pub(crate) fn ensure_equal(&self, ranks: &Ranks, steps: usize) -> Result<()> {
        if ranks.is_alone() {
            return Ok(());
        }
        let mut own = format!("step {steps}");
        let critic = self.critic.as_ref().map(Critic::parameters);
        for parameters in [Some(self.actor.trained()), critic].into_iter().flatten() {
            let sha256 = if parameters.is_full() {
                sha256_of_whole_parameters(parameters)?
            } else {
                sha256_of_parameters(parameters)?
            };
            own += &format!(", sha256 {sha256}");
        }
        if let Some((rank, [own, first])) = ranks.first_difference(own)? {
            bail!(
                "weights: those of rank {rank} ({own}) differ from those of rank 0 ({first}), must be the same on all ranks"
            );
        }
        Ok(())
    }

    /// The weights of the policy, for a generator.
    pub(crate) fn weights(&self, version: u64) -> PolicyWeights<'_, C> {
        PolicyWeights {
            version,
            model: &self.model,
            parameters: self.actor.parameters(),
            adapters: self.actor.adapters(),
        }
    }

    /// Returns a sampler that shares the parameters of the policy.
    ///
    /// # Errors
    ///
    /// If `config` is not valid.
    pub fn sampler(&self, config: SamplingConfig) -> Result<Sampler<C>> {
        self.actor.sampler_of(&self.model, config)
    }

    /// Sets the policy to learn from. A custom loop passes the teacher of each completion to
    /// [`StepBatch::with_teachers`](super::step::StepBatch::with_teachers).
    ///
    /// # Errors
    ///
    /// If there are several teachers that are not valid: none, one without a name, one that is
    /// several, or the policy itself more than once. Also if the device runs out of memory for a
    /// copy of the policy.
    pub fn learn_from(&mut self, teacher: &TeacherPart) -> Result<()> {
        self.teachers = Teachers::new(teacher, (&self.model, &self.actor))?;
        self.hash_divided_base()
    }

    /// Lets the reference and the teacher follow the policy after step `step`, if it is due.
    pub(super) fn refresh_copies(&mut self, step: usize) -> Result<()> {
        if let (Some(refresh), Some(reference)) = (self.reference_refresh, &mut self.reference)
            && refresh.is_due(step)
        {
            reference.refresh(self.actor.parameters(), refresh.alpha)?;
        }
        if let Some(teacher) = self.teachers.own_mut() {
            teacher.refresh(step, &self.actor)?;
        }
        Ok(())
    }

    /// Discards all gradients.
    pub(crate) fn zero_grad(&mut self) {
        self.actor.zero_grad();
        if let Some(critic) = &mut self.critic {
            critic.zero_grad();
        }
    }
}

/// Creates a policy that starts from `parameters`, on one of the ranks, which divide what belongs
/// to it. With adapters these train; the linear maps under them are in the given form, and other
/// weights in the dtype of the computation.
pub(crate) fn new_actor<C: ModelConfig>(
    model: &C,
    parameters: Parameters,
    adapters: Option<(LoraConfig, BaseWeights)>,
    seed: u64,
    config: ActorConfig,
    ranks: (&Arc<dyn Collective>, Sharding),
) -> Result<Actor<C::Model>> {
    let (parameters, adapters) = match (model.decoder(), adapters) {
        (Some(decoder), Some((adapters, base))) => {
            let adapters = Lora::init(adapters, decoder, seed, parameters.device());
            let adapters = adapters.context("adapters")?;
            ensure_dense(ranks.1, base)?;
            let parameters = parameters.frozen_as(decoder, base, config.compute_dtype.into())?;
            let division = division(&config.optimizer, config.compute_dtype, true, ranks);
            let parameters = match division.filter(|_| !parameters.is_divided()) {
                Some(division) => parameters.divided(&division)?,
                None => parameters,
            };
            (parameters, Some(adapters))
        }
        (Some(_), None) => {
            let dtype = config.compute_dtype.into();
            let divided = config.optimizer.divide(parameters, dtype, ranks)?;
            (divided, None)
        }
        (None, _) => (parameters, None),
    };
    Actor::sharded(model.clone(), parameters, adapters, config, ranks)
}

/// Returns [`Interrupted`] as an error if `progress` cancels.
pub(crate) fn ensure_not_canceled(progress: &dyn Progress) -> Result<()> {
    if progress.is_canceled() {
        Err(Interrupted.into())
    } else {
        Ok(())
    }
}

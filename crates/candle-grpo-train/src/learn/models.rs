//! The models of a run.

use std::cell::OnceCell;

use anyhow::{Context, Result, ensure};
use candle_grpo_nn::{DecoderConfig, Lora, Parameters};

use super::recipe_inputs::RecipeInputs;
use super::{Reference, ReferenceRefresh};
use crate::rollout::PolicyWeights;
use crate::{Actor, Critic, Interrupted, Progress, TrainConfig};

/// The policy that trains, and the models that its update is computed from.
pub(crate) struct Models {
    pub(crate) actor: Actor,
    pub(crate) reference: Option<Reference>,
    /// Schedule that moves the reference toward the policy; absent if the reference is frozen.
    pub(crate) reference_refresh: Option<ReferenceRefresh>,
    pub(crate) teacher: Option<Reference>,
    pub(crate) critic: Option<Critic>,
    /// The hash of the weights at the start of the run, once it is computed.
    pub(crate) base_sha256: OnceCell<String>,
}

impl Models {
    pub(super) fn new(
        model: DecoderConfig,
        parameters: Parameters,
        config: &TrainConfig,
        inputs: RecipeInputs,
    ) -> Result<Self> {
        ensure!(
            !config.router_replay || model.has_experts(),
            "router_replay: true, must be false for a model without experts"
        );
        let actor = match config.adapters.clone() {
            None => Actor::new(model, parameters, config.actor())?,
            Some(adapters) => {
                let (seed, device) = (config.sampling.seed, parameters.device());
                let adapters = Lora::init(adapters, &model, seed, device).context("adapters")?;
                let (base, dtype) = config.stored_form();
                let parameters = parameters.frozen_as(&model, base, dtype.into())?;
                Actor::with_adapters(model, parameters, adapters, config.actor())?
            }
        };
        let reference = inputs.reference.then(|| actor.reference()).transpose()?;
        let critic = config
            .critic
            .clone()
            .map(|critic| Critic::new(actor.model(), actor.parameters(), critic))
            .transpose()?;
        Ok(Self {
            actor,
            reference,
            reference_refresh: config.reference_refresh,
            teacher: None,
            critic,
            base_sha256: OnceCell::new(),
        })
    }

    /// The weights of the policy, for a generator.
    pub(crate) fn weights(&self, version: u64) -> PolicyWeights<'_> {
        PolicyWeights {
            version,
            model: self.actor.model(),
            parameters: self.actor.parameters(),
            adapters: self.actor.adapters(),
        }
    }

    /// Lets the reference follow the policy after step `step`, if it is due.
    pub(super) fn refresh_reference(&mut self, step: usize) -> Result<()> {
        if let (Some(refresh), Some(reference)) = (self.reference_refresh, &mut self.reference)
            && step.is_multiple_of(refresh.every_steps)
        {
            reference.refresh(self.actor.parameters(), refresh.alpha)?;
        }
        Ok(())
    }

    /// Discards all gradients.
    pub(super) fn zero_grad(&mut self) {
        self.actor.zero_grad();
        if let Some(critic) = &mut self.critic {
            critic.zero_grad();
        }
    }
}

/// Returns [`Interrupted`] as an error if `progress` cancels.
pub(super) fn ensure_not_canceled(progress: &dyn Progress) -> Result<()> {
    match progress.is_canceled() {
        true => Err(Interrupted.into()),
        false => Ok(()),
    }
}

//! The reference policy of the KL term.

use std::collections::HashMap;

use anyhow::{Result, bail, ensure};
use candle_core::Tensor;
use candle_grpo_core::validate;
use candle_grpo_nn::{
    ComputeCopies, ComputeDType, Decoder, LanguageModel, ModelConfig, Parameters,
};
use serde::{Deserialize, Serialize};

use crate::detached::model_in;
use crate::sequence::response_forward::{predicting_states, response_log_probs};
use crate::teacher::{Teacher, TeacherDistributions};
use crate::{Progress, TokenBatch};

/// A policy that changes only in [`Self::refresh`] and when it is replaced.
pub struct Reference<M = Decoder> {
    model: M,
    /// A copy of the parameters; absent if the reference shares the base of the adapters.
    parameters: Option<Parameters>,
    /// Low-precision copies of the parameters, unless it computes in f32.
    copies: ComputeCopies,
}

/// A schedule that moves the reference toward the policy: `alpha * policy + (1 - alpha) *
/// reference`.
///
/// TR-DPO, <https://arxiv.org/abs/2404.09656>; TRL's `sync_ref_model`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReferenceRefresh {
    /// Interval in training steps.
    pub every_steps: usize,
    /// Weight of the policy, in (0, 1]. The default 1 copies the policy.
    #[serde(default = "crate::one")]
    pub alpha: f64,
}

impl ReferenceRefresh {
    /// Checks the fields.
    ///
    /// # Errors
    ///
    /// Returns an error for a value that would never refresh the reference.
    pub fn validate(&self) -> Result<()> {
        validate::at_least_one("every_steps", self.every_steps)?;
        ensure_share(self.alpha)
    }
}

fn ensure_share(alpha: f64) -> Result<()> {
    Ok(validate::share("alpha", alpha)?)
}

impl<M: LanguageModel> Reference<M> {
    /// Creates a reference from a copy of `parameters` that computes in `dtype`.
    pub fn new<C: ModelConfig<Model = M>>(
        model: &C,
        parameters: &Parameters,
        dtype: ComputeDType,
    ) -> Result<Self> {
        let parameters = match model.decoder() {
            Some(decoder) => {
                let tensors = parameters.iter();
                let tensors = tensors
                    .map(|(name, variable)| (name.to_owned(), variable.as_detached_tensor()))
                    .collect();
                Parameters::from_tensors(decoder, tensors, parameters.device())?
            }
            None => parameters.copy_to(parameters.device())?,
        };
        let (model, copies) = model_in(model, &parameters, None, dtype)?;
        Ok(Self {
            model,
            parameters: Some(parameters),
            copies,
        })
    }

    /// Creates a reference that is the policy without its adapters.
    ///
    /// `parameters` must not change. They are not copied if they have this dtype.
    pub fn without_adapters<C: ModelConfig<Model = M>>(
        model: &C,
        parameters: &Parameters,
        dtype: ComputeDType,
    ) -> Result<Self> {
        let (model, copies) = model_in(model, parameters, None, dtype)?;
        Ok(Self {
            model,
            parameters: None,
            copies,
        })
    }

    /// Returns the log-probs of the responses of `batch` at `temperature`, f32 `[B, T]`, detached.
    pub fn log_probs(&self, batch: &TokenBatch, temperature: f64) -> Result<Tensor> {
        Ok(response_log_probs(&self.model, &batch.without_experts(), temperature)?.log_probs)
    }

    /// Returns the distributions at the responses of `batch`: hidden states `[B, T, H]` in the
    /// dtype of the computation, and the output weight. States of tokens that are not in the
    /// response mask are not those of their places.
    ///
    /// # Errors
    ///
    /// If the shapes of `batch` do not match, or its masks contradict each other.
    pub fn distributions(&self, batch: &TokenBatch) -> Result<TeacherDistributions> {
        Ok(TeacherDistributions::Hidden {
            hidden: predicting_states(&self.model, &batch.without_experts())?,
            weight: self.model.output_weight().detach(),
            logit_cap: self.model.logit_cap(),
        })
    }

    /// Returns the copy of the parameters, if there is one.
    pub(crate) fn parameters(&self) -> Option<&Parameters> {
        self.parameters.as_ref()
    }

    /// Replaces the parameters.
    pub(crate) fn set_values(&self, values: &HashMap<String, Tensor>) -> Result<()> {
        let Some(parameters) = &self.parameters else {
            bail!("reference: a policy without its adapters, which does not change");
        };
        parameters.set_values(values)?;
        Ok(self.copies.refresh()?)
    }

    /// Sets the reference to `alpha * policy + (1 - alpha) * reference`.
    ///
    /// # Errors
    ///
    /// Returns an error if `alpha` is not in (0, 1], `policy` has other parameters, or the
    /// reference is a policy without its adapters.
    pub fn refresh(&mut self, policy: &Parameters, alpha: f64) -> Result<()> {
        ensure_share(alpha)?;
        let Some(parameters) = &self.parameters else {
            bail!("reference: a policy without its adapters, which does not change");
        };
        ensure!(
            policy.len() == parameters.len(),
            "policy: {} parameters, must be {}, as the reference has",
            policy.len(),
            parameters.len()
        );
        for (name, own) in parameters.iter() {
            let Some(other) = policy.get(name) else {
                bail!("policy: lacks {name}, which the reference has");
            };
            let other = other.as_detached_tensor();
            if alpha == 1. {
                own.set(&other)?;
            } else {
                own.set(&((own.as_detached_tensor() * (1. - alpha))? + (other * alpha)?)?)?;
            }
        }
        self.copies.refresh()?;
        Ok(())
    }
}

impl<M: LanguageModel + Send + Sync> Teacher for Reference<M> {
    fn log_probs(&self, batch: &TokenBatch, temperature: f64, _: &dyn Progress) -> Result<Tensor> {
        Self::log_probs(self, batch, temperature)
    }

    fn distributions(
        &self,
        batch: &TokenBatch,
        _: Option<usize>,
        _: &dyn Progress,
    ) -> Result<TeacherDistributions> {
        Self::distributions(self, batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use candle_grpo_nn::DecoderConfig;

    fn model(hidden_size: usize) -> DecoderConfig {
        DecoderConfig {
            vocab_size: 5,
            hidden_size,
            intermediate_size: 8,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            max_position_embeddings: 8,
            tie_word_embeddings: true,
            ..DecoderConfig::default()
        }
    }

    fn drawn(seed: u64) -> Parameters {
        Parameters::init(&model(8), seed, &Device::Cpu).unwrap()
    }

    fn values(parameters: &Parameters, name: &str) -> Vec<f32> {
        let values = parameters.get(name).unwrap().flatten_all().unwrap();
        values.to_vec1().unwrap()
    }

    #[test]
    fn a_refresh_mixes_the_policy_into_the_reference() {
        let (start, policy) = (drawn(1), drawn(2));
        let mut reference = Reference::new(&model(8), &start, ComputeDType::F32).unwrap();
        reference.refresh(&policy, 0.25).unwrap();
        let name = "model.layers.0.mlp.up_proj.weight";
        let mixed = values(reference.parameters.as_ref().unwrap(), name);
        for ((new, old), policy) in mixed
            .iter()
            .zip(values(&start, name))
            .zip(values(&policy, name))
        {
            assert!((new - (0.75 * old + 0.25 * policy)).abs() < 1e-9);
        }
        reference.refresh(&policy, 1.).unwrap();
        for (name, _) in policy.iter() {
            assert_eq!(
                values(reference.parameters.as_ref().unwrap(), name),
                values(&policy, name)
            );
        }
    }

    #[test]
    fn a_refresh_changes_the_log_probs_of_the_reference() {
        let pairs: [(&[u32], &[u32]); 1] = [(&[1, 2], &[3, 4, 0])];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        let log_probs = |reference: &Reference| -> Vec<Vec<f32>> {
            reference.log_probs(&batch, 1.).unwrap().to_vec2().unwrap()
        };
        let expected = log_probs(&Reference::new(&model(8), &drawn(2), ComputeDType::F32).unwrap());
        let mut reference = Reference::new(&model(8), &drawn(1), ComputeDType::F32).unwrap();
        assert_ne!(log_probs(&reference), expected);
        reference.refresh(&drawn(2), 1.).unwrap();
        assert_eq!(log_probs(&reference), expected);
    }

    #[test]
    fn a_refresh_with_other_parameters_is_an_error() {
        let mut reference = Reference::new(&model(8), &drawn(1), ComputeDType::F32).unwrap();
        for alpha in [0., 1.5, f64::NAN] {
            let error = reference.refresh(&drawn(1), alpha).unwrap_err().to_string();
            assert!(error.starts_with("alpha: "), "{error}");
        }
        let mut untied = model(8);
        untied.tie_word_embeddings = false;
        let other = Parameters::init(&untied, 0, &Device::Cpu).unwrap();
        let error = reference.refresh(&other, 1.).unwrap_err().to_string();
        assert!(error.starts_with("policy: "), "{error}");
    }
}

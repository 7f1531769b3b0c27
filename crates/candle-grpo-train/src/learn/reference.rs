//! The KL term's reference policy.

use std::collections::HashMap;

use anyhow::{Result, bail, ensure};
use candle_core::Tensor;
use candle_grpo_core::validate;
use candle_grpo_nn::{
    ComputeCopies, ComputeDType, Decoder, DividedModel, LanguageModel, Lora, ModelConfig,
    Parameters, WeightDivision,
};
use serde::{Deserialize, Serialize};

use crate::detached::model_in;
use crate::sequence::response_forward::{predicting_states, response_log_probs};
use crate::teacher::{Teacher, TeacherDistributions};
use crate::{Progress, TokenBatch};

/// A policy that changes only in [`Self::refresh`] and when it is replaced.
///
/// [`Self::fixed`] never changes, so it keeps its weights in the compute dtype only: 2 bytes per
/// parameter in bf16, where [`Self::new`] takes 6.
pub struct Reference<M = Decoder> {
    model: M,
    /// The most tokens that the model can read.
    longest_row: usize,
    /// Copies of the parameters, or of the adapters that it follows; absent if the reference
    /// shares another model's.
    parameters: Option<Parameters>,
    /// Copies of the parameters in the compute dtype, if [`Self::refresh`] may change them.
    copies: Option<ComputeCopies>,
}

/// A schedule that moves the reference toward the policy: `alpha * policy + (1 - alpha) *
/// reference`.
///
/// TR-DPO, <https://arxiv.org/abs/2404.09656>; TRL's `sync_ref_model`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ReferenceRefresh {
    /// Interval in training steps.
    pub every_steps: usize,
    /// Policy weight, in (0, 1]. The default 1 copies the policy.
    #[serde(default = "crate::one")]
    pub alpha: f64,
}

impl ReferenceRefresh {
    /// Returns whether the reference changes after step `step`.
    pub(super) fn is_due(&self, step: usize) -> bool {
        step.is_multiple_of(self.every_steps)
    }

    /// Checks the fields.
    ///
    /// # Errors
    ///
    /// Fails for a value that would never refresh the reference.
    pub fn validate(&self) -> Result<()> {
        validate::at_least_one("every_steps", self.every_steps)?;
        ensure_share(self.alpha)
    }
}

fn ensure_share(alpha: f64) -> Result<()> {
    Ok(validate::share("alpha", alpha)?)
}

impl<M: LanguageModel> Reference<M> {
    /// Creates a reference from a copy of `parameters` in f32 that computes in `dtype`. It can
    /// follow the policy.
    pub fn new<C: ModelConfig<Model = M>>(
        model: &C,
        parameters: &Parameters,
        dtype: ComputeDType,
    ) -> Result<Self> {
        Self::following(model, parameters, None, dtype)
    }

    /// Creates a reference that can follow a policy of `parameters` and `adapters`, and computes in
    /// `dtype`. With adapters these are copied, and `parameters` are shared, which must not change.
    /// Otherwise it is [`Self::new`].
    ///
    /// # Errors
    ///
    /// Fails if `adapters` belong to another model.
    pub(super) fn following<C: ModelConfig<Model = M>>(
        model: &C,
        parameters: &Parameters,
        adapters: Option<&Lora>,
        dtype: ComputeDType,
    ) -> Result<Self> {
        let (own, (built, copies)) = match adapters {
            None => {
                let own = copy_in(model, parameters, ComputeDType::F32)?;
                let built = model_in(model, &own, None, dtype)?;
                (own, built)
            }
            Some(adapters) => {
                let own = adapters.copy_to(parameters.device())?;
                let built = model_in(model, parameters, Some(&own), dtype)?;
                (own.parameters().clone(), built)
            }
        };
        Ok(Self {
            model: built,
            longest_row: model.max_positions(),
            parameters: Some(own),
            copies: Some(copies),
        })
    }

    /// Creates a reference from a copy of `parameters` in `dtype`. [`Self::refresh`] is an error.
    pub fn fixed<C: ModelConfig<Model = M>>(
        model: &C,
        parameters: &Parameters,
        dtype: ComputeDType,
    ) -> Result<Self> {
        let parameters = copy_in(model, parameters, dtype)?;
        let shared = Self::shared(model, &parameters, dtype)?;
        Ok(Self {
            parameters: Some(parameters),
            ..shared
        })
    }

    /// Creates a reference that reads `parameters`, which must not change: the policy without its
    /// adapters, or a teacher that was loaded [frozen](crate::Pretrained::load_frozen).
    ///
    /// Parameters in `dtype` and quantized blocks are not copied. [`Self::refresh`] is an error.
    pub fn shared<C: ModelConfig<Model = M>>(
        model: &C,
        parameters: &Parameters,
        dtype: ComputeDType,
    ) -> Result<Self> {
        Self::with_adapters(model, parameters, None, dtype)
    }

    /// Creates a reference that reads `parameters`, with `adapters` if there are any. Neither must
    /// change.
    ///
    /// # Errors
    ///
    /// Fails if `adapters` belong to another model.
    pub fn with_adapters<C: ModelConfig<Model = M>>(
        model: &C,
        parameters: &Parameters,
        adapters: Option<&Lora>,
        dtype: ComputeDType,
    ) -> Result<Self> {
        let (built, _) = model_in(model, parameters, adapters, dtype)?;
        Ok(Self {
            model: built,
            longest_row: model.max_positions(),
            parameters: None,
            copies: None,
        })
    }

    /// Returns the log-probs for the responses in `batch` at `temperature`, f32 `[B, T]`, detached.
    pub fn log_probs(&self, batch: &TokenBatch, temperature: f64) -> Result<Tensor> {
        Ok(response_log_probs(&self.model, &batch.without_experts(), temperature)?.log_probs)
    }

    /// Returns the distributions at the responses in `batch`: hidden states `[B, T, H]` in the
    /// compute dtype, and the output weight. States outside the response mask are undefined.
    ///
    /// # Errors
    ///
    /// Fails if the shapes in `batch` do not match, or its masks contradict each other.
    pub fn distributions(&self, batch: &TokenBatch) -> Result<TeacherDistributions> {
        let hidden = predicting_states(&self.model, &batch.without_experts())?;
        if self.model.divided().is_some() {
            bail!(
                "teacher: its weights are divided between ranks, must be whole for distributions"
            );
        }
        Ok(TeacherDistributions::Hidden {
            hidden,
            weight: self.model.output_weight().detach(),
            logit_cap: self.model.logit_cap(),
        })
    }

    /// Returns the copies of parameters or adapters, if there are any.
    pub(crate) fn parameters(&self) -> Option<&Parameters> {
        self.parameters.as_ref()
    }

    /// The parameters and their copies, of a reference that may change.
    fn changing(&self) -> Result<(&Parameters, &ComputeCopies)> {
        match (&self.parameters, &self.copies) {
            (Some(parameters), Some(copies)) => Ok((parameters, copies)),
            _ => bail!("reference: fixed, must be created by Reference::new to change"),
        }
    }

    /// Replaces the parameters.
    pub(crate) fn set_values(&self, values: &HashMap<String, Tensor>) -> Result<()> {
        let (parameters, copies) = self.changing()?;
        parameters.set_values(values)?;
        Ok(copies.refresh()?)
    }

    /// Sets the reference to `alpha * policy + (1 - alpha) * reference`.
    ///
    /// # Errors
    ///
    /// Fails if `alpha` is not in (0, 1], `policy` has other parameters, or the reference is
    /// [fixed](Self::fixed) or [shared](Self::shared).
    pub fn refresh(&mut self, policy: &Parameters, alpha: f64) -> Result<()> {
        ensure_share(alpha)?;
        let (parameters, copies) = self.changing()?;
        mix(parameters, policy, alpha)?;
        Ok(copies.refresh()?)
    }
}

/// Sets `parameters` to `alpha * policy + (1 - alpha) * parameters`.
fn mix(parameters: &Parameters, policy: &Parameters, alpha: f64) -> Result<()> {
    ensure!(
        policy.len() == parameters.len(),
        "policy: {} parameters, must be {}, as the reference has",
        policy.len(),
        parameters.len()
    );
    for (name, own) in parameters.iter() {
        if policy.get(name).is_none() {
            bail!("policy: lacks {name}, which the reference has");
        }
        let other = policy.whole(name)?.to_device(own.device())?;
        let other = other.to_dtype(own.dtype())?;
        if alpha == 1. {
            own.set(&other)?;
        } else {
            own.set(&((own.as_detached_tensor() * (1. - alpha))? + (other * alpha)?)?)?;
        }
    }
    Ok(())
}

/// Copies `parameters` in `dtype`; those of a custom model keep theirs. Ranks divide the copy as
/// they do the parameters.
fn copy_in<C: ModelConfig>(
    model: &C,
    parameters: &Parameters,
    dtype: ComputeDType,
) -> Result<Parameters> {
    let collective = parameters.collective().filter(|_| parameters.is_full());
    let division = collective.and_then(|ranks| WeightDivision::frozen(dtype.into(), ranks));
    Ok(match model.decoder() {
        Some(decoder) if let Some(division) = &division => {
            parameters.copy_divided(decoder, division)?
        }
        Some(_) => parameters.to_dtype(dtype.into())?,
        None => parameters.copy_to(parameters.device())?,
    })
}

impl<M: LanguageModel + Send + Sync> Teacher for Reference<M> {
    fn longest_row(&self) -> usize {
        self.longest_row
    }

    fn divided(&self) -> Option<&DividedModel> {
        self.model.divided()
    }

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

    /// The log-probs of an answer.
    fn log_probs(reference: &Reference) -> Vec<Vec<f32>> {
        let pairs: [(&[u32], &[u32]); 1] = [(&[1, 2], &[3, 4, 0])];
        let batch = TokenBatch::new(&pairs, &Device::Cpu).unwrap();
        reference.log_probs(&batch, 1.).unwrap().to_vec2().unwrap()
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
        let expected = log_probs(&Reference::new(&model(8), &drawn(2), ComputeDType::F32).unwrap());
        let mut reference = Reference::new(&model(8), &drawn(1), ComputeDType::F32).unwrap();
        assert_ne!(log_probs(&reference), expected);
        reference.refresh(&drawn(2), 1.).unwrap();
        assert_eq!(log_probs(&reference), expected);
    }

    #[test]
    fn a_fixed_reference_has_the_weights_in_its_dtype_only() {
        let start = drawn(1);
        let count = start.num_elements();
        for (dtype, bytes) in [
            (ComputeDType::F32, 4),
            (ComputeDType::Bf16, 2),
            (ComputeDType::F16, 2),
        ] {
            let expected = log_probs(&Reference::new(&model(8), &start, dtype).unwrap());
            let fixed = Reference::fixed(&model(8), &start, dtype).unwrap();
            let own = fixed.parameters().unwrap();
            assert_eq!(own.num_bytes(), bytes * count, "{dtype:?}");
            assert!(fixed.copies.is_none());
            let frozen = start.to_dtype(dtype.into()).unwrap();
            let shared = Reference::shared(&model(8), &frozen, dtype).unwrap();
            assert_eq!(log_probs(&shared), expected, "{dtype:?}");
            // The policy trains, and the fixed reference stays.
            let trained = start.to_dtype(start.dtype()).unwrap();
            let other = Reference::fixed(&model(8), &trained, dtype).unwrap();
            let now = drawn(2).frozen_copy().unwrap();
            trained.set_values(&now).unwrap();
            for reference in [&fixed, &other] {
                assert_eq!(log_probs(reference), expected, "{dtype:?}");
            }
        }
    }

    #[test]
    fn a_fixed_or_shared_reference_cannot_follow_the_policy() {
        let parameters = drawn(1);
        let make = [Reference::fixed, Reference::shared];
        for reference in make.map(|make| make(&model(8), &parameters, ComputeDType::F32)) {
            let error = reference.unwrap().refresh(&drawn(2), 1.).unwrap_err();
            assert_eq!(
                error.to_string(),
                "reference: fixed, must be created by Reference::new to change"
            );
        }
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

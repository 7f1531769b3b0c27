//! The base model that all adapters share.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use candle_core::Device;
use candle_grpo_base::server::Refusal;
use candle_grpo_nn::{BaseWeights, DecoderConfig, Lora, LoraConfig, Parameters};
use candle_grpo_train::rollout::DecodeText;
use candle_grpo_train::{ComputeDType, Pretrained};

use crate::store::ModelRecord;

/// `lora_alpha` for all adapters, as in Tinker's service.
const LORA_ALPHA: f64 = 32.;

/// The base model without its weights.
#[derive(Debug, Clone)]
pub(crate) struct BaseInfo {
    /// Name for clients.
    pub(crate) name: String,
    pub(crate) model: DecoderConfig,
    /// Tokens that end a sample.
    pub(crate) stop_token_ids: Vec<u32>,
}

/// The base model.
pub(crate) struct Base {
    pub(crate) info: BaseInfo,
    pub(crate) parameters: Parameters,
    /// Converts tokens to text, in which samples end at stop strings.
    pub(crate) decode: Arc<DecodeText>,
    pub(crate) dtype: ComputeDType,
}

impl Base {
    /// Freezes a model.
    pub(crate) fn new(name: String, pretrained: Pretrained, dtype: ComputeDType) -> Result<Self> {
        let (model, tokenizer) = (pretrained.model, pretrained.tokenizer);
        let parameters = pretrained.parameters;
        let parameters = parameters.frozen_as(&model, BaseWeights::Stored, dtype.into());
        Ok(Self {
            parameters: parameters.context("the base model")?,
            decode: Arc::new(move |tokens| {
                let text = tokenizer.decode(tokens, false);
                text.map_err(|error| anyhow!("tokens without a text: {error}"))
            }),
            info: BaseInfo {
                name,
                model,
                stop_token_ids: pretrained.special_tokens.stop_token_ids,
            },
            dtype,
        })
    }
}

impl BaseInfo {
    /// Checks a request's `base_model`.
    pub(crate) fn ensure_name(&self, name: &str) -> Result<(), Refusal> {
        if name == self.name {
            return Ok(());
        }
        let must = format!("be {:?}, the model of this server", self.name);
        Err(Refusal::invalid("base_model", name, &must))
    }

    /// Checks tokens that the model reads or scores.
    pub(crate) fn ensure_tokens(&self, name: &str, ids: &[u32]) -> Result<(), Refusal> {
        if ids.is_empty() {
            return Err(Refusal::invalid(name, "[]", "have at least one token"));
        }
        let vocab_size = self.model.vocab_size;
        match ids.iter().position(|&id| id as usize >= vocab_size) {
            None => Ok(()),
            Some(at) => {
                let must = format!("be below the vocabulary size {vocab_size}");
                Err(Refusal::invalid(&format!("{name}[{at}]"), ids[at], &must))
            }
        }
    }

    /// Returns a model's adapter options.
    pub(crate) fn lora(&self, record: &ModelRecord) -> Result<LoraConfig> {
        self.lora_of(record.rank, record.train_attn, record.train_mlp)
    }

    /// Returns adapters that change nothing.
    ///
    /// vLLM needs them for samples of the base model: on the CPU, it gives a request without an
    /// adapter the one of another request in its batch (vLLM 0.32).
    pub(crate) fn identity(&self) -> Result<Lora> {
        let config = self.lora_of(1, true, false)?;
        Ok(Lora::init(config, &self.model, 0, &Device::Cpu)?)
    }

    fn lora_of(&self, rank: usize, of_attention: bool, of_others: bool) -> Result<LoraConfig> {
        let all = LoraConfig::all_linear(rank, LORA_ALPHA);
        let maps: BTreeSet<String> = all
            .parameter_shapes(&self.model)?
            .keys()
            .filter(|name| {
                let is_attention = name.split('.').any(|part| part.ends_with("attn"));
                (is_attention && of_attention) || (!is_attention && of_others)
            })
            .filter_map(|name| name.rsplit('.').nth(2).map(str::to_owned))
            .collect();
        let config = LoraConfig {
            target_modules: maps.into_iter().collect(),
            ..all
        };
        config.validate(&self.model)?;
        Ok(config)
    }
}

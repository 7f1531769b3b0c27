//! Settings with which a run fits into memory.

use anyhow::Result;
use candle_grpo_nn::optim::{MasterWeights, Sharding, StateForm};
use candle_grpo_nn::{
    ActivationCheckpointing, BaseWeights, ComputeDType, DecoderConfig, LoraConfig,
};

use super::memory_plan::{MemoryPlan, Update};
use super::train_config::MICRO_BATCH_SIZE;
use crate::TrainConfig;
use crate::bisection::largest;

/// The chosen number of tokens is a multiple of this one.
const ROUND: usize = 64;

/// The memory that a run may take.
///
/// ```
/// use candle_grpo_nn::DecoderConfig;
/// use candle_grpo_train::TrainConfig;
/// use candle_grpo_train::learn::{MemoryFit, MemoryPlan};
///
/// let model = DecoderConfig { vocab_size: 1000, hidden_size: 64, intermediate_size: 128,
///     num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2,
///     ..DecoderConfig::default() };
/// let plan = |config: &TrainConfig| MemoryPlan::new(&model, config, 100, 0);
/// let fit = MemoryFit { bytes: 1 << 30, model: &model, prompt_tokens: 100, plan: &plan };
/// let tokens = fit.micro_batch_tokens(&TrainConfig::default())?;
/// assert!(tokens.is_some_and(|tokens| tokens % 64 == 0));
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct MemoryFit<'a> {
    /// The largest peak of a plan.
    pub bytes: usize,
    /// The model that trains.
    pub model: &'a DecoderConfig,
    /// The number of tokens of the longest prompt.
    pub prompt_tokens: usize,
    /// Returns the plan of a run with other settings.
    pub plan: &'a dyn Fn(&TrainConfig) -> Result<MemoryPlan>,
}

impl MemoryFit<'_> {
    /// Returns [`TrainConfig::micro_batch_tokens`] that fit, by bisection: a multiple of 64, of
    /// which the next one does not fit, or all tokens of an update. `None` if the longest
    /// sequence alone does not fit.
    ///
    /// # Errors
    ///
    /// If the settings are not valid with a number of tokens.
    pub fn micro_batch_tokens(&self, config: &TrainConfig) -> Result<Option<usize>> {
        let update = Update::new(config, self.prompt_tokens);
        let fitting = largest(
            rounds(update.longest()),
            rounds(update.tokens()),
            |rounds| {
                let plan = (self.plan)(&with_tokens(config, rounds * ROUND))?;
                Ok(plan.peak() <= self.bytes)
            },
        )?;
        Ok(fitting.map(|rounds| rounds * ROUND))
    }

    /// Returns the settings to change so that the run fits, each as `key: value`. A single change
    /// comes before several, and one that keeps the update before one that does not. `None` if no
    /// such change is enough.
    pub fn smallest_change(&self, config: &TrainConfig) -> Option<Vec<String>> {
        let fits = |config: &TrainConfig| {
            let plan = (self.plan)(config);
            plan.is_ok_and(|plan| plan.peak() <= self.bytes)
        };
        let update = Update::new(config, self.prompt_tokens);
        let least = rounds(update.longest()) * ROUND;
        let smallest = with_tokens(config, least);
        let is_auto = config.fits_micro_batches();
        if !is_auto && let Ok(Some(tokens)) = self.micro_batch_tokens(config) {
            return Some(vec![format!("micro_batch_tokens: {tokens}")]);
        }
        let base = if is_auto { &smallest } else { config };
        let layers = 1..=self.model.num_hidden_layers;
        let layers = layers.map(ActivationCheckpointing::Layers);
        let checkpointing = layers.into_iter().find(|&activation_checkpointing| {
            fits(&TrainConfig {
                activation_checkpointing,
                ..base.clone()
            })
        });
        if let Some(layers) = checkpointing {
            return Some(vec![format!("activation_checkpointing: {layers}")]);
        }
        if let Some(mib) = self.max_cache_mib(base) {
            return Some(vec![format!("sampling.max_cache_mib: {mib}")]);
        }
        let mut batch_size = base.sampling.max_batch_size / 2;
        while batch_size > 0 {
            let mut changed = base.clone();
            changed.sampling.max_batch_size = batch_size;
            if fits(&changed) {
                return Some(vec![format!("sampling.max_batch_size: {batch_size}")]);
            }
            batch_size /= 2;
        }
        for (text, change) in CHANGES {
            let mut changed = base.clone();
            change(&mut changed);
            if fits(&changed) {
                return Some(vec![(*text).to_owned()]);
            }
        }
        let mut changed = TrainConfig {
            activation_checkpointing: true.into(),
            ..base.clone()
        };
        let mut texts = vec!["activation_checkpointing: true".to_owned()];
        let bounded = with_tokens(&changed, least);
        if !is_auto && (self.plan)(&bounded).is_ok() {
            changed = bounded;
            texts.push(format!("micro_batch_tokens: {least}"));
        }
        for (text, change) in CHANGES {
            if fits(&changed) {
                break;
            }
            let mut next = changed.clone();
            change(&mut next);
            // Some settings exclude each other, and one rank divides nothing.
            let Ok(plan) = (self.plan)(&next) else {
                continue;
            };
            let is_smaller = |than: MemoryPlan| plan.peak() < than.peak();
            if next.sharding == changed.sharding || (self.plan)(&changed).is_ok_and(is_smaller) {
                // What ranks divide has one name.
                texts.retain(|text| {
                    !text.starts_with(SHARDING) || next.sharding == changed.sharding
                });
                changed = next;
                texts.push((*text).to_owned());
            }
        }
        fits(&changed).then_some(texts)
    }

    /// Returns the largest cache that fits, if it has room for one completion.
    fn max_cache_mib(&self, config: &TrainConfig) -> Option<usize> {
        let lengths = (self.prompt_tokens, config.sampling.max_new_tokens);
        let dtype = config.rollout_dtype().into();
        let one = self.model.cache_bytes((1, 1), lengths, dtype);
        let most = (self.plan)(config).ok()?.sampling >> 20;
        let fitting = largest(one.div_ceil(1 << 20).max(1), most, |mib| {
            let mut changed = config.clone();
            changed.sampling.max_cache_mib = Some(mib);
            Ok((self.plan)(&changed)?.peak() <= self.bytes)
        });
        fitting.ok().flatten()
    }
}

/// The key of what ranks divide.
const SHARDING: &str = "sharding:";

type Change = fn(&mut TrainConfig);

/// Changes of the run itself, from the one that changes it least.
const CHANGES: [(&str, Change); 7] = [
    ("sharding: optimizer", |config| {
        if config.sharding == Sharding::None {
            config.sharding = Sharding::Optimizer;
        }
    }),
    ("sharding: resident", |config| {
        config.sharding = Sharding::Resident;
    }),
    ("optimizer.state: 8bit", |config| {
        config.optimizer.state = StateForm::Blocks8;
    }),
    ("compute_dtype: bf16", |config| {
        config.compute_dtype = ComputeDType::Bf16;
    }),
    ("optimizer.master_weights: bf16", |config| {
        config.optimizer.master_weights = MasterWeights::Bf16;
    }),
    ("adapters: {rank: 16, alpha: 32}", |config| {
        config.optimizer.master_weights = MasterWeights::F32;
        config.adapters = Some(LoraConfig::all_linear(16, 32.));
    }),
    ("base_weights: q4_k", |config| {
        config.base_weights = BaseWeights::Q4K;
    }),
];

fn rounds(tokens: usize) -> usize {
    tokens.div_ceil(ROUND).max(1)
}

/// Returns the settings with micro-batches of this number of tokens.
fn with_tokens(config: &TrainConfig, tokens: usize) -> TrainConfig {
    TrainConfig {
        micro_batch_size: MICRO_BATCH_SIZE,
        micro_batch_tokens: Some(tokens.into()),
        ..config.clone()
    }
}

//! Settings with which a run fits into memory.

use anyhow::Result;
use candle_grpo_core::validate::Name;
use candle_grpo_kernels::cuda_is_enabled;
use candle_grpo_nn::optim::{GradientDType, MasterWeights, Sharding, StateForm, StateMemory};
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
/// let fit =
///     MemoryFit { bytes: 1 << 30, host_bytes: None, model: &model, prompt_tokens: 100, plan: &plan };
/// let tokens = fit.micro_batch_tokens(&TrainConfig::default())?;
/// assert!(tokens.is_some_and(|tokens| tokens % 64 == 0));
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct MemoryFit<'a> {
    /// The largest peak of a plan.
    pub bytes: usize,
    /// The largest [`MemoryPlan::host`] of a plan. Absent: no limit.
    pub host_bytes: Option<usize>,
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
                Ok(self.holds(&plan))
            },
        )?;
        Ok(fitting.map(|rounds| rounds * ROUND))
    }

    /// Returns the settings to change so that the run fits, each as `key: value`. A single change
    /// comes before several, and one that keeps the update before one that does not. `None` if no
    /// such change is enough.
    pub fn smallest_change(&self, config: &TrainConfig) -> Option<Vec<String>> {
        let update = Update::new(config, self.prompt_tokens);
        let least = rounds(update.longest()) * ROUND;
        let base = if config.fits_micro_batches() {
            with_tokens(config, least)
        } else {
            config.clone()
        };
        let changed = self.one_change(&base);
        let changed = changed.or_else(|| self.several_changes(&base, least))?;
        Some(differences(&base, &changed))
    }

    fn one_change(&self, base: &TrainConfig) -> Option<TrainConfig> {
        if let Ok(Some(tokens)) = self.micro_batch_tokens(base) {
            return Some(with_tokens(base, tokens));
        }
        let with = |change: &dyn Fn(&mut TrainConfig)| {
            let mut changed = base.clone();
            change(&mut changed);
            self.fits(&changed).then_some(changed)
        };
        let unmerged = base
            .rollout
            .merge_adapters
            .then(|| with(&|config| config.rollout.merge_adapters = false))
            .flatten();
        let mut layers = (1..=self.model.num_hidden_layers).map(ActivationCheckpointing::Layers);
        let checkpointed =
            layers.find_map(|layers| with(&|config| config.activation_checkpointing = layers));
        let batch_size = base.sampling.max_batch_size;
        let halves = std::iter::successors(Some(batch_size / 2), |size| Some(size / 2));
        let mut halves = halves.take_while(|&size| size > 0);
        unmerged
            .or(checkpointed)
            .or_else(|| {
                let mib = self.max_cache_mib(base)?;
                with(&|config| config.sampling.max_cache_mib = Some(mib))
            })
            .or_else(|| {
                halves.find_map(|size| with(&|config| config.sampling.max_batch_size = size))
            })
            .or_else(|| divisions(base).find(|divided| self.fits(divided)))
            .or_else(|| with(&|config| config.activation_offloading = true))
            .or_else(|| with(&to_host))
            .or_else(|| CHANGES.iter().find_map(|change| with(change)))
    }

    fn several_changes(&self, base: &TrainConfig, least: usize) -> Option<TrainConfig> {
        let mut changed = TrainConfig {
            activation_checkpointing: true.into(),
            ..base.clone()
        };
        changed.rollout.merge_adapters = false;
        let bounded = with_tokens(&changed, least);
        if self.peak(&bounded).is_some() {
            changed = bounded;
        }
        for divided in divisions(&changed.clone()) {
            self.replace_larger(&mut changed, divided);
        }
        // Main memory may have room for the inputs of layers, for the optimizer, or for both.
        let with_all_inputs = changed.clone();
        let offloaded = TrainConfig {
            activation_offloading: true,
            ..changed.clone()
        };
        self.replace_larger(&mut changed, offloaded);
        for mut on_host in [changed.clone(), with_all_inputs] {
            to_host(&mut on_host);
            self.replace_larger(&mut changed, on_host);
        }
        for change in CHANGES {
            let mut next = changed.clone();
            change(&mut next);
            // Some settings exclude each other.
            if self.peak(&next).is_some() && !self.fits(&changed) {
                changed = next;
            }
        }
        self.fits(&changed).then_some(changed)
    }

    /// Replaces settings that do not fit with others that take less. One rank divides nothing, and
    /// on the CPU there is no other memory.
    fn replace_larger(&self, changed: &mut TrainConfig, other: TrainConfig) {
        let is_smaller = self
            .peak(&other)
            .is_some_and(|peak| Some(peak) < self.peak(changed));
        if is_smaller && !self.fits(changed) {
            *changed = other;
        }
    }

    /// The peak of the plan. `None` if the settings are not valid, or the plan takes too much main
    /// memory beside a GPU.
    fn peak(&self, config: &TrainConfig) -> Option<usize> {
        let plan = (self.plan)(config).ok()?;
        self.has_main_memory(&plan).then(|| plan.peak())
    }

    fn fits(&self, config: &TrainConfig) -> bool {
        (self.plan)(config).is_ok_and(|plan| self.holds(&plan))
    }

    fn holds(&self, plan: &MemoryPlan) -> bool {
        self.has_main_memory(plan) && plan.peak() <= self.bytes
    }

    fn has_main_memory(&self, plan: &MemoryPlan) -> bool {
        self.host_bytes.is_none_or(|free| plan.host <= free)
    }

    /// Returns the largest cache that fits, if it has room for one completion.
    fn max_cache_mib(&self, config: &TrainConfig) -> Option<usize> {
        let lengths = (self.prompt_tokens, config.sampling.max_new_tokens);
        let dtype = config.rollout_dtype().into();
        let one = self
            .model
            .cache_bytes((1, 1), lengths, dtype, cuda_is_enabled());
        let most = (self.plan)(config).ok()?.sampling >> 20;
        let fitting = largest(one.div_ceil(1 << 20).max(1), most, |mib| {
            let mut changed = config.clone();
            changed.sampling.max_cache_mib = Some(mib);
            Ok(self.holds(&(self.plan)(&changed)?))
        });
        fitting.ok().flatten()
    }
}

/// Returns the settings with which ranks divide more, from the one that divides least.
fn divisions(config: &TrainConfig) -> impl Iterator<Item = TrainConfig> {
    let more: &[Sharding] = match config.sharding {
        Sharding::None => &[Sharding::Optimizer, Sharding::Resident, Sharding::Full],
        Sharding::Optimizer => &[Sharding::Resident, Sharding::Full],
        Sharding::Resident => &[Sharding::Full],
        _ => &[],
    };
    more.iter().map(|&sharding| TrainConfig {
        sharding,
        ..config.clone()
    })
}

/// Moves the optimizer to main memory, which takes time but does not change the update.
fn to_host(config: &mut TrainConfig) {
    config.optimizer.memory = StateMemory::Host;
}

/// Changes of the run itself, from the one that changes it least.
const CHANGES: [fn(&mut TrainConfig); 6] = [
    |config| config.optimizer.state = StateForm::Blocks8,
    |config| config.compute_dtype = ComputeDType::Bf16,
    |config| config.optimizer.master_weights = MasterWeights::Bf16,
    |config| config.optimizer.gradient_dtype = GradientDType::Bf16,
    |config| {
        config.optimizer.master_weights = MasterWeights::F32;
        config.optimizer.gradient_dtype = GradientDType::F32;
        config.optimizer.memory = StateMemory::Device;
        let all = || LoraConfig::all_linear(16, 32.);
        config.adapters.get_or_insert_with(all);
    },
    |config| config.base_weights = BaseWeights::Q4K,
];

/// Returns the settings in which `changed` differs from `base`, each as `key: value`.
fn differences(base: &TrainConfig, changed: &TrainConfig) -> Vec<String> {
    let pairs = settings(changed).into_iter().zip(settings(base));
    let differ = pairs.filter(|(changed, base)| changed != base);
    differ
        .map(|((key, value), _)| format!("{key}: {value}"))
        .collect()
}

/// The settings that a change may name, with their values.
fn settings(config: &TrainConfig) -> [(&'static str, String); 15] {
    let (sampling, optimizer) = (&config.sampling, &config.optimizer);
    let tokens = config.micro_batch_tokens.as_ref();
    let adapters = config.adapters.as_ref();
    let adapters =
        adapters.map(|LoraConfig { rank, alpha, .. }| format!("{{rank: {rank}, alpha: {alpha}}}"));
    let null = || "null".to_owned();
    [
        (
            "activation_checkpointing",
            config.activation_checkpointing.to_string(),
        ),
        (
            "activation_offloading",
            config.activation_offloading.to_string(),
        ),
        ("micro_batch_size", config.micro_batch_size.to_string()),
        (
            "micro_batch_tokens",
            tokens.map_or_else(null, |tokens| Name(tokens).to_string()),
        ),
        (
            "sampling.max_cache_mib",
            (sampling.max_cache_mib).map_or_else(null, |mib| mib.to_string()),
        ),
        (
            "sampling.max_batch_size",
            sampling.max_batch_size.to_string(),
        ),
        (
            "rollout.merge_adapters",
            config.rollout.merge_adapters.to_string(),
        ),
        ("sharding", Name(&config.sharding).to_string()),
        ("optimizer.memory", Name(&optimizer.memory).to_string()),
        ("optimizer.state", Name(&optimizer.state).to_string()),
        ("compute_dtype", Name(&config.compute_dtype).to_string()),
        (
            "optimizer.master_weights",
            Name(&optimizer.master_weights).to_string(),
        ),
        (
            "optimizer.gradient_dtype",
            Name(&optimizer.gradient_dtype).to_string(),
        ),
        ("adapters", adapters.unwrap_or_else(null)),
        ("base_weights", Name(&config.base_weights).to_string()),
    ]
}

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

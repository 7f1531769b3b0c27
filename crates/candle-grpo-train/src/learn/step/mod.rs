//! The five functions in a step, which [`Trainer`](crate::Trainer) calls in this order.
//!
//! Call them yourself to change a step: to sample elsewhere, to add an input, or to replace one
//! function. Otherwise use [`Trainer`](crate::Trainer).
//!
//! | function | adds |
//! | --- | --- |
//! | [`collect`] | completions for some prompts |
//! | [`score`] | their rewards |
//! | [`signals`] | the inputs that advantages and loss need, from the models in [`Models`](crate::learn::Models) |
//! | [`advantages`] | the advantages, and for a critic the returns |
//! | [`update`] | optimizer steps for the policy and the critic |
//!
//! The first two work on [`RolloutGroups`], on any thread, and the others on a [`StepBatch`], which
//! you create from the groups.
//!
//! ```
//! use candle_core::Device;
//! use candle_grpo_nn::{DecoderConfig, Parameters};
//! use candle_grpo_train::learn::step::{self, Needs, Passes, StepBatch};
//! use candle_grpo_train::learn::{Models, Ranks, TrainerState};
//! use candle_grpo_train::model::character_tokenizer;
//! use candle_grpo_train::{Prompt, Sample, SamplingConfig, TrainConfig};
//!
//! # fn main() -> anyhow::Result<()> {
//! let tokenizer = character_tokenizer("ab")?;
//! let model = DecoderConfig { vocab_size: tokenizer.get_vocab_size(true), hidden_size: 8,
//!     intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2,
//!     num_key_value_heads: 1, ..DecoderConfig::default() };
//! let parameters = Parameters::init(&model, 7, &Device::Cpu)?;
//! let prompt = Prompt::new(0, "ab", serde_json::json!({}), &tokenizer)?;
//! let config = TrainConfig {
//!     prompts_per_step: 1,
//!     num_generations: 4,
//!     sampling: SamplingConfig { max_new_tokens: 4, stop_token_ids: vec![0], ..SamplingConfig::default() },
//!     ..TrainConfig::default()
//! };
//! let mut models = Models::new(model, parameters, &config)?;
//! let mut state = TrainerState::new(&config);
//! state.steps += 1;
//!
//! let sampler = models.sampler(config.sampling.clone())?;
//! let prompts = [&prompt];
//! let mut groups = step::collect(&sampler, &prompts, config.num_generations, 1)?;
//! // A reward of another length for each completion.
//! let reward = |sample: &Sample| sample.completion_tokens.iter().map(|&x| x as f32).sum::<f32>();
//! step::score(&mut groups, &prompts, &reward, &config.sampling, &tokenizer)?;
//!
//! let ranks = Ranks::default();
//! let passes = Passes::new(&config, &ranks)?;
//! let mut batch = StepBatch::new(groups, &config, &Device::Cpu)?;
//! step::signals(&mut batch, Needs::new(&config, None).all(), &models, &config, passes)?;
//! step::advantages(&mut batch, None, &config, &mut state)?;
//! let updates = step::update(Some(&batch), &mut models, None, &config, &mut state, passes)?;
//! assert_eq!(updates.updates, 1);
//! # Ok(())
//! # }
//! ```

mod advantages;
mod collect;
mod joined_rows;
mod signals;
mod update;

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::selection::{FilterBatch, SampleFilter};
use candle_grpo_core::{Mask, MetricValue, MetricValues};

pub use super::micro_batches::MicroBatches as Passes;
pub use super::needs::Needs;
pub use super::rollout_groups::RolloutGroups;
pub use super::teachers::TaughtBy;
pub use advantages::advantages;
pub use collect::{collect, score};
use joined_rows::JoinedRows;
pub use signals::signals;
pub use update::{Updates, update};

use crate::{FinishReason, TokenBatch, TrainConfig};

/// A step's completions on the policy's device, and the values that the step functions add: one
/// tensor `[B]` or `[S, T]` per input, the advantages, and metrics.
///
/// Each of the B completions is a trajectory. It is one of the S sequences, or several if it has
/// [branches](crate::Rollout::branches).
#[derive(Debug, Clone)]
pub struct StepBatch {
    groups: RolloutGroups,
    /// The tokens of the S sequences.
    tokens: TokenBatch,
    trajectories: JoinedRows,
    inputs: BTreeMap<Input, Tensor>,
    /// Inputs that [`signals`] has tried to compute. Not all are present.
    computed: Inputs,
    /// Tokens that a rollout correction keeps, if it has filters.
    kept: Option<Tensor>,
    /// The weights `[B]` of the completions in the policy term.
    sample_weights: Option<Tensor>,
    /// The weights `[S, T]` of the tokens in the loss.
    token_weights: Option<Tensor>,
    advantages: Option<Tensor>,
    returns: Option<Tensor>,
    metrics: MetricValues,
}

impl StepBatch {
    /// Creates the batch from scored completions. With [`TrainConfig::router_replay`], it includes
    /// the experts that the policy replays. Completions without a score, and those that
    /// [`TrainConfig::sample_filters`] drop, have no token to train on. Synchronizes with the
    /// device.
    ///
    /// # Errors
    ///
    /// Fails if there are no completions or no scores, or one has no tokens or lacks its experts.
    pub fn new(groups: RolloutGroups, config: &TrainConfig, device: &Device) -> Result<Self> {
        let tokens = if config.router_replay {
            TokenBatch::replaying(&groups.rollouts, device).context("router_replay")?
        } else {
            TokenBatch::from_rollouts(&groups.rollouts, device)?
        };
        let tokens = if config.recipe.policy_loss.observation_coef > 0. {
            tokens.with_observations()?
        } else {
            tokens
        };
        let trajectories = JoinedRows::of_trajectories(&groups.rollouts, &tokens)?;
        let mask = trajectories.join(tokens.response_mask())?;
        let keep = kept(&config.sample_filters, &groups, &mask)?;
        let keep = keep.into_iter().zip(groups.is_scored());
        let keep = trajectories.repeat(keep.map(|(keep, is_scored)| keep && is_scored));
        Ok(Self {
            tokens: tokens.keeping(keep)?,
            trajectories,
            groups,
            inputs: BTreeMap::new(),
            computed: Inputs::NONE,
            kept: None,
            sample_weights: None,
            token_weights: None,
            advantages: None,
            returns: None,
            metrics: MetricValues::default(),
        })
    }

    /// Returns the completions and their scores.
    pub fn groups(&self) -> &RolloutGroups {
        &self.groups
    }

    /// Returns the sequences, in which the tokens that train have a weight.
    pub fn tokens(&self) -> &TokenBatch {
        &self.tokens
    }

    /// Returns an input that [`signals`] has added, `[B]` or `[S, T]`.
    pub fn input(&self, input: Input) -> Option<&Tensor> {
        self.inputs.get(&input)
    }

    /// Adds or replaces an input, `[B]` or `[S, T]`. [`signals`] does not compute inputs that are
    /// already present.
    #[must_use]
    pub fn with_input(mut self, input: Input, tensor: Tensor) -> Self {
        self.inputs.insert(input, tensor);
        self.computed = self.computed | input.into();
        self
    }

    /// Sets the weights of the completions in the policy term, `[B]`. Denominators do not change,
    /// so use weights whose mean is 1.
    #[must_use]
    pub fn with_sample_weights(mut self, weights: Tensor) -> Self {
        self.sample_weights = Some(weights);
        self
    }

    /// Sets the weights of the tokens, `[S, T]`, in every term of the policy loss except the
    /// entropy and the observations. Denominators do not change.
    #[must_use]
    pub fn with_token_weights(mut self, weights: Tensor) -> Self {
        self.token_weights = Some(weights);
        self
    }

    /// Sets the teacher of each completion; `None` for those without one. Without this call, all
    /// have the same teacher, which reads what the policy does.
    ///
    /// # Errors
    ///
    /// Fails if there is not one for each completion, or a sequence does not begin with the prompt
    /// for which its teacher reads another.
    pub fn with_teachers(
        mut self,
        teachers: impl IntoIterator<Item = Option<TaughtBy>>,
    ) -> Result<Self> {
        let teachers: Vec<Option<TaughtBy>> = teachers.into_iter().collect();
        let completions = self.groups.rollouts.len();
        ensure!(
            teachers.len() == completions,
            "teachers: {}, must be one for each of {completions} completions",
            teachers.len()
        );
        let taught = teachers.iter().flatten().count();
        if taught < completions {
            let (sum, count) = (taught as f64, completions as f64);
            let share = MetricValue::Mean { sum, count };
            self.metrics.insert("teacher_share", share);
        }
        let teachers = self.trajectories.repeat(&teachers);
        let pairs = teachers
            .into_iter()
            .zip(self.tokens.sequences())
            .enumerate();
        let sequences = pairs.map(|(number, (teacher, sequence))| {
            let name = teacher.as_ref().map(|teacher| Arc::clone(&teacher.name));
            let taught = sequence.clone().with_teacher(name);
            let Some((own, read)) = teacher.as_ref().and_then(|x| x.prompt.as_ref()) else {
                return Ok(taught);
            };
            let rest = sequence.prompt().strip_prefix(own.as_slice()).with_context(|| {
                format!("sequence {number}: its prompt does not begin with that of its row, for which the teacher reads another")
            })?;
            taught.with_teacher_prompt(&[read, rest].concat())
        });
        let sequences = sequences.collect::<Result<Vec<_>>>()?;
        self.tokens = self.tokens.with_sequences(sequences);
        Ok(self)
    }

    /// Returns the advantages, f32 `[S]` or `[S, T]`, once [`advantages`] has added them.
    pub fn advantages(&self) -> Option<&Tensor> {
        self.advantages.as_ref()
    }

    /// Returns the metrics that the functions of the step have added.
    pub fn metrics(&self) -> &MetricValues {
        &self.metrics
    }

    /// Returns the reason why no completion trains, with the filters that drop any; `None` if one
    /// trains.
    pub(super) fn why_filtered(&self, config: &TrainConfig) -> Result<Option<String>> {
        if self.tokens.totals().tokens > 0. {
            return Ok(None);
        }
        let tokens = TokenBatch::from_rollouts(&self.groups.rollouts, self.device())?;
        let mask = self.trajectories.join(tokens.response_mask())?;
        let mut causes = Vec::new();
        if !self.groups.is_scored().all(|is_scored| is_scored) {
            causes.push("no score".to_owned());
        }
        for filter in &config.sample_filters {
            if kept(std::slice::from_ref(filter), &self.groups, &mask)?.contains(&false) {
                let filter = serde_json::to_value(filter)?;
                causes.extend(filter["kind"].as_str().map(str::to_owned));
            }
        }
        let completions = self.groups.rollouts.len();
        let causes = causes.join(", ");
        Ok(Some(if causes.is_empty() {
            format!("all {completions} completions are empty")
        } else {
            format!("all {completions} completions filtered ({causes})")
        }))
    }

    fn device(&self) -> &Device {
        self.tokens.targets().device()
    }
}

/// For each completion, whether all filters keep it. `response_mask` has one row per trajectory.
fn kept(
    filters: &[SampleFilter],
    groups: &RolloutGroups,
    response_mask: &Tensor,
) -> Result<Vec<bool>> {
    let device = response_mask.device();
    let rollouts = groups.rollouts.iter();
    let truncated = rollouts.map(|rollout| rollout.completion.finish_reason);
    let truncated = truncated.map(|reason| u8::from(reason == FinishReason::Length));
    let truncated = Tensor::new(truncated.collect::<Vec<_>>(), device)?;
    let batch = FilterBatch {
        scores: &Tensor::new(groups.scores.as_slice(), device)?,
        groups: groups.num_generations.into(),
        response_mask: &Mask::new(response_mask)?,
        truncated: Some(&truncated),
    };
    let keep = SampleFilter::keep_all(filters, &batch)?.to_vec1::<u8>()?;
    Ok(keep.into_iter().map(|keep| keep != 0).collect())
}

/// A metric with one observation.
fn single(sum: f64) -> MetricValue {
    MetricValue::Mean { sum, count: 1. }
}

//! Demonstrations that a teacher samples.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_core::validate::{at_least_one, finite};
use candle_grpo_nn::ModelConfig;
use serde::{Deserialize, Serialize};

use super::PhaseSeconds;
use super::collector::Collector;
use super::demonstrations::{DemonstrationConfig, Demonstrations};
use super::rollout_groups::RolloutGroups;
use crate::{FinishReason, Generator, Progress, Sample, SamplingConfig, Sequence};

/// Demonstrations that the teacher samples, in place of given rows: sequence-level knowledge
/// distillation (<https://arxiv.org/abs/1606.07947>; the loss `sft` in prime-rl).
///
/// The teacher samples completions for each prompt of a step, from the tokens that the policy
/// reads, and an epoch trains on all of them. At a share of 1, a step samples no completions of
/// the policy, unless a critic learns from them.
///
/// ```
/// use candle_grpo_train::learn::TeacherSamplesConfig;
/// use candle_grpo_train::SamplingConfig;
///
/// // Trains on correct answers only.
/// let samples = TeacherSamplesConfig {
///     samples_per_prompt: 4,
///     temperature: Some(0.7),
///     min_reward: Some(1.),
///     ..TeacherSamplesConfig::default()
/// };
/// let sampling = samples.sampling(&SamplingConfig::default());
/// assert_eq!((sampling.temperature, sampling.max_new_tokens), (0.7, 256));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TeacherSamplesConfig {
    /// Number of completions for each prompt of a step.
    pub samples_per_prompt: usize,
    /// Temperature. Absent: that of `sampling`, like the keys below.
    pub temperature: Option<f64>,
    /// Smallest total probability of the tokens to sample from.
    pub top_p: Option<f64>,
    /// Maximum completion length in tokens.
    pub max_new_tokens: Option<usize>,
    /// Smallest reward of a completion to train on (rejection sampling). Absent: all completions
    /// train, and no reward is computed for them.
    pub min_reward: Option<f64>,
}

impl Default for TeacherSamplesConfig {
    fn default() -> Self {
        Self {
            samples_per_prompt: 1,
            temperature: None,
            top_p: None,
            max_new_tokens: None,
            min_reward: None,
        }
    }
}

impl TeacherSamplesConfig {
    /// Checks all fields.
    ///
    /// # Errors
    ///
    /// Fails with the name of the invalid field.
    pub fn validate(&self) -> Result<()> {
        at_least_one("samples_per_prompt", self.samples_per_prompt)?;
        if let Some(reward) = self.min_reward {
            finite("min_reward", reward)?;
        }
        self.sampling(&SamplingConfig::default()).validate()
    }

    /// Returns the sampling settings of the teacher: those of the policy, `rollouts`, unless they
    /// have a field here.
    pub fn sampling(&self, rollouts: &SamplingConfig) -> SamplingConfig {
        SamplingConfig {
            temperature: self.temperature.unwrap_or(rollouts.temperature),
            top_p: self.top_p.unwrap_or(rollouts.top_p),
            max_new_tokens: self.max_new_tokens.unwrap_or(rollouts.max_new_tokens),
            ..rollouts.clone()
        }
    }
}

/// A teacher as the source of a trainer's demonstrations.
pub(super) struct TeacherSampler<C: ModelConfig> {
    /// Samples from the teacher in place of the policy.
    collector: Collector<C>,
    demonstrations: DemonstrationConfig,
    config: TeacherSamplesConfig,
}

/// The demonstrations of a step.
pub(super) struct TeacherSamples {
    /// The completions to train on.
    pub(super) demonstrations: Demonstrations,
    /// The metrics of all completions.
    pub(super) metrics: BTreeMap<String, f64>,
    pub(super) seconds: PhaseSeconds,
}

impl<C: ModelConfig> TeacherSampler<C> {
    /// Creates a sampler for the prompts of `collector`, from a teacher's `generator`.
    pub(super) fn new(
        collector: &Collector<C>,
        generator: Arc<dyn Generator<C>>,
        demonstrations: DemonstrationConfig,
        config: TeacherSamplesConfig,
    ) -> Result<Self> {
        let sampling = config.sampling(&collector.config.sampling);
        let mut collector = collector.of_teacher(generator, sampling)?;
        if config.min_reward.is_none() {
            collector.reward = Arc::new(|_: &Sample| 0f32);
        }
        Ok(Self {
            collector,
            demonstrations,
            config,
        })
    }

    /// Replaces the receiver of progress.
    pub(super) fn set_progress(&self, progress: Arc<dyn Progress>) {
        self.collector.progress.set_receiver(progress);
    }

    /// Samples the demonstrations of step `step` for its prompts, which are at `rows`. If several
    /// ranks share the trainer, all must call it, and each gets the samples of all ranks.
    pub(super) fn draw(&self, step: usize, rows: Vec<usize>) -> Result<TeacherSamples> {
        let mut seconds = PhaseSeconds::default();
        let count = self.config.samples_per_prompt;
        let drawn = self
            .collector
            .draw_of_teacher(step, rows, count, &mut seconds)?;
        let is_kept = |&&score: &&f32| match self.config.min_reward {
            Some(least) => f64::from(score) >= least,
            None => true,
        };
        let kept = drawn.scores.iter().filter(is_kept).count();
        let pairs = drawn.rollouts.iter().zip(&drawn.scores);
        let rows = pairs.filter(|(_, score)| is_kept(score));
        let rows = rows.map(|(rollout, _)| rollout.completion.sequence(&rollout.prompt_tokens));
        let rows: Vec<Sequence> = rows.collect::<Result<_>>()?;
        Ok(TeacherSamples {
            metrics: self.metrics(&drawn, kept),
            demonstrations: Demonstrations::of_step(self.demonstrations, rows),
            seconds,
        })
    }

    /// Returns the metrics of the completions, of which `kept` train.
    fn metrics(&self, drawn: &RolloutGroups, kept: usize) -> BTreeMap<String, f64> {
        let count = drawn.rollouts.len() as f64;
        let completions = || drawn.rollouts.iter().map(|rollout| &rollout.completion);
        let tokens: usize = completions().map(|found| found.tokens.len()).sum();
        let ends = completions().map(|found| found.finish_reason);
        let truncated = ends.filter(|end| *end == FinishReason::Length).count();
        let mut metrics = vec![
            ("demonstration_length", tokens as f64 / count),
            ("demonstration_truncated", truncated as f64 / count),
        ];
        if self.config.min_reward.is_some() {
            let known = drawn.scores.iter().filter(|score| !score.is_nan());
            let known: Vec<f64> = known.copied().map(f64::from).collect();
            if !known.is_empty() {
                let mean = known.iter().sum::<f64>() / known.len() as f64;
                metrics.push(("demonstration_reward", mean));
            }
            metrics.push(("demonstration_kept", kept as f64 / count));
        }
        let metrics = metrics.into_iter();
        metrics
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}

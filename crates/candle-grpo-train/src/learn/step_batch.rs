//! The training batch of a step: from scored completions to advantages and log-probs.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Tensor};
use candle_grpo_core::rewards::{Costs, NonFinite, RunningMoments};
use candle_grpo_core::selection::{FilterBatch, SampleFilter, top_entropy_tokens};
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, Advantages, GroupAdvantage, Mask, MetricValue,
    MetricValues, RewardShaping,
};
use candle_grpo_loss::{EntropyTokens, OldPolicy, PolicyBatch, RolloutCorrection, RolloutWeights};
use candle_grpo_nn::ModelConfig;

use super::critic::explained_variance;
use super::micro_batches::MicroBatches;
use super::models::Models;
use super::recipe_inputs::{RecipeInputs, keeps_components};
use super::scored_rollouts::ScoredRollouts;
use super::staleness::effective_sample_share;
use super::{OldLogProbs, Teacher, rollout_log_probs};
use crate::random::{generator, uniform};
use crate::run::TrainerState;
use crate::{FinishReason, Rollout, Sequence, TokenBatch, TrainConfig, TrainingBatch};

/// The batch that a step trains on.
pub(super) struct StepBatch {
    pub(super) batch: TrainingBatch,
    /// The group of each sequence.
    pub(super) groups: Vec<usize>,
}

/// The result of [`Preparation::prepare`].
pub(super) struct PreparedStep {
    /// The reason why there is none: the filters drop all completions, or all advantages are 0 and
    /// no other term has a signal.
    pub(super) batch: Result<StepBatch, String>,
    /// The state of the run, in which controllers and running moments have advanced.
    pub(super) state: TrainerState,
    /// The metrics of rewards and advantages.
    pub(super) metrics: MetricValues,
    /// The mean advantage of each completion; absent for one that a filter drops.
    pub(super) advantages: Vec<Option<f32>>,
}

/// The computation of a [`StepBatch`].
pub(super) struct Preparation<'a, C: ModelConfig> {
    pub(super) models: &'a Models<C>,
    pub(super) config: &'a TrainConfig,
    pub(super) inputs: RecipeInputs,
    /// A custom estimator in place of the one in the recipe.
    pub(super) estimator: Option<&'a dyn AdvantageEstimator>,
    pub(super) micro_batches: MicroBatches<'a>,
    pub(super) scored: &'a ScoredRollouts,
    pub(super) state: TrainerState,
    pub(super) metrics: MetricValues,
}

/// Log-probs of the tokens of a step, each `[B, T]`.
struct LogProbs {
    /// Absent: the policy has not changed since it drew the tokens.
    old: Option<Tensor>,
    reference: Option<Tensor>,
    teacher: Option<Tensor>,
    rollout: Tensor,
    corrected: Option<RolloutWeights>,
}

impl<C: ModelConfig> Preparation<'_, C> {
    /// Computes the batch.
    pub(super) fn prepare(mut self) -> Result<PreparedStep> {
        let mut advantages = vec![None; self.scored.rollouts.len()];
        let batch = self.step_batch(&mut advantages)?;
        Ok(PreparedStep {
            batch,
            advantages,
            state: self.state,
            metrics: self.metrics,
        })
    }

    /// Sets `sequence_advantages` once they are known.
    fn step_batch(
        &mut self,
        sequence_advantages: &mut Vec<Option<f32>>,
    ) -> Result<Result<StepBatch, String>> {
        let scored = self.scored;
        let device = self.models.actor.parameters().device();
        let scores = Tensor::new(scored.scores.as_slice(), device)?;
        let mut tokens = TokenBatch::from_rollouts(&scored.rollouts, device)?;
        if self.config.router_replay {
            tokens = tokens
                .replaying(&scored.rollouts)
                .context("router_replay")?;
        }
        let keep = self.kept_completions(&tokens, &scores)?;
        let filtered = tokens.clone().keeping(keep)?;
        if filtered.totals().tokens == 0. {
            return Ok(Err(self.why_filtered(&tokens, &scores)?));
        }
        let tokens = filtered;

        let rewards = self.rewards(&tokens)?;
        // A step without a signal saves these passes over the models, unless the advantages need
        // them.
        let early = match self.estimator.is_some() || self.inputs.old_log_probs {
            true => Some(self.log_probs(&tokens)?),
            false => None,
        };
        let values = match &self.models.critic {
            Some(critic) => Some(
                self.micro_batches
                    .map(&tokens, |piece| critic.values(piece))?,
            ),
            None => None,
        };
        let advantages = self.advantages(&rewards, &tokens, values.as_ref(), early.as_ref())?;
        *sequence_advantages = sequence_means(&advantages.advantages, &tokens)?;
        let recipe = &self.config.recipe;
        let reward_alone = recipe.policy_loss.positive_nll.is_none()
            && recipe.policy_loss.distillation.is_none()
            && recipe.distillation_loss.is_none();
        if reward_alone && is_zero(&advantages.advantages)? {
            return Ok(Err("all advantages are 0".to_owned()));
        }
        let log_probs = match early {
            Some(log_probs) => log_probs,
            None => self.log_probs(&tokens)?,
        };
        if let (Some(values), Some(returns)) = (&values, &advantages.returns)
            && let Some(share) = explained_variance(values, returns, tokens.response_mask())?
        {
            self.metrics
                .insert("value_explained_variance", single(share));
        }
        let top_entropy = self.top_entropy_mask(&tokens)?;
        let policy_mask = self.policy_mask(top_entropy.as_ref(), log_probs.corrected.as_ref())?;
        let entropy_mask = match self.config.recipe.policy_loss.entropy_tokens {
            EntropyTokens::All => None,
            EntropyTokens::TopEntropy => top_entropy.map(|mask| mask.selected().clone()),
        };
        let distributions = match self.models.distillation(recipe) {
            Some(distillation) => distillation.of_step(&tokens, self.micro_batches)?,
            None => None,
        };
        let mut batch = TrainingBatch::new(tokens, &advantages.advantages);
        batch.teacher = distributions;
        batch.values = values;
        batch.returns = advantages.returns;
        let batch = batch.with_policy(|policy| PolicyBatch {
            old: log_probs
                .old
                .map_or(OldPolicy::Current, OldPolicy::Recomputed),
            ref_log_probs: log_probs.reference,
            teacher_log_probs: log_probs.teacher,
            rollout_log_probs: Some(log_probs.rollout),
            scores: Some(scores),
            importance_weights: log_probs.corrected.and_then(|corrected| corrected.weights),
            policy_mask,
            entropy_mask,
            ..policy
        });
        let groups = (0..scored.rollouts.len()).map(|i| i / scored.num_generations);
        Ok(Ok(self.resample(batch, groups.collect())?))
    }

    /// Draws the sequences to train on, if [`TrainConfig::resampling`] is set.
    fn resample(&self, batch: TrainingBatch, groups: Vec<usize>) -> Result<StepBatch> {
        let Some(resampling) = &self.config.resampling else {
            return Ok(StepBatch { batch, groups });
        };
        let places = self.scored.is_scored().enumerate();
        let places: Vec<usize> = places.filter_map(|(i, is)| is.then_some(i)).collect();
        let score = |&place: &usize| f64::from(self.scored.scores[place]);
        let scores: Vec<f64> = places.iter().map(score).collect();
        // No prompt has this index.
        let (seed, step) = (self.config.sampling.seed, self.state.steps as u64);
        let mut random = generator(seed, step, u64::MAX, 0);
        let uniforms: Vec<f64> = groups.iter().map(|_| uniform(&mut random)).collect();
        let drawn = resampling.draw(&scores, &uniforms)?;
        let drawn: Vec<usize> = drawn.into_iter().map(|i| places[i]).collect();
        Ok(StepBatch {
            batch: batch.select(&drawn)?,
            groups: drawn.into_iter().map(|i| groups[i]).collect(),
        })
    }

    /// The tokens of highest entropy, if only those train the policy.
    fn top_entropy_mask(&self, tokens: &TokenBatch) -> Result<Option<Mask>> {
        let Some(fraction) = self.config.top_entropy else {
            return Ok(None);
        };
        let actor = &self.models.actor;
        let entropy = self
            .micro_batches
            .map(tokens, |piece| actor.entropy(piece))?;
        let mask = Mask::new(tokens.response_mask())?;
        Ok(Some(top_entropy_tokens(&entropy, &mask, fraction)?))
    }

    /// The tokens of the policy term, if not all: those of highest entropy that pass the rollout
    /// filters.
    fn policy_mask(
        &self,
        top_entropy: Option<&Mask>,
        corrected: Option<&RolloutWeights>,
    ) -> Result<Option<Tensor>> {
        let correction = &self.config.recipe.policy_loss.rollout_correction;
        let filters = correction.as_ref().is_some_and(RolloutCorrection::rejects);
        let kept = corrected
            .map(|corrected| &corrected.kept)
            .filter(|_| filters);
        Ok(match (top_entropy, kept) {
            (Some(top), Some(kept)) => Some(top.and(kept)?.selected().clone()),
            (Some(top), None) => Some(top.selected().clone()),
            (None, kept) => kept.cloned(),
        })
    }

    /// For each completion, whether it has a score and every filter keeps it. Synchronizes with the
    /// device.
    fn kept_completions(&self, tokens: &TokenBatch, scores: &Tensor) -> Result<Vec<bool>> {
        let mask = Mask::new(tokens.response_mask())?;
        let keep = self.kept(&self.config.sample_filters, &mask, scores)?;
        let keep = keep
            .to_vec1::<u8>()?
            .into_iter()
            .zip(self.scored.is_scored());
        Ok(keep
            .map(|(keep, is_scored)| keep != 0 && is_scored)
            .collect())
    }

    /// 1 for the samples that all of the filters keep: u8 `[B]`.
    fn kept(&self, filters: &[SampleFilter], mask: &Mask, scores: &Tensor) -> Result<Tensor> {
        let scored = self.scored;
        let truncated: Vec<u8> = scored
            .rollouts
            .iter()
            .map(|rollout| u8::from(rollout.completion.finish_reason == FinishReason::Length))
            .collect();
        let truncated = Tensor::new(truncated, scores.device())?;
        let batch = FilterBatch {
            scores,
            groups: scored.num_generations.into(),
            response_mask: mask,
            truncated: Some(&truncated),
        };
        Ok(SampleFilter::keep_all(filters, &batch)?)
    }

    /// Returns the reason why no completion remains, with the filters that drop any.
    fn why_filtered(&self, tokens: &TokenBatch, scores: &Tensor) -> Result<String> {
        let mask = Mask::new(tokens.response_mask())?;
        let mut causes = Vec::new();
        if !self.scored.is_scored().all(|is_scored| is_scored) {
            causes.push("no score".to_owned());
        }
        for filter in &self.config.sample_filters {
            let kept = self.kept(std::slice::from_ref(filter), &mask, scores)?;
            if kept.to_vec1::<u8>()?.contains(&0) {
                let filter = serde_json::to_value(filter)?;
                causes.extend(filter["kind"].as_str().map(str::to_owned));
            }
        }
        let completions = self.scored.rollouts.len();
        Ok(match causes.is_empty() {
            true => format!("all {completions} completions are empty"),
            false => format!(
                "all {completions} completions filtered ({})",
                causes.join(", ")
            ),
        })
    }

    /// The rewards `[B]` after shaping and penalty, or their components `[B, K]` if nothing adds
    /// them up, in the dtype of statistics.
    fn rewards(&mut self, tokens: &TokenBatch) -> Result<Tensor> {
        let (recipe, scored) = (&self.config.recipe, self.scored);
        let device = tokens.targets().device();
        let components = scored.component_tensor(device)?;
        // A stage of tokens alone has no place for components of which some are missing.
        let takes_components =
            self.estimator.is_some() || recipe.advantage.pipeline().sequence.is_some();
        if keeps_components(recipe) && takes_components {
            return Ok(components);
        }
        let mut moments = self
            .state
            .running_moments
            .map(|state| RunningMoments::from_state(state, device))
            .transpose()?;
        let shaping = RewardShaping {
            non_finite: NonFinite::Exclude,
            ..recipe.reward_shaping.clone()
        };
        let shaped = shaping.apply(&components, scored.num_generations, moments.as_mut())?;
        self.state.running_moments = moments.map(|moments| moments.state()).transpose()?;
        self.metrics.merge(&shaped.metrics.to_host()?)?;
        let mut rewards = shaped.rewards;
        let dtype = rewards.dtype();
        let numbers = |number: &dyn Fn(&Rollout) -> usize| -> Result<Tensor> {
            let numbers = scored.rollouts.iter().map(|rollout| number(rollout) as u32);
            Ok(Tensor::new(numbers.collect::<Vec<_>>(), device)?.to_dtype(dtype)?)
        };
        let written = |rollout: &Rollout| rollout.completion.written_tokens().len();
        let lengths = numbers(&written)?;
        if let Some(penalty) = &recipe.length_penalty {
            let read = |rollout: &Rollout| {
                rollout.prompt_tokens.len() + rollout.completion.tokens.len() - written(rollout)
            };
            let turns = |rollout: &Rollout| rollout.episode.as_ref().map_or(1, |e| e.turns.len());
            let (input_tokens, turns) = (numbers(&read)?, numbers(&turns)?);
            let costs = Costs {
                output_tokens: Some(&lengths),
                input_tokens: Some(&input_tokens),
                turns: Some(&turns),
            };
            rewards = penalty.apply(&rewards, scored.num_generations, &costs)?;
        }
        if let Some(overlong) = &recipe.overlong {
            rewards = (rewards + overlong.compute(&lengths)?)?;
        }
        Ok(rewards)
    }

    fn log_probs(&mut self, tokens: &TokenBatch) -> Result<LogProbs> {
        let (models, rollouts) = (self.models, &self.scored.rollouts);
        let rollout = rollout_log_probs(rollouts, tokens.targets().device())?;
        let old = match self.config.old_log_probs {
            OldLogProbs::Recompute => Some(
                self.micro_batches
                    .map(tokens, |piece| models.actor.log_probs(piece))?,
            ),
            OldLogProbs::Sampler => {
                ensure!(
                    rollouts
                        .iter()
                        .all(|rollout| rollout.completion.log_probs.is_some()),
                    "old_log_probs: Sampler, must be Recompute with a generator that does not compute the log-probs of the policy"
                );
                Some(rollout.clone())
            }
            OldLogProbs::Current => None,
        };
        let corrected = match (&self.config.recipe.policy_loss.rollout_correction, &old) {
            (Some(correction), Some(old)) => {
                let corrected = correction.compute(old, &rollout, tokens.response_mask())?;
                self.metrics.merge(&corrected.metrics.to_host()?)?;
                if self.config.rollout.max_staleness > 0 {
                    let share = effective_sample_share(old, &rollout, tokens.response_mask())?;
                    self.metrics.insert("rollout_sample_share", single(share));
                }
                Some(corrected)
            }
            _ => None,
        };
        let temperature = self.config.sampling.temperature;
        let fixed = |policy: &dyn Teacher| {
            let parts = match policy.takes_micro_batches() {
                true => self.micro_batches,
                false => self.micro_batches.at_once(),
            };
            parts.map(tokens, |piece| {
                policy.log_probs(piece, temperature, parts.progress)
            })
        };
        let reference = models.reference.as_ref().map(|policy| fixed(policy));
        let reference = reference.transpose()?;
        let term = self.config.recipe.teacher_log_probs_term();
        let is_used = term.is_some() || self.estimator.is_some();
        let teacher = models.teacher.as_deref().filter(|_| is_used);
        let teacher = teacher.map(fixed).transpose()?;
        Ok(LogProbs {
            reference,
            teacher,
            old,
            rollout,
            corrected,
        })
    }

    fn advantages(
        &mut self,
        rewards: &Tensor,
        tokens: &TokenBatch,
        values: Option<&Tensor>,
        log_probs: Option<&LogProbs>,
    ) -> Result<Advantages> {
        let scored = self.scored;
        let greedy = scored.greedy_baselines(rewards.device())?;
        let actor = &self.models.actor;
        let squares = match self.inputs.sum_of_squared_probs {
            true => Some(
                self.micro_batches
                    .map(tokens, |piece| actor.sum_of_squared_probs(piece))?,
            ),
            false => None,
        };
        let mut batch = AdvantageBatch::new(rewards, scored.num_generations)
            .response_mask(tokens.response_mask())
            .step(self.state.steps);
        batch.values = values.cloned();
        batch.reward_baselines = greedy;
        batch.sum_of_squared_probs = squares;
        if let Some(log_probs) = log_probs {
            batch.old_log_probs = log_probs.old.clone();
            batch.ref_log_probs = log_probs.reference.clone();
            batch.teacher_log_probs = log_probs.teacher.clone();
            let corrected = log_probs.corrected.as_ref();
            batch.importance_weights = corrected.and_then(|corrected| corrected.weights.clone());
        }
        let advantages = match (self.estimator, &self.config.turn_advantage) {
            (Some(estimator), _) => estimator.estimate(&batch)?,
            (None, Some(advantage)) => {
                let (_, width) = tokens.dims();
                advantage.compute(scored, width, rewards.device())?
            }
            (None, None) => {
                let pipeline = self.config.recipe.advantage.pipeline();
                // Only missing scores are not finite.
                let exclude = |group: &mut GroupAdvantage| group.non_finite = NonFinite::Exclude;
                let mut pipeline = pipeline.map_sequence(exclude);
                if let Some(controller) = &self.state.reward_kl {
                    pipeline = pipeline.map_tokens(|tokens| {
                        if let Some(penalty) = &mut tokens.kl_penalty {
                            penalty.coef = controller.coef();
                        }
                    });
                }
                pipeline.estimate(&batch)?
            }
        };
        let metrics = advantages.metrics.to_host()?;
        if let (Some(controller), Some(kl)) = (
            &mut self.state.reward_kl,
            metrics.get("reward_kl_per_sequence"),
        ) {
            self.metrics
                .insert("reward_kl_coef", single(controller.coef()));
            controller.update(kl, scored.rollouts.len())?;
        }
        self.metrics.merge(&metrics)?;
        // Rewards stay in the dtype of statistics up to here.
        let result = |x: Tensor| x.to_dtype(DType::F32);
        Ok(Advantages {
            advantages: result(advantages.advantages)?,
            returns: advantages.returns.map(result).transpose()?,
            ..advantages
        })
    }
}

/// A metric with one observation.
pub(super) fn single(sum: f64) -> MetricValue {
    MetricValue::Mean { sum, count: 1. }
}

/// The mean of `[B]` or `[B, T]` over the tokens of each sequence, f32; absent without tokens.
fn sequence_means(x: &Tensor, tokens: &TokenBatch) -> Result<Vec<Option<f32>>> {
    let x = match x.rank() {
        1 => x.unsqueeze(1)?.broadcast_as(tokens.dims())?,
        _ => x.clone(),
    };
    let rows = x.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let mean = |(row, sequence): (Vec<f32>, &Sequence)| {
        let trained = row.into_iter().zip(sequence.trained());
        let trained = trained.filter(|(_, trains)| *trains);
        let trained: Vec<f64> = trained.map(|(x, _)| f64::from(x)).collect();
        let count = trained.len() as f64;
        (!trained.is_empty()).then(|| (trained.iter().sum::<f64>() / count) as f32)
    };
    Ok(rows.into_iter().zip(tokens.sequences()).map(mean).collect())
}

fn is_zero(x: &Tensor) -> Result<bool> {
    let entries = x.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    Ok(entries.iter().all(|&entry| entry == 0.))
}

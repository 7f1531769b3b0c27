//! From scored completions to what an update is computed from.

use anyhow::Result;
use candle_core::{DType, Tensor};
use candle_grpo_core::{
    AdvantageBatch, AdvantageEstimator, Advantages, FilterBatch, Mask, MetricValue, MetricValues,
    SampleFilter, top_entropy_tokens_to_host,
};
use candle_grpo_loss::Corrected;

use super::critic::explained_variance;
use super::recipe_inputs::keeps_components;
use super::scored_rollouts::ScoredRollouts;
use crate::random::{generator, uniform};
use crate::{FinishReason, OldLogProbs, TokenBatch, Trainer, TrainingBatch, sampler_log_probs};

/// What policies say of the tokens of a step, each `[B, T]`.
struct Policies {
    /// Absent: the policy is still the one that drew.
    old: Option<Tensor>,
    reference: Option<Tensor>,
    teacher: Option<Tensor>,
    sampler: Tensor,
    corrected: Option<Corrected>,
}

/// What a step learns from.
pub(crate) struct Lesson {
    pub(crate) batch: TrainingBatch,
    /// The group of each of its sequences.
    pub(crate) groups: Vec<usize>,
}

/// Advantages, and the values that they were taken from.
struct Estimated {
    of: Advantages,
    /// `[B, T]`, if there is a critic.
    values: Option<Tensor>,
}

impl Trainer {
    /// What the policy learns from `scored`; nothing, if no completion is left after the filters, or no advantage is other
    /// than 0. `figures` take what there is to say about rewards and advantages.
    pub(crate) fn lesson(
        &mut self,
        scored: &ScoredRollouts,
        figures: &mut MetricValues,
    ) -> Result<Option<Lesson>> {
        let device = self.actor.parameters().device().clone();
        let scores = Tensor::new(scored.scores.as_slice(), &device)?;
        let mut tokens = TokenBatch::from_rollouts(&scored.rollouts, &device)?;
        let mask = self.filtered_mask(&tokens, &scores, scored)?;
        if mask.count(DType::F32)?.to_scalar::<f32>()? == 0. {
            return Ok(None);
        }
        tokens.response_mask = mask.selected().clone();

        let rewards = self.rewards(scored, &tokens, figures)?;
        // Passes over the model that a step with nothing to learn need not make.
        let early = match self.estimator.is_some() || self.requirements.old_log_probs {
            true => Some(self.policies(&tokens, scored, figures)?),
            false => None,
        };
        let advantages = self.advantages(scored, &rewards, &tokens, early.as_ref(), figures)?;
        let nothing = advantages
            .of
            .advantages
            .flatten_all()?
            .to_dtype(DType::F32)?
            .to_vec1::<f32>()?
            .iter()
            .all(|&a| a == 0.);
        if nothing && self.config.recipe.policy_loss.positive_nll.is_none() {
            return Ok(None);
        }
        let policies = match early {
            Some(policies) => policies,
            None => self.policies(&tokens, scored, figures)?,
        };
        let values = advantages.values;
        if let (Some(values), Some(returns)) = (&values, &advantages.of.returns)
            && let Some(share) = explained_variance(values, returns, &tokens.response_mask)?
        {
            let value = MetricValue::Mean {
                sum: share,
                count: 1.,
            };
            figures.insert("value_explained_variance", value);
        }
        let policy_mask = self.policy_mask(&tokens, policies.corrected.as_ref())?;
        let batch = TrainingBatch {
            old_log_probs: policies.old,
            ref_log_probs: policies.reference,
            rollout_log_probs: Some(policies.sampler),
            scores: Some(scores),
            importance_weights: policies.corrected.and_then(|corrected| corrected.weights),
            policy_mask,
            values,
            returns: advantages.of.returns,
            ..TrainingBatch::new(tokens, advantages.of.advantages)
        };
        let groups = (0..scored.rollouts.len()).map(|i| i / scored.num_generations);
        let groups: Vec<usize> = groups.collect();
        let Some(resampling) = &self.config.resampling else {
            return Ok(Some(Lesson { batch, groups }));
        };
        let scores: Vec<f64> = scored.scores.iter().copied().map(f64::from).collect();
        // No prompt has this number.
        let mut random = generator(self.config.sampling.seed, self.steps() as u64, u64::MAX, 0);
        let uniforms: Vec<f64> = scores.iter().map(|_| uniform(&mut random)).collect();
        let drawn = resampling.draw(&scores, &uniforms)?;
        Ok(Some(Lesson {
            batch: batch.select(&drawn)?,
            groups: drawn.into_iter().map(|i| groups[i]).collect(),
        }))
    }

    /// Where the policy term counts, if not on all tokens: those of high entropy that the filters of the rollout let pass.
    fn policy_mask(
        &self,
        tokens: &TokenBatch,
        corrected: Option<&Corrected>,
    ) -> Result<Option<Tensor>> {
        let correction = &self.config.recipe.policy_loss.rollout_correction;
        let filters = correction.as_ref().is_some_and(|c| !c.filters.is_empty());
        let kept = corrected
            .map(|corrected| &corrected.kept)
            .filter(|_| filters);
        let Some(share) = self.config.top_entropy else {
            return Ok(kept.cloned());
        };
        let entropy = self.in_pieces(tokens, |piece| self.actor.entropy(piece))?;
        let mask = Mask::new(&tokens.response_mask)?;
        let top = top_entropy_tokens_to_host(&entropy, &mask, share)?;
        Ok(Some(match kept {
            Some(kept) => top.and(kept)?.selected().clone(),
            None => top.selected().clone(),
        }))
    }

    /// The tokens of the completions that every filter keeps.
    fn filtered_mask(
        &self,
        tokens: &TokenBatch,
        scores: &Tensor,
        scored: &ScoredRollouts,
    ) -> Result<Mask> {
        let mask = Mask::new(&tokens.response_mask)?;
        let truncated: Vec<u8> = scored
            .rollouts
            .iter()
            .map(|rollout| u8::from(rollout.finish_reason == FinishReason::Length))
            .collect();
        let truncated = Tensor::new(truncated, scores.device())?;
        let batch = FilterBatch {
            scores,
            groups: scored.num_generations.into(),
            response_mask: &mask,
            truncated: Some(&truncated),
        };
        let keep = SampleFilter::keep_all(&self.config.sample_filters, &batch)?;
        Ok(mask.keep_samples(&keep)?)
    }

    /// The rewards `[B]` after shaping and penalty, or their components `[B, K]` where nothing adds them up.
    fn rewards(
        &mut self,
        scored: &ScoredRollouts,
        tokens: &TokenBatch,
        figures: &mut MetricValues,
    ) -> Result<Tensor> {
        let recipe = &self.config.recipe;
        let components = scored.component_tensor(tokens.targets.device())?;
        if keeps_components(recipe) {
            return Ok(components);
        }
        let shaped = recipe.reward_shaping.apply(
            &components,
            scored.num_generations,
            self.running_moments.as_mut(),
        )?;
        figures.merge(&shaped.metrics.to_host()?)?;
        let Some(overlong) = &recipe.overlong else {
            return Ok(shaped.rewards);
        };
        let lengths: Vec<f32> = scored
            .rollouts
            .iter()
            .map(|rollout| rollout.completion_tokens.len() as f32)
            .collect();
        let penalty = overlong.of(&Tensor::new(lengths, tokens.targets.device())?)?;
        Ok((shaped.rewards + penalty)?)
    }

    fn policies(
        &self,
        tokens: &TokenBatch,
        scored: &ScoredRollouts,
        figures: &mut MetricValues,
    ) -> Result<Policies> {
        let sampler = sampler_log_probs(&scored.rollouts, tokens.targets.device())?;
        let old = match self.config.old_log_probs {
            OldLogProbs::Recompute => {
                Some(self.in_pieces(tokens, |piece| self.actor.log_probs(piece))?)
            }
            OldLogProbs::Sampler => Some(sampler.clone()),
            OldLogProbs::Current => None,
        };
        let corrected = match (&self.config.recipe.policy_loss.rollout_correction, &old) {
            (Some(correction), Some(old)) => {
                let corrected = correction.compute(old, &sampler, &tokens.response_mask)?;
                figures.merge(&corrected.metrics.to_host()?)?;
                Some(corrected)
            }
            _ => None,
        };
        let temperature = self.config.sampling.temperature;
        let fixed = |policy: &Option<crate::Reference>| {
            policy
                .as_ref()
                .map(|policy| self.in_pieces(tokens, |piece| policy.log_probs(piece, temperature)))
                .transpose()
        };
        Ok(Policies {
            reference: fixed(&self.reference)?,
            teacher: fixed(&self.teacher)?,
            old,
            sampler,
            corrected,
        })
    }

    fn advantages(
        &mut self,
        scored: &ScoredRollouts,
        rewards: &Tensor,
        tokens: &TokenBatch,
        policies: Option<&Policies>,
        figures: &mut MetricValues,
    ) -> Result<Estimated> {
        let greedy = match self.greedy_scores(&scored.rows)? {
            Some(scores) => {
                let of_samples: Vec<f32> = scores
                    .into_iter()
                    .flat_map(|score| std::iter::repeat_n(score, scored.num_generations))
                    .collect();
                Some(Tensor::new(of_samples, rewards.device())?)
            }
            None => None,
        };
        let squares = match self.requirements.sum_of_squared_probs {
            true => Some(self.in_pieces(tokens, |piece| self.actor.sum_of_squared_probs(piece))?),
            false => None,
        };
        let mut batch = AdvantageBatch::new(rewards, scored.num_generations)
            .response_mask(&tokens.response_mask);
        let values = match &self.critic {
            Some(critic) => Some(self.in_pieces(tokens, |piece| critic.values(piece))?),
            None => None,
        };
        batch.values = values.as_ref();
        batch.reward_baselines = greedy.as_ref();
        batch.sum_of_squared_probs = squares.as_ref();
        if let Some(policies) = policies {
            batch.old_log_probs = policies.old.as_ref();
            batch.ref_log_probs = policies.reference.as_ref();
            batch.teacher_log_probs = policies.teacher.as_ref();
            batch.rollout_weights = policies
                .corrected
                .as_ref()
                .and_then(|corrected| corrected.weights.as_ref());
        }
        let advantages = match &self.estimator {
            Some(estimator) => estimator.estimate(&batch)?,
            None => {
                let mut pipeline = self.config.recipe.advantage.pipeline();
                if let Some(controller) = &self.reward_kl {
                    pipeline = pipeline.map_tokens(|tokens| {
                        if let Some(penalty) = &mut tokens.kl_penalty {
                            penalty.coef = controller.coef();
                        }
                    });
                }
                pipeline.estimate(&batch)?
            }
        };
        let of_advantages = advantages.metrics.to_host()?;
        if let (Some(controller), Some(kl)) = (
            &mut self.reward_kl,
            of_advantages.get("reward_kl_per_sequence"),
        ) {
            let (sum, count) = (controller.coef(), 1.);
            figures.insert("reward_kl_coef", MetricValue::Mean { sum, count });
            controller.update(kl, scored.rollouts.len())?;
        }
        figures.merge(&of_advantages)?;
        Ok(Estimated {
            of: advantages,
            values,
        })
    }
}

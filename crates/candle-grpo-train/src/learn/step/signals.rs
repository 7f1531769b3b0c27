//! The inputs that advantages and loss need.

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Tensor};
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::selection::top_entropy_tokens;
use candle_grpo_core::{Mask, MetricValue, MetricValues};
use candle_grpo_loss::{EntropyTokens, RolloutCorrection};
use candle_grpo_nn::{LanguageModel, ModelConfig};

use super::{Needs, Passes, StepBatch, single};
use crate::learn::models::Models;
use crate::learn::needs::Source;
use crate::learn::staleness::effective_sample_share;
use crate::learn::{OldLogProbs, Teacher, rollout_log_probs};
use crate::{Rollout, Sequence, TokenBatch, TrainConfig};

/// Adds the inputs of `needs` that `batch` has not got yet, such as
/// [`AdvantageEstimator::needs`](candle_grpo_core::AdvantageEstimator::needs), or all that
/// [`Needs`](super::Needs) finds in the settings: from passes of the policy before the update, and
/// of reference, teacher and critic. If a pass of the policy gives old log-probs and entropies, and
/// the step needs both, both are added.
///
/// # Errors
///
/// If a model that an input needs is absent or fails, a sequence has another teacher than those of
/// `models`, and with [`Interrupted`](crate::Interrupted) if the progress of `passes` cancels.
pub fn signals<C: ModelConfig>(
    batch: &mut StepBatch,
    needs: Inputs,
    models: &Models<C>,
    config: &TrainConfig,
    passes: Passes<'_>,
) -> Result<()> {
    let needs = config.with_sources(needs);
    let of_step = needs | Needs::new(config, None).all();
    for input in needs.iter() {
        if batch.computed.contains(input) {
            continue;
        }
        let mut ratios = MetricValues::default();
        let tokens = &batch.tokens;
        let temperature = config.sampling.temperature;
        let fixed = |policy: &dyn Teacher, tokens: &TokenBatch| {
            let parts = if policy.takes_micro_batches() {
                passes
            } else {
                passes.at_once()
            };
            let parts = parts.over(policy.divided());
            let forward = |part: &_| policy.log_probs(part, temperature, parts.progress);
            parts.map(tokens, forward)
        };
        let found = match Source::of(input) {
            Source::Rollouts => Some(of_rollouts(batch, input)?),
            Source::GreedyRollouts => batch.groups.greedy_baselines(batch.device())?,
            Source::Policy => of_policy(batch, (input, of_step), (models, config), passes)?,
            Source::Reference => match &models.reference {
                Some(reference) => Some(fixed(reference, tokens)?),
                None => absent(input, "reference")?,
            },
            Source::Teacher if input == Input::TeacherMask => teacher_mask(batch)?,
            Source::Teacher => {
                if models.teachers.iter().next().is_none() {
                    absent(input, "teacher")?;
                }
                tokens.ensure_teachers(models.teachers.iter().map(|(name, _)| name))?;
                let has_names = models.teachers.iter().any(|(name, _)| !name.is_empty());
                let sampled = has_names.then(|| sampled_log_probs(batch)).transpose()?;
                let sampled = sampled.flatten();
                let mut sum = None;
                for (name, teacher) in models.teachers.iter() {
                    let Some((read, rows)) = tokens.for_teacher(name)? else {
                        continue;
                    };
                    let own = tokens.spread(&fixed(teacher, &read)?, &rows)?;
                    if let Some(sampled) = &sampled {
                        let counts = |sequence: &Sequence| sequence.teacher() == Some(name);
                        let ratio = log_ratio(&own, sampled, &tokens.mask_of(counts)?)?;
                        ratios.insert(&format!("teacher_log_ratio/{name}"), ratio);
                    }
                    sum = Some(match sum {
                        None => own,
                        Some(sum) => (sum + own)?,
                    });
                }
                Some(match sum {
                    Some(sum) => sum,
                    None => tokens.response_mask().zeros_like()?.to_dtype(DType::F32)?,
                })
            }
            Source::Critic => match &models.critic {
                Some(critic) => {
                    let passes = passes.over(critic.divided());
                    Some(passes.map(tokens, |part| critic.values(part))?)
                }
                None => absent(input, "critic")?,
            },
            Source::Inputs => of_inputs(batch, input, config)?,
            Source::MiniBatch => None,
        };
        batch.metrics.merge(&ratios)?;
        batch.inputs.extend(found.map(|found| (input, found)));
        batch.computed = batch.computed | input.into();
    }
    Ok(())
}

/// The tokens that have a teacher, unless all have one.
fn teacher_mask(batch: &StepBatch) -> Result<Option<Tensor>> {
    let tokens = &batch.tokens;
    let is_taught = |sequence: &Sequence| sequence.teacher().is_some();
    let all = tokens.sequences().iter().all(is_taught);
    (!all).then(|| tokens.mask_of(is_taught)).transpose()
}

/// The log-probs of the sampler, if all completions have them.
fn sampled_log_probs(batch: &StepBatch) -> Result<Option<Tensor>> {
    if let Some(found) = batch.inputs.get(&Input::RolloutLogProbs) {
        return Ok(Some(found.clone()));
    }
    let mut rows = batch.groups.rollouts.iter().flat_map(Rollout::rows);
    let is_given = rows.all(|(_, completion)| completion.reported_log_probs().is_ok());
    let found = is_given.then(|| of_rollouts(batch, Input::RolloutLogProbs));
    found.transpose()
}

/// The mean over `mask` of a teacher's log-probs minus those of the sampler.
fn log_ratio(teacher: &Tensor, sampled: &Tensor, mask: &Tensor) -> Result<MetricValue> {
    let ratio = Mask::new(mask)?.select(&(teacher - sampled)?)?;
    let sum = f64::from(ratio.sum_all()?.to_scalar::<f32>()?);
    let count = f64::from(mask.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?);
    Ok(MetricValue::Mean { sum, count })
}

fn absent(input: Input, model: &str) -> Result<Option<Tensor>> {
    bail!("{input}: absent, there must be a {model} that computes them")
}

fn of_rollouts(batch: &StepBatch, input: Input) -> Result<Tensor> {
    let groups = &batch.groups;
    match input {
        Input::Scores => Ok(Tensor::new(groups.scores.as_slice(), batch.device())?),
        _ => rollout_log_probs(&groups.rollouts, batch.device()),
    }
}

/// Computes `input`, and adds another of the step's `needs` that the same pass gives.
fn of_policy<C: ModelConfig>(
    batch: &mut StepBatch,
    (input, needs): (Input, Inputs),
    (models, config): (&Models<C>, &TrainConfig),
    passes: Passes<'_>,
) -> Result<Option<Tensor>> {
    let (actor, tokens) = (&models.actor, &batch.tokens);
    let passes = passes.over(actor.policy().divided());
    let other = match input {
        Input::OldLogProbs => Some(Input::Entropy),
        Input::Entropy => Some(Input::OldLogProbs),
        _ => None,
    };
    let other = other.filter(|&other| needs.contains(other) && !batch.computed.contains(other));
    let found = match (input, other, config.old_log_probs) {
        (_, Some(other), OldLogProbs::Auto | OldLogProbs::Recompute) => {
            let pieces = passes.pieces(tokens, |part| actor.response_log_probs(part))?;
            let log_probs = pieces.joined(|piece| &piece.log_probs)?;
            let entropy = pieces.joined(|piece| &piece.entropy)?;
            let (found, and) = match input {
                Input::Entropy => (entropy, log_probs),
                _ => (log_probs, entropy),
            };
            batch.inputs.insert(other, and);
            batch.computed = batch.computed | other.into();
            Ok(found)
        }
        (Input::Entropy, ..) => passes.map(tokens, |part| actor.entropy(part)),
        (Input::SumOfSquaredProbs, ..) => {
            passes.map(tokens, |part| actor.sum_of_squared_probs(part))
        }
        (.., OldLogProbs::Auto | OldLogProbs::Recompute) => {
            passes.map(tokens, |part| actor.log_probs(part))
        }
        (.., OldLogProbs::Sampler) => {
            let mut rows = batch.groups.rollouts.iter().flat_map(Rollout::rows);
            ensure!(
                rows.all(|(_, completion)| completion.log_probs.is_some()),
                "old_log_probs: Sampler, must be Recompute with a generator that does not compute the log-probs of the policy"
            );
            of_rollouts(batch, Input::RolloutLogProbs)
        }
        (.., OldLogProbs::Current) => return Ok(None),
    };
    found.map(Some)
}

/// The weights of a rollout correction, and the tokens of highest entropy, of policy term and
/// entropy bonus.
fn of_inputs(batch: &mut StepBatch, input: Input, config: &TrainConfig) -> Result<Option<Tensor>> {
    let mask = Mask::new(batch.tokens.response_mask())?;
    let top = match (config.top_entropy, batch.inputs.get(&Input::Entropy)) {
        (Some(share), Some(entropy)) if input != Input::ImportanceWeights => {
            Some(top_entropy_tokens(entropy, &mask, share)?)
        }
        _ => None,
    };
    let loss = &config.recipe.policy_loss;
    match input {
        Input::EntropyMask => {
            let is_used = loss.entropy_tokens == EntropyTokens::TopEntropy;
            let top = top.filter(|_| is_used);
            return Ok(top.map(|top| top.selected().clone()));
        }
        Input::PolicyMask => {
            // That of the correction, which adds both.
            let kept = batch.kept.as_ref();
            return Ok(match (top, kept) {
                (Some(top), Some(kept)) => Some(top.and(kept)?.selected().clone()),
                (Some(top), None) => Some(top.selected().clone()),
                (None, kept) => kept.cloned(),
            });
        }
        _ => {}
    }
    let Some(correction) = &loss.rollout_correction else {
        return Ok(None);
    };
    let of = |input: Input| {
        batch
            .inputs
            .get(&input)
            .context("rollout_correction: needs log-probs")
    };
    let (old, rollout) = (of(Input::OldLogProbs)?, of(Input::RolloutLogProbs)?);
    let corrected = correction.compute(old, rollout, batch.tokens.response_mask())?;
    if config.rollout.trains_on_older_weights() {
        let share = effective_sample_share(old, rollout, batch.tokens.response_mask())?;
        batch.metrics.insert("rollout_sample_share", single(share));
    }
    batch.metrics.merge(&corrected.metrics.to_host()?)?;
    batch.kept = RolloutCorrection::rejects(correction).then_some(corrected.kept);
    Ok(corrected.weights)
}

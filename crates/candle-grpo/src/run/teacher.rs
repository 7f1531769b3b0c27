//! A run's teacher.

use std::sync::Arc;

use anyhow::{Context, Result};
use candle_grpo_nn::{BaseWeights, DecoderConfig};
use candle_grpo_train::learn::{Reference, SelfTeacherConfig, Teacher, TeacherPart};
use candle_grpo_train::rollout::RolloutConfig;
use candle_grpo_train::{Dataset, Pretrained, Prompt};

use super::model::model_path;
use crate::config::{RunConfig, TeacherConfig};

/// Checks that a run's teacher has the policy's tokens and enough positions for completions of
/// `prompts`, without reading its weights. Returns its shape; `None` for servers, which are not
/// asked before the run.
///
/// # Errors
///
/// Returns an error with the key's line if the teacher cannot be read or does not fit.
pub(super) fn check_teacher(
    config: &RunConfig,
    policy: &Pretrained,
    prompts: &[Prompt],
) -> Result<Option<DecoderConfig>> {
    let Some(model) = config.teacher.iter().find_map(|x| x.model.as_ref()) else {
        return Ok(None);
    };
    let read = || -> Result<Pretrained> {
        let path = model_path(model)?;
        let pretrained = Pretrained::load_without_weights(&path)?;
        if !config.lacks_teacher_weights() {
            pretrained.check_weights(&path)?;
        }
        Ok(pretrained)
    };
    let wrong = |message: &str| config.error("teacher.model", message);
    let teacher = read().map_err(|error| wrong(&format!("{error:#}")))?;
    if teacher.tokenizer.get_vocab(true) != policy.tokenizer.get_vocab(true) {
        return Err(wrong("has a different vocabulary than the policy, must have the same").into());
    }
    let (rows, own) = (teacher.model.vocab_size, policy.model.vocab_size);
    if config.train.recipe.distillation_loss.is_some() && rows < own {
        return Err(wrong(&format!(
            "has {rows} logits, must have at least {own}, as many as the policy, for recipe.distillation_loss"
        ))
        .into());
    }
    let longest = longest_sequence(config, prompts);
    let positions = teacher.model.max_position_embeddings;
    if longest > positions {
        return Err(wrong(&format!(
            "has {positions} positions, must have at least {longest} for the longest prompt and completion"
        ))
        .into());
    }
    Ok(Some(teacher.model))
}

/// Returns the settings of a policy that is its own teacher, with the token count of the longest
/// prompt that it reads in place of those in `train`.
///
/// # Errors
///
/// Returns an error with file and line if a row has no prompt for the teacher, and with the key's
/// line if a prompt is too long for the positions of the model.
pub(super) fn self_teacher(
    config: &RunConfig,
    dataset: &Dataset,
    train: &[Prompt],
    pretrained: &Pretrained,
) -> Result<Option<(SelfTeacherConfig, usize)>> {
    let Some(own) = config.teacher.iter().find_map(|x| x.own.as_ref()) else {
        return Ok(None);
    };
    let prompts = own.prompts(config.chat_template(pretrained)?)?;
    let mut longest = 0;
    for prompt in train {
        let tokens = prompts.tokens(prompt, &pretrained.tokenizer);
        let tokens = tokens.with_context(|| match dataset.train.get(prompt.index as usize) {
            Some(row) => row.place(),
            None => format!("prompt {}", prompt.index),
        });
        longest = longest.max(tokens?.len());
    }
    let positions = pretrained.model.max_position_embeddings;
    let length = config.train.sampling.max_new_tokens;
    if longest.saturating_add(length) > positions {
        let message = format!(
            "a prompt of {longest} tokens, must be at most {}: the model has {positions} positions, and completions up to {length} tokens",
            positions.saturating_sub(length)
        );
        return Err(config.error("teacher.self", &message).into());
    }
    Ok(Some((own.clone(), longest)))
}

/// Loads a run's teacher, if it has one, for rows with up to `longest_row` tokens. `policy` is the
/// model that trains.
///
/// # Errors
///
/// Returns an error with the key's line if the teacher cannot be read, or an API key's environment
/// variable is not set.
pub(super) fn load_teacher(
    config: &RunConfig,
    prompts: &[Prompt],
    longest_row: usize,
    policy: &Pretrained,
) -> Result<Option<TeacherPart>> {
    let Some(TeacherConfig { model, server, own }) = &config.teacher else {
        return Ok(None);
    };
    if let Some(own) = own {
        return Ok(Some(TeacherPart::Own {
            config: own.clone(),
            chat_template: policy.chat_template.clone(),
        }));
    }
    let wrong = |key: &str, error: anyhow::Error| config.error(key, &format!("{error:#}"));
    if let Some(server) = server {
        let teacher = on_servers(server, longest_sequence(config, prompts));
        let teacher = teacher.map_err(|error| wrong("teacher.server", error))?;
        return Ok(Some(TeacherPart::Other(teacher)));
    }
    let Some(model) = model else {
        return Ok(None);
    };
    let device = policy.parameters.device();
    let load = || -> Result<Reference> {
        let (path, dtype) = (model_path(model)?, config.train.compute_dtype);
        let teacher = Pretrained::load_frozen(&path, device, BaseWeights::Stored, dtype)?;
        let shape = teacher.model.for_rows_of(longest_row);
        Reference::shared(&shape, &teacher.parameters, dtype)
    };
    let teacher = load().map_err(|error| wrong("teacher.model", error))?;
    Ok(Some(TeacherPart::other(teacher)))
}

#[cfg(feature = "engines")]
fn on_servers(config: &RolloutConfig, longest: usize) -> Result<Arc<dyn Teacher>> {
    use candle_grpo_train::rollout::engine::ServerTeacher;

    Ok(Arc::new(
        ServerTeacher::new(config)?.with_longest_sequence(longest),
    ))
}

#[cfg(not(feature = "engines"))]
fn on_servers(_: &RolloutConfig, _: usize) -> Result<Arc<dyn Teacher>> {
    anyhow::bail!("given, must be absent: this program was built without the feature engines")
}

/// Returns the token count of the longest prompt with the longest completion.
fn longest_sequence(config: &RunConfig, prompts: &[Prompt]) -> usize {
    Prompt::longest(prompts) + config.train.sampling.max_new_tokens
}

//! A run's teachers.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use candle_grpo_collective::Collective;
use candle_grpo_nn::{BaseWeights, DecoderConfig};
use candle_grpo_train::learn::{
    Reference, SelfTeacherConfig, ShownTexts, TeacherPart, teacher_name,
};
use candle_grpo_train::rollout::{LocalGenerator, PolicyWeights, RolloutConfig};
use candle_grpo_train::{Dataset, Generator, Pretrained, Prompt, SamplingConfig};

use super::model::model_path;
use crate::config::{RunConfig, TeacherConfig};

/// Returns the prompts of each teacher by its name, which is empty for a single one.
fn prompts_by_teacher<'a>(
    config: &RunConfig,
    prompts: &'a [Prompt],
) -> BTreeMap<String, Vec<&'a Prompt>> {
    let by = config
        .teacher
        .as_ref()
        .and_then(|teacher| teacher.by.as_ref());
    let mut found = BTreeMap::<String, Vec<&Prompt>>::new();
    for prompt in prompts {
        let name = match by {
            Some(by) => teacher_name(&prompt.columns, by),
            None => Some(String::new()),
        };
        if let Some(name) = name {
            found.entry(name).or_default().push(prompt);
        }
    }
    found
}

/// Returns the token count of the longest of `prompts` with the longest completion that the teacher
/// scores or samples.
fn longest_sequence(config: &RunConfig, prompts: &[&Prompt]) -> usize {
    let lengths = prompts.iter().map(|prompt| prompt.tokens.len());
    let longest = lengths.max().unwrap_or(0);
    let train = &config.train;
    let scored = config.teacher_term().map(|_| &train.sampling);
    let sampled = train.teacher_samples();
    let sampled = sampled.map(|samples| samples.sampling(&train.sampling));
    let lengths = scored.into_iter().chain(&sampled);
    let new = lengths.map(|sampling| sampling.max_new_tokens).max();
    longest.saturating_add(new.unwrap_or(0))
}

/// Checks that a run's teachers have the policy's tokens and enough positions for completions of
/// their `prompts`, without reading their weights. Returns the shapes of those in this process;
/// servers are not asked before the run.
///
/// # Errors
///
/// Returns an error with the key's line if a teacher cannot be read or does not fit, or one of
/// several has no prompt.
pub(super) fn check_teachers(
    config: &RunConfig,
    policy: &Pretrained,
    prompts: &[Prompt],
) -> Result<Vec<DecoderConfig>> {
    let mut prompts = prompts_by_teacher(config, prompts);
    let mut shapes = Vec::new();
    for (key, name, teacher) in config.teacher.iter().flat_map(TeacherConfig::each) {
        let taught = prompts.remove(name).unwrap_or_default();
        let by = config
            .teacher
            .as_ref()
            .and_then(|teacher| teacher.by.as_ref());
        if let (Some(by), true) = (by, taught.is_empty()) {
            let message = format!("given, but no prompt has {name:?} in the column {by:?}");
            return Err(config.error(&key, &message).into());
        }
        if let Some(model) = &teacher.model {
            let longest = longest_sequence(config, &taught);
            let key = format!("{key}.model");
            shapes.push(check_teacher(config, (&key, model), policy, longest)?);
        }
    }
    Ok(shapes)
}

/// Checks a teacher in this process, which reads sequences of up to `longest` tokens.
fn check_teacher(
    config: &RunConfig,
    (key, model): (&str, &Path),
    policy: &Pretrained,
    longest: usize,
) -> Result<DecoderConfig> {
    let read = || -> Result<Pretrained> {
        let path = model_path(model)?;
        let pretrained = Pretrained::load_without_weights(&path)?;
        if !config.lacks_teacher_weights(key) {
            pretrained.check_weights(&path)?;
        }
        Ok(pretrained)
    };
    let wrong = |message: &str| config.error(key, message);
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
    let positions = teacher.model.max_position_embeddings;
    if longest > positions {
        return Err(wrong(&format!(
            "has {positions} positions, must have at least {longest} for the longest prompt and completion"
        ))
        .into());
    }
    Ok(teacher.model)
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
    let mut teachers = config.teacher.iter().flat_map(TeacherConfig::each);
    let own = teachers.find_map(|(key, name, teacher)| Some((key, name, teacher.own.as_ref()?)));
    let Some((key, name, own)) = own else {
        return Ok(None);
    };
    let prompts = own.prompts(config.chat_template(pretrained)?)?;
    let shown = ShownTexts {
        sibling: own.sibling.map(|_| ""),
        feedback: own.feedback.then_some(""),
    };
    let taught = prompts_by_teacher(config, train).remove(name);
    let mut longest = 0;
    for prompt in taught.unwrap_or_default() {
        let tokens = prompts.tokens(prompt, shown, &pretrained.tokenizer);
        let tokens = tokens.with_context(|| match dataset.train.get(prompt.index as usize) {
            Some(row) => row.place(),
            None => format!("prompt {}", prompt.index),
        });
        longest = longest.max(tokens?.len());
    }
    let length = config.train.sampling.max_new_tokens;
    let positions = pretrained.model.max_position_embeddings;
    let most = positions.saturating_sub(length);
    if longest > most {
        let message = format!(
            "a prompt of {longest} tokens, must be at most {most}: the model has {positions} positions, and completions up to {length} tokens"
        );
        return Err(config.error(&format!("{key}.self"), &message).into());
    }
    // Each is assumed to be as long as a completion. A completion has no teacher if they do not
    // fit.
    let shown = usize::from(own.sibling.is_some()) + usize::from(own.feedback);
    if shown > 0 {
        longest = longest.saturating_add(shown * length).min(most);
    }
    Ok(Some((own.clone(), longest)))
}

/// A run's teachers, as they are loaded.
#[derive(Default)]
pub(super) struct LoadedTeacher {
    /// The teachers that score completions, if a term of the recipe learns from them.
    pub(super) part: Option<TeacherPart>,
    /// The generator of the teacher's samples, if these are demonstrations.
    pub(super) generator: Option<Arc<dyn Generator>>,
}

/// Loads a run's teachers, if it has any, for rows with up to `longest_row` tokens. `policy` is the
/// model that trains on the ranks in `collective`, and is sampled with `sampling`.
///
/// # Errors
///
/// Returns an error with the key's line if a teacher cannot be read, or an API key's environment
/// variable is not set.
pub(super) fn load_teacher(
    config: &RunConfig,
    sampling: &SamplingConfig,
    prompts: &[Prompt],
    longest_row: usize,
    policy: &Pretrained,
    collective: &Arc<dyn Collective>,
) -> Result<LoadedTeacher> {
    let Some(teacher) = &config.teacher else {
        return Ok(LoadedTeacher::default());
    };
    let taught = prompts_by_teacher(config, prompts);
    let samples = config.train.teacher_samples();
    let samples = samples.map(|samples| samples.sampling(sampling));
    let uses = (config.teacher_term().is_some(), samples.as_ref());
    let mut generator = None;
    let mut parts = BTreeMap::new();
    for (key, name, teacher) in teacher.each() {
        let wrong = |kind: &str, error: anyhow::Error| {
            config.error(&format!("{key}.{kind}"), &format!("{error:#}"))
        };
        let loaded = match (&teacher.model, &teacher.server, &teacher.own) {
            (_, _, Some(own)) => LoadedTeacher {
                part: Some(TeacherPart::Own {
                    config: own.clone(),
                    chat_template: policy.chat_template.clone(),
                }),
                generator: None,
            },
            (_, Some(server), _) => {
                let taught = taught.get(name).map(Vec::as_slice).unwrap_or_default();
                let lengths = (longest_sequence(config, taught), policy.model.vocab_size);
                on_servers(server, uses, lengths).map_err(|error| wrong("server", error))?
            }
            (Some(model), ..) => {
                let found = in_process(config, model, uses, longest_row, policy, collective);
                found.map_err(|error| wrong("model", error))?
            }
            (None, None, None) => LoadedTeacher::default(),
        };
        generator = generator.or(loaded.generator);
        parts.extend(loaded.part.map(|part| (name.to_owned(), part)));
    }
    let part = match &teacher.by {
        None => parts.pop_first().map(|(_, part)| part),
        Some(column) => Some(TeacherPart::ByColumn {
            column: column.clone(),
            teachers: parts,
        }),
    };
    Ok(LoadedTeacher { part, generator })
}

/// Loads the model of a teacher, which reads completions if `scores` is true, and samples with
/// `samples`.
fn in_process(
    config: &RunConfig,
    model: &Path,
    (scores, samples): (bool, Option<&SamplingConfig>),
    longest_row: usize,
    policy: &Pretrained,
    collective: &Arc<dyn Collective>,
) -> Result<LoadedTeacher> {
    let (path, dtype) = (model_path(model)?, config.train.compute_dtype);
    let device = policy.parameters.device();
    let division = config.train.teacher_division(collective);
    let teacher = match &division {
        Some(division) => Pretrained::load_divided(&path, device, division)?,
        None => Pretrained::load_frozen(&path, device, BaseWeights::Stored, dtype)?,
    };
    let shape = teacher.model.for_rows_of(longest_row);
    let reference = scores.then(|| Reference::shared(&shape, &teacher.parameters, dtype));
    let weights = PolicyWeights {
        version: 0,
        model: &shape,
        parameters: &teacher.parameters,
        adapters: None,
    };
    let generator = samples.map(|_| LocalGenerator::in_dtype(&weights, dtype));
    let generator = generator.transpose()?;
    // Another thread that draws ahead may use the device, for example with a reward model.
    let records = config.train.rollout.max_staleness == 0;
    Ok(LoadedTeacher {
        part: reference.transpose()?.map(TeacherPart::other),
        generator: generator.map(|own| Arc::new(own.with_recorded_steps(records)) as _),
    })
}

/// Returns the teacher on these servers, as [`in_process`] does. It reads up to `longest` tokens,
/// and has a vocabulary of this size.
#[cfg(feature = "engines")]
fn on_servers(
    config: &RolloutConfig,
    (scores, samples): (bool, Option<&SamplingConfig>),
    (longest, vocab_size): (usize, usize),
) -> Result<LoadedTeacher> {
    use candle_grpo_train::rollout::engine::{ServerGenerator, ServerTeacher};

    let teacher = scores.then(|| ServerTeacher::new(config)).transpose()?;
    let teacher = teacher.map(|teacher| teacher.with_longest_sequence(longest));
    let generator = samples.map(|samples| ServerGenerator::of_teacher(config, samples, vocab_size));
    Ok(LoadedTeacher {
        part: teacher.map(TeacherPart::other),
        generator: generator.transpose()?.map(|own| Arc::new(own) as _),
    })
}

#[cfg(not(feature = "engines"))]
fn on_servers(
    _: &RolloutConfig,
    _: (bool, Option<&SamplingConfig>),
    _: (usize, usize),
) -> Result<LoadedTeacher> {
    anyhow::bail!("given, must be absent: this program was built without the feature engines")
}

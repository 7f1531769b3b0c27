//! A run's prompts.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use candle_grpo_core::Invalid;
use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_train::data::chat_columns::{self, TOOLS, VARIABLES};
use candle_grpo_train::data::{MixedOrder, Question, Row};
use candle_grpo_train::environment::EnvironmentConfig;
use candle_grpo_train::learn::{DemonstrationPart, MemoryPlan, SelfTeacherConfig};
use candle_grpo_train::model::Chat;
use candle_grpo_train::run::RunInputs;
use candle_grpo_train::sft::SftDataset;
use candle_grpo_train::{
    ChatTemplate, Dataset, Generator, Pretrained, Prompt, RewardFunction, TrainConfig,
    TrainerParts, find_invalid,
};
use serde_json::json;
use tokenizers::Tokenizer;

use super::teacher::{check_teachers, self_teacher};
use crate::config::{Configuration, RunConfig};

/// A run's prompts.
pub struct RunPrompts {
    /// The training prompts.
    pub train: Vec<Prompt>,
    /// The held-out prompts, possibly none.
    pub held_out: Vec<Prompt>,
    /// The order of the training prompts.
    pub order: MixedOrder,
    /// The demonstrations, if the run has any.
    pub demonstrations: Option<SftDataset>,
    /// The shapes of the teachers that are models in this process, once [`Self::read`] has checked
    /// them.
    pub teachers: Vec<DecoderConfig>,
    /// The policy as its own teacher, with the token count of the longest prompt that it reads.
    pub self_teacher: Option<(SelfTeacherConfig, usize)>,
}

impl RunPrompts {
    /// Reads a run's data, and checks it against the settings and the model's shape. Also returns
    /// the rows.
    ///
    /// # Errors
    ///
    /// Returns a [`ConfigError`](crate::config::ConfigError) if a key does not fit the data or the
    /// model. Other errors come from [`RunConfig::load_data`] and [`Self::new`].
    pub fn read(config: &RunConfig, pretrained: &Pretrained) -> Result<(Dataset, Self)> {
        let dataset = config.load_data()?;
        let mut prompts = Self::new(config, &dataset, pretrained)?;
        config.check_model(&pretrained.model, &prompts.train, &prompts.held_out)?;
        prompts.teachers = check_teachers(config, pretrained, &prompts.train)?;
        Ok((dataset, prompts))
    }

    /// Makes the prompts for both parts of `dataset`, see [`prompts`], and reads the
    /// demonstrations.
    pub fn new(config: &RunConfig, dataset: &Dataset, pretrained: &Pretrained) -> Result<Self> {
        if dataset.held_out_in_train > 0 {
            tracing::warn!(
                "{} of {} held-out rows ask the same as training rows, so evaluations also measure memorization",
                dataset.held_out_in_train,
                dataset.held_out.len()
            );
        }
        let prompts = |rows| prompts(config, dataset, rows, pretrained);
        let (train, held_out) = (prompts(&dataset.train)?, prompts(&dataset.held_out)?);
        let source = |prompt: &Prompt| {
            let row = dataset.train.get(prompt.index as usize)?;
            row.source(&config.data.train)
        };
        let sources: Vec<usize> = train.iter().filter_map(source).collect();
        let order = config.data.order(&sources, config.seed());
        let order = order.map_err(|error| match find_invalid(&error) {
            Some(Invalid { field, value, must }) => {
                let message = format!("{value}, must {must}");
                config.error(&format!("data.{field}"), &message).into()
            }
            None => error,
        })?;
        let demonstrations = config.load_demonstrations(pretrained)?;
        if let Some(rows) = &demonstrations {
            rows.warn("demonstrations");
        }
        Ok(Self {
            self_teacher: self_teacher(config, dataset, &train, pretrained)?,
            train,
            held_out,
            order,
            demonstrations,
            teachers: Vec::new(),
        })
    }

    /// Returns the token count of the longest possible row: a prompt with a completion, or a
    /// demonstration. With an environment, which may extend a prompt, it is `usize::MAX`.
    pub fn longest_row(&self, config: &RunConfig) -> usize {
        if config.environment.is_some() {
            return usize::MAX;
        }
        let longest = |prompts: &[Prompt], new: usize| {
            let rows = prompts.iter().map(|prompt| prompt.tokens.len());
            rows.max().map_or(0, |tokens| tokens.saturating_add(new))
        };
        let rows = self.demonstrations.as_ref().map(SftDataset::longest_row);
        let sampled = self.longest_sample(&config.train);
        let read = self.self_teacher.as_ref();
        let read = read.map(|(_, tokens)| tokens + config.train.sampling.max_new_tokens);
        longest(&self.train, config.train.sampling.max_new_tokens)
            .max(read.unwrap_or(0))
            .max(sampled)
            .max(longest(
                &self.held_out,
                config.evaluation.sampler.max_new_tokens,
            ))
            .max(rows.unwrap_or(0))
    }

    /// Returns the token count of the longest prompt with the longest sample of a teacher; 0 if
    /// none samples.
    fn longest_sample(&self, train: &TrainConfig) -> usize {
        train.teacher_samples().map_or(0, |samples| {
            let new = samples.sampling(&train.sampling).max_new_tokens;
            Prompt::longest(&self.train).saturating_add(new)
        })
    }

    /// Describes the rows that a run trains on beside its prompts, if there are any.
    pub fn other_rows(&self, config: &RunConfig) -> Option<String> {
        if let Some(samples) = config.train.teacher_samples() {
            let sampling = samples.sampling(&config.train.sampling);
            return Some(format!(
                "Demonstrations: the teacher samples {} for each prompt of a step, of at most {} tokens, at temperature {}.",
                samples.samples_per_prompt, sampling.max_new_tokens, sampling.temperature,
            ));
        }
        let rows = &self.demonstrations.as_ref()?.train;
        Some(format!(
            "Demonstrations: {}, with {} tokens, {} of which train.",
            rows.examples.len(),
            rows.num_tokens(),
            rows.num_trained_tokens(),
        ))
    }

    /// Returns the memory plan of training with these prompts and the settings `train`, on one of
    /// `world_size` ranks.
    ///
    /// # Errors
    ///
    /// As for [`MemoryPlan::of_rank`].
    pub(super) fn memory_plan(
        &self,
        train: &TrainConfig,
        model: &DecoderConfig,
        world_size: usize,
    ) -> Result<MemoryPlan> {
        let longest_prompt = Prompt::longest(&self.train);
        let demonstrations = self.demonstrations.as_ref();
        let longest_row = demonstrations.map_or(0, |rows| rows.train.longest_kept());
        let longest_row = longest_row.max(self.longest_sample(train));
        let lengths = (longest_prompt, longest_row);
        let plan = MemoryPlan::of_rank(model, train, lengths, world_size)?;
        let plan = self.teachers.iter().try_fold(plan, |plan, teacher| {
            let plan = plan.with_teacher(teacher, train, world_size);
            plan.with_teacher_samples(teacher, train, longest_prompt)
        })?;
        match &self.self_teacher {
            Some((teacher, prompt)) => {
                plan.with_self_teacher(model, train, (teacher, *prompt), world_size)
            }
            None => Ok(plan),
        }
    }

    /// Computes the digests of a run's inputs. `pretrained` must be in its state before training.
    pub(super) fn inputs(&self, config: &RunConfig, pretrained: &Pretrained) -> Result<RunInputs> {
        let (train, held_out) = (&self.train, &self.held_out);
        let inputs = RunInputs::new(pretrained, train, held_out, &config.reward_files())?;
        let inputs = inputs.with_hub_commits(config.hub_commits().clone());
        Ok(match &self.demonstrations {
            Some(rows) => inputs.with_rows("demonstration_data", &rows.train.digests),
            None => inputs,
        })
    }

    /// Returns the parts of a trainer that learns from these prompts, with the settings `train`,
    /// and from the samples of the `teacher` if there is one. It takes the parameters, which it
    /// may free.
    pub(super) fn into_parts(
        self,
        config: &RunConfig,
        pretrained: &mut Pretrained,
        reward: impl RewardFunction + 'static,
        train: TrainConfig,
        teacher: Option<Arc<dyn Generator>>,
    ) -> TrainerParts {
        let curriculum = config.data.curriculum.clone();
        let rows = self.demonstrations;
        let rows = rows.map(|rows| DemonstrationPart::Rows(rows.train.examples, rows.order));
        let demonstrations = teacher.map(DemonstrationPart::Teacher).or(rows);
        TrainerParts {
            order: Some(self.order).filter(|_| curriculum.is_none()),
            curriculum,
            demonstrations,
            ..TrainerParts::new(
                pretrained.model.clone(),
                mem::replace(&mut pretrained.parameters, Parameters::empty()),
                pretrained.tokenizer.clone(),
                self.train,
                reward,
                train,
            )
        }
    }
}

/// Makes the prompts for `rows` in order, and leaves out those longer than
/// [`RunConfig::max_prompt_tokens`].
///
/// The model's chat template renders conversations, with the variables in the data section and the
/// generation prompt. The configured prefill follows.
///
/// # Errors
///
/// Returns an error with file and line if a row is a conversation and the model has no chat
/// template, or the template rejects the row. Returns an error if the template renders different
/// rows all alike, or no prompt is short enough.
pub fn prompts(
    config: &RunConfig,
    dataset: &Dataset,
    rows: &[Row],
    pretrained: &Pretrained,
) -> Result<Vec<Prompt>> {
    let max_prompt_tokens = config.max_prompt_tokens;
    let template = config.chat_template(pretrained)?;
    let environment = config.environment.as_ref();
    let tokenizer = &pretrained.tokenizer;
    let mut prompts = all_prompts(dataset, rows, template.as_ref(), environment, tokenizer)?;
    let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max();
    let shortest = prompts.iter().map(|prompt| prompt.tokens.len()).min();
    prompts.retain(|prompt| prompt.tokens.len() <= max_prompt_tokens);
    if let (true, Some(shortest)) = (prompts.is_empty(), shortest) {
        let message = format!(
            "{max_prompt_tokens}, must be at least {shortest}, the shortest length of {} prompts",
            rows.len()
        );
        return Err(config.error("max_prompt_tokens", &message).into());
    }
    let left_out = rows.len() - prompts.len();
    if left_out > 0 {
        tracing::warn!(
            "{left_out} of {} prompts are dropped: they have more than {max_prompt_tokens} tokens, up to {}",
            rows.len(),
            longest.unwrap_or(0)
        );
    }
    Ok(prompts)
}

/// Makes the prompts for `rows` in order, with a chat template for conversations.
///
/// # Errors
///
/// As [`prompts`], except about lengths.
pub(crate) fn all_prompts(
    dataset: &Dataset,
    rows: &[Row],
    template: Option<&ChatTemplate>,
    environment: Option<&EnvironmentConfig>,
    tokenizer: &Tokenizer,
) -> Result<Vec<Prompt>> {
    let mut prompts = Vec::with_capacity(rows.len());
    let mut unused = BTreeMap::new();
    for (index, row) in rows.iter().enumerate() {
        let asked = (dataset.question(row)?, dataset.prefill(row)?);
        let prompt = prompt(
            index as u64,
            asked,
            row,
            template,
            environment,
            tokenizer,
            &mut unused,
        );
        prompts.push(prompt.with_context(|| row.place())?);
    }
    for ((column, reason), rows) in unused {
        tracing::warn!("column {column:?}: not used in {rows} rows, {reason}");
    }
    ensure_different(dataset, rows, &prompts)?;
    Ok(prompts)
}

/// Returns an error if different questions have become one text.
fn ensure_different(dataset: &Dataset, rows: &[Row], prompts: &[Prompt]) -> Result<()> {
    let alike = prompts.windows(2).all(|pair| pair[0].text == pair[1].text);
    if !alike || prompts.len() < 2 {
        return Ok(());
    }
    let first = dataset.question(&rows[0])?;
    for row in rows {
        ensure!(
            dataset.question(row)? == first,
            "chat template: renders all {} rows alike, as {:?}; it must print the messages",
            rows.len(),
            prompts[0].text
        );
    }
    Ok(())
}

/// Makes a row's prompt from its question and prefill. If the prompt cannot use a column, counts
/// the row in `unused` by column and reason.
fn prompt(
    index: u64,
    (question, prefill): (Question, String),
    row: &Row,
    template: Option<&ChatTemplate>,
    environment: Option<&EnvironmentConfig>,
    tokenizer: &Tokenizer,
    unused: &mut BTreeMap<(&'static str, &'static str), usize>,
) -> Result<Prompt> {
    let columns = &row.columns;
    let has = |name: &str| columns.get(name).is_some_and(|value| !value.is_null());
    let mut count = |name, reason| {
        if has(name) {
            *unused.entry((name, reason)).or_default() += 1;
        }
    };
    let schemas = environment.map(|environment| environment.schemas(columns));
    let schemas = schemas.transpose()?.flatten();
    let mut messages = match question {
        Question::Text(text) => {
            for name in [TOOLS, VARIABLES] {
                count(name, "whose prompts are plain texts");
            }
            let prompt = Prompt::plain(index, &(text + &prefill), columns.clone(), tokenizer);
            return Ok(prompt?.with_tools(schemas));
        }
        Question::Messages(messages) => messages,
    };
    let template = template.context(
        "the model has no chat template: give model.chat_template, or set data.chat to false",
    )?;
    let tools = match schemas {
        Some(schemas) => {
            if environment.and_then(EnvironmentConfig::tools_column) != Some(TOOLS) {
                count(TOOLS, "as the environment provides the tools");
            }
            Some(schemas)
        }
        None => chat_columns::tools(columns, TOOLS).unwrap_or_else(|_| {
            count(TOOLS, "as it is not a list of tool schemas");
            None
        }),
    };
    let variables = chat_columns::variables(columns)?;
    let chat = Chat::new(&messages).generation_prompt();
    let chat = chat.with_row(tools.as_ref(), variables);
    let text = template.render(&chat)? + &prefill;
    if !prefill.is_empty() {
        messages.push(json!({"role": "assistant", "content": prefill}));
    }
    let prompt = Prompt::new(index, &text, columns.clone(), tokenizer)?;
    let prompt = prompt.with_messages(messages).with_tools(tools);
    Ok(prompt.with_variables(variables.cloned().unwrap_or_default()))
}

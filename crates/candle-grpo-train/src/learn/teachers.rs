//! The policies that a run learns from.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_grpo_base::column::find;
use candle_grpo_base::within;
use candle_grpo_core::validate::check;
use candle_grpo_nn::{Decoder, LanguageModel, ModelConfig};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::actor::Actor;
use super::rollout_groups::RolloutGroups;
use super::self_teacher::{SelfTeacher, SelfTeacherConfig};
use super::teacher_prompts::TeacherPrompts;
use crate::rollout::decode::decode_answers;
use crate::teacher::Teacher;
use crate::{ChatTemplate, Prompt, SamplingConfig, TrainConfig};

/// The policy to learn from.
#[derive(Clone)]
#[expect(clippy::large_enum_variant, reason = "a run has few")]
pub enum TeacherPart {
    /// Another policy, which does not change.
    Other(Arc<dyn Teacher>),
    /// The policy itself, which reads other prompts.
    Own {
        /// The settings.
        config: SelfTeacherConfig,
        /// Renders prompts that are conversations.
        chat_template: Option<ChatTemplate>,
    },
    /// Several policies, one of which teaches each row.
    ByColumn {
        /// The column whose value names the teacher of a row. A row with another value has no
        /// teacher.
        column: String,
        /// The teachers by name, at most one of them [`Self::Own`].
        teachers: BTreeMap<String, Self>,
    },
}

impl TeacherPart {
    /// Creates [`Self::Other`].
    pub fn other(teacher: impl Teacher + 'static) -> Self {
        Self::Other(Arc::new(teacher))
    }

    /// Checks the part, for a run with the settings `train`.
    pub(super) fn validate(&self, train: &TrainConfig) -> Result<()> {
        match self {
            Self::Other(_) => Ok(()),
            Self::Own { config, .. } => config.validate(train),
            Self::ByColumn { teachers, .. } => {
                let found = teachers.len();
                check(found > 0, "teachers", "none", "be at least one")?;
                let is_own = |teacher: &&Self| matches!(teacher, Self::Own { .. });
                let own = teachers.values().filter(is_own).count();
                check(
                    own <= 1,
                    "teachers",
                    own,
                    "have the policy itself at most once",
                )?;
                teachers.iter().try_for_each(|(name, teacher)| {
                    let is_one = !matches!(teacher, Self::ByColumn { .. });
                    check(is_one, name, "several teachers", "be one")?;
                    ensure!(!name.is_empty(), "teachers: one has no name, must have one");
                    let valid = teacher.validate(train);
                    valid.map_err(|error| within(name, error))
                })
            }
        }
    }

    /// The teachers by name. A single one has an empty name.
    fn by_name(&self) -> Vec<(&str, &Self)> {
        match self {
            Self::ByColumn { teachers, .. } => {
                let teachers = teachers.iter();
                teachers
                    .map(|(name, teacher)| (name.as_str(), teacher))
                    .collect()
            }
            one => vec![("", one)],
        }
    }
}

/// The teachers of a run by name, as they compute. A single one has an empty name.
pub(crate) struct Teachers<M = Decoder>(Vec<(String, RunTeacher<M>)>);

#[expect(clippy::large_enum_variant, reason = "a run has few")]
enum RunTeacher<M> {
    Other(Arc<dyn Teacher>),
    Own(SelfTeacher<M>),
}

impl<M> Default for Teachers<M> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<M: LanguageModel> Teachers<M> {
    /// Creates the teachers in `part`, for the policy in `actor`, of shape `model`.
    pub(super) fn new<C: ModelConfig<Model = M>>(
        part: &TeacherPart,
        (model, actor): (&C, &Actor<M>),
    ) -> Result<Self> {
        let teacher = |(name, part): (&str, &TeacherPart)| {
            let teacher = match part {
                TeacherPart::Other(teacher) => RunTeacher::Other(Arc::clone(teacher)),
                TeacherPart::Own { config, .. } => {
                    RunTeacher::Own(SelfTeacher::new(model, actor, config.refresh)?)
                }
                // Validated to have no other teachers in it.
                TeacherPart::ByColumn { .. } => return Ok(None),
            };
            Ok(Some((name.to_owned(), teacher)))
        };
        let all = part.by_name().into_iter().map(teacher);
        let all = all.filter_map(Result::transpose);
        Ok(Self(all.collect::<Result<_>>()?))
    }

    /// Returns the teachers by name.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &dyn Teacher)>
    where
        M: Send + Sync,
    {
        self.0.iter().map(|(name, teacher)| {
            let teacher: &dyn Teacher = match teacher {
                RunTeacher::Other(teacher) => teacher.as_ref(),
                RunTeacher::Own(own) => own.reference(),
            };
            (name.as_str(), teacher)
        })
    }

    /// Returns the policy itself, if it is one of the teachers.
    pub(crate) fn own(&self) -> Option<&SelfTeacher<M>> {
        self.0.iter().find_map(|(_, teacher)| match teacher {
            RunTeacher::Own(own) => Some(own),
            RunTeacher::Other(_) => None,
        })
    }

    /// [`Self::own`], to change it.
    pub(crate) fn own_mut(&mut self) -> Option<&mut SelfTeacher<M>> {
        self.0.iter_mut().find_map(|(_, teacher)| match teacher {
            RunTeacher::Own(own) => Some(own),
            RunTeacher::Other(_) => None,
        })
    }
}

/// The teacher of a completion.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TaughtBy {
    /// Its name; empty for a single teacher.
    pub name: Arc<str>,
    /// The tokens at the start of the completion's sequences, and those that the teacher reads in
    /// their place. Absent if it reads the same.
    pub prompt: Option<(Vec<u32>, Vec<u32>)>,
}

/// The choice of teachers and their prompts.
pub(super) struct TeacherChoice {
    /// The column that names the teacher of a row, if there are several.
    column: Option<String>,
    teachers: BTreeMap<Arc<str>, Option<TeacherPrompts>>,
    /// The most tokens that the policy can read.
    longest_row: usize,
}

impl TeacherChoice {
    pub(super) fn new(part: &TeacherPart, longest_row: usize) -> Result<Self> {
        let teachers = part.by_name().into_iter().map(|(name, part)| {
            let prompts = match part {
                TeacherPart::Own {
                    config,
                    chat_template,
                } => Some(config.prompts(chat_template.clone())?),
                _ => None,
            };
            Ok((Arc::from(name), prompts))
        });
        Ok(Self {
            column: match part {
                TeacherPart::ByColumn { column, .. } => Some(column.clone()),
                _ => None,
            },
            teachers: teachers.collect::<Result<_>>()?,
            longest_row,
        })
    }

    /// Returns the teacher of each completion of `groups`, whose prompts are rows of `prompts`;
    /// `None` for those without one.
    pub(super) fn of_groups(
        &self,
        groups: &RolloutGroups,
        prompts: &[Prompt],
        (sampling, tokenizer): (&SamplingConfig, &Tokenizer),
    ) -> Result<Vec<Option<TaughtBy>>> {
        let n = groups.num_generations;
        let mut all = Vec::with_capacity(groups.rollouts.len());
        for (group, &row) in groups.rows.iter().enumerate() {
            let prompt = &prompts[row];
            let name = match &self.column {
                None => Some(String::new()),
                Some(column) => teacher_name(&prompt.columns, column),
            };
            let teacher = name.and_then(|name| self.teachers.get_key_value(name.as_str()));
            let taught_by = |read: Option<Vec<u32>>, name: &Arc<str>| TaughtBy {
                name: Arc::clone(name),
                prompt: read.map(|read| (prompt.tokens.clone(), read)),
            };
            match teacher {
                Some((name, Some(source))) if source.shows_sibling() => {
                    let own = group * n..(group + 1) * n;
                    let (rollouts, rewards) = (&groups.rollouts[own.clone()], &groups.scores[own]);
                    let texts = decode_answers(rollouts, sampling, tokenizer)?;
                    for (number, rollout) in rollouts.iter().enumerate() {
                        let sibling = source.sibling(number, rewards);
                        let read = sibling
                            .map(|sibling| source.tokens(prompt, Some(&texts[sibling]), tokenizer));
                        let longest = self.longest_row.saturating_sub(rollout.response_length());
                        let read = read.transpose()?.filter(|read| read.len() <= longest);
                        all.push(read.map(|read| taught_by(Some(read), name)));
                    }
                }
                Some((name, source)) => {
                    let read = source.as_ref();
                    let read = read.map(|source| source.tokens(prompt, None, tokenizer));
                    let teacher = taught_by(read.transpose()?, name);
                    all.extend(std::iter::repeat_n(Some(teacher), n));
                }
                None => all.extend(std::iter::repeat_n(None, n)),
            }
        }
        Ok(all)
    }
}

/// Returns the name of a row's teacher, in this column.
pub fn teacher_name(columns: &Value, column: &str) -> Option<String> {
    match find(columns, column)? {
        Value::Null => None,
        Value::String(name) => Some(name.clone()),
        other => Some(other.to_string()),
    }
}

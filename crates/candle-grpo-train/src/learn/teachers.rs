//! The policies that a run learns from.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, ensure};
use candle_grpo_base::column::find;
use candle_grpo_base::within;
use candle_grpo_core::Invalid;
use candle_grpo_core::validate::check;
use candle_grpo_nn::{Decoder, LanguageModel, ModelConfig};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::actor::Actor;
use super::rollout_groups::RolloutGroups;
use super::self_teacher::{SelfTeacher, SelfTeacherConfig};
use super::teacher_prompts::{ShownTexts, TeacherPrompts};
use crate::rollout::decode::decode_answers;
use crate::teacher::Teacher;
use crate::{ChatTemplate, Prompt, Rollout, SamplingConfig, TrainConfig};

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
        let mut teachers = self.by_name()?.into_iter();
        teachers.try_for_each(|(name, teacher)| match teacher {
            Single::Other(_) => Ok(()),
            Single::Own(config, _) if name.is_empty() => config.validate(train),
            Single::Own(config, _) => config.validate(train).map_err(|error| within(name, error)),
        })
    }

    /// Returns the teachers by name. A single one has an empty name.
    ///
    /// # Errors
    ///
    /// Fails if there are none, one has no name or is several, or several are the policy itself.
    fn by_name(&self) -> Result<Vec<(&str, Single<'_>)>> {
        let Self::ByColumn { teachers, .. } = self else {
            return Ok(Vec::from_iter(self.single().map(|teacher| ("", teacher))));
        };
        check(!teachers.is_empty(), "teachers", "none", "be at least one")?;
        let mut all = Vec::with_capacity(teachers.len());
        for (name, part) in teachers {
            ensure!(!name.is_empty(), "teachers: one has no name, must have one");
            let several = || Invalid::new(name, "several teachers", "be one");
            all.push((name.as_str(), part.single().ok_or_else(several)?));
        }
        let is_own = |(_, teacher): &&(&str, Single<'_>)| matches!(teacher, Single::Own(..));
        let own = all.iter().filter(is_own).count();
        check(
            own <= 1,
            "teachers",
            own,
            "have the policy itself at most once",
        )?;
        Ok(all)
    }

    /// Returns the teacher, unless there are several.
    fn single(&self) -> Option<Single<'_>> {
        match self {
            Self::Other(teacher) => Some(Single::Other(teacher)),
            Self::Own {
                config,
                chat_template,
            } => Some(Single::Own(config, chat_template.as_ref())),
            Self::ByColumn { .. } => None,
        }
    }
}

/// A teacher that is not several.
enum Single<'a> {
    Other(&'a Arc<dyn Teacher>),
    Own(&'a SelfTeacherConfig, Option<&'a ChatTemplate>),
}

/// The teachers of a run by name, as they compute. A single one has an empty name.
pub(crate) struct Teachers<M = Decoder>(Vec<(String, RunTeacher<M>)>);

enum RunTeacher<M> {
    Other(Arc<dyn Teacher>),
    Own(Box<SelfTeacher<M>>),
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
        let all = part.by_name()?.into_iter().map(|(name, teacher)| {
            let teacher = match teacher {
                Single::Other(teacher) => RunTeacher::Other(Arc::clone(teacher)),
                Single::Own(config, _) => {
                    RunTeacher::Own(Box::new(SelfTeacher::new(model, actor, config.refresh)?))
                }
            };
            Ok((name.to_owned(), teacher))
        });
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
            RunTeacher::Own(own) => Some(own.as_ref()),
            RunTeacher::Other(_) => None,
        })
    }

    /// [`Self::own`], to change it.
    pub(crate) fn own_mut(&mut self) -> Option<&mut SelfTeacher<M>> {
        self.0.iter_mut().find_map(|(_, teacher)| match teacher {
            RunTeacher::Own(own) => Some(own.as_mut()),
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

impl TaughtBy {
    /// Returns the number of tokens in the longest sequence of `rollout` as the teacher reads it.
    fn longest_row(&self, rollout: &Rollout) -> usize {
        let rows = rollout.rows();
        let rows = rows.map(|(prompt, completion)| prompt.len() + completion.tokens.len());
        let longest = rows.max().unwrap_or(0);
        match &self.prompt {
            Some((own, read)) => longest.saturating_sub(own.len()) + read.len(),
            None => longest,
        }
    }
}

/// The choice of teachers and their prompts.
pub(super) struct TeacherChoice {
    /// The column that names the teacher of a row, if there are several.
    column: Option<String>,
    teachers: BTreeMap<Arc<str>, Reader>,
}

/// A teacher as a reader.
struct Reader {
    /// The prompts in place of the policy's.
    prompts: Option<TeacherPrompts>,
    /// The most tokens that it can read.
    longest_row: usize,
}

impl TeacherChoice {
    /// Creates the choice between the teachers in `part`, for a policy that can read sequences of
    /// `longest_row` tokens.
    pub(super) fn new(part: &TeacherPart, longest_row: usize) -> Result<Self> {
        let teachers = part.by_name()?.into_iter().map(|(name, teacher)| {
            let reader = match teacher {
                Single::Other(teacher) => Reader {
                    prompts: None,
                    longest_row: teacher.longest_row(),
                },
                Single::Own(config, chat_template) => Reader {
                    prompts: Some(config.prompts(chat_template.cloned())?),
                    longest_row,
                },
            };
            Ok((Arc::from(name), reader))
        });
        Ok(Self {
            column: match part {
                TeacherPart::ByColumn { column, .. } => Some(column.clone()),
                _ => None,
            },
            teachers: teachers.collect::<Result<_>>()?,
        })
    }

    /// Returns the teacher of each completion of `groups`, whose prompts are rows of `prompts`;
    /// `None` for those without one, or whose teacher cannot read them.
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
            let Some((name, reader)) = teacher else {
                all.extend(std::iter::repeat_n(None, n));
                continue;
            };
            let taught_by = |read: Option<Vec<u32>>| TaughtBy {
                name: Arc::clone(name),
                prompt: read.map(|read| (prompt.tokens.clone(), read)),
            };
            let own = group * n..(group + 1) * n;
            let (rollouts, rewards) = (&groups.rollouts[own.clone()], &groups.scores[own]);
            let taught = match &reader.prompts {
                Some(source) if source.shows_sibling() || source.shows_feedback() => {
                    let texts = if source.shows_sibling() {
                        decode_answers(rollouts, sampling, tokenizer)?
                    } else {
                        Vec::new()
                    };
                    let taught = (0..n).map(|number| -> Result<Option<TaughtBy>> {
                        let sibling = source.sibling(number, rewards);
                        let feedback = groups.feedback(group * n + number);
                        let feedback = feedback.filter(|_| source.shows_feedback());
                        let lacks_sibling = source.shows_sibling() && sibling.is_none();
                        let lacks_feedback = source.shows_feedback() && feedback.is_none();
                        if lacks_sibling || lacks_feedback {
                            return Ok(None);
                        }
                        let shown = ShownTexts {
                            sibling: sibling.map(|sibling| texts[sibling].as_str()),
                            feedback: feedback.as_deref(),
                        };
                        let read = source.tokens(prompt, shown, tokenizer)?;
                        Ok(Some(taught_by(Some(read))))
                    });
                    taught.collect::<Result<Vec<_>>>()?
                }
                source => {
                    let read = source.as_ref();
                    let nothing = ShownTexts::default();
                    let read = read.map(|source| source.tokens(prompt, nothing, tokenizer));
                    vec![Some(taught_by(read.transpose()?)); n]
                }
            };
            let pairs = taught.into_iter().zip(rollouts);
            all.extend(pairs.map(|(taught, rollout)| {
                taught.filter(|taught| taught.longest_row(rollout) <= reader.longest_row)
            }));
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::rollout::{Completion, FinishReason, Row};

    #[test]
    fn a_null_names_no_teacher() {
        let columns = json!({"a": null, "b": "code", "c": 3});
        let name = |column| teacher_name(&columns, column);
        assert_eq!(name("a"), None);
        assert_eq!(name("none"), None);
        assert_eq!(name("b").as_deref(), Some("code"));
        assert_eq!(name("c").as_deref(), Some("3"));
    }

    #[test]
    fn a_teacher_reads_the_longest_sequence_after_its_own_prompt() {
        let completion = |length: usize| Completion {
            tokens: vec![1; length],
            drawn_log_probs: vec![0.; length],
            log_probs: None,
            written: None,
            weight_versions: vec![0; length],
            finish_reason: FinishReason::Length,
            experts: None,
        };
        let rollout = Rollout {
            prompt_index: 0,
            sample_index: 0,
            prompt_tokens: vec![1, 2],
            completion: completion(5),
            episode: None,
            role: None,
            branches: vec![Row {
                // The prompt, and what came before the branch.
                prompt_tokens: vec![1, 2, 3, 4, 5, 6],
                completion: completion(4),
                role: None,
            }],
        };
        let longest_row = |prompt| {
            let name = Arc::default();
            TaughtBy { name, prompt }.longest_row(&rollout)
        };
        assert_eq!(longest_row(None), 10);
        let own = vec![1, 2];
        assert_eq!(longest_row(Some((own.clone(), vec![7, 8, 9]))), 11);
        assert_eq!(longest_row(Some((own, vec![7]))), 9);
    }
}

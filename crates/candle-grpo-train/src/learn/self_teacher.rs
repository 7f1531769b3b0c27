//! The policy as its own teacher.

use std::collections::HashMap;

use anyhow::Result;
use candle_core::Tensor;
use candle_grpo_core::validate::{Name, check, finite};
use candle_grpo_nn::optim::Sharding;
use candle_grpo_nn::{Decoder, LanguageModel, ModelConfig, Parameters};
use serde::{Deserialize, Serialize};

use super::actor::Actor;
use super::reference::{Reference, ReferenceRefresh};
use super::teacher_prompts::TeacherPrompts;
use crate::{ChatTemplate, TrainConfig};
use candle_grpo_base::within;

/// The policy as its own teacher: it reads more in its prompt, such as a solution, and scores the
/// same completion. The policy learns to answer without it (SDFT,
/// <https://arxiv.org/abs/2601.19897>; SDPO, <https://arxiv.org/abs/2601.20802>; RLSD,
/// <https://arxiv.org/abs/2604.03128>).
///
/// ```
/// use candle_grpo_train::TrainConfig;
/// use candle_grpo_train::learn::{ReferenceRefresh, SelfTeacherConfig};
///
/// let config = SelfTeacherConfig {
///     prompt: Some("{question}\n\nA correct answer is:\n{solution}".to_owned()),
///     // A moving average of the policy.
///     refresh: Some(ReferenceRefresh { every_steps: 1, alpha: 0.05 }),
///     ..SelfTeacherConfig::default()
/// };
/// config.validate(&TrainConfig::default())?;
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SelfTeacherConfig {
    /// Template of the teacher's prompt, with `{column}` for columns, and `{prompt}` for the
    /// policy's prompt. It takes the place of the prompt: of the last message in a conversation,
    /// otherwise of the whole text.
    pub prompt: Option<String>,
    /// Column with the teacher's prompt, in place of `prompt`: a text, or messages, which are the
    /// whole conversation.
    pub prompt_column: Option<String>,
    /// Shows the best other completion of the group to the teacher (SDPO). `{sibling}` in `prompt`
    /// stands for its text. Without one, a completion has no teacher. Absent: none is shown.
    pub sibling: Option<SiblingConfig>,
    /// Shows the teacher what the environment and the rewards said about the completion (SDPO):
    /// `{feedback}` in `prompt` stands for the texts of programs, environments, agents and judges.
    /// Without any, a completion has no teacher.
    pub feedback: bool,
    /// Updates of the teacher from the policy, with the keys of `reference_refresh`:
    /// `{every_steps: 1, alpha: 0.05}` is a moving average, and `{every_steps: 10}` copies the
    /// policy every 10 steps. Absent: the teacher is the initial policy.
    pub refresh: Option<ReferenceRefresh>,
}

/// Completions that a teacher may see.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct SiblingConfig {
    /// Smallest reward of a completion that a teacher sees. Default 1.
    pub min_reward: f64,
}

impl Default for SiblingConfig {
    fn default() -> Self {
        Self { min_reward: 1. }
    }
}

impl SelfTeacherConfig {
    /// Checks the options, for a run with the settings `train`.
    ///
    /// # Errors
    ///
    /// Fails if an option is not valid, or there is not exactly one source of prompts.
    pub fn validate(&self, train: &TrainConfig) -> Result<()> {
        self.prompts(None)?;
        if let Some(sibling) = &self.sibling {
            finite("sibling.min_reward", sibling.min_reward)?;
            check(
                train.num_generations > 1,
                "sibling",
                "given",
                "be absent with num_generations: 1, as a completion has no sibling",
            )?;
        }
        check(
            train.sharding != Sharding::Full || train.recipe.distillation_loss.is_none(),
            "recipe.distillation_loss",
            "given",
            "be absent with sharding: full and the policy as a teacher, whose output layer is divided",
        )?;
        let Some(refresh) = &self.refresh else {
            return Ok(());
        };
        refresh
            .validate()
            .map_err(|error| within("refresh", error))?;
        Ok(check(
            !train.divides_weights(),
            "refresh",
            "given",
            &format!(
                "be absent with sharding: {}, as it reads whole weights",
                Name(&train.sharding)
            ),
        )?)
    }

    /// Returns the prompts of the teacher. `chat_template` renders conversations.
    ///
    /// # Errors
    ///
    /// Fails if there is not exactly one source of prompts, or the template is not valid.
    pub fn prompts(&self, chat_template: Option<ChatTemplate>) -> Result<TeacherPrompts> {
        let source = (self.prompt.as_deref(), self.prompt_column.as_deref());
        let min_reward = self.sibling.map(|sibling| sibling.min_reward);
        TeacherPrompts::new(source, (min_reward, self.feedback), chat_template)
    }
}

/// A copy of the policy, which reads the prompts of a teacher.
pub(crate) struct SelfTeacher<M = Decoder> {
    reference: Reference<M>,
    refresh: Option<ReferenceRefresh>,
}

impl<M: LanguageModel> SelfTeacher<M> {
    /// Creates a copy of the policy in `actor`, of shape `model`. With adapters, it shares the
    /// frozen parameters.
    pub(super) fn new<C: ModelConfig<Model = M>>(
        model: &C,
        actor: &Actor<M>,
        refresh: Option<ReferenceRefresh>,
    ) -> Result<Self> {
        Ok(Self {
            reference: actor.reference_of(model, refresh.is_some())?,
            refresh,
        })
    }

    /// Lets the teacher follow the policy in `actor` after step `step`, if it is due.
    pub(super) fn refresh(&mut self, step: usize, actor: &Actor<M>) -> Result<()> {
        match self.refresh {
            Some(refresh) if refresh.is_due(step) => {
                self.reference.refresh(actor.trained(), refresh.alpha)
            }
            _ => Ok(()),
        }
    }

    /// Returns the model.
    pub(super) fn reference(&self) -> &Reference<M> {
        &self.reference
    }

    /// Returns the weights that a checkpoint has: those of a teacher that follows the policy.
    pub(crate) fn followed(&self) -> Option<&Parameters> {
        self.refresh.and(self.reference.parameters())
    }

    /// Returns the weights that never change, unless they are those under adapters.
    pub(crate) fn frozen(&self) -> Option<&Parameters> {
        let is_frozen = self.refresh.is_none();
        self.reference.parameters().filter(|_| is_frozen)
    }

    /// Replaces [`Self::followed`].
    pub(crate) fn set_values(&self, values: &HashMap<String, Tensor>) -> Result<()> {
        self.reference.set_values(values)
    }
}

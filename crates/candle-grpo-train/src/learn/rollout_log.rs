//! Training completions, for people to read.

use std::collections::BTreeMap;

use anyhow::Result;
use candle_grpo_core::validate::at_least_one;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::rollout_groups::RolloutGroups;
use crate::excerpt::excerpt;
use crate::rollout::decode::{answer_text, decode_tokens};
use crate::{FinishReason, Prompt, Rollout, SamplingConfig};

/// Selects which training completions a run writes to `rollouts.jsonl`.
///
/// A step writes at most `max_groups` groups, and each text has at most `max_chars` characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutLogConfig {
    /// Writes completions every this many steps, starting with the first. Absent: never.
    pub every_steps: Option<usize>,
    /// Maximum number of groups per step.
    pub max_groups: usize,
    /// Maximum number of characters in a text: a prompt, a completion, or a turn. The rest is cut
    /// off.
    pub max_chars: usize,
}

impl Default for RolloutLogConfig {
    fn default() -> Self {
        Self {
            every_steps: Some(10),
            max_groups: 4,
            max_chars: 4000,
        }
    }
}

impl RolloutLogConfig {
    /// Checks the values.
    ///
    /// # Errors
    ///
    /// Fails if one is 0.
    pub fn validate(&self) -> Result<()> {
        at_least_one("every_steps", self.every_steps.unwrap_or(1))?;
        at_least_one("max_groups", self.max_groups)?;
        Ok(at_least_one("max_chars", self.max_chars)?)
    }

    /// Returns whether completions are written at step `step`, starting at 1.
    pub fn is_due(&self, step: usize) -> bool {
        let every = self.every_steps;
        every.is_some_and(|every| step == 1 || step.is_multiple_of(every))
    }
}

/// A completion in a training step: a line in `rollouts.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutRecord {
    /// Step number, starting at 1.
    pub step: usize,
    /// Its group number within the step, starting at 0.
    pub group: usize,
    /// [`Rollout::prompt_index`].
    pub prompt_index: u64,
    /// [`Rollout::sample_index`].
    pub sample_index: usize,
    /// The prompt's text. With an environment, it includes special tokens, and what the
    /// environment appended.
    pub prompt: String,
    /// The text that rewards score, without special tokens. With an environment, this is the last
    /// turn.
    pub completion: String,
    /// Trajectory parts, in order; empty without an environment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub turns: Vec<RolloutTurn>,
    /// Score: the sum over the components. Absent if missing.
    pub reward: Option<f32>,
    /// Score components by name.
    pub rewards: BTreeMap<String, Option<f32>>,
    /// Mean advantage over its tokens. Absent if it did not train.
    pub advantage: Option<f32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Number of tokens, including an environment's.
    pub response_length: usize,
}

/// A trajectory part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutTurn {
    /// The author.
    pub role: TurnRole,
    /// The text, with special tokens.
    pub text: String,
    /// The reward that an environment gave to a policy turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
}

/// Who wrote a [`RolloutTurn`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TurnRole {
    /// The policy.
    Policy,
    /// The environment.
    Environment,
}

/// A step's completions, as the trainer keeps them.
pub(crate) struct StepRollouts {
    pub(crate) step: usize,
    pub(crate) groups: RolloutGroups,
    /// Mean advantage for each completion that trained.
    pub(crate) advantages: Vec<Option<f32>>,
}

impl StepRollouts {
    /// Records for the first groups.
    pub(crate) fn records(
        &self,
        prompts: &[Prompt],
        sampling: &SamplingConfig,
        tokenizer: &Tokenizer,
        config: &RolloutLogConfig,
    ) -> Result<Vec<RolloutRecord>> {
        let Self { step, groups, .. } = self;
        let count = config.max_groups.saturating_mul(groups.num_generations);
        let text = |text: String| excerpt(text, config.max_chars);
        let components = groups.named_components();
        let number = |score: f32| (!score.is_nan()).then_some(score);
        let rollouts = groups.rollouts.iter().enumerate().take(count);
        let record = |(i, rollout): (usize, &Rollout)| {
            let group = i / groups.num_generations;
            let prompt = match rollout.episode {
                Some(_) => decode_tokens(&rollout.prompt_tokens, tokenizer)?,
                None => prompts[groups.rows[group]].text.clone(),
            };
            let completion = &rollout.completion;
            let rewards = components.iter().map(|(name, scores)| {
                let score = scores.get(i).copied().unwrap_or(f32::NAN);
                (name.clone(), number(score))
            });
            let mut turns = turns(rollout, tokenizer)?;
            for turn in &mut turns {
                turn.text = text(std::mem::take(&mut turn.text));
            }
            Ok(RolloutRecord {
                step: *step,
                group,
                prompt_index: rollout.prompt_index,
                sample_index: rollout.sample_index,
                prompt: text(prompt),
                completion: text(answer_text(rollout.last_turn(), sampling, tokenizer)?),
                turns,
                reward: number(groups.scores[i]),
                rewards: rewards.collect(),
                advantage: self.advantages.get(i).copied().flatten(),
                finish_reason: completion.finish_reason,
                response_length: completion.tokens.len(),
            })
        };
        rollouts.map(record).collect()
    }
}

/// A trajectory's turns, and the text between them.
fn turns(rollout: &Rollout, tokenizer: &Tokenizer) -> Result<Vec<RolloutTurn>> {
    let Some(episode) = &rollout.episode else {
        return Ok(Vec::new());
    };
    let text =
        |from: usize, to: usize| decode_tokens(&rollout.completion.tokens[from..to], tokenizer);
    let mut turns = Vec::new();
    let mut end = 0;
    for turn in &episode.turns {
        if end < turn.tokens.start {
            turns.push(RolloutTurn {
                role: TurnRole::Environment,
                text: text(end, turn.tokens.start)?,
                reward: None,
            });
        }
        end = turn.tokens.end;
        turns.push(RolloutTurn {
            role: TurnRole::Policy,
            text: text(turn.tokens.start, end)?,
            reward: episode.gives_rewards.then_some(turn.reward),
        });
    }
    Ok(turns)
}

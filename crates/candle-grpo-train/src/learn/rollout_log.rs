//! Training completions, for people to read.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::Result;
use candle_grpo_core::validate::at_least_one;
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::rollout_groups::RolloutGroups;
use crate::excerpt::excerpt;
use crate::rollout::Completion;
use crate::rollout::decode::{answer_text, decode_tokens};
use crate::rollout::episode::EpisodeEnd;
use crate::{FinishReason, Prompt, Rollout, SamplingConfig};

/// Selects which training completions a run writes to `rollouts.jsonl`.
///
/// A step writes at most `max_groups` groups, and each text has at most `max_chars` characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    /// The policy's role in this row, see [`Rollout::role`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Turn of a branch that the turns continue. Absent: they continue the prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<BranchPlace>,
    /// Other rows of a trajectory with branches, see [`Rollout::branches`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub branches: Vec<RolloutBranch>,
    /// Reason why the trajectory ended. Absent without an environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<EpisodeEnd>,
    /// Score: the sum over the components. Absent if missing.
    pub reward: Option<f32>,
    /// Score components by name.
    pub rewards: BTreeMap<String, Option<f32>>,
    /// Rewards of roles, see [`Episode::role_rewards`](crate::environment::Episode::role_rewards).
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub role_rewards: BTreeMap<String, f64>,
    /// Mean advantage over its tokens. Absent if it did not train.
    pub advantage: Option<f32>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// Number of tokens, including an environment's, and those of branches.
    pub response_length: usize,
}

/// A branch of a trajectory.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RolloutBranch {
    /// The policy's role in this row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    /// Turn of another row that it continues. Absent if it has its own prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<BranchPlace>,
    /// The rest of its prompt, its turns, and the text between them.
    pub turns: Vec<RolloutTurn>,
}

/// The turn that a branch continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BranchPlace {
    /// 0 for the row of [`RolloutRecord::turns`], and n for the n-th of
    /// [`RolloutRecord::branches`].
    pub row: usize,
    /// Number of policy turns in that row, up to and including the one that the branch continues.
    pub turns: usize,
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
            let (completion, episode) = (&rollout.completion, rollout.episode.as_ref());
            let rewards = components.iter().map(|(name, scores)| {
                let score = scores.get(i).copied().unwrap_or(f32::NAN);
                (name.clone(), number(score))
            });
            let mut rows = rows(rollout, tokenizer)?;
            for turn in rows.iter_mut().flat_map(|row| &mut row.turns) {
                turn.text = text(std::mem::take(&mut turn.text));
            }
            let branches = rows.split_off(1);
            let RolloutBranch { role, after, turns } = rows.remove(0);
            Ok(RolloutRecord {
                step: *step,
                group,
                prompt_index: rollout.prompt_index,
                sample_index: rollout.sample_index,
                prompt: text(prompt),
                completion: text(answer_text(rollout.last_turn(), sampling, tokenizer)?),
                turns,
                role,
                after,
                branches,
                end: episode.map(|episode| episode.end.clone()),
                role_rewards: episode.map_or_else(BTreeMap::new, |x| x.role_rewards.clone()),
                reward: number(groups.scores[i]),
                rewards: rewards.collect(),
                advantage: self.advantages.get(i).copied().flatten(),
                finish_reason: completion.finish_reason,
                response_length: rollout.response_length(),
            })
        };
        rollouts.map(record).collect()
    }
}

/// The turns of each row of a trajectory, with the turn that it continues. The first is that of the
/// completion.
fn rows(rollout: &Rollout, tokenizer: &Tokenizer) -> Result<Vec<RolloutBranch>> {
    let Some(episode) = &rollout.episode else {
        let (role, after, turns) = (None, None, Vec::new());
        return Ok(vec![RolloutBranch { role, after, turns }]);
    };
    let turns = episode.turns.iter().map(|turn| turn.tokens.clone());
    let mut rows = vec![RowTurns {
        role: rollout.role.as_deref(),
        prompt: &rollout.prompt_tokens,
        completion: &rollout.completion,
        turns: turns.collect(),
    }];
    rows.extend(rollout.branches.iter().map(|row| RowTurns {
        role: row.role.as_deref(),
        prompt: &row.prompt_tokens,
        completion: &row.completion,
        turns: written(&row.completion),
    }));
    let branch = |number: usize| {
        let row = &rows[number];
        let continued = continued(number, &rows);
        let mut texts = Vec::new();
        let mut add = |role, tokens: &[u32], reward| -> Result<()> {
            let text = decode_tokens(tokens, tokenizer)?;
            texts.push(RolloutTurn { role, text, reward });
            Ok(())
        };
        if number > 0 || continued.is_some() {
            let start = continued.map_or(0, |(_, tokens)| tokens);
            add(TurnRole::Environment, &row.prompt[start..], None)?;
        }
        let is_rewarded = number == 0 && episode.gives_rewards;
        let mut end = 0;
        for (at, tokens) in row.turns.iter().enumerate() {
            if end < tokens.start {
                let between = &row.completion.tokens[end..tokens.start];
                add(TurnRole::Environment, between, None)?;
            }
            let reward = is_rewarded.then(|| episode.turns[at].reward);
            add(
                TurnRole::Policy,
                &row.completion.tokens[tokens.clone()],
                reward,
            )?;
            end = tokens.end;
        }
        Ok(RolloutBranch {
            role: row.role.map(str::to_owned),
            after: continued.map(|(place, _)| place),
            turns: texts,
        })
    };
    (0..rows.len()).map(branch).collect()
}

/// The turn that a row continues, and the number of tokens up to its end: the longest beginning
/// that the row's prompt has in common with another row. Of two, the first.
fn continued(number: usize, rows: &[RowTurns<'_>]) -> Option<(BranchPlace, usize)> {
    let others = rows.iter().enumerate().rev();
    let others = others.filter(|(row, _)| *row != number);
    let places = others.map(|(row, other)| {
        let (turns, tokens) = other.turns_before(rows[number].prompt);
        (BranchPlace { row, turns }, tokens)
    });
    let places = places.filter(|(place, _)| place.turns > 0);
    places.max_by_key(|(_, tokens)| *tokens)
}

/// A row with the places of its turns.
struct RowTurns<'a> {
    role: Option<&'a str>,
    prompt: &'a [u32],
    completion: &'a Completion,
    turns: Vec<Range<usize>>,
}

impl RowTurns<'_> {
    /// The number of turns at the beginning of `tokens`, and the number of tokens up to the last of
    /// them.
    fn turns_before(&self, tokens: &[u32]) -> (usize, usize) {
        let own = self.prompt.iter().chain(&self.completion.tokens);
        let common = own.zip(tokens).take_while(|(a, b)| a == b).count();
        let ends = self.turns.iter().map(|turn| self.prompt.len() + turn.end);
        let ends: Vec<usize> = ends.take_while(|&end| end <= common).collect();
        (ends.len(), ends.last().copied().unwrap_or(0))
    }
}

/// The ranges of tokens that the policy wrote.
fn written(completion: &Completion) -> Vec<Range<usize>> {
    let places: Vec<usize> = (0..completion.tokens.len()).collect();
    let parts = places.chunk_by(|&a, &b| completion.is_written(a) == completion.is_written(b));
    let parts = parts.filter(|part| completion.is_written(part[0]));
    parts.map(|part| part[0]..part[0] + part.len()).collect()
}

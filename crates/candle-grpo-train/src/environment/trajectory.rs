//! A growing trajectory.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::environments::ensure_tokens;
use super::{
    Environment, Environments, Episode, EpisodeEnd, EpisodeStart, EpisodeTurn, Step, Turn,
    Unavailable,
};
use crate::canonical_json::canonical_json;
use crate::rollout::episode::OWN_METRICS;
use crate::rollout::{CompletionBuilder, CompletionSeed, PromptRequest, Trajectories};
use crate::{Completion, FinishReason, Interrupted, Progress, Prompt, Rollout};
use candle_grpo_base::clock::running_time;
use candle_grpo_rewards::program::Unusable;

/// Arguments to [`Trajectory::start`].
pub(super) struct TrajectoryStart<'a> {
    pub(super) prompt: &'a Prompt,
    pub(super) seed: CompletionSeed,
    /// Seed of the group's first trajectory.
    pub(super) group: CompletionSeed,
    /// Maximum response length.
    pub(super) max_tokens: usize,
    pub(super) vocab_size: usize,
}

/// Turn number for the environment's own random numbers.
const OF_GROUP: u64 = u64::MAX;
const OF_EPISODE: u64 = u64::MAX - 1;

pub(super) struct Trajectory<'a> {
    prompt: &'a Prompt,
    seed: CompletionSeed,
    /// Absent once the trajectory has ended.
    environment: Option<Box<dyn Environment>>,
    vocab_size: usize,
    started: Duration,
    /// Maximum response length.
    max_tokens: usize,
    /// The prompt and the response.
    row: CompletionBuilder,
    turns: Vec<EpisodeTurn>,
    metrics: BTreeMap<String, f64>,
    feedback: Vec<String>,
    /// True if the last step left the trajectory without a reward.
    excluded: bool,
    /// True if any step had a reward.
    rewarded: bool,
    /// The state before the next turn, if the environment has given one.
    state: Option<Value>,
    /// The role that the policy plays.
    role: Option<String>,
    end: Option<EpisodeEnd>,
}

impl<'a> Trajectory<'a> {
    pub(super) fn start(
        environments: &Environments,
        start: TrajectoryStart<'a>,
        progress: &dyn Progress,
    ) -> Result<Self> {
        let TrajectoryStart {
            prompt,
            seed,
            group,
            max_tokens,
            vocab_size,
        } = start;
        let number = |seed, turn| CompletionSeed { turn, ..seed }.to_u64() >> 11;
        let name = || format!("environment of prompt {}", prompt.index);
        let start = EpisodeStart {
            prompt,
            seed: number(group, OF_GROUP),
            episode: number(seed, OF_EPISODE),
            progress,
        };
        let mut trajectory = Self {
            prompt,
            seed,
            environment: None,
            vocab_size,
            started: running_time(),
            max_tokens,
            row: CompletionBuilder::new(Vec::new()),
            turns: Vec::new(),
            metrics: BTreeMap::new(),
            feedback: Vec::new(),
            excluded: false,
            rewarded: false,
            state: None,
            role: None,
            end: None,
        };
        match trajectory.begin(environments, &start) {
            Err(error) if error.is::<Unavailable>() => trajectory.fail(&error),
            begun => begun.with_context(name)?,
        }
        Ok(trajectory)
    }

    /// Starts the environment, and reads what precedes the first turn.
    fn begin(&mut self, environments: &Environments, start: &EpisodeStart<'_>) -> Result<()> {
        let mut environment = environments.factory().start(start)?;
        let observation = environment.reset()?;
        let conversation = &environments.conversation;
        let tokens = conversation.prompt(self.prompt, &observation.append)?;
        ensure_tokens(&tokens, self.vocab_size)?;
        self.row = CompletionBuilder::new(tokens);
        self.state = observation.state;
        self.role = observation.role;
        self.environment = Some(environment);
        self.started = running_time();
        Ok(())
    }

    /// Ends the trajectory, whose environment failed.
    fn fail(&mut self, error: &anyhow::Error) {
        let message = format!("{error:#}");
        tracing::warn!(
            "environment of prompt {}, trajectory {}, turn {}: {message}",
            self.seed.prompt,
            self.seed.sample,
            self.turns.len()
        );
        self.end = Some(EpisodeEnd::Failed(message));
        if self.turns.is_empty() {
            self.row = CompletionBuilder::without_turns(self.prompt.tokens.clone());
            self.turns.push(EpisodeTurn {
                tokens: 0..1,
                reward: 0.,
                state: digest(&bytes(&self.prompt.tokens)),
            });
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    /// Number of tokens that the response can still have.
    fn left(&self) -> usize {
        self.max_tokens - self.row.len()
    }

    /// The request for the next turn.
    pub(super) fn request(&self, environments: &Environments) -> PromptRequest<'_> {
        let longest = environments.limits.max_turn_tokens.unwrap_or(usize::MAX);
        PromptRequest {
            tokens: self.row.tokens(),
            seeds: vec![CompletionSeed {
                turn: self.turns.len() as u64,
                ..self.seed
            }],
            max_new_tokens: longest.min(self.left()),
        }
    }

    /// Adds a policy turn and the environment's response to it.
    ///
    /// # Errors
    ///
    /// [`Interrupted`] if the progress cancels. Also if the environment's program is unusable.
    /// Other environment errors only end the trajectory.
    pub(super) fn add_turn(
        &mut self,
        environments: &Environments,
        turn: Completion,
        progress: &dyn Progress,
    ) -> Result<()> {
        let state = match &self.state {
            Some(state) => digest(canonical_json(state).as_bytes()),
            None => digest(&bytes(self.row.tokens())),
        };
        self.turns.push(EpisodeTurn {
            tokens: self.row.push(&turn),
            reward: 0.,
            state,
        });
        let answer = self.answer(environments, &turn, progress);
        match answer.and_then(|end| self.finished(end, progress)) {
            Ok(end) => self.end = end,
            Err(error) if error.is::<Interrupted>() => return Err(error),
            Err(error) if error.is::<Unusable>() => {
                return Err(error.context(format!("environment of prompt {}", self.prompt.index)));
            }
            Err(error) => {
                self.fail(&error);
                // It has failed either way.
                let _ = self.finished(self.end.clone(), progress);
            }
        }
        if self.end == Some(EpisodeEnd::MaxTokens) {
            self.row.finish(FinishReason::Length);
        }
        if self.has_ended() {
            // It may hold processes, which other trajectories in the batch no longer wait for.
            self.environment = None;
        }
        Ok(())
    }

    /// Reports the end of a trajectory that the environment has not ended, and records its last
    /// step.
    fn finished(
        &mut self,
        end: Option<EpisodeEnd>,
        progress: &dyn Progress,
    ) -> Result<Option<EpisodeEnd>> {
        if let (Some(end), Some(environment)) = (&end, &mut self.environment)
            && *end != EpisodeEnd::Done
            && let Some(step) = environment.end(end, progress)?
        {
            self.record(&step)?;
        }
        Ok(end)
    }

    /// Records a step's reward, for the last turn, and its metrics.
    fn record(&mut self, step: &Step) -> Result<()> {
        let reward = step.reward.unwrap_or(0.);
        let total = self.turns.iter().map(|turn| turn.reward).sum::<f64>() + reward;
        let is_finite = (reward as f32).is_finite() && (total as f32).is_finite();
        ensure!(
            is_finite,
            "reward {reward}, {total} with the turns before: must be finite f32"
        );
        if let Some(last) = self.turns.last_mut() {
            last.reward += reward;
        }
        self.rewarded |= step.reward.is_some();
        self.excluded = step.excluded;
        self.feedback.extend(step.feedback.clone());
        for (name, value) in &step.metrics {
            ensure!(
                !OWN_METRICS.contains(&name.as_str()),
                "metric {name:?}: must have another name than {}",
                OWN_METRICS.join(", ")
            );
            let sum = self.metrics.get(name).copied().unwrap_or(0.) + value;
            ensure!(
                sum.is_finite(),
                "metric {name:?}: {value}, its sum over the turns must be finite"
            );
            self.metrics.insert(name.clone(), sum);
        }
        Ok(())
    }

    /// Lets the environment respond to the last turn, and returns the reason if the trajectory
    /// ends.
    fn answer(
        &mut self,
        environments: &Environments,
        turn: &Completion,
        progress: &dyn Progress,
    ) -> Result<Option<EpisodeEnd>> {
        let (limits, conversation) = (&environments.limits, &environments.conversation);
        let number = self.turns.len() - 1;
        let environment = self.environment.as_mut();
        let environment = environment.context("the trajectory has ended")?;
        let step = environment.step(&Turn {
            number,
            text: &conversation.text(&turn.tokens)?,
            tokens: &turn.tokens,
            finish_reason: turn.finish_reason,
            progress,
        })?;
        self.record(&step)?;
        if step.done {
            return Ok(Some(EpisodeEnd::Done));
        }
        if number + 1 >= limits.max_turns {
            return Ok(Some(EpisodeEnd::MaxTurns));
        }
        let limit = limits.max_seconds.map(Duration::from_secs_f64);
        if limit.is_some_and(|limit| running_time() - self.started >= limit) {
            return Ok(Some(EpisodeEnd::MaxSeconds));
        }
        let tokens =
            conversation.between(self.prompt, &step.append, self.row.tokens().last().copied())?;
        ensure_tokens(&tokens, self.vocab_size)?;
        if tokens.len() >= self.left() {
            return Ok(Some(EpisodeEnd::MaxTokens));
        }
        self.row.append(&tokens);
        self.state = step.state;
        Ok(None)
    }

    pub(super) fn into_rollout(self, environments: &Environments) -> Rollout {
        let episode = Episode {
            turns: self.turns,
            end: self.end.unwrap_or(EpisodeEnd::MaxTurns),
            gives_rewards: environments.gives_rewards(),
            excluded: self.excluded,
            unrewarded: environments.factory().gives_rewards() && !self.rewarded,
            metrics: self.metrics,
            feedback: (!self.feedback.is_empty()).then(|| self.feedback.join("\n")),
            role_rewards: BTreeMap::new(),
        };
        let (prompt_tokens, completion) = self.row.into_parts();
        Rollout {
            prompt_index: self.prompt.index,
            sample_index: self.seed.sample as usize,
            prompt_tokens,
            completion,
            role: self.role,
            episode: Some(environments.limits.settle(episode)),
            branches: Vec::new(),
        }
    }
}

fn bytes(tokens: &[u32]) -> Vec<u8> {
    tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect()
}

/// The first 64 bits of a state's SHA-256.
fn digest(state: &[u8]) -> u64 {
    let digest = Sha256::digest(state);
    let first = digest.iter().take(8);
    first.fold(0, |number, &byte| number << 8 | u64::from(byte))
}

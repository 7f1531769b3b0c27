//! A run's environments, and the loop over turns.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Result, anyhow, ensure};
use candle_grpo_core::validate::{at_least_one, check};
use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use super::conversation::Conversation;
use super::trajectory::{Trajectory, TrajectoryStart};
use super::{EnvironmentFactory, Episode, EpisodeEnd};
use crate::rollout::{CompletionSeed, Play, PromptRequest, Trajectories};
use crate::{ChatTemplate, Interrupted, Rollout};

/// Number of environments that respond at the same time.
const THREADS: usize = 16;

/// Trajectory limits. [`SamplingConfig::max_new_tokens`](crate::SamplingConfig::max_new_tokens)
/// limits the response length, environment tokens included.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct EnvironmentLimits {
    /// Maximum number of turns.
    pub max_turns: usize,
    /// Maximum turn length in tokens. Absent: the rest of the response.
    pub max_turn_tokens: Option<usize>,
    /// Time in seconds after which no new turn starts. Trajectories that it ends are not
    /// reproducible. Absent: no limit.
    pub max_seconds: Option<f64>,
    /// Reward for a trajectory whose environment, tool or agent failed. It replaces all other
    /// rewards, also those under `rewards`. Absent: the trajectory is excluded. It has no reward,
    /// and contributes nothing to the step.
    pub failure_reward: Option<f64>,
    /// Reward for a trajectory whose environment never gave one. Null: the trajectory is excluded.
    /// This matters where other rewards are negative.
    pub missing_reward: Option<f64>,
}

impl Default for EnvironmentLimits {
    fn default() -> Self {
        Self {
            max_turns: 8,
            max_turn_tokens: None,
            max_seconds: None,
            failure_reward: None,
            missing_reward: Some(0.),
        }
    }
}

impl EnvironmentLimits {
    /// Returns whether trajectories have a reward component of their own: `environment` gives
    /// rewards, or a failure has one.
    pub fn gives_rewards(&self, environment: bool) -> bool {
        environment || self.failure_reward.is_some()
    }

    /// Returns `episode` with these rewards if it failed or has no reward. They replace the turns'
    /// rewards, or the trajectory is excluded.
    #[must_use]
    pub fn settle(&self, mut episode: Episode) -> Episode {
        let instead = match episode.end {
            EpisodeEnd::Failed(_) => self.failure_reward,
            _ if episode.excluded => None,
            _ if episode.unrewarded => self.missing_reward,
            _ => return episode,
        };
        episode.excluded = instead.is_none();
        episode.role_rewards.clear();
        episode.turns.iter_mut().for_each(|turn| turn.reward = 0.);
        if let Some(last) = episode.turns.last_mut() {
            last.reward = instead.unwrap_or(0.);
        }
        episode
    }

    /// Checks the values.
    ///
    /// # Errors
    ///
    /// Fails if a value is out of range.
    pub fn validate(&self) -> Result<()> {
        at_least_one("max_turns", self.max_turns)?;
        at_least_one("max_turn_tokens", self.max_turn_tokens.unwrap_or(1))?;
        let seconds = self.max_seconds.unwrap_or(1.);
        let valid = seconds > 0. && seconds <= 1e9;
        check(valid, "max_seconds", seconds, "be above 0 and at most 1e9")?;
        let rewards = [
            ("failure_reward", self.failure_reward),
            ("missing_reward", self.missing_reward),
        ];
        Ok(rewards.into_iter().try_for_each(|(name, reward)| {
            let reward = reward.unwrap_or(0.);
            let valid = (reward as f32).is_finite();
            check(valid, name, reward, "be a finite f32")
        })?)
    }
}

/// A run's environments: a factory, limits, and the conversion between turns and text.
///
/// [`Sampler::with_environments`](crate::Sampler::with_environments) and
/// [`TrainerParts::environments`](crate::TrainerParts) sample trajectories with them.
pub struct Environments {
    factory: Arc<dyn EnvironmentFactory>,
    pub(super) limits: EnvironmentLimits,
    pub(super) conversation: Conversation,
}

impl Environments {
    /// Creates environments for a model with this tokenizer and chat template.
    ///
    /// `stop_token_ids` must match the sampler's. Without a template, environments respond with
    /// text or tokens.
    ///
    /// # Errors
    ///
    /// Fails if `limits` are invalid.
    pub fn new(
        factory: impl EnvironmentFactory + 'static,
        limits: EnvironmentLimits,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        stop_token_ids: &[u32],
    ) -> Result<Self> {
        limits.validate()?;
        Ok(Self {
            factory: Arc::new(factory),
            limits,
            conversation: Conversation::new(
                Arc::new(tokenizer.clone()),
                template.cloned(),
                stop_token_ids.to_vec(),
            ),
        })
    }

    /// Allows special tokens by name in environment texts and messages. Do not allow this if
    /// environments pass on text from outside, such as web pages or command output. Such text could
    /// end its message and start another one.
    #[must_use]
    pub fn with_special_tokens_in_text(mut self) -> Self {
        self.conversation.allow_special_tokens();
        self
    }

    pub(super) fn factory(&self) -> &dyn EnvironmentFactory {
        &*self.factory
    }
}

impl Trajectories for Environments {
    /// Samples trajectories. Each batch contains the next turns for all open trajectories. A turn
    /// depends only on its seed and the tokens before it.
    fn play(&self, play: &Play<'_>) -> Result<Vec<Rollout>> {
        let Play {
            prompts,
            requests,
            vocab_size,
            draw,
            progress,
            ..
        } = *play;
        let mut left = prompts.iter().zip(requests).flat_map(|(prompt, request)| {
            let seeds = request.seeds.iter();
            let start = move |seed: &CompletionSeed| TrajectoryStart {
                prompt,
                seed: *seed,
                group: request.seeds[0],
                max_tokens: request.max_new_tokens,
                vocab_size,
            };
            seeds.map(start)
        });
        let mut all: Vec<Trajectory<'_>> = Vec::new();
        loop {
            if progress.is_canceled() {
                return Err(Interrupted.into());
            }
            let room =
                self.factory.max_concurrent() - all.iter().filter(|t| !t.has_ended()).count();
            let starts: Vec<_> = left.by_ref().take(room).collect();
            let has_started = !starts.is_empty();
            let mut slots: Vec<Option<Trajectory<'_>>> = starts.iter().map(|_| None).collect();
            concurrently(slots.iter_mut().zip(starts), |(slot, start)| {
                *slot = Some(Trajectory::start(self, start, progress)?);
                Ok(())
            })?;
            let before = all.len();
            all.extend(slots.into_iter().flatten());
            let failed = all[before..].iter().filter(|t| t.has_ended()).count();
            progress.advance(failed, 0);
            let mut open: Vec<&mut Trajectory<'_>> =
                all.iter_mut().filter(|t| !t.has_ended()).collect();
            if open.is_empty() {
                // All that have just started may have failed.
                if has_started {
                    continue;
                }
                break;
            }
            let requests: Vec<PromptRequest<'_>> = open.iter().map(|t| t.request(self)).collect();
            let completions = draw(&requests, &[])?;
            drop(requests);
            let drawn = open.iter_mut().zip(completions);
            concurrently(drawn, |(trajectory, completion)| {
                trajectory.add_turn(self, completion, progress)
            })?;
            let ended = open.iter().filter(|t| t.has_ended()).count();
            progress.advance(ended, 0);
        }
        Ok(all.into_iter().map(|t| t.into_rollout(self)).collect())
    }

    fn gives_rewards(&self) -> bool {
        self.limits.gives_rewards(self.factory.gives_rewards())
    }
}

/// Calls `work` for each item on several threads, until one fails. Environments often wait for
/// programs.
fn concurrently<T: Send>(
    items: impl ExactSizeIterator<Item = T> + Send,
    work: impl Fn(T) -> Result<()> + Sync,
) -> Result<()> {
    let threads = items.len().min(THREADS);
    let items = Mutex::new(items);
    let (items, work) = (&items, &work);
    let has_failed = &AtomicBool::new(false);
    let take = move || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let run = move || -> Result<()> {
        while !has_failed.load(Ordering::Relaxed)
            && let Some(item) = take()
        {
            let done = work(item);
            has_failed.fetch_or(done.is_err(), Ordering::Relaxed);
            done?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        let mut result = Ok(());
        for thread in threads {
            let done = thread.join();
            let done = done.unwrap_or_else(|_| Err(anyhow!("environment: it panicked")));
            result = result.and(done);
        }
        result
    })
}

/// Checks that an environment's tokens are in the model's vocabulary.
pub(super) fn ensure_tokens(tokens: &[u32], vocab_size: usize) -> Result<()> {
    let unknown = tokens.iter().find(|&&token| token as usize >= vocab_size);
    ensure!(
        unknown.is_none(),
        "tokens: {unknown:?}, must be below the vocabulary size {vocab_size}"
    );
    Ok(())
}

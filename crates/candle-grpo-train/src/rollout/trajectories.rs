//! The interface to anything that plays multi-turn trajectories.

use anyhow::Result;

use super::{Completion, PromptRequest, Rollout, SamplingConfig};
use crate::{Progress, Prompt};

/// Samples multi-turn trajectories instead of single completions:
/// [`Environments`](crate::environment::Environments), or programs that call the policy.
pub trait Trajectories: Send + Sync {
    /// Returns one rollout for each seed in `play.requests`, in order.
    ///
    /// # Errors
    ///
    /// Fails if a trajectory cannot start for a reason that does not depend on the policy, if a
    /// turn cannot be sampled, or with [`Interrupted`](crate::Interrupted) after the progress
    /// cancels.
    fn play(&self, play: &Play<'_>) -> Result<Vec<Rollout>>;

    /// Returns true if trajectories have their own rewards. They are then a reward component, after
    /// those from the reward function.
    fn gives_rewards(&self) -> bool;
}

/// A call to [`Trajectories::play`].
#[derive(Clone, Copy)]
pub struct Play<'a> {
    /// The prompts.
    pub prompts: &'a [&'a Prompt],
    /// Each prompt's first request, with one seed for each of its trajectories.
    pub requests: &'a [PromptRequest<'a>],
    /// The model's number of tokens.
    pub vocab_size: usize,
    /// The settings for [`Self::draw`].
    pub sampling: &'a SamplingConfig,
    /// Samples turns.
    pub draw: &'a DrawTurns<'a>,
    /// Receives each trajectory that ends as a unit, and can cancel the call. [`Self::draw`]
    /// reports the tokens.
    pub progress: &'a dyn Progress,
}

/// Samples completions for requests, in order. They also end at these stop strings, in addition to
/// those in the settings.
pub type DrawTurns<'a> = dyn Fn(&[PromptRequest<'_>], &[String]) -> Result<Vec<Completion>> + 'a;

//! The interface to whatever plays trajectories of several turns.

use anyhow::Result;

use super::{Completion, PromptRequest, Rollout, SamplingConfig};
use crate::{Progress, Prompt};

/// Draws trajectories of several turns in place of single completions:
/// [`Environments`](crate::environment::Environments), or programs that call the policy.
pub trait Trajectories: Send + Sync {
    /// Returns one rollout for each seed of `play.requests`, in their order.
    ///
    /// # Errors
    ///
    /// If a trajectory cannot begin for a reason that does not depend on the policy, a turn cannot
    /// be drawn, or with [`Interrupted`](crate::Interrupted) after the progress cancels.
    fn play(&self, play: &Play<'_>) -> Result<Vec<Rollout>>;

    /// Returns true if trajectories have rewards of their own. They are then a component of the
    /// reward, after those of the reward function.
    fn gives_rewards(&self) -> bool;
}

/// A call of [`Trajectories::play`].
#[derive(Clone, Copy)]
pub struct Play<'a> {
    /// The prompts.
    pub prompts: &'a [&'a Prompt],
    /// The first request of each prompt, with one seed for each of its trajectories.
    pub requests: &'a [PromptRequest<'a>],
    /// The number of tokens of the model.
    pub vocab_size: usize,
    /// The settings of [`Self::draw`].
    pub sampling: &'a SamplingConfig,
    /// Draws turns.
    pub draw: &'a DrawTurns<'a>,
    /// Receives each trajectory that ends as a unit, and can cancel the call. [`Self::draw`]
    /// reports the tokens.
    pub progress: &'a dyn Progress,
}

/// Draws the completions of requests in their order. They also end at these stop strings, in
/// addition to those of the settings.
pub type DrawTurns<'a> = dyn Fn(&[PromptRequest<'_>], &[String]) -> Result<Vec<Completion>> + 'a;

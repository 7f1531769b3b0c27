//! Environments: multi-turn trajectories in which an environment writes the tokens between turns.
//!
//! An [`Environment`] responds to each policy turn with text, messages or tokens, a reward, and
//! whether the trajectory is over. A trajectory is one token sequence. Tokens sampled from the
//! policy are never re-tokenized. Environment tokens are context, which the response mask excludes
//! from losses and metrics.

mod agent;
mod config;
mod content;
mod conversation;
mod environments;
mod program;
mod session_scope;
mod tools;
mod trajectory;

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Result;
use serde_json::Value;

use crate::{FinishReason, Progress, Prompt};

pub use crate::rollout::episode::{Episode, EpisodeEnd, EpisodeTurn, OWN_METRICS};
pub(crate) use crate::rollout::episode::{ensure_some_worked, mean_metrics};
pub use agent::AgentConfig;
pub use config::{EnvironmentConfig, EnvironmentKind};
pub use conversation::Conversation;
pub use environments::{EnvironmentLimits, Environments};
pub use program::{ProgramEnvironmentConfig, ProgramEnvironments};
pub use session_scope::SessionScope;
pub use tools::{
    CallContext, McpServerConfig, McpServers, ProgramTool, ProgramToolConfig, Tool, ToolCall,
    ToolEnvironments, ToolFormat, ToolsConfig,
};

/// Context for the error of a start or a call that failed for a reason outside, such as a lost
/// connection. The trajectory has then failed, because the policy is not the cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unavailable;

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unavailable")
    }
}

/// Creates environments, one per trajectory. Several threads call it at the same time.
///
/// You can use a closure:
///
/// ```
/// use anyhow::Context;
/// use candle_grpo_train::environment::{
///     Append, Environment, EnvironmentFactory, EpisodeStart, Step, Turn,
/// };
///
/// /// Asks until the answer is the column `answer`.
/// struct Retry(String);
///
/// impl Environment for Retry {
///     fn step(&mut self, turn: &Turn<'_>) -> anyhow::Result<Step> {
///         match turn.text.trim() == self.0 {
///             true => Ok(Step::done(1.)),
///             false => Ok(Step::go_on(Append::user("Wrong. Try again."))),
///         }
///     }
/// }
///
/// let retry = |start: &EpisodeStart<'_>| -> anyhow::Result<Retry> {
///     let answer = start.prompt.columns["answer"].as_str();
///     Ok(Retry(answer.context("answer: must be a text")?.to_owned()))
/// };
/// let _: &dyn EnvironmentFactory = &retry;
/// ```
pub trait EnvironmentFactory: Send + Sync {
    /// Starts one trajectory's environment.
    ///
    /// # Errors
    ///
    /// An error ends the run, because it depends on the data and not on the policy. With the
    /// context [`Unavailable`], the trajectory has failed instead.
    fn start(&self, start: &EpisodeStart<'_>) -> Result<Box<dyn Environment>>;

    /// Returns the maximum number of open trajectories.
    fn max_concurrent(&self) -> usize {
        usize::MAX
    }

    /// Returns whether the environments give rewards. Their sum over a trajectory is then a reward
    /// component, after those from the reward function.
    fn gives_rewards(&self) -> bool {
        true
    }
}

impl<E, F> EnvironmentFactory for F
where
    E: Environment + 'static,
    F: Fn(&EpisodeStart<'_>) -> Result<E> + Send + Sync,
{
    fn start(&self, start: &EpisodeStart<'_>) -> Result<Box<dyn Environment>> {
        Ok(Box::new(self(start)?))
    }
}

/// The start of a trajectory.
#[derive(Clone, Copy)]
pub struct EpisodeStart<'a> {
    /// The prompt, with its row's columns.
    pub prompt: &'a Prompt,
    /// A 53-bit number for the environment's random numbers. It depends on the run's seed, the
    /// step and the prompt. All trajectories in a group have the same one, so that they start
    /// in the same state and their rewards can be compared.
    pub seed: u64,
    /// A 53-bit number that identifies the trajectory.
    pub episode: u64,
    /// Can cancel a wait; the error is then [`Interrupted`](crate::Interrupted).
    pub progress: &'a dyn Progress,
}

/// One trajectory's environment. Dropping it ends it.
pub trait Environment: Send {
    /// Returns what precedes the first turn. The default is nothing.
    ///
    /// # Errors
    ///
    /// Same as [`EnvironmentFactory::start`].
    fn reset(&mut self) -> Result<Observation> {
        Ok(Observation::default())
    }

    /// Responds to a policy turn. Called once per turn, even for the turn at which a limit ends the
    /// trajectory.
    ///
    /// # Errors
    ///
    /// An error ends only the trajectory, not the run. The trajectory is then excluded, or gets
    /// [`EnvironmentLimits::failure_reward`]. [`Interrupted`](crate::Interrupted) ends the step.
    fn step(&mut self, turn: &Turn<'_>) -> Result<Step>;

    /// Ends a trajectory that the last step has not ended, for example at a limit. May return a
    /// last step, whose reward and metrics are added to those of the last turn.
    ///
    /// # Errors
    ///
    /// Same as [`Self::step`].
    fn end(&mut self, end: &EpisodeEnd, progress: &dyn Progress) -> Result<Option<Step>> {
        let _ = (end, progress);
        Ok(None)
    }
}

/// A turn written by the policy.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    /// Turn number within its trajectory, starting at 0.
    pub number: usize,
    /// The text, including special tokens except a stop token at its end.
    pub text: &'a str,
    /// The tokens, including the stop token.
    pub tokens: &'a [u32],
    /// The reason why the turn ended.
    pub finish_reason: FinishReason,
    /// Can cancel a wait; the error is then [`Interrupted`](crate::Interrupted).
    pub progress: &'a dyn Progress,
}

/// Tokens that follow a policy turn.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub enum Append {
    /// No tokens.
    #[default]
    Nothing,
    /// Text. Special token names in it stay text, so it may come from outside.
    Text(String),
    /// Text in several parts.
    Parts(Vec<TextPart>),
    /// Messages, each an object with `role` and `content`. The chat template renders them, along
    /// with the end of the policy's turn before them and the start of its next turn. Special token
    /// names in messages stay text.
    Messages(Vec<Value>),
    /// Tokens.
    Tokens(Vec<u32>),
}

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TextPart {
    /// Text from the program. Special token names in it become those tokens.
    Markup(String),
    /// Text from outside. Special token names in it stay text.
    Content(String),
}

impl Append {
    /// A user message.
    pub fn user(content: &str) -> Self {
        Self::Messages(vec![
            serde_json::json!({"role": "user", "content": content}),
        ])
    }
}

/// The beginning of a trajectory.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Observation {
    /// Tokens or text after the prompt, or messages after the prompt's, which is then rendered
    /// again. They become part of the trajectory's prompt.
    pub append: Append,
    /// State before the first turn, as in [`Step::state`].
    pub state: Option<Value>,
    /// The role that the policy plays in the trajectory, if it plays several. Advantages compare
    /// it with the same role in other trajectories.
    pub role: Option<String>,
}

/// An environment's response to a turn.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Step {
    /// Tokens before the next turn. Ignored if the trajectory ends.
    pub append: Append,
    /// Reward for the turn; absent: 0. Must be finite.
    pub reward: Option<f64>,
    /// If true, and the trajectory ends with this turn, it has no reward and is excluded, as if
    /// its environment had failed.
    pub excluded: bool,
    /// True if the trajectory is over.
    pub done: bool,
    /// State before the next turn, for advantages that compare turns in the same state. Absent:
    /// all tokens before the turn.
    pub state: Option<Value>,
    /// A text about the turn. The policy does not read it, but a teacher may read that of all
    /// turns.
    pub feedback: Option<String>,
    /// Numbers that are summed over the trajectory, by name. Step metrics contain their means over
    /// trajectories. `turns`, `reward`, `limit_reached`, `failed` and `excluded` are reserved
    /// names.
    pub metrics: BTreeMap<String, f64>,
}

impl Step {
    /// Ends a trajectory with this reward.
    pub fn done(reward: f64) -> Self {
        Self {
            reward: Some(reward),
            done: true,
            ..Self::default()
        }
    }

    /// A step without a reward, after which the policy continues.
    pub fn go_on(append: Append) -> Self {
        Self {
            append,
            ..Self::default()
        }
    }
}

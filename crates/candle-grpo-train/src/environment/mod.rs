//! Environments: trajectories of several turns, whose other tokens an environment writes.
//!
//! An [`Environment`] answers each turn of the policy with text, messages or tokens, a reward, and
//! whether the trajectory is over. A trajectory is one sequence of tokens. Those that the policy
//! drew are never decoded and encoded again; those of the environment are context, which the mask
//! of the response excludes from losses and metrics.

mod agent;
mod config;
mod content;
mod conversation;
mod environments;
mod program;
mod tools;
mod trajectory;

use std::collections::BTreeMap;

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
pub use tools::{
    CallContext, ProgramTool, ProgramToolConfig, Tool, ToolCall, ToolEnvironments, ToolFormat,
    ToolsConfig,
};

/// Makes environments, one for each trajectory. Several threads call it at the same time.
///
/// A closure implements it:
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
    /// Starts the environment of one trajectory.
    ///
    /// # Errors
    ///
    /// An error ends the run, because it depends on the data and not on the policy.
    fn start(&self, start: &EpisodeStart<'_>) -> Result<Box<dyn Environment>>;

    /// Returns true if the environments give rewards. Their sum over a trajectory is then a
    /// component of the reward, after those of the reward function.
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
    /// The prompt, with the columns of its row.
    pub prompt: &'a Prompt,
    /// A number of 53 bits for the random numbers of the environment. It depends on the seed of
    /// the run, the step and the prompt. All trajectories of a group have the same, so that they
    /// begin in the same state and their rewards can be compared.
    pub seed: u64,
    /// A number of 53 bits that identifies the trajectory.
    pub episode: u64,
    /// Cancels a wait; the error is then [`Interrupted`](crate::Interrupted).
    pub progress: &'a dyn Progress,
}

/// The environment of one trajectory. It ends when it is dropped.
pub trait Environment: Send {
    /// Returns what precedes the first turn. The default is nothing.
    ///
    /// # Errors
    ///
    /// As in [`EnvironmentFactory::start`].
    fn reset(&mut self) -> Result<Observation> {
        Ok(Observation::default())
    }

    /// Answers a turn of the policy. It is called once for each turn, also for the one at which a
    /// limit ends the trajectory.
    ///
    /// # Errors
    ///
    /// An error ends the trajectory, and not the run. The trajectory is then excluded, or has
    /// [`EnvironmentLimits::failure_reward`]. [`Interrupted`](crate::Interrupted) ends the step.
    fn step(&mut self, turn: &Turn<'_>) -> Result<Step>;
}

/// A turn that the policy has written.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    /// The number of the turn in its trajectory, from 0.
    pub number: usize,
    /// The text, with special tokens, but without a stop token at its end.
    pub text: &'a str,
    /// The tokens, with the stop token.
    pub tokens: &'a [u32],
    /// The reason why the turn ended.
    pub finish_reason: FinishReason,
    /// Cancels a wait; the error is then [`Interrupted`](crate::Interrupted).
    pub progress: &'a dyn Progress,
}

/// Tokens that follow the turn of the policy.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Append {
    /// No tokens.
    #[default]
    Nothing,
    /// A text. Names of special tokens in it stay text, so that it may come from outside.
    Text(String),
    /// A text of several parts.
    Parts(Vec<TextPart>),
    /// Messages, each an object with `role` and `content`. The chat template renders them, the end
    /// of the turn of the policy before them, and the beginning of its next turn. Names of special
    /// tokens in the messages stay text.
    Messages(Vec<Value>),
    /// Tokens.
    Tokens(Vec<u32>),
}

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextPart {
    /// Text of the program. Names of special tokens in it become these tokens.
    Markup(String),
    /// Text from outside. Names of special tokens in it stay text.
    Content(String),
}

impl Append {
    /// A message of the user.
    pub fn user(content: &str) -> Self {
        Self::Messages(vec![
            serde_json::json!({"role": "user", "content": content}),
        ])
    }
}

/// The beginning of a trajectory.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Observation {
    /// Tokens or text after the prompt, or messages after those of the prompt, which is then
    /// rendered again. They belong to the prompt of the trajectory.
    pub append: Append,
    /// The state before the first turn, as in [`Step::state`].
    pub state: Option<Value>,
}

/// The answer of an environment to a turn.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Step {
    /// Tokens before the next turn. Ignored if the trajectory ends.
    pub append: Append,
    /// The reward of the turn; absent: 0. It must be finite.
    pub reward: Option<f64>,
    /// True if the trajectory has no reward should it end with this turn: it is excluded, as if
    /// its environment had failed.
    pub excluded: bool,
    /// True if the trajectory is over.
    pub done: bool,
    /// The state before the next turn, for advantages that compare turns in the same state.
    /// Absent: all tokens before the turn.
    pub state: Option<Value>,
    /// Numbers that are added up over the trajectory, by name. The metrics of a step have their
    /// means over trajectories. `turns`, `reward`, `limit_reached`, `failed` and `excluded` are
    /// reserved names.
    pub metrics: BTreeMap<String, f64>,
}

impl Step {
    /// The end of a trajectory with this reward.
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

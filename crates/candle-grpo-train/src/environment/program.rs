//! Environments implemented by a program in any language.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use candle_grpo_core::validate::at_least_one;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    Append, Environment, EnvironmentFactory, EpisodeEnd, EpisodeStart, Observation, Step, Turn,
    Unavailable,
};
use crate::data::question::with_text_content;
use crate::{Interrupted, Progress};
use candle_grpo_rewards::program::{
    Answer, IsolationConfig, Program, ProgramPool, Unusable, check_limits, quoted,
};

/// Options for [`ProgramEnvironments`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ProgramEnvironmentConfig {
    /// The program and its arguments. No shell is involved.
    pub command: Vec<String>,
    /// Its working directory. Absent: this process's.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// Isolation for the program. Absent: none.
    #[serde(default)]
    pub isolation: Option<IsolationConfig>,
    /// Number of processes. All requests for one trajectory go to the same one.
    #[serde(default = "workers")]
    pub workers: usize,
    /// Maximum number of open trajectories. Absent: all in a batch are open.
    #[serde(default)]
    pub max_concurrent: Option<usize>,
    /// Maximum time for an answer.
    #[serde(default = "limit")]
    pub time_limit_seconds: f64,
    /// Maximum startup time, added to the limit for the first answer.
    #[serde(default = "limit")]
    pub start_limit_seconds: f64,
}

pub(super) fn workers() -> usize {
    1
}

pub(super) fn limit() -> f64 {
    60.
}

impl ProgramEnvironmentConfig {
    /// Checks the values. Starts no program and opens no file.
    ///
    /// # Errors
    ///
    /// Fails if a value is out of range.
    pub fn validate(&self) -> Result<()> {
        self.program().validate()?;
        at_least_one("workers", self.workers)?;
        at_least_one("max_concurrent", self.max_concurrent.unwrap_or(1))?;
        Ok(check_limits(
            self.time_limit_seconds,
            self.start_limit_seconds,
        )?)
    }

    pub(super) fn program(&self) -> Program {
        let (limit, start_limit) = (self.time_limit_seconds, self.start_limit_seconds);
        Program::new(&self.command, self.folder.as_ref(), limit, start_limit)
            .with_isolation(self.isolation.as_ref())
    }
}

/// Environments implemented by a program that reads one line of JSON per request and writes one
/// line with its answer.
///
/// A request is an object with `id`, `episode` (the trajectory number), `seed` (the same for all
/// trajectories in a group), `turn` (`null` at the start), `prompt`, `columns`, and `state` (from
/// the last answer). After a policy turn, it also has `completion` and `finish_reason`.
///
/// An answer is an object that echoes `id`. It may have `text` or `messages` (which follow the
/// prompt or the turn), `reward`, `done`, `state` (any JSON), `metrics` (numbers by name) and
/// `feedback` (a text for a teacher). A
/// trajectory whose last `reward` is `null` is excluded. With `error` (text), the trajectory has
/// failed, and the program goes on.
///
/// The answer at the start may have `role`, the policy's role in the trajectory.
///
/// After an answer with `notify_end`, a trajectory that ends without `done` has a last request
/// with `end`, the reason. The last turn gets the reward and the metrics in its answer.
///
/// Since the state is in the answers, a program can be a stateless function. If it hangs or
/// crashes, it is restarted. Trajectories whose request it did not answer have failed.
///
/// ```no_run
/// use candle_grpo_train::environment::{ProgramEnvironmentConfig, ProgramEnvironments};
///
/// let config: ProgramEnvironmentConfig =
///     serde_json::from_str(r#"{"command": ["python3", "game.py"], "workers": 2}"#)?;
/// let environments = ProgramEnvironments::new(&config)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct ProgramEnvironments {
    command: String,
    max_concurrent: usize,
    pool: Arc<ProgramPool>,
}

impl ProgramEnvironments {
    /// Starts the program.
    ///
    /// # Errors
    ///
    /// Fails if `config` is invalid or the program cannot be started.
    pub fn new(config: &ProgramEnvironmentConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            command: format!("program {:?}", config.command),
            max_concurrent: config.max_concurrent.unwrap_or(usize::MAX),
            pool: Arc::new(ProgramPool::start(config.program(), config.workers)?),
        })
    }
}

impl EnvironmentFactory for ProgramEnvironments {
    fn start(&self, start: &EpisodeStart<'_>) -> Result<Box<dyn Environment>> {
        let mut environment = ProgramEnvironment {
            command: self.command.clone(),
            pool: Arc::clone(&self.pool),
            episode: start.episode,
            seed: start.seed,
            prompt: start.prompt.text.clone(),
            columns: start.prompt.columns.clone(),
            state: None,
            turn: None,
            notify_end: false,
            beginning: Observation::default(),
        };
        let begin = |environment: &mut ProgramEnvironment| {
            environment.ask(json!({"turn": null}), start.progress)
        };
        let reply = match begin(&mut environment) {
            // Another trajectory in this process may be the cause.
            Err(error) if !is_final(&error) => begin(&mut environment)?,
            begun => begun?,
        };
        ensure!(!reply.done, "{}: done before the first turn", self.command);
        environment.beginning = Observation {
            append: reply.append(),
            state: environment.state.clone(),
            role: reply.role,
        };
        Ok(Box::new(environment))
    }

    fn max_concurrent(&self) -> usize {
        self.max_concurrent
    }
}

struct ProgramEnvironment {
    command: String,
    pool: Arc<ProgramPool>,
    episode: u64,
    seed: u64,
    prompt: String,
    columns: Value,
    state: Option<Value>,
    /// Number of the last turn.
    turn: Option<usize>,
    /// True if the program must know that the trajectory ends.
    notify_end: bool,
    beginning: Observation,
}

/// Returns whether a second start after this error has no use.
fn is_final(error: &anyhow::Error) -> bool {
    error.is::<Interrupted>() || error.is::<Unusable>() || error.is::<Unavailable>()
}

impl ProgramEnvironment {
    fn ask(&mut self, fields: Value, progress: &dyn Progress) -> Result<Reply> {
        let mut request = Map::new();
        request.insert("episode".to_owned(), self.episode.into());
        request.insert("seed".to_owned(), self.seed.into());
        request.insert("prompt".to_owned(), self.prompt.as_str().into());
        request.insert("columns".to_owned(), self.columns.clone());
        request.insert("state".to_owned(), self.state.clone().into());
        if let Value::Object(fields) = fields {
            request.extend(fields);
        }
        // A program that has failed has nothing to end.
        let notify_end = std::mem::take(&mut self.notify_end);
        let reply = self
            .pool
            .ask(self.episode, request, progress, Reply::read)
            .map_err(anyhow::Error::from)
            .with_context(|| self.command.clone())?;
        if let Some(message) = reply.error {
            let error = anyhow!(message).context(self.command.clone());
            return Err(error.context(Unavailable));
        }
        self.notify_end = (notify_end || reply.notify_end) && !reply.done;
        self.state.clone_from(&reply.state);
        Ok(reply)
    }
}

impl Environment for ProgramEnvironment {
    fn reset(&mut self) -> Result<Observation> {
        Ok(self.beginning.clone())
    }

    fn step(&mut self, turn: &Turn<'_>) -> Result<Step> {
        let number = turn.number;
        self.turn = Some(number);
        let fields = json!({
            "turn": turn.number,
            "completion": turn.text,
            "finish_reason": turn.finish_reason,
        });
        let reply = self.ask(fields, turn.progress)?;
        let command = &self.command;
        ensure!(
            reply.role.is_none(),
            "{command}: role at turn {number}, must only be in the answer at the start"
        );
        Ok(reply.into_step())
    }

    fn end(&mut self, end: &EpisodeEnd, progress: &dyn Progress) -> Result<Option<Step>> {
        if !self.notify_end {
            return Ok(None);
        }
        let reply = self.ask(json!({"turn": self.turn, "end": end}), progress)?;
        // Without a reward, an earlier null stays.
        let has_step =
            reply.reward.is_some() || !reply.metrics.is_empty() || reply.feedback.is_some();
        Ok(has_step.then(|| reply.into_step()))
    }
}

/// An answer from the program.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Reply {
    text: Option<String>,
    messages: Option<Vec<Value>>,
    /// Null is different from absent.
    #[serde(deserialize_with = "present")]
    reward: Option<Option<f64>>,
    done: bool,
    state: Option<Value>,
    metrics: BTreeMap<String, f64>,
    error: Option<String>,
    notify_end: bool,
    role: Option<String>,
    feedback: Option<String>,
}

/// Reads a value that is present, but may be null.
fn present<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Option<f64>>, D::Error> {
    Option::deserialize(value).map(Some)
}

/// Returns a message that has a role and content, with content parts joined.
fn checked(message: &Value) -> Result<Value> {
    let has_role = message.get("role").is_some_and(Value::is_string);
    let content = message.get("content");
    let has_content = match content {
        Some(content) if !content.is_null() => content.is_string() || content.is_array(),
        _ => message.get("tool_calls").is_some(),
    };
    ensure!(
        has_role && has_content,
        "{message}, must be an object with the text \"role\" and \"content\""
    );
    with_text_content(message)
}

impl Reply {
    fn read(line: &str) -> Result<Answer<Self>> {
        let read = || -> Result<Answer<Self>> {
            let mut fields: Map<String, Value> =
                serde_json::from_str(line).context("must be a JSON object")?;
            let id = Answer::take_id(&mut fields)?;
            let mut value: Self = serde_json::from_value(Value::Object(fields))?;
            ensure!(
                value.text.is_none() || value.messages.is_none(),
                "text and messages: both given, must be one of them"
            );
            for (i, message) in value.messages.iter_mut().flatten().enumerate() {
                *message = checked(message).with_context(|| format!("messages[{i}]"))?;
            }
            Ok(Answer { id, value })
        };
        read().with_context(|| quoted(line))
    }

    fn into_step(self) -> Step {
        Step {
            append: self.append(),
            excluded: self.reward == Some(None),
            reward: self.reward.flatten(),
            done: self.done,
            state: self.state,
            metrics: self.metrics,
            feedback: self.feedback,
        }
    }

    fn append(&self) -> Append {
        match (&self.text, &self.messages) {
            (Some(text), _) => Append::Text(text.clone()),
            (None, Some(messages)) => Append::Messages(messages.clone()),
            (None, None) => Append::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_has_the_feedback_of_its_turn() {
        let reply = Reply::read(r#"{"id": 1, "reward": 0, "feedback": "Too long."}"#).unwrap();
        let step = reply.value.into_step();
        assert_eq!(step.feedback.as_deref(), Some("Too long."));
    }

    #[test]
    fn the_parts_of_a_content_are_one_text() {
        let line = r#"{"id": 1, "messages": [{"role": "user", "content": [
            {"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]}]}"#;
        let reply = Reply::read(line).unwrap().value;
        let message = json!({"role": "user", "content": "Say hi"});
        assert_eq!(reply.messages, Some(vec![message]));
    }
}

//! A run's agents.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use candle_grpo_base::server::Key;
use candle_grpo_train::environment::{AgentConfig, Conversation, EnvironmentLimits, SessionScope};
use candle_grpo_train::rollout::{Play, Trajectories};
use candle_grpo_train::{ChatTemplate, Rollout, SamplingConfig};
use tokenizers::Tokenizer;

use crate::bell::Bell;
use crate::endpoint::Endpoint;
use crate::game::Game;
use crate::request::Request;
use crate::workers::Workers;

/// A run's agents: a server, and one episode per trajectory.
///
/// Pass it to [`Sampler::with_environments`](candle_grpo_train::Sampler::with_environments) or
/// [`TrainerParts::environments`](candle_grpo_train::TrainerParts), which then sample trajectories
/// through it.
///
/// # Reproducibility
///
/// An answer depends only on its seed and the tokens before it. A row that begins with the
/// episode's prompt and continues without branches uses the same seeds as
/// [`Environments`](candle_grpo_train::environment::Environments), so the same conversation has the
/// same tokens. Seeds for other answers derive from their tokens. The arrival order among parallel
/// requests therefore does not matter, unless several continue the same answer: the first then
/// continues its row.
pub struct Agents {
    pub(crate) config: AgentConfig,
    pub(crate) limits: EnvironmentLimits,
    pub(crate) conversation: Conversation,
    pub(crate) endpoint: Endpoint,
    pub(crate) bell: Arc<Bell>,
    key: Key,
    /// Processes with `session: shared`.
    pub(crate) workers: Option<Mutex<Workers>>,
    /// Request settings that had no effect, by name.
    ignored: Mutex<BTreeSet<&'static str>>,
}

impl Agents {
    /// Starts the server for a model with this tokenizer and chat template. Pass the sampler's
    /// `stop_token_ids`.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, the address is not free, or the variable that `config` names
    /// has no key.
    pub fn new(
        config: AgentConfig,
        limits: EnvironmentLimits,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        stop_token_ids: &[u32],
    ) -> Result<Self> {
        config.validate()?;
        limits.validate()?;
        let key = match &config.api_key_env {
            Some(variable) => Key::from_variable(variable)?,
            None => Key::random(),
        };
        let keys = match (config.command.is_empty(), config.session) {
            (true, _) => vec![key.clone()],
            (false, SessionScope::Shared) => (0..config.workers).map(|_| Key::random()).collect(),
            (false, SessionScope::Episode) => Vec::new(),
        };
        let endpoint = Endpoint::start(config.listen, keys.clone(), config.max_request_bytes)?;
        let workers = match config.session {
            SessionScope::Shared => {
                let entrances = endpoint.entrances().clone();
                let workers = Workers::start(config.program(), entrances, &keys)?;
                Some(Mutex::new(workers))
            }
            SessionScope::Episode => None,
        };
        if config.command.is_empty() {
            let address = endpoint.address();
            tracing::info!("agents ask for episodes at http://{address}/episodes");
            if config.api_key_env.is_none() {
                tracing::info!("their key is {}", key.text());
            }
        }
        Ok(Self {
            config,
            limits,
            conversation: Conversation::new(
                Arc::new(tokenizer.clone()),
                template.cloned(),
                stop_token_ids.to_vec(),
            ),
            endpoint,
            bell: Arc::default(),
            key,
            workers,
            ignored: Mutex::default(),
        })
    }

    /// Returns the server's address.
    pub fn address(&self) -> SocketAddr {
        self.endpoint.address()
    }

    /// Returns the key with which agents request episodes.
    pub fn key(&self) -> &str {
        self.key.text()
    }

    /// Warns once about each request setting that differs from the run's.
    pub(crate) fn warn_of_settings(&self, request: &Request, sampling: &SamplingConfig) {
        for &(name, value) in &request.sampling {
            let used = match name {
                "temperature" => sampling.temperature,
                "top_p" => sampling.top_p,
                "top_k" => sampling.top_k as f64,
                _ => 0.,
            };
            let mut ignored = self.ignored.lock().unwrap_or_else(PoisonError::into_inner);
            if value != used && ignored.insert(name) {
                tracing::warn!(
                    "an agent asks for {name} {value}, which has no effect: the run draws with {used}"
                );
            }
        }
    }
}

impl Trajectories for Agents {
    fn play(&self, play: &Play<'_>) -> Result<Vec<Rollout>> {
        Game::new(self, play).play()
    }

    fn gives_rewards(&self) -> bool {
        self.limits.gives_rewards(self.config.reports_rewards)
    }
}

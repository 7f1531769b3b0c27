//! The servers, clients and request paths of an engine.

use candle_grpo_train::rollout::{Engine, RolloutConfig};

use super::fake_server::FakeServer;
use super::served_policy::{LogProbs, Served, ServedPolicy};
use super::{fake_llama, fake_sglang, fake_vllm};

/// Starts a server that reports log-probs as the engine does by default.
pub(crate) fn start(engine: Engine, served: Served) -> FakeServer {
    let policy = |log_probs| ServedPolicy::new(served, log_probs);
    match engine {
        Engine::Vllm => fake_vllm::start(policy(LogProbs::Processed)),
        Engine::Sglang => fake_sglang::start(policy(LogProbs::Temperature)),
        Engine::Openai => fake_llama::start(policy(LogProbs::Processed)),
        other => panic!("{other:?}: no server"),
    }
}

/// A configuration whose time limits no test reaches.
pub(crate) fn config(engine: Engine, servers: &[FakeServer]) -> RolloutConfig {
    RolloutConfig {
        engine,
        base_url: servers.iter().map(FakeServer::url).collect(),
        request_timeout: 120.,
        server_timeout: 120.,
        log_prob_tolerance: 1e-4,
        ..RolloutConfig::default()
    }
}

/// Request path for sampling.
pub(crate) fn draw_path(engine: Engine) -> &'static str {
    match engine {
        Engine::Sglang => "/generate",
        _ => "/v1/completions",
    }
}

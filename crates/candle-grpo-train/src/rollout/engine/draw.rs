//! One completion from one server.

use std::sync::Arc;

use super::protocol::{DrawRequest, Drawn, Failure};
use super::servers::{Lease, Servers};
use super::weights::WeightFormat;
use crate::rollout::CompletionSeed;
use crate::{Completion, SamplingConfig};

/// A completion to sample.
pub(super) struct Job {
    pub(super) place: usize,
    pub(super) seed: CompletionSeed,
    pub(super) prompt: Vec<u32>,
    /// The tokens that it already has.
    pub(super) begun: Option<Completion>,
    /// Maximum number of tokens, including those of `begun`.
    pub(super) max_new_tokens: usize,
}

impl Job {
    /// Returns the tokens that it already has.
    pub(super) fn begun(&self) -> &[u32] {
        self.begun.as_ref().map_or(&[], |begun| &begun.tokens)
    }
}

/// Samples a completion, or the rest of one, on one server.
pub(super) fn draw(
    servers: &Servers,
    lease: &Lease<'_>,
    job: &Job,
    sampling: &Arc<SamplingConfig>,
    log_probs: bool,
) -> Result<Drawn, Failure> {
    let (server, protocol) = (lease.server(), &servers.protocol);
    let weights = lease.weights.as_deref();
    let adapter = weights.filter(|weights| weights.format == WeightFormat::Adapter);
    let model = match adapter {
        Some(adapter) => adapter.name(),
        None => lease.model_name(),
    };
    let request = DrawRequest {
        model,
        is_adapter: adapter.is_some(),
        prompt: [&job.prompt, job.begun()].concat(),
        max_new_tokens: job.max_new_tokens - job.begun().len(),
        seed: job.seed.to_u64_after(job.begun().len()),
        sampling: Arc::clone(sampling),
        log_probs,
    };
    let tokens = request.prompt.len().saturating_add(request.max_new_tokens);
    let mut drawn = protocol.parse(&server.ask(&protocol.draw(&request), tokens)?)?;
    if !log_probs {
        drawn.log_probs = vec![0.; drawn.tokens.len()];
    }
    // If a server does not have an adapter, it refuses its name. Whole weights are lost silently.
    if let Some(weights) = weights
        && adapter.is_none()
    {
        let serves = match &drawn.weight_version {
            Some(version) => *version == weights.name(),
            None => protocol.serves(server, weights)?,
        };
        if !serves {
            let message = format!("it no longer serves the weights {}", weights.name());
            return Err(Failure::LostWeights(message));
        }
        if lease.has_loaded_since() {
            let message = format!("it has lost and loaded the weights {}", weights.name());
            return Err(Failure::LostWeights(message));
        }
    }
    Ok(drawn)
}

/// The failure of a completion that nobody has interrupted.
pub(super) fn aborted() -> Failure {
    Failure::Malformed("the completion was aborted".to_owned())
}

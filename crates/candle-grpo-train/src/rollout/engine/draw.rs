//! One completion from one server.

use std::sync::Arc;

use super::protocol::{DrawRequest, Drawn, End, Failure};
use super::servers::{Lease, Servers};
use super::weights::WeightFormat;
use crate::SamplingConfig;
use crate::rollout::CompletionSeed;

/// A completion to sample.
pub(super) struct Job {
    pub(super) place: usize,
    pub(super) seed: CompletionSeed,
    pub(super) prompt: Vec<u32>,
    pub(super) max_new_tokens: usize,
}

/// Samples a completion on one server.
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
        prompt: job.prompt.clone(),
        max_new_tokens: job.max_new_tokens,
        seed: job.seed.to_u64(),
        sampling: Arc::clone(sampling),
        log_probs,
    };
    let tokens = request.prompt.len().saturating_add(request.max_new_tokens);
    let mut drawn = protocol.parse(&server.ask(&protocol.draw(&request), tokens)?)?;
    if !log_probs {
        drawn.log_probs = vec![0.; drawn.tokens.len()];
    }
    if drawn.end == End::Aborted {
        return Err(Failure::Malformed("the completion was aborted".to_owned()));
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

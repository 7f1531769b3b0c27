//! Samples from saved weights.

use anyhow::{Context, Result};
use candle_core::Device;
use candle_grpo_base::progress::{Interrupted, Progress};
use candle_grpo_nn::{Decoder, Lora};
use candle_grpo_train::learn::Reference;
use candle_grpo_train::rollout::{
    Completion, CompletionSeed, FinishReason, GenerationBatch, LocalGenerator, PolicyWeights,
    PromptRequest,
};
use candle_grpo_train::{SamplingConfig, TokenBatch};

use crate::base::Base;
use crate::queue::{Queues, SampleRequest, SampleTurn};
use crate::store::SamplerRecord;
use crate::work::{Outcome, SampledTokens};

/// A request for samples.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SampleWork {
    pub(crate) weights: SamplerRecord,
    pub(crate) prompt: Vec<u32>,
    pub(crate) num_samples: usize,
    pub(crate) seed: u64,
    pub(crate) max_new_tokens: usize,
    /// Number of last prompt tokens that get log-probs.
    pub(crate) prompt_log_probs: Option<usize>,
    /// Distribution and ends. Requests with equal ones share a batch.
    pub(crate) sampling: SamplingConfig,
}

/// Weights to sample from: the base model, or with adapters.
pub(crate) struct Snapshot {
    generator: LocalGenerator,
    policy: Reference,
}

/// Cancels a turn that is in vain.
struct UntilOver<'a> {
    queues: &'a Queues,
    turn: &'a SampleTurn,
}

impl Progress for UntilOver<'_> {
    fn is_canceled(&self) -> bool {
        self.queues.is_over(self.turn)
    }
}

impl Snapshot {
    pub(crate) fn new(base: &Base, adapters: Option<&Lora>) -> Result<Self> {
        let weights = PolicyWeights {
            version: 0,
            model: &base.info.model,
            parameters: &base.parameters,
            adapters,
        };
        let (model, parameters) = (&base.info.model, &base.parameters);
        Ok(Self {
            generator: LocalGenerator::in_dtype(&weights, base.dtype)?,
            policy: Reference::with_adapters(model, parameters, adapters, base.dtype)?,
        })
    }

    /// Computes log-probs for a request's last prompt tokens, at temperature 1. Those before
    /// them are NaN.
    fn prompt_log_probs(&self, work: &SampleWork, device: &Device) -> Result<Option<Vec<f32>>> {
        let Some(last) = work.prompt_log_probs else {
            return Ok(None);
        };
        let mut all = vec![f32::NAN; work.prompt.len()];
        if work.prompt.len() > 1 {
            let batch = TokenBatch::new(&[work.prompt.split_at(1)], device)?;
            let found = self.policy.log_probs(&batch, 1.)?.flatten_all()?;
            let found: Vec<f32> = found.to_vec1()?;
            let first = work.prompt.len().saturating_sub(last).max(1);
            all[first..].copy_from_slice(&found[first - 1..]);
        }
        Ok(Some(all))
    }
}

/// Draws samples for a turn, and publishes each result as soon as it is complete. `snapshots` are
/// the weights of the turn, which are sampled from in one batch.
///
/// # Errors
///
/// Fails if the generator does, or with [`Interrupted`] if the turn is in vain.
pub(crate) fn sample(
    base: &Base,
    snapshots: &[(SamplerRecord, Snapshot)],
    turn: &SampleTurn,
    max_batch_size: usize,
    queues: &Queues,
) -> Result<()> {
    let requests = &turn.requests;
    let Some(first) = requests.first() else {
        return Ok(());
    };
    let sampling = SamplingConfig {
        max_batch_size,
        max_new_tokens: requests
            .iter()
            .map(|request| request.work.max_new_tokens)
            .max()
            .unwrap_or(1),
        ..first.work.sampling.clone()
    };
    let prompts: Vec<PromptRequest<'_>> = requests
        .iter()
        .map(|SampleRequest { work, .. }| PromptRequest {
            tokens: &work.prompt,
            seeds: (0..work.num_samples as u64)
                .map(|sample| CompletionSeed {
                    seed: work.seed,
                    stream: 0,
                    prompt: 0,
                    sample,
                    turn: 0,
                })
                .collect(),
            max_new_tokens: work.max_new_tokens,
        })
        .collect();
    let snapshot_of = |request: &SampleRequest| {
        let weights = &request.work.weights;
        let found = snapshots.iter().position(|(record, _)| record == weights);
        found.context("the weights are not in memory")
    };
    let adapters: Vec<usize> = requests.iter().map(snapshot_of).collect::<Result<_>>()?;
    let joined;
    let generator = match snapshots {
        [(_, snapshot)] => &snapshot.generator,
        _ => {
            let decoders = snapshots.iter().map(|(_, own)| own.generator.model());
            let decoders: Vec<&Decoder> = decoders.collect();
            joined = LocalGenerator::from_decoder(Decoder::joined(&decoders)?);
            &joined
        }
    };
    // The request of each completion, and its place there.
    let places: Vec<(usize, usize)> = requests
        .iter()
        .enumerate()
        .flat_map(|(at, request)| (0..request.work.num_samples).map(move |place| (at, place)))
        .collect();
    let mut samples: Vec<Vec<Option<SampledTokens>>> = requests
        .iter()
        .map(|request| vec![None; request.work.num_samples])
        .collect();
    let mut deliver = |place: usize, completion: Completion| {
        let (request, at) = *places
            .get(place)
            .context("a completion that was not asked for")?;
        samples[request][at] = Some(sampled(completion));
        if samples[request].iter().all(Option::is_some) {
            let sequences = samples[request].drain(..).flatten().collect();
            let (_, snapshot) = &snapshots[adapters[request]];
            let request = &requests[request];
            let device = base.parameters.device();
            let prompt_log_probs = snapshot.prompt_log_probs(&request.work, device)?;
            let outcome = Outcome::Samples {
                sequences,
                prompt_log_probs,
            };
            queues.finish_samples(request, outcome);
        }
        Ok(())
    };
    let batch = GenerationBatch {
        prompts: &prompts,
        sampling: &sampling,
        decode: Some(&*base.decode),
        progress: &UntilOver { queues, turn },
        records_experts: false,
        partial: None,
    };
    generator.generate_joined(&batch, &adapters, &mut deliver)
}

fn sampled(completion: Completion) -> SampledTokens {
    SampledTokens {
        log_probs: completion.log_probs.unwrap_or(completion.drawn_log_probs),
        is_cut: completion.finish_reason == FinishReason::Length,
        tokens: completion.tokens,
    }
}

/// Returns whether sampling ended because its turn was in vain.
pub(crate) fn is_interrupted(error: &anyhow::Error) -> bool {
    error.is::<Interrupted>()
}

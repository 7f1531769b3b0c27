//! A teacher on servers.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use candle_grpo_core::validate::check;

use super::protocol::{Failure, Protocol, ScoreRequest, Scored};
use super::servers::{Lease, Servers};
use crate::rollout::RolloutConfig;
use crate::sequence::Column;
use crate::teacher::{Teacher, TeacherDistributions};
use crate::{Interrupted, Progress, Sequence, TokenBatch};
use candle_grpo_base::workers::Workers;
use candle_grpo_hub::http::api_key;

/// A teacher on vLLM or SGLang servers, which compute log-probs for given tokens. They must have
/// the policy's tokens.
///
/// A request is one sequence. A failed request is retried, on another server if there is one. The
/// log-probs are at temperature 1, because servers have no others for given tokens.
///
/// ```no_run
/// use candle_grpo_train::rollout::engine::ServerTeacher;
/// use candle_grpo_train::rollout::{Engine, RolloutConfig};
///
/// let config = RolloutConfig {
///     engine: Engine::Vllm,
///     base_url: vec!["http://10.0.0.7:8000".to_owned()],
///     ..RolloutConfig::default()
/// };
/// let teacher = ServerTeacher::new(&config)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct ServerTeacher {
    servers: Arc<Servers>,
    max_inflight: usize,
    max_retries: usize,
    longest: usize,
}

/// A sequence's tokens, some of which are scored.
struct Job {
    row: usize,
    tokens: Vec<u32>,
    /// The first scored token.
    first: usize,
}

impl ServerTeacher {
    /// Creates a teacher on the servers in `config`. No request is sent before the first call.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`RolloutConfig::validate_teacher`], and if the API key's
    /// environment variable is not set.
    pub fn new(config: &RolloutConfig) -> Result<Self> {
        config.validate_teacher()?;
        Self::with_protocol(config.engine.protocol()?, config)
    }

    /// Creates a teacher like [`Self::new`], on servers with a custom `protocol`. The engine in
    /// `config` is not used, but must be one that a teacher can have.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::new`].
    pub fn with_protocol(protocol: Box<dyn Protocol>, config: &RolloutConfig) -> Result<Self> {
        config.validate_teacher()?;
        let api_key = config.api_key_env.as_deref().map(api_key).transpose()?;
        Ok(Self {
            servers: Arc::new(Servers::new(config, protocol, api_key, "teacher.server")),
            max_inflight: config.max_inflight,
            max_retries: config.max_retries,
            longest: 0,
        })
    }

    /// Sets the longest sequence's number of tokens. If a server has no room for it, the first call
    /// fails, instead of the call with this sequence.
    #[must_use]
    pub fn with_longest_sequence(self, longest: usize) -> Self {
        Self { longest, ..self }
    }

    /// Scores the sequences in `batch` that have a counted token, with this number of most likely
    /// tokens. `receive` gets a row's scores.
    fn score(
        &self,
        batch: &TokenBatch,
        best: usize,
        progress: &dyn Progress,
        mut receive: impl FnMut(usize, Vec<Scored>),
    ) -> Result<()> {
        let jobs = jobs(batch);
        let (servers, max_retries) = (Arc::clone(&self.servers), self.max_retries);
        let longest = self.longest;
        let mut left = jobs.len();
        let work = move |job: Job, stop: &AtomicBool| -> Result<Option<(usize, Vec<Scored>)>> {
            let scored = servers.ask(max_retries, stop, |lease| {
                ensure_fits(lease, longest.max(job.tokens.len()))?;
                Ok(score(&servers, lease, &job, best))
            });
            let scored = scored.with_context(|| format!("teacher: sequence {}", job.row))?;
            Ok(scored.map(|scored| (job.row, scored)))
        };
        let workers = Workers::start("teacher", self.max_inflight, jobs, work)?;
        while left > 0 {
            if progress.is_canceled() {
                return Err(Interrupted.into());
            }
            if let Some((row, scored)) = workers.next()? {
                receive(row, scored);
                left -= 1;
            }
        }
        Ok(())
    }
}

impl Teacher for ServerTeacher {
    /// The servers limit a call's requests.
    fn takes_micro_batches(&self) -> bool {
        false
    }

    /// Scores two tokens, for which a server must be ready.
    fn check(&self, entries: Option<usize>, progress: &dyn Progress) -> Result<()> {
        let batch = TokenBatch::new(&[(&[0], &[0])], &Device::Cpu)?;
        let scored = self.score(&batch, entries.unwrap_or(0), progress, |_, _| {});
        scored.context("checking the teacher before the first completion")
    }

    fn log_probs(
        &self,
        batch: &TokenBatch,
        temperature: f64,
        progress: &dyn Progress,
    ) -> Result<Tensor> {
        let must = "be 1 with a teacher on a server, which names log-probs at temperature 1";
        check(temperature == 1., "temperature", temperature, must)?;
        let (b, t) = batch.dims();
        let mut rows = vec![Vec::new(); b];
        self.score(batch, 0, progress, |row, scored| {
            rows[row] = scored.iter().map(|scored| scored.log_prob).collect();
        })?;
        Column::per_token::<f32>(rows).padded(t, batch.targets().device())
    }

    /// The most likely entries; the server must report this number.
    fn distributions(
        &self,
        batch: &TokenBatch,
        entries: Option<usize>,
        progress: &dyn Progress,
    ) -> Result<TeacherDistributions> {
        let Some(k) = entries else {
            bail!(
                "recipe.distillation_loss.support: another one, must be teacher with a teacher on a server, which names its most likely entries only"
            );
        };
        let (b, t) = batch.dims();
        let (mut ids, mut log_probs) = (vec![Vec::new(); b], vec![Vec::new(); b]);
        self.score(batch, k, progress, |row, scored| {
            let best = scored.into_iter().flat_map(|scored| scored.best);
            (ids[row], log_probs[row]) = best.unzip();
        })?;
        let device = batch.targets().device();
        Ok(TeacherDistributions::TopK {
            ids: Column::entries_per_token::<u32>(ids, k).padded(t, device)?,
            log_probs: Column::entries_per_token::<f32>(log_probs, k).padded(t, device)?,
        })
    }
}

/// Returns the sequences in `batch` that have a counted token, up to the last such token.
fn jobs(batch: &TokenBatch) -> Vec<Job> {
    let sequences = batch.sequences().iter().enumerate();
    let sequences = sequences.filter(|(_, sequence)| sequence.num_trained_tokens() > 0);
    let job = |(row, sequence): (usize, &Sequence)| Job {
        row,
        tokens: sequence.needed_tokens().to_vec(),
        first: sequence.prompt().len(),
    };
    sequences.map(job).collect()
}

/// Checks that the server has room for a sequence and one more token, which vLLM samples.
fn ensure_fits(lease: &Lease<'_>, tokens: usize) -> Result<()> {
    if let Some(longest) = lease.max_model_len() {
        ensure!(
            tokens < longest,
            "{}: serves up to {longest} tokens, must serve {}: a sequence of {tokens} and one more",
            lease.server().url(),
            tokens + 1
        );
    }
    Ok(())
}

/// Requests a sequence's log-probs from one server, with the `best` most likely tokens.
fn score(
    servers: &Servers,
    lease: &Lease<'_>,
    job: &Job,
    best: usize,
) -> Result<Vec<Scored>, Failure> {
    let request = ScoreRequest {
        model: lease.model_name(),
        tokens: &job.tokens,
        first: job.first,
        best,
    };
    let scored = servers.protocol.score(lease.server(), &request)?;
    let expected = job.tokens.len() - job.first;
    if scored.len() != expected {
        let message = format!("{} log-probs, must be {expected}", scored.len());
        return Err(Failure::Malformed(message));
    }
    for (token, scored) in (job.first..).zip(&scored) {
        let found = scored.best.len();
        if found != best {
            let message = format!("{found} most likely tokens at token {token}, must be {best}");
            return Err(Failure::Malformed(message));
        }
        let named = scored.best.iter().map(|(_, log_prob)| *log_prob);
        let mut named = named.chain([scored.log_prob]);
        if let Some(wrong) = named.find(|x| !(x.is_finite() && *x <= 0.)) {
            let message =
                format!("log-prob {wrong} of token {token}, must be finite and at most 0");
            return Err(Failure::Malformed(message));
        }
    }
    Ok(scored)
}

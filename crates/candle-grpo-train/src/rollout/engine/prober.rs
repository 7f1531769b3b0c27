//! Server probes: a server samples a few completions before it may sample a batch's.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_grpo_nn::{DecoderConfig, Lora, Parameters};

use super::draw::{Job, aborted, draw};
use super::live_weights::LiveWeights;
use super::probe::{self, Distribution};
use super::protocol::{Drawn, End, Failure};
use super::servers::{Lease, Servers};
use super::weights::{EngineWeights, WeightFormat};
use crate::rollout::{CompletionSeed, PolicyWeights, RolloutConfig};
use crate::{Interrupted, Progress, SamplingConfig};
use candle_grpo_base::workers::POLL;

/// Compares servers' log-probs with the policy's, and determines their distribution.
pub(super) struct Prober {
    servers: Arc<Servers>,
    /// True if the servers receive no weights.
    is_fixed: bool,
    /// The run's distribution.
    sampling: SamplingConfig,
    vocab_size: usize,
    prompts: Vec<Vec<u32>>,
    log_prob_tolerance: f64,
    max_retries: usize,
    /// The last transferred policy.
    transferred: Mutex<Option<Transferred>>,
}

/// A transferred policy, for probing a server that comes back later.
struct Transferred {
    written: Arc<EngineWeights>,
    model: DecoderConfig,
    /// The frozen parameters that adapters extend.
    base: Option<Parameters>,
}

/// A server probe, whose completions another thread samples.
pub(super) struct Probe<'a> {
    lease: Lease<'a>,
    answers: Receiver<Result<Answers, Failure>>,
}

/// A probe's completions, grouped by [`SamplingConfig`].
type Answers = Vec<Vec<Drawn>>;

impl Prober {
    /// Creates a prober for `servers` with the settings in `config`. Its prompts are random tokens.
    pub(super) fn new(
        servers: &Arc<Servers>,
        config: &RolloutConfig,
        sampling: &SamplingConfig,
        vocab_size: usize,
    ) -> Self {
        Self {
            servers: Arc::clone(servers),
            is_fixed: config.is_fixed_policy(),
            sampling: sampling.clone(),
            vocab_size,
            prompts: probe::prompts(&[], vocab_size),
            log_prob_tolerance: config.log_prob_tolerance,
            max_retries: config.max_retries,
            transferred: Mutex::new(None),
        }
    }

    /// Sets the prompts to send; the first ones are used.
    pub(super) fn set_prompts(&mut self, prompts: &[Vec<u32>]) {
        self.prompts = probe::prompts(prompts, self.vocab_size);
    }

    /// Determines the distribution for servers that receive no weights, if it matters.
    pub(super) fn probe_fixed(&self, progress: &dyn Progress) -> Result<()> {
        // At temperature 1, log-probs before and after it are the same.
        if self.sampling.temperature == 1. {
            return Ok(());
        }
        self.servers.require_distribution();
        self.probe_all(None, progress)
    }

    /// Transfers `weights`, as `written`, to all servers, and compares their log-probs.
    pub(super) fn transfer(
        &self,
        weights: &PolicyWeights<'_>,
        written: EngineWeights,
        progress: &dyn Progress,
    ) -> Result<()> {
        let written = Arc::new(written);
        *self.transferred() = Some(Transferred {
            written: Arc::clone(&written),
            model: weights.model.clone(),
            base: weights.adapters.map(|_| weights.parameters.clone()),
        });
        self.servers.set_weights(written);
        self.probe_all(Some(weights), progress)
    }

    fn transferred(&self) -> MutexGuard<'_, Option<Transferred>> {
        // No code panics while it holds the lock.
        self.transferred
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a probe for the server at `index`.
    fn start_probe(&self, index: usize) -> Result<Probe<'_>> {
        let lease = self.servers.lease(index);
        let temperature = self.sampling.temperature;
        let mut samplings = Vec::new();
        if self.is_fixed {
            samplings.extend([probe::sampling(temperature, 1), probe::sampling(1., 1)]);
        } else {
            samplings.push(probe::sampling(temperature, 0));
            // Without filters, the two distributions are the same.
            if lease.distribution.is_none() && probe::is_filtered(&self.sampling) {
                samplings.push(probe::sampling(temperature, 1));
            }
        }
        let (sender, answers) = channel();
        let servers = Arc::clone(&self.servers);
        let prompts = self.prompts.clone();
        thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                let lease = servers.lease(index);
                let ask = |sampling| ask(&servers, &lease, &prompts, sampling);
                sender.send(samplings.into_iter().map(ask).collect())
            })
            .context("starting a thread")?;
        Ok(Probe { lease, answers })
    }

    /// Checks the answers to `probe`, and makes its server ready. `weights` are those that it
    /// should serve, unless it serves a fixed policy.
    fn finish_probe(
        &self,
        probe: &Probe<'_>,
        answers: &[Vec<Drawn>],
        weights: Option<&PolicyWeights<'_>>,
    ) -> Result<()> {
        let url = probe.lease.server().url();
        for answer in answers.iter().flatten() {
            let validated = probe::validate(answer, self.vocab_size);
            validated.with_context(|| format!("probe: {url}"))?;
        }
        let distribution = match (weights, answers) {
            (Some(weights), [plain, filtered @ ..]) => {
                self.compare(weights, url, plain)?;
                match filtered {
                    [filtered] if probe::are_certain(filtered) => Distribution::Drawn,
                    [] => probe.lease.distribution.unwrap_or(Distribution::Tempered),
                    _ => Distribution::Tempered,
                }
            }
            (None, [at_temperature, at_one]) => {
                let temperature = self.sampling.temperature;
                if probe::are_certain(at_temperature) {
                    Distribution::Drawn
                } else if probe::ignore_temperature(at_temperature, at_one, temperature) {
                    bail!("{}", self.before_temperature(url));
                } else {
                    Distribution::Tempered
                }
            }
            _ => bail!("probe: {url}: no completions"),
        };
        probe.lease.has_passed(distribution);
        Ok(())
    }

    /// Probes a server that has come back since the transfer, one part per call. `probe` is the one
    /// in progress.
    pub(super) fn probe_recovered<'a>(&'a self, probe: &mut Option<Probe<'a>>) -> Result<()> {
        let Some(running) = probe.take() else {
            let index = self.servers.recovered();
            *probe = index.map(|index| self.start_probe(index)).transpose()?;
            return Ok(());
        };
        match running.answers.try_recv() {
            Err(TryRecvError::Empty) => *probe = Some(running),
            Err(TryRecvError::Disconnected) => bail!("a thread of the engine panicked"),
            Ok(Err(failure)) => running.lease.fail(&failure),
            Ok(Ok(answers)) => match self.transferred().as_ref() {
                Some(transferred) => transferred
                    .with_weights(|weights| self.finish_probe(&running, &answers, Some(weights)))?,
                None => self.finish_probe(&running, &answers, None)?,
            },
        }
        Ok(())
    }

    /// Waits for the servers, and probes those that need it.
    pub(super) fn probe_all(
        &self,
        weights: Option<&PolicyWeights<'_>>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let mut tried = Vec::new();
        loop {
            let unprobed = self.servers.wait(progress)?.ok_or(Interrupted)?;
            if unprobed.is_empty() {
                return Ok(());
            }
            for index in unprobed {
                let probe = self.start_probe(index)?;
                let failure = match receive(&probe.answers, progress)? {
                    Ok(answers) => {
                        let transferred = self.transferred();
                        let live = transferred.as_ref().and_then(|of| of.written.live.clone());
                        drop(transferred);
                        let _turn = live.as_deref().and_then(LiveWeights::turn);
                        self.finish_probe(&probe, &answers, weights)?;
                        continue;
                    }
                    Err(failure) => failure,
                };
                tried.push(format!("{}: {failure}", probe.lease.server().url()));
                probe.lease.fail(&failure);
                ensure!(
                    tried.len() <= self.max_retries,
                    "probe: failed {} times: {}",
                    tried.len(),
                    tried.join("; ")
                );
            }
        }
    }

    /// Checks the log-probs in `answers` to the probe prompts, from the server at `url`.
    fn compare(&self, weights: &PolicyWeights<'_>, url: &str, answers: &[Drawn]) -> Result<()> {
        let temperature = self.sampling.temperature;
        let difference = |at: f64| probe::difference(weights, &self.prompts, answers, at);
        let (tempered, bound) = (difference(temperature)?, self.log_prob_tolerance);
        if tempered <= bound {
            return Ok(());
        }
        let raw = difference(1.)?;
        ensure!(
            raw > bound || raw.is_nan(),
            "{} (mean difference {raw:.2e}, after it {tempered:.2e})",
            self.before_temperature(url)
        );
        bail!(
            "{}.log_prob_tolerance: the log-probs of {url} differ by {tempered:.2e} on average from those of the policy, version {}, must differ by at most {bound}: it serves other weights, or computes in lower precision",
            self.servers.section,
            weights.version
        );
    }

    fn before_temperature(&self, url: &str) -> String {
        let (section, temperature) = (self.servers.section, self.sampling.temperature);
        format!(
            "{section}.base_url: {url} names log-probs before the temperature of {temperature}, must name those after it: start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1"
        )
    }
}

impl Transferred {
    /// Calls `check` with the weights as they were written.
    fn with_weights(&self, check: impl FnOnce(&PolicyWeights<'_>) -> Result<()>) -> Result<()> {
        let EngineWeights {
            version,
            format,
            path,
            live,
            ..
        } = &*self.written;
        if let Some(live) = live {
            let _turn = live.turn();
            return check(&live.weights());
        }
        let (parameters, adapters) = match (format, &self.base) {
            (WeightFormat::Adapter, Some(base)) => {
                let adapters = Lora::load(path, &self.model, base.device())?;
                (base.clone(), Some(adapters))
            }
            _ => (
                Parameters::load_folder(&self.model, path, &Device::Cpu)?,
                None,
            ),
        };
        check(&PolicyWeights {
            version: *version,
            model: &self.model,
            parameters: &parameters,
            adapters: adapters.as_ref(),
        })
    }
}

/// Waits for a thread's message. If `progress` cancels, the thread is left alone.
pub(super) fn receive<T>(receiver: &Receiver<T>, progress: &dyn Progress) -> Result<T> {
    loop {
        match receiver.recv_timeout(POLL) {
            Ok(message) => return Ok(message),
            Err(RecvTimeoutError::Disconnected) => bail!("a thread of the engine panicked"),
            Err(RecvTimeoutError::Timeout) if progress.is_canceled() => {
                return Err(Interrupted.into());
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Samples a completion for each probe prompt on one server.
fn ask(
    servers: &Servers,
    lease: &Lease<'_>,
    prompts: &[Vec<u32>],
    sampling: SamplingConfig,
) -> Result<Vec<Drawn>, Failure> {
    let sampling = Arc::new(sampling);
    let jobs = (0..).zip(prompts).map(|(number, prompt)| Job {
        place: number,
        seed: CompletionSeed {
            seed: sampling.seed,
            stream: 0,
            prompt: number as u64,
            sample: 0,
            turn: 0,
        },
        prompt: prompt.clone(),
        begun: None,
        max_new_tokens: probe::NEW_TOKENS,
    });
    let ask = |job| match draw(servers, lease, &job, &sampling, true)? {
        drawn if drawn.end == End::Aborted => Err(aborted()),
        drawn => Ok(drawn),
    };
    jobs.map(ask).collect()
}

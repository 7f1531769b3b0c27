//! The generator that draws from servers.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_grpo_nn::{CheckpointForm, DecoderConfig, Lora, Parameters};

use super::probe::{self, Distribution};
use super::protocol::{DrawRequest, Drawn, End, Failure, Protocol};
use super::servers::{Lease, Servers};
use super::weights::{EngineWeights, WeightFolder, WeightFormat};
use crate::rollout::stop_strings::StopStrings;
use crate::rollout::{
    CompletionSeed, Deliver, GenerationBatch, Generator, PolicyWeights, RolloutConfig, WeightSync,
};
use crate::{Completion, FinishReason, Interrupted, Progress, SamplingConfig};
use candle_grpo_base::workers::{POLL, Workers};
use candle_grpo_hub::http::api_key;

/// Draws completions from servers of vLLM, SGLang, or with the API of OpenAI.
///
/// A request is one completion, with its own seed. A request that fails is repeated, by another
/// server if there is one. A server that comes back receives the weights again, and its log-probs
/// are compared with those of the policy before it draws.
///
/// ```no_run
/// use std::path::Path;
/// use candle_grpo_train::SamplingConfig;
/// use candle_grpo_train::rollout::engine::ServerGenerator;
/// use candle_grpo_train::rollout::{Engine, RolloutConfig};
///
/// let config = RolloutConfig {
///     engine: Engine::Vllm,
///     base_url: vec!["http://10.0.0.7:8000".to_owned()],
///     ..RolloutConfig::default()
/// };
/// let sampling = SamplingConfig { temperature: 0.7, ..SamplingConfig::default() };
/// let generator = ServerGenerator::new(&config, &sampling, 49152, Path::new("runs/a/weights"))?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct ServerGenerator {
    servers: Arc<Servers>,
    weight_sync: WeightSync,
    /// The folder of the weights, and what is in it once there are some.
    folder: PathBuf,
    written: Mutex<Option<WeightFolder>>,
    /// The distribution of the run.
    sampling: SamplingConfig,
    vocab_size: usize,
    probe_prompts: Vec<Vec<u32>>,
    form: Option<CheckpointForm>,
    log_prob_tolerance: f64,
    /// The policy of the last transfer.
    transferred: Mutex<Option<Transferred>>,
    max_inflight: usize,
    max_retries: usize,
    /// False if the completions need no log-probs.
    log_probs: bool,
}

/// The policy of a transfer, for the probe of a server that comes back after it.
struct Transferred {
    written: Arc<EngineWeights>,
    model: DecoderConfig,
    /// The frozen parameters under adapters.
    base: Option<Parameters>,
}

/// A probe of a server, whose completions another thread draws.
struct Probe<'a> {
    lease: Lease<'a>,
    answers: Receiver<Result<Answers, Failure>>,
}

/// The completions of a probe, those of each [`SamplingConfig`] side by side.
type Answers = Vec<Vec<Drawn>>;

/// A completion to draw.
struct Job {
    place: usize,
    seed: CompletionSeed,
    prompt: Vec<u32>,
    max_new_tokens: usize,
}

/// The state that the threads of a call share.
struct Batch {
    servers: Arc<Servers>,
    sampling: Arc<SamplingConfig>,
    vocab_size: usize,
    max_retries: usize,
    log_probs: bool,
}

impl ServerGenerator {
    /// Creates a generator of the servers in `config`, for a policy with `vocab_size` tokens that
    /// is sampled with `sampling`. The weights of the policy go through `folder`, unless
    /// [`RolloutConfig::weight_sync_folder`] is another one. No server is asked before the first
    /// call.
    ///
    /// # Errors
    ///
    /// If `config` or `sampling` is not valid, the engine is local, or the environment variable of
    /// the API key is not set.
    pub fn new(
        config: &RolloutConfig,
        sampling: &SamplingConfig,
        vocab_size: usize,
        folder: &Path,
    ) -> Result<Self> {
        config.validate()?;
        let protocol = config.engine.protocol()?;
        Self::with_protocol(protocol, config, sampling, vocab_size, folder)
    }

    /// Creates a generator of servers with a custom `protocol`, as in [`Self::new`].
    ///
    /// # Errors
    ///
    /// As in [`Self::new`].
    pub fn with_protocol(
        protocol: Box<dyn Protocol>,
        config: &RolloutConfig,
        sampling: &SamplingConfig,
        vocab_size: usize,
        folder: &Path,
    ) -> Result<Self> {
        config.validate()?;
        // The settings are those of servers.
        config.engine.protocol()?;
        sampling.validate()?;
        ensure!(vocab_size > 0, "vocab_size: 0, must be at least 1");
        let api_key = config.api_key_env.as_deref().map(api_key).transpose()?;
        let folder = config.weight_sync_folder.as_deref().unwrap_or(folder);
        Ok(Self {
            servers: Arc::new(Servers::new(config, protocol, api_key, "rollout")),
            weight_sync: match config.is_fixed_policy() {
                true => WeightSync::None,
                false => config.weight_sync,
            },
            folder: folder.to_path_buf(),
            written: Mutex::new(None),
            sampling: sampling.clone(),
            vocab_size,
            probe_prompts: probe::prompts(&[], vocab_size),
            form: None,
            log_prob_tolerance: config.log_prob_tolerance,
            transferred: Mutex::new(None),
            max_inflight: config.max_inflight,
            max_retries: config.max_retries,
            log_probs: true,
        })
    }

    /// Sets the prompts of the probe, of which the first ones are used. Without them the probe
    /// continues random tokens.
    pub fn with_probe_prompts(mut self, prompts: &[Vec<u32>]) -> Self {
        self.probe_prompts = probe::prompts(prompts, self.vocab_size);
        self
    }

    /// Sets the form of the checkpoint that the servers read first, see
    /// [`Pretrained::form`](crate::Pretrained::form). They receive the text model under its names.
    pub fn with_checkpoint_form(mut self, form: Option<CheckpointForm>) -> Self {
        self.form = form;
        self
    }

    /// Draws completions whose log-probs are not read, as in an evaluation. They are 0.
    ///
    /// llama.cpp names no log-probs of some tokens. With log-probs these are not
    /// [written](Completion::written).
    pub fn without_log_probs(mut self) -> Self {
        self.log_probs = false;
        self
    }

    /// The form in which the engine receives `weights`, if it does.
    fn format(&self, weights: &PolicyWeights<'_>) -> Option<WeightFormat> {
        match (self.weight_sync, weights.adapters) {
            (WeightSync::None, _) => None,
            (WeightSync::Adapter, _) | (WeightSync::Auto, Some(_)) => Some(WeightFormat::Adapter),
            (WeightSync::Disk, _) | (WeightSync::Auto, None) => Some(WeightFormat::Disk),
        }
    }

    fn write(&self, weights: &PolicyWeights<'_>, format: WeightFormat) -> Result<EngineWeights> {
        let mut written = lock(&self.written);
        if written.is_none() {
            *written = Some(WeightFolder::open(&self.folder, self.form.clone())?);
        }
        let folder = written.as_mut().context("the folder of the weights")?;
        folder.write(weights, format)
    }

    /// Starts a probe of the server at `index`.
    fn start_probe(&self, index: usize) -> Result<Probe<'_>> {
        let lease = self.servers.lease(index);
        let temperature = self.sampling.temperature;
        let mut samplings = Vec::new();
        if self.weight_sync == WeightSync::None {
            samplings.extend([probe::sampling(temperature, 1), probe::sampling(1., 1)]);
        } else {
            samplings.push(probe::sampling(temperature, 0));
            // Without filters the two distributions are the same.
            if lease.distribution.is_none() && probe::is_filtered(&self.sampling) {
                samplings.push(probe::sampling(temperature, 1));
            }
        }
        let (sender, answers) = channel();
        let servers = Arc::clone(&self.servers);
        let prompts = self.probe_prompts.clone();
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
                    bail!("{}", before_temperature(url, temperature));
                } else {
                    Distribution::Tempered
                }
            }
            _ => bail!("probe: {url}: no completions"),
        };
        probe.lease.has_passed(distribution);
        Ok(())
    }

    /// Probes a server that has come back since the transfer, a part at each call. `probe` is the
    /// one in progress.
    fn probe_recovered<'a>(&'a self, probe: &mut Option<Probe<'a>>) -> Result<()> {
        let Some(running) = probe.take() else {
            let index = self.servers.recovered();
            *probe = index.map(|index| self.start_probe(index)).transpose()?;
            return Ok(());
        };
        match running.answers.try_recv() {
            Err(TryRecvError::Empty) => *probe = Some(running),
            Err(TryRecvError::Disconnected) => bail!("a thread of the engine panicked"),
            Ok(Err(failure)) => running.lease.fail(&failure),
            Ok(Ok(answers)) => match lock(&self.transferred).as_ref() {
                Some(transferred) => transferred
                    .with_weights(|weights| self.finish_probe(&running, &answers, Some(weights)))?,
                None => self.finish_probe(&running, &answers, None)?,
            },
        }
        Ok(())
    }

    /// Waits for the servers, and probes those that need it.
    fn probe_all(
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

    /// Checks the log-probs of the server at `url`, which are those of `answers` to the prompts of
    /// the probe.
    fn compare(&self, weights: &PolicyWeights<'_>, url: &str, answers: &[Drawn]) -> Result<()> {
        let temperature = self.sampling.temperature;
        let difference = |at: f64| probe::difference(weights, &self.probe_prompts, answers, at);
        let (tempered, bound) = (difference(temperature)?, self.log_prob_tolerance);
        if tempered <= bound {
            return Ok(());
        }
        let raw = difference(1.)?;
        ensure!(
            raw > bound || raw.is_nan(),
            "{} (mean difference {raw:.2e}, after it {tempered:.2e})",
            before_temperature(url, temperature)
        );
        bail!(
            "rollout.log_prob_tolerance: the log-probs of {url} differ by {tempered:.2e} on average from those of the policy after {} steps, must differ by at most {bound}: it serves other weights, or computes in lower precision",
            weights.version
        );
    }
}

impl Generator for ServerGenerator {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        batch.sampling.validate()?;
        let jobs = jobs(batch);
        let total = jobs.len();
        let shared = Batch {
            servers: Arc::clone(&self.servers),
            sampling: Arc::new(batch.sampling.clone()),
            vocab_size: self.vocab_size,
            max_retries: self.max_retries,
            log_probs: self.log_probs && !batch.sampling.greedy,
        };
        let work = move |job: Job, stop: &AtomicBool| shared.work(&job, stop);
        let workers = Workers::start("engine", self.max_inflight, jobs, work)?;
        let stop_strings = match batch.decode {
            Some(_) => StopStrings::new(batch)?,
            None => None,
        };
        let mut left = total;
        let mut probe = None;
        while left > 0 {
            if batch.progress.is_canceled() {
                return Err(Interrupted.into());
            }
            self.probe_recovered(&mut probe)?;
            let Some((place, mut completion)) = workers.next()? else {
                continue;
            };
            end(batch, stop_strings.as_ref(), &mut completion)?;
            let tokens = completion.tokens.len();
            deliver(place, completion)?;
            batch.progress.advance(1, tokens);
            left -= 1;
        }
        Ok(())
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, progress: &dyn Progress) -> Result<()> {
        let Some(format) = self.format(weights) else {
            // Log-probs before and after a temperature of 1 are the same.
            if self.sampling.temperature == 1. {
                return Ok(());
            }
            self.servers.require_distribution();
            return self.probe_all(None, progress);
        };
        let written = Arc::new(self.write(weights, format)?);
        *lock(&self.transferred) = Some(Transferred {
            written: Arc::clone(&written),
            model: weights.model.clone(),
            base: weights.adapters.map(|_| weights.parameters.clone()),
        });
        self.servers.set_weights(written);
        self.probe_all(Some(weights), progress)?;
        match lock(&self.written).as_mut() {
            // A server that hangs may be reading an older version.
            Some(folder) if !self.servers.is_recovering() => folder.remove_replaced(),
            _ => Ok(()),
        }
    }

    fn serves_all_ranks(&self) -> bool {
        true
    }
}

impl Transferred {
    /// Calls `check` with the weights as they were written.
    fn with_weights(&self, check: impl FnOnce(&PolicyWeights<'_>) -> Result<()>) -> Result<()> {
        let EngineWeights {
            version,
            format,
            path,
            ..
        } = &*self.written;
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

/// Waits for a message of a thread, which is left alone if `progress` cancels.
fn receive<T>(receiver: &Receiver<T>, progress: &dyn Progress) -> Result<T> {
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

fn before_temperature(url: &str, temperature: f64) -> String {
    format!(
        "rollout.base_url: {url} names log-probs before the temperature of {temperature}, must name those after it: start vLLM with --logprobs-mode processed_logprobs, or set sampler.temperature to 1"
    )
}

/// Ends a completion at its first stop token or stop string, which some servers ignore, and sets
/// the reason of its end. Some servers check the length first, and some use one reason for stop
/// strings and tokens.
fn end(
    batch: &GenerationBatch<'_>,
    stop_strings: Option<&StopStrings<'_>>,
    completion: &mut Completion,
) -> Result<()> {
    let is_stop = |id: &u32| batch.sampling.stop_token_ids.contains(id);
    let stop_token = completion.tokens.iter().position(is_stop);
    if let Some(last) = stop_token {
        truncate(completion, last + 1);
        completion.finish_reason = FinishReason::StopToken;
    }
    // Before a stop token, whose text ends nothing.
    let text = &completion.tokens[..stop_token.unwrap_or(completion.tokens.len())];
    if let Some(strings) = stop_strings
        && let Some(len) = strings.first_end(text)?
    {
        truncate(completion, len);
        completion.finish_reason = FinishReason::StopString;
    }
    Ok(())
}

fn truncate(completion: &mut Completion, len: usize) {
    completion.tokens.truncate(len);
    completion.drawn_log_probs.truncate(len);
    completion.weight_versions.truncate(len);
    if let Some(written) = &mut completion.written {
        written.truncate(len);
    }
    if let Some(log_probs) = &mut completion.log_probs {
        log_probs.truncate(len);
    }
}

impl Drop for ServerGenerator {
    fn drop(&mut self) {
        // A server that cannot read its weights may be lost.
        if self.servers.close()
            && let Some(folder) = lock(&self.written).as_mut()
        {
            folder.keep();
        }
    }
}

impl Batch {
    /// Draws a completion, with its place.
    fn work(&self, job: &Job, stop: &AtomicBool) -> Result<Option<(usize, Completion)>> {
        let completion = self.complete(job, stop).with_context(|| {
            let CompletionSeed { sample, prompt, .. } = job.seed;
            format!("completion {sample} of prompt {prompt}")
        })?;
        Ok(completion.map(|completion| (job.place, completion)))
    }

    /// Draws a completion, on several servers one after another if need be. Returns `None` if the
    /// call ends before.
    fn complete(&self, job: &Job, stop: &AtomicBool) -> Result<Option<Completion>> {
        self.servers.ask(self.max_retries, stop, |lease| {
            lease.ensure_fits(job.prompt.len(), job.max_new_tokens)?;
            let drawn = draw(&self.servers, lease, job, &self.sampling, self.log_probs);
            let drawn = match drawn {
                Ok(drawn) => drawn,
                Err(failure) => return Ok(Err(failure)),
            };
            let completion = self.completion(drawn, lease);
            let validated = completion.validate(self.vocab_size);
            validated.with_context(|| lease.server().url().to_owned())?;
            Ok(Ok(completion))
        })
    }

    fn completion(&self, drawn: Drawn, lease: &Lease<'_>) -> Completion {
        // Tokens without a log-prob are context.
        let written: Vec<bool> = drawn.log_probs.iter().map(|x| !x.is_nan()).collect();
        let written = written.contains(&false).then_some(written);
        let log_probs = drawn.named_log_probs();
        let Drawn { tokens, end, .. } = drawn;
        let version = lease.weights.as_ref().map_or(0, |weights| weights.version);
        let is_policy = match lease.distribution {
            None => false,
            // A server without transfers serves another policy.
            Some(_) if lease.weights.is_none() => false,
            Some(Distribution::Tempered) => true,
            Some(Distribution::Drawn) => !probe::is_filtered(&self.sampling),
        };
        let of_policy = self.log_probs && is_policy;
        Completion {
            weight_versions: vec![version; tokens.len()],
            tokens,
            log_probs: of_policy.then(|| log_probs.clone()),
            drawn_log_probs: log_probs,
            written,
            experts: None,
            finish_reason: match end {
                End::StopToken | End::Aborted => FinishReason::StopToken,
                End::StopString => FinishReason::StopString,
                End::Length => FinishReason::Length,
            },
        }
    }
}

/// Draws a completion of each prompt of a probe on one server.
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
        max_new_tokens: probe::NEW_TOKENS,
    });
    jobs.map(|job| draw(servers, lease, &job, &sampling, true))
        .collect()
}

/// Draws a completion on one server.
fn draw(
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
    // A server that does not know an adapter refuses its name. Whole weights are lost silently.
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

/// Lists all completions of `batch`.
fn jobs(batch: &GenerationBatch<'_>) -> Vec<Job> {
    let mut jobs = Vec::new();
    for request in batch.prompts {
        for &seed in &request.seeds {
            jobs.push(Job {
                place: jobs.len(),
                seed,
                prompt: request.tokens.to_vec(),
                max_new_tokens: request.max_new_tokens,
            });
        }
    }
    jobs
}

/// Locks a mutex. No code panics while it holds one of these.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

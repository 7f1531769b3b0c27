//! The generator that samples from servers.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use anyhow::{Context, Result, ensure};
use candle_grpo_core::validate::{Name, check};
use candle_grpo_nn::{CheckpointForm, ComputeDType};

use super::draw::{Job, aborted, draw};
use super::live_weights::{Lent, LiveWeights};
use super::probe::{self, Distribution};
use super::prober::{self, Prober};
use super::protocol::{Drawn, End, Protocol};
use super::servers::{Lease, Servers};
use super::weights::{EngineWeights, WeightFolder, WeightFormat};
use crate::rollout::stop_strings::StopStrings;
use crate::rollout::{
    CompletionSeed, Deliver, GenerationBatch, Generator, PolicyWeights, RolloutConfig, WeightSync,
};
use crate::{Completion, FinishReason, Interrupted, Progress, SamplingConfig};
use candle_grpo_base::workers::Workers;
use candle_grpo_collective::{SharedMemory, TransferTransport};
use candle_grpo_hub::http::api_key;

/// Samples completions from vLLM or SGLang servers, or from servers with OpenAI's API.
///
/// A request is one completion, with its own seed. A failed request is retried, on another server
/// if there is one. A server that comes back receives the weights again. Its log-probs are then
/// compared with the policy's before it samples.
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
    /// The weights directory, and its contents once there are some.
    folder: PathBuf,
    written: Mutex<Option<WeightFolder>>,
    vocab_size: usize,
    form: Option<CheckpointForm>,
    weight_dtype: ComputeDType,
    /// An error says why servers cannot receive weights from memory. `None` if it was not set.
    transport: Option<Result<(), String>>,
    /// The same for memory that servers on the policy's GPU can read.
    shared_memory: Option<Result<(), String>>,
    /// The limit for messages with weights from memory, in bytes.
    message: usize,
    /// The form of whole weights with [`WeightSync::Auto`], once that is known.
    auto: OnceLock<WeightFormat>,
    /// The last weights from memory.
    live: Mutex<Option<Arc<LiveWeights>>>,
    prober: Prober,
    max_inflight: usize,
    max_retries: usize,
    /// False if the completions need no log-probs.
    log_probs: bool,
}

/// The default of [`ServerGenerator::with_message_bytes`].
const MESSAGE: usize = 256 << 20;

/// A completion, or the beginning of one.
struct Answer {
    place: usize,
    completion: Completion,
    /// Number of its tokens from earlier calls.
    begun: usize,
    has_ended: bool,
}

/// State that a call's threads share.
struct Batch {
    servers: Arc<Servers>,
    sampling: Arc<SamplingConfig>,
    vocab_size: usize,
    max_retries: usize,
    log_probs: bool,
}

impl ServerGenerator {
    /// Creates a generator for the servers in `config`. The policy has `vocab_size` tokens and is
    /// sampled with `sampling`. Its weights go through `folder`, unless
    /// [`RolloutConfig::weight_sync_folder`] names another directory. No request is sent before the
    /// first call.
    ///
    /// # Errors
    ///
    /// Fails if `config` or `sampling` is invalid, if the engine is local, or if the API key's
    /// environment variable is not set.
    pub fn new(
        config: &RolloutConfig,
        sampling: &SamplingConfig,
        vocab_size: usize,
        folder: &Path,
    ) -> Result<Self> {
        let protocol = config.engine.protocol()?;
        Self::with_protocol(protocol, config, sampling, vocab_size, folder)
    }

    /// Creates a generator like [`Self::new`], for servers with a custom `protocol`.
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::new`].
    pub fn with_protocol(
        protocol: Box<dyn Protocol>,
        config: &RolloutConfig,
        sampling: &SamplingConfig,
        vocab_size: usize,
        folder: &Path,
    ) -> Result<Self> {
        // The settings must be for servers.
        config.engine.protocol()?;
        Self::build(protocol, config, (sampling, vocab_size), folder, "rollout")
    }

    /// Creates a generator for the servers of a teacher with the tokens of the policy, from which
    /// it samples with `sampling`. They receive no weights, and the completions have [no
    /// log-probs](Self::without_log_probs).
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`RolloutConfig::validate_sampling_teacher`], and if `sampling`
    /// is invalid or the API key's environment variable is not set.
    pub fn of_teacher(
        config: &RolloutConfig,
        sampling: &SamplingConfig,
        vocab_size: usize,
    ) -> Result<Self> {
        config.validate_sampling_teacher()?;
        let config = RolloutConfig {
            weight_sync: WeightSync::None,
            ..config.clone()
        };
        let (protocol, policy) = (config.engine.protocol()?, (sampling, vocab_size));
        let generator = Self::build(protocol, &config, policy, Path::new(""), "teacher.server");
        Ok(generator?.without_log_probs())
    }

    pub(super) fn build(
        protocol: Box<dyn Protocol>,
        config: &RolloutConfig,
        (sampling, vocab_size): (&SamplingConfig, usize),
        folder: &Path,
        section: &'static str,
    ) -> Result<Self> {
        config.validate()?;
        sampling.validate()?;
        ensure!(vocab_size > 0, "vocab_size: 0, must be at least 1");
        let api_key = config.api_key_env.as_deref().map(api_key).transpose()?;
        let folder = config.weight_sync_folder.as_deref().unwrap_or(folder);
        let servers = Arc::new(Servers::new(config, protocol, api_key, section));
        Ok(Self {
            weight_sync: if config.is_fixed_policy() {
                WeightSync::None
            } else {
                config.weight_sync
            },
            folder: folder.to_path_buf(),
            written: Mutex::new(None),
            vocab_size,
            form: None,
            weight_dtype: ComputeDType::F32,
            transport: None,
            shared_memory: None,
            message: MESSAGE,
            auto: OnceLock::new(),
            live: Mutex::new(None),
            prober: Prober::new(&servers, config, sampling, vocab_size),
            servers,
            max_inflight: config.max_inflight,
            max_retries: config.max_retries,
            log_probs: true,
        })
    }

    /// Sets the probe prompts; the first ones are used. Without them, the probe continues random
    /// tokens.
    #[must_use]
    pub fn with_probe_prompts(mut self, prompts: &[Vec<u32>]) -> Self {
        self.prober.set_prompts(prompts);
        self
    }

    /// Sets the form of the checkpoint that the servers read first, see
    /// [`Pretrained::form`](crate::Pretrained::form). They receive the text model under its names.
    #[must_use]
    pub fn with_checkpoint_form(mut self, form: Option<CheckpointForm>) -> Self {
        self.form = form;
        self
    }

    /// Sets the dtype of whole weights that the servers receive, by default f32. If the policy
    /// computes in bf16, bf16 halves the bytes and loses nothing.
    #[must_use]
    pub fn with_weight_dtype(mut self, dtype: ComputeDType) -> Self {
        self.weight_dtype = dtype;
        self
    }

    /// Sets the transport over which servers can receive whole weights from memory, or the error
    /// that explains why there is none. vLLM supports it.
    ///
    /// With [`WeightSync::Auto`], weights then go over it if all servers join at the first
    /// transfer, and otherwise through a directory. The reason is logged.
    ///
    /// # Errors
    ///
    /// Fails with [`WeightSync::Nccl`] if there is no transport.
    pub fn with_transport(
        mut self,
        transport: candle_core::Result<Arc<dyn TransferTransport>>,
    ) -> Result<Self> {
        let set = transport.map_err(|error| error.to_string());
        if let Ok(transport) = &set {
            self.servers.set_transport(transport, self.message);
        }
        let set = set.map(drop);
        if self.weight_sync == WeightSync::Nccl {
            require_memory(self.weight_sync, Some(&set))?;
        }
        self.transport = Some(set);
        Ok(self)
    }

    /// Sets the memory that a server on the policy's GPU can open to read whole weights, or the
    /// error that explains why there is none. vLLM supports it.
    ///
    /// With [`WeightSync::Auto`], it is used if the server was started for it.
    ///
    /// # Errors
    ///
    /// Fails with [`WeightSync::Ipc`] if there is no such memory.
    pub fn with_shared_memory(
        mut self,
        memory: candle_core::Result<Arc<dyn SharedMemory>>,
    ) -> Result<Self> {
        let set = memory.map_err(|error| error.to_string());
        if let Ok(memory) = &set {
            self.servers.set_shared_memory(memory, self.message);
        }
        let set = set.map(drop);
        if self.weight_sync == WeightSync::Ipc {
            require_memory(self.weight_sync, Some(&set))?;
        }
        self.shared_memory = Some(set);
        Ok(self)
    }

    /// Sets the size in bytes from which a message with weights is sent, by default 256 MiB. This
    /// process needs as much memory on its device for each server, and a server twice as much. Call
    /// it before [`Self::with_transport`] and [`Self::with_shared_memory`].
    #[must_use]
    pub fn with_message_bytes(mut self, bytes: usize) -> Self {
        self.message = bytes;
        self
    }

    /// Samples completions whose log-probs are not read, as in an evaluation. They are 0.
    ///
    /// llama.cpp does not report log-probs for some tokens. If log-probs are needed, these tokens
    /// are not [written](Completion::written).
    #[must_use]
    pub fn without_log_probs(mut self) -> Self {
        self.log_probs = false;
        self
    }

    /// Lets the servers sample from `weights`, beside those of other generators. Their adapters are
    /// the PEFT directory `folder`, which the servers must see under the same path. No server may
    /// have had weights with this version. The log-probs are compared as in
    /// [`Self::weights_changed`].
    ///
    /// # Errors
    ///
    /// Fails in the same cases as [`Self::weights_changed`].
    pub(super) fn serve_saved(
        &self,
        folder: &Path,
        weights: &PolicyWeights<'_>,
        progress: &dyn Progress,
    ) -> Result<()> {
        let saved = EngineWeights::saved(weights.version, folder)?;
        self.prober.transfer(weights, saved, progress)
    }

    /// Returns a function that lets the servers unload the adapter from [`Self::serve_saved`].
    pub(super) fn unload(&self) -> impl FnOnce() + Send + 'static {
        let servers = Arc::clone(&self.servers);
        move || servers.unload()
    }

    /// Returns the form in which the engine receives `weights`, if it does.
    fn format(
        &self,
        weights: &PolicyWeights<'_>,
        progress: &dyn Progress,
    ) -> Result<Option<WeightFormat>> {
        let in_memory = |format, set: &Option<Result<(), String>>| {
            ensure!(
                !weights.parameters.is_full(),
                "rollout.weight_sync: {}, must be auto or disk where ranks divide all weights",
                Name(&self.weight_sync)
            );
            require_memory(self.weight_sync, set.as_ref())?;
            Ok(Some(format))
        };
        match (self.weight_sync, weights.adapters) {
            (WeightSync::None, _) => Ok(None),
            (WeightSync::Adapter, _) => Ok(Some(WeightFormat::Adapter)),
            // A server that sleeps loses the weights under the adapters, too.
            (WeightSync::Auto, Some(_)) if !self.servers.sleep_mode => {
                Ok(Some(WeightFormat::Adapter))
            }
            (WeightSync::Disk, _) => Ok(Some(WeightFormat::Disk)),
            (WeightSync::Nccl, _) => in_memory(WeightFormat::Memory, &self.transport),
            (WeightSync::Ipc, _) => in_memory(WeightFormat::SharedMemory, &self.shared_memory),
            (WeightSync::Auto, _) => self.whole_format(weights, progress).map(Some),
        }
    }

    /// Returns the form in which all servers that are up can receive whole weights. The first call
    /// finds it, and logs the reason.
    fn whole_format(
        &self,
        weights: &PolicyWeights<'_>,
        progress: &dyn Progress,
    ) -> Result<WeightFormat> {
        if let Some(format) = self.auto.get() {
            return Ok(*format);
        }
        // A server is started for one of them. NCCL needs a GPU for each process, so a server that
        // shares that of the policy does not use it.
        let ways = [
            ("CUDA IPC", WeightFormat::SharedMemory, &self.shared_memory),
            ("NCCL", WeightFormat::Memory, &self.transport),
        ];
        let sleeps = self.servers.sleep_mode;
        let ways = ways
            .into_iter()
            .filter(|(_, format, _)| !sleeps || *format == WeightFormat::SharedMemory);
        let mut reasons = Vec::new();
        for (name, format, set) in ways {
            let joined = match set {
                None => continue,
                Some(Err(reason)) => Err(reason.clone()),
                Some(Ok(())) if weights.parameters.is_full() => {
                    Err("ranks divide all weights".to_owned())
                }
                Some(Ok(())) => self.join(format, progress)?,
            };
            match joined {
                Ok(()) => {
                    tracing::info!("rollout.weight_sync: the servers receive weights over {name}");
                    return Ok(*self.auto.get_or_init(|| format));
                }
                Err(reason) => reasons.push(format!("not over {name}: {reason}")),
            }
        }
        if !reasons.is_empty() {
            tracing::info!(
                "rollout.weight_sync: the servers read weights from {}, {}",
                self.folder.display(),
                reasons.join("; ")
            );
        }
        Ok(*self.auto.get_or_init(|| WeightFormat::Disk))
    }

    /// Connects to the servers for weights in `format`. The inner error says why one cannot.
    fn join(
        &self,
        format: WeightFormat,
        progress: &dyn Progress,
    ) -> Result<std::result::Result<(), String>> {
        self.servers.wait(progress)?.ok_or(Interrupted)?;
        let (sender, joined) = channel();
        let servers = Arc::clone(&self.servers);
        thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || sender.send(servers.join(format)))
            .context("starting a thread")?;
        prober::receive(&joined, progress)
    }

    /// Returns the last weights from memory.
    fn live(&self) -> MutexGuard<'_, Option<Arc<LiveWeights>>> {
        // No code panics while it holds the lock.
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends the last weights from memory to the threads that send them, during a call.
    fn lend(&self) -> Option<Lent> {
        self.live().as_ref().map(LiveWeights::lend)
    }

    /// Ends all requests, and returns the completions and beginnings that the servers answer.
    fn interrupt(&self, workers: Workers<Answer>, progress: &dyn Progress) -> Result<Vec<Answer>> {
        let ensure_not_canceled = || {
            if progress.is_canceled() {
                Err(Interrupted.into())
            } else {
                Ok(())
            }
        };
        // Before an answer can be the consequence.
        workers.stop();
        let interrupts = self.servers.interrupt()?;
        let answers = workers.drain(|| {
            ensure_not_canceled()?;
            interrupts.next()?;
            Ok(())
        })?;
        // A late one would end requests of the next call.
        interrupts.drain(ensure_not_canceled)?;
        Ok(answers)
    }

    fn written(&self) -> MutexGuard<'_, Option<WeightFolder>> {
        // No code panics while it holds the lock.
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, weights: &PolicyWeights<'_>, format: WeightFormat) -> Result<EngineWeights> {
        let mut written = self.written();
        if written.is_none() {
            let (form, dtype) = (self.form.clone(), self.weight_dtype.into());
            *written = Some(WeightFolder::open(&self.folder, form, dtype)?);
        }
        let folder = written.as_mut().context("the directory of the weights")?;
        folder.write(weights, format)
    }
}

impl Generator for ServerGenerator {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        batch.sampling.validate()?;
        if batch.sampling.structured_outputs.is_some() {
            let must = "be absent with a server whose protocol does not pass it on";
            let passes = self.servers.protocol.structures_outputs();
            check(passes, "structured_outputs", "given", must)?;
            let must = "be absent in a partial rollout: a server starts the form again when it continues a completion";
            let is_whole = batch.partial.is_none();
            check(is_whole, "structured_outputs", "given", must)?;
        }
        if let Some(partial) = &batch.partial {
            partial.validate(batch.prompts, self.vocab_size)?;
        }
        ensure!(
            !self.servers.are_asleep(),
            "rollout.sleep_mode: the servers sleep, and must receive weights before they sample"
        );
        // The policy does not train meanwhile, so a server that has lost its weights can get them.
        let _lent = self.lend();
        let jobs = jobs(batch);
        let total = jobs.len();
        let shared = Batch {
            servers: Arc::clone(&self.servers),
            sampling: Arc::new(batch.sampling.clone()),
            vocab_size: self.vocab_size,
            max_retries: self.max_retries,
            log_probs: self.log_probs && !batch.sampling.greedy,
        };
        let work = move |job: Job, stop: &AtomicBool| shared.work(job, stop);
        let workers = Workers::start("engine", self.max_inflight, jobs, work)?;
        let stop_strings = match batch.decode {
            Some(_) => StopStrings::new(batch)?,
            None => None,
        };
        let mut receive = |mut answer: Answer| {
            end(batch, stop_strings.as_ref(), &mut answer)?;
            let new_tokens = answer.completion.tokens.len() - answer.begun;
            if !answer.has_ended {
                batch.progress.advance(0, new_tokens);
                let unfinished = batch.partial.map(|partial| partial.unfinished);
                let unfinished = unfinished.context("the completion has not ended")?;
                return unfinished(answer.place, answer.completion);
            }
            deliver(answer.place, answer.completion)?;
            batch.progress.advance(1, new_tokens);
            Ok(())
        };
        let mut left = total;
        let mut probe = None;
        while left > 0 {
            if batch.progress.is_canceled() {
                return Err(Interrupted.into());
            }
            if batch.partial.is_some_and(|partial| (partial.is_enough)()) {
                let answers = self.interrupt(workers, batch.progress)?;
                return answers.into_iter().try_for_each(receive);
            }
            self.prober.probe_recovered(&mut probe)?;
            if let Some(answer) = workers.next()? {
                receive(answer)?;
                left -= 1;
            }
        }
        Ok(())
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, progress: &dyn Progress) -> Result<()> {
        self.servers.set_device(weights.parameters.device());
        let Some(format) = self.format(weights, progress)? else {
            return self.prober.probe_fixed(progress);
        };
        let written = match format {
            WeightFormat::Memory | WeightFormat::SharedMemory => {
                let (form, dtype) = (self.form.clone(), self.weight_dtype.into());
                let live = Arc::new(LiveWeights::new(weights, form, dtype));
                *self.live() = Some(Arc::clone(&live));
                EngineWeights::in_memory(weights.version, format, live)
            }
            WeightFormat::Adapter | WeightFormat::Disk => self.write(weights, format)?,
        };
        let _lent = self.lend();
        self.prober.transfer(weights, written, progress)?;
        match self.written().as_mut() {
            // A server that hangs may be reading an older version.
            Some(folder) if !self.servers.is_recovering() => folder.remove_replaced(),
            _ => Ok(()),
        }
    }

    fn sleep(&self, progress: &dyn Progress) -> Result<bool> {
        Ok(self.servers.sleep(progress)?.ok_or(Interrupted)?)
    }

    fn serves_all_ranks(&self) -> bool {
        true
    }
}

/// Checks that servers may receive weights from memory with `sync`.
fn require_memory(sync: WeightSync, set: Option<&Result<(), String>>) -> Result<()> {
    let reason = match set {
        Some(Ok(())) => return Ok(()),
        Some(Err(reason)) => reason,
        None if sync == WeightSync::Ipc => "this program sets no shared memory",
        None => "this program sets no transport",
    };
    let must = format!("be auto, adapter or disk: {reason}");
    Ok(check(false, "rollout.weight_sync", Name(&sync), &must)?)
}

/// Ends a completion at its first stop token or stop string, which some servers ignore, and sets
/// the finish reason. Some servers check the length first, and some use the same reason for stop
/// strings and tokens. A server that continues a completion does not know a stop string's
/// beginning.
fn end(
    batch: &GenerationBatch<'_>,
    stop_strings: Option<&StopStrings<'_>>,
    answer: &mut Answer,
) -> Result<()> {
    let completion = &mut answer.completion;
    let is_stop = |id: &u32| batch.sampling.stop_token_ids.contains(id);
    let stop_token = completion.tokens.iter().position(is_stop);
    if let Some(last) = stop_token {
        truncate(completion, last + 1);
        completion.finish_reason = FinishReason::StopToken;
        answer.has_ended = true;
    }
    // Before a stop token, whose text ends nothing.
    let text = &completion.tokens[..stop_token.unwrap_or(completion.tokens.len())];
    if let Some(strings) = stop_strings
        && let Some(len) = strings.first_end(text, answer.begun)?
    {
        truncate(completion, len);
        completion.finish_reason = FinishReason::StopString;
        answer.has_ended = true;
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

/// Adds the tokens that `later` has after those of `begun`.
fn append(begun: Option<Completion>, later: Completion) -> Completion {
    let Some(mut all) = begun else {
        return later;
    };
    let written = |of: &Completion| (0..of.tokens.len()).map(|at| of.is_written(at)).collect();
    if all.written.is_some() || later.written.is_some() {
        let parts: [Vec<bool>; 2] = [written(&all), written(&later)];
        all.written = Some(parts.concat());
    }
    all.tokens.extend(later.tokens);
    all.drawn_log_probs.extend(later.drawn_log_probs);
    let log_probs = all.log_probs.zip(later.log_probs);
    all.log_probs = log_probs.map(|(begun, later)| [begun, later].concat());
    all.weight_versions.extend(later.weight_versions);
    all.finish_reason = later.finish_reason;
    all.experts = None;
    all
}

impl Drop for ServerGenerator {
    fn drop(&mut self) {
        self.servers.leave();
        // If a server cannot read its weights, it may be lost.
        if self.servers.close()
            && let Some(folder) = self.written().as_mut()
        {
            folder.keep();
        }
    }
}

impl Batch {
    /// Samples a completion.
    fn work(&self, mut job: Job, stop: &AtomicBool) -> Result<Option<Answer>> {
        let drawn = self.complete(&job, stop).with_context(|| {
            let CompletionSeed { sample, prompt, .. } = job.seed;
            format!("completion {sample} of prompt {prompt}")
        })?;
        Ok(drawn.map(|(new, has_ended)| Answer {
            place: job.place,
            begun: job.begun().len(),
            completion: append(job.begun.take(), new),
            has_ended,
        }))
    }

    /// Samples a completion's new tokens, on several servers one after another if necessary, and
    /// returns whether it has ended. Returns `None` if it has no new tokens when the call ends.
    fn complete(&self, job: &Job, stop: &AtomicBool) -> Result<Option<(Completion, bool)>> {
        let answered = self.servers.ask(self.max_retries, stop, |lease| {
            lease.ensure_fits(job.prompt.len(), job.max_new_tokens)?;
            let drawn = draw(&self.servers, lease, job, &self.sampling, self.log_probs);
            let drawn = match drawn {
                Ok(drawn) => drawn,
                Err(failure) => return Ok(Err(failure)),
            };
            let left = job.max_new_tokens - job.begun().len();
            let has_ended = drawn.end != End::Aborted || drawn.tokens.len() == left;
            if !has_ended && !stop.load(Ordering::Acquire) {
                return Ok(Err(aborted()));
            }
            if !has_ended && drawn.tokens.is_empty() {
                return Ok(Ok(None));
            }
            let completion = self.completion(drawn, lease);
            let validated = completion.validate(self.vocab_size);
            validated.with_context(|| lease.server().url().to_owned())?;
            Ok(Ok(Some((completion, has_ended))))
        })?;
        Ok(answered.flatten())
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
            // Engines mask logits before they compute any log-probs.
            Some(_) if self.sampling.structured_outputs.is_some() => false,
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
                End::StopToken => FinishReason::StopToken,
                End::StopString => FinishReason::StopString,
                // Aborted within the step that sampled the last token, if it has ended.
                End::Length | End::Aborted => FinishReason::Length,
            },
        }
    }
}

/// Lists all completions in `batch`.
fn jobs(batch: &GenerationBatch<'_>) -> Vec<Job> {
    let mut jobs = Vec::new();
    for request in batch.prompts {
        for &seed in &request.seeds {
            jobs.push(Job {
                place: jobs.len(),
                seed,
                prompt: request.tokens.to_vec(),
                begun: batch
                    .partial
                    .and_then(|partial| partial.begun.get(jobs.len())?.clone()),
                max_new_tokens: request.max_new_tokens,
            });
        }
    }
    jobs
}

//! Servers that sample from several adapters.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use candle_grpo_core::validate::{Name, check};

use super::generator::ServerGenerator;
use crate::rollout::{
    AdapterEngine, Deliver, GenerationBatch, Generator, PolicyWeights, RolloutConfig, WeightSync,
};
use crate::{Progress, SamplingConfig};

/// vLLM or SGLang servers that sample from several adapters at the same time.
///
/// Each adapter gets a name of its own, and is loaded into all servers. Before it samples, the
/// log-probs of a few tokens are compared with those of the weights in this process. It is unloaded
/// when its generator is dropped. Drop the generators first: then dropping this value waits for it,
/// at most 20 seconds.
///
/// ```no_run
/// use candle_grpo_train::rollout::engine::ServerAdapters;
/// use candle_grpo_train::rollout::{Engine, RolloutConfig};
///
/// let adapters = ServerAdapters::new(&RolloutConfig {
///     engine: Engine::Vllm,
///     base_url: vec!["http://10.0.0.7:8000".to_owned()],
///     ..RolloutConfig::default()
/// })?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct ServerAdapters {
    config: RolloutConfig,
    /// The version of the next adapter.
    next: AtomicU64,
    /// Threads that unload adapters have a copy of it.
    unloads: Sender<()>,
    /// Disconnected once they have ended.
    unloaded: Mutex<Receiver<()>>,
}

/// Samples from one adapter, which the servers unload at the end.
struct ServedAdapter {
    generator: ServerGenerator,
    unloads: Sender<()>,
}

/// Maximum wait for servers to unload adapters at the end.
const UNLOAD_LIMIT: Duration = Duration::from_secs(20);

/// A temperature at which a probe finds out whether log-probs are after it.
const PROBE_TEMPERATURE: f64 = 0.7;

impl ServerAdapters {
    /// Creates generators for the servers in `config`. No request is sent yet.
    ///
    /// # Errors
    ///
    /// Fails if `config` is invalid, or if the engine does not load adapters.
    pub fn new(config: &RolloutConfig) -> Result<Self> {
        config.validate()?;
        let loads = config.engine.loads_weights();
        let must = "be vllm or sglang, which load adapters";
        check(loads, "engine", Name(&config.engine), must)?;
        let sync = config.weight_sync;
        let is_adapter = matches!(sync, WeightSync::Auto | WeightSync::Adapter);
        let must = "be auto or adapter";
        check(is_adapter, "weight_sync", Name(&sync), must)?;
        let must = "be false, as the servers sample from adapters at any time";
        check(!config.sleep_mode, "sleep_mode", true, must)?;
        // Servers keep the adapters of a process that was killed, with their names.
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
        let (unloads, unloaded) = channel();
        Ok(Self {
            config: config.clone(),
            next: AtomicU64::new(u64::try_from(now)?),
            unloads,
            unloaded: Mutex::new(unloaded),
        })
    }
}

impl AdapterEngine for ServerAdapters {
    fn open(
        &self,
        folder: &Path,
        weights: &PolicyWeights<'_>,
        progress: &dyn Progress,
    ) -> Result<Box<dyn Generator>> {
        let sampling = SamplingConfig {
            temperature: PROBE_TEMPERATURE,
            // So that it also finds out whether they are after filters.
            top_k: 1,
            ..SamplingConfig::default()
        };
        let protocol = self.config.engine.protocol()?;
        let policy = (&sampling, weights.model.vocab_size);
        // Nothing is written there.
        let unused = Path::new("");
        let generator = ServerGenerator::build(protocol, &self.config, policy, unused, "engine")?;
        let served = ServedAdapter {
            generator,
            unloads: self.unloads.clone(),
        };
        let weights = PolicyWeights {
            version: self.next.fetch_add(1, Ordering::Relaxed),
            ..*weights
        };
        served.generator.serve_saved(folder, &weights, progress)?;
        Ok(Box::new(served))
    }
}

impl Generator for ServedAdapter {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.generator.generate(batch, deliver)
    }

    fn serves_all_ranks(&self) -> bool {
        self.generator.serves_all_ranks()
    }
}

impl Drop for ServedAdapter {
    /// Lets a thread unload the adapter, because a server may not answer.
    fn drop(&mut self) {
        let (unload, unloads) = (self.generator.unload(), self.unloads.clone());
        let unload = move || {
            unload();
            drop(unloads);
        };
        let thread = thread::Builder::new().name("engine".to_owned());
        if let Err(error) = thread.spawn(unload) {
            tracing::warn!("no thread can be started: {error}");
        }
    }
}

impl Drop for ServerAdapters {
    /// Waits for the servers to unload the adapters of generators that were dropped, because the
    /// process may end now. Generators that still exist are not waited for.
    fn drop(&mut self) {
        // The last copies are those of the threads.
        self.unloads = channel().0;
        let unloaded = self.unloaded.get_mut();
        let unloaded = unloaded.unwrap_or_else(PoisonError::into_inner);
        if unloaded.recv_timeout(UNLOAD_LIMIT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the servers have not unloaded all adapters");
        }
    }
}

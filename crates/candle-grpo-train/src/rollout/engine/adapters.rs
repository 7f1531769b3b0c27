//! Servers that sample from several adapters.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

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
/// when its generator is dropped.
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
}

/// Samples from one adapter, which the servers unload at the end.
struct ServedAdapter(ServerGenerator);

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
        // Servers keep the adapters of a process that was killed, with their names.
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_micros();
        Ok(Self {
            config: config.clone(),
            next: AtomicU64::new(u64::try_from(now)?),
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
        let vocab_size = weights.model.vocab_size;
        // Nothing is written there.
        let unused = Path::new("");
        let generator = ServerGenerator::new(&self.config, &sampling, vocab_size, unused)?;
        let served = ServedAdapter(generator);
        let weights = PolicyWeights {
            version: self.next.fetch_add(1, Ordering::Relaxed),
            ..*weights
        };
        served.0.serve_saved(folder, &weights, progress)?;
        Ok(Box::new(served))
    }
}

impl Generator for ServedAdapter {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        self.0.generate(batch, deliver)
    }

    fn serves_all_ranks(&self) -> bool {
        self.0.serves_all_ranks()
    }
}

impl Drop for ServedAdapter {
    fn drop(&mut self) {
        self.0.unload();
    }
}

//! A run's engine.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
#[cfg(feature = "engines")]
use candle_core::Device;
#[cfg(feature = "engines")]
use candle_grpo_collective::{SharedMemory, TransferTransport};
use candle_grpo_train::rollout::{AdapterEngine, RolloutConfig};
use candle_grpo_train::{Generator, Pretrained, Prompt, SamplingConfig, TrainConfig};

/// Creates a generator for the servers in `train.rollout`. It samples completions from the policy
/// `pretrained` with `sampling`. `None` means the policy in this process.
///
/// The weights go through `folder` unless the configuration sets another. The first `prompts` serve
/// as the probe. If `log_probs` is false, the completions need no log-probs.
///
/// # Errors
///
/// As in `ServerGenerator::new`, if this program was built without the feature `engines`, or if
/// `rollout.weight_sync` is `nccl` or `ipc` and weights cannot go that way.
pub fn engine(
    train: &TrainConfig,
    sampling: &SamplingConfig,
    pretrained: &Pretrained,
    folder: &Path,
    prompts: &[Prompt],
    log_probs: bool,
) -> Result<Option<Arc<dyn Generator>>> {
    let config = &train.rollout;
    if config.engine.is_local() {
        return Ok(None);
    }
    #[cfg(feature = "engines")]
    {
        use candle_grpo_train::rollout::Engine;
        use candle_grpo_train::rollout::engine::ServerGenerator;

        let vocab_size = pretrained.model.vocab_size;
        let generator = ServerGenerator::new(config, sampling, vocab_size, folder)?;
        let generator = generator.with_checkpoint_form(pretrained.form.clone());
        let generator = generator.with_weight_dtype(train.compute_dtype);
        let prompts = prompts.iter().map(|prompt| prompt.tokens.clone());
        let prompts: Vec<Vec<u32>> = prompts.collect();
        let mut generator = generator.with_probe_prompts(&prompts);
        if config.engine == Engine::Vllm {
            let device = pretrained.parameters.device();
            generator = generator.with_transport(transport(device))?;
            if let [_] = &config.base_url[..] {
                generator = generator.with_shared_memory(shared_memory(device))?;
            }
        }
        Ok(Some(if log_probs {
            Arc::new(generator)
        } else {
            Arc::new(generator.without_log_probs())
        }))
    }
    #[cfg(not(feature = "engines"))]
    {
        let _ = (sampling, pretrained, folder, prompts, log_probs);
        Err(without_engines(config))
    }
}

/// Creates an engine that samples from several adapters with the servers in `config`.
///
/// # Errors
///
/// As in `ServerAdapters::new`, or if this program was built without the feature `engines`.
pub fn adapter_engine(config: &RolloutConfig) -> Result<Arc<dyn AdapterEngine>> {
    #[cfg(feature = "engines")]
    {
        use candle_grpo_train::rollout::engine::ServerAdapters;

        Ok(Arc::new(ServerAdapters::new(config)?))
    }
    #[cfg(not(feature = "engines"))]
    Err(without_engines(config))
}

#[cfg(not(feature = "engines"))]
fn without_engines(config: &RolloutConfig) -> anyhow::Error {
    anyhow::anyhow!(
        "rollout.engine: {}, must be local: this program was built without the feature engines",
        candle_grpo_core::validate::Name(&config.engine)
    )
}

/// Creates the transport from the policy's `device` to the processes of servers.
#[cfg(feature = "engines")]
fn transport(device: &Device) -> candle_core::Result<Arc<dyn TransferTransport>> {
    if !device.is_cuda() {
        candle_core::bail!("the policy is not on an NVIDIA GPU");
    }
    #[cfg(feature = "nccl")]
    {
        Ok(Arc::new(candle_grpo_collective::NcclTransfer::new(device)?))
    }
    #[cfg(not(feature = "nccl"))]
    {
        candle_core::bail!("this program was built without the feature nccl")
    }
}

/// Creates the memory of the policy's `device` that a server on it can read.
#[cfg(feature = "engines")]
fn shared_memory(device: &Device) -> candle_core::Result<Arc<dyn SharedMemory>> {
    if !device.is_cuda() {
        candle_core::bail!("the policy is not on an NVIDIA GPU");
    }
    #[cfg(feature = "cuda")]
    {
        Ok(Arc::new(candle_grpo_collective::CudaIpc::new(device)?))
    }
    #[cfg(not(feature = "cuda"))]
    {
        candle_core::bail!("this program was built without the feature cuda")
    }
}

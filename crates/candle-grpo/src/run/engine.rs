//! A run's engine.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_train::{Generator, Pretrained, Prompt, SamplingConfig, TrainConfig};

/// Creates a generator for the servers in `train.rollout`. It samples completions from the policy
/// `pretrained` with `sampling`. `None` means the policy in this process.
///
/// The weights go through `folder` unless the configuration sets another. The first `prompts` serve
/// as the probe. If `log_probs` is false, the completions need no log-probs.
///
/// # Errors
///
/// As in `ServerGenerator::new`, or if this program was built without the feature `engines`.
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
        use candle_grpo_train::rollout::engine::ServerGenerator;

        let vocab_size = pretrained.model.vocab_size;
        let generator = ServerGenerator::new(config, sampling, vocab_size, folder)?;
        let generator = generator.with_checkpoint_form(pretrained.form.clone());
        let generator = generator.with_weight_dtype(train.compute_dtype);
        let prompts = prompts.iter().map(|prompt| prompt.tokens.clone());
        let prompts: Vec<Vec<u32>> = prompts.collect();
        let generator = generator.with_probe_prompts(&prompts);
        Ok(Some(if log_probs {
            Arc::new(generator)
        } else {
            Arc::new(generator.without_log_probs())
        }))
    }
    #[cfg(not(feature = "engines"))]
    {
        let _ = (sampling, pretrained, folder, prompts, log_probs);
        anyhow::bail!(
            "rollout.engine: {}, must be local: this program was built without the feature engines",
            candle_grpo_core::validate::Name(&config.engine)
        )
    }
}

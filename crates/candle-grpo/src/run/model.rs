//! The model of a run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use candle_grpo_train::{ChatTemplate, Pretrained, RunDir};

use crate::config::ModelConfig;

/// Loads a model, onto the first CUDA device if the program was built for CUDA. Its path may be
/// that of a run: its best checkpoint, or the last that is whole if no evaluation says which is
/// best.
pub fn load_model(config: &ModelConfig) -> Result<Pretrained> {
    let device = match candle_core::utils::cuda_is_available() {
        // With a stream of its own: Candle's default is another one in each thread, and waits for
        // none of them.
        true => Device::new_cuda_with_stream(0)
            .context("this program was built for CUDA, which does not answer")?,
        false => Device::Cpu,
    };
    let path = model_path(&config.path)?;
    let mut pretrained = Pretrained::load(&path, &device)?;
    if let Some(file) = &config.chat_template {
        let read = || -> Result<ChatTemplate> {
            let template = ChatTemplate::new(&fs::read_to_string(file)?)?;
            Ok(template.with_special_tokens(&pretrained.special_tokens))
        };
        let template = read().with_context(|| format!("chat template {}", file.display()))?;
        pretrained.chat_template = Some(template);
    }
    tracing::info!(
        "{}: {:.1} million parameters, {} layers, {} tokens, on {:?}",
        path.display(),
        pretrained.parameters.num_elements() as f64 / 1e6,
        pretrained.model.num_hidden_layers,
        pretrained.model.vocab_size,
        device.location(),
    );
    Ok(pretrained)
}

/// Returns the path of a model: that of the best checkpoint if `path` is the folder of a run,
/// otherwise `path`.
///
/// # Errors
///
/// Returns an error if the run has no checkpoint.
pub fn model_path(path: &Path) -> Result<PathBuf> {
    if !RunDir::is_run(path) {
        return Ok(path.to_path_buf());
    }
    let run = path;
    if let Some(best) = RunDir::best_checkpoint(run)? {
        return Ok(best.path);
    }
    // Programs that save at the end only leave one there.
    let last = run.join("checkpoint");
    ensure!(
        last.is_dir(),
        "{}: the run has no checkpoint",
        run.display()
    );
    Ok(last)
}

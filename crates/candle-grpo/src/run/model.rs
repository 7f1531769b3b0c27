//! The model of a run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::Device;
use candle_grpo_train::{ChatTemplate, Pretrained, RunDir, StepCheckpoint};

use crate::config::ModelConfig;

/// Loads a model, onto the first CUDA device if the program was built for CUDA and there is one. Its path may be that of a run: its
/// best checkpoint, or the last if no evaluation says which is best.
pub fn load_model(config: &ModelConfig) -> Result<Pretrained> {
    let device = Device::cuda_if_available(0)?;
    let path = match RunDir::is_run(&config.path) {
        true => best_checkpoint(&config.path)?,
        false => config.path.clone(),
    };
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

fn best_checkpoint(run: &Path) -> Result<PathBuf> {
    let all = RunDir::checkpoints(run).all()?;
    let best = RunDir::best_evaluation(run)?;
    let of_best = |checkpoint: &&StepCheckpoint| Some(checkpoint.step) == best;
    let chosen = all.iter().find(of_best).or(all.last());
    let chosen = chosen.with_context(|| format!("{}: the run has no checkpoint", run.display()))?;
    Ok(chosen.path.clone())
}

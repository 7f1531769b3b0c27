//! A run's model.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_grpo_collective::{Alone, Collective, launch};
use candle_grpo_nn::{BaseWeights, ComputeDType};
use candle_grpo_train::{
    ChatTemplate, Pretrained, RunDir, cuda_device, cuda_device_count, cuda_is_enabled,
};

use super::resume::recorded_inputs;
use crate::config::{Configuration, ModelConfig};

/// Returns this process's device: the CPU unless [`cuda_is_enabled`], otherwise the CUDA device
/// [`Environment::gpu`](launch::Environment::gpu), which is the first one without a launcher. All
/// calls return the same device.
///
/// # Errors
///
/// Returns an error if the device does not respond, the launcher's variables contradict each other,
/// or the machine has fewer devices than ranks.
pub fn device() -> Result<Device> {
    if !cuda_is_enabled() {
        return Ok(Device::Cpu);
    }
    let ordinal = match launch::environment()? {
        Some(rank) => rank.gpu(cuda_device_count()?)?,
        None => 0,
    };
    cuda_device(ordinal).with_context(|| {
        format!("this program was built for CUDA, and CUDA device {ordinal} does not respond")
    })
}

/// Loads a model onto [`device`]. A run directory stands for its best checkpoint, or for its last
/// complete one if there are no evaluations. Hub names must already be replaced by
/// [`locate_files`](super::locate_files).
///
/// # Errors
///
/// Returns an error that names the file if the model or its chat template cannot be read.
pub fn load_model(config: &ModelConfig) -> Result<Pretrained> {
    load_in(config, Pretrained::load)
}

/// Loads a model as [`load_model`] does, with linear maps in the form `base` and other weights in
/// `dtype`, for adapters that train.
///
/// # Errors
///
/// Returns an error as [`load_model`] does.
pub fn load_base(
    config: &ModelConfig,
    base: BaseWeights,
    dtype: ComputeDType,
) -> Result<Pretrained> {
    load_in(config, |path, device| {
        Pretrained::load_frozen(path, device, base, dtype)
    })
}

/// Loads the model for a run that trains it, as [`load_model`] does. Weights under adapters get the
/// run's form and dtype, where they take less memory.
///
/// # Errors
///
/// Returns an error as [`load_model`] does.
pub fn load_policy(run: &impl Configuration) -> Result<Pretrained> {
    let alone: Arc<dyn Collective> = Arc::new(Alone);
    load_policy_on_ranks(run, &alone)
}

/// [`load_policy`] on one of several ranks that share the run. Each weight that they divide is
/// divided once it is read.
///
/// # Errors
///
/// Returns an error as [`load_model`] does.
pub fn load_policy_on_ranks(
    run: &impl Configuration,
    collective: &Arc<dyn Collective>,
) -> Result<Pretrained> {
    let (base, dtype) = run.stored_form();
    load_in(run.model(), |path, device| match run.division(collective) {
        Some(division) => Pretrained::load_divided(path, device, &division),
        None => Pretrained::load_frozen(path, device, base, dtype),
    })
}

fn load_in(
    config: &ModelConfig,
    load: impl Fn(&Path, &Device) -> Result<Pretrained>,
) -> Result<Pretrained> {
    let device = device()?;
    let path = model_path(&config.path)?;
    let pretrained = load(&path, &device)?;
    let pretrained = with_template(pretrained, config)?;
    tracing::info!(
        "{}: {:.1} million parameters, {} layers, {} vocabulary tokens, on {:?}",
        path.display(),
        pretrained.parameters.num_elements() as f64 / 1e6,
        pretrained.model.num_hidden_layers,
        pretrained.model.vocab_size,
        device.location(),
    );
    Ok(pretrained)
}

/// Loads a run's model without its weights, to check the data and the settings. Weights that are
/// not downloaded yet are not checked.
///
/// # Errors
///
/// Returns an error as [`load_model`] does, except for weights that are not finite.
pub fn load_model_without_weights(run: &impl Configuration) -> Result<Pretrained> {
    let path = model_path(&run.model().path)?;
    let pretrained = Pretrained::load_without_weights(&path)?;
    if !run.lacks_model_weights() {
        pretrained.check_weights(&path)?;
    }
    with_template(pretrained, run.model())
}

fn with_template(mut pretrained: Pretrained, config: &ModelConfig) -> Result<Pretrained> {
    if let Some(file) = &config.chat_template {
        let read = || -> Result<ChatTemplate> {
            let template = ChatTemplate::new(&fs::read_to_string(file)?)?;
            Ok(template.with_special_tokens(&pretrained.special_tokens))
        };
        let template = read().with_context(|| format!("chat template {}", file.display()))?;
        pretrained.chat_template = Some(template);
    }
    if let (Some(template), Some(clock)) = (&pretrained.chat_template, &config.clock) {
        pretrained.chat_template = Some(template.clone().with_clock_at(clock)?);
    }
    Ok(pretrained)
}

/// Returns the time that chat templates print in an existing run; `None` if there is no run or its
/// time is not fixed.
///
/// # Errors
///
/// As [`recorded_inputs`].
pub fn clock_of_run(run_dir: &Path) -> Result<Option<String>> {
    let inputs = recorded_inputs(run_dir)?;
    Ok(inputs.and_then(|inputs| inputs.clock().map(str::to_owned)))
}

/// Returns a model's path: the best checkpoint if `path` is a run directory, otherwise `path`.
///
/// # Errors
///
/// Returns an error if the run has no checkpoint or has lost its settings or metrics.
pub fn model_path(path: &Path) -> Result<PathBuf> {
    if !RunDir::is_run(path) {
        // A model has a tokenizer, and a run has none.
        if path.is_dir()
            && !path.join("tokenizer.json").exists()
            && let Some(lost) = RunDir::lost_files(path)?
        {
            bail!("{}: {lost}", path.display());
        }
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

//! The inputs of a command, each with the exit code of its kind.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_grpo::config::{
    ConfigError, Configuration, Document, Import, ModelConfig, RunConfig, SftRunConfig,
};
use candle_grpo::nn::DecoderConfig;
use candle_grpo::run::{
    RunPrompts, device, load_model, load_model_without_weights, load_policy, locate, locate_files,
};
use candle_grpo::train::hub::{HubContent, HubName};
use candle_grpo::train::learn::Ranks;
use candle_grpo::train::model::Chat;
use candle_grpo::train::sft::SftDataset;
use candle_grpo::train::{
    ComputeDType, Dataset, Pretrained, RewardConfig, RewardFunction, Sampler, SamplingConfig,
    WeightedRewards,
};
use candle_grpo_collective::{connect, launch};
use serde_json::{Map, Value};

use super::console::Console;
use super::exit::{Exit, warn};

fn wrong(error: ConfigError) -> Exit {
    Exit::Config(error.to_string())
}

/// Reads a file.
pub(super) fn document(file: &Path) -> Result<Document, Exit> {
    Document::read(file).map_err(wrong)
}

/// Returns the supervised run that a document describes.
pub(super) fn sft_config(document: &Document) -> Result<SftRunConfig, Exit> {
    SftRunConfig::new(document).map_err(wrong)
}

/// Returns the rows of a supervised run, with everything checked but the weights of the model, and
/// the model without them. `grpo check` and `grpo sft` share these checks.
pub(super) fn sft_inputs(run: &SftRunConfig) -> Result<(SftDataset, Pretrained), Exit> {
    let pretrained =
        load_model_without_weights(run).map_err(|error| Exit::Model(format!("{error:#}")))?;
    let dataset = run.load_data(&pretrained).map_err(Exit::from_data)?;
    dataset.warn("data");
    warn_of_doubts(&run.doubts());
    Ok((dataset, pretrained))
}

/// Returns the run that a document describes.
pub(super) fn config(document: &Document) -> Result<RunConfig, Exit> {
    RunConfig::new(document).map_err(wrong)
}

/// Returns the translation of a document of another trainer, for the ranks of this job.
///
/// # Errors
///
/// If a key changes the run and has no counterpart, unless `allow_unsupported` is true, or if
/// neither trainer has a key.
pub(super) fn import(document: &Document, allow_unsupported: bool) -> Result<Option<Import>, Exit> {
    let environment = launch::environment().map_err(|error| Exit::Run(error.to_string()))?;
    let processes = environment.map_or(1, |environment| environment.world_size);
    let import = Import::of_processes(document, processes);
    match &import {
        Some(import) => import.check(allow_unsupported).map_err(wrong)?,
        None if document.is_former() => {
            warn(
                "the file has sections of an earlier version; `grpo import` prints it with today's",
            );
        }
        None => {}
    }
    Ok(import)
}

/// Returns the run that a file describes, which may be of another trainer. Keys that are not
/// supported are warned of.
pub(super) fn any_config(file: &Path, allow_unsupported: bool) -> Result<RunConfig, Exit> {
    let document = document(file)?;
    match import(&document, allow_unsupported)? {
        Some(import) => {
            warn_of_keys(&import);
            config(&import.document)
        }
        None => config(&document),
    }
}

/// Replaces the names of the hub in a run by paths: see [`locate_files`]. Then the programs,
/// scripts and models of its rewards are checked.
pub(super) fn files(
    run: &mut impl Configuration,
    model: HubContent,
    commits: &BTreeMap<String, String>,
    console: &Console,
) -> Result<(), Exit> {
    locate_files(run, model, commits, console).map_err(Exit::from_hub)?;
    run.check_files().map_err(wrong)
}

/// Returns the path of a model, which can be a name of the hub.
pub(super) fn model_file(path: &Path, console: &Console) -> Result<PathBuf, Exit> {
    let located = HubName::of(path).and_then(|name| match name {
        Some(name) => Ok(locate(&name, HubContent::Model, None, console)?.path),
        None => Ok(path.to_path_buf()),
    });
    console.finish();
    located.map_err(Exit::from_hub)
}

/// Checks the settings that neither the data nor the model decide.
pub(super) fn check_settings(run: &RunConfig) -> Result<(), Exit> {
    run.check_training().map_err(wrong)?;
    // The device of a model that is loaded.
    let on_gpu = candle_grpo_train::cuda_is_enabled();
    run.check_device(on_gpu).map_err(wrong)?;
    warn_of_doubts(&run.doubts());
    Ok(())
}

fn warn_of_doubts(doubts: &[String]) {
    for doubt in doubts {
        tracing::warn!("{doubt}");
    }
}

/// The inputs of a run except the weights of its model.
pub(super) struct Inputs {
    pub(super) dataset: Dataset,
    pub(super) prompts: RunPrompts,
    pub(super) model: DecoderConfig,
}

/// Returns the data of a run and its prompts, with everything checked but the weights of the model.
/// `grpo check` and `grpo train` share these checks.
pub(super) fn inputs(run: &RunConfig) -> Result<Inputs, Exit> {
    check_settings(run)?;
    let pretrained =
        load_model_without_weights(run).map_err(|error| Exit::Model(format!("{error:#}")))?;
    let (dataset, prompts) = RunPrompts::read(run, &pretrained).map_err(Exit::from_data)?;
    let longest = prompts.longest_row(run);
    Ok(Inputs {
        dataset,
        prompts,
        model: pretrained.model.for_rows_of(longest),
    })
}

/// Warns of the keys of another trainer that would mean something and are not supported.
pub(super) fn warn_of_keys(import: &Import) {
    for warning in import.warnings() {
        warn(&warning);
    }
}

/// Builds the reward function of a run.
pub(super) fn rewards(run: &RunConfig) -> Result<WeightedRewards, Exit> {
    // The configuration is valid, so an environment gives the rewards.
    if run.rewards.is_empty() {
        return Ok(WeightedRewards::new());
    }
    let built = || -> anyhow::Result<WeightedRewards> {
        let mut rewards = RewardConfig::build(&run.rewards, &device()?)?;
        if let Some(clock) = &run.model.clock {
            rewards.set_clock(clock)?;
        }
        Ok(rewards)
    };
    built().map_err(|error| Exit::Config(format!("{error:#}")))
}

/// Loads the model that a run trains.
pub(super) fn policy(run: &impl Configuration) -> Result<Pretrained, Exit> {
    load_policy(run).map_err(|error| Exit::Model(format!("{error:#}")))
}

/// Loads a model.
pub(super) fn model(config: &ModelConfig) -> Result<Pretrained, Exit> {
    load_model(config).map_err(|error| Exit::Model(format!("{error:#}")))
}

/// Sets variables of the chat template of a model.
pub(super) fn set_variables(
    model: &mut Pretrained,
    variables: &Map<String, Value>,
) -> Result<(), Exit> {
    let wrong = |message: String| Exit::Config(format!("--chat-template-kwargs: {message}"));
    let Some(template) = &model.chat_template else {
        return Err(wrong(
            "given, but the model has no chat template".to_owned(),
        ));
    };
    for name in variables.keys() {
        if Chat::RESERVED.contains(&name.as_str()) || !template.has_variable(name) {
            let message = "given, but the chat template has no such variable";
            return Err(wrong(format!("{name}: {message}")));
        }
    }
    let template = template.clone().with_variables(variables.clone());
    model.chat_template = Some(template);
    Ok(())
}

/// Connects to the other ranks of a job that a launcher has started.
pub(super) fn ranks() -> Result<Ranks, Exit> {
    let connected = device().and_then(|device| Ok(connect(&device)?));
    let collective = connected.map_err(|error| Exit::Run(format!("{error:#}")))?;
    Ok(Ranks::new(collective))
}

/// Creates the sampler of `grpo eval` and `grpo sample`, which computes in `dtype`, with the
/// progress of `console`.
pub(super) fn sampler(
    pretrained: &Pretrained,
    sampling: SamplingConfig,
    dtype: ComputeDType,
    console: &Console,
) -> anyhow::Result<Sampler> {
    let sampler = pretrained.sampler_in(sampling, dtype)?;
    Ok(sampler.with_progress(Arc::new(console.clone())))
}

/// Warns of more threads than the machine has cores.
pub(super) fn warn_of_threads(run: &impl Configuration) {
    let cores = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    if let Some(threads) = run.threads().filter(|threads| *threads > cores) {
        tracing::warn!(
            "threads: {threads}, and this process has {cores} cores; more threads than cores make operators slower"
        );
    }
}

/// Sets the number of threads that compute.
pub(super) fn set_threads(run: &impl Configuration) -> Result<(), Exit> {
    warn_of_threads(run);
    let Some(threads) = run.threads() else {
        return Ok(());
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build_global()
        .map_err(|error| Exit::Config(format!("threads: {threads}: {error}")))
}

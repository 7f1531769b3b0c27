//! The inputs of a command. Each kind has its own exit code.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_grpo::config::{
    ConfigError, Configuration, Document, Import, ModelConfig, RunConfig, SftRunConfig,
};
use candle_grpo::nn::{BaseWeights, DecoderConfig};
use candle_grpo::run::{
    RunPrompts, device, load_base, load_model, load_model_without_weights, load_policy_on_ranks,
    locate, locate_files,
};
use candle_grpo::train::environment::EnvironmentConfig;
use candle_grpo::train::hub::{HubContent, HubName};
use candle_grpo::train::learn::Ranks;
use candle_grpo::train::model::Chat;
use candle_grpo::train::sft::SftDataset;
use candle_grpo::train::{
    ComputeDType, Dataset, Pretrained, RewardConfig, RewardFunction, Sample, Sampler,
    SamplingConfig, WeightedRewards,
};
use candle_grpo_collective::{connect, launch};
use serde_json::{Map, Value};

use super::console::Console;
use super::exit::{Exit, warn};

pub(super) fn wrong(error: ConfigError) -> Exit {
    Exit::Config(error.to_string())
}

/// Reads a file.
pub(super) fn document(file: &Path) -> Result<Document, Exit> {
    Document::read(file).map_err(wrong)
}

/// Returns a document's supervised run.
pub(super) fn sft_config(document: &Document) -> Result<SftRunConfig, Exit> {
    SftRunConfig::new(document).map_err(wrong)
}

/// Returns a supervised run's rows, and the model without its weights. Everything is checked but
/// the weights. `grpo check` and `grpo sft` share these checks.
pub(super) fn sft_inputs(run: &SftRunConfig) -> Result<(SftDataset, Pretrained), Exit> {
    let pretrained =
        load_model_without_weights(run).map_err(|error| Exit::Model(format!("{error:#}")))?;
    let dataset = run.load_data(&pretrained).map_err(Exit::from_data)?;
    dataset.warn("data");
    warn_of_doubts(&run.doubts());
    Ok((dataset, pretrained))
}

/// Returns a document's run.
pub(super) fn config(document: &Document) -> Result<RunConfig, Exit> {
    RunConfig::new(document).map_err(wrong)
}

/// Translates another trainer's document, for the number of ranks in this job.
///
/// # Errors
///
/// Returns an error if a key changes the run and has no equivalent, unless `allow_unsupported` is
/// true, or if neither trainer has a key.
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

/// Returns a file's run; the file may be another trainer's. Warns about keys that are not
/// supported.
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

/// Replaces hub names in a run with paths: see [`locate_files`]. Then checks the programs, scripts
/// and models of its rewards.
pub(super) fn files(
    run: &mut impl Configuration,
    model: HubContent,
    commits: &BTreeMap<String, String>,
    console: &Console,
) -> Result<(), Exit> {
    locate_files(run, model, commits, console).map_err(Exit::from_hub)?;
    run.check_files().map_err(wrong)
}

/// Returns the path to a model, which may be a hub name.
pub(super) fn model_file(path: &Path, console: &Console) -> Result<PathBuf, Exit> {
    let located = HubName::of(path).and_then(|name| match name {
        Some(name) => Ok(locate(&name, HubContent::Model, None, console)?.path),
        None => Ok(path.to_path_buf()),
    });
    console.finish();
    located.map_err(Exit::from_hub)
}

/// Checks the settings that depend on neither the data nor the model.
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

/// A run's inputs, except the model weights.
pub(super) struct Inputs {
    pub(super) dataset: Dataset,
    pub(super) prompts: RunPrompts,
    pub(super) model: DecoderConfig,
}

/// Returns a run's data and prompts, with everything checked but the model weights. `grpo check`
/// and `grpo train` share these checks.
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

/// Warns about another trainer's keys that would have an effect and are not supported.
pub(super) fn warn_of_keys(import: &Import) {
    for warning in import.warnings() {
        warn(&warning);
    }
}

/// Builds a run's reward function.
pub(super) fn rewards(run: &RunConfig) -> Result<WeightedRewards, Exit> {
    if run.rewards.is_empty() {
        let mut environment = run.environment.iter();
        let none = WeightedRewards::new();
        if environment.any(EnvironmentConfig::gives_rewards) {
            return Ok(none);
        }
        // The configuration is valid, so the policy learns from its teacher alone.
        return Ok(none.with("none", 0., |_: &Sample| 0.));
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

/// Loads the model that a run trains, on one of its ranks.
pub(super) fn policy(run: &impl Configuration, ranks: &Ranks) -> Result<Pretrained, Exit> {
    let pretrained = load_policy_on_ranks(run, ranks.collective());
    pretrained.map_err(|error| Exit::Model(format!("{error:#}")))
}

/// Loads a model.
pub(super) fn model(config: &ModelConfig) -> Result<Pretrained, Exit> {
    load_model(config).map_err(|error| Exit::Model(format!("{error:#}")))
}

/// Loads a model under adapters, with linear maps in the form `base` and other weights in `dtype`.
pub(super) fn base(
    config: &ModelConfig,
    base: BaseWeights,
    dtype: ComputeDType,
) -> Result<Pretrained, Exit> {
    load_base(config, base, dtype).map_err(|error| Exit::Model(format!("{error:#}")))
}

/// Sets a model's chat template variables.
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

/// Creates the sampler for `grpo eval` and `grpo sample`, which computes in `dtype` and reports to
/// `console`.
pub(super) fn sampler(
    pretrained: &Pretrained,
    sampling: SamplingConfig,
    dtype: ComputeDType,
    console: &Console,
) -> anyhow::Result<Sampler> {
    let sampler = pretrained.sampler_in(sampling, dtype)?;
    Ok(sampler.with_progress(Arc::new(console.clone())))
}

/// Sets how many threads compute, and warns if there are more of them than cores.
pub(super) fn set_threads(run: &impl Configuration) -> Result<(), Exit> {
    let Some(threads) = run.threads() else {
        return Ok(());
    };
    let cores = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
    if threads > cores {
        tracing::warn!(
            "threads: {threads}, and this process has {cores} cores; more threads than cores make operators slower"
        );
    }
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build_global()
        .map_err(|error| Exit::Config(format!("threads: {threads}: {error}")))
}

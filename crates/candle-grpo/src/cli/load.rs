//! What a configuration names, each with the exit code of its kind.

use std::path::Path;

use candle_grpo::config::{ConfigError, Document, ModelConfig, RollFile, RunConfig};
use candle_grpo::run::{RunPrompts, load_model};
use candle_grpo::train::{Dataset, Pretrained, RewardConfig, WeightedRewards};

use super::exit::Exit;

/// The run that a file describes. A file of ROLL is translated, and `explain` is told of its keys.
pub(super) fn config(
    file: &Path,
    explain: impl FnOnce(&RollFile) -> Result<(), Exit>,
) -> Result<RunConfig, Exit> {
    let wrong = |error: ConfigError| Exit::Config(error.to_string());
    let document = Document::read(file).map_err(wrong)?;
    let document = match RollFile::new(&document) {
        Some(roll) => {
            explain(&roll)?;
            roll.document
        }
        None => document,
    };
    let run = RunConfig::new(&document).map_err(wrong)?;
    for (i, reward) in run.rewards.iter().enumerate() {
        reward.check_files().map_err(|error| {
            Exit::Config(format!("{}: rewards[{i}]: {error:#}", file.display()))
        })?;
    }
    Ok(run)
}

/// The rows of a run, each of which has what the rewards need.
pub(super) fn dataset(run: &RunConfig) -> Result<Dataset, Exit> {
    let data = |error: anyhow::Error| Exit::Data(format!("{error:#}"));
    let dataset = run.data.load(run.seed()).map_err(data)?;
    for row in dataset.train.iter().chain(&dataset.held_out) {
        for reward in &run.rewards {
            reward
                .check_row(&row.columns)
                .map_err(|error| data(error.context(row.place())))?;
        }
    }
    Ok(dataset)
}

/// What the rows ask the model.
pub(super) fn prompts(
    run: &RunConfig,
    dataset: &Dataset,
    pretrained: &Pretrained,
) -> Result<RunPrompts, Exit> {
    RunPrompts::new(run, dataset, pretrained).map_err(|error| Exit::Data(format!("{error:#}")))
}

/// The rewards of a run.
pub(super) fn rewards(run: &RunConfig) -> Result<WeightedRewards, Exit> {
    RewardConfig::build(&run.rewards).map_err(|error| Exit::Config(format!("{error:#}")))
}

/// A model.
pub(super) fn model(config: &ModelConfig) -> Result<Pretrained, Exit> {
    load_model(config).map_err(|error| Exit::Model(format!("{error:#}")))
}

/// Lets everything compute with as many threads as the run says.
pub(super) fn set_threads(run: &RunConfig) -> Result<(), Exit> {
    let Some(threads) = run.threads else {
        return Ok(());
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
    pool.build_global()
        .map_err(|error| Exit::Config(format!("threads: {threads}: {error}")))
}

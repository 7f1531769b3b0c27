//! A supervised run.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_collective::Collective;
use candle_grpo_nn::{AdamWConfig, BaseWeights, WeightDivision};
use candle_grpo_train::hub::HubContent;
use candle_grpo_train::run::TrackerConfig;
use candle_grpo_train::sft::{SftConfig, SftDataConfig, SftDataset, SftSchedule};
use candle_grpo_train::{ComputeDType, Pretrained};
use schemars::JsonSchema;
use serde::ser::Error as _;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::bounds;
use super::document::Document;
use super::error::ConfigError;
use super::hub_files::{Configuration, HubFiles, Locate, Replacement};
use super::problem::{Problem, each, within};
use super::run::{
    DATA, TRACKERS, chat_template, check_outside, check_router, check_run_dir, data_error,
    laid_over, learning_rate_doubt, no_evaluations, own_place, required_model, tags, without,
};
use super::schema::{sft_sections, without_empty_sections};
use super::sections::{CheckpointConfig, ModelConfig};

/// The section that marks a supervised training file.
pub(super) const SFT: &str = "sft";

/// A supervised run: a configuration file of `grpo sft` with all defaults filled in, validated.
///
/// ```
/// use std::path::Path;
/// use candle_grpo::config::{Document, SftRunConfig};
///
/// let text = "
/// model: models/smol
/// data: {train: chats.jsonl, held_out_rows: 20}
/// sft: {batch_size: 16}
/// optimizer: {learning_rate: 1e-5}
/// epochs: 2
/// ";
/// let config = SftRunConfig::new(&Document::from_yaml(Path::new("sft.yaml"), text)?)?;
/// assert_eq!(config.sft.batch_size, 16);
/// // 100 rows twice.
/// assert_eq!(config.sft.length(100), (200, 13));
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SftRunConfig {
    /// The model to train.
    pub model: ModelConfig,
    /// The data.
    pub data: SftDataConfig,
    /// The settings of the trainer.
    pub sft: SftConfig,
    /// The schedule of evaluations.
    pub evaluation: SftEvaluationConfig,
    /// The schedule of checkpoints.
    pub checkpoint: CheckpointConfig,
    /// Programs that follow the metrics.
    pub trackers: Vec<TrackerConfig>,
    /// The folder of the run.
    pub run_dir: PathBuf,
    /// Threads to compute with; absent: one for each core.
    pub threads: Option<usize>,
    /// The file, for the lines in errors that only the run's files or model reveal.
    document: Document,
    /// The files that come from the hub.
    hub: HubFiles,
    /// The sections with hub names, once these are located.
    named: Option<(ModelConfig, SftDataConfig)>,
}

/// The schedule of evaluations: the loss of the held-out rows, its perplexity, and the share of
/// tokens that the model ranks first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct SftEvaluationConfig {
    /// Steps between evaluations; also before the first step and after the last. Absent: never.
    pub every_steps: Option<usize>,
    /// The largest number of held-out rows. Absent: all.
    pub max_rows: Option<usize>,
}

impl Default for SftEvaluationConfig {
    fn default() -> Self {
        Self {
            every_steps: Some(50),
            max_rows: None,
        }
    }
}

/// A file's sections.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Sections {
    /// Model to train: its path or hub name, or a section.
    model: Option<ModelConfig>,
    /// Data files, and how their rows become examples.
    data: SftDataConfig,
    /// Settings of the trainer.
    #[schemars(with = "Option<SftConfig>")]
    sft: Map<String, Value>,
    /// Optimizer; here the default learning rate is 2e-5.
    #[schemars(with = "AdamWConfig", extend("default" = SftConfig::default().optimizer))]
    optimizer: Map<String, Value>,
    /// Learning rate over the steps.
    schedule: SftSchedule,
    /// Schedule of evaluations.
    evaluation: SftEvaluationConfig,
    /// Schedule of checkpoints.
    checkpoint: CheckpointConfig,
    /// Programs that receive the metrics.
    trackers: Vec<TrackerConfig>,
    /// Number of passes over the rows; may be a fraction. Absent: 1.
    epochs: Option<f64>,
    /// Number of optimizer steps, in place of `epochs`.
    max_steps: Option<usize>,
    /// Run directory. Absent: `runs/` and the file name.
    run_dir: Option<PathBuf>,
    /// Seed for all random numbers: row order, held-out rows.
    seed: u64,
    /// Number of compute threads. Absent: one per core.
    threads: Option<usize>,
}

impl Default for Sections {
    fn default() -> Self {
        Self {
            model: None,
            data: SftDataConfig::default(),
            sft: Map::new(),
            optimizer: Map::new(),
            schedule: SftSchedule::default(),
            evaluation: SftEvaluationConfig::default(),
            checkpoint: CheckpointConfig {
                every_steps: Some(100),
                ..CheckpointConfig::default()
            },
            trackers: Vec::new(),
            epochs: None,
            max_steps: None,
            run_dir: None,
            seed: 0,
            threads: None,
        }
    }
}

/// Trainer settings that a file has elsewhere.
pub(super) const SFT_ELSEWHERE: [(&str, &str); 5] = [
    ("optimizer", "optimizer"),
    ("schedule", "schedule"),
    ("epochs", "epochs"),
    ("max_steps", "max_steps"),
    ("seed", "seed"),
];

impl SftRunConfig {
    /// Returns whether a document is for supervised training: it has the section `sft`.
    pub fn is_of(document: &Document) -> bool {
        document.get(SFT).is_some()
    }

    /// Reads a file with [`Document::read`].
    ///
    /// # Errors
    ///
    /// Returns an error as [`Self::new`] does, or if the file cannot be read.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::new(&Document::read(path)?)
    }

    /// Reads a document. Opens no file that it names.
    ///
    /// # Errors
    ///
    /// Returns an error with line and key if a key is unknown, a value is not valid, or keys
    /// contradict each other.
    pub fn new(document: &Document) -> Result<Self, ConfigError> {
        let document = document.with_sharding()?;
        document.locate(Self::build(&document))
    }

    fn build(document: &Document) -> Result<Self, Problem> {
        if !Self::is_of(document) {
            let message = "absent, must be given in a file of grpo sft; `sft: {}` has the defaults";
            return Err(Problem::at(SFT, message));
        }
        tags("", &document.value)?;
        let value = without_empty_sections(document.value.clone(), sft_sections());
        let sections: Sections = document.parse("", &value)?;
        if sections.epochs.is_some() && sections.max_steps.is_some() {
            let message = "given, must be absent with max_steps, which takes its place";
            return Err(Problem::at("epochs", message));
        }
        let defaults = SftConfig::default();
        let optimizer = Value::Object(sections.optimizer);
        let optimizer: AdamWConfig =
            laid_over(document, "optimizer", &defaults.optimizer, optimizer)?;
        own_place(SFT, &sections.sft, &SFT_ELSEWHERE)?;
        let defaults = SftConfig {
            optimizer,
            schedule: sections.schedule,
            epochs: sections.epochs.unwrap_or(defaults.epochs),
            max_steps: sections.max_steps,
            seed: sections.seed,
            ..defaults
        };
        let sft = laid_over(document, SFT, &defaults, Value::Object(sections.sft))?;
        let model = required_model(sections.model)?;
        let data = sections.data;
        let mut evaluation = sections.evaluation;
        if data.held_out.is_empty() && data.held_out_rows.is_none() {
            no_evaluations(document, &mut evaluation.every_steps)?;
        }
        let run = Self {
            model,
            data,
            sft,
            evaluation,
            checkpoint: sections.checkpoint,
            trackers: sections.trackers,
            run_dir: sections.run_dir.unwrap_or_else(|| document.run_dir()),
            threads: sections.threads,
            document: document.clone(),
            hub: HubFiles::default(),
            named: None,
        };
        run.validate()?;
        Ok(run)
    }

    /// Checks everything that can be checked before the run's files are opened.
    fn validate(&self) -> Result<(), Problem> {
        bounds::check_sft(self)?;
        self.sft
            .validate()
            .map_err(|error| Problem::from_section(SFT, &SFT_ELSEWHERE, &error))?;
        within(DATA, self.data.validate())?;
        each(TRACKERS, &self.trackers, TrackerConfig::validate)?;
        check_run_dir(&self.run_dir)?;
        let data = &self.data;
        let template = self.model.chat_template.iter();
        let inputs = std::iter::once(("model", &self.model.path))
            .chain(template.map(|path| ("model.chat_template", path)))
            .chain(data.train.iter().map(|path| ("data.train", path)))
            .chain(data.held_out.iter().map(|path| ("data.held_out", path)));
        for (key, path) in inputs {
            check_outside(key, path, &self.run_dir)?;
        }
        Ok(())
    }

    /// Returns settings that are valid, but whose effect may not be meant: a message for each.
    pub fn doubts(&self) -> Vec<String> {
        learning_rate_doubt(&self.sft.optimizer)
            .into_iter()
            .collect()
    }

    /// Reads the rows, and checks them against the settings and the model's shape.
    ///
    /// # Errors
    ///
    /// Returns a [`ConfigError`] if a key does not fit the rows or the model. Returns an error with
    /// file and line if a row cannot be read or encoded.
    pub fn load_data(&self, model: &Pretrained) -> Result<SftDataset> {
        let sft = &self.sft;
        if let Some(adapters) = &sft.adapters {
            let checked = bounds::check_adapters(SFT, adapters, &model.model);
            self.document.locate(checked)?;
        }
        let checked = check_router(SFT, sft.router_aux_loss_coef, &model.model);
        self.document.locate(checked)?;
        let variables = &self.data.chat_template_kwargs;
        let template = chat_template(&self.document, DATA, variables, model)?;
        let dataset = self.data.load(model, template.as_ref(), sft.seed);
        let dataset = dataset.map_err(|error| data_error(&self.document, DATA, error))?;
        let (_, steps) = sft.length(dataset.train.examples.len());
        let schedule = within("schedule", sft.schedule.of_steps(steps));
        self.document.locate(schedule)?;
        Ok(dataset)
    }

    /// Returns the effective configuration as YAML that reads as the same configuration.
    pub fn to_yaml(&self) -> Result<String, serde_json::Error> {
        let value = self.to_value()?;
        serde_saphyr::to_string(&value).map_err(serde_json::Error::custom)
    }

    /// Returns the effective configuration with a file's sections.
    pub fn to_value(&self) -> Result<Value, serde_json::Error> {
        let (model, data) = match &self.named {
            Some((model, data)) => (model, data),
            None => (&self.model, &self.data),
        };
        let sft = without(serde_json::to_value(&self.sft)?, &SFT_ELSEWHERE);
        let epochs = match self.sft.max_steps {
            None => Some(self.sft.epochs),
            Some(_) => None,
        };
        Ok(json!({
            "model": model,
            "data": data,
            "sft": sft,
            "optimizer": serde_json::to_value(&self.sft.optimizer)?,
            "schedule": serde_json::to_value(self.sft.schedule)?,
            "evaluation": serde_json::to_value(&self.evaluation)?,
            "checkpoint": serde_json::to_value(&self.checkpoint)?,
            "trackers": self.trackers,
            "epochs": epochs,
            "max_steps": self.sft.max_steps,
            "run_dir": self.run_dir,
            "seed": self.sft.seed,
            "threads": self.threads,
        }))
    }
}

impl Configuration for SftRunConfig {
    fn replace_hub_names(
        &mut self,
        model: HubContent,
        commits: &BTreeMap<String, String>,
        locate: Locate<'_>,
    ) -> Result<()> {
        let named = (self.model.clone(), self.data.clone());
        let mut replacement = Replacement::new(&self.document, commits, locate);
        let data = &mut self.data;
        let data = [
            ("data.train", &mut data.train),
            ("data.held_out", &mut data.held_out),
        ];
        replacement.replace_model_and_data((&mut self.model.path, model), data)?;
        self.hub = replacement.hub;
        self.named = Some(named);
        Ok(())
    }

    fn check_files(&self) -> Result<(), ConfigError> {
        let checked = each(TRACKERS, &self.trackers, TrackerConfig::check_files);
        self.document.locate(checked)
    }

    fn hub_files(&self) -> &HubFiles {
        &self.hub
    }

    fn model(&self) -> &ModelConfig {
        &self.model
    }

    fn model_mut(&mut self) -> &mut ModelConfig {
        &mut self.model
    }

    fn stored_form(&self) -> (BaseWeights, ComputeDType) {
        self.sft.stored_form()
    }

    fn division(&self, collective: &Arc<dyn Collective>) -> Option<WeightDivision> {
        self.sft.division(collective)
    }

    fn run_dir(&self) -> &Path {
        &self.run_dir
    }

    fn threads(&self) -> Option<usize> {
        self.threads
    }
}

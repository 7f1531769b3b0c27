//! A whole run.

use std::path::{Path, PathBuf};

use candle_grpo_core::NormLevel;
use candle_grpo_train::{
    DatasetConfig, LearningRateSchedule, RewardConfig, SamplingConfig, TrainConfig,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::algorithm::AlgorithmConfig;
use super::document::Document;
use super::error::ConfigError;
use super::merge::merge;
use super::sections::{CheckpointConfig, EvaluationConfig, EvaluationKeys, ModelConfig};

/// A whole run: what a configuration file says, with all defaults filled in, checked.
///
/// ```
/// use std::path::Path;
/// use candle_grpo::config::{Document, RunConfig};
///
/// let text = "
/// model: models/smol
/// data: {train: additions.jsonl, prompt: 'What is {a} + {b}?', held_out_rows: 48}
/// rewards: [{kind: numeric, column: sum}]
/// algorithm: {preset: dapo, rollout_batch_size: 8, response_length: 64}
/// optimizer: {learning_rate: 1e-5}
/// ";
/// let config = RunConfig::new(&Document::from_yaml(Path::new("run.yaml"), text)?)?;
/// assert_eq!(config.train.prompts_per_step, 8);
/// assert_eq!(config.train.recipe.overlong.unwrap().max_length, 64);
///
/// let wrong = text.replace("rollout_batch_size", "rolout_batch_size");
/// let error = RunConfig::new(&Document::from_yaml(Path::new("run.yaml"), &wrong)?).unwrap_err();
/// assert!(error.to_string().starts_with("run.yaml:5: algorithm"));
/// assert!(error.to_string().ends_with("did you mean `rollout_batch_size`?"));
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RunConfig {
    /// Which model is trained.
    pub model: ModelConfig,
    /// On which prompts.
    pub data: DatasetConfig,
    /// Prompts with more tokens than this are left out.
    pub max_prompt_tokens: usize,
    /// By which rewards.
    pub rewards: Vec<RewardConfig>,
    /// The settings of the trainer. The seed of its sampler is that of the run.
    pub train: TrainConfig,
    /// How many steps.
    pub max_steps: usize,
    /// When and how the policy is evaluated.
    pub evaluation: EvaluationConfig,
    /// When checkpoints are written.
    pub checkpoint: CheckpointConfig,
    /// The folder of the run.
    pub run_dir: PathBuf,
    /// Threads to compute with; absent: one for each core.
    pub threads: Option<usize>,
    /// The keys of the evaluation section, as they were given.
    evaluation_keys: EvaluationKeys,
}

/// The sections of a file.
#[derive(Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Sections {
    model: Option<ModelConfig>,
    data: DatasetConfig,
    rewards: Vec<RewardConfig>,
    algorithm: AlgorithmConfig,
    sampler: Map<String, Value>,
    optimizer: Map<String, Value>,
    schedule: LearningRateSchedule,
    training: Map<String, Value>,
    evaluation: EvaluationKeys,
    checkpoint: CheckpointConfig,
    max_steps: usize,
    run_dir: Option<PathBuf>,
    seed: u64,
    threads: Option<usize>,
}

impl Default for Sections {
    fn default() -> Self {
        Self {
            model: None,
            data: DatasetConfig::default(),
            rewards: Vec::new(),
            algorithm: AlgorithmConfig::default(),
            sampler: Map::new(),
            optimizer: Map::new(),
            schedule: LearningRateSchedule::default(),
            training: Map::new(),
            evaluation: EvaluationKeys::default(),
            checkpoint: CheckpointConfig::default(),
            max_steps: 100,
            run_dir: None,
            seed: 0,
            threads: None,
        }
    }
}

const PROMPT_LENGTH: usize = 1024;

/// Where the settings of the trainer have a place of their own.
const ELSEWHERE: [(&str, &str); 7] = [
    ("prompts_per_step", "algorithm.rollout_batch_size"),
    ("num_generations", "algorithm.num_return_sequences_in_group"),
    ("epochs", "algorithm.ppo_epochs"),
    ("recipe", "algorithm.recipe"),
    ("sampling", "sampler"),
    ("optimizer", "optimizer"),
    ("schedule", "schedule"),
];

/// Where settings of the sampler have a place of their own.
const SAMPLER_ELSEWHERE: [(&str, &str); 3] = [
    ("seed", "seed"),
    ("max_new_tokens", "algorithm.response_length"),
    ("greedy", "evaluation.sampler.greedy"),
];

impl RunConfig {
    /// Reads a file: TOML where its name ends in `.toml`, YAML otherwise.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::new(&Document::read(path)?)
    }

    /// What a document says. Opens no file that it names.
    pub fn new(document: &Document) -> Result<Self, ConfigError> {
        let sections: Sections = document.parse("", document.value.clone())?;
        let mut train = TrainConfig::default();
        sections
            .algorithm
            .apply(&mut train)
            .map_err(|error| document.error(&format!("algorithm.{}", error.key), error.message))?;
        if let Some(recipe) = sections.algorithm.recipe.clone() {
            train.recipe = laid_over(document, "algorithm.recipe", &train.recipe, recipe)?;
        }
        own_place(document, "sampler", &sections.sampler, &SAMPLER_ELSEWHERE)?;
        let sampler = Value::Object(sections.sampler);
        train.sampling = laid_over(document, "sampler", &train.sampling, sampler)?;
        train.sampling.seed = sections.seed;
        let optimizer = Value::Object(sections.optimizer);
        train.optimizer = laid_over(document, "optimizer", &train.optimizer, optimizer)?;
        train.schedule = sections.schedule;
        own_place(document, "training", &sections.training, &ELSEWHERE)?;
        let training = Value::Object(sections.training);
        let train: TrainConfig = laid_over(document, "training", &train, training)?;
        validate_train(document, &train)?;

        let Some(model) = sections.model else {
            return Err(document.error("model", "absent, must be the path of a model"));
        };
        let data = sections.data;
        data.validate()
            .map_err(|error| document.error("data", format!("{error:#}")))?;
        validate_rewards(document, &sections.rewards)?;
        let mut evaluation_keys = sections.evaluation;
        if data.held_out.is_empty() && data.held_out_rows.is_none() {
            let key = "evaluation.every_steps";
            if document.get(key).is_some_and(|steps| !steps.is_null()) {
                return Err(document.error(
                    key,
                    "given, but nothing is held out: give data.held_out or data.held_out_rows",
                ));
            }
            evaluation_keys.every_steps = None;
        }
        let evaluation = evaluation(document, &evaluation_keys, &train.sampling)?;
        for (key, value) in [
            ("max_steps", Some(sections.max_steps)),
            ("threads", sections.threads),
            ("checkpoint.every_steps", sections.checkpoint.every_steps),
            ("checkpoint.keep", Some(sections.checkpoint.keep)),
            ("algorithm.prompt_length", sections.algorithm.prompt_length),
        ] {
            if value == Some(0) {
                return Err(document.error(key, "0, must be at least 1"));
            }
        }
        Ok(Self {
            model,
            data,
            max_prompt_tokens: sections.algorithm.prompt_length.unwrap_or(PROMPT_LENGTH),
            rewards: sections.rewards,
            train,
            max_steps: sections.max_steps,
            evaluation,
            checkpoint: sections.checkpoint,
            run_dir: sections.run_dir.unwrap_or_else(|| document.run_dir()),
            threads: sections.threads,
            evaluation_keys,
        })
    }

    /// The seed of the run.
    pub fn seed(&self) -> u64 {
        self.train.sampling.seed
    }

    /// The effective configuration, as a file that says the same.
    pub fn to_yaml(&self) -> Result<String, serde_json::Error> {
        let value = self.to_value()?;
        serde_saphyr::to_string(&value).map_err(serde::ser::Error::custom)
    }

    /// The effective configuration, with the sections of a file.
    pub fn to_value(&self) -> Result<Value, serde_json::Error> {
        let without = |value: Value, elsewhere: &[(&str, &str)]| match value {
            Value::Object(mut map) => {
                elsewhere.iter().for_each(|(key, _)| drop(map.remove(*key)));
                Value::Object(map)
            }
            value => value,
        };
        let train = &self.train;
        Ok(json!({
            "model": self.model,
            "data": self.data,
            "rewards": self.rewards,
            "algorithm": {
                "rollout_batch_size": train.prompts_per_step,
                "num_return_sequences_in_group": train.num_generations,
                "prompt_length": self.max_prompt_tokens,
                "response_length": train.sampling.max_new_tokens,
                "ppo_epochs": train.epochs,
                "recipe": serde_json::to_value(&train.recipe)?,
            },
            "sampler": without(serde_json::to_value(&train.sampling)?, &SAMPLER_ELSEWHERE),
            "optimizer": serde_json::to_value(&train.optimizer)?,
            "schedule": serde_json::to_value(train.schedule)?,
            "training": without(serde_json::to_value(train)?, &ELSEWHERE),
            "evaluation": serde_json::to_value(&self.evaluation_keys)?,
            "checkpoint": serde_json::to_value(&self.checkpoint)?,
            "max_steps": self.max_steps,
            "run_dir": self.run_dir,
            "seed": self.seed(),
            "threads": self.threads,
        }))
    }
}

/// `defaults` with what a file says at `path` laid over them.
fn laid_over<T: Serialize + DeserializeOwned>(
    document: &Document,
    path: &str,
    defaults: &T,
    patch: Value,
) -> Result<T, ConfigError> {
    let defaults = serde_json::to_value(defaults).map_err(|error| document.error(path, error))?;
    document.parse(path, merge(defaults, patch))
}

fn own_place(
    document: &Document,
    section: &str,
    keys: &Map<String, Value>,
    elsewhere: &[(&str, &str)],
) -> Result<(), ConfigError> {
    for (key, place) in elsewhere {
        if keys.contains_key(*key) {
            let path = format!("{section}.{key}");
            return Err(document.error(&path, format!("is not set here, but with {place}")));
        }
    }
    Ok(())
}

/// What the trainer says about its settings, by the key of the file.
fn validate_train(document: &Document, train: &TrainConfig) -> Result<(), ConfigError> {
    let group_deviation = train.recipe.reward_shaping.norm.std == NormLevel::Group;
    if group_deviation && train.num_generations == 1 {
        return Err(document.error(
            "algorithm.num_return_sequences_in_group",
            "1, must be at least 2 where rewards are divided by the deviation of their group",
        ));
    }
    let error = match train.validate() {
        Ok(()) => return Ok(()),
        Err(error) => format!("{error:#}"),
    };
    let end = error.find([':', '.', ' ']).unwrap_or(error.len());
    let (key, rest) = error.split_at(end);
    let elsewhere = ELSEWHERE.iter().find(|(name, _)| *name == key);
    let path = match (key, elsewhere) {
        ("max_new_tokens", _) => "algorithm.response_length".to_owned(),
        ("temperature", _) => "sampler.temperature".to_owned(),
        (_, Some((_, place))) => (*place).to_owned(),
        (key, None) => format!("training.{key}"),
    };
    let message = rest.strip_prefix(": ").unwrap_or(&error);
    Err(document.error(&path, message))
}

fn validate_rewards(document: &Document, rewards: &[RewardConfig]) -> Result<(), ConfigError> {
    if rewards.is_empty() {
        return Err(document.error("rewards", "none, there must be at least one"));
    }
    for (i, reward) in rewards.iter().enumerate() {
        if let Err(error) = reward.validate() {
            return Err(document.error(&format!("rewards[{i}]"), format!("{error:#}")));
        }
    }
    Ok(())
}

fn evaluation(
    document: &Document,
    keys: &EvaluationKeys,
    sampling: &SamplingConfig,
) -> Result<EvaluationConfig, ConfigError> {
    let wrong =
        |key: &str, message: String| Err(document.error(&format!("evaluation.{key}"), message));
    for (key, value) in [
        ("every_steps", keys.every_steps),
        ("samples_per_prompt", Some(keys.samples_per_prompt)),
        ("max_prompts", keys.max_prompts),
    ] {
        if value == Some(0) {
            return wrong(key, "0, must be at least 1".to_owned());
        }
    }
    let samples = keys.samples_per_prompt;
    if let Some(k) = keys.pass_at.iter().find(|&&k| k == 0 || k > samples) {
        return wrong(
            "pass_at",
            format!("{k}, must be from 1 to samples_per_prompt, {samples}"),
        );
    }
    if !keys.pass_reward.is_finite() {
        return wrong(
            "pass_reward",
            format!("{}, must be finite", keys.pass_reward),
        );
    }
    let path = "evaluation.sampler";
    own_place(document, path, &keys.sampler, &SAMPLER_ELSEWHERE[..1])?;
    let sampler: SamplingConfig = laid_over(
        document,
        path,
        sampling,
        Value::Object(keys.sampler.clone()),
    )?;
    sampler
        .validate()
        .map_err(|error| document.error(path, format!("{error:#}")))?;
    Ok(EvaluationConfig {
        every_steps: keys.every_steps,
        samples_per_prompt: samples,
        pass_at: keys.pass_at.clone(),
        pass_reward: keys.pass_reward,
        max_prompts: keys.max_prompts,
        sampler,
    })
}

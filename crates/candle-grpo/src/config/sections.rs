//! The smaller sections of a configuration.

use std::path::PathBuf;

use candle_grpo_train::SamplingConfig;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// Which model is trained.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ModelConfig {
    /// A folder with `config.json`, `tokenizer.json` and safetensors, a GGUF file, or the folder of a run: its best checkpoint.
    pub path: PathBuf,
    /// A file with the chat template; absent: the one that comes with the model.
    pub chat_template: Option<PathBuf>,
}

impl EvaluationConfig {
    /// Those of `prompts` that are asked.
    pub fn of<'a, T>(&self, prompts: &'a [T]) -> &'a [T] {
        &prompts[..self.max_prompts.unwrap_or(usize::MAX).min(prompts.len())]
    }
}

/// `model: PATH`, or a mapping.
impl<'de> Deserialize<'de> for ModelConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Keys {
            path: PathBuf,
            #[serde(default)]
            chat_template: Option<PathBuf>,
        }
        let value = Value::deserialize(deserializer)?;
        let value = match value {
            Value::String(path) => {
                Value::Object(Map::from_iter([("path".to_owned(), path.into())]))
            }
            value => value,
        };
        let keys = Keys::deserialize(value).map_err(serde::de::Error::custom)?;
        Ok(Self {
            path: keys.path,
            chat_template: keys.chat_template,
        })
    }
}

/// When and how the policy is evaluated on held-out prompts.
#[derive(Debug, Clone, PartialEq)]
pub struct EvaluationConfig {
    /// Before the first step, after each multiple of this many, and after the last; absent: never.
    pub every_steps: Option<usize>,
    /// Completions of each prompt.
    pub samples_per_prompt: usize,
    /// The numbers k of the pass@k that is reported, at most `samples_per_prompt`.
    pub pass_at: Vec<usize>,
    /// A completion passes with a reward of at least this.
    pub pass_reward: f64,
    /// At most this many held-out prompts.
    pub max_prompts: Option<usize>,
    /// How completions are drawn.
    pub sampler: SamplingConfig,
}

/// The keys of the evaluation section; those of `sampler` are laid over the sampler section.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct EvaluationKeys {
    pub(super) every_steps: Option<usize>,
    pub(super) samples_per_prompt: usize,
    pub(super) pass_at: Vec<usize>,
    pub(super) pass_reward: f64,
    pub(super) max_prompts: Option<usize>,
    pub(super) sampler: Map<String, Value>,
}

impl Default for EvaluationKeys {
    fn default() -> Self {
        Self {
            every_steps: Some(10),
            samples_per_prompt: 1,
            pass_at: vec![1],
            pass_reward: 1.,
            max_prompts: None,
            sampler: Map::new(),
        }
    }
}

/// When checkpoints are written and which are kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// After each multiple of this many steps; absent: at the end only.
    pub every_steps: Option<usize>,
    /// How many of the latest are kept.
    pub keep: usize,
    /// Whether the one whose evaluation had the greatest mean reward is kept as well.
    pub keep_best: bool,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            every_steps: Some(10),
            keep: 2,
            keep_best: true,
        }
    }
}

//! The smaller sections of a configuration.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use candle_grpo_train::learn::SelfTeacherConfig;
use candle_grpo_train::rollout::RolloutConfig;
use candle_grpo_train::{ComputeDType, SamplingConfig};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// The model to train.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ModelConfig {
    /// The path or hub name.
    pub path: PathBuf,
    /// A chat template file. Absent: the model's own template.
    pub chat_template: Option<PathBuf>,
    /// The local time for the chat template to print, such as `2025-03-05T14:07:09`; absent: the
    /// current time. Not a key: a resumed run keeps the time of its first start.
    #[serde(skip)]
    pub clock: Option<String>,
}

/// The keys of [`ModelConfig`] as a mapping.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ModelKeys {
    /// A directory with `config.json`, `tokenizer.json` and safetensors, a GGUF file, a run
    /// directory (its best checkpoint), or a [hub](guide.md#the-hugging-face-hub) model, such
    /// as `ORG/NAME@REVISION`.
    path: PathBuf,
    /// A chat template file. Absent: the model's own template.
    #[serde(default)]
    chat_template: Option<PathBuf>,
}

impl JsonSchema for ModelConfig {
    fn schema_name() -> Cow<'static, str> {
        "ModelConfig".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let path = generator.subschema_for::<PathBuf>();
        let keys = generator.subschema_for::<ModelKeys>();
        json_schema!({"description": "A path or hub name, or keys.", "anyOf": [path, keys]})
    }
}

/// Reads `model: PATH` or a mapping.
impl<'de> Deserialize<'de> for ModelConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PathOrKeys;

        impl<'de> Visitor<'de> for PathOrKeys {
            type Value = ModelConfig;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the path or the name of a model, or a mapping of keys")
            }

            fn visit_str<E>(self, path: &str) -> Result<ModelConfig, E> {
                Ok(ModelConfig {
                    path: path.into(),
                    ..ModelConfig::default()
                })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ModelConfig, A::Error> {
                let keys = ModelKeys::deserialize(MapAccessDeserializer::new(map))?;
                Ok(ModelConfig {
                    path: keys.path,
                    chat_template: keys.chat_template,
                    clock: None,
                })
            }
        }
        deserializer.deserialize_any(PathOrKeys)
    }
}

/// The model that the policy learns from: one of `model`, `server` and `self`, or several `models`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TeacherConfig {
    /// A model's path or name, as in [`model.path`](#model), with the policy's vocabulary. It does
    /// not train.
    pub model: Option<PathBuf>,
    /// Servers with the teacher, which has the tokens of the policy. The keys are those of
    /// [rollout](#rollout): `engine` (`vllm` or `sglang`, and `openai` for samples alone),
    /// `base_url`, `served_model_name`, `api_key_env`, `request_timeout`, `server_timeout`,
    /// `max_retries` and `max_inflight`. Servers name log-probs at temperature 1, so
    /// `sampling.temperature` must be 1 for terms of the sampled tokens.
    pub server: Option<RolloutConfig>,
    /// The policy itself, which reads more in its prompt, such as a solution, and scores the same
    /// completions.
    #[serde(rename = "self")]
    pub own: Option<SelfTeacherConfig>,
    /// Column whose value is the name of the row's teacher in `models`.
    pub by: Option<String>,
    /// Teachers by name, each with one of the keys `model`, `server` and `self`, of which one may
    /// have `self`. A row without a teacher learns from its rewards only.
    pub models: BTreeMap<String, Self>,
}

impl TeacherConfig {
    /// Returns the teachers with the paths of their keys, and their names if there are several.
    pub(crate) fn each(&self) -> Vec<(String, &str, &Self)> {
        if self.models.is_empty() {
            return vec![(TEACHER.to_owned(), "", self)];
        }
        let models = self.models.iter();
        let models = models.map(|(name, own)| (named(name), name.as_str(), own));
        models.collect()
    }

    /// Returns the models of all teachers by key, to replace them.
    pub(super) fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        let own = self.model.iter_mut();
        let own = own.map(|path| (format!("{TEACHER}.model"), path));
        let named = self.models.iter_mut().filter_map(|(name, teacher)| {
            let key = format!("{}.model", self::named(name));
            Some((key, teacher.model.as_mut()?))
        });
        own.chain(named).collect()
    }
}

pub(super) const TEACHER: &str = "teacher";

/// The path of one of several teachers.
fn named(name: &str) -> String {
    format!("{TEACHER}.models.{name}")
}

/// The schedule and sampler for evaluations on held-out prompts.
#[derive(Debug, Clone, PartialEq)]
pub struct EvaluationConfig {
    /// Steps between evaluations; `None`: never.
    pub every_steps: Option<usize>,
    /// Completions per prompt.
    pub samples_per_prompt: usize,
    /// The values k for pass@k.
    pub pass_at: Vec<usize>,
    /// The smallest reward that counts as a pass.
    pub pass_reward: f64,
    /// The largest number of held-out prompts; `None`: all.
    pub max_prompts: Option<usize>,
    /// The sampler, with the settings of the run where the file has no other.
    pub sampler: SamplingConfig,
}

impl EvaluationConfig {
    /// Returns the prompts that are evaluated: the first `max_prompts`.
    pub fn select<'a, T>(&self, prompts: &'a [T]) -> &'a [T] {
        &prompts[..self.max_prompts.unwrap_or(usize::MAX).min(prompts.len())]
    }
}

/// The evaluation keys as the file has them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct EvaluationKeys {
    /// Steps between evaluations; also before the first step and after the last. Absent: never.
    pub(super) every_steps: Option<usize>,
    /// Completions per prompt.
    pub(super) samples_per_prompt: usize,
    /// The values k to report pass@k for, each at most `samples_per_prompt`.
    pub(super) pass_at: Vec<usize>,
    /// The smallest reward that counts as a pass.
    pub(super) pass_reward: f64,
    /// The largest number of held-out prompts. Absent: all.
    pub(super) max_prompts: Option<usize>,
    /// The sampler; its keys are laid over the section `sampling`. `greedy: true` takes the most
    /// likely token each time.
    #[schemars(with = "Option<SamplingConfig>")]
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

/// The checkpoint schedule, and which checkpoints are kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Steps between checkpoints; also after the last step. Absent: after the last step only.
    pub every_steps: Option<usize>,
    /// The number of latest checkpoints to keep.
    pub keep: usize,
    /// Also keeps the checkpoint whose evaluation had the highest mean reward; in supervised
    /// training, the lowest loss.
    pub keep_best: bool,
    /// The model's dtype in a checkpoint, with merged adapters. If all weights train, a dtype
    /// other than f32 adds a file, because a run resumes from f32 weights.
    pub dtype: ComputeDType,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            every_steps: Some(10),
            keep: 2,
            keep_best: true,
            dtype: ComputeDType::F32,
        }
    }
}

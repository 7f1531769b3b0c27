//! A whole run.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use candle_grpo_core::selection::GroupSummary;
use candle_grpo_loss::{Support, Tail};
use candle_grpo_nn::{AdamWConfig, DecoderConfig};
use candle_grpo_train::environment::EnvironmentConfig;
use candle_grpo_train::learn::{SelfTeacherConfig, TeacherSamplesConfig};
use candle_grpo_train::run::{AlarmConfig, RolloutLogConfig, TrackerConfig};
use candle_grpo_train::sft::{SftDataConfig, SftDataset};
use candle_grpo_train::{
    ChatTemplate, Dataset, DatasetConfig, Pretrained, Prompt, RewardConfig, SamplingConfig,
    TrainConfig, find_invalid,
};
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::bounds;
use super::document::{Document, join};
use super::error::ConfigError;
use super::hub_files::HubFiles;
use super::merge::merge;
use super::preset::{Algorithm, Preset};
use super::problem::{Problem, each, within};
use super::schema::{run_sections, without_empty_sections};
use super::sections::{
    CheckpointConfig, EvaluationConfig, EvaluationKeys, ModelConfig, TEACHER, TeacherConfig,
};
use super::sft::{SFT, SftRunConfig};
use super::suggestions::unknown_key;
use super::tree::QUOTE_HINT;

/// A whole run: a configuration file with all defaults filled in, validated.
///
/// ```
/// use std::path::Path;
/// use candle_grpo::config::{Document, RunConfig};
///
/// let text = "
/// model: models/smol
/// data: {train: additions.jsonl, prompt: 'What is {a} + {b}?', held_out_rows: 48}
/// rewards: [{kind: numeric, column: sum}]
/// preset: dapo
/// prompts_per_step: 8
/// sampling: {max_new_tokens: 64}
/// optimizer: {learning_rate: 1e-5}
/// ";
/// let config = RunConfig::new(&Document::from_yaml(Path::new("run.yaml"), text)?)?;
/// assert_eq!(config.train.prompts_per_step, 8);
/// assert_eq!(config.train.recipe.overlong.unwrap().max_length, 64);
///
/// let wrong = text.replace("prompts_per_step", "promts_per_step");
/// let error = RunConfig::new(&Document::from_yaml(Path::new("run.yaml"), &wrong)?).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "run.yaml:6: promts_per_step: unknown key, did you mean `prompts_per_step`?"
/// );
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RunConfig {
    /// The model to train.
    pub model: ModelConfig,
    /// The model that the policy learns from, for the terms of the recipe that need one.
    pub teacher: Option<TeacherConfig>,
    /// The data.
    pub data: DatasetConfig,
    /// The rows of the demonstrations, for `demonstrations`.
    pub demonstration_data: Option<SftDataConfig>,
    /// The published algorithm that the recipe starts from, if the file names one.
    pub preset: Option<Preset>,
    /// The longest prompt in tokens; longer ones are left out.
    pub max_prompt_tokens: usize,
    /// The terms of the reward.
    pub rewards: Vec<RewardConfig>,
    /// The environment that answers the turns of the policy. Absent: a completion is one turn.
    pub environment: Option<EnvironmentConfig>,
    /// The settings of the trainer. The seed of its sampler is that of the run.
    pub train: TrainConfig,
    /// The number of steps.
    pub max_steps: usize,
    /// The schedule and the sampler of evaluations.
    pub evaluation: EvaluationConfig,
    /// The schedule of checkpoints.
    pub checkpoint: CheckpointConfig,
    /// The completions of training that are written.
    pub rollout_log: RolloutLogConfig,
    /// The signs of trouble that the run warns of.
    pub alarms: AlarmConfig,
    /// Programs that follow the metrics.
    pub trackers: Vec<TrackerConfig>,
    /// The folder of the run.
    pub run_dir: PathBuf,
    /// Threads to compute with; absent: one for each core.
    pub threads: Option<usize>,
    /// Memory that the run may take, in MiB; absent: 95% of the free memory.
    pub max_memory_mib: Option<usize>,
    /// The evaluation keys as the file has them.
    evaluation_keys: EvaluationKeys,
    /// The file, for the lines in errors that only the run's files or model reveal.
    pub(super) document: Document,
    /// The files that come from the hub.
    pub(super) hub: HubFiles,
    /// The keys with names of the hub as the file has them, once these are located.
    pub(super) named: Map<String, Value>,
}

/// The keys of a file, without those of [`TrainConfig`].
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct RunKeys {
    /// Model to train: its path or hub name, or a section.
    model: Option<ModelConfig>,
    /// Model that the policy learns from. Absent: none.
    teacher: Option<TeacherConfig>,
    /// Data files, and how their rows become prompts.
    data: DatasetConfig,
    /// Rows of the demonstrations. Absent: none.
    demonstration_data: Option<SftDataConfig>,
    /// Reward terms; their weighted sum is the reward.
    rewards: Vec<RewardConfig>,
    /// Environment that answers the policy's turns. Absent: a completion is one turn.
    environment: Option<EnvironmentConfig>,
    /// The [published algorithm](#presets) that `recipe` starts from. Absent: GRPO.
    preset: Option<Preset>,
    /// Maximum prompt length in tokens; longer prompts are left out.
    max_prompt_tokens: usize,
    /// Schedule and sampler for evaluations.
    evaluation: EvaluationKeys,
    /// Schedule of checkpoints.
    checkpoint: CheckpointConfig,
    /// Log of training completions.
    rollout_log: RolloutLogConfig,
    /// Warnings that something is wrong.
    alarms: AlarmConfig,
    /// Programs that receive the metrics.
    trackers: Vec<TrackerConfig>,
    /// Number of steps.
    max_steps: usize,
    /// Run directory. Absent: `runs/` and the file name.
    run_dir: Option<PathBuf>,
    /// Seed for all random numbers: prompt order, held-out rows, completions.
    seed: u64,
    /// Number of compute threads. Absent: one per core.
    threads: Option<usize>,
    /// Memory to which `micro_batch_tokens: auto` and the advice of `grpo check` fit the run, in
    /// MiB: that of the GPU, or main memory without one. Absent: 95% of the free memory,
    /// which on the CPU is divided by the number of ranks.
    max_memory_mib: Option<usize>,
}

impl Default for RunKeys {
    fn default() -> Self {
        Self {
            model: None,
            teacher: None,
            data: DatasetConfig::default(),
            demonstration_data: None,
            rewards: Vec::new(),
            environment: None,
            preset: None,
            max_prompt_tokens: 1024,
            evaluation: EvaluationKeys::default(),
            checkpoint: CheckpointConfig::default(),
            rollout_log: RolloutLogConfig::default(),
            alarms: AlarmConfig::default(),
            trackers: Vec::new(),
            max_steps: 100,
            run_dir: None,
            seed: 0,
            threads: None,
            max_memory_mib: None,
        }
    }
}

/// The setting of a sampler that a file has in another place.
pub(super) const SAMPLER_ELSEWHERE: [(&str, &str); 1] = [("seed", "seed")];

impl RunConfig {
    /// Reads a file with [`Document::read`].
    ///
    /// # Errors
    ///
    /// Returns an error as [`Self::new`] does, or if the file cannot be read.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        Self::new(&Document::read(path)?)
    }

    /// Reads a document. Opens no file that it names: see [`Self::check_files`] and
    /// [`Self::check_model`].
    ///
    /// # Errors
    ///
    /// Returns an error with line and key if a key is unknown, a value is not valid, or keys
    /// contradict each other.
    pub fn new(document: &Document) -> Result<Self, ConfigError> {
        let document = document.native()?;
        document.locate(Self::build(&document))
    }

    fn build(document: &Document) -> Result<Self, Problem> {
        if SftRunConfig::is_of(document) {
            let message = "given: the file is one of grpo sft, not of reinforcement learning";
            return Err(Problem::at(SFT, message));
        }
        tags("", &document.value)?;
        let (keys, settings) = split(document)?;
        let keys: RunKeys = document.parse("", &keys)?;
        let mut train = TrainConfig::default();
        if let Some(preset) = keys.preset {
            let length = document.get(MAX_NEW_TOKENS).and_then(Value::as_u64);
            let default = train.sampling.max_new_tokens;
            train.recipe = preset.recipe(length.map_or(default, |length| length as usize));
        }
        if let Some(Value::Object(sampling)) = settings.get("sampling") {
            own_place("sampling", sampling, &SAMPLER_ELSEWHERE)?;
        }
        let mut train = laid_over(document, "", &train, settings)?;
        train.sampling.seed = keys.seed;

        let mut evaluation_keys = keys.evaluation;
        if keys.data.held_out.is_empty() && keys.data.held_out_rows.is_none() {
            no_evaluations(document, &mut evaluation_keys.every_steps)?;
        }
        let run = Self {
            model: required_model(keys.model)?,
            teacher: keys.teacher,
            data: keys.data,
            demonstration_data: keys.demonstration_data,
            preset: keys.preset,
            max_prompt_tokens: keys.max_prompt_tokens,
            rewards: keys.rewards,
            environment: keys.environment,
            evaluation: evaluation(document, &evaluation_keys, &train.sampling)?,
            train,
            max_steps: keys.max_steps,
            checkpoint: keys.checkpoint,
            rollout_log: keys.rollout_log,
            alarms: keys.alarms,
            trackers: keys.trackers,
            run_dir: keys.run_dir.unwrap_or_else(|| document.run_dir()),
            threads: keys.threads,
            max_memory_mib: keys.max_memory_mib,
            evaluation_keys,
            document: document.clone(),
            hub: HubFiles::default(),
            named: Map::new(),
        };
        run.validate()?;
        Ok(run)
    }

    /// Checks everything that can be checked before the run's files are opened.
    fn validate(&self) -> Result<(), Problem> {
        bounds::check(self)?;
        within("", self.train.validate())?;
        let sampler = &self.evaluation.sampler;
        within("evaluation.sampler", sampler.validate())?;
        let engine = self.train.rollout.engine;
        within("evaluation.sampler", engine.validate_sampling(sampler))?;
        within(DATA, self.data.validate())?;
        each(REWARDS, &self.rewards, RewardConfig::validate)?;
        each(TRACKERS, &self.trackers, TrackerConfig::validate)?;
        if let Some(environment) = &self.environment {
            within(ENVIRONMENT, environment.validate())?;
        }
        within("rollout_log", self.rollout_log.validate())?;
        within("alarms", self.alarms.validate())?;
        self.validate_demonstrations()?;
        if self.rewards.is_empty() && !self.environment_gives_rewards() && !self.teacher_suffices()
        {
            let message = "none, must be at least one, as a list: rewards: [{kind: numeric}]";
            return Err(Problem::at(REWARDS, message));
        }
        self.validate_group_filter()?;
        let rollout = &self.train.rollout;
        for (key, continues) in [
            ("rollout.partial", rollout.partial),
            ("rollout.in_flight_updates", rollout.in_flight_updates),
        ] {
            if continues && self.environment.is_some() {
                let message =
                    "true, must be false with an environment, whose trajectories end in their step";
                return Err(Problem::at(key, message));
            }
        }
        if self.train.turn_advantage.is_some() && self.environment.is_none() {
            let message = "given, must be absent without an environment";
            return Err(Problem::at("turn_advantage", message));
        }
        self.validate_reward_weights()?;
        self.validate_teacher()?;
        self.validate_run_dir()
    }

    /// Rejects demonstrations without rows, rows without a share in the loss, and held-out rows,
    /// since nothing evaluates them.
    fn validate_demonstrations(&self) -> Result<(), Problem> {
        if let Some(samples) = self.train.teacher_samples() {
            return self.validate_teacher_samples(samples);
        }
        let settings = "demonstrations";
        let data = match (&self.demonstration_data, &self.train.demonstrations) {
            (Some(data), Some(_)) => data,
            (None, None) => return Ok(()),
            (Some(_), None) => {
                let message = format!("given, but they have no share in the loss: give {settings}");
                return Err(Problem::at(DEMONSTRATION_DATA, message));
            }
            (None, Some(_)) => {
                let message = "given, but there are no rows: give demonstration_data.train, or demonstrations.teacher_samples";
                return Err(Problem::at(settings, message));
            }
        };
        for (key, is_given) in [
            ("held_out", !data.held_out.is_empty()),
            ("held_out_rows", data.held_out_rows.is_some()),
        ] {
            if is_given {
                let message = "given, must be absent: demonstrations are not evaluated";
                return Err(Problem::at(&format!("{DEMONSTRATION_DATA}.{key}"), message));
            }
        }
        within(DEMONSTRATION_DATA, data.validate())
    }

    /// Rejects what the samples of a teacher cannot be combined with.
    fn validate_teacher_samples(&self, samples: &TeacherSamplesConfig) -> Result<(), Problem> {
        let wrong = |key: &str, message: &str| Err(Problem::at(key, message));
        if self.demonstration_data.is_some() {
            let message = "given, must be absent with demonstrations.teacher_samples, which take the place of rows";
            return wrong(DEMONSTRATION_DATA, message);
        }
        let Some(teacher) = &self.teacher else {
            let message = "given, but there is no teacher: give teacher.model or teacher.server";
            return wrong(TEACHER_SAMPLES, message);
        };
        for (key, is_given, reason) in [
            ("self", teacher.own.is_some(), "the policy samples already"),
            (
                "models",
                !teacher.models.is_empty(),
                "one teacher samples all",
            ),
        ] {
            if is_given {
                let message =
                    format!("given, must be absent with demonstrations.teacher_samples: {reason}");
                return wrong(&join(TEACHER, key), &message);
            }
        }
        if self.environment.is_some() {
            let message =
                "given, must be absent with an environment, in which only the policy acts";
            return wrong(TEACHER_SAMPLES, message);
        }
        if samples.min_reward.is_some() && self.num_reward_components() == 0 {
            let message = "given, must be absent without rewards";
            return wrong(&join(TEACHER_SAMPLES, "min_reward"), message);
        }
        let engine = teacher.server.as_ref().map(|server| server.engine);
        let sampling = samples.sampling(&self.train.sampling);
        within(
            "sampling",
            engine.unwrap_or_default().validate_sampling(&sampling),
        )
    }

    /// Returns the term of the recipe for which a teacher scores completions, if there is one.
    pub(crate) fn teacher_term(&self) -> Option<&'static str> {
        let recipe = &self.train.recipe;
        let of_tokens = recipe.teacher_log_probs_term();
        of_tokens.or(recipe.distillation_loss.map(|_| "distillation_loss"))
    }

    /// Rejects a term that needs a missing teacher, and a teacher without a use.
    fn validate_teacher(&self) -> Result<(), Problem> {
        let teacher = match (self.teacher_term(), &self.teacher) {
            (Some(key), None) => {
                return Err(Problem::at(
                    &format!("recipe.{key}"),
                    "given, but there is no teacher: give teacher.model, teacher.server or teacher.self",
                ));
            }
            (None, Some(_)) if self.train.teacher_samples().is_none() => {
                return Err(Problem::at(
                    TEACHER,
                    "given, but no term of the recipe learns from it: give recipe.policy_loss.distillation, recipe.distillation_loss or demonstrations.teacher_samples",
                ));
            }
            (None, None) => return Ok(()),
            (_, Some(teacher)) => teacher,
        };
        if teacher.by.is_none() && teacher.models.is_empty() {
            return self.validate_one_teacher(TEACHER, teacher);
        }
        let wrong = |key: &str, message: &str| Err(Problem::at(&join(TEACHER, key), message));
        if teacher.by.is_none() {
            return wrong(
                "models",
                "given, must be absent without teacher.by, the column that names them",
            );
        }
        if teacher.models.is_empty() {
            return wrong("by", "given, must be absent without teacher.models");
        }
        let others = [
            ("model", teacher.model.is_some()),
            ("server", teacher.server.is_some()),
            ("self", teacher.own.is_some()),
        ];
        for (key, is_given) in others {
            if is_given {
                return wrong(key, "given, must be absent with teacher.models");
            }
        }
        let mut has_self = false;
        for (path, _, teacher) in teacher.each() {
            if teacher.by.is_some() || !teacher.models.is_empty() {
                let message = "must have one of the keys model, server and self";
                return Err(Problem::at(&path, message));
            }
            if teacher.own.is_some() && std::mem::replace(&mut has_self, true) {
                let message = "given, must be absent: another teacher has it";
                return Err(Problem::at(&join(&path, "self"), message));
            }
            self.validate_one_teacher(&path, teacher)?;
        }
        Ok(())
    }

    /// Checks the teacher at `path`.
    fn validate_one_teacher(&self, path: &str, teacher: &TeacherConfig) -> Result<(), Problem> {
        let recipe = &self.train.recipe;
        let at = |key: &str| join(path, key);
        let server = match (&teacher.model, &teacher.server, &teacher.own) {
            (Some(_), None, None) => return Ok(()),
            (None, None, Some(own)) => return within(&at("self"), own.validate(&self.train)),
            (None, Some(server), None) => server,
            (None, None, None) => {
                return Err(Problem::at(
                    path,
                    "must have the key model, the key server or the key self",
                ));
            }
            (model, server, _) => {
                let with = if model.is_some() { "model" } else { "server" };
                let key = match server {
                    Some(_) if model.is_some() => "server",
                    _ => "self",
                };
                let message = format!("given, must be absent with {}", at(with));
                return Err(Problem::at(&at(key), message));
            }
        };
        let valid = match self.teacher_term() {
            Some(_) => server.validate_teacher(),
            None => server.validate_sampling_teacher(),
        };
        within(&at("server"), valid)?;
        let rollout = &self.train.rollout;
        let root = |url: &String| url.trim_end_matches('/').to_owned();
        let sleeping: Vec<String> = rollout.base_url.iter().map(root).collect();
        let asleep = server
            .base_url
            .iter()
            .find(|url| sleeping.contains(&root(url)));
        if let Some(url) = asleep.filter(|_| rollout.sleep_mode) {
            let message = format!(
                "{url}, must be another server with rollout.sleep_mode, for which this one sleeps while the teacher is asked"
            );
            return Err(Problem::at(&at("server.base_url"), message));
        }
        if let Some(loss) = &recipe.distillation_loss {
            let wrong = |key: &str, message: String| {
                let path = format!("recipe.distillation_loss.{key}");
                Err(Problem::at(&path, message))
            };
            if !matches!(loss.support, Support::Teacher { .. }) {
                let found = json!(loss.support);
                return wrong(
                    "support",
                    format!(
                        "{found}, must be {{teacher: {{k: ...}}}} with teacher.server, which names its most likely tokens only"
                    ),
                );
            }
            if loss.temperature != 1. && loss.tail != Tail::Renormalize {
                return wrong(
                    "temperature",
                    format!(
                        "{}, must be 1 with teacher.server, which names log-probs at temperature 1, unless tail is renormalize",
                        loss.temperature
                    ),
                );
            }
        }
        let temperature = self.train.sampling.temperature;
        if recipe.teacher_log_probs_term().is_some() && temperature != 1. {
            let message = format!(
                "{temperature}, must be 1 with teacher.server, which names log-probs at temperature 1"
            );
            return Err(Problem::at("sampling.temperature", message));
        }
        Ok(())
    }

    /// Returns whether the environment gives rewards other than for failures.
    fn environment_gives_rewards(&self) -> bool {
        let environment = self.environment.as_ref();
        environment.is_some_and(|environment| environment.kind.gives_rewards())
    }

    /// Returns whether the policy can learn from the teacher alone, which compares no rewards.
    fn teacher_suffices(&self) -> bool {
        let recipe = &self.train.recipe;
        let tokens = recipe.advantage.pipeline().tokens.unwrap_or_default();
        let is_signal = recipe.distillation_loss.is_some()
            || recipe.policy_loss.distillation.is_some()
            || tokens.distillation.is_some()
            || self.train.teacher_samples().is_some();
        let mut teachers = self.teacher.iter().flat_map(TeacherConfig::each).peekable();
        let is_given = teachers.peek().is_some();
        let compares = |own: &SelfTeacherConfig| own.sibling.is_some() || own.feedback;
        is_signal && is_given && !teachers.any(|(.., x)| x.own.as_ref().is_some_and(compares))
    }

    /// Returns the number of reward terms, including the environment's.
    fn num_reward_components(&self) -> usize {
        let environment = self.environment.as_ref();
        let gives_rewards = environment.is_some_and(EnvironmentConfig::gives_rewards);
        self.rewards.len() + usize::from(gives_rewards)
    }

    /// Rejects a group filter that drops every group, because there are no rewards.
    fn validate_group_filter(&self) -> Result<(), Problem> {
        let without_rewards = GroupSummary {
            mean: 0.,
            std: 0.,
            count: self.train.num_generations,
            zero_variance: true,
        };
        match &self.train.recipe.group_filter {
            Some(filter)
                if self.num_reward_components() == 0 && !filter.keeps(&without_rewards) =>
            {
                let message =
                    "drops every group, must be null without rewards, which are then all 0";
                Err(Problem::at("recipe.group_filter", message))
            }
            _ => Ok(()),
        }
    }

    /// Rejects component weights unless there is one per reward.
    fn validate_reward_weights(&self) -> Result<(), Problem> {
        let recipe = &self.train.recipe;
        let pipeline = recipe.advantage.pipeline();
        let of_group = pipeline.sequence.and_then(|stage| stage.reward_weights);
        let in_group = match &recipe.advantage.reward_weights {
            Some(_) => "advantage.reward_weights",
            None => "advantage.sequence.reward_weights",
        };
        for (key, weights) in [
            (
                "reward_shaping.reward_weights",
                &recipe.reward_shaping.reward_weights,
            ),
            (in_group, &of_group),
        ] {
            let rewards = self.num_reward_components();
            if let Some(weights) = weights
                && weights.len() != rewards
            {
                return Err(Problem::at(
                    &format!("recipe.{key}"),
                    format!(
                        "{} weights, must be one for each of {rewards} rewards",
                        weights.len()
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Rejects a run that would overwrite what it reads.
    fn validate_run_dir(&self) -> Result<(), Problem> {
        check_run_dir(&self.run_dir)?;
        let rewards = self.rewards.iter().enumerate();
        let caches = rewards.flat_map(|(i, reward)| {
            let caches = reward.caches().into_iter();
            caches.map(move |path| (format!("{}.cache", reward_key(i)), path))
        });
        let inputs = self.named_inputs();
        let inputs = inputs.map(|(key, path)| (key.into_owned(), path.as_path()));
        for (key, path) in inputs.chain(caches) {
            check_outside(&key, path, &self.run_dir)?;
        }
        Ok(())
    }

    /// Returns the model and the data files, by key, to replace them.
    pub(super) fn model_and_data_mut(
        &mut self,
    ) -> (
        &mut PathBuf,
        impl Iterator<Item = (&'static str, &mut Vec<PathBuf>)>,
    ) {
        let (model, data) = (&mut self.model.path, &mut self.data);
        let data = [
            ("data.train", &mut data.train),
            ("data.held_out", &mut data.held_out),
        ];
        let demonstrations = self.demonstration_data.iter_mut();
        let demonstrations =
            demonstrations.map(|data| ("demonstration_data.train", &mut data.train));
        (model, data.into_iter().chain(demonstrations))
    }

    fn named_inputs(&self) -> impl Iterator<Item = (Cow<'static, str>, &PathBuf)> {
        let (data, held_out) = (&self.data.train, &self.data.held_out);
        let template = self.model.chat_template.iter();
        let demonstrations = self.demonstration_data.iter();
        let demonstrations = demonstrations.flat_map(|data| &data.train);
        let teachers = self.teacher.iter().flat_map(TeacherConfig::each);
        let teachers = teachers.filter_map(|(key, _, teacher)| {
            Some((Cow::Owned(join(&key, "model")), teacher.model.as_ref()?))
        });
        std::iter::once(("model", &self.model.path))
            .chain(template.map(|path| ("model.chat_template", path)))
            .chain(data.iter().map(|path| ("data.train", path)))
            .chain(held_out.iter().map(|path| ("data.held_out", path)))
            .chain(demonstrations.map(|path| ("demonstration_data.train", path)))
            .map(|(key, path)| (Cow::Borrowed(key), path))
            .chain(teachers)
    }

    /// Returns the paths that a run reads: the model, the data, and the reward files.
    pub fn inputs(&self) -> Vec<PathBuf> {
        let named = self.named_inputs().map(|(_, path)| path.clone());
        named.chain(self.reward_files()).collect()
    }

    /// Returns the files that decide rewards: programs, scripts and models used by reward functions
    /// and the environment.
    pub fn reward_files(&self) -> Vec<PathBuf> {
        let environment = self.environment.iter().flat_map(EnvironmentConfig::files);
        let rewards = self.rewards.iter().flat_map(RewardConfig::files);
        rewards.chain(environment).collect()
    }

    /// Checks that the programs, scripts and folders for rewards, trackers and the environment
    /// exist. Skips models whose weights still need to be downloaded.
    ///
    /// # Errors
    ///
    /// Returns an error with the reward's line if one is missing.
    pub fn check_files(&self) -> Result<(), ConfigError> {
        for (i, reward) in self.rewards.iter().enumerate() {
            let key = reward_key(i);
            if !self.hub.lacks_weights_of(&key) {
                self.document.locate(within(&key, reward.check_files()))?;
            }
        }
        let checked = each(TRACKERS, &self.trackers, TrackerConfig::check_files);
        self.document.locate(checked)?;
        if let Some(environment) = &self.environment {
            let checked = within(ENVIRONMENT, environment.check_files());
            self.document.locate(checked)?;
        }
        Ok(())
    }

    /// Checks that the engine can sample for a training run. An evaluation needs less.
    ///
    /// # Errors
    ///
    /// Returns an error with the key's line if the engine accepts no weights and
    /// `rollout.weight_sync` does not allow that, or if evaluations need the engine then.
    pub fn check_training(&self) -> Result<(), ConfigError> {
        let rollout = &self.train.rollout;
        self.document
            .locate(within(ROLLOUT, rollout.validate_training()))?;
        if rollout.is_fixed_policy() && self.evaluation.sampler.structured_outputs.is_some() {
            return Err(self.error(
                "evaluation.sampler.structured_outputs",
                "given, must be null if the engine receives no weights: the policy in this process samples for evaluations",
            ));
        }
        Ok(())
    }

    /// Checks that an evaluation outside of a run can be sampled.
    ///
    /// # Errors
    ///
    /// Returns an error with the key's line if the completions have a form that the policy in this
    /// process cannot give them.
    pub fn check_local_sampler(&self) -> Result<(), ConfigError> {
        let is_local = !self.train.rollout.is_fixed_policy();
        if is_local && self.evaluation.sampler.structured_outputs.is_some() {
            return Err(self.error(
                "evaluation.sampler.structured_outputs",
                "given, must be null if the engine receives weights: the policy in this process samples",
            ));
        }
        Ok(())
    }

    /// Checks that the policy in this process can sample during training, or send its weights to
    /// servers: on a GPU, or on the CPU if `on_gpu` is false.
    ///
    /// # Errors
    ///
    /// Returns an error with the key's line if `rollout.max_staleness` is above 0 with a local
    /// engine on a GPU, or if `rollout.weight_sync` is `nccl` or `ipc` on the CPU.
    pub fn check_device(&self, on_gpu: bool) -> Result<(), ConfigError> {
        let rollout = &self.train.rollout;
        let checked = if rollout.engine.is_local() {
            rollout.validate_local(on_gpu)
        } else {
            rollout.validate_weight_sync(on_gpu)
        };
        self.document.locate(within(ROLLOUT, checked))
    }

    /// Returns settings that are valid, but whose effect may not be meant: a message for each.
    pub fn doubts(&self) -> Vec<String> {
        let mut doubts = Vec::new();
        let train = &self.train;
        let completions = train.prompts_per_step.saturating_mul(train.num_generations);
        if !self.environment_gives_rewards()
            && !self.rewards.is_empty()
            && self.rewards.iter().all(|reward| reward.weight == 0.)
        {
            doubts.push("rewards: all have the weight 0, so all rewards are equal".to_owned());
        }
        let coef = train.recipe.policy_loss.observation_coef;
        if coef > 0. && self.environment.is_none() {
            doubts.push(format!(
                "recipe.policy_loss.observation_coef: {coef}, and there is no environment: completions have no observations"
            ));
        }
        doubts.extend(learning_rate_doubt(&train.optimizer));
        if let Some(size) = train.mini_batch_size.filter(|size| *size > completions) {
            doubts.push(format!(
                "mini_batch_size: {size}, and a step has {completions} completions: it makes one update"
            ));
        }
        doubts
    }

    /// Reads the data, and checks that each row has the columns that the rewards need. Starts the
    /// MCP servers that list tools.
    ///
    /// # Errors
    ///
    /// Returns a [`ConfigError`] if a key in the section does not fit the rows, content is not
    /// text, or an MCP server cannot be used. Returns an error with file and line if anything
    /// else is wrong.
    pub fn load_data(&self) -> anyhow::Result<Dataset> {
        let dataset = self.data.load(self.seed());
        let dataset = dataset.map_err(|error| data_error(&self.document, DATA, error))?;
        if let Some(environment) = &self.environment {
            let listed = within(ENVIRONMENT, environment.list_tools());
            self.document.locate(listed)?;
        }
        for row in &dataset.train {
            let weight = self.train.sample_weight(&row.columns);
            weight.map_err(|error| error.context(row.place()))?;
        }
        for row in dataset.train.iter().chain(&dataset.held_out) {
            for reward in &self.rewards {
                reward
                    .check_row(&row.columns)
                    .map_err(|error| error.context(row.place()))?;
            }
            if let Some(environment) = &self.environment {
                let schemas = environment.schemas(&row.columns);
                schemas.map_err(|error| error.context(row.place()))?;
            }
        }
        Ok(dataset)
    }

    /// Reads the demonstration rows, if any, and encodes them for `model`.
    ///
    /// # Errors
    ///
    /// Returns a [`ConfigError`] if a key in the section does not fit the rows or the model.
    /// Returns an error with file and line if a row cannot be read or encoded.
    pub fn load_demonstrations(&self, model: &Pretrained) -> anyhow::Result<Option<SftDataset>> {
        let Some(data) = &self.demonstration_data else {
            return Ok(None);
        };
        let variables = &data.chat_template_kwargs;
        let template = chat_template(&self.document, DEMONSTRATION_DATA, variables, model)?;
        let rows = data.load(model, template.as_ref(), self.seed());
        let rows = rows.map_err(|error| data_error(&self.document, DEMONSTRATION_DATA, error))?;
        Ok(Some(rows))
    }

    /// Returns the model's chat template with `data.chat_template_kwargs`.
    ///
    /// # Errors
    ///
    /// Returns an error with the key's line if there are variables and the model has no template,
    /// or its template does not use one of them.
    pub fn chat_template(&self, model: &Pretrained) -> Result<Option<ChatTemplate>, ConfigError> {
        let variables = &self.data.chat_template_kwargs;
        chat_template(&self.document, DATA, variables, model)
    }

    /// Checks the settings that depend on the model and the prompts: adapters, expert balancing,
    /// the number of evaluation completions, and completion lengths.
    ///
    /// # Errors
    ///
    /// Returns an error with the line of the key that the model does not allow.
    pub fn check_model(
        &self,
        model: &DecoderConfig,
        train: &[Prompt],
        held_out: &[Prompt],
    ) -> Result<(), ConfigError> {
        if let Some(adapters) = &self.train.adapters {
            let checked = bounds::check_adapters("", adapters, model);
            self.document.locate(checked)?;
        }
        let checked = check_router("", self.train.router_aux_loss_coef, model);
        self.document.locate(checked)?;
        if self.train.router_replay && !model.has_experts() {
            let message = "true, must be false for a model without experts";
            return Err(self.error("router_replay", message));
        }
        self.check_stop_tokens("sampling", &self.train.sampling, model)?;
        self.check_length(MAX_NEW_TOKENS, &self.train.sampling, model, train)?;
        if let Some(samples) = self.train.teacher_samples() {
            let sampling = samples.sampling(&self.train.sampling);
            let key = join(TEACHER_SAMPLES, "max_new_tokens");
            self.check_length(&key, &sampling, model, train)?;
        }
        self.check_evaluation(model, held_out)
    }

    /// Checks the settings for evaluating `model` on `held_out`.
    ///
    /// # Errors
    ///
    /// As in [`Self::check_model`].
    pub fn check_evaluation(
        &self,
        model: &DecoderConfig,
        held_out: &[Prompt],
    ) -> Result<(), ConfigError> {
        let checked = bounds::check_evaluation(&self.evaluation, held_out.len());
        self.document.locate(checked)?;
        let section = match self.document.get("evaluation.sampler.stop_token_ids") {
            Some(_) => "evaluation.sampler",
            None => "sampling",
        };
        self.check_stop_tokens(section, &self.evaluation.sampler, model)?;
        let own = "evaluation.sampler.max_new_tokens";
        let key = match self.document.get(own) {
            Some(_) => own,
            None => MAX_NEW_TOKENS,
        };
        self.check_length(key, &self.evaluation.sampler, model, held_out)
    }

    /// Rejects stop tokens that the model does not have.
    fn check_stop_tokens(
        &self,
        section: &str,
        sampling: &SamplingConfig,
        model: &DecoderConfig,
    ) -> Result<(), ConfigError> {
        let checked = sampling.validate_for(model.vocab_size);
        self.document.locate(within(section, checked))
    }

    /// Rejects completions longer than the model's positions.
    fn check_length(
        &self,
        key: &str,
        sampling: &SamplingConfig,
        model: &DecoderConfig,
        prompts: &[Prompt],
    ) -> Result<(), ConfigError> {
        let (longest, positions) = (Prompt::longest(prompts), model.max_position_embeddings);
        let length = sampling.max_new_tokens;
        if length.saturating_add(longest) <= positions {
            return Ok(());
        }
        let message = format!(
            "{length}, must be at most {}: the model has {positions} positions, and the longest prompt {longest} tokens",
            positions.saturating_sub(longest)
        );
        Err(self.error(key, &message))
    }

    /// Returns an error about the key at `path`.
    pub(crate) fn error(&self, path: &str, message: &str) -> ConfigError {
        self.document.error(path, message)
    }

    /// Returns the run's seed.
    pub fn seed(&self) -> u64 {
        self.train.sampling.seed
    }

    /// Returns the algorithm by its name, and what differs from it.
    pub fn algorithm(&self) -> Algorithm {
        let length = self.train.sampling.max_new_tokens;
        Algorithm::new(&self.train.recipe, self.preset, length)
    }

    /// Returns the effective configuration as YAML that reads as the same configuration.
    pub fn to_yaml(&self) -> Result<String, serde_json::Error> {
        let value = self.to_value()?;
        serde_saphyr::to_string(&value).map_err(serde::ser::Error::custom)
    }

    /// Returns the effective configuration with the keys of a file. The recipe has every option, so
    /// there is no preset.
    pub fn to_value(&self) -> Result<Value, serde_json::Error> {
        let keys = RunKeys {
            model: Some(self.model.clone()),
            teacher: self.teacher.clone(),
            data: self.data.clone(),
            demonstration_data: self.demonstration_data.clone(),
            rewards: self.rewards.clone(),
            environment: self.environment.clone(),
            preset: None,
            max_prompt_tokens: self.max_prompt_tokens,
            evaluation: self.evaluation_keys.clone(),
            checkpoint: self.checkpoint.clone(),
            rollout_log: self.rollout_log.clone(),
            alarms: self.alarms.clone(),
            trackers: self.trackers.clone(),
            max_steps: self.max_steps,
            run_dir: Some(self.run_dir.clone()),
            seed: self.seed(),
            threads: self.threads,
            max_memory_mib: self.max_memory_mib,
        };
        let (mut keys, mut train) = (json!(keys), json!(self.train));
        if let Some(sampling) = train.get_mut("sampling").and_then(Value::as_object_mut) {
            sampling.shift_remove("seed");
        }
        if let (Value::Object(keys), Value::Object(train)) = (&mut keys, train) {
            keys.shift_remove("preset");
            keys.extend(train);
            keys.extend(self.named.clone());
        }
        Ok(keys)
    }
}

pub(super) const DATA: &str = "data";
const DEMONSTRATION_DATA: &str = "demonstration_data";
const TEACHER_SAMPLES: &str = "demonstrations.teacher_samples";
const ENVIRONMENT: &str = "environment";
pub(super) const REWARDS: &str = "rewards";
const ROLLOUT: &str = "rollout";
pub(super) const TRACKERS: &str = "trackers";
const MAX_NEW_TOKENS: &str = "sampling.max_new_tokens";

/// Returns a message about a learning rate that changes nothing.
pub(super) fn learning_rate_doubt(optimizer: &AdamWConfig) -> Option<String> {
    (optimizer.learning_rate == 0.)
        .then(|| "optimizer.learning_rate: 0, so the policy does not change".to_owned())
}

/// Returns the path to reward `i` in a file.
pub(super) fn reward_key(i: usize) -> String {
    format!("{REWARDS}[{i}]")
}

/// Returns the model section, which a file must have.
pub(super) fn required_model(model: Option<ModelConfig>) -> Result<ModelConfig, Problem> {
    model.ok_or_else(|| Problem::at("model", "absent, must be the path of a model"))
}

/// Sets the steps between evaluations for a run without held-out rows. A file must not set them.
pub(super) fn no_evaluations(
    document: &Document,
    every_steps: &mut Option<usize>,
) -> Result<(), Problem> {
    let key = "evaluation.every_steps";
    if document.get(key).is_some_and(|steps| !steps.is_null()) {
        return Err(Problem::at(
            key,
            "given, but nothing is held out: give data.held_out or data.held_out_rows, or leave the key out",
        ));
    }
    *every_steps = None;
    Ok(())
}

/// Returns whether `path` is `folder` or lies in it, after links and dots.
fn is_within(path: &Path, folder: &Path) -> bool {
    let resolved = |path: &Path| {
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
        absolute.canonicalize().unwrap_or(absolute)
    };
    resolved(path).starts_with(resolved(folder))
}

/// Rejects kind names that are not texts: a number would select a kind by position.
pub(super) fn tags(path: &str, value: &Value) -> Result<(), Problem> {
    match value {
        Value::Object(map) => map.iter().try_for_each(|(key, value)| {
            let path = join(path, key);
            if matches!(key.as_str(), "kind" | "name") && !(value.is_string() || value.is_null()) {
                let hint = if value.is_boolean() { QUOTE_HINT } else { "" };
                return Err(Problem::at(&path, format!("{value}, must be a text{hint}")));
            }
            tags(&path, value)
        }),
        Value::Array(items) => {
            let mut items = items.iter().enumerate();
            items.try_for_each(|(i, value)| tags(&format!("{path}[{i}]"), value))
        }
        _ => Ok(()),
    }
}

/// Returns the trainer's settings, which a file has at its top, with their defaults.
pub(super) fn settings() -> &'static Map<String, Value> {
    static SETTINGS: LazyLock<Map<String, Value>> =
        LazyLock::new(|| match json!(TrainConfig::default()) {
            Value::Object(settings) => settings,
            _ => Map::new(),
        });
    &SETTINGS
}

/// Splits a document's keys into the run's own and the trainer's settings.
fn split(document: &Document) -> Result<(Value, Value), Problem> {
    let given = without_empty_sections(document.value.clone(), run_sections());
    let Value::Object(mut given) = given else {
        return Ok((given, json!({})));
    };
    let keys = &run_sections()[""];
    if let Some(key) = given.keys().find(|key| !keys.contains_key(*key)) {
        let known: Vec<&str> = keys.keys().map(String::as_str).collect();
        return Err(Problem::at(key, unknown_key("", key, &known)));
    }
    let settings = settings().keys();
    let settings = settings.filter_map(|key| given.shift_remove_entry(key));
    let settings = Value::Object(settings.collect());
    Ok((Value::Object(given), settings))
}

/// Returns `defaults`, with the keys in `patch` laid over them. `patch` is at `path`.
pub(super) fn laid_over<T: Serialize + DeserializeOwned + JsonSchema>(
    document: &Document,
    path: &str,
    defaults: &T,
    patch: Value,
) -> Result<T, Problem> {
    let defaults = serde_json::to_value(defaults).map_err(|error| Problem::at(path, error))?;
    Ok(document.parse(path, &merge(defaults, patch))?)
}

/// Returns a model's chat template with the variables in `chat_template_kwargs` in `section`.
///
/// # Errors
///
/// Returns an error with the key's line if there are variables and the model has no template, or
/// its template does not use one of them.
pub(super) fn chat_template(
    document: &Document,
    section: &str,
    variables: &Map<String, Value>,
    model: &Pretrained,
) -> Result<Option<ChatTemplate>, ConfigError> {
    let key = format!("{section}.chat_template_kwargs");
    let Some(template) = &model.chat_template else {
        return if variables.is_empty() {
            Ok(None)
        } else {
            Err(document.error(&key, "given, but the model has no chat template"))
        };
    };
    for name in variables.keys() {
        if !template.has_variable(name) {
            let message = "given, but the chat template has no such variable";
            return Err(document.error(&format!("{key}.{name}"), message));
        }
    }
    Ok(Some(template.clone().with_variables(variables.clone())))
}

/// Rejects a load-balancing loss in `section` for a model without experts.
pub(super) fn check_router(section: &str, coef: f64, model: &DecoderConfig) -> Result<(), Problem> {
    if coef == 0. || model.has_experts() {
        Ok(())
    } else {
        Err(Problem::at(
            &join(section, "router_aux_loss_coef"),
            format!("{coef}, must be 0 for a model without experts"),
        ))
    }
}

/// Returns a row error in `section` with its key's line, if it names a key.
pub(super) fn data_error(
    document: &Document,
    section: &str,
    error: anyhow::Error,
) -> anyhow::Error {
    let Some(invalid) = find_invalid(&error) else {
        return error;
    };
    let key = format!("{section}.{}", invalid.field);
    match document.get(&key) {
        Some(_) => document.error(&key, format!("{}, must {}", invalid.value, invalid.must)),
        None => document.error(section, format!("{error:#}")),
    }
    .into()
}

/// Checks that a run directory's path is possible.
pub(super) fn check_run_dir(run_dir: &Path) -> Result<(), Problem> {
    if run_dir.as_os_str().is_empty() {
        return Err(Problem::at(
            "run_dir",
            "\"\", must be the path of a directory",
        ));
    }
    if run_dir.starts_with("~") {
        let folder = run_dir.display();
        let message = format!("{folder}, must name the home directory in full, ~ is not replaced");
        return Err(Problem::at("run_dir", message));
    }
    // A folder that is there, or above the one to be made.
    let exists = |path: &&Path| !path.as_os_str().is_empty() && path.symlink_metadata().is_ok();
    match run_dir.ancestors().find(exists) {
        Some(path) if !path.is_dir() => {
            let message = format!(
                "{} is not a directory, must be one or absent",
                path.display()
            );
            Err(Problem::at("run_dir", message))
        }
        _ => Ok(()),
    }
}

/// Rejects a path at `key` that a run would both read and write.
pub(super) fn check_outside(key: &str, path: &Path, run_dir: &Path) -> Result<(), Problem> {
    if is_within(path, run_dir) {
        Err(Problem::at(
            key,
            format!(
                "{}, must lie outside of run_dir, {}",
                path.display(),
                run_dir.display()
            ),
        ))
    } else {
        Ok(())
    }
}

/// Rejects keys that belong in another section.
pub(super) fn own_place(
    section: &str,
    keys: &Map<String, Value>,
    elsewhere: &[(&str, &str)],
) -> Result<(), Problem> {
    for (key, place) in elsewhere {
        if keys.contains_key(*key) {
            let path = format!("{section}.{key}");
            return Err(Problem::at(&path, format!("has its place at {place}")));
        }
    }
    Ok(())
}

/// Returns the evaluation section in `document`.
pub(super) fn evaluation(
    document: &Document,
    keys: &EvaluationKeys,
    sampling: &SamplingConfig,
) -> Result<EvaluationConfig, Problem> {
    let wrong =
        |key: &str, message: String| Err(Problem::at(&format!("evaluation.{key}"), message));
    let samples = keys.samples_per_prompt;
    if samples == 0 {
        return wrong("samples_per_prompt", "0, must be at least 1".to_owned());
    }
    for (i, k) in keys.pass_at.iter().enumerate() {
        if !(1..=samples).contains(k) {
            return wrong(
                &format!("pass_at[{i}]"),
                format!("{k}, must be from 1 to samples_per_prompt, {samples}"),
            );
        }
    }
    if !keys.pass_reward.is_finite() {
        return wrong(
            "pass_reward",
            format!("{}, must be finite", keys.pass_reward),
        );
    }
    let path = "evaluation.sampler";
    own_place(path, &keys.sampler, &SAMPLER_ELSEWHERE)?;
    let sampler = Value::Object(keys.sampler.clone());
    let sampler: SamplingConfig = laid_over(document, path, sampling, sampler)?;
    if samples > 1 && sampler.greedy {
        let message = format!("{samples}, must be 1 with greedy, whose completions are equal");
        return wrong("samples_per_prompt", message);
    }
    Ok(EvaluationConfig {
        every_steps: keys.every_steps,
        samples_per_prompt: samples,
        pass_at: keys.pass_at.clone(),
        pass_reward: keys.pass_reward,
        max_prompts: keys.max_prompts,
        sampler,
    })
}

/// Returns a section's fields without those that a file has in other sections.
pub(super) fn without(mut section: Value, elsewhere: &[(&str, &str)]) -> Value {
    if let Some(fields) = section.as_object_mut() {
        for (field, _) in elsewhere {
            fields.shift_remove(*field);
        }
    }
    section
}

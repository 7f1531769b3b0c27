//! Reward functions by name.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use candle_grpo_core::{CosineLength, OverlongPenalty, RepetitionPenalty, ScoreEnsemble, validate};
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[cfg(feature = "instructions")]
use crate::InstructionsReward;
#[cfg(feature = "math")]
use crate::MathReward;
#[cfg(feature = "code")]
use crate::{CodeConfig, CodeReward};
use crate::{
    EnsembleReward, ExactReward, F1Reward, JsonReward, JudgeConfig, LengthReward, LengthScale,
    LengthScaledReward, MultipleChoiceReward, NoRewardModel, NumericReward, ProgramConfig,
    ProgramReward, RegexReward, RepetitionReward, RewardFunction, RewardModelOptions, TagsReward,
    WeightedRewards,
};
use candle_grpo_base::within;

/// The key of the reward that another one scales.
const CORRECT: &str = "correct";

/// One term of the reward in a configuration file: `kind`, the options of that kind, `weight` and
/// `name`.
///
/// ```
/// use candle_core::Device;
/// use candle_grpo_rewards::RewardConfig;
///
/// let rewards: Vec<RewardConfig> = serde_json::from_str(
///     r#"[{"kind": "numeric", "column": "answer"},
///         {"kind": "tags", "tags": ["think", "answer"], "weight": 0.2, "name": "form"}]"#,
/// )?;
/// let rewards = RewardConfig::build(&rewards, &Device::Cpu)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(bound = "M: RewardModelOptions")]
pub struct RewardConfig<M = NoRewardModel> {
    /// Its name in messages; absent: its kind.
    #[serde(default)]
    pub name: Option<String>,
    /// The factor of its score.
    #[serde(default = "crate::one")]
    pub weight: f64,
    /// The function and its options.
    #[serde(flatten)]
    pub kind: RewardKind<M>,
}

/// The reward functions that a configuration can name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "kind",
    rename_all = "snake_case",
    bound = "M: RewardModelOptions"
)]
#[allow(clippy::large_enum_variant, reason = "a run has a few of them")]
pub enum RewardKind<M = NoRewardModel> {
    /// [`NumericReward`].
    Numeric(NumericReward),
    /// [`MathReward`].
    #[cfg(feature = "math")]
    Math(MathReward),
    /// [`ExactReward`].
    Exact(ExactReward),
    /// [`MultipleChoiceReward`].
    MultipleChoice(MultipleChoiceReward),
    /// [`F1Reward`].
    F1(F1Reward),
    /// [`InstructionsReward`].
    #[cfg(feature = "instructions")]
    Instructions(InstructionsReward),
    /// [`RegexReward`].
    Regex(RegexOptions),
    /// [`TagsReward`].
    Tags(TagsOptions),
    /// [`JsonReward`].
    Json(JsonReward),
    /// [`LengthReward`].
    Length(OverlongPenalty),
    /// [`RepetitionReward`].
    Repetition(RepetitionPenalty),
    /// [`LengthScaledReward`] with [`LengthScale::Cosine`].
    Cosine(CosineOptions<M>),
    /// [`LengthScaledReward`] with [`LengthScale::Relative`].
    RelativeLength(RelativeLengthOptions<M>),
    /// [`ProgramReward`].
    Program(ProgramConfig),
    /// [`CodeReward`].
    #[cfg(feature = "code")]
    Code(CodeConfig),
    /// The score of a model, which the program provides.
    RewardModel(M),
    /// `JudgeReward`, which needs the feature `judge`.
    Judge(Box<JudgeConfig>),
    /// [`EnsembleReward`].
    Ensemble(EnsembleOptions<M>),
}

/// The options of [`RegexReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegexOptions {
    /// The regular expression.
    pub pattern: String,
    /// If true, it must match the completion from beginning to end.
    #[serde(default)]
    pub whole: bool,
}

/// The options of [`TagsReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TagsOptions {
    /// The names of the tags in their required order.
    pub tags: Vec<String>,
    /// If true, only white space may stand outside the tags.
    #[serde(default)]
    pub nothing_else: bool,
}

/// The options of [`LengthScaledReward`] with [`LengthScale::Cosine`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound = "M: RewardModelOptions")]
pub struct CosineOptions<M = NoRewardModel> {
    /// The reward that decides whether an answer is right, with the options of its kind.
    pub correct: Box<RewardKind<M>>,
    /// The smallest score of a right answer.
    #[serde(default = "crate::one")]
    pub min_score: f64,
    /// The scores of right and wrong answers, short and long.
    #[serde(default)]
    pub scale: CosineLength,
}

/// The options of [`LengthScaledReward`] with [`LengthScale::Relative`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound = "M: RewardModelOptions")]
pub struct RelativeLengthOptions<M = NoRewardModel> {
    /// The reward that decides whether an answer is right, with the options of its kind.
    pub correct: Box<RewardKind<M>>,
    /// The smallest score of a right answer.
    #[serde(default = "crate::one")]
    pub min_score: f64,
}

/// The options of [`EnsembleReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, bound = "M: RewardModelOptions")]
pub struct EnsembleOptions<M = NoRewardModel> {
    /// The judges, each with the options of its kind.
    pub judges: Vec<RewardKind<M>>,
    /// The function that combines their scores.
    #[serde(default)]
    pub combine: ScoreEnsemble,
}

impl RegexOptions {
    fn build(&self) -> Result<RegexReward> {
        match self.whole {
            true => RegexReward::whole(&self.pattern),
            false => RegexReward::search(&self.pattern),
        }
    }
}

impl TagsOptions {
    fn build(&self) -> Result<TagsReward> {
        let tags = TagsReward::new(self.tags.iter().map(String::as_str))?;
        Ok(match self.nothing_else {
            true => tags.nothing_else(),
            false => tags,
        })
    }
}

impl<M: RewardModelOptions> EnsembleOptions<M> {
    fn validate(&self) -> Result<()> {
        let judges = self.judges.len();
        validate::check(judges > 0, "judges", "none", "be at least one")?;
        if let ScoreEnsemble::Weighted(weights) = &self.combine {
            validate::check(
                weights.len() == judges,
                "combine.weighted",
                format_args!("{} weights", weights.len()),
                &format!("be one for each of {judges} judges"),
            )?;
        }
        Ok(())
    }
}

impl<M: RewardModelOptions> RewardConfig<M> {
    /// Checks the options. Starts no program and opens no file: see [`Self::check_files`].
    ///
    /// # Errors
    ///
    /// If the weight is not finite, or an option is not valid.
    pub fn validate(&self) -> Result<()> {
        let weight = self.weight;
        let valid = (weight as f32).is_finite();
        validate::check(
            valid,
            "weight",
            format_args!("{weight:?}"),
            "be a finite f32",
        )?;
        self.kind.validate()
    }

    /// Checks that the programs, scripts, folders, models and keys of servers are there that the
    /// reward needs. A reward of code also starts a program in its sandbox.
    ///
    /// # Errors
    ///
    /// If one is missing.
    pub fn check_files(&self) -> Result<()> {
        self.kind.check_files()
    }

    /// The files that decide scores: programs, scripts and models.
    pub fn files(&self) -> Vec<PathBuf> {
        self.kind.files()
    }

    /// The folders in which the reward keeps answers of servers.
    pub fn caches(&self) -> Vec<&Path> {
        self.kind.caches()
    }

    /// The paths of the models of rewards, to replace names of the hub. Each has its key, such as
    /// `judges[1].path`.
    pub fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        self.kind.models_mut()
    }

    /// Makes the weighted sum of `rewards`, starts their programs, and loads their models onto
    /// `device`.
    ///
    /// # Errors
    ///
    /// If `rewards` is empty, an option is not valid, a program cannot be started or a model cannot
    /// be loaded. The error names the key, such as `rewards[0].judges[1].path`.
    pub fn build(rewards: &[Self], device: &Device) -> Result<WeightedRewards> {
        ensure!(
            !rewards.is_empty(),
            "rewards: none, there must be at least one"
        );
        let mut sum = WeightedRewards::new();
        for (i, reward) in rewards.iter().enumerate() {
            let build = || -> Result<Box<dyn RewardFunction>> {
                reward.validate()?;
                reward.kind.build(device)
            };
            let function = build().map_err(|error| within(&format!("rewards[{i}]"), error))?;
            sum = sum.with_boxed(&reward.name(), reward.weight as f32, function);
        }
        Ok(sum)
    }

    /// Its name, or else its kind.
    pub fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.kind.name())
    }

    /// Checks that a row has the columns of the function, before a model is loaded.
    ///
    /// # Errors
    ///
    /// If a column is absent or has a value of another kind.
    pub fn check_row(&self, columns: &Value) -> Result<()> {
        self.kind
            .check_row(columns)
            .with_context(|| format!("reward {:?}", self.name()))
    }
}

impl<M: RewardModelOptions> RewardKind<M> {
    fn name(&self) -> String {
        let name = match self {
            Self::Numeric(_) => "numeric",
            #[cfg(feature = "math")]
            Self::Math(_) => "math",
            Self::Exact(_) => "exact",
            Self::Regex(_) => "regex",
            Self::Tags(_) => "tags",
            Self::Json(_) => "json",
            Self::Length(_) => "length",
            Self::Repetition(_) => "repetition",
            Self::Program(_) => "program",
            #[cfg(feature = "code")]
            Self::Code(_) => "code",
            Self::RewardModel(_) => "reward_model",
            Self::Judge(_) => "judge",
            Self::Ensemble(_) => "ensemble",
            Self::MultipleChoice(_) => "multiple_choice",
            Self::F1(_) => "f1",
            #[cfg(feature = "instructions")]
            Self::Instructions(_) => "instructions",
            Self::Cosine(_) => "cosine",
            Self::RelativeLength(_) => "relative_length",
        };
        name.to_owned()
    }

    /// The rewards that this one is made of, each with its path.
    fn parts(&self) -> Vec<(String, &Self)> {
        match self {
            Self::Cosine(options) => vec![(CORRECT.to_owned(), &options.correct)],
            Self::RelativeLength(options) => vec![(CORRECT.to_owned(), &options.correct)],
            Self::Ensemble(options) => {
                let judges = options.judges.iter().enumerate();
                let judges = judges.map(|(i, judge)| (judge_key(i), judge));
                judges.collect()
            }
            _ => Vec::new(),
        }
    }

    /// Checks each part. An error has its path.
    fn each_part(&self, check: impl Fn(&Self) -> Result<()>) -> Result<()> {
        let mut parts = self.parts().into_iter();
        parts.try_for_each(|(path, part)| check(part).map_err(|error| within(&path, error)))
    }

    fn validate(&self) -> Result<()> {
        match self {
            Self::Numeric(reward) => reward.validate(),
            #[cfg(feature = "math")]
            Self::Math(reward) => reward.validate(),
            Self::Exact(_) | Self::Json(_) | Self::MultipleChoice(_) | Self::F1(_) => Ok(()),
            #[cfg(feature = "instructions")]
            Self::Instructions(_) => Ok(()),
            Self::Regex(options) => options.build().map(drop),
            Self::Tags(options) => options.build().map(drop),
            Self::Length(penalty) => Ok(penalty.validate()?),
            Self::Repetition(penalty) => Ok(penalty.validate()?),
            Self::Program(config) => config.validate(),
            #[cfg(feature = "code")]
            Self::Code(config) => config.validate(),
            Self::RewardModel(config) => config.validate(),
            Self::Judge(config) => config.validate(),
            Self::Cosine(options) => {
                let scale = options.scale.validate();
                scale.map_err(|error| within("scale", error.into()))?;
                check_min_score(options.min_score)
            }
            Self::RelativeLength(options) => check_min_score(options.min_score),
            Self::Ensemble(options) => options.validate(),
        }?;
        self.each_part(Self::validate)
    }

    /// Makes the function of options that are valid, with models on `device`.
    fn build(&self, device: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(match self {
            Self::Numeric(reward) => Box::new(reward.clone()),
            #[cfg(feature = "math")]
            Self::Math(reward) => Box::new(reward.clone()),
            Self::Exact(reward) => Box::new(reward.clone()),
            Self::Json(reward) => Box::new(reward.clone()),
            Self::MultipleChoice(reward) => Box::new(reward.clone()),
            Self::F1(reward) => Box::new(reward.clone()),
            #[cfg(feature = "instructions")]
            Self::Instructions(reward) => Box::new(reward.clone()),
            Self::Cosine(options) => Box::new(LengthScaledReward::new(
                LengthScale::Cosine(options.scale),
                options.correct.build_part(CORRECT, device)?,
                options.min_score as f32,
            )),
            Self::RelativeLength(options) => Box::new(LengthScaledReward::new(
                LengthScale::Relative,
                options.correct.build_part(CORRECT, device)?,
                options.min_score as f32,
            )),
            Self::Regex(options) => Box::new(options.build()?),
            Self::Tags(options) => Box::new(options.build()?),
            Self::Length(penalty) => Box::new(LengthReward(*penalty)),
            Self::Repetition(penalty) => Box::new(RepetitionReward(*penalty)),
            Self::Program(config) => Box::new(ProgramReward::new(config.clone())?),
            #[cfg(feature = "code")]
            Self::Code(config) => Box::new(CodeReward::new(config.clone())?),
            Self::RewardModel(config) => config.load(device)?,
            Self::Judge(config) => judge(config)?,
            Self::Ensemble(options) => {
                let mut ensemble = EnsembleReward::new(options.combine.clone());
                for (i, judge) in options.judges.iter().enumerate() {
                    ensemble = ensemble.with_boxed(judge.build_part(&judge_key(i), device)?);
                }
                Box::new(ensemble)
            }
        })
    }

    /// Makes the function of a part with this path. An error has the path.
    fn build_part(&self, path: &str, device: &Device) -> Result<Box<dyn RewardFunction>> {
        self.build(device).map_err(|error| within(path, error))
    }

    fn check_files(&self) -> Result<()> {
        match self {
            Self::Program(config) => config.check_files(),
            #[cfg(feature = "code")]
            Self::Code(config) => config.check_files(),
            Self::RewardModel(config) => config.check_files(),
            Self::Judge(config) => config.check_files(),
            _ => self.each_part(Self::check_files),
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::Program(config) => config.files(),
            #[cfg(feature = "code")]
            Self::Code(config) => config.files(),
            Self::RewardModel(config) => config.files(),
            _ => {
                let parts = self.parts().into_iter();
                parts.flat_map(|(_, part)| part.files()).collect()
            }
        }
    }

    fn caches(&self) -> Vec<&Path> {
        match self {
            Self::Judge(config) => config.cache.iter().map(PathBuf::as_path).collect(),
            _ => {
                let parts = self.parts().into_iter();
                parts.flat_map(|(_, part)| part.caches()).collect()
            }
        }
    }

    fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        match self {
            Self::RewardModel(config) => vec![("path".to_owned(), config.path_mut())],
            Self::Cosine(options) => models_of_part(CORRECT, &mut options.correct),
            Self::RelativeLength(options) => models_of_part(CORRECT, &mut options.correct),
            Self::Ensemble(options) => {
                let judges = options.judges.iter_mut().enumerate();
                judges
                    .flat_map(|(i, judge)| models_of_part(&judge_key(i), judge))
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    fn check_row(&self, columns: &Value) -> Result<()> {
        match self {
            Self::Numeric(reward) => reward.expected(columns).map(drop),
            #[cfg(feature = "math")]
            Self::Math(reward) => reward.expected(columns).map(drop),
            Self::Exact(reward) => reward.expected(columns).map(drop),
            Self::Json(reward) => reward.expected(columns).map(drop),
            Self::MultipleChoice(reward) => reward.expected(columns).map(drop),
            Self::F1(reward) => reward.expected(columns).map(drop),
            #[cfg(feature = "instructions")]
            Self::Instructions(reward) => reward.expected(columns).map(drop),
            Self::Judge(config) => config.check_row(columns),
            #[cfg(feature = "code")]
            Self::Code(config) => config.check_row(columns),
            _ => {
                let mut parts = self.parts().into_iter();
                parts.try_for_each(|(_, part)| part.check_row(columns))
            }
        }
    }
}

#[cfg(feature = "judge")]
fn judge(config: &JudgeConfig) -> Result<Box<dyn RewardFunction>> {
    Ok(Box::new(crate::JudgeReward::new(config.clone())?))
}

#[cfg(not(feature = "judge"))]
fn judge(_: &JudgeConfig) -> Result<Box<dyn RewardFunction>> {
    anyhow::bail!("kind: judge, must be another: this program was built without the feature judge")
}

/// The paths of the models of a part, with their keys in the whole.
fn models_of_part<'a, M: RewardModelOptions>(
    key: &str,
    part: &'a mut RewardKind<M>,
) -> Vec<(String, &'a mut PathBuf)> {
    let models = part.models_mut().into_iter();
    models
        .map(|(path, model)| (format!("{key}.{path}"), model))
        .collect()
}

/// The key of a judge of an ensemble.
fn judge_key(index: usize) -> String {
    format!("judges[{index}]")
}

fn check_min_score(min_score: f64) -> Result<()> {
    let valid = (min_score as f32).is_finite();
    let value = format_args!("{min_score:?}");
    Ok(validate::check(
        valid,
        "min_score",
        value,
        "be a finite f32",
    )?)
}

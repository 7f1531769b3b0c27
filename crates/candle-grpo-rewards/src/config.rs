//! Reward functions by name.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use candle_grpo_core::rewards::{CosineLength, OverlongPenalty, RepetitionPenalty, ScoreEnsemble};
use candle_grpo_core::validate;
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[cfg(feature = "code")]
use crate::CodeConfig;
#[cfg(feature = "instructions")]
use crate::InstructionsReward;
#[cfg(feature = "math")]
use crate::MathReward;
use crate::options::{RewardInputs, RewardOptions};
use crate::{
    EnsembleReward, ExactReward, F1Reward, JsonReward, JudgeConfig, LengthScale,
    LengthScaledReward, MultipleChoiceReward, NoRewardModel, NumericReward, ProgramConfig,
    RegexOptions, RewardFunction, RewardModelOptions, TagsOptions, WeightedRewards,
};
use candle_grpo_base::within;

/// Key for the reward that another one scales.
const CORRECT: &str = "correct";

/// One reward term in a configuration file: `kind`, that kind's options, `weight` and `name`.
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
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(bound = "M: RewardModelOptions + schemars::JsonSchema")
)]
#[serde(bound = "M: RewardModelOptions")]
pub struct RewardConfig<M = NoRewardModel> {
    /// Name in messages; absent: its kind.
    #[serde(default)]
    pub name: Option<String>,
    /// Factor for its score.
    #[serde(default = "crate::one")]
    pub weight: f64,
    /// The function and its options.
    #[serde(flatten)]
    pub kind: RewardKind<M>,
}

/// Declares [`RewardKind`], the kind names, and the matches over it.
macro_rules! rewards {
    ($($(#[doc = $doc:literal])* $(#[cfg($cfg:meta)])? $name:literal: $kind:ident($options:ty),)*) => {
        /// The reward functions that a configuration can name.
        ///
        /// Prefer a checked answer (`math`, `numeric`, `exact`, `code`) over a judge or a reward
        /// model: it is free, fast and hard to game. Add `tags` or `regex` with a small weight if
        /// the format matters.
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[cfg_attr(
            feature = "schema",
            derive(schemars::JsonSchema),
            schemars(bound = "M: RewardModelOptions + schemars::JsonSchema")
        )]
        #[serde(tag = "kind", bound = "M: RewardModelOptions")]
        #[allow(clippy::large_enum_variant, reason = "a run has a few of them")]
        pub enum RewardKind<M = NoRewardModel> {
            $(
                $(#[doc = $doc])*
                $(#[cfg($cfg)])?
                #[serde(rename = $name)]
                $kind($options),
            )*
        }

        impl<M: RewardModelOptions> RewardKind<M> {
            /// All kind names.
            pub const NAMES: &[&str] = &[$($(#[cfg($cfg)])? $name),*];

            /// Returns the kind's name.
            fn name(&self) -> &'static str {
                match self {
                    $($(#[cfg($cfg)])? Self::$kind(_) => $name,)*
                }
            }

            fn options(&self) -> &dyn RewardOptions {
                match self {
                    $($(#[cfg($cfg)])? Self::$kind(options) => options,)*
                }
            }

            fn options_mut(&mut self) -> &mut dyn RewardOptions {
                match self {
                    $($(#[cfg($cfg)])? Self::$kind(options) => options,)*
                }
            }
        }
    };
}

rewards! {
    /// The right number: [`NumericReward`].
    "numeric": Numeric(NumericReward),
    /// The right value of a mathematical answer: [`MathReward`].
    #[cfg(feature = "math")]
    "math": Math(MathReward),
    /// The right text: [`ExactReward`].
    "exact": Exact(ExactReward),
    /// The letter of the right choice: [`MultipleChoiceReward`].
    "multiple_choice": MultipleChoice(MultipleChoiceReward),
    /// The word overlap with the expected text: [`F1Reward`].
    "f1": F1(F1Reward),
    /// IFEval's instructions: [`InstructionsReward`].
    #[cfg(feature = "instructions")]
    "instructions": Instructions(InstructionsReward),
    /// A regular expression: [`RegexReward`](crate::RegexReward).
    "regex": Regex(RegexOptions),
    /// Tags in their order: [`TagsReward`](crate::TagsReward).
    "tags": Tags(TagsOptions),
    /// A JSON document: [`JsonReward`].
    "json": Json(JsonReward),
    /// A penalty for long completions: [`LengthReward`](crate::LengthReward).
    "length": Length(OverlongPenalty),
    /// A penalty for repetition: [`RepetitionReward`](crate::RepetitionReward).
    "repetition": Repetition(RepetitionPenalty),
    /// Another reward, scaled by a cosine of the length: [`LengthScaledReward`].
    "cosine": Cosine(CosineOptions<M>),
    /// Another reward, scaled by the length within the group: [`LengthScaledReward`].
    "relative_length": RelativeLength(RelativeLengthOptions<M>),
    /// The score of your own program: [`ProgramReward`](crate::ProgramReward).
    "program": Program(ProgramConfig),
    /// The tests that a program passes: [`CodeReward`](crate::CodeReward).
    #[cfg(feature = "code")]
    "code": Code(CodeConfig),
    /// A model's score, which the program provides.
    "reward_model": RewardModel(M),
    /// A judge's score: `JudgeReward`, which needs the feature `judge`.
    "judge": Judge(Box<JudgeConfig>),
    /// Several judges' scores, combined: [`EnsembleReward`].
    "ensemble": Ensemble(EnsembleOptions<M>),
}

/// Options for [`LengthScaledReward`] with [`LengthScale::Cosine`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(bound = "M: RewardModelOptions + schemars::JsonSchema")
)]
#[serde(deny_unknown_fields, bound = "M: RewardModelOptions")]
pub struct CosineOptions<M = NoRewardModel> {
    /// Reward that decides whether an answer is right, with its kind's options.
    pub correct: Box<RewardKind<M>>,
    /// Smallest score for a right answer.
    #[serde(default = "crate::one")]
    pub min_score: f64,
    /// Scores for right and wrong answers, short and long.
    #[serde(default)]
    pub scale: CosineLength,
}

/// Options for [`LengthScaledReward`] with [`LengthScale::Relative`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(bound = "M: RewardModelOptions + schemars::JsonSchema")
)]
#[serde(deny_unknown_fields, bound = "M: RewardModelOptions")]
pub struct RelativeLengthOptions<M = NoRewardModel> {
    /// Reward that decides whether an answer is right, with its kind's options.
    pub correct: Box<RewardKind<M>>,
    /// Smallest score for a right answer.
    #[serde(default = "crate::one")]
    pub min_score: f64,
}

/// Options for [`EnsembleReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(
    feature = "schema",
    derive(schemars::JsonSchema),
    schemars(bound = "M: RewardModelOptions + schemars::JsonSchema")
)]
#[serde(deny_unknown_fields, bound = "M: RewardModelOptions")]
pub struct EnsembleOptions<M = NoRewardModel> {
    /// Judges, each with its kind's options.
    pub judges: Vec<RewardKind<M>>,
    /// Function that combines their scores.
    #[serde(default)]
    pub combine: ScoreEnsemble,
}

impl<M: RewardModelOptions> RewardConfig<M> {
    /// Checks the options. Starts no program and opens no file: see [`Self::check_files`].
    ///
    /// # Errors
    ///
    /// Fails if the weight is not finite, or if an option is invalid.
    pub fn validate(&self) -> Result<()> {
        let weight = self.weight;
        let valid = (weight as f32).is_finite();
        validate::check(
            valid,
            "weight",
            format_args!("{weight:?}"),
            "be a finite f32",
        )?;
        self.kind.options().check()
    }

    /// Checks that everything the reward needs exists: programs, scripts, directories, models and
    /// server keys. A code reward also starts a program in its sandbox.
    ///
    /// # Errors
    ///
    /// Fails if one is missing.
    pub fn check_files(&self) -> Result<()> {
        self.kind.options().check_files()
    }

    /// Returns the files that determine scores: programs, scripts and models.
    pub fn files(&self) -> Vec<PathBuf> {
        self.kind.options().files()
    }

    /// Returns the directories in which the reward caches server replies.
    pub fn caches(&self) -> Vec<&Path> {
        self.kind.options().caches()
    }

    /// Returns the reward models' paths, so that you can replace hub names. Each has its key, such
    /// as `judges[1].path`.
    pub fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        self.kind.options_mut().models_mut()
    }

    /// Builds the weighted sum over `rewards`, starts their programs, and loads their models onto
    /// `device`.
    ///
    /// # Errors
    ///
    /// Fails if `rewards` is empty, an option is invalid, a program cannot be started or a model
    /// cannot be loaded. The error names the key, such as `rewards[0].judges[1].path`.
    pub fn build(rewards: &[Self], device: &Device) -> Result<WeightedRewards> {
        ensure!(
            !rewards.is_empty(),
            "rewards: none, there must be at least one"
        );
        let mut sum = WeightedRewards::new();
        for (i, reward) in rewards.iter().enumerate() {
            let build = || -> Result<Box<dyn RewardFunction>> {
                reward.validate()?;
                reward.kind.options().build(device)
            };
            let function = build().map_err(|error| within(&format!("rewards[{i}]"), error))?;
            sum = sum.with_boxed(&reward.name(), reward.weight as f32, function);
        }
        Ok(sum)
    }

    /// Returns its name or, if it has none, its kind.
    pub fn name(&self) -> String {
        self.name
            .clone()
            .unwrap_or_else(|| self.kind.name().to_owned())
    }

    /// Checks that a row has the columns that the function needs, before a model is loaded.
    ///
    /// # Errors
    ///
    /// Fails if a column is absent or has another type.
    pub fn check_row(&self, columns: &Value) -> Result<()> {
        self.kind
            .options()
            .check_columns(columns)
            .with_context(|| format!("reward {:?}", self.name()))
    }
}

impl<M: RewardModelOptions> RewardOptions for CosineOptions<M> {
    fn validate(&self) -> Result<()> {
        let scale = self.scale.validate();
        scale.map_err(|error| within("scale", error.into()))?;
        check_min_score(self.min_score)
    }

    fn build(&self, device: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(LengthScaledReward::new(
            LengthScale::Cosine(self.scale),
            build_part(&self.correct, CORRECT, device)?,
            self.min_score as f32,
        )))
    }

    fn check_row(&self, _: &Value) -> Result<()> {
        Ok(())
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::from_parts(vec![(CORRECT.to_owned(), self.correct.options())])
    }

    fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        models_of_part(CORRECT, &mut self.correct)
    }
}

impl<M: RewardModelOptions> RewardOptions for RelativeLengthOptions<M> {
    fn validate(&self) -> Result<()> {
        check_min_score(self.min_score)
    }

    fn build(&self, device: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(LengthScaledReward::new(
            LengthScale::Relative,
            build_part(&self.correct, CORRECT, device)?,
            self.min_score as f32,
        )))
    }

    fn check_row(&self, _: &Value) -> Result<()> {
        Ok(())
    }

    fn inputs(&self) -> RewardInputs<'_> {
        RewardInputs::from_parts(vec![(CORRECT.to_owned(), self.correct.options())])
    }

    fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        models_of_part(CORRECT, &mut self.correct)
    }
}

impl<M: RewardModelOptions> RewardOptions for EnsembleOptions<M> {
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

    fn build(&self, device: &Device) -> Result<Box<dyn RewardFunction>> {
        let mut ensemble = EnsembleReward::new(self.combine.clone());
        for (i, judge) in self.judges.iter().enumerate() {
            ensemble = ensemble.with_boxed(build_part(judge, &judge_key(i), device)?);
        }
        Ok(Box::new(ensemble))
    }

    fn check_row(&self, _: &Value) -> Result<()> {
        Ok(())
    }

    fn inputs(&self) -> RewardInputs<'_> {
        let judges = self.judges.iter().enumerate();
        let judges = judges.map(|(i, judge)| (judge_key(i), judge.options()));
        RewardInputs::from_parts(judges.collect())
    }

    fn models_mut(&mut self) -> Vec<(String, &mut PathBuf)> {
        let judges = self.judges.iter_mut().enumerate();
        judges
            .flat_map(|(i, judge)| models_of_part(&judge_key(i), judge))
            .collect()
    }
}

/// Builds a part's function. An error has the part's `key`.
fn build_part<M: RewardModelOptions>(
    part: &RewardKind<M>,
    key: &str,
    device: &Device,
) -> Result<Box<dyn RewardFunction>> {
    let function = part.options().build(device);
    function.map_err(|error| within(key, error))
}

/// Returns a part's model paths, with their keys in the whole.
fn models_of_part<'a, M: RewardModelOptions>(
    key: &str,
    part: &'a mut RewardKind<M>,
) -> Vec<(String, &'a mut PathBuf)> {
    let models = part.options_mut().models_mut().into_iter();
    models
        .map(|(path, model)| (format!("{key}.{path}"), model))
        .collect()
}

/// Returns the key for a judge in an ensemble.
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

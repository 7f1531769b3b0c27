//! Reward functions by name.

use anyhow::{Context, Result, ensure};
use candle_grpo_core::{OverlongPenalty, RepetitionPenalty, ScoreEnsemble};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use super::function::SharedReward;
use super::{
    EnsembleReward, ExactReward, JsonReward, LengthReward, NumericReward, ProgramConfig,
    ProgramReward, RepetitionReward,
};
use crate::{RegexReward, TagsReward, WeightedRewards};

/// One term of the reward, as a configuration file names it: `kind`, the options of that kind, `weight` and `name`.
///
/// ```
/// use candle_grpo_train::RewardConfig;
///
/// let rewards: Vec<RewardConfig> = serde_json::from_str(
///     r#"[{"kind": "numeric", "column": "answer"},
///         {"kind": "tags", "tags": ["think", "answer"], "weight": 0.2, "name": "form"}]"#,
/// )?;
/// let rewards = RewardConfig::build(&rewards)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RewardConfig {
    /// What it is called in messages and figures; absent: its kind.
    pub name: Option<String>,
    /// What multiplies its score.
    pub weight: f64,
    /// Which function, with its options.
    #[serde(flatten)]
    pub kind: RewardKind,
}

/// The reward functions that a configuration can name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum RewardKind {
    /// [`NumericReward`].
    Numeric(NumericReward),
    /// [`ExactReward`].
    Exact(ExactReward),
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
    /// [`ProgramReward`].
    Program(ProgramConfig),
    /// [`EnsembleReward`].
    Ensemble(EnsembleOptions),
}

/// The options of [`RegexReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegexOptions {
    /// The regular expression.
    pub pattern: String,
    /// Whether it must match the completion from beginning to end.
    #[serde(default)]
    pub whole: bool,
}

/// The options of [`TagsReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TagsOptions {
    /// Names of tags, in the order in which they must come.
    pub tags: Vec<String>,
    /// Whether only white space may stand outside them.
    #[serde(default)]
    pub nothing_else: bool,
}

/// The options of [`EnsembleReward`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnsembleOptions {
    /// The judges, each with the options of its kind.
    pub judges: Vec<RewardKind>,
    /// How their scores become one.
    #[serde(default)]
    pub combine: ScoreEnsemble,
}

/// `name` and `weight` are taken out first, so that an unknown option of a kind is an error.
impl<'de> Deserialize<'de> for RewardConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut options = Map::deserialize(deserializer)?;
        let mut take = |key: &str| options.remove(key).unwrap_or(Value::Null);
        let (name, weight) = (take("name"), take("weight"));
        let name = Option::deserialize(name)
            .map_err(|error| D::Error::custom(format!("name: {error}")))?;
        let weight = Option::<f64>::deserialize(weight)
            .map_err(|error| D::Error::custom(format!("weight: {error}")))?;
        let kind = RewardKind::deserialize(Value::Object(options)).map_err(D::Error::custom)?;
        Ok(Self {
            name,
            weight: weight.unwrap_or(1.),
            kind,
        })
    }
}

impl RewardConfig {
    /// The weighted sum of `rewards`, whose terms run side by side.
    ///
    /// Errs if there are none, or one cannot be made from its options.
    pub fn build(rewards: &[Self]) -> Result<WeightedRewards> {
        ensure!(
            !rewards.is_empty(),
            "rewards: none, there must be at least one"
        );
        let mut sum = WeightedRewards::new();
        for reward in rewards {
            let name = reward.name();
            ensure!(
                reward.weight.is_finite(),
                "rewards: {name:?}: weight: {}, must be finite",
                reward.weight
            );
            let function = reward
                .kind
                .build()
                .with_context(|| format!("rewards: {name:?}"))?;
            sum = sum.with_boxed(&name, reward.weight as f32, function);
        }
        Ok(sum)
    }

    /// What it is called.
    pub fn name(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.kind.name())
    }

    /// Errs if a row lacks what the function needs, so that it is known before a model is loaded.
    pub fn check_row(&self, columns: &Value) -> Result<()> {
        self.kind
            .check_row(columns)
            .with_context(|| format!("reward {:?}", self.name()))
    }
}

impl RewardKind {
    fn name(&self) -> String {
        let name = match self {
            Self::Numeric(_) => "numeric",
            Self::Exact(_) => "exact",
            Self::Regex(_) => "regex",
            Self::Tags(_) => "tags",
            Self::Json(_) => "json",
            Self::Length(_) => "length",
            Self::Repetition(_) => "repetition",
            Self::Program(_) => "program",
            Self::Ensemble(_) => "ensemble",
        };
        name.to_owned()
    }

    fn build(&self) -> Result<SharedReward> {
        Ok(match self {
            Self::Numeric(reward) => {
                reward.validate()?;
                Box::new(reward.clone())
            }
            Self::Exact(reward) => Box::new(reward.clone()),
            Self::Regex(options) if options.whole => {
                Box::new(RegexReward::whole(&options.pattern)?)
            }
            Self::Regex(options) => Box::new(RegexReward::search(&options.pattern)?),
            Self::Tags(options) => {
                let tags = TagsReward::new(options.tags.iter().map(String::as_str))?;
                Box::new(if options.nothing_else {
                    tags.nothing_else()
                } else {
                    tags
                })
            }
            Self::Json(reward) => Box::new(reward.clone()),
            Self::Length(penalty) => {
                penalty.validate()?;
                Box::new(LengthReward(*penalty))
            }
            Self::Repetition(penalty) => {
                penalty.of::<u32>(&[])?;
                Box::new(RepetitionReward(*penalty))
            }
            Self::Program(config) => Box::new(ProgramReward::new(config.clone())?),
            Self::Ensemble(options) => {
                ensure!(
                    !options.judges.is_empty(),
                    "judges: none, an ensemble must have at least one"
                );
                if let ScoreEnsemble::Weighted(weights) = &options.combine {
                    ensure!(
                        weights.len() == options.judges.len(),
                        "combine.weighted: {} weights for {} judges, there must be one each",
                        weights.len(),
                        options.judges.len()
                    );
                }
                let mut ensemble = EnsembleReward::new(options.combine.clone());
                for (i, judge) in options.judges.iter().enumerate() {
                    ensemble =
                        ensemble.with_boxed(judge.build().with_context(|| format!("judge {i}"))?);
                }
                Box::new(ensemble)
            }
        })
    }

    fn check_row(&self, columns: &Value) -> Result<()> {
        match self {
            Self::Numeric(reward) => reward.expected(columns).map(drop),
            Self::Exact(reward) => reward.expected(columns).map(drop),
            Self::Json(reward) => reward.expected(columns).map(drop),
            Self::Ensemble(options) => {
                let check = |judge: &Self| judge.check_row(columns);
                options.judges.iter().try_for_each(check)
            }
            _ => Ok(()),
        }
    }
}

//! The published estimators by name, for configuration files.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use crate::advantage::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, Advantages, Compensation, Scale,
    SingleSample,
};

/// An estimator by its name and the options that it has; a name or an option that is not known is an error.
///
/// `name` is one of the variants in snake case. What goes beyond their options is said with `pipeline`, which has all.
///
/// ```
/// use candle_grpo_core::{AdvantageConfig, AdvantagePipeline};
///
/// let config: AdvantageConfig = serde_json::from_str(r#"{"name": "rloo"}"#)?;
/// assert_eq!(config.pipeline(), AdvantagePipeline::rloo());
/// assert!(serde_json::from_str::<AdvantageConfig>(r#"{"name": "rloo", "gama": 1}"#).is_err());
///
/// let config = r#"{"name": "pipeline", "sequence": {"scale": "batch"}, "tokens": {"advantage_clip": 2.0}}"#;
/// let config: AdvantageConfig = serde_json::from_str(config)?;
/// assert_eq!(config.pipeline().sequence, AdvantagePipeline::lite_ppo().sequence);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "name", rename_all = "snake_case", deny_unknown_fields)]
pub enum AdvantageConfig {
    /// [`AdvantagePipeline::grpo`].
    Grpo {
        /// What is divided by.
        #[serde(default)]
        scale: Scale,
        /// Added to the standard deviation.
        #[serde(default = "grpo_epsilon")]
        epsilon: f64,
        /// What a group of one gives.
        #[serde(default)]
        single_sample: SingleSample,
    },
    /// [`AdvantagePipeline::dr_grpo`].
    DrGrpo {},
    /// [`AdvantagePipeline::lite_ppo`].
    LitePpo {},
    /// [`AdvantagePipeline::rloo`].
    Rloo {
        /// What is divided by.
        #[serde(default = "no_scale")]
        scale: Scale,
        /// What a group of one gives.
        #[serde(default)]
        single_sample: SingleSample,
    },
    /// [`AdvantagePipeline::max_rl`].
    MaxRl {},
    /// [`AdvantagePipeline::opo`].
    Opo {},
    /// [`AdvantagePipeline::gpg`].
    Gpg {
        /// How the samples that teach are counted.
        #[serde(default = "by_spread")]
        compensation: Compensation,
    },
    /// [`AdvantagePipeline::pass_at_k`].
    PassAtK {
        /// What is divided by.
        #[serde(default)]
        scale: Scale,
    },
    /// [`AdvantagePipeline::gdpo`].
    Gdpo {
        /// A weight for each component; absent: all 1.
        #[serde(default)]
        reward_weights: Option<Vec<f64>>,
    },
    /// [`AdvantagePipeline::reinforce_plus_plus`].
    ReinforcePlusPlus {
        /// The discount from one token to the next.
        #[serde(default = "one")]
        gamma: f64,
    },
    /// [`AdvantagePipeline::reinforce_plus_plus_baseline`].
    ReinforcePlusPlusBaseline {},
    /// [`AdvantagePipeline::remax`].
    Remax {},
    /// [`AdvantagePipeline::gae`].
    Gae {
        /// The discount from one token to the next.
        #[serde(default = "one")]
        gamma: f64,
        /// How far rewards are trusted over the critic.
        #[serde(default = "gae_lambda")]
        lambda: f64,
    },
    /// [`AdvantagePipeline::optimal_token_baseline`].
    OptimalTokenBaseline {},
    /// [`AdvantagePipeline::multi_turn_optimal_token_baseline`].
    MultiTurnOptimalTokenBaseline {},
    /// [`AdvantagePipeline::reinforce`].
    Reinforce {
        /// The discount from one token to the next.
        #[serde(default = "one")]
        gamma: f64,
    },
    /// [`AdvantagePipeline::reinforce_baseline`].
    ReinforceBaseline {},
    /// [`AdvantagePipeline::flash_reinforce`].
    FlashReinforce {},
    /// Any point of the product.
    Pipeline(Box<AdvantagePipeline>),
}

fn grpo_epsilon() -> f64 {
    1e-6
}

fn no_scale() -> Scale {
    Scale::None
}

fn by_spread() -> Compensation {
    Compensation::GroupsWithSpread
}

fn one() -> f64 {
    1.
}

fn gae_lambda() -> f64 {
    0.95
}

impl Default for AdvantageConfig {
    fn default() -> Self {
        Self::Grpo {
            scale: Scale::Group,
            epsilon: grpo_epsilon(),
            single_sample: SingleSample::Error,
        }
    }
}

impl AdvantageConfig {
    /// Checks the options; the error names the one that is wrong.
    ///
    /// ```
    /// use candle_grpo_core::AdvantageConfig;
    ///
    /// let config: AdvantageConfig = serde_json::from_str(r#"{"name": "gae", "gamma": 7}"#)?;
    /// let error = config.validate().expect_err("a discount is at most 1").to_string();
    /// assert!(error.starts_with("gamma: 7, must be from 0 to 1"));
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    pub fn validate(&self) -> Result<()> {
        self.pipeline().validate()
    }

    /// The point of the product that the name stands for.
    pub fn pipeline(&self) -> AdvantagePipeline {
        match self {
            Self::Grpo {
                scale,
                epsilon,
                single_sample,
            } => AdvantagePipeline::grpo().map_sequence(|sequence| {
                sequence.scale = *scale;
                sequence.group.epsilon = *epsilon;
                sequence.group.single_sample = *single_sample;
            }),
            Self::DrGrpo {} => AdvantagePipeline::dr_grpo(),
            Self::LitePpo {} => AdvantagePipeline::lite_ppo(),
            Self::Rloo {
                scale,
                single_sample,
            } => AdvantagePipeline::rloo().map_sequence(|sequence| {
                sequence.scale = *scale;
                sequence.group.single_sample = *single_sample;
            }),
            Self::MaxRl {} => AdvantagePipeline::max_rl(),
            Self::Opo {} => AdvantagePipeline::opo(),
            Self::Gpg { compensation } => AdvantagePipeline::gpg()
                .map_sequence(|sequence| sequence.group.compensation = *compensation),
            Self::PassAtK { scale } => {
                AdvantagePipeline::pass_at_k().map_sequence(|sequence| sequence.scale = *scale)
            }
            Self::Gdpo { reward_weights } => AdvantagePipeline::gdpo().map_sequence(|sequence| {
                sequence.group.reward_weights.clone_from(reward_weights);
            }),
            Self::ReinforcePlusPlus { gamma } => {
                AdvantagePipeline::reinforce_plus_plus().map_tokens(|tokens| tokens.gamma = *gamma)
            }
            Self::ReinforcePlusPlusBaseline {} => AdvantagePipeline::reinforce_plus_plus_baseline(),
            Self::Remax {} => AdvantagePipeline::remax(),
            Self::Gae { gamma, lambda } => AdvantagePipeline::gae(*gamma, *lambda),
            Self::OptimalTokenBaseline {} => AdvantagePipeline::optimal_token_baseline(),
            Self::MultiTurnOptimalTokenBaseline {} => {
                AdvantagePipeline::multi_turn_optimal_token_baseline()
            }
            Self::Reinforce { gamma } => {
                AdvantagePipeline::reinforce().map_tokens(|tokens| tokens.gamma = *gamma)
            }
            Self::ReinforceBaseline {} => AdvantagePipeline::reinforce_baseline(),
            Self::FlashReinforce {} => AdvantagePipeline::flash_reinforce(),
            Self::Pipeline(pipeline) => (**pipeline).clone(),
        }
    }
}

impl AdvantageEstimator for AdvantageConfig {
    fn estimate(&self, batch: &AdvantageBatch<'_>) -> Result<Advantages> {
        self.pipeline().estimate(batch)
    }
}

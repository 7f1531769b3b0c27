//! Published advantage estimators by name, for configuration files.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::{
    AdvantageBatch, AdvantageEstimator, AdvantagePipeline, Advantages, GroupAdvantage, KlPenalty,
    Scale, SingletonGroup, TokenAdvantage, ZeroSignalScaling,
};
use crate::inputs::Inputs;
use crate::validate::{self, Checked, Name};

/// Name of a published advantage estimator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdvantageName {
    /// [`AdvantagePipeline::grpo`]. The default.
    #[default]
    Grpo,
    /// [`AdvantagePipeline::dr_grpo`].
    DrGrpo,
    /// [`AdvantagePipeline::lite_ppo`].
    LitePpo,
    /// [`AdvantagePipeline::rloo`].
    Rloo,
    /// [`AdvantagePipeline::max_rl`].
    MaxRl,
    /// [`AdvantagePipeline::opo`].
    Opo,
    /// [`AdvantagePipeline::gpg`].
    Gpg,
    /// [`AdvantagePipeline::pass_at_k`].
    PassAtK,
    /// [`AdvantagePipeline::gdpo`].
    Gdpo,
    /// [`AdvantagePipeline::reinforce_plus_plus`].
    ReinforcePlusPlus,
    /// [`AdvantagePipeline::reinforce_plus_plus_baseline`].
    ReinforcePlusPlusBaseline,
    /// [`AdvantagePipeline::remax`].
    Remax,
    /// [`AdvantagePipeline::gae`], with gamma 1 and lambda 0.95.
    Gae,
    /// [`AdvantagePipeline::optimal_token_baseline`].
    OptimalTokenBaseline,
    /// [`AdvantagePipeline::multi_turn_optimal_token_baseline`].
    MultiTurnOptimalTokenBaseline,
    /// [`AdvantagePipeline::reinforce`].
    Reinforce,
    /// [`AdvantagePipeline::reinforce_baseline`].
    ReinforceBaseline,
    /// [`AdvantagePipeline::flash_reinforce`].
    FlashReinforce,
    /// No stages: [`AdvantageConfig::sequence`] and [`AdvantageConfig::tokens`] give them.
    Pipeline,
}

impl AdvantageName {
    /// Returns the stages of the estimator.
    pub fn pipeline(self) -> AdvantagePipeline {
        match self {
            Self::Grpo => AdvantagePipeline::grpo(),
            Self::DrGrpo => AdvantagePipeline::dr_grpo(),
            Self::LitePpo => AdvantagePipeline::lite_ppo(),
            Self::Rloo => AdvantagePipeline::rloo(),
            Self::MaxRl => AdvantagePipeline::max_rl(),
            Self::Opo => AdvantagePipeline::opo(),
            Self::Gpg => AdvantagePipeline::gpg(),
            Self::PassAtK => AdvantagePipeline::pass_at_k(),
            Self::Gdpo => AdvantagePipeline::gdpo(),
            Self::ReinforcePlusPlus => AdvantagePipeline::reinforce_plus_plus(),
            Self::ReinforcePlusPlusBaseline => AdvantagePipeline::reinforce_plus_plus_baseline(),
            Self::Remax => AdvantagePipeline::remax(),
            Self::Gae => AdvantagePipeline::gae(1., 0.95),
            Self::OptimalTokenBaseline => AdvantagePipeline::optimal_token_baseline(),
            Self::MultiTurnOptimalTokenBaseline => {
                AdvantagePipeline::multi_turn_optimal_token_baseline()
            }
            Self::Reinforce => AdvantagePipeline::reinforce(),
            Self::ReinforceBaseline => AdvantagePipeline::reinforce_baseline(),
            Self::FlashReinforce => AdvantagePipeline::flash_reinforce(),
            Self::Pipeline => AdvantagePipeline::default(),
        }
    }
}

/// A published estimator by name, and options that are laid over it. An absent option keeps the
/// value of the estimator.
///
/// ```
/// use candle_grpo_core::{AdvantageConfig, AdvantagePipeline};
///
/// let config: AdvantageConfig = serde_json::from_str(r#"{"name": "rloo", "epsilon": 1e-4}"#)?;
/// let changed = AdvantagePipeline::rloo().map_sequence(|group| group.epsilon = 1e-4);
/// assert_eq!(config.pipeline(), changed);
/// assert!(serde_json::from_str::<AdvantageConfig>(r#"{"name": "rloo", "gama": 1}"#).is_err());
///
/// let config = r#"{"name": "pipeline", "sequence": {"scale": "batch"}, "tokens": {"advantage_clip": 2.0}}"#;
/// let config: AdvantageConfig = serde_json::from_str(config)?;
/// assert_eq!(config.pipeline().sequence, AdvantagePipeline::lite_ppo().sequence);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantageConfig {
    /// Estimator. Default `grpo`.
    pub name: AdvantageName,
    /// Divisor of the stage of sequences. Absent by default.
    pub scale: Option<Scale>,
    /// Epsilon of the stage of sequences. Absent by default.
    pub epsilon: Option<f64>,
    /// Advantage of a sample that is alone in its group. Absent by default.
    pub single_sample: Option<SingletonGroup>,
    /// Factor that compensates for samples without a signal. Absent by default.
    pub compensation: Option<ZeroSignalScaling>,
    /// Weights of the reward components. Absent by default.
    pub reward_weights: Option<Vec<f64>>,
    /// Discount of the stage of tokens. Absent by default.
    pub gamma: Option<f64>,
    /// Lambda of GAE. Absent by default.
    pub lambda: Option<f64>,
    /// KL penalty in the reward: of the stage of tokens or, without one, of the stage of
    /// sequences. Absent by default.
    pub kl_penalty: Option<KlPenalty>,
    /// Stage of sequences, for an estimator that has none. Absent by default.
    pub sequence: Option<GroupAdvantage>,
    /// Stage of tokens, for an estimator that has none. Absent by default.
    pub tokens: Option<TokenAdvantage>,
}

impl From<AdvantageName> for AdvantageConfig {
    fn from(name: AdvantageName) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }
}

impl From<AdvantagePipeline> for AdvantageConfig {
    fn from(AdvantagePipeline { sequence, tokens }: AdvantagePipeline) -> Self {
        Self {
            sequence,
            tokens,
            ..AdvantageName::Pipeline.into()
        }
    }
}

impl AdvantageConfig {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails with the name of the invalid option, or of an option that the estimator lacks.
    ///
    /// ```
    /// use candle_grpo_core::AdvantageConfig;
    ///
    /// let config: AdvantageConfig = serde_json::from_str(r#"{"name": "gae", "gamma": 7}"#)?;
    /// let error = config.validate().expect_err("a discount is at most 1");
    /// assert_eq!(error.to_string(), "gamma: 7, must be from 0 to 1");
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    pub fn validate(&self) -> Checked {
        let named = self.name.pipeline();
        for (field, given, allowed) in [
            (
                "sequence",
                self.sequence.is_some(),
                named.sequence.is_none(),
            ),
            ("tokens", self.tokens.is_some(), named.tokens.is_none()),
        ] {
            validate::check(
                allowed || !given,
                field,
                "given",
                &format!(
                    "be absent for {}, which has this stage (or name it pipeline)",
                    Name(&self.name)
                ),
            )?;
        }
        if let Some(sequence) = &self.sequence {
            sequence.validate().map_err(|e| e.within("sequence"))?;
        }
        if let Some(tokens) = &self.tokens {
            tokens.validate().map_err(|e| e.within("tokens"))?;
        }
        let pipeline = self.pipeline();
        let sequence = pipeline.sequence.is_some();
        let lambda = pipeline
            .tokens
            .is_some_and(|tokens| tokens.lambda.is_some());
        for (field, given, has) in [
            ("scale", self.scale.is_some(), sequence),
            ("epsilon", self.epsilon.is_some(), sequence),
            ("single_sample", self.single_sample.is_some(), sequence),
            ("compensation", self.compensation.is_some(), sequence),
            ("reward_weights", self.reward_weights.is_some(), sequence),
            ("gamma", self.gamma.is_some(), pipeline.tokens.is_some()),
            ("lambda", self.lambda.is_some(), lambda),
        ] {
            let must = format!("be absent for {}, which does not have it", Name(&self.name));
            validate::check(has || !given, field, "given", &must)?;
        }
        pipeline.validate()
    }

    /// Returns the stages of the estimator with the options laid over them.
    pub fn pipeline(&self) -> AdvantagePipeline {
        let named = self.name.pipeline();
        let mut sequence = self.sequence.clone().or(named.sequence);
        let mut tokens = self.tokens.or(named.tokens);
        if let Some(group) = &mut sequence {
            set(&mut group.scale, self.scale);
            set(&mut group.epsilon, self.epsilon);
            set(&mut group.single_sample, self.single_sample);
            set(&mut group.compensation, self.compensation);
            if self.reward_weights.is_some() {
                group.reward_weights.clone_from(&self.reward_weights);
            }
        }
        if let Some(tokens) = &mut tokens {
            set(&mut tokens.gamma, self.gamma);
            tokens.lambda = tokens.lambda.and(self.lambda).or(tokens.lambda);
        }
        let penalty = match (&mut tokens, &mut sequence) {
            (Some(tokens), _) => Some(&mut tokens.kl_penalty),
            (None, Some(group)) => Some(&mut group.kl_penalty),
            (None, None) => None,
        };
        if let (Some(penalty), Some(given)) = (penalty, self.kl_penalty) {
            *penalty = Some(given);
        }
        AdvantagePipeline { sequence, tokens }
    }
}

fn set<T>(to: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *to = value;
    }
}

impl AdvantageEstimator for AdvantageConfig {
    fn estimate(&self, batch: &AdvantageBatch) -> Result<Advantages> {
        self.validate()?;
        self.pipeline().estimate(batch)
    }

    fn needs(&self) -> Inputs {
        self.pipeline().needs()
    }
}

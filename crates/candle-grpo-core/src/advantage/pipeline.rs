//! The composition of an advantage: two stages, or a published estimator with changed options.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::{
    AdvantageBatch, AdvantageEstimator, AdvantageName, Advantages, GroupAdvantage, KlPenalty,
    Scale, SingletonGroup, TokenAdvantage, ZeroSignalScaling,
};
use crate::Invalid;
use crate::inputs::Inputs;
use crate::validate::{self, Checked, Name};

/// An advantage in up to two stages: one of sequences, one of tokens.
///
/// The stage of sequences alone gives advantages `[B]`. The stage of tokens alone gives advantages
/// `[B, T]` and returns, from token rewards or from rewards of sequences at their last tokens. With
/// both, the advantages of sequences are the rewards of the last tokens.
///
/// A published estimator is a constructor. Change its stages with [`Self::map_sequence`] and
/// [`Self::map_tokens`], or build a pipeline from a [`GroupAdvantage`] or a [`TokenAdvantage`].
///
/// ```
/// # use candle_core::{Device, Tensor};
/// use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, AdvantagePipeline};
///
/// let device = Device::Cpu;
/// let rewards = Tensor::new(&[1f32, 0., 1., 0.], &device)?;
/// let mask = Tensor::new(&[[1u8, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], &device)?;
/// let batch = AdvantageBatch::new(&rewards, 4).response_mask(&mask);
///
/// let reinforce = AdvantagePipeline::reinforce_plus_plus().map_tokens(|tokens| tokens.gamma = 0.9);
/// let out = reinforce.estimate(&batch)?;
/// let returns = out.returns.expect("a stage of tokens has returns").to_vec2::<f32>()?;
/// assert!((returns[0][0] - 0.81).abs() < 1e-6);
/// assert!((out.advantages.to_vec2::<f32>()?[0][0] - 0.6087).abs() < 1e-4);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// In a configuration file it is a published estimator by name, with options that change it. An
/// absent option keeps the value of the estimator.
///
/// ```
/// use candle_grpo_core::AdvantagePipeline;
///
/// let read: AdvantagePipeline = serde_json::from_str(r#"{"name": "rloo", "epsilon": 1e-4}"#)?;
/// let changed = AdvantagePipeline::rloo().map_sequence(|group| group.epsilon = 1e-4);
/// assert_eq!(read.pipeline(), changed);
/// assert!(serde_json::from_str::<AdvantagePipeline>(r#"{"name": "rloo", "gama": 1}"#).is_err());
///
/// let read = r#"{"name": "pipeline", "sequence": {"scale": "none"}, "tokens": {"advantage_clip": 2.0}}"#;
/// let read: AdvantagePipeline = serde_json::from_str(read)?;
/// assert_eq!(read.sequence, AdvantagePipeline::dr_grpo().pipeline().sequence);
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantagePipeline {
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

fn no_stage() -> Invalid {
    Invalid::new(
        "sequence and tokens",
        "both absent",
        "be at least one stage",
    )
}

impl From<AdvantageName> for AdvantagePipeline {
    fn from(name: AdvantageName) -> Self {
        Self {
            name,
            ..Self::default()
        }
    }
}

impl From<GroupAdvantage> for AdvantagePipeline {
    /// The stage of sequences alone.
    fn from(sequence: GroupAdvantage) -> Self {
        Self {
            sequence: Some(sequence),
            ..AdvantageName::Pipeline.into()
        }
    }
}

impl From<TokenAdvantage> for AdvantagePipeline {
    /// The stage of tokens alone.
    fn from(tokens: TokenAdvantage) -> Self {
        Self {
            tokens: Some(tokens),
            ..AdvantageName::Pipeline.into()
        }
    }
}

impl AdvantagePipeline {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails with the name of the invalid option, or of an option that the estimator lacks.
    ///
    /// ```
    /// use candle_grpo_core::AdvantagePipeline;
    ///
    /// let read: AdvantagePipeline = serde_json::from_str(r#"{"name": "gae", "gamma": 7}"#)?;
    /// let error = read.validate().expect_err("a discount is at most 1");
    /// assert_eq!(error.to_string(), "gamma: 7, must be from 0 to 1");
    /// # Ok::<(), serde_json::Error>(())
    /// ```
    pub fn validate(&self) -> Checked {
        let (sequence, tokens) = self.name.stages();
        for (field, given, allowed) in [
            ("sequence", self.sequence.is_some(), sequence.is_none()),
            ("tokens", self.tokens.is_some(), tokens.is_none()),
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
        let Self {
            sequence, tokens, ..
        } = self.pipeline();
        let lambda = tokens.is_some_and(|tokens| tokens.lambda.is_some());
        for (field, given, has) in [
            ("scale", self.scale.is_some(), sequence.is_some()),
            ("epsilon", self.epsilon.is_some(), sequence.is_some()),
            (
                "single_sample",
                self.single_sample.is_some(),
                sequence.is_some(),
            ),
            (
                "compensation",
                self.compensation.is_some(),
                sequence.is_some(),
            ),
            (
                "reward_weights",
                self.reward_weights.is_some(),
                sequence.is_some(),
            ),
            ("gamma", self.gamma.is_some(), tokens.is_some()),
            ("lambda", self.lambda.is_some(), lambda),
        ] {
            let must = format!("be absent for {}, which does not have it", Name(&self.name));
            validate::check(has || !given, field, "given", &must)?;
        }
        if sequence.is_none() && tokens.is_none() {
            return Err(no_stage());
        }
        if let Some(sequence) = &sequence {
            sequence.validate()?;
        }
        match &tokens {
            Some(tokens) => tokens.validate(),
            None => Ok(()),
        }
    }

    /// Returns the same advantage with the name `pipeline`: its stages have all options, and the
    /// options beside them are absent.
    #[must_use]
    pub fn pipeline(&self) -> Self {
        let named = self.name.stages();
        let mut sequence = self.sequence.clone().or(named.0);
        let mut tokens = self.tokens.or(named.1);
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
        Self {
            sequence,
            tokens,
            ..AdvantageName::Pipeline.into()
        }
    }

    /// Changes the stage of sequences, if there is one. Returns a [`Self::pipeline`].
    #[must_use]
    pub fn map_sequence(self, change: impl FnOnce(&mut GroupAdvantage)) -> Self {
        let mut pipeline = self.pipeline();
        if let Some(sequence) = &mut pipeline.sequence {
            change(sequence);
        }
        pipeline
    }

    /// Changes the stage of tokens, if there is one. Returns a [`Self::pipeline`].
    #[must_use]
    pub fn map_tokens(self, change: impl FnOnce(&mut TokenAdvantage)) -> Self {
        let mut pipeline = self.pipeline();
        if let Some(tokens) = &mut pipeline.tokens {
            change(tokens);
        }
        pipeline
    }

    /// Adds or replaces the stage of tokens. Returns a [`Self::pipeline`].
    #[must_use]
    pub fn then(self, tokens: TokenAdvantage) -> Self {
        Self {
            tokens: Some(tokens),
            ..self.pipeline()
        }
    }

    /// `(r - mean of the group) / (std of the group + epsilon)` (<https://arxiv.org/abs/2402.03300>), with
    /// [`DEFAULT_EPSILON`](crate::advantage::DEFAULT_EPSILON). OpenRLHF's `group_norm` has an
    /// epsilon of 1e-9.
    pub fn grpo() -> Self {
        AdvantageName::Grpo.into()
    }

    /// `r - mean of the group` (<https://arxiv.org/abs/2503.20783>), for a loss that divides by a constant.
    pub fn dr_grpo() -> Self {
        AdvantageName::DrGrpo.into()
    }

    /// `r - mean of the others` (<https://arxiv.org/abs/2402.14740>).
    pub fn rloo() -> Self {
        AdvantageName::Rloo.into()
    }

    /// `a (r - mean of the group)`, with a the inverse of the fraction of samples whose group has
    /// spread (<https://arxiv.org/abs/2504.02546>).
    pub fn gpg() -> Self {
        AdvantageName::Gpg.into()
    }

    /// `(best - second) / (std of the group + epsilon)` for the best of each group, 0 for the
    /// others (<https://arxiv.org/abs/2503.19595>), with
    /// [`DEFAULT_EPSILON`](crate::advantage::DEFAULT_EPSILON). A group with two best samples gets
    /// 0.
    pub fn pass_at_k() -> Self {
        AdvantageName::PassAtK.into()
    }

    /// Each component normalized in its group, their weighted sum normalized over the batch
    /// (<https://arxiv.org/abs/2601.05242>), with the epsilons of TRL.
    ///
    /// verl whitens the sums over all tokens instead: remove `normalize` and add a stage of tokens.
    pub fn gdpo() -> Self {
        AdvantageName::Gdpo.into()
    }

    /// Returns, whitened over all tokens (<https://arxiv.org/abs/2501.03262>). The KL penalty of the paper is
    /// [`TokenAdvantage::kl_penalty`].
    pub fn reinforce_plus_plus() -> Self {
        AdvantageName::ReinforcePlusPlus.into()
    }

    /// `r - mean of the group`, whitened over all tokens (<https://arxiv.org/abs/2501.03262>).
    pub fn reinforce_plus_plus_baseline() -> Self {
        AdvantageName::ReinforcePlusPlusBaseline.into()
    }

    /// The return of each token minus the reward of a greedy completion (<https://arxiv.org/abs/2310.10505>). Needs
    /// `reward_baselines`.
    pub fn remax() -> Self {
        AdvantageName::Remax.into()
    }

    /// Generalized advantages (<https://arxiv.org/abs/1506.02438>), whitened as in verl. Needs `values`.
    pub fn gae(gamma: f64, lambda: f64) -> Self {
        Self {
            gamma: Some(gamma),
            lambda: Some(lambda),
            ..AdvantageName::Gae.into()
        }
    }

    /// Returns minus the minimum-variance baseline of each token; see
    /// [`OptimalTokenBaseline`](crate::advantage::OptimalTokenBaseline). Needs `old_log_probs` and
    /// `sum_of_squared_probs`.
    pub fn optimal_token_baseline() -> Self {
        AdvantageName::OptimalTokenBaseline.into()
    }

    /// [`Self::optimal_token_baseline`] for sequences with turns, whose tokens are aligned by the
    /// number of generated tokens before them.
    pub fn multi_turn_optimal_token_baseline() -> Self {
        AdvantageName::MultiTurnOptimalTokenBaseline.into()
    }

    /// OpenRLHF's `reinforce`: returns, normalized over all tokens by mean and population
    /// deviation.
    pub fn reinforce() -> Self {
        AdvantageName::Reinforce.into()
    }

    /// OpenRLHF's `reinforce_baseline`: `r - mean of the group`, then as [`Self::reinforce`].
    pub fn reinforce_baseline() -> Self {
        AdvantageName::ReinforceBaseline.into()
    }
}

fn set<T>(to: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *to = value;
    }
}

impl AdvantageEstimator for AdvantagePipeline {
    fn estimate(&self, batch: &AdvantageBatch) -> Result<Advantages> {
        self.validate()?;
        let Self {
            sequence, tokens, ..
        } = self.pipeline();
        match (sequence, tokens) {
            (Some(sequence), None) => sequence.estimate(batch),
            (None, Some(tokens)) => tokens.estimate(batch),
            (Some(sequence), Some(tokens)) => {
                let rewards = batch.sequence_rewards()?;
                let sequences = sequence.estimate_from(&rewards, batch)?;
                let mask = batch.mask()?;
                mask.check_sequences("rewards", &sequences.advantages)?;
                let placed = mask.place_on_last(&sequences.advantages)?;
                let mut out = tokens.estimate_from(&placed, rewards.result_dtype, batch)?;
                out.metrics.extend(sequences.metrics);
                Ok(out)
            }
            (None, None) => Err(no_stage().into()),
        }
    }

    fn needs(&self) -> Inputs {
        let Self {
            sequence, tokens, ..
        } = self.pipeline();
        let sequence = sequence.as_ref().map(GroupAdvantage::needs);
        let tokens = tokens.as_ref().map(TokenAdvantage::needs);
        sequence.unwrap_or_default() | tokens.unwrap_or_default()
    }
}

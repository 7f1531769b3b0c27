//! Advantage composition: two stages, or a published estimator with changed options.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::{
    AdvantageBatch, AdvantageEstimator, AdvantageName, Advantages, GroupAdvantage, KlPenalty,
    Scale, SingletonGroup, TokenAdvantage, ZeroSignalScaling,
};
use crate::Invalid;
use crate::inputs::Inputs;
use crate::validate::{self, Checked, Name};

/// An advantage estimator with a sequence stage, a token stage, or both.
///
/// - A sequence stage alone gives advantages `[B]`.
/// - A token stage alone gives advantages `[B, T]` and returns. Its rewards are the token rewards,
///   or each sequence reward at the last token.
/// - With both stages, the sequence advantages become the rewards at the last tokens.
///
/// Each published estimator is a constructor: try [`Self::grpo`] first. To change one, use
/// [`Self::map_sequence`] and [`Self::map_tokens`]. To build a pipeline from scratch, convert a
/// [`GroupAdvantage`] or a [`TokenAdvantage`].
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
/// In a configuration file, you write an estimator's name and the options that you change. An
/// absent option keeps the estimator's value.
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AdvantagePipeline {
    /// Estimator. Default `grpo`.
    pub name: AdvantageName,
    /// Divisor in the sequence stage. Absent by default.
    pub scale: Option<Scale>,
    /// Epsilon in the sequence stage. Absent by default.
    pub epsilon: Option<f64>,
    /// Advantage for a sample that is alone in its group. Absent by default.
    pub single_sample: Option<SingletonGroup>,
    /// Factor that compensates for samples without a learning signal. Absent by default.
    pub compensation: Option<ZeroSignalScaling>,
    /// Weights for the reward components. Absent by default.
    pub reward_weights: Option<Vec<f64>>,
    /// Discount in the token stage. Absent by default.
    pub gamma: Option<f64>,
    /// GAE's lambda. Absent by default.
    pub lambda: Option<f64>,
    /// KL penalty in the reward: in the token stage or, if there is none, in the sequence stage.
    /// Absent by default.
    pub kl_penalty: Option<KlPenalty>,
    /// Sequence stage, for an estimator without one. Absent by default.
    pub sequence: Option<GroupAdvantage>,
    /// Token stage, for an estimator without one. Absent by default.
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
    /// Creates a pipeline with a sequence stage only.
    fn from(sequence: GroupAdvantage) -> Self {
        Self {
            sequence: Some(sequence),
            ..AdvantageName::Pipeline.into()
        }
    }
}

impl From<TokenAdvantage> for AdvantagePipeline {
    /// Creates a pipeline with a token stage only.
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
    /// Fails if an option is invalid or if the estimator lacks it; the error names the option.
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

    /// Returns an equal pipeline whose name is `pipeline`: its stages hold all options, and the
    /// shortcut options are absent.
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

    /// Changes the sequence stage, if there is one. Returns a [`Self::pipeline`].
    #[must_use]
    pub fn map_sequence(self, change: impl FnOnce(&mut GroupAdvantage)) -> Self {
        let mut pipeline = self.pipeline();
        if let Some(sequence) = &mut pipeline.sequence {
            change(sequence);
        }
        pipeline
    }

    /// Changes the token stage, if there is one. Returns a [`Self::pipeline`].
    #[must_use]
    pub fn map_tokens(self, change: impl FnOnce(&mut TokenAdvantage)) -> Self {
        let mut pipeline = self.pipeline();
        if let Some(tokens) = &mut pipeline.tokens {
            change(tokens);
        }
        pipeline
    }

    /// Adds or replaces the token stage. Returns a [`Self::pipeline`].
    #[must_use]
    pub fn then(self, tokens: TokenAdvantage) -> Self {
        Self {
            tokens: Some(tokens),
            ..self.pipeline()
        }
    }

    /// GRPO: `(r - group mean) / (group std + epsilon)` (<https://arxiv.org/abs/2402.03300>), with
    /// [`DEFAULT_EPSILON`](crate::advantage::DEFAULT_EPSILON). OpenRLHF's `group_norm` uses epsilon
    /// 1e-9.
    pub fn grpo() -> Self {
        AdvantageName::Grpo.into()
    }

    /// Dr. GRPO: `r - group mean` (<https://arxiv.org/abs/2503.20783>), for a loss that divides by
    /// a constant.
    pub fn dr_grpo() -> Self {
        AdvantageName::DrGrpo.into()
    }

    /// RLOO: `r - mean of the others` (<https://arxiv.org/abs/2402.14740>).
    pub fn rloo() -> Self {
        AdvantageName::Rloo.into()
    }

    /// GPG: `a (r - group mean)`, where `1 / a` is the fraction of samples whose group has unequal
    /// rewards (<https://arxiv.org/abs/2504.02546>).
    pub fn gpg() -> Self {
        AdvantageName::Gpg.into()
    }

    /// Pass@k: `(best - second best) / (group std + epsilon)` for each group's best sample, 0 for
    /// the others (<https://arxiv.org/abs/2503.19595>). Epsilon is
    /// [`DEFAULT_EPSILON`](crate::advantage::DEFAULT_EPSILON). If two samples tie for the best, the
    /// group gets 0.
    pub fn pass_at_k() -> Self {
        AdvantageName::PassAtK.into()
    }

    /// GDPO: normalizes each component in its group, then the weighted sum over the batch
    /// (<https://arxiv.org/abs/2601.05242>), with TRL's epsilons.
    ///
    /// verl whitens the sums over all tokens instead. For that, remove `normalize` and add a token
    /// stage.
    pub fn gdpo() -> Self {
        AdvantageName::Gdpo.into()
    }

    /// REINFORCE++: returns, whitened over all tokens (<https://arxiv.org/abs/2501.03262>). For the
    /// paper's KL penalty, set [`TokenAdvantage::kl_penalty`].
    pub fn reinforce_plus_plus() -> Self {
        AdvantageName::ReinforcePlusPlus.into()
    }

    /// REINFORCE++-baseline: `r - group mean`, whitened over all tokens
    /// (<https://arxiv.org/abs/2501.03262>).
    pub fn reinforce_plus_plus_baseline() -> Self {
        AdvantageName::ReinforcePlusPlusBaseline.into()
    }

    /// ReMax: each token's return minus the reward of a greedy completion
    /// (<https://arxiv.org/abs/2310.10505>). Needs `reward_baselines`.
    pub fn remax() -> Self {
        AdvantageName::Remax.into()
    }

    /// GAE (<https://arxiv.org/abs/1506.02438>), whitened as in verl. Needs `values`.
    pub fn gae(gamma: f64, lambda: f64) -> Self {
        Self {
            gamma: Some(gamma),
            lambda: Some(lambda),
            ..AdvantageName::Gae.into()
        }
    }

    /// Returns minus the minimum-variance baseline at each token: see
    /// [`OptimalTokenBaseline`](crate::advantage::OptimalTokenBaseline). Needs `old_log_probs` and
    /// `sum_of_squared_probs`.
    pub fn optimal_token_baseline() -> Self {
        AdvantageName::OptimalTokenBaseline.into()
    }

    /// [`Self::optimal_token_baseline`] for multi-turn sequences: tokens are aligned by the number
    /// of generated tokens before them.
    pub fn multi_turn_optimal_token_baseline() -> Self {
        AdvantageName::MultiTurnOptimalTokenBaseline.into()
    }

    /// OpenRLHF's `reinforce`: returns, normalized over all tokens with their mean and population
    /// standard deviation.
    pub fn reinforce() -> Self {
        AdvantageName::Reinforce.into()
    }

    /// OpenRLHF's `reinforce_baseline`: `r - group mean`, then [`Self::reinforce`].
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

//! Published advantage estimators as configurations of two stages.

use candle_core::Result;
use serde::{Deserialize, Serialize};

use super::{
    AdvantageBatch, AdvantageEstimator, Advantages, Baseline, ComponentOrder, GroupAdvantage,
    OptimalTokenBaseline, Scale, TokenAdvantage, TokenAlignment, TokenBaseline, Whitening,
    ZeroSignalScaling,
};
use crate::inputs::Inputs;
use crate::validate::{Checked, Invalid};

/// Advantages in up to two stages: one of sequences, one of tokens.
///
/// The stage of sequences alone gives advantages `[B]`. The stage of tokens alone gives advantages
/// `[B, T]` and returns, from token rewards or from rewards of sequences at their last tokens. With
/// both, the advantages of sequences are the rewards of the last tokens. Every constructor is one
/// configuration; its parts can be changed afterwards.
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
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantagePipeline {
    /// Stage of sequences. Absent by default.
    pub sequence: Option<GroupAdvantage>,
    /// Stage of tokens. Absent by default.
    pub tokens: Option<TokenAdvantage>,
}

/// A stage of tokens that repeats the advantage of a sequence at its tokens and whitens over all
/// tokens.
fn whitened(whitening: Whitening) -> TokenAdvantage {
    TokenAdvantage {
        whiten_advantages: true,
        whitening,
        ..TokenAdvantage::default()
    }
}

fn no_stage() -> Invalid {
    Invalid::new(
        "sequence and tokens",
        "both absent",
        "be at least one stage",
    )
}

impl From<GroupAdvantage> for AdvantagePipeline {
    /// The stage of sequences alone.
    fn from(sequence: GroupAdvantage) -> Self {
        Self {
            sequence: Some(sequence),
            tokens: None,
        }
    }
}

impl From<TokenAdvantage> for AdvantagePipeline {
    /// The stage of tokens alone.
    fn from(tokens: TokenAdvantage) -> Self {
        Self {
            sequence: None,
            tokens: Some(tokens),
        }
    }
}

impl AdvantagePipeline {
    /// Checks the options of both stages.
    ///
    /// # Errors
    ///
    /// Fails with the name of the invalid option, or if there is no stage.
    pub fn validate(&self) -> Checked {
        if self.sequence.is_none() && self.tokens.is_none() {
            return Err(no_stage());
        }
        if let Some(sequence) = &self.sequence {
            sequence.validate()?;
        }
        match &self.tokens {
            Some(tokens) => tokens.validate(),
            None => Ok(()),
        }
    }

    /// Changes the stage of sequences, if there is one.
    pub fn map_sequence(mut self, change: impl FnOnce(&mut GroupAdvantage)) -> Self {
        if let Some(sequence) = &mut self.sequence {
            change(sequence);
        }
        self
    }

    /// Changes the stage of tokens, if there is one.
    pub fn map_tokens(mut self, change: impl FnOnce(&mut TokenAdvantage)) -> Self {
        if let Some(tokens) = &mut self.tokens {
            change(tokens);
        }
        self
    }

    /// Adds or replaces the stage of tokens.
    pub fn then(mut self, tokens: TokenAdvantage) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// `(r - mean of the group) / (std of the group + 1e-6)` (<https://arxiv.org/abs/2402.03300>). OpenRLHF's `group_norm`
    /// has an epsilon of 1e-9.
    pub fn grpo() -> Self {
        GroupAdvantage::grpo().into()
    }

    /// `r - mean of the group` (<https://arxiv.org/abs/2503.20783>), for a loss that divides by a constant.
    pub fn dr_grpo() -> Self {
        GroupAdvantage::centered(Baseline::GroupMean).into()
    }

    /// `(r - mean of the group) / (std of the batch + 1e-6)` (<https://arxiv.org/abs/2508.08221>).
    pub fn lite_ppo() -> Self {
        Self::grpo().map_sequence(|group| group.scale = Scale::Batch)
    }

    /// `r - mean of the others` (<https://arxiv.org/abs/2402.14740>).
    pub fn rloo() -> Self {
        GroupAdvantage::rloo().into()
    }

    /// `(r - mean of the group) / (mean of the group + 1e-6)`, for rewards that are not negative.
    pub fn max_rl() -> Self {
        Self::grpo().map_sequence(|group| group.scale = Scale::GroupMean)
    }

    /// `r - length-weighted mean of the group` (<https://arxiv.org/abs/2505.23585>). Needs `response_mask`.
    pub fn opo() -> Self {
        GroupAdvantage::centered(Baseline::LengthWeighted).into()
    }

    /// `a (r - mean of the group)`, with a the inverse of the fraction of samples whose group has
    /// spread (<https://arxiv.org/abs/2504.02546>).
    pub fn gpg() -> Self {
        Self::dr_grpo()
            .map_sequence(|group| group.compensation = ZeroSignalScaling::GroupsWithSpread)
    }

    /// `(best - second) / (std of the group + 1e-6)` for the best of each group, 0 for the others
    /// (<https://arxiv.org/abs/2503.19595>). A group with two best samples gets 0.
    pub fn pass_at_k() -> Self {
        Self::grpo().map_sequence(|group| group.baseline = Baseline::BestOfOthers)
    }

    /// Each component normalized in its group, their weighted sum normalized over the batch
    /// (<https://arxiv.org/abs/2601.05242>), with the epsilons of TRL.
    ///
    /// verl whitens the sums over all tokens instead: remove `normalize` and add a stage of tokens.
    pub fn gdpo() -> Self {
        Self::grpo().map_sequence(|group| {
            group.epsilon = 1e-4;
            group.components = ComponentOrder::NormalizeThenSum;
            group.normalize = Some(Whitening::trl());
        })
    }

    /// Returns, whitened over all tokens (<https://arxiv.org/abs/2501.03262>). The KL penalty of the paper is
    /// [`TokenAdvantage::kl_penalty`].
    pub fn reinforce_plus_plus() -> Self {
        whitened(Whitening::default()).into()
    }

    /// `r - mean of the group`, whitened over all tokens (<https://arxiv.org/abs/2501.03262>).
    pub fn reinforce_plus_plus_baseline() -> Self {
        Self::dr_grpo().then(whitened(Whitening::default()))
    }

    /// The return of each token minus the reward of a greedy completion (<https://arxiv.org/abs/2310.10505>). Needs
    /// `reward_baselines`.
    pub fn remax() -> Self {
        Self::with_token_baseline(TokenBaseline::Given)
    }

    /// Generalized advantages (<https://arxiv.org/abs/1506.02438>), whitened as in verl. Needs `values`.
    pub fn gae(gamma: f64, lambda: f64) -> Self {
        TokenAdvantage {
            gamma,
            lambda: Some(lambda),
            ..whitened(Whitening::default())
        }
        .into()
    }

    /// Returns minus the minimum-variance baseline of each token; see [`OptimalTokenBaseline`].
    /// Needs `old_log_probs` and `sum_of_squared_probs`.
    pub fn optimal_token_baseline() -> Self {
        Self::with_token_baseline(TokenBaseline::OptimalToken(OptimalTokenBaseline::default()))
    }

    /// [`Self::optimal_token_baseline`] for sequences with turns, whose tokens are aligned by the
    /// number of generated tokens before them.
    pub fn multi_turn_optimal_token_baseline() -> Self {
        Self::with_token_baseline(TokenBaseline::OptimalToken(OptimalTokenBaseline {
            alignment: TokenAlignment::Generated,
            ..OptimalTokenBaseline::default()
        }))
    }

    /// OpenRLHF's `reinforce`: returns, normalized over all tokens by mean and population
    /// deviation.
    pub fn reinforce() -> Self {
        whitened(Whitening::openrlhf()).into()
    }

    /// OpenRLHF's `reinforce_baseline`: `r - mean of the group`, then as [`Self::reinforce`].
    pub fn reinforce_baseline() -> Self {
        Self::dr_grpo().then(whitened(Whitening::openrlhf()))
    }

    /// OpenRLHF's `flash_reinforce`: `r - mean of the batch`.
    pub fn flash_reinforce() -> Self {
        GroupAdvantage::centered(Baseline::BatchMean).into()
    }

    fn with_token_baseline(baseline: TokenBaseline) -> Self {
        TokenAdvantage {
            baseline,
            ..TokenAdvantage::default()
        }
        .into()
    }
}

impl AdvantageEstimator for AdvantagePipeline {
    fn estimate(&self, batch: &AdvantageBatch) -> Result<Advantages> {
        self.validate()?;
        match (&self.sequence, &self.tokens) {
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
        let sequence = self.sequence.as_ref().map(GroupAdvantage::needs);
        let tokens = self.tokens.as_ref().map(TokenAdvantage::needs);
        sequence.unwrap_or_default() | tokens.unwrap_or_default()
    }
}

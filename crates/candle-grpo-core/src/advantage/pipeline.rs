//! Published ways to estimate advantages, as points of one product.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::advantage::{
    AdvantageBatch, AdvantageEstimator, Advantages, Baseline, Compensation, Components,
    GroupAdvantage, OptimalTokenBaseline, Scale, SequenceAdvantage, TokenAlignment, TokenBaseline,
    TokenShaping, Whitening,
};

/// From rewards to advantages in at most two stages: one of sequences, one of tokens.
///
/// With the first alone, advantages are `[B]`. With the second alone, the rewards of tokens, or those of sequences at their
/// last token, become advantages `[B, T]` and returns. With both, what the first gives is the reward at the last token in
/// the second. Every constructor is one point of this product; its parts can be changed afterwards.
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
/// let returns = out.returns.expect("it is one of tokens").to_vec2::<f32>()?;
/// assert!((returns[0][0] - 0.81).abs() < 1e-6);
/// assert!((out.advantages.to_vec2::<f32>()?[0][0] - 0.6087).abs() < 1e-4);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdvantagePipeline {
    /// The stage of sequences.
    pub sequence: Option<SequenceAdvantage>,
    /// The stage of tokens.
    pub tokens: Option<TokenShaping>,
}

const NO_STAGE: &str = "sequence and tokens: absent, there must be one stage at least";

/// A stage of tokens that only spreads the advantage of a sequence over its tokens and whitens over all of them.
fn whitened_tokens(whitening: Whitening) -> TokenShaping {
    TokenShaping {
        whiten_advantages: true,
        whitening,
        ..TokenShaping::default()
    }
}

impl AdvantagePipeline {
    /// Checks the options of its stages; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        if self.sequence.is_none() && self.tokens.is_none() {
            bail!("{NO_STAGE}");
        }
        if let Some(sequence) = &self.sequence {
            sequence.validate()?;
        }
        if let Some(tokens) = &self.tokens {
            tokens.validate()?;
        }
        Ok(())
    }

    /// The stage of sequences alone.
    pub fn of_sequences(group: GroupAdvantage, scale: Scale) -> Self {
        Self {
            sequence: Some(SequenceAdvantage::new(group, scale)),
            tokens: None,
        }
    }

    /// The stage of tokens alone.
    pub fn of_tokens(tokens: TokenShaping) -> Self {
        Self {
            sequence: None,
            tokens: Some(tokens),
        }
    }

    /// Sequences with that baseline, not divided by anything.
    fn centered(baseline: Baseline) -> Self {
        let group = GroupAdvantage {
            baseline,
            ..GroupAdvantage::default()
        };
        Self::of_sequences(group, Scale::None)
    }

    /// Changes the stage of sequences, if there is one.
    pub fn map_sequence(mut self, change: impl FnOnce(&mut SequenceAdvantage)) -> Self {
        if let Some(sequence) = &mut self.sequence {
            change(sequence);
        }
        self
    }

    /// Changes the stage of tokens, if there is one.
    pub fn map_tokens(mut self, change: impl FnOnce(&mut TokenShaping)) -> Self {
        if let Some(tokens) = &mut self.tokens {
            change(tokens);
        }
        self
    }

    /// This pipeline with `tokens` as its stage of tokens.
    pub fn then(mut self, tokens: TokenShaping) -> Self {
        self.tokens = Some(tokens);
        self
    }

    /// `(r - mean of the group) / (std of the group + 1e-6)` (<https://arxiv.org/abs/2402.03300>); OpenRLHF's `group_norm`
    /// with an epsilon of 1e-9.
    pub fn grpo() -> Self {
        Self::of_sequences(GroupAdvantage::grpo(), Scale::Group)
    }

    /// `r - mean of the group` (<https://arxiv.org/abs/2503.20783>), to be used with a loss that divides by a constant.
    pub fn dr_grpo() -> Self {
        Self::centered(Baseline::GroupMean)
    }

    /// `(r - mean of the group) / (std of the batch + 1e-6)` (<https://arxiv.org/abs/2508.08221>).
    pub fn lite_ppo() -> Self {
        Self::of_sequences(GroupAdvantage::grpo(), Scale::Batch)
    }

    /// `r - mean of the others` (<https://arxiv.org/abs/2402.14740>).
    pub fn rloo() -> Self {
        Self::centered(Baseline::LeaveOneOut)
    }

    /// `(r - mean of the group) / (mean of the group + 1e-6)`, for rewards that are not negative.
    pub fn max_rl() -> Self {
        Self::of_sequences(GroupAdvantage::grpo(), Scale::GroupMean)
    }

    /// `r - length-weighted mean of the group` (<https://arxiv.org/abs/2505.23585>). Needs `response_mask`.
    pub fn opo() -> Self {
        Self::centered(Baseline::LengthWeighted)
    }

    /// `a (r - mean of the group)`, with a the inverse of the part of the samples whose group has spread
    /// (<https://arxiv.org/abs/2504.02546>).
    pub fn gpg() -> Self {
        let group = GroupAdvantage {
            compensation: Compensation::GroupsWithSpread,
            ..GroupAdvantage::default()
        };
        Self::of_sequences(group, Scale::None)
    }

    /// `(best - second) / (std of the group + 1e-6)` for the best of each group, 0 for the others
    /// (<https://arxiv.org/abs/2503.19595>). A group with two best answers gives no signal at all.
    pub fn pass_at_k() -> Self {
        let group = GroupAdvantage {
            baseline: Baseline::BestOfOthers,
            ..GroupAdvantage::default()
        };
        Self::of_sequences(group, Scale::Group)
    }

    /// Each component normalised in its group, the weighted sum of these normalised over the batch
    /// (<https://arxiv.org/abs/2601.05242>), with the epsilons of TRL. verl whitens the sums over all tokens instead: take
    /// `normalize` away and add a stage of tokens.
    pub fn gdpo() -> Self {
        let group = GroupAdvantage {
            epsilon: 1e-4,
            components: Components::NormalizeThenSum,
            normalize: Some(Whitening::trl()),
            ..GroupAdvantage::default()
        };
        Self::of_sequences(group, Scale::Group)
    }

    /// Returns, whitened over all tokens (<https://arxiv.org/abs/2501.03262>); the KL penalty of the paper is
    /// [`TokenShaping::kl_penalty`].
    pub fn reinforce_plus_plus() -> Self {
        Self::of_tokens(whitened_tokens(Whitening::default()))
    }

    /// `r - mean of the group`, whitened over all tokens (<https://arxiv.org/abs/2501.03262>).
    pub fn reinforce_plus_plus_baseline() -> Self {
        Self::dr_grpo().then(whitened_tokens(Whitening::default()))
    }

    /// The return of each token less the reward of a greedy answer (<https://arxiv.org/abs/2310.10505>). Needs
    /// `reward_baselines`.
    pub fn remax() -> Self {
        Self::of_tokens(TokenShaping {
            baseline: TokenBaseline::Given,
            ..TokenShaping::default()
        })
    }

    /// Generalised advantages (<https://arxiv.org/abs/1506.02438>), whitened as verl has them. Needs `values`.
    pub fn gae(gamma: f64, lambda: f64) -> Self {
        Self::of_tokens(TokenShaping {
            gamma,
            lambda: Some(lambda),
            ..whitened_tokens(Whitening::default())
        })
    }

    /// Returns less the baseline that leaves the least variance at each token; see [`OptimalTokenBaseline`]. Needs
    /// `old_log_probs` and `sum_of_squared_probs`.
    pub fn optimal_token_baseline() -> Self {
        Self::of_tokens(TokenShaping {
            baseline: TokenBaseline::OptimalToken(OptimalTokenBaseline::default()),
            ..TokenShaping::default()
        })
    }

    /// The same for sequences with turns, whose tokens correspond by how many the policy wrote before them.
    pub fn multi_turn_optimal_token_baseline() -> Self {
        Self::of_tokens(TokenShaping {
            baseline: TokenBaseline::OptimalToken(OptimalTokenBaseline {
                alignment: TokenAlignment::Generated,
                ..OptimalTokenBaseline::default()
            }),
            ..TokenShaping::default()
        })
    }

    /// OpenRLHF's `reinforce`: returns, normalised over all tokens by mean and population deviation.
    pub fn reinforce() -> Self {
        Self::of_tokens(whitened_tokens(Whitening::openrlhf()))
    }

    /// OpenRLHF's `reinforce_baseline`: `r - mean of the group`, then as [`Self::reinforce`].
    pub fn reinforce_baseline() -> Self {
        Self::dr_grpo().then(whitened_tokens(Whitening::openrlhf()))
    }

    /// OpenRLHF's `flash_reinforce`: `r - mean of the batch`.
    pub fn flash_reinforce() -> Self {
        Self::centered(Baseline::BatchMean)
    }
}

impl AdvantageEstimator for AdvantagePipeline {
    fn estimate(&self, batch: &AdvantageBatch<'_>) -> Result<Advantages> {
        self.validate()?;
        match (&self.sequence, &self.tokens) {
            (Some(sequence), None) => sequence.estimate(batch),
            (None, Some(tokens)) => tokens.estimate(batch),
            (Some(sequence), Some(tokens)) => {
                let of_sequences = sequence.estimate(batch)?;
                let placed = batch.mask()?.place_on_last(&of_sequences.advantages)?;
                let mut of_tokens = Advantages::from(tokens.shape(&placed, batch)?);
                of_tokens.metrics.extend(of_sequences.metrics);
                Ok(of_tokens)
            }
            (None, None) => bail!("{NO_STAGE}"),
        }
    }
}

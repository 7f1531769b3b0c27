//! Published advantage estimators by name, and the stages that each name stands for.

use serde::{Deserialize, Serialize};

use super::{
    Baseline, ComponentOrder, GroupAdvantage, OptimalTokenBaseline, Scale, TokenAdvantage,
    TokenAlignment, TokenBaseline, Whitening, ZeroSignalScaling,
};

/// A published advantage estimator's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AdvantageName {
    /// [`AdvantagePipeline::grpo`](crate::AdvantagePipeline::grpo). The default.
    #[default]
    Grpo,
    /// [`AdvantagePipeline::dr_grpo`](crate::AdvantagePipeline::dr_grpo).
    DrGrpo,
    /// [`experimental::lite_ppo`](crate::experimental::lite_ppo).
    LitePpo,
    /// [`AdvantagePipeline::rloo`](crate::AdvantagePipeline::rloo).
    Rloo,
    /// [`experimental::max_rl`](crate::experimental::max_rl).
    MaxRl,
    /// [`experimental::opo`](crate::experimental::opo).
    Opo,
    /// [`AdvantagePipeline::gpg`](crate::AdvantagePipeline::gpg).
    Gpg,
    /// [`AdvantagePipeline::pass_at_k`](crate::AdvantagePipeline::pass_at_k).
    PassAtK,
    /// [`AdvantagePipeline::gdpo`](crate::AdvantagePipeline::gdpo).
    Gdpo,
    /// [REINFORCE++](crate::AdvantagePipeline::reinforce_plus_plus).
    ReinforcePlusPlus,
    /// [REINFORCE++-baseline](crate::AdvantagePipeline::reinforce_plus_plus_baseline).
    ReinforcePlusPlusBaseline,
    /// [`AdvantagePipeline::remax`](crate::AdvantagePipeline::remax).
    Remax,
    /// [`AdvantagePipeline::gae`](crate::AdvantagePipeline::gae), with gamma 1 and lambda 0.95.
    Gae,
    /// [The optimal token baseline](crate::AdvantagePipeline::optimal_token_baseline).
    OptimalTokenBaseline,
    /// [The optimal token baseline, by
    /// turns](crate::AdvantagePipeline::multi_turn_optimal_token_baseline).
    MultiTurnOptimalTokenBaseline,
    /// [`AdvantagePipeline::reinforce`](crate::AdvantagePipeline::reinforce).
    Reinforce,
    /// [`AdvantagePipeline::reinforce_baseline`](crate::AdvantagePipeline::reinforce_baseline).
    ReinforceBaseline,
    /// [`experimental::flash_reinforce`](crate::experimental::flash_reinforce).
    FlashReinforce,
    /// No stages: you set [`AdvantagePipeline::sequence`](crate::AdvantagePipeline::sequence) and
    /// [`AdvantagePipeline::tokens`](crate::AdvantagePipeline::tokens) yourself.
    Pipeline,
}

/// Sequence stage and token stage.
pub(super) type Stages = (Option<GroupAdvantage>, Option<TokenAdvantage>);

impl AdvantageName {
    /// Returns the estimator's stages.
    pub(super) fn stages(self) -> Stages {
        let grpo = GroupAdvantage::grpo;
        let centered = || GroupAdvantage::centered(Baseline::GroupMean);
        match self {
            Self::Grpo => on_sequences(grpo()),
            Self::DrGrpo => on_sequences(centered()),
            Self::LitePpo => on_sequences(GroupAdvantage {
                scale: Scale::Batch,
                ..grpo()
            }),
            Self::Rloo => on_sequences(GroupAdvantage::rloo()),
            Self::MaxRl => on_sequences(GroupAdvantage {
                scale: Scale::GroupMean,
                ..grpo()
            }),
            Self::Opo => on_sequences(GroupAdvantage::centered(Baseline::LengthWeighted)),
            Self::Gpg => on_sequences(GroupAdvantage {
                compensation: ZeroSignalScaling::GroupsWithSpread,
                ..centered()
            }),
            Self::PassAtK => on_sequences(GroupAdvantage {
                baseline: Baseline::BestOfOthers,
                ..grpo()
            }),
            Self::Gdpo => on_sequences(GroupAdvantage {
                epsilon: 1e-4,
                components: ComponentOrder::NormalizeThenSum,
                normalize: Some(Whitening::trl()),
                ..grpo()
            }),
            Self::ReinforcePlusPlus => on_tokens(whitened(Whitening::default())),
            Self::ReinforcePlusPlusBaseline => {
                (Some(centered()), Some(whitened(Whitening::default())))
            }
            Self::Remax => on_tokens(minus(TokenBaseline::Given)),
            Self::Gae => on_tokens(TokenAdvantage {
                gamma: 1.,
                lambda: Some(0.95),
                ..whitened(Whitening::default())
            }),
            Self::OptimalTokenBaseline => on_tokens(minus(TokenBaseline::OptimalToken(
                OptimalTokenBaseline::default(),
            ))),
            Self::MultiTurnOptimalTokenBaseline => {
                on_tokens(minus(TokenBaseline::OptimalToken(OptimalTokenBaseline {
                    alignment: TokenAlignment::Generated,
                    ..OptimalTokenBaseline::default()
                })))
            }
            Self::Reinforce => on_tokens(whitened(Whitening::openrlhf())),
            Self::ReinforceBaseline => (Some(centered()), Some(whitened(Whitening::openrlhf()))),
            Self::FlashReinforce => on_sequences(GroupAdvantage::centered(Baseline::BatchMean)),
            Self::Pipeline => (None, None),
        }
    }
}

fn on_sequences(sequence: GroupAdvantage) -> Stages {
    (Some(sequence), None)
}

fn on_tokens(tokens: TokenAdvantage) -> Stages {
    (None, Some(tokens))
}

/// Returns a token stage that repeats a sequence's advantage at each token, then whitens over all
/// tokens.
fn whitened(whitening: Whitening) -> TokenAdvantage {
    TokenAdvantage {
        whiten_advantages: true,
        whitening,
        ..TokenAdvantage::default()
    }
}

fn minus(baseline: TokenBaseline) -> TokenAdvantage {
    TokenAdvantage {
        baseline,
        ..TokenAdvantage::default()
    }
}

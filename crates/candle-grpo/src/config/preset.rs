//! Published algorithms by name.

use candle_grpo_loss::{Recipe, experimental};
use serde::{Deserialize, Serialize};

use super::algorithm::AdvEstimator;

/// The KL coefficient of REINFORCE++ unless the configuration has one.
const REINFORCE_KL_COEF: f64 = 0.01;

/// A published algorithm: the constructor of [`Recipe`] with its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)] // Each variant is documented at the constructor of that name.
pub enum Preset {
    Grpo,
    Dapo,
    DrGrpo,
    LitePpo,
    Gspo,
    Luspo,
    Gmpo,
    Cispo,
    Sapo,
    Vespo,
    Gpg,
    Rloo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Trl,
    Verl,
    Roll,
    Twinkle,
    Openrlhf,
    PrimeRl,
    Fipo,
    M2po,
    Gkd,
}

impl Preset {
    /// All presets.
    pub const ALL: [Self; 23] = [
        Self::Grpo,
        Self::Dapo,
        Self::DrGrpo,
        Self::LitePpo,
        Self::Gspo,
        Self::Luspo,
        Self::Gmpo,
        Self::Cispo,
        Self::Sapo,
        Self::Vespo,
        Self::Gpg,
        Self::Rloo,
        Self::ReinforcePlusPlus,
        Self::ReinforcePlusPlusBaseline,
        Self::Trl,
        Self::Verl,
        Self::Roll,
        Self::Twinkle,
        Self::Openrlhf,
        Self::PrimeRl,
        Self::Fipo,
        Self::M2po,
        Self::Gkd,
    ];

    /// Returns the advantage estimator of the algorithm, if a key has a name for it.
    pub(super) fn estimator(self) -> Option<AdvEstimator> {
        match self {
            Self::Gpg | Self::Rloo | Self::ReinforcePlusPlusBaseline => None,
            Self::ReinforcePlusPlus => Some(AdvEstimator::Reinforce),
            Self::Grpo
            | Self::Dapo
            | Self::DrGrpo
            | Self::LitePpo
            | Self::Gspo
            | Self::Luspo
            | Self::Gmpo
            | Self::Cispo
            | Self::Sapo
            | Self::Vespo
            | Self::Trl
            | Self::Verl
            | Self::Roll
            | Self::Twinkle
            | Self::Openrlhf
            | Self::PrimeRl
            | Self::Fipo
            | Self::M2po
            | Self::Gkd => Some(AdvEstimator::Grpo),
        }
    }

    /// Returns the recipe for completions of at most `response_length` tokens. The penalty of DAPO
    /// grows over the last fifth of them, as in the paper.
    pub fn recipe(self, response_length: usize) -> Recipe {
        match self {
            Self::Grpo => Recipe::grpo(),
            Self::Dapo => Recipe::dapo(response_length, (response_length / 5).max(1)),
            Self::DrGrpo => Recipe::dr_grpo(response_length as f64),
            Self::LitePpo => experimental::recipe::lite_ppo(),
            Self::Gspo => Recipe::gspo(),
            Self::Luspo => experimental::recipe::luspo(),
            Self::Gmpo => Recipe::gmpo(),
            Self::Cispo => Recipe::cispo(),
            Self::Sapo => Recipe::sapo(),
            Self::Vespo => experimental::recipe::vespo(),
            Self::Gpg => Recipe::gpg(),
            Self::Rloo => Recipe::rloo(),
            Self::ReinforcePlusPlus => Recipe::reinforce_plus_plus(REINFORCE_KL_COEF),
            Self::ReinforcePlusPlusBaseline => Recipe::reinforce_plus_plus_baseline(),
            Self::Trl => Recipe::trl(),
            Self::Verl => Recipe::verl(),
            Self::Roll => Recipe::roll(),
            Self::Twinkle => Recipe::twinkle(),
            Self::Openrlhf => Recipe::openrlhf(),
            Self::PrimeRl => Recipe::prime_rl(),
            Self::Fipo => experimental::recipe::fipo(),
            Self::M2po => experimental::recipe::m2po(),
            Self::Gkd => Recipe::gkd(),
        }
    }
}

//! Published losses as points of the product.

use crate::aggregation::Aggregation;
use crate::importance::ImportanceLevel;
use crate::kl_loss::KlLoss;
use crate::policy_loss::PolicyLoss;
use crate::surrogate::{Clip, Surrogate};

impl PolicyLoss {
    /// GRPO (<https://arxiv.org/abs/2402.03300>): clip 0.2, each sequence counts the same, a k3 KL loss of 0.04.
    pub fn grpo() -> Self {
        Self {
            surrogate: Surrogate::Clip(Clip::symmetric(0.2)),
            kl: Some(KlLoss::k3(0.04)),
            aggregation: Aggregation::SeqMeanTokenMean,
            ..Self::default()
        }
    }

    /// DAPO (<https://arxiv.org/abs/2503.14476>): clip 0.2 below and 0.28 above, each token counts the same, no KL.
    pub fn dapo() -> Self {
        Self {
            surrogate: Surrogate::Clip(Clip::asymmetric(0.2, 0.28)),
            aggregation: Aggregation::TokenMean,
            ..Self::default()
        }
    }

    /// Dr. GRPO (<https://arxiv.org/abs/2503.20783>): clip 0.2, sums of tokens divided by the constant `length`, no KL.
    /// Its advantages are those of [`candle_grpo_core::Scale::None`].
    pub fn dr_grpo(length: f64) -> Self {
        Self {
            surrogate: Surrogate::Clip(Clip::symmetric(0.2)),
            aggregation: Aggregation::SeqMeanTokenSumNorm { length },
            ..Self::default()
        }
    }

    /// GSPO (<https://arxiv.org/abs/2507.18071>): the ratio of the sequence with clips of 3e-4 and 4e-4.
    pub fn gspo() -> Self {
        Self {
            importance_level: ImportanceLevel::Sequence,
            surrogate: Surrogate::Clip(Clip::asymmetric(3e-4, 4e-4)),
            aggregation: Aggregation::SeqMeanTokenMean,
            ..Self::default()
        }
    }
}

//! Losses that few projects use yet.

use crate::aggregation::Aggregation;
use crate::correction::RolloutCorrection;
use crate::policy_loss::PolicyLoss;
use crate::surrogate::{FutureKl, GroupContrast, Vespo};

/// LUSPO (<https://arxiv.org/abs/2602.05261>): GSPO with each sequence weighted by its length.
pub fn luspo() -> PolicyLoss {
    PolicyLoss {
        aggregation: Aggregation::SeqMeanTokenSum,
        ..PolicyLoss::gspo()
    }
}

/// VESPO (<https://arxiv.org/abs/2602.10693>).
pub fn vespo() -> PolicyLoss {
    PolicyLoss::with_surrogate(Vespo::default(), Aggregation::TokenMean)
}

/// FIPO (<https://arxiv.org/abs/2603.19835>): clip-higher, weighted by how far later tokens drift.
pub fn fipo() -> PolicyLoss {
    PolicyLoss::with_surrogate(FutureKl::default(), Aggregation::TokenMean)
}

/// M2PO (<https://arxiv.org/abs/2510.01161>): clip 0.2, on tokens whose ratio to the sampler has a
/// second moment below 0.04.
pub fn m2po() -> PolicyLoss {
    PolicyLoss {
        rollout_correction: Some(RolloutCorrection::m2po(0.04)),
        ..PolicyLoss::bnpo()
    }
}

/// REAL (<https://arxiv.org/abs/2602.05630>): classifies the sequences in each group. Needs
/// [`crate::PolicyBatch::groups`].
pub fn real() -> PolicyLoss {
    PolicyLoss::with_surrogate(GroupContrast::default(), Aggregation::PromptMeanTokenMean)
}

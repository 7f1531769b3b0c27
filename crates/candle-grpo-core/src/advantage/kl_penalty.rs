//! KL penalty in the reward.

use candle_core::{D, Result, Tensor};
use serde::{Deserialize, Serialize};

use super::AdvantageBatch;
use crate::Invalid;
use crate::Kl;
use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::kl::KlGradient;
use crate::validate::{self, Checked};

/// A KL penalty that is subtracted from the reward of each token or sequence: `coef * KL(old policy
/// || reference)`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KlPenalty {
    /// Coefficient of the estimate. Default 0.
    pub coef: f64,
    /// Estimator (`kl_penalty` in ROLL). Default [`Kl::default`].
    #[serde(default)]
    pub kl: Kl,
}

impl KlPenalty {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails with the name of the invalid option.
    pub fn validate(&self) -> Checked {
        validate::finite("coef", self.coef)?;
        if let KlGradient::ImportanceWeighted { .. } = self.kl.gradient {
            return Err(Invalid::new(
                "kl.gradient",
                "importance_weighted",
                "be direct or straight_through for a penalty, which has no gradient",
            ));
        }
        self.kl.validate()
    }

    /// Subtracts `coef` times the sum of the estimates of each sequence's tokens from `rewards`
    /// `[B]`, as TRL's RLOO does.
    ///
    /// # Errors
    ///
    /// Fails if the batch lacks `response_mask`, `old_log_probs` or `ref_log_probs`, or if a shape
    /// differs.
    pub fn penalize_sequence_rewards(
        &self,
        rewards: &Tensor,
        batch: &AdvantageBatch,
    ) -> Result<Tensor> {
        self.validate()?;
        let kl = self.per_token(batch, "ref_log_probs", batch.ref_log_probs.as_ref())?;
        let kl = (kl.sum(D::Minus1)? * self.coef)?;
        batch.mask()?.check_sequences("rewards", rewards)?;
        (for_statistics(rewards)? - kl)?.to_dtype(arithmetic_dtype(rewards.dtype()))
    }

    /// The estimates against the policy `name` with log-probs `other`, 0 outside the mask: `[B,
    /// T]`.
    pub(super) fn per_token(
        &self,
        batch: &AdvantageBatch,
        name: &str,
        other: Option<&Tensor>,
    ) -> Result<Tensor> {
        let old = batch.on_tokens("old_log_probs", batch.old_log_probs.as_ref())?;
        let other = batch.on_tokens(name, other)?;
        batch
            .mask()?
            .select(&self.kl.per_token(&old, &other, None)?)
    }
}

//! KL penalty in the reward.

use candle_core::{D, Result, Tensor};
use serde::{Deserialize, Serialize};

use super::AdvantageBatch;
use crate::Invalid;
use crate::Kl;
use crate::dtype::{arithmetic_dtype, for_statistics};
use crate::kl::KlGradient;
use crate::validate::{self, Checked};

/// A KL penalty that is subtracted from each token or sequence reward:
/// `coef * KL(old policy || reference)`.
///
/// Use it to keep the policy near a reference through the reward. The KL term in `candle-grpo-loss`
/// does the same through the loss, and needs no reward shaping.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct KlPenalty {
    /// Penalty coefficient. Default 0.
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
    /// Fails if an option is invalid; the error names it.
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

    /// Subtracts `coef` times the KL estimate, summed over a sequence's tokens, from `rewards`
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

    /// Estimates the KL to another policy, whose log-probs are `other`: `[B, T]`, 0 outside the
    /// mask. Errors refer to `other` as `name`.
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

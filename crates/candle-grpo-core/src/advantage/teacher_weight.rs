//! Token advantages weighted by a teacher.

use candle_core::{Result, Tensor};
use serde::{Deserialize, Serialize};

use super::AdvantageBatch;
use crate::schedule::CoefSchedule;
use crate::validate::{self, Checked};

/// Weights each token's advantage by a teacher:
/// `A (1 - L + L clip(exp(sign(A) (teach - old)), 1 - c, 1 + c))` (RLSD,
/// <https://arxiv.org/abs/2604.03128>; ms-swift). The teacher moves credit between a sequence's
/// tokens, and the reward alone decides the sign.
///
/// Usually, the teacher is the same policy with more information in its prompt, such as a reference
/// answer. Needs `old_log_probs` and `teacher_log_probs`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct TeacherWeight {
    /// The weight's share L, from 0 to 1, scheduled over training steps. Default
    /// [`CoefSchedule::default`].
    pub share: CoefSchedule,
    /// The bound c: how far the weight may be from 1. Default 0.2.
    pub clip: f64,
    /// Leaves nonnegative advantages unchanged. Default `false`.
    pub negative_only: bool,
}

impl Default for TeacherWeight {
    fn default() -> Self {
        Self {
            share: CoefSchedule::constant(1.),
            clip: 0.2,
            negative_only: false,
        }
    }
}

impl TeacherWeight {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::unit_interval("share.peak", self.share.peak)?;
        validate::unit_interval("share.end", self.share.end)?;
        self.share.validate().map_err(|e| e.within("share"))?;
        validate::positive("clip", self.clip)
    }

    /// Returns the share L in a step, or its peak if there is no step.
    pub fn share_at(&self, step: Option<usize>) -> f64 {
        step.map_or(self.share.peak, |step| self.share.at(step))
    }

    /// Weights `advantages` `[B, T]`.
    pub(super) fn apply(&self, advantages: &Tensor, batch: &AdvantageBatch) -> Result<Tensor> {
        let share = self.share_at(batch.step);
        let old = batch.on_tokens("old_log_probs", batch.old_log_probs.as_ref())?;
        let teacher = batch.on_tokens("teacher_log_probs", batch.teacher_log_probs.as_ref())?;
        let direction = advantages.sign()?;
        let evidence = ((teacher - old)? * &direction)?;
        // Bounded before `exp`, which could overflow.
        let weight = evidence.minimum((1. + self.clip).ln())?.exp()?;
        let weight = weight.maximum((1. - self.clip).max(0.))?;
        let weighted = (advantages * ((weight * share)? + (1. - share))?)?;
        let taught = batch.taught()?;
        let weighted = taught.selected().where_cond(&weighted, advantages)?;
        if self.negative_only {
            advantages.lt(0.)?.where_cond(&weighted, advantages)
        } else {
            Ok(weighted)
        }
    }
}

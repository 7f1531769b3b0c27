//! Adaptive control for the entropy coefficient.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// Controller for the entropy coefficient (TRL's adaptive entropy, from
/// <https://arxiv.org/abs/2505.22312>).
///
/// Use it if a fixed entropy bonus is either too weak to keep exploration or so strong that answers
/// degrade.
///
/// After each step, it raises the coefficient by `delta` if the mean entropy is at most `target`,
/// and lowers it otherwise, within `min` and `max`. The bonus applies only while the entropy is at
/// most the target. Save the state in checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct AdaptiveEntropy {
    /// Target entropy, in nats per token. Default 0.2.
    pub target: f64,
    /// Change per step. Default 0.005.
    pub delta: f64,
    /// Minimum coefficient. Default 0.
    pub min: f64,
    /// Maximum coefficient. Default 1.
    pub max: f64,
    /// Current coefficient. Default 0.
    pub coef: f64,
    /// True if the last entropy was at most the target. Default `false`.
    pub active: bool,
}

impl Default for AdaptiveEntropy {
    fn default() -> Self {
        Self {
            target: 0.2,
            delta: 0.005,
            min: 0.,
            max: 1.,
            coef: 0.,
            active: false,
        }
    }
}

impl AdaptiveEntropy {
    /// Returns the coefficient for the next step, for [`crate::PolicyLoss::entropy_coef`].
    pub fn entropy_coef(&self) -> f64 {
        if self.active { self.coef } else { 0. }
    }

    /// Updates the coefficient with a step's mean entropy over all tokens.
    ///
    /// # Errors
    ///
    /// Fails if `entropy` is not finite.
    pub fn update(&mut self, entropy: f64) -> Result<()> {
        if !entropy.is_finite() {
            bail!("entropy: {entropy}, must be finite");
        }
        self.active = entropy <= self.target;
        let change = if self.active { self.delta } else { -self.delta };
        self.coef = (self.coef + change).clamp(self.min, self.max.max(self.min));
        Ok(())
    }
}

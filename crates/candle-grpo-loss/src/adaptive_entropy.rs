//! An entropy coefficient that keeps the entropy at a target.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

/// Raises the coefficient of the entropy bonus by `delta` after each step whose mean entropy is at most `target`, else
/// lowers it, within `min` and `max`; the bonus counts only as long as the entropy is at most the target (TRL's adaptive
/// entropy, from <https://arxiv.org/abs/2505.22312>).
///
/// Its state is part of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdaptiveEntropy {
    /// The entropy, in nats for each token, below which the bonus counts.
    pub target: f64,
    /// The change of the coefficient in one step.
    pub delta: f64,
    /// The smallest coefficient.
    pub min: f64,
    /// The largest coefficient.
    pub max: f64,
    /// The coefficient now.
    pub coef: f64,
    /// Whether the last entropy was at most the target.
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
    /// The coefficient of the next step, for [`crate::PolicyLoss::entropy_coef`].
    pub fn entropy_coef(&self) -> f64 {
        if self.active { self.coef } else { 0. }
    }

    /// Takes note of the mean entropy of a step, over all its tokens.
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

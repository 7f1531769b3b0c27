//! Role baselines for self-play.

use std::collections::BTreeMap;

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::validate;

/// Role-conditioned advantage estimation: `x - b[role]`, where `b` is a moving average of each
/// role's rewards (SPIRAL, <https://arxiv.org/abs/2506.24119>; `rae` in prime-rl).
///
/// Use it when the roles in a game have different expected rewards, for example when the first
/// player usually wins. The serialized form is the complete state.
///
/// ```
/// use candle_grpo_core::advantage::RoleBaselines;
///
/// let mut baselines = RoleBaselines::new(0.9)?;
/// let roles = ["first", "second", "first"];
/// let advantages = baselines.advantages(&[1., -1., 1.], &roles)?;
/// assert_eq!(advantages[..2], [1., -1.]);
/// assert!((advantages[2] - 0.9).abs() < 1e-12);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RoleBaselines {
    /// Share of a baseline that each further reward keeps, from 0 to 1. SPIRAL uses 0.95.
    decay: f64,
    /// Baselines by role. A role that is absent starts at 0.
    #[serde(default)]
    baselines: BTreeMap<String, f64>,
}

impl RoleBaselines {
    /// Creates baselines that start at 0, with a `decay` from 0 to 1.
    ///
    /// # Errors
    ///
    /// Fails if the decay is not from 0 to 1.
    pub fn new(decay: f64) -> Result<Self> {
        let baselines = Self {
            decay,
            baselines: BTreeMap::new(),
        };
        baselines.validate()?;
        Ok(baselines)
    }

    /// Checks the values.
    ///
    /// # Errors
    ///
    /// Fails if the decay is not from 0 to 1, or a baseline is not finite.
    pub fn validate(&self) -> Result<()> {
        validate::unit_interval("decay", self.decay)?;
        for (role, baseline) in &self.baselines {
            if !baseline.is_finite() {
                bail!("baselines.{role}: {baseline}, must be finite");
            }
        }
        Ok(())
    }

    /// Takes the decay of other baselines.
    pub fn set_decay_of(&mut self, other: &Self) {
        self.decay = other.decay;
    }

    /// Returns the baseline for each role that has had a reward.
    pub fn baselines(&self) -> &BTreeMap<String, f64> {
        &self.baselines
    }

    /// Returns the advantage for each sample, in order. Each sample updates its role's baseline:
    /// `b = decay b + (1 - decay) x`.
    ///
    /// # Errors
    ///
    /// Fails if there is not one role for each reward, or if a reward is not finite. The baselines
    /// then stay unchanged.
    pub fn advantages(&mut self, rewards: &[f64], roles: &[impl AsRef<str>]) -> Result<Vec<f64>> {
        if rewards.len() != roles.len() {
            bail!(
                "roles: {} for {} rewards, there must be one for each",
                roles.len(),
                rewards.len()
            );
        }
        if let Some(i) = rewards.iter().position(|x| !x.is_finite()) {
            bail!("rewards: sample {i} is {}, must be finite", rewards[i]);
        }
        let decay = self.decay;
        let advantage = |(x, role): (&f64, _)| {
            let baseline = self.baselines.entry(AsRef::<str>::as_ref(role).to_owned());
            let baseline = baseline.or_default();
            let advantage = x - *baseline;
            *baseline = decay * *baseline + (1. - decay) * x;
            advantage
        };
        Ok(rewards.iter().zip(roles).map(advantage).collect())
    }
}

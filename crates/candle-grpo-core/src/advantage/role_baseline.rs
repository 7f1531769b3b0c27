//! Role baselines for self-play.

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
/// let mut baselines = RoleBaselines::new(0.9, 2)?;
/// // Roles 0 and 1, then role 0 again.
/// let advantages = baselines.advantages(&[1., -1., 1.], &[0, 1, 0])?;
/// assert_eq!(advantages[..2], [1., -1.]);
/// assert!((advantages[2] - 0.9).abs() < 1e-12);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoleBaselines {
    decay: f64,
    baselines: Vec<f64>,
}

impl RoleBaselines {
    /// Creates baselines that start at 0, one per role, with a `decay` from 0 to 1.
    ///
    /// # Errors
    ///
    /// Fails if the decay is not from 0 to 1.
    pub fn new(decay: f64, roles: usize) -> Result<Self> {
        validate::unit_interval("decay", decay)?;
        Ok(Self {
            decay,
            baselines: vec![0.; roles],
        })
    }

    /// Returns the baseline for each role.
    pub fn baselines(&self) -> &[f64] {
        &self.baselines
    }

    /// Returns the advantage for each sample, in order. Each sample updates its role's baseline:
    /// `b = decay b + (1 - decay) x`.
    ///
    /// # Errors
    ///
    /// Fails if there is not one role for each reward, if a role is out of range, or if a reward is
    /// not finite. The baselines then stay unchanged.
    pub fn advantages(&mut self, rewards: &[f64], roles: &[usize]) -> Result<Vec<f64>> {
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
        let count = self.baselines.len();
        if let Some(role) = roles.iter().find(|&&role| role >= count) {
            bail!("roles: {role}, must be below the number of roles, {count}");
        }
        let advantage = |(x, &role): (&f64, &usize)| {
            let baseline = &mut self.baselines[role];
            let advantage = x - *baseline;
            *baseline = self.decay * *baseline + (1. - self.decay) * x;
            advantage
        };
        Ok(rewards.iter().zip(roles).map(advantage).collect())
    }
}

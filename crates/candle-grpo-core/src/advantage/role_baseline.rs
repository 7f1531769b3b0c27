//! Baselines of roles in self-play.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::validate;

/// `x - b[role]`, with a moving average `b` of the rewards of each role: role-conditioned advantage
/// estimation (SPIRAL, <https://arxiv.org/abs/2506.24119>; `rae` in prime-rl).
///
/// Roles of a game may have different expected rewards, such as the first player of a game that the
/// first player usually wins. The serialized form is the whole state.
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
    /// Baselines of 0 for this number of roles, with a `decay` from 0 to 1.
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

    /// Returns the baseline of each role.
    pub fn baselines(&self) -> &[f64] {
        &self.baselines
    }

    /// Returns the advantage of each sample, in order. The baseline of a role changes after each of
    /// its samples: `b = decay b + (1 - decay) x`.
    ///
    /// # Errors
    ///
    /// Fails if there is not one role for each reward, if a role is out of range, or if a reward is
    /// not finite. The baselines are then unchanged.
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

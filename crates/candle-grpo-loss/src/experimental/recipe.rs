//! Recipes that few projects use yet.

use candle_grpo_core::experimental;

use super::policy_loss;
use crate::policy_loss::PolicyLoss;
use crate::recipe::Recipe;

/// Lite PPO (<https://arxiv.org/abs/2508.08221>): group mean, batch standard deviation, token-mean.
pub fn lite_ppo() -> Recipe {
    Recipe::new(experimental::lite_ppo(), PolicyLoss::bnpo())
}

/// LUSPO (<https://arxiv.org/abs/2602.05261>).
pub fn luspo() -> Recipe {
    Recipe::grpo_advantage(policy_loss::luspo())
}

/// VESPO (<https://arxiv.org/abs/2602.10693>).
pub fn vespo() -> Recipe {
    Recipe::grpo_advantage(policy_loss::vespo())
}

/// FIPO (<https://arxiv.org/abs/2603.19835>).
pub fn fipo() -> Recipe {
    Recipe::grpo_advantage(policy_loss::fipo())
}

/// M2PO (<https://arxiv.org/abs/2510.01161>).
pub fn m2po() -> Recipe {
    Recipe::grpo_advantage(policy_loss::m2po())
}

//! A smooth weight of the whole sequence.

use candle_core::{D, Result, Tensor};
use serde::{Deserialize, Serialize};

use super::{SurrogateInputs, TokenLosses, by_sign, weighted_policy_gradient};
use crate::limits::{check_not_negative, check_positive};

/// `-phi(W) A log_prob` with the constant `phi(W) = exp(lambda + k log W - lambda W)`, where W is the ratio of the
/// sequence, a product of the ratios of its tokens (VESPO, <https://arxiv.org/abs/2602.10693>). `phi(1) = 1`, and it goes
/// to 0 on both sides. Importance weights enter W.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Vespo {
    /// k where the advantage is not negative.
    pub k_pos: f64,
    /// lambda where the advantage is not negative.
    pub lambda_pos: f64,
    /// k elsewhere.
    pub k_neg: f64,
    /// lambda elsewhere.
    pub lambda_neg: f64,
}

impl Default for Vespo {
    fn default() -> Self {
        Self {
            k_pos: 2.,
            lambda_pos: 3.,
            k_neg: 3.,
            lambda_neg: 2.,
        }
    }
}

/// The smallest log-weight, log(1e-8), and the largest, as in TRL.
const LOG_WEIGHT_MIN: f64 = -18.420680743952367;
const LOG_WEIGHT_MAX: f64 = 20.;

impl Vespo {
    pub(super) fn validate(&self) -> Result<()> {
        check_not_negative("vespo.k_pos", self.k_pos)?;
        check_not_negative("vespo.k_neg", self.k_neg)?;
        check_positive("vespo.lambda_pos", self.lambda_pos)?;
        check_positive("vespo.lambda_neg", self.lambda_neg)
    }

    pub(super) fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let log_weight = self.log_weight(inputs)?;
        // by_sign says "above 0"; here 0 belongs to the positive side, where it makes no difference, as A is a factor.
        let k = by_sign(inputs.advantages, self.k_pos, self.k_neg)?;
        let lambda = by_sign(inputs.advantages, self.lambda_pos, self.lambda_neg)?;
        let phi = ((&lambda + (k * &log_weight)?)? - (&lambda * log_weight.exp()?)?)?.exp()?;
        Ok(TokenLosses {
            loss: weighted_policy_gradient(inputs, &phi)?,
            flags: Vec::new(),
        })
    }

    /// log W, `[B, T]`, without gradient.
    fn log_weight(&self, inputs: &SurrogateInputs) -> Result<Tensor> {
        let log_ratio = inputs.token_log_ratio.detach();
        let mut sum = log_ratio.clamp(-20., 20.)?.sum_keepdim(D::Minus1)?;
        if let Some(weights) = inputs.importance_weights {
            let ones = weights.ones_like()?;
            let logs = inputs.mask.selected().where_cond(weights, &ones)?.log()?;
            let logs = logs.clamp(LOG_WEIGHT_MIN, LOG_WEIGHT_MAX)?;
            sum = (sum + logs.sum_keepdim(D::Minus1)?)?;
        }
        sum.clamp(LOG_WEIGHT_MIN, LOG_WEIGHT_MAX)?
            .broadcast_as(log_ratio.shape())?
            .contiguous()
    }
}

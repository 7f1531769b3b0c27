//! A smooth weight for the whole sequence.

use candle_core::{D, Result, Tensor};
use serde::{Deserialize, Serialize};

use super::{LossLevel, SurrogateInputs, TokenLoss, TokenLosses};
use candle_grpo_core::inputs::{Input, Inputs};
use candle_grpo_core::validate::{non_negative, positive};

/// `-phi(W) A log_prob` with the detached weight `phi(W) = exp(lambda + k log W - lambda W)`
/// (VESPO, <https://arxiv.org/abs/2602.10693>).
///
/// W is the sequence ratio, the product over its clamped token ratios. `phi(1) = 1`, and phi goes
/// to 0 on both sides. Importance weights are factors in W: the product over tokens, or the weight
/// itself if it is one per sequence.
#[doc(alias = "VESPO")]
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Vespo {
    /// k where the advantage is at least 0. Default 2.
    pub k_pos: f64,
    /// lambda where the advantage is at least 0. Default 3.
    pub lambda_pos: f64,
    /// k where the advantage is negative. Default 3.
    pub k_neg: f64,
    /// lambda where the advantage is negative. Default 2.
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

/// Bounds for log W: log(1e-8) and 20, as in TRL.
const LOG_WEIGHT_MIN: f64 = -18.420680743952367;
const LOG_WEIGHT_MAX: f64 = 20.;

impl TokenLoss for Vespo {
    fn validate(&self) -> Result<()> {
        non_negative("vespo.k_pos", self.k_pos)?;
        non_negative("vespo.k_neg", self.k_neg)?;
        positive("vespo.lambda_pos", self.lambda_pos)?;
        positive("vespo.lambda_neg", self.lambda_neg)?;
        Ok(())
    }

    fn per_token(&self, inputs: &SurrogateInputs) -> Result<TokenLosses> {
        let log_weight = log_weight(inputs)?;
        // Advantage 0 belongs to the positive side. The sides do not differ there, because A is a
        // factor.
        let k = inputs.by_sign(self.k_pos, self.k_neg)?;
        let lambda = inputs.by_sign(self.lambda_pos, self.lambda_neg)?;
        let phi = ((&lambda + (k * &log_weight)?)? - (&lambda * log_weight.exp()?)?)?.exp()?;
        Ok(TokenLosses::new(inputs.weighted_policy_gradient(&phi)?))
    }

    fn level(&self) -> LossLevel {
        LossLevel::Sequence
    }

    fn needs(&self) -> Inputs {
        Input::ImportanceWeights.into()
    }
}

/// Computes log W, `[B, T]`, without gradient.
fn log_weight(inputs: &SurrogateInputs) -> Result<Tensor> {
    let log_ratio = inputs.token_log_ratio.detach();
    let mut sum = log_ratio.sum_keepdim(D::Minus1)?;
    if let Some(weights) = inputs.importance_weights {
        let logs = |weights: &Tensor| weights.log()?.clamp(LOG_WEIGHT_MIN, LOG_WEIGHT_MAX);
        let log_weights = if weights.dims() == inputs.mask.selected().dims() {
            let ones = weights.ones_like()?;
            logs(&inputs.mask.selected().where_cond(weights, &ones)?)?.sum_keepdim(D::Minus1)?
        } else {
            logs(weights)?
        };
        sum = (sum + log_weights)?;
    }
    sum.clamp(LOG_WEIGHT_MIN, LOG_WEIGHT_MAX)?
        .broadcast_as(log_ratio.shape())?
        .contiguous()
}

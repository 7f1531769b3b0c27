//! Penalties on the cost of a sample, relative to its group.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::{IntoRewards, check_magnitude, check_not_empty, finite_mask};
use crate::dtype::for_statistics;
use crate::groups::{GroupLayout, Groups};
use crate::moments::Moments;
use crate::validate::{self, Checked};

/// `x - mean_g sum_k w_k c_k / max(1, max_g c_k)`: a penalty on the costs `c_k` of a sample, in
/// units of the mean reward of its group (`length_penalty` in prime-rl).
///
/// The most expensive sample of a group loses the whole weight. A group whose mean reward is 0 has
/// no penalty, so that a policy that fails is not driven to short answers.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::rewards::{CostPenalty, Costs};
///
/// let tokens = Tensor::new(&[10f32, 40.], &Device::Cpu)?;
/// let costs = Costs { output_tokens: Some(&tokens), ..Costs::default() };
/// let penalty = CostPenalty { output_tokens: 0.5, ..CostPenalty::default() };
/// let rewards = penalty.apply(&[1., 1.], 2, &costs)?;
/// assert_eq!(rewards.to_vec1::<f32>()?, [0.875, 0.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CostPenalty {
    /// Weight of the tokens that the policy generated. Default 0.
    pub output_tokens: f64,
    /// Weight of the tokens that the policy read: the prompt, and the tokens of an environment.
    /// Default 0.
    pub input_tokens: f64,
    /// Weight of the turns. Default 0.
    pub turns: f64,
}

/// Costs of the samples, each `[B]`. A cost with the weight 0 may be absent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Costs<'a> {
    /// Number of tokens that the policy generated. Absent by default.
    pub output_tokens: Option<&'a Tensor>,
    /// Number of tokens that the policy read. Absent by default.
    pub input_tokens: Option<&'a Tensor>,
    /// Number of turns. Absent by default.
    pub turns: Option<&'a Tensor>,
}

impl CostPenalty {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails with the name of the invalid option.
    pub fn validate(&self) -> Checked {
        validate::non_negative("output_tokens", self.output_tokens)?;
        validate::non_negative("input_tokens", self.input_tokens)?;
        validate::non_negative("turns", self.turns)
    }

    /// Returns `rewards` `[B]` minus the penalty. Rewards that are not finite count as missing:
    /// they do not enter the mean, and stay as they are.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, if a cost with a weight is absent, or if the shapes differ.
    pub fn apply(
        &self,
        rewards: impl IntoRewards,
        groups: impl Into<Groups>,
        costs: &Costs<'_>,
    ) -> Result<Tensor> {
        self.validate()?;
        let rewards = rewards.into_rewards()?;
        let x = &rewards.values;
        let &[samples] = x.dims() else {
            bail!("rewards: shape {:?}, must be [B]", x.dims());
        };
        check_not_empty(x)?;
        check_magnitude("rewards", x)?;
        let layout = GroupLayout::new(&groups.into(), samples, x.device())?;
        let present = layout.present()?;
        let rows = layout.to_rows(x)?;
        let scored = (layout.to_rows(&finite_mask(x)?)? * &present)?;
        let mean = Moments::new(&rows, &scored)?.mean;
        let mut factor = rows.zeros_like()?;
        for (name, weight, cost) in [
            ("output_tokens", self.output_tokens, costs.output_tokens),
            ("input_tokens", self.input_tokens, costs.input_tokens),
            ("turns", self.turns, costs.turns),
        ] {
            if weight == 0. {
                continue;
            }
            let Some(cost) = cost else {
                bail!("{name}: absent, must be given for its penalty");
            };
            if cost.dims() != [samples] {
                bail!(
                    "{name}: shape {:?}, must be [{samples}], one for each reward",
                    cost.dims()
                );
            }
            let cost = layout.to_rows(&for_statistics(cost)?)?;
            let cost = present.where_cond(&cost, &cost.zeros_like()?)?;
            let largest = cost.max_keepdim(1)?.maximum(1.)?;
            factor = (factor + (cost.broadcast_div(&largest)? * weight)?)?;
        }
        let penalty = layout.to_samples(&factor.broadcast_mul(&mean)?)?;
        (x - penalty)?.to_dtype(rewards.result_dtype)
    }
}

//! Cost penalties, relative to the group.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::{IntoRewards, check_magnitude, check_not_empty, finite_mask};
use crate::dtype::for_statistics;
use crate::groups::{GroupLayout, Groups};
use crate::moments::Moments;
use crate::validate::{self, Checked};

/// A penalty on a sample's costs `c_k`, in units of its group's mean reward:
/// `x - mean_g sum_k w_k c_k / max(1, max_g c_k)` (`length_penalty` in prime-rl).
///
/// Use it to shorten answers or save turns without a fixed length limit. A group's most expensive
/// sample loses the whole weight. A group with mean reward 0 has no penalty, so a policy that fails
/// is not pushed toward short answers.
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CostPenalty {
    /// Weight for generated tokens. Default 0.
    pub output_tokens: f64,
    /// Weight for tokens that the policy read, from the prompt or an environment. Default 0.
    pub input_tokens: f64,
    /// Weight for turns. Default 0.
    pub turns: f64,
}

/// Costs for each sample, each `[B]`. A cost with weight 0 may be absent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Costs<'a> {
    /// Number of generated tokens. Absent by default.
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
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        validate::non_negative("output_tokens", self.output_tokens)?;
        validate::non_negative("input_tokens", self.input_tokens)?;
        validate::non_negative("turns", self.turns)
    }

    /// Subtracts the penalty from `rewards` `[B]`. A non-finite reward counts as missing: it does
    /// not enter the mean, and stays as it is.
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

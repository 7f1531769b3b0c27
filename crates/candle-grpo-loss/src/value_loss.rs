//! The loss of a critic.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::{Mask, Metrics, arithmetic_dtype};
use serde::{Deserialize, Serialize};

use crate::aggregation::Aggregation;
use crate::limits::check_positive;
use crate::totals::StepTotals;

/// `max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2` for each token, with V the value and R the return
/// (PPO, <https://arxiv.org/abs/1707.06347>; `value_clip` in ROLL).
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ValueLoss {
    /// How far a value may move from the old one before it stops being drawn to the return.
    pub clip: Option<f64>,
    /// How the losses of tokens become one number.
    pub aggregation: Aggregation,
}

impl ValueLoss {
    /// The loss, with gradient in `values`, and the metric `value_clip_fraction`. All tensors are `[B, T]`;
    /// `old_values` are needed if there is a clip.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_grpo_loss::{StepTotals, ValueLoss};
    ///
    /// let values = Tensor::new(&[[1f32, 3.]], &Device::Cpu)?;
    /// let returns = Tensor::new(&[[2f32, 3.]], &Device::Cpu)?;
    /// let mask = Tensor::new(&[[1u8, 1]], &Device::Cpu)?;
    /// let (loss, _) = ValueLoss::default().compute(&values, None, &returns, &mask, &StepTotals::to_host(&mask)?)?;
    /// assert_eq!(loss.to_scalar::<f32>()?, 0.25);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn compute(
        &self,
        values: &Tensor,
        old_values: Option<&Tensor>,
        returns: &Tensor,
        response_mask: &Tensor,
        totals: &StepTotals,
    ) -> Result<(Tensor, Metrics)> {
        let mask = Mask::new(response_mask)?;
        let dtype = arithmetic_dtype(values.dtype());
        let selected = |name: &str, x: &Tensor| -> Result<Tensor> {
            mask.check_shape(name, x)?;
            mask.select(&x.to_dtype(dtype)?)
        };
        let values = selected("values", values)?;
        let returns = selected("returns", &returns.detach())?;
        let mut per_token = (&values - &returns)?.sqr()?;
        let mut metrics = Metrics::new();
        if let Some(clip) = self.clip {
            check_positive("value_loss.clip", clip)?;
            let Some(old) = old_values else {
                bail!("old_values: absent, a clipped value loss needs them");
            };
            let old = selected("old_values", &old.detach())?;
            let moved = (&values.detach() - &old)?;
            let outside = moved.abs()?.gt(clip)?;
            let clipped = ((old + moved.clamp(-clip, clip)?)? - &returns)?.sqr()?;
            // Beyond the clip the larger of the two counts, which has no gradient if it is the clipped one.
            let is_clipped = (clipped.gt(&per_token.detach())? * outside)?;
            metrics.push_masked_mean("value_clip_fraction", &is_clipped, &mask)?;
            per_token = is_clipped.where_cond(&clipped, &per_token)?;
        }
        let loss = self.aggregation.apply(&(per_token * 0.5)?, &mask, totals)?;
        Ok((loss, metrics))
    }
}

//! The loss for critics.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::dtype::arithmetic_dtype;
use candle_grpo_core::{Mask, Metrics};
use serde::{Deserialize, Serialize};

use crate::aggregation::Aggregation;
use crate::totals::StepTotals;
use candle_grpo_core::validate::positive;

/// `max(f(V - R), f(clip(V, V_old - clip, V_old + clip) - R))` for each token, with value V, return
/// R and error loss f (PPO, <https://arxiv.org/abs/1707.06347>; `value_clip` in ROLL).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct ValueLoss {
    /// Distance from the old value beyond which a value has no gradient toward the return. Absent
    /// by default.
    pub clip: Option<f64>,
    /// Loss for one error. Default `squared`.
    pub error: ErrorLoss,
    /// Aggregation for the per-token losses. Default `token-mean`.
    pub aggregation: Aggregation,
}

/// Loss for an error e.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum ErrorLoss {
    /// `e^2 / 2`. The default.
    #[default]
    Squared,
    /// `e^2 / 2` up to `abs(e) = delta`, and `delta (abs(e) - delta / 2)` beyond (AReaL).
    Huber {
        /// Error from which the loss is linear.
        delta: f64,
    },
}

impl ErrorLoss {
    fn validate(self) -> Result<()> {
        match self {
            Self::Squared => Ok(()),
            Self::Huber { delta } => Ok(positive("value_loss.error.huber.delta", delta)?),
        }
    }

    fn of(self, error: &Tensor) -> Result<Tensor> {
        match self {
            Self::Squared => error.sqr()? * 0.5,
            Self::Huber { delta } => {
                // The derivative b is the bounded error; the loss is b e - b^2 / 2.
                let slope = error.detach().clamp(-delta, delta)?;
                (&slope * error)? - (slope.sqr()? * 0.5)?
            }
        }
    }
}

impl Default for ValueLoss {
    fn default() -> Self {
        Self {
            clip: None,
            error: ErrorLoss::Squared,
            aggregation: Aggregation::TokenMean,
        }
    }
}

impl ValueLoss {
    /// Computes the loss, with gradient in `values`, and the metric `value_clip_fraction`.
    ///
    /// All tensors are `[B, T]`. A clip requires `old_values`.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, shapes differ or `old_values` are missing.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_grpo_loss::{StepTotals, ValueLoss};
    ///
    /// let values = Tensor::new(&[[1f32, 3.]], &Device::Cpu)?;
    /// let returns = Tensor::new(&[[2f32, 3.]], &Device::Cpu)?;
    /// let mask = Tensor::new(&[[1u8, 1]], &Device::Cpu)?;
    /// let (loss, _) = ValueLoss::default().compute(&values, None, &returns, &mask, &StepTotals::count(&mask)?)?;
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
            mask.check(name, x)?;
            mask.select(&x.to_dtype(dtype)?)
        };
        let values = selected("values", values)?;
        let returns = selected("returns", &returns.detach())?;
        self.error.validate()?;
        let mut per_token = self.error.of(&(&values - &returns)?)?;
        let mut metrics = Metrics::new();
        if let Some(clip) = self.clip {
            positive("value_loss.clip", clip)?;
            let Some(old) = old_values else {
                bail!("old_values: absent, a clipped value loss needs them");
            };
            let old = selected("old_values", &old.detach())?;
            let moved = (&values.detach() - &old)?;
            let outside = moved.abs()?.gt(clip)?;
            let error = ((old + moved.clamp(-clip, clip)?)? - &returns)?;
            let clipped = self.error.of(&error)?;
            // Beyond the clip, the larger loss counts. The clipped one has no gradient.
            let is_clipped = (clipped.gt(&per_token.detach())? * outside)?;
            metrics.push_masked_mean("value_clip_fraction", &is_clipped, &mask)?;
            per_token = is_clipped.where_cond(&clipped, &per_token)?;
        }
        let loss = self.aggregation.apply(&per_token, &mask, totals)?;
        Ok((loss, metrics))
    }
}

//! The loss for reward models.

use candle_core::{Result, Tensor, bail};
use candle_grpo_core::dtype::arithmetic_dtype;
use candle_grpo_core::validate::non_negative;
use serde::{Deserialize, Serialize};

/// `-log sigmoid(chosen - rejected - margin)`, where a person or a model chose one completion over
/// the other. It is the choice's negative log-likelihood in the Bradley-Terry model
/// (<https://arxiv.org/abs/2203.02155>, equation 1; `RewardTrainer` in TRL).
///
/// With margin 0, a reward model that scores both completions equally has loss `log 2`, about 0.69:
/// a lower loss means that it learns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PreferenceLoss {
    /// Score difference that has loss `log 2`. Default 0.
    pub margin: f64,
}

impl PreferenceLoss {
    /// Computes the mean loss over pairs, a scalar in f32 (f64 for f64), with gradient in both
    /// arguments.
    ///
    /// `chosen` and `rejected` are `[N]`, in any float dtype. Loss and gradient are finite however
    /// far the scores differ.
    ///
    /// # Errors
    ///
    /// Fails if the margin is negative or not finite, there are no pairs, or shapes differ.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_grpo_loss::PreferenceLoss;
    ///
    /// let chosen = Tensor::new(&[2f32, 100.], &Device::Cpu)?;
    /// let rejected = Tensor::new(&[2f32, -100.], &Device::Cpu)?;
    /// let loss = PreferenceLoss::default().compute(&chosen, &rejected)?;
    /// assert_eq!(loss.to_scalar::<f32>()?, std::f32::consts::LN_2 / 2.);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn compute(&self, chosen: &Tensor, rejected: &Tensor) -> Result<Tensor> {
        non_negative("margin", self.margin)?;
        if !matches!(chosen.dims(), &[n] if n > 0) {
            bail!(
                "chosen: shape {:?}, must be [N] with N at least 1",
                chosen.dims()
            );
        }
        if rejected.dims() != chosen.dims() {
            bail!(
                "rejected: shape {:?}, must be that of chosen, {:?}",
                rejected.dims(),
                chosen.dims()
            );
        }
        let dtype = arithmetic_dtype(chosen.dtype());
        let wide = |x: &Tensor| x.to_dtype(dtype);
        let shortfall = ((wide(rejected)? - wide(chosen)?)? + self.margin)?;
        // log(1 + exp(x)), without raising `exp` above 1.
        let rest = (shortfall.abs()?.neg()?.exp()? + 1.0)?.log()?;
        (shortfall.relu()? + rest)?.mean_all()
    }
}

//! The interface for advantage estimators, and their results.

use candle_core::{Result, Tensor};

use super::AdvantageBatch;
use crate::inputs::Inputs;
use crate::mask::Mask;
use crate::metrics::Metrics;

/// Advantages, one per sequence or one per token.
#[derive(Debug, Clone)]
pub struct Advantages {
    /// `[B]`, or `[B, T]` with 0 outside the mask. f32, or f64 for f64 rewards.
    pub advantages: Tensor,
    /// Critic targets from a token stage, before whitening and clipping: `[B, T]`, 0 outside the
    /// mask.
    pub returns: Option<Tensor>,
    /// Metrics, such as the fraction of clipped tokens.
    pub metrics: Metrics,
}

impl Advantages {
    /// Creates advantages without returns or metrics.
    pub fn new(advantages: Tensor) -> Self {
        Self {
            advantages,
            returns: None,
            metrics: Metrics::new(),
        }
    }

    /// Returns the advantages as `[B, T]`, 0 outside the mask. A sequence's advantage is repeated
    /// at each of its tokens.
    ///
    /// # Errors
    ///
    /// Fails if the advantages are neither `[B]` nor the mask's `[B, T]`, or on another device.
    pub fn on_tokens(&self, mask: &Mask) -> Result<Tensor> {
        if self.advantages.rank() == 2 {
            mask.check("advantages", &self.advantages)?;
            mask.select(&self.advantages)
        } else {
            mask.check_sequences("advantages", &self.advantages)?;
            mask.spread(&self.advantages)
        }
    }
}

/// An advantage estimator.
///
/// [`AdvantagePipeline`](crate::AdvantagePipeline) has the published estimators. Implement this
/// trait when you need another one. If it reads more than rewards and groups, list those inputs in
/// [`Self::needs`], so that a trainer computes them.
///
/// ```
/// use candle_core::{Device, Result, Tensor};
/// use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, Advantages};
///
/// /// 1 for the best of each group, 0 for the others.
/// struct Best;
///
/// impl AdvantageEstimator for Best {
///     fn estimate(&self, batch: &AdvantageBatch) -> Result<Advantages> {
///         let rewards = batch.sequence_rewards()?;
///         let layout = batch.layout(&rewards.values)?;
///         let best = layout.to_rows(&rewards.values)?.max_keepdim(1)?;
///         let is_best = rewards.values.ge(&layout.to_members(&best)?)?;
///         Ok(Advantages::new(is_best.to_dtype(rewards.result_dtype)?))
///     }
/// }
///
/// let rewards = Tensor::new(&[0.5f32, -3., 2., 4.], &Device::Cpu)?;
/// let estimators: Vec<Box<dyn AdvantageEstimator>> = vec![Box::new(Best)];
/// let best = estimators[0].estimate(&AdvantageBatch::new(&rewards, 2))?;
/// assert_eq!(best.advantages.to_vec1::<f32>()?, [1., 0., 0., 1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait AdvantageEstimator {
    /// Computes the advantages for a batch.
    ///
    /// # Errors
    ///
    /// Fails if a tensor that the estimator needs is absent or has the wrong shape.
    fn estimate(&self, batch: &AdvantageBatch) -> Result<Advantages>;

    /// Returns the inputs that the estimator reads, so that a trainer computes them. A batch from a
    /// trainer always has rewards, groups, response mask and step.
    fn needs(&self) -> Inputs {
        Inputs::NONE
    }
}

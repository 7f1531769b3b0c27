//! What every way to estimate advantages has in common.

mod batch;
mod config;
mod group;
mod optimal_token_baseline;
mod pipeline;
pub(crate) mod recurrence;
pub(crate) mod returns;
pub(crate) mod sequence;
mod token;
mod whiten;

pub use batch::AdvantageBatch;
pub use config::AdvantageConfig;
pub(crate) use group::SequenceInputs;
pub use group::{
    Baseline, BaselinePopulation, Compensation, Components, GroupAdvantage, GroupStatistics, Scale,
    SingleSample,
};
pub use optimal_token_baseline::{OptimalTokenBaseline, TokenAlignment};
pub use pipeline::AdvantagePipeline;
pub use recurrence::reverse_recurrence;
pub use returns::MaskedTokens;
pub use sequence::SequenceAdvantage;
pub use token::{KlPenalty, TokenAdvantages, TokenBaseline, TokenShaping};
pub use whiten::{EpsilonPlacement, Whitening, masked_normalize, masked_whiten};

use candle_core::{Result, Tensor};

use crate::mask::Mask;
use crate::metrics::Metrics;

/// How much better than expected each sequence, or each token, was.
#[derive(Debug, Clone)]
pub struct Advantages {
    /// `[B]`, or `[B, T]` and 0 outside the mask; in f32 (f64 for rewards in f64).
    pub advantages: Tensor,
    /// What a critic should have expected, `[B, T]` and 0 outside the mask, if the estimator is one of tokens.
    pub returns: Option<Tensor>,
    /// Figures such as the fraction of what was clipped.
    pub metrics: Metrics,
}

impl Advantages {
    /// Advantages and nothing else.
    pub fn new(advantages: Tensor) -> Self {
        Self {
            advantages,
            returns: None,
            metrics: Metrics::new(),
        }
    }

    /// The advantages as `[B, T]`, 0 outside the mask: those of sequences are the same at each of their tokens.
    pub fn on_tokens(&self, mask: &Mask) -> Result<Tensor> {
        if self.advantages.rank() == 2 {
            mask.check_shape("advantages", &self.advantages)?;
            mask.select(&self.advantages)
        } else {
            mask.spread(&self.advantages)
        }
    }
}

/// A way to estimate advantages. [`crate::AdvantagePipeline`] has those that are published; implement this for others.
///
/// ```
/// use candle_core::{Device, Result, Tensor};
/// use candle_grpo_core::{AdvantageBatch, AdvantageEstimator, Advantages};
///
/// /// Only the sign of a reward counts.
/// struct Sign;
///
/// impl AdvantageEstimator for Sign {
///     fn estimate(&self, batch: &AdvantageBatch<'_>) -> Result<Advantages> {
///         let rewards = batch.sequence_rewards()?;
///         let signs = rewards.values.sign()?.to_dtype(rewards.result_dtype)?;
///         Ok(Advantages::new(signs))
///     }
/// }
///
/// let rewards = Tensor::new(&[0.5f32, -3.], &Device::Cpu)?;
/// let estimators: Vec<Box<dyn AdvantageEstimator>> = vec![Box::new(Sign)];
/// let signs = estimators[0].estimate(&AdvantageBatch::new(&rewards, 2))?;
/// assert_eq!(signs.advantages.to_vec1::<f32>()?, [1., -1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait AdvantageEstimator {
    /// The advantages of a batch. Errs if a tensor that it needs is absent or of the wrong shape.
    fn estimate(&self, batch: &AdvantageBatch<'_>) -> Result<Advantages>;
}

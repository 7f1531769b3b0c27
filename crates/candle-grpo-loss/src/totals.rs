//! Denominators for an optimizer step.

use std::iter::Sum;
use std::ops::Add;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_grpo_core::Mask;
use candle_grpo_core::dtype::statistics_dtype;
use serde::{Deserialize, Serialize};

/// Counts over all micro-batches and workers in one optimizer step: the denominators for
/// [`crate::Aggregation`].
///
/// Always count the whole step. Micro-batch losses and gradients then add up to the full batch's.
/// If each micro-batch were divided by its own counts, short micro-batches would get too much
/// weight.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_loss::StepTotals;
///
/// let first = Tensor::new(&[[1u8, 1, 1], [1, 0, 0]], &Device::Cpu)?;
/// let second = Tensor::new(&[[1u8, 0, 0], [0, 0, 0]], &Device::Cpu)?;
/// let totals = StepTotals::count(&first)? + StepTotals::count(&second)?;
/// assert_eq!((totals.tokens, totals.sequences, totals.rows), (5., 3., 4.));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepTotals {
    /// Number of valid tokens. Default 0.
    pub tokens: f64,
    /// Number of sequences with at least one valid token. Default 0.
    pub sequences: f64,
    /// Number of sequences, including those without a valid token. Default 0.
    pub rows: f64,
    /// Number of prompts with at least one valid token, for
    /// [`crate::Aggregation::PromptMeanTokenMean`]. The mask does not have this information.
    /// Absent by default.
    #[serde(default)]
    pub prompts: Option<f64>,
    /// Number of tokens in the entropy mask, for [`crate::PolicyBatch::entropy_mask`]. Absent by
    /// default.
    #[serde(default)]
    pub entropy_tokens: Option<f64>,
    /// Number of observations, for [`crate::PolicyBatch::observation_mask`]. Absent by default.
    #[serde(default)]
    pub observations: Option<f64>,
}

impl StepTotals {
    /// Counts a mask `[B, T]`. Synchronizes with the device.
    ///
    /// A micro-batch may have no valid token. If a whole step has none, computing its loss is an
    /// error.
    ///
    /// # Errors
    ///
    /// Fails if the mask is empty or has another rank.
    pub fn count(response_mask: &Tensor) -> Result<Self> {
        let mask = Mask::new(response_mask)?;
        let (rows, _) = mask.dims()?;
        let lengths = mask.lengths(DType::F32)?;
        let statistics = statistics_dtype(lengths.device());
        let nonempty = lengths.gt(0.)?.to_dtype(statistics)?.sum_all()?;
        let tokens = lengths.to_dtype(statistics)?.sum_all()?;
        // Widened on the host: not every device has f64.
        let counts = Tensor::stack(&[tokens, nonempty], D::Minus1)?
            .to_device(&Device::Cpu)?
            .to_dtype(DType::F64)?
            .to_vec1::<f64>()?;
        Ok(Self {
            tokens: counts[0],
            sequences: counts[1],
            rows: rows as f64,
            prompts: None,
            entropy_tokens: None,
            observations: None,
        })
    }

    /// Sets the number of prompts with at least one valid token.
    #[must_use]
    pub fn with_prompts(mut self, prompts: f64) -> Self {
        self.prompts = Some(prompts);
        self
    }

    /// Counts the tokens in an entropy mask `[B, T]`. Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Fails if the mask is empty or has another rank.
    pub fn with_entropy_mask(mut self, entropy_mask: &Tensor) -> Result<Self> {
        self.entropy_tokens = Some(Self::count(entropy_mask)?.tokens);
        Ok(self)
    }

    /// Counts the tokens in an observation mask `[B, T]`. Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Fails if the mask is empty or has another rank.
    pub fn with_observation_mask(mut self, observation_mask: &Tensor) -> Result<Self> {
        self.observations = Some(Self::count(observation_mask)?.tokens);
        Ok(self)
    }

    /// Fails unless the step has a valid token.
    pub(crate) fn check(&self) -> Result<()> {
        if !(self.tokens > 0. && self.tokens.is_finite()) {
            bail!(
                "totals: {self:?}, the step must have at least one valid token; skip a step whose sequences are all masked"
            );
        }
        Ok(())
    }

    /// Counts sequences without a valid token like any other.
    pub(crate) fn with_empty(self) -> Self {
        Self {
            sequences: self.rows,
            ..self
        }
    }
}

impl Add for StepTotals {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        // A count that is absent on one side is unknown for the sum.
        let sum = |a: Option<f64>, b: Option<f64>| Some(a? + b?);
        Self {
            tokens: self.tokens + other.tokens,
            sequences: self.sequences + other.sequences,
            rows: self.rows + other.rows,
            prompts: sum(self.prompts, other.prompts),
            entropy_tokens: sum(self.entropy_tokens, other.entropy_tokens),
            observations: sum(self.observations, other.observations),
        }
    }
}

impl Sum for StepTotals {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.reduce(Add::add).unwrap_or_default()
    }
}

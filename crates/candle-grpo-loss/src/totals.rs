//! What an optimiser step is divided by.

use std::iter::Sum;
use std::ops::Add;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_grpo_core::{Mask, statistics_dtype};
use serde::{Deserialize, Serialize};

/// Counts over all micro-batches, and all workers, of one optimiser step: the denominators of
/// [`crate::Aggregation`].
///
/// Dividing each micro-batch by its own counts would give short micro-batches too much weight; with the counts of the
/// whole step their losses and gradients add up to those of the batch.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_loss::StepTotals;
///
/// let first = Tensor::new(&[[1u8, 1, 1], [1, 0, 0]], &Device::Cpu)?;
/// let second = Tensor::new(&[[1u8, 0, 0], [0, 0, 0]], &Device::Cpu)?;
/// let totals = StepTotals::to_host(&first)? + StepTotals::to_host(&second)?;
/// assert_eq!(totals, StepTotals { tokens: 5., sequences: 3., rows: 4., prompts: 0. });
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepTotals {
    /// Tokens that count.
    pub tokens: f64,
    /// Sequences with at least one token that counts.
    pub sequences: f64,
    /// All sequences, those without a token included.
    pub rows: f64,
    /// Prompts with at least one token that counts; 0 as long as nobody has said so, as a mask does not tell.
    #[serde(default)]
    pub prompts: f64,
}

impl StepTotals {
    /// Counts a mask `[B, T]`: two numbers are copied to the host. A micro-batch without a token that counts is fine; a
    /// step without any is an error when a loss is computed, as there is nothing to learn from it.
    pub fn to_host(response_mask: &Tensor) -> Result<Self> {
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
            prompts: 0.,
        })
    }

    /// An error unless some token of the step counts.
    pub(crate) fn check(&self) -> Result<()> {
        if !(self.tokens > 0. && self.tokens.is_finite()) {
            bail!(
                "response_mask: no token of the step counts ({self:?}), at least one must; skip a step whose sequences are all masked"
            );
        }
        Ok(())
    }

    /// The same totals with sequences without a token counted like the others.
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
        Self {
            tokens: self.tokens + other.tokens,
            sequences: self.sequences + other.sequences,
            rows: self.rows + other.rows,
            prompts: self.prompts + other.prompts,
        }
    }
}

impl Sum for StepTotals {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        let none = Self {
            tokens: 0.,
            sequences: 0.,
            rows: 0.,
            prompts: 0.,
        };
        iter.fold(none, Add::add)
    }
}

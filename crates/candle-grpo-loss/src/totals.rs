//! What an optimiser step is divided by.

use std::iter::Sum;
use std::ops::Add;

use candle_core::{D, DType, Result, Tensor, bail};
use candle_grpo_core::Mask;
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
    /// Counts a mask `[B, T]`: two numbers are copied to the host. Errs if no token counts, as there is nothing to
    /// learn then; a micro-batch without tokens is fine as long as the mask given here is that of the whole step.
    pub fn to_host(response_mask: &Tensor) -> Result<Self> {
        let mask = Mask::new(response_mask)?;
        let (rows, _) = mask.dims()?;
        let lengths = mask.lengths(DType::F32)?;
        let nonempty = lengths.gt(0.)?.to_dtype(DType::F64)?.sum_all()?;
        let tokens = lengths.to_dtype(DType::F64)?.sum_all()?;
        let counts = Tensor::stack(&[tokens, nonempty], D::Minus1)?.to_vec1::<f64>()?;
        if counts[0] == 0. {
            bail!(
                "response_mask: all {rows} sequences are masked, at least one token must count; skip a step without any"
            );
        }
        Ok(Self {
            tokens: counts[0],
            sequences: counts[1],
            rows: rows as f64,
            prompts: 0.,
        })
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

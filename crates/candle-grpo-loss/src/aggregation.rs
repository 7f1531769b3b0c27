//! How the losses of tokens become one number.

use candle_core::{D, Result, Tensor, bail};
use candle_grpo_core::{Mask, statistics_dtype};
use serde::{Deserialize, Serialize};

use crate::limits::check_positive;
use crate::totals::StepTotals;

/// The mean that is taken of the per-token losses x over the mask m. The names are those of verl and ROLL.
///
/// Denominators are [`StepTotals`] of the whole optimiser step, so that the losses, and gradients, of micro-batches add
/// up to those of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aggregation {
    /// `sum(m x) / tokens`: each token counts the same (DAPO, <https://arxiv.org/abs/2503.14476>).
    #[default]
    TokenMean,
    /// `sum(m x)`, for a caller who divides by something else.
    TokenSum,
    /// `sum_i(sum_t m x) / sequences`.
    SeqMeanTokenSum,
    /// `sum_i(sum_t m x / tokens_i) / sequences`: each sequence counts the same (GRPO, <https://arxiv.org/abs/2402.03300>).
    SeqMeanTokenMean,
    /// The mean over prompts of the mean over the tokens of all samples of a prompt (the DAPO paper's formula,
    /// <https://arxiv.org/abs/2503.14476>). Needs [`crate::PolicyBatch::prompt_tokens`] and [`StepTotals::prompts`].
    PromptMeanTokenMean,
    /// `sum(m x) / (sequences * length)` with a length that does not depend on the batch (Dr. GRPO,
    /// <https://arxiv.org/abs/2503.20783>).
    SeqMeanTokenSumNorm {
        /// The constant length, usually the longest response that is sampled.
        length: f64,
    },
}

impl Aggregation {
    /// Checks the options; the error names the one that is wrong.
    pub fn validate(&self) -> Result<()> {
        match *self {
            Self::SeqMeanTokenSumNorm { length } => check_positive("aggregation.length", length),
            _ => Ok(()),
        }
    }

    /// Whether a long sequence counts for more than a short one, though its name does not say so.
    pub(crate) fn weighs_by_length(&self) -> bool {
        match self {
            Self::TokenMean
            | Self::TokenSum
            | Self::PromptMeanTokenMean
            | Self::SeqMeanTokenSumNorm { .. } => true,
            Self::SeqMeanTokenSum | Self::SeqMeanTokenMean => false,
        }
    }

    /// One number from `per_token` `[B, T]`, of the same dtype: the share of this micro-batch in the step.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_grpo_core::Mask;
    /// use candle_grpo_loss::{Aggregation, StepTotals};
    ///
    /// let per_token = Tensor::new(&[[1f32, 2., f32::NAN], [6., f32::NAN, f32::NAN]], &Device::Cpu)?;
    /// let response_mask = Tensor::new(&[[1u8, 1, 0], [1, 0, 0]], &Device::Cpu)?;
    /// let (mask, totals) = (Mask::new(&response_mask)?, StepTotals::to_host(&response_mask)?);
    /// let loss = Aggregation::TokenMean.apply(&per_token, &mask, &totals)?;
    /// assert_eq!(loss.to_scalar::<f32>()?, 3.0);
    /// let loss = Aggregation::SeqMeanTokenMean.apply(&per_token, &mask, &totals)?;
    /// assert_eq!(loss.to_scalar::<f32>()?, 3.75);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn apply(&self, per_token: &Tensor, mask: &Mask, totals: &StepTotals) -> Result<Tensor> {
        self.apply_with_prompts(per_token, mask, totals, None)
    }

    /// [`Self::apply`], given for each sequence `[B]` the number of tokens of its prompt's samples, which
    /// [`Self::PromptMeanTokenMean`] needs.
    pub fn apply_with_prompts(
        &self,
        per_token: &Tensor,
        mask: &Mask,
        totals: &StepTotals,
        prompt_tokens: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.validate()?;
        totals.check()?;
        mask.check_shape("per_token", per_token)?;
        let statistics = statistics_dtype(per_token.device());
        let selected = mask.select(per_token)?.to_dtype(statistics)?;
        let sum = match self {
            Self::SeqMeanTokenMean => {
                let lengths = mask.lengths(statistics)?.maximum(1.)?;
                (selected.sum_keepdim(D::Minus1)? / lengths)?.sum_all()?
            }
            Self::PromptMeanTokenMean => {
                let (batch, _) = mask.dims()?;
                let tokens = match prompt_tokens {
                    Some(tokens) if tokens.dims() == [batch] => tokens.detach(),
                    Some(tokens) => bail!(
                        "prompt_tokens: shape {:?}, must be [{batch}]",
                        tokens.dims()
                    ),
                    None => bail!("prompt_tokens: absent, a mean over prompts needs them"),
                };
                let tokens = tokens.to_dtype(statistics)?.maximum(1.)?;
                (selected.sum(D::Minus1)? / tokens)?.sum_all()?
            }
            _ => selected.sum_all()?,
        };
        (sum / self.denominator(totals)?)?.to_dtype(per_token.dtype())
    }

    /// What the sum over all sequences is divided by.
    pub(crate) fn denominator(&self, totals: &StepTotals) -> Result<f64> {
        let denominator = match *self {
            Self::TokenMean => totals.tokens,
            Self::TokenSum => 1.,
            Self::PromptMeanTokenMean => totals.prompts,
            Self::SeqMeanTokenSum | Self::SeqMeanTokenMean => totals.sequences,
            Self::SeqMeanTokenSumNorm { length } => totals.sequences * length,
        };
        if !(denominator > 0. && denominator.is_finite()) {
            bail!("totals: {totals:?} give the denominator {denominator}, it must be positive");
        }
        Ok(denominator)
    }
}

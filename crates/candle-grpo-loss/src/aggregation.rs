//! Aggregation: reduces per-token losses to a scalar.

use candle_core::{D, Result, Tensor, bail};
use candle_grpo_core::Mask;
use candle_grpo_core::dtype::statistics_dtype;
use serde::{Deserialize, Serialize};

use crate::totals::StepTotals;
use candle_grpo_core::validate::positive;

/// Reduction from per-token losses x over the mask m to one scalar. The names are verl's and
/// ROLL's.
///
/// Choose [`Self::TokenMean`] if response lengths differ much: long responses then count more.
/// Choose [`Self::SeqMeanTokenMean`] to weight all sequences equally, as the GRPO paper does.
///
/// Denominators are [`StepTotals`] for the whole optimizer step, so micro-batch losses and
/// gradients add up to those for the batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Aggregation {
    /// `sum(m x) / tokens`: equal weight for each token (DAPO, <https://arxiv.org/abs/2503.14476>).
    TokenMean,
    /// `sum(m x)`, for a custom denominator.
    TokenSum,
    /// `sum_i(sum_t m x) / sequences`.
    SeqMeanTokenSum,
    /// `sum_i(sum_t m x / tokens_i) / sequences`: equal weight for each sequence
    /// (GRPO, <https://arxiv.org/abs/2402.03300>).
    SeqMeanTokenMean,
    /// Mean over prompts, where each prompt averages all tokens in its samples (the DAPO paper's
    /// formula, <https://arxiv.org/abs/2503.14476>). Requires [`crate::PolicyBatch::prompt_tokens`]
    /// and [`StepTotals::prompts`].
    PromptMeanTokenMean,
    /// `sum(m x) / (sequences * length)` with a constant length (Dr. GRPO, <https://arxiv.org/abs/2503.20783>).
    SeqMeanTokenSumNorm {
        /// Constant length, usually the maximum response length.
        length: f64,
    },
}

impl Aggregation {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid. The error names the option, its value and what it must be.
    pub fn validate(&self) -> Result<()> {
        if let Self::SeqMeanTokenSumNorm { length } = *self {
            positive("aggregation.length", length)?;
        }
        Ok(())
    }

    /// Returns whether longer sequences implicitly have more weight.
    pub(crate) fn weights_by_length(&self) -> bool {
        match self {
            Self::TokenMean
            | Self::TokenSum
            | Self::PromptMeanTokenMean
            | Self::SeqMeanTokenSumNorm { .. } => true,
            Self::SeqMeanTokenSum | Self::SeqMeanTokenMean => false,
        }
    }

    /// Reduces `per_token` `[B, T]` to a scalar with the same dtype: this micro-batch's
    /// contribution to the step.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, if the step has no valid token, or if `per_token` differs
    /// from `mask` in shape or device. [`Self::PromptMeanTokenMean`] always fails here: it needs
    /// [`Self::apply_with_prompts`].
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_grpo_loss::{Aggregation, Mask, StepTotals};
    ///
    /// let per_token = Tensor::new(&[[1f32, 2., f32::NAN], [6., f32::NAN, f32::NAN]], &Device::Cpu)?;
    /// let response_mask = Tensor::new(&[[1u8, 1, 0], [1, 0, 0]], &Device::Cpu)?;
    /// let (mask, totals) = (Mask::new(&response_mask)?, StepTotals::count(&response_mask)?);
    /// let loss = Aggregation::TokenMean.apply(&per_token, &mask, &totals)?;
    /// assert_eq!(loss.to_scalar::<f32>()?, 3.0);
    /// let loss = Aggregation::SeqMeanTokenMean.apply(&per_token, &mask, &totals)?;
    /// assert_eq!(loss.to_scalar::<f32>()?, 3.75);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn apply(&self, per_token: &Tensor, mask: &Mask, totals: &StepTotals) -> Result<Tensor> {
        self.apply_with_prompts(per_token, mask, totals, None)
    }

    /// Does the same as [`Self::apply`], with `prompt_tokens` `[B]`: for each sequence, the number
    /// of tokens in all samples for its prompt.
    ///
    /// [`Self::PromptMeanTokenMean`] requires it.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, if the step has no valid token, or if `per_token` differs
    /// from `mask` in shape or device. Also fails if a mean over prompts lacks `prompt_tokens` or
    /// [`StepTotals::prompts`].
    pub fn apply_with_prompts(
        &self,
        per_token: &Tensor,
        mask: &Mask,
        totals: &StepTotals,
        prompt_tokens: Option<&Tensor>,
    ) -> Result<Tensor> {
        self.validate()?;
        totals.check()?;
        mask.check("per_token", per_token)?;
        let statistics = statistics_dtype(per_token.device());
        let selected = mask.select(per_token)?.to_dtype(statistics)?;
        let sum = match self {
            Self::SeqMeanTokenMean => {
                let lengths = mask.lengths(statistics)?.maximum(1.)?;
                (selected.sum_keepdim(D::Minus1)? / lengths)?.sum_all()?
            }
            Self::PromptMeanTokenMean => {
                let (batch, _) = mask.dims()?;
                let tokens = checked_prompt_tokens(prompt_tokens, batch)?.detach();
                let tokens = tokens.to_dtype(statistics)?.maximum(1.)?;
                (selected.sum(D::Minus1)? / tokens)?.sum_all()?
            }
            _ => selected.sum_all()?,
        };
        (sum / self.denominator(totals)?)?.to_dtype(per_token.dtype())
    }

    /// Returns the divisor for the sum over all sequences.
    pub(crate) fn denominator(&self, totals: &StepTotals) -> Result<f64> {
        let denominator = match *self {
            Self::TokenMean => totals.tokens,
            Self::TokenSum => 1.,
            Self::PromptMeanTokenMean => match totals.prompts {
                Some(prompts) => prompts,
                None => bail!(
                    "totals.prompts: absent, a mean over prompts needs their number over the whole step"
                ),
            },
            Self::SeqMeanTokenSum | Self::SeqMeanTokenMean => totals.sequences,
            Self::SeqMeanTokenSumNorm { length } => totals.sequences * length,
        };
        if !(denominator > 0. && denominator.is_finite()) {
            bail!("totals: {totals:?}, must give a positive denominator; it is {denominator}");
        }
        Ok(denominator)
    }
}

/// Returns the number of tokens for each sequence's prompt, `[B]`, which a mean over prompts needs.
pub(crate) fn checked_prompt_tokens(
    prompt_tokens: Option<&Tensor>,
    batch: usize,
) -> Result<&Tensor> {
    match prompt_tokens {
        Some(tokens) if tokens.dims() == [batch] => Ok(tokens),
        Some(tokens) => bail!(
            "prompt_tokens: shape {:?}, must be [{batch}]",
            tokens.dims()
        ),
        None => bail!(
            "prompt_tokens: absent, a mean over prompts needs the number of tokens of each prompt"
        ),
    }
}

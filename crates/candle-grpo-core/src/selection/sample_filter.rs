//! Sample filters.

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::dtype::for_statistics;
use crate::groups::{GroupLayout, Groups};
use crate::mask::Mask;
use crate::moments::Moments;
use crate::rewards::{check_magnitude, finite_mask};
use crate::validate::{self, Checked};

/// Batch tensors that [`SampleFilter`] reads.
#[derive(Debug, Clone)]
pub struct FilterBatch<'a> {
    /// Scores `[B]` before any shaping. A non-finite score does not enter its group's statistics.
    pub scores: &'a Tensor,
    /// Groups: samples that share a prompt.
    pub groups: Groups,
    /// Tokens `[B, T]` that the policy generated.
    pub response_mask: &'a Mask,
    /// 1 where a response was truncated, `[B]`. [`SampleFilter::NotTruncated`] needs it.
    pub truncated: Option<&'a Tensor>,
}

/// A sample filter.
///
/// Filters do not change rewards. A dropped sample still enters its group's statistics, unless the
/// population is [`crate::advantage::BaselinePopulation::Unmasked`].
///
/// ```
/// # use candle_core::{Device, Tensor};
/// use candle_grpo_core::Mask;
/// use candle_grpo_core::selection::{FilterBatch, SampleFilter};
///
/// let mask = Mask::new(&Tensor::new(&[[1u8, 1], [1, 0], [1, 0], [1, 0]], &Device::Cpu)?)?;
/// let scores = Tensor::new(&[0f32, 1., 1., 1.], &Device::Cpu)?;
/// let batch = FilterBatch { scores: &scores, groups: 2.into(), response_mask: &mask, truncated: None };
///
/// let filters = [SampleFilter::Spread {}, SampleFilter::ShorterThan { length: 2 }];
/// let keep = SampleFilter::keep_all(&filters, &batch)?;
/// assert_eq!(keep.to_vec1::<u8>()?, [0, 1, 0, 0]);
/// let mask = mask.keep_samples(&keep)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum SampleFilter {
    /// Keeps samples in groups whose scores differ.
    Spread {},
    /// Keeps samples in groups whose mean score lies strictly between the bounds (ROLL's
    /// `difficulty_mask`). A sample that is alone in its group is kept.
    Difficulty {
        /// Lower bound: drops groups that are too hard.
        low: f64,
        /// Upper bound: drops groups that are too easy.
        high: f64,
    },
    /// Keeps samples with fewer tokens than `length` (ROLL's `max_len_mask`, with the length
    /// limit).
    ShorterThan {
        /// Number of tokens.
        length: usize,
    },
    /// Keeps samples that were not truncated (TRL's `mask_truncated_completions`).
    NotTruncated {},
    /// Keeps samples that score 1, and samples that score 0 with fewer tokens than `length`. A long
    /// wrong answer may have been truncated (ROLL's `error_max_len_clip`).
    ShortErrors {
        /// Number of tokens.
        length: usize,
    },
}

impl SampleFilter {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid; the error names it.
    pub fn validate(&self) -> Checked {
        match *self {
            Self::Difficulty { low, high } => {
                validate::check(low < high, "low", low, &format!("be below high, {high}"))
            }
            _ => Ok(()),
        }
    }

    /// Returns 1 for the samples that every filter keeps: u8 `[B]`.
    ///
    /// # Errors
    ///
    /// Fails if a filter is invalid, or if a tensor is absent or has another shape.
    pub fn keep_all(filters: &[Self], batch: &FilterBatch<'_>) -> Result<Tensor> {
        let (sequences, _) = batch.response_mask.dims()?;
        let all = Tensor::ones(
            sequences,
            DType::U8,
            batch.response_mask.selected().device(),
        )?;
        let keep = |kept: Tensor, filter: &Self| kept * filter.keep(batch)?;
        filters.iter().try_fold(all, keep)
    }

    /// Returns 1 for the samples that this filter keeps: u8 `[B]`.
    ///
    /// # Errors
    ///
    /// Fails if the filter is invalid, or if a tensor is absent or has another shape.
    pub fn keep(&self, batch: &FilterBatch<'_>) -> Result<Tensor> {
        self.validate()?;
        let mask = batch.response_mask;
        mask.check_sequences("scores", batch.scores)?;
        let scores = for_statistics(batch.scores)?;
        let shorter_than =
            |length: usize| mask.lengths(scores.dtype())?.squeeze(1)?.lt(length as f64);
        match *self {
            Self::Spread {} => {
                let (layout, moments) = group_moments(&scores, &batch.groups)?;
                layout.to_members(&moments.constant.eq(0u8)?)
            }
            Self::Difficulty { low, high } => {
                let (layout, moments) = group_moments(&scores, &batch.groups)?;
                let between = (moments.mean.gt(low)? * moments.mean.lt(high)?)?;
                let alone = moments.count.le(1.)?;
                layout.to_members(&(between + alone)?.ne(0u8)?)
            }
            Self::ShorterThan { length } => shorter_than(length),
            Self::NotTruncated {} => {
                let Some(truncated) = batch.truncated else {
                    bail!("truncated: absent, must be given for the filter not_truncated");
                };
                mask.check_sequences("truncated", truncated)?;
                truncated.detach().eq(0.)
            }
            Self::ShortErrors { length } => {
                let short_error = (scores.eq(0.)? * shorter_than(length)?)?;
                (short_error + scores.eq(1.)?)?.ne(0u8)
            }
        }
    }
}

fn group_moments(scores: &Tensor, groups: &Groups) -> Result<(GroupLayout, Moments)> {
    check_magnitude("scores", scores)?;
    let layout = GroupLayout::new(groups, scores.dim(0)?, scores.device())?;
    let selected = (layout.to_rows(&finite_mask(scores)?)? * layout.present()?)?;
    let moments = Moments::new(&layout.to_rows(scores)?, &selected)?;
    Ok((layout, moments))
}

//! Which samples are trained on.

use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::groups::{GroupLayout, Groups};
use crate::mask::Mask;
use crate::moments::Moments;
use crate::rewards::{IntoRewards, finite_mask};

/// What the filters of samples look at.
#[derive(Debug, Clone)]
pub struct FilterBatch<'a> {
    /// The scores `[B]` before any shaping. A sample without a finite one is kept out of the figures of its group.
    pub scores: &'a Tensor,
    /// Which samples answer the same prompt.
    pub groups: Groups,
    /// The tokens `[B, T]` that the policy wrote.
    pub response_mask: &'a Mask,
    /// `[B]`, 1 where a response was cut off; [`SampleFilter::NotTruncated`] needs it.
    pub truncated: Option<&'a Tensor>,
}

/// A reason to train on a sample or not. Filters do not touch the rewards: what is filtered out takes part in the statistics
/// of its group unless [`crate::BaselinePopulation::Unmasked`] says otherwise.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// use candle_grpo_core::{FilterBatch, Mask, SampleFilter};
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
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum SampleFilter {
    /// The scores of its group differ.
    Spread {},
    /// The mean score of its group lies between the bounds and equals neither (ROLL's `difficulty_mask`). A group of one is
    /// kept.
    Difficulty {
        /// Not too hard.
        low: f64,
        /// Not too easy.
        high: f64,
    },
    /// It has fewer tokens than this (ROLL's `max_len_mask`, with the longest response that is allowed).
    ShorterThan {
        /// The number of tokens.
        length: usize,
    },
    /// It was not cut off (TRL's `mask_truncated_completions`).
    NotTruncated {},
    /// Its score is 1, or 0 and it has fewer tokens than this: a long wrong answer may be one that was cut off (ROLL's
    /// `error_max_len_clip`). Any other score is dropped.
    ShortErrors {
        /// The number of tokens.
        length: usize,
    },
}

impl SampleFilter {
    /// 1 for the samples that every filter keeps: u8 `[B]`.
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

    /// 1 for the samples that this filter keeps: u8 `[B]`.
    pub fn keep(&self, batch: &FilterBatch<'_>) -> Result<Tensor> {
        let scores = batch.scores.into_rewards()?.values;
        let mask = batch.response_mask;
        let (sequences, _) = mask.dims()?;
        if scores.dims() != [sequences] {
            bail!(
                "scores: shape {:?}, must be [{sequences}], one for each row of response_mask",
                scores.dims()
            );
        }
        let shorter_than =
            |length: usize| mask.lengths(scores.dtype())?.squeeze(1)?.lt(length as f64);
        match *self {
            Self::Spread {} => {
                let (layout, moments) = of_groups(&scores, &batch.groups)?;
                layout.to_members(&moments.constant.eq(0u8)?)
            }
            Self::Difficulty { low, high } => {
                if low.is_nan() || high.is_nan() || low >= high {
                    bail!("difficulty: low {low} and high {high}, low must be below high");
                }
                let (layout, moments) = of_groups(&scores, &batch.groups)?;
                let between = (moments.mean.gt(low)? * moments.mean.lt(high)?)?;
                let alone = moments.count.le(1.)?;
                layout.to_members(&(between + alone)?.ne(0u8)?)
            }
            Self::ShorterThan { length } => shorter_than(length),
            Self::NotTruncated {} => {
                let Some(truncated) = batch.truncated else {
                    bail!("truncated: absent, must be given to keep what was not truncated");
                };
                if truncated.dims() != [sequences] {
                    bail!(
                        "truncated: shape {:?}, must be [{sequences}], one for each row of response_mask",
                        truncated.dims()
                    );
                }
                truncated.detach().eq(0.)
            }
            Self::ShortErrors { length } => {
                let short_error = (scores.eq(0.)? * shorter_than(length)?)?;
                (short_error + scores.eq(1.)?)?.ne(0u8)
            }
        }
    }
}

fn of_groups(scores: &Tensor, groups: &Groups) -> Result<(GroupLayout, Moments)> {
    let layout = GroupLayout::new(groups, scores.dim(0)?, scores.device())?;
    let selected = (layout.to_rows(&finite_mask(scores)?)? * layout.present()?)?;
    let moments = Moments::new(&layout.to_rows(scores)?, &selected)?;
    Ok((layout, moments))
}

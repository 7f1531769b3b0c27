//! The vocabulary entries that a distillation compares.

use candle_core::{D, DType, Result, Tensor, bail};
use candle_grpo_kernels::top_k;
use serde::{Deserialize, Serialize};

use super::distribution::Distribution;
use crate::softmax::{log_softmax, log_sum_exp};
use candle_grpo_core::validate::at_least_one;

/// Vocabulary entries that are compared, if the teacher returns logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[non_exhaustive]
pub enum Support {
    /// The whole vocabulary. The default.
    #[default]
    Vocabulary,
    /// The teacher's k most likely entries.
    Teacher {
        /// Number of entries.
        k: usize,
    },
    /// The student's k most likely entries.
    Student {
        /// Number of entries.
        k: usize,
    },
    /// The k most likely entries under either model.
    Union {
        /// Number of entries from each model.
        k: usize,
    },
    /// The sampled token.
    Sampled {
        /// Adds the teacher's most likely entry.
        teacher_best: bool,
    },
}

/// Treatment for entries outside the support.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Tail {
    /// One extra entry with the remaining probability, which compares coarser distributions. The
    /// default.
    #[default]
    Bucket,
    /// Left out; the compared entries are renormalized (TRL, ms-swift, twinkle).
    Renormalize,
    /// Left out without renormalization; the partial sum is at least 0 (verl).
    Drop,
}

impl Support {
    pub(super) fn validate(self) -> Result<()> {
        match self {
            Self::Vocabulary | Self::Sampled { .. } => Ok(()),
            Self::Teacher { k } | Self::Student { k } | Self::Union { k } => {
                Ok(at_least_one("support.k", k)?)
            }
        }
    }

    /// Returns the entries, or `None` for the whole vocabulary. Student and teacher are logits.
    pub(super) fn entries(
        self,
        student: &Tensor,
        teacher: &Tensor,
        sampled: Option<&Tensor>,
    ) -> Result<Option<Entries>> {
        let ids = match self {
            Self::Vocabulary => return Ok(None),
            Self::Teacher { k } => top_k(teacher, k)?,
            Self::Student { k } => top_k(student, k)?,
            Self::Union { k } => Tensor::cat(&[top_k(teacher, k)?, top_k(student, k)?], D::Minus1)?,
            Self::Sampled { teacher_best } => {
                let Some(sampled) = sampled else {
                    bail!("sampled_tokens: absent, the support sampled needs them");
                };
                let outer = &teacher.dims()[..teacher.rank() - 1];
                if sampled.dims() != outer {
                    bail!(
                        "sampled_tokens: shape {:?}, must be {outer:?}",
                        sampled.dims()
                    );
                }
                let sampled = sampled.unsqueeze(D::Minus1)?.to_dtype(DType::U32)?;
                if teacher_best {
                    Tensor::cat(&[top_k(teacher, 1)?, sampled], D::Minus1)?
                } else {
                    sampled
                }
            }
        };
        let entries = match self {
            Self::Teacher { .. } | Self::Student { .. } => Entries {
                distinct: ids.ones_like()?.to_dtype(DType::U8)?,
                ids,
            },
            _ => Entries::distinct(&ids)?,
        };
        Ok(Some(entries))
    }
}

/// A distribution over the vocabulary, or log-probs for the entries, `[.., K]`.
pub(super) enum Source {
    Whole(Distribution),
    /// Log-probs, and the vocabulary size.
    Entries(Tensor, usize),
}

/// Vocabulary entries.
pub(super) struct Entries {
    /// u32, `[.., K]`
    ids: Tensor,
    /// u8, `[.., K]`: 0 for an entry that occurred before.
    distinct: Tensor,
}

impl Entries {
    /// Creates entries, some of which may repeat.
    pub(super) fn distinct(ids: &Tensor) -> Result<Self> {
        let ids = ids.to_dtype(DType::U32)?.contiguous()?;
        let k = ids.dim(D::Minus1)?;
        // Row i, column j: entry j is before entry i.
        let place = Tensor::arange(0u32, k as u32, ids.device())?;
        let before = place
            .reshape((1, k))?
            .broadcast_lt(&place.reshape((k, 1))?)?;
        let same = ids
            .unsqueeze(D::Minus1)?
            .broadcast_eq(&ids.unsqueeze(ids.rank() - 1)?)?;
        let repeated = same.broadcast_mul(&before)?.max(D::Minus1)?;
        Ok(Self {
            distinct: repeated.eq(0u8)?,
            ids,
        })
    }

    /// Returns the entries' log-probs, with minus infinity where an entry repeats.
    fn gather(&self, source: &Source) -> Result<Tensor> {
        let x = match source {
            Source::Whole(x) => {
                let logits = x.logits.contiguous()?.gather(&self.ids, D::Minus1)?;
                logits.broadcast_sub(&x.total)?
            }
            Source::Entries(x, _) => x.clone(),
        };
        self.distinct
            .where_cond(&x, &(x.zeros_like()? + f64::NEG_INFINITY)?)
    }

    /// Returns the entries' total probability, without a gradient.
    pub(super) fn mass(&self, source: &Source) -> Result<Tensor> {
        self.gather(source)?.detach().exp()?.sum(D::Minus1)
    }

    /// Returns log-probs for the entries and the tail: `[.., K]`, or `[.., K + 1]` with a bucket
    /// whose probability is at least `floor`.
    pub(super) fn log_probs(
        &self,
        source: &Source,
        tail: Tail,
        floor: Option<f64>,
    ) -> Result<Tensor> {
        let entries = self.gather(source)?;
        match tail {
            Tail::Drop => Ok(entries),
            Tail::Renormalize => log_softmax(&entries),
            Tail::Bucket => {
                let others = match source {
                    Source::Whole(x) => self.others(x)?,
                    Source::Entries(x, vocabulary) => {
                        let mass = entries.exp()?.sum_keepdim(D::Minus1)?;
                        if x.dim(D::Minus1)? < *vocabulary {
                            // The difference is rounded, and the other entries have some
                            // probability.
                            (mass.neg()? + 1.)?
                                .maximum(f64::from(f32::EPSILON))?
                                .log()?
                        } else {
                            (mass.zeros_like()? + f64::NEG_INFINITY)?
                        }
                    }
                };
                let others = match floor {
                    None => others,
                    Some(floor) => {
                        let constant = (others.zeros_like()? + floor.ln())?;
                        let below = others.detach().lt(floor.ln())?;
                        below.where_cond(&constant, &others)?
                    }
                };
                Tensor::cat(&[entries, others], D::Minus1)
            }
        }
    }

    /// Returns the logarithm of the other entries' probability, `[.., 1]`. It sums them, because 1
    /// minus the mass would lose a small tail.
    fn others(&self, x: &Distribution) -> Result<Tensor> {
        let total = &x.total;
        let x = &x.logits;
        let ones = self.ids.to_dtype(DType::F32)?.ones_like()?;
        let zeros = x.detach().to_dtype(DType::F32)?.zeros_like()?;
        let chosen = zeros
            .contiguous()?
            .scatter_add(&self.ids, &ones, D::Minus1)?
            .gt(0.)?;
        let lowest = (x.zeros_like()? + f64::NEG_INFINITY)?;
        log_sum_exp(&chosen.where_cond(&lowest, x)?)? - total
    }
}

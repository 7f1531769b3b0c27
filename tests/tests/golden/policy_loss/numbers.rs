//! The inputs of a case as f64 numbers on the host, for metrics that each peer defines in its own
//! way.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_grpo_core::Mask;
use candle_grpo_loss::ImportanceLevel;

use super::Tensors;

/// Sequences of tokens. All vectors have one entry per position, row by row.
pub(super) struct Numbers {
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) mask: Vec<bool>,
    pub(super) log_probs: Vec<f64>,
    pub(super) old_log_probs: Vec<f64>,
    pub(super) advantages: Vec<f64>,
    /// `log_probs - old_log_probs`, 0 outside the mask.
    pub(super) log_ratio: Vec<f64>,
    /// True if a sequence has one advantage for all its tokens.
    pub(super) one_advantage: bool,
}

/// The entries of a tensor.
pub(super) fn numbers(x: &Tensor) -> Result<Vec<f64>> {
    let x = x.detach().to_device(&Device::Cpu)?;
    Ok(x.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// A flag as a number.
pub(super) fn flag(holds: bool) -> f64 {
    f64::from(u8::from(holds))
}

impl Numbers {
    pub(super) fn read(tensors: &Tensors) -> Result<Self> {
        let (rows, width) = tensors.mask.dims2()?;
        let mask: Vec<bool> = numbers(&tensors.mask)?.iter().map(|&m| m != 0.).collect();
        let log_probs = numbers(&tensors.log_probs)?;
        let old_log_probs = match &tensors.old_log_probs {
            Some(old) => numbers(old)?,
            None => log_probs.clone(),
        };
        let advantages = numbers(&tensors.advantages)?;
        let one_advantage = advantages.len() == rows;
        let advantages = if one_advantage {
            (0..rows * width).map(|i| advantages[i / width]).collect()
        } else {
            advantages
        };
        let log_ratio = (0..rows * width)
            .map(|i| {
                if mask[i] {
                    log_probs[i] - old_log_probs[i]
                } else {
                    0.
                }
            })
            .collect();
        Ok(Self {
            rows,
            width,
            mask,
            log_probs,
            old_log_probs,
            advantages,
            log_ratio,
            one_advantage,
        })
    }

    /// The value of `f` at each position.
    pub(super) fn map(&self, f: impl Fn(usize) -> f64) -> Vec<f64> {
        (0..self.rows * self.width).map(f).collect()
    }

    /// The sum of `x` over the mask.
    pub(super) fn sum(&self, x: &[f64]) -> f64 {
        let valid = x.iter().zip(&self.mask).filter(|(_, valid)| **valid);
        valid.map(|(x, _)| x).sum()
    }

    /// The mean of `x` over the mask.
    pub(super) fn mean(&self, x: &[f64]) -> f64 {
        self.sum(x) / self.tokens().max(1.)
    }

    /// The maximum and the minimum of `x` over the mask.
    pub(super) fn extremes(&self, x: &[f64]) -> (f64, f64) {
        let valid = x.iter().zip(&self.mask).filter(|(_, valid)| **valid);
        valid.fold((f64::NEG_INFINITY, f64::INFINITY), |(max, min), (&x, _)| {
            (max.max(x), min.min(x))
        })
    }

    pub(super) fn tokens(&self) -> f64 {
        self.mask.iter().filter(|valid| **valid).count() as f64
    }

    /// The mean of `x` over the tokens of each sequence; nothing for an empty one.
    pub(super) fn row_means(&self, x: &[f64]) -> Vec<Option<f64>> {
        let rows = x.chunks(self.width).zip(self.mask.chunks(self.width));
        rows.map(|(x, mask)| {
            let valid: Vec<f64> = (0..self.width).filter(|&t| mask[t]).map(|t| x[t]).collect();
            (!valid.is_empty()).then(|| valid.iter().sum::<f64>() / valid.len() as f64)
        })
        .collect()
    }

    /// The sum of `x` over the tokens of each sequence.
    pub(super) fn row_sums(&self, x: &[f64]) -> Vec<f64> {
        let rows = x.chunks(self.width).zip(self.mask.chunks(self.width));
        rows.map(|(x, mask)| (0..self.width).filter(|&t| mask[t]).map(|t| x[t]).sum())
            .collect()
    }

    /// `per_row` at every position of its row, masked ones included.
    pub(super) fn spread(&self, per_row: &[f64]) -> Vec<f64> {
        self.map(|i| per_row[i / self.width])
    }

    /// The log-ratio `d`, 0 outside the mask, at a level. A level of the sequence fills masked
    /// positions too.
    pub(super) fn at_level(&self, d: &[f64], level: ImportanceLevel) -> Vec<f64> {
        match level {
            ImportanceLevel::Token => d.to_vec(),
            ImportanceLevel::Sequence | ImportanceLevel::SequenceToken => {
                let means: Vec<f64> = self
                    .row_means(d)
                    .into_iter()
                    .map(Option::unwrap_or_default)
                    .collect();
                self.spread(&means)
            }
            ImportanceLevel::SequenceProduct => self.spread(&self.row_sums(d)),
            ImportanceLevel::Segment => self.segment_means(d),
            other => panic!("no formula of {other:?}"),
        }
    }

    /// The mean of `d` over the run of consecutive valid positions around each position, 0 outside
    /// the mask.
    fn segment_means(&self, d: &[f64]) -> Vec<f64> {
        let mut means = vec![0.; d.len()];
        let mut start = 0;
        while start < d.len() {
            let row_end = (start / self.width + 1) * self.width;
            if !self.mask[start] {
                start += 1;
                continue;
            }
            let end = (start..row_end).find(|&i| !self.mask[i]).unwrap_or(row_end);
            let mean = d[start..end].iter().sum::<f64>() / (end - start) as f64;
            means[start..end].fill(mean);
            start = end;
        }
        means
    }

    /// `x` as a tensor `[B, T]`, with its mask.
    pub(super) fn tensor(&self, x: &[f64]) -> Result<(Tensor, Mask)> {
        let shape = (self.rows, self.width);
        let mask: Vec<u8> = self.mask.iter().map(|&valid| u8::from(valid)).collect();
        let mask = Mask::new(&Tensor::from_vec(mask, shape, &Device::Cpu)?)?;
        Ok((Tensor::from_slice(x, shape, &Device::Cpu)?, mask))
    }
}

/// The mean of `x`.
pub(super) fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

/// The standard deviation of `x` with n - 1.
pub(super) fn std(x: &[f64]) -> f64 {
    let mean = mean(x);
    let squares: f64 = x.iter().map(|x| (x - mean).powi(2)).sum();
    (squares / (x.len() as f64 - 1.)).sqrt()
}

//! Random sequence trees, for operators with a recurrent state.

use candle_core::{Result, Tensor};
use candle_grpo_kernels::PrefixTree;
use proptest::prelude::*;

/// Sequences that share prefixes.
#[derive(Debug, Clone)]
pub(crate) struct Prefixes {
    /// Each sequence's rows.
    pub(crate) sequences: Vec<Vec<u32>>,
}

impl Prefixes {
    pub(crate) fn tree(&self) -> Result<PrefixTree> {
        let lengths: Vec<usize> = self.sequences.iter().map(Vec::len).collect();
        PrefixTree::with_shared_rows(&lengths, &self.rows())
    }

    /// The row for each position in each sequence, concatenated.
    pub(crate) fn rows(&self) -> Vec<u32> {
        self.sequences.concat()
    }

    /// Number of distinct rows.
    pub(crate) fn count(&self) -> usize {
        self.rows()
            .into_iter()
            .max()
            .map_or(0, |row| row as usize + 1)
    }

    /// The same sequences without shared rows.
    pub(crate) fn unshared_tree(&self) -> Result<PrefixTree> {
        PrefixTree::new(&self.sequences.iter().map(Vec::len).collect::<Vec<_>>())
    }

    /// Selects the row for each position in each sequence from `x` `[count, ..]`.
    pub(crate) fn unshare(&self, x: &Tensor) -> Result<Tensor> {
        x.index_select(&Tensor::new(self.rows(), x.device())?, 0)
    }

    /// Where each row first occurs.
    pub(crate) fn first_positions(&self) -> Vec<u32> {
        let rows = self.rows();
        let mut first = Vec::new();
        for (position, &row) in rows.iter().enumerate() {
            if row as usize == first.len() {
                first.push(position as u32);
            }
        }
        first
    }
}

/// Up to five sequences. Each continues a prefix of an earlier one, possibly empty, with new rows,
/// whose number comes from `lengths`.
pub(crate) fn prefixes(
    lengths: impl Strategy<Value = usize> + Clone,
) -> impl Strategy<Value = Prefixes> {
    let branch = (any::<u32>(), any::<u32>(), lengths);
    prop::collection::vec(branch, 1..6).prop_map(|branches| {
        let mut sequences: Vec<Vec<u32>> = Vec::new();
        let mut count = 0;
        for (earlier, end, length) in branches {
            let mut rows = match sequences.len() {
                0 => Vec::new(),
                n => {
                    let earlier: &Vec<u32> = &sequences[earlier as usize % n];
                    earlier[..end as usize % (earlier.len() + 1)].to_vec()
                }
            };
            // A prefix alone is a sequence too, if it is not empty.
            let length = if rows.is_empty() {
                length.max(1)
            } else {
                length
            };
            rows.extend(count..count + length as u32);
            count += length as u32;
            sequences.push(rows);
        }
        Prefixes { sequences }
    })
}

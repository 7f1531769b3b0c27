//! Passes that several ranks divide.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};
use candle_grpo_collective::Collective;
use candle_grpo_kernels::{RowMap, arithmetic_dtype};

use crate::PackedTokens;

/// Ranks that divide the tokens of each sequence in a pass ([`PackedTokens::divided`]). Clones
/// share them.
#[derive(Clone)]
pub struct SequenceRanks(Arc<dyn Collective>);

impl fmt::Debug for SequenceRanks {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (rank, count) = (self.0.rank(), self.0.world_size());
        f.debug_struct("SequenceRanks")
            .field("rank", &rank)
            .field("count", &count)
            .finish()
    }
}

impl SequenceRanks {
    /// Creates the ranks in `collective`, which has no others.
    pub fn new(collective: Arc<dyn Collective>) -> Self {
        Self(collective)
    }

    /// Operations between these ranks.
    pub fn collective(&self) -> &Arc<dyn Collective> {
        &self.0
    }
}

/// The rows of a pass that each rank computes.
///
/// A causal token's attention costs as much as its position. So the tokens that each sequence adds
/// are cut into two chunks for each of C ranks, and rank r computes chunks r and 2 C - 1 - r. The
/// ranks then have equal work, up to rounding; the rank that is favored alternates.
#[derive(Debug, Clone)]
pub(crate) struct DividedRows {
    pub(crate) ranks: SequenceRanks,
    /// Each rank's rows, in ascending order.
    of_ranks: Vec<Vec<u32>>,
}

impl DividedRows {
    /// Deals the rows of `tokens`.
    pub(crate) fn new(tokens: &PackedTokens, ranks: &SequenceRanks) -> Self {
        let count = ranks.0.world_size();
        let mut of_ranks = vec![Vec::new(); count];
        let (rows, mut first, mut dealt) = (tokens.rows(), 0, 0);
        for (sequence, &length) in tokens.lengths().iter().enumerate() {
            // Rows are numbered in order of their first tokens.
            let own = &rows[first..first + length];
            let added = own.iter().filter(|&&row| row >= dealt).count();
            for (rank, chunk) in chunks(added, count) {
                let rows = chunk.start as u32..chunk.end as u32;
                of_ranks[(rank + sequence) % count].extend(rows.map(|row| dealt + row));
            }
            first += length;
            dealt += added as u32;
        }
        Self {
            ranks: ranks.clone(),
            of_ranks,
        }
    }

    /// The rows of this rank, which may be none.
    fn own(&self) -> &[u32] {
        &self.of_ranks[self.ranks.0.rank()]
    }

    /// Returns whether this rank has rows.
    pub(crate) fn has_rows(&self) -> bool {
        !self.own().is_empty()
    }

    /// The rows that this rank computes: its own. A rank without any computes row 0, which does not
    /// count.
    pub(crate) fn computed(&self) -> Vec<u32> {
        match self.own() {
            [] => vec![0],
            own => own.to_vec(),
        }
    }
}

/// The ranks of the chunks of `length` tokens, and the chunks.
fn chunks(length: usize, ranks: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let count = 2 * ranks;
    (0..count).map(move |chunk| {
        let rank = chunk.min(count - 1 - chunk);
        (rank, length * chunk / count..length * (chunk + 1) / count)
    })
}

/// Exchanges the keys and values of all rows between the ranks that [divide](DividedRows) them.
///
/// The queries of a rank are the ends of sequences: each run of consecutive tokens, with all tokens
/// up to its last one as keys.
#[derive(Debug, Clone)]
pub(crate) struct KeyExchange {
    ranks: SequenceRanks,
    /// Number of rows of this rank, and of the rank with most.
    own: usize,
    most: usize,
    /// For each end, the number of queries and that of keys.
    ends: Vec<(usize, usize)>,
    /// The place of each key among all ranks' rows.
    place_of_key: RowMap,
}

impl KeyExchange {
    /// Creates the exchange for a pass over `tokens`. `None` if ranks do not divide them.
    pub(crate) fn new(tokens: &PackedTokens) -> Result<Option<Self>> {
        let Some(divided) = tokens.division() else {
            return Ok(None);
        };
        let most = divided.of_ranks.iter().map(Vec::len).max().unwrap_or(0);
        let mut places = vec![0; tokens.ids().dim(0)?];
        for (rank, rows) in divided.of_ranks.iter().enumerate() {
            for (index, &row) in rows.iter().enumerate() {
                places[row as usize] = (rank * most + index) as u32;
            }
        }
        let (rows, first_tokens) = (tokens.rows(), tokens.first_tokens());
        // Where the sequence of each token starts.
        let mut starts = Vec::with_capacity(rows.len());
        for &length in tokens.lengths() {
            starts.resize(starts.len() + length, starts.len());
        }
        let (mut ends, mut keys) = (Vec::new(), Vec::new());
        let mut queries = divided.computed().into_iter().peekable();
        while let Some(row) = queries.next() {
            let mut last = first_tokens[row as usize] as usize;
            let (start, mut new) = (starts[last], 1);
            let follows = |row: u32, last: usize| {
                let token = first_tokens[row as usize] as usize;
                token == last + 1 && starts[token] == start
            };
            while queries.next_if(|&row| follows(row, last)).is_some() {
                (last, new) = (last + 1, new + 1);
            }
            ends.push((new, last + 1 - start));
            keys.extend(rows[start..=last].iter().map(|&row| places[row as usize]));
        }
        let device = tokens.ids().device();
        Ok(Some(Self {
            ranks: divided.ranks.clone(),
            own: divided.own().len(),
            most,
            ends,
            place_of_key: RowMap::new(keys, divided.of_ranks.len() * most, device)?,
        }))
    }

    /// For each end, the number of queries and that of keys.
    pub(crate) fn ends(&self) -> &[(usize, usize)] {
        &self.ends
    }

    /// Returns the keys and values of all ends, one after another, from those of the rows that this
    /// rank computes.
    pub(crate) fn gather(&self, own: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        let all = |own: &Tensor| {
            if own.track_op() {
                bail!(
                    "tokens: divided between ranks, must be whole in a pass that records Candle's graph"
                );
            }
            let all = self.zeros(own, own.dtype())?;
            if self.own > 0 {
                let own = own.narrow(0, 0, self.own)?.contiguous()?;
                all.slice_set(&own, 0, self.first())?;
            }
            Ok(all)
        };
        let all = [all(own[0])?, all(own[1])?];
        self.ranks.0.all_gather(&[&all[0], &all[1]])?;
        let [keys, values] = all.map(|all| self.place_of_key.select(&all));
        Ok([keys?, values?])
    }

    /// Returns the gradients with respect to the argument to [`Self::gather`], summed over the
    /// ranks, from those with respect to its results on this rank.
    pub(crate) fn gather_gradient(&self, gradients: [Tensor; 2]) -> Result<[Tensor; 2]> {
        let sums = gradients.map(|gradient| {
            let dtype = gradient.dtype();
            let sum = self.place_of_key.sum(&gradient)?;
            Ok((sum.to_dtype(arithmetic_dtype(dtype))?, dtype))
        });
        let [keys, values]: [Result<_>; 2] = sums;
        let ((keys, dtype), (values, _)) = (keys?, values?);
        self.ranks.0.reduce_scatter_sum(&[&keys, &values])?;
        let own = |sums: Tensor| {
            if self.own == 0 {
                // Of the row that does not count.
                return Tensor::zeros((1, sums.dim(1)?), dtype, sums.device());
            }
            sums.narrow(0, self.first(), self.own)?.to_dtype(dtype)
        };
        Ok([own(keys)?, own(values)?])
    }

    /// Place of this rank's first row.
    fn first(&self) -> usize {
        self.ranks.0.rank() * self.most
    }

    fn zeros(&self, own: &Tensor, dtype: candle_core::DType) -> Result<Tensor> {
        let rows = self.ranks.0.world_size() * self.most;
        Tensor::zeros((rows, own.dim(1)?), dtype, own.device())
    }
}

impl SequenceRanks {
    /// Sums `values` over the ranks.
    pub(crate) fn sum(&self, values: Vec<f64>) -> Result<Vec<f64>> {
        let sums = Tensor::new(values, &Device::Cpu)?;
        self.0.all_reduce_sum(&[&sums])?;
        sums.to_vec1()
    }
}

#[cfg(test)]
mod tests {
    use candle_grpo_test_support::LoneRank;
    use proptest::prelude::*;

    use super::*;

    fn divided(sequences: &[Vec<u32>], rank: usize, count: usize) -> Result<PackedTokens> {
        let lone = LoneRank {
            rank,
            world_size: count,
        };
        let ranks = SequenceRanks::new(Arc::new(lone));
        Ok(PackedTokens::sharing_prefixes(sequences, &Device::Cpu)?.divided(&ranks))
    }

    #[test]
    fn a_rank_has_one_chunk_from_each_half() -> Result<()> {
        let sequence = [(0..8).collect()];
        assert_eq!(divided(&sequence, 0, 2)?.computed_rows(), [0, 1, 6, 7]);
        assert_eq!(divided(&sequence, 1, 2)?.computed_rows(), [2, 3, 4, 5]);
        Ok(())
    }

    #[test]
    fn a_rank_without_rows_computes_the_first_one() -> Result<()> {
        let tokens = [vec![7]];
        let rows: Vec<_> = (0..3)
            .map(|rank| Ok(divided(&tokens, rank, 3)?.computed_rows()))
            .collect::<Result<Vec<Vec<u32>>>>()?;
        assert_eq!(rows, [[0], [0], [0]]);
        let owners = (0..3).filter(|&rank| {
            let tokens = divided(&tokens, rank, 3).expect("tokens");
            tokens.division().is_some_and(|x| !x.own().is_empty())
        });
        assert_eq!(owners.count(), 1);
        Ok(())
    }

    proptest! {
        /// Each row has one rank, whose queries have all tokens before them as keys.
        #[test]
        fn the_ends_of_all_ranks_are_all_tokens(
            sequences in proptest::collection::vec(proptest::collection::vec(0u32..3, 1..20), 1..5),
            count in 2usize..5,
        ) {
            let whole = PackedTokens::sharing_prefixes(&sequences, &Device::Cpu)?;
            let mut all = Vec::new();
            for rank in 0..count {
                let tokens = divided(&sequences, rank, count)?;
                let division = tokens.division().expect("a division");
                all.extend_from_slice(division.own());
                let exchange = KeyExchange::new(&tokens)?.expect("an exchange");
                let queries: usize = exchange.ends().iter().map(|end| end.0).sum();
                prop_assert_eq!(queries, tokens.computed_rows().len());
                // Each rank's rows are its ids, so that the keys are the tokens.
                let mut ids = vec![0f32; count * exchange.most];
                for (rank, rows) in division.of_ranks.iter().enumerate() {
                    for (index, &row) in rows.iter().enumerate() {
                        let id = whole.ids().get(row as usize)?.to_scalar::<u32>()?;
                        ids[rank * exchange.most + index] = id as f32;
                    }
                }
                let ids = Tensor::from_vec(ids, (count * exchange.most, 1), &Device::Cpu)?;
                let keys = exchange.place_of_key.select(&ids)?.flatten_all()?.to_vec1::<f32>()?;
                let mut first = 0;
                for &(_, total) in exchange.ends() {
                    let keys: Vec<u32> = keys[first..first + total].iter().map(|&x| x as u32).collect();
                    prop_assert!(sequences.iter().any(|sequence| sequence.starts_with(&keys)));
                    first += total;
                }
            }
            all.sort_unstable();
            let rows: Vec<u32> = (0..whole.ids().dim(0)? as u32).collect();
            prop_assert_eq!(all, rows);
        }

        /// The work of attention, the sum of the positions, is equal up to a chunk's rounding.
        #[test]
        fn the_ranks_have_equal_work(length in 1usize..500, count in 1usize..6) {
            let mut work = vec![0; count];
            for (rank, chunk) in chunks(length, count) {
                work[rank] += chunk.map(|position| position + 1).sum::<usize>();
            }
            let mean = length * (length + 1) / 2 / count;
            for work in work {
                prop_assert!(work.abs_diff(mean) <= 2 * length, "{} of {}", work, mean);
            }
        }
    }
}

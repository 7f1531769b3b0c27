//! Rows of packed sequences that may share prefixes.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, bail};

/// Rows of packed sequences, for operators with a recurrent state:
/// [`causal_conv`](crate::causal_conv()) and [`gated_delta_rule`](crate::gated_delta_rule()).
///
/// Sequences that share a prefix form a tree. Each branch starts from the state after the prefix,
/// and the branches' gradients are summed in the prefix. Clones share the tables.
///
/// ```
/// use candle_grpo_kernels::PrefixTree;
///
/// // The sequences of rows 0, 1, 2 and 0, 1, 3, 4 share the rows 0 and 1.
/// let tree = PrefixTree::with_shared_rows(&[3, 4], &[0, 1, 2, 0, 1, 3, 4])?;
/// assert_eq!(tree.rows(), 5);
/// assert_eq!(PrefixTree::new(&[3, 4])?.rows(), 7);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct PrefixTree {
    /// For each row, the row before it in its sequences, or [`Self::NONE`].
    before: Arc<[u32]>,
    /// In row order, so that a parent precedes its branches.
    segments: Arc<[Segment]>,
    /// Each tree's segments.
    trees: Arc<[Vec<usize>]>,
    /// The kernels' tables, copied to the GPU once.
    #[cfg(feature = "cuda")]
    pub(crate) on_device: Arc<cuda::Tables>,
}

/// Adjacent rows in the same sequences.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub(crate) rows: Range<usize>,
    /// The segment whose last row precedes this one's first row.
    pub(crate) parent: Option<usize>,
    /// Index of the first row within the tree.
    pub(crate) place: usize,
    pub(crate) has_branches: bool,
}

impl PrefixTree {
    /// Marks a sequence's first row. Candle selects zeros for this index.
    pub(crate) const NONE: u32 = u32::MAX;

    /// Creates a tree for concatenated sequences with these lengths, without shared rows.
    ///
    /// # Errors
    ///
    /// Fails if there are no lengths, if one is 0, or if their sum does not fit in 32 bits.
    pub fn new(lengths: &[usize]) -> Result<Self> {
        let Some(rows) = sum(lengths).and_then(|sum| u32::try_from(sum).ok()) else {
            bail!("lengths: {lengths:?}, their sum must fit in 32 bits");
        };
        Self::with_shared_rows(lengths, &(0..rows).collect::<Vec<_>>())
    }

    /// Creates a tree for sequences with these lengths. `rows` has the row for each position in
    /// each sequence, concatenated.
    ///
    /// # Errors
    ///
    /// Fails if there are no lengths, if one is 0, if their sum is not the length of `rows`, if
    /// rows are not numbered in order of their first positions, or if the rows before a row differ
    /// between sequences.
    pub fn with_shared_rows(lengths: &[usize], rows: &[u32]) -> Result<Self> {
        let before = rows_before(lengths, rows)?;
        let mut branches = vec![0u32; before.len()];
        for &row in before.iter().filter(|&&row| row != Self::NONE) {
            branches[row as usize] += 1;
        }
        let mut segments: Vec<Segment> = Vec::new();
        let mut trees: Vec<Vec<usize>> = Vec::new();
        // Each row's segment, and each segment's tree and number of rows.
        let mut segment_of: Vec<usize> = Vec::with_capacity(before.len());
        let mut tree_of: Vec<usize> = Vec::new();
        let mut places: Vec<usize> = Vec::new();
        for (row, &parent) in before.iter().enumerate() {
            let is_next = parent as usize == row.wrapping_sub(1) && row > 0;
            if is_next && branches[row - 1] == 1 {
                let segment = segment_of[row - 1];
                segments[segment].rows.end += 1;
                places[tree_of[segment]] += 1;
                segment_of.push(segment);
                continue;
            }
            let parent = segment_of.get(parent as usize).copied();
            let tree = match parent {
                Some(parent) => tree_of[parent],
                None => {
                    trees.push(Vec::new());
                    places.push(0);
                    trees.len() - 1
                }
            };
            if let Some(parent) = parent {
                segments[parent].has_branches = true;
            }
            trees[tree].push(segments.len());
            tree_of.push(tree);
            segment_of.push(segments.len());
            segments.push(Segment {
                rows: row..row + 1,
                parent,
                place: places[tree],
                has_branches: false,
            });
            places[tree] += 1;
        }
        Ok(Self {
            before: before.into(),
            segments: segments.into(),
            trees: trees.into(),
            #[cfg(feature = "cuda")]
            on_device: Arc::default(),
        })
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.before.len()
    }

    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns each tree's segment indices. Places in a tree follow their order.
    pub(crate) fn trees(&self) -> &[Vec<usize>] {
        &self.trees
    }

    /// Returns the row before each row, or [`Self::NONE`].
    pub(crate) fn before(&self) -> &[u32] {
        &self.before
    }

    /// Returns each row's tree.
    pub(crate) fn tree_of_rows(&self) -> Vec<usize> {
        let mut trees = vec![0; self.rows()];
        for (tree, segments) in self.trees.iter().enumerate() {
            for &segment in segments {
                trees[self.segments[segment].rows.clone()].fill(tree);
            }
        }
        trees
    }

    /// Fails unless `rows`, from the argument `name`, is the number of rows.
    pub(crate) fn check_rows(&self, name: &str, rows: usize) -> Result<()> {
        if rows != self.rows() {
            bail!(
                "{name}: {rows} rows, must be the rows of tree, {}",
                self.rows()
            );
        }
        Ok(())
    }
}

fn sum(lengths: &[usize]) -> Option<usize> {
    let mut lengths = lengths.iter();
    lengths.try_fold(0usize, |sum, &length| sum.checked_add(length))
}

fn rows_before(lengths: &[usize], rows: &[u32]) -> Result<Vec<u32>> {
    if lengths.is_empty() {
        bail!("lengths: none, must be at least one");
    }
    if let Some(index) = lengths.iter().position(|&length| length == 0) {
        bail!("lengths[{index}]: 0, must be at least 1");
    }
    if sum(lengths) != Some(rows.len()) {
        bail!(
            "rows: {} positions, must be the sum of lengths, {lengths:?}",
            rows.len()
        );
    }
    let mut before = Vec::new();
    let mut position = 0;
    for &length in lengths {
        let mut last = PrefixTree::NONE;
        for (at, &row) in rows.iter().enumerate().skip(position).take(length) {
            match before.get(row as usize) {
                Some(&known) if known == last => (),
                Some(_) => {
                    bail!("rows[{at}]: {row}, must have the same rows before it in all sequences")
                }
                None if row as usize == before.len() => before.push(last),
                None => bail!(
                    "rows[{at}]: {row}, must be at most {}: rows are numbered in the order of their first positions",
                    before.len()
                ),
            }
            last = row;
        }
        position += length;
    }
    Ok(before)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns each segment's rows, parent and place.
    fn segments(tree: &PrefixTree) -> Vec<(Range<usize>, Option<usize>, usize, bool)> {
        let segments = tree.segments().iter();
        segments
            .map(|x| (x.rows.clone(), x.parent, x.place, x.has_branches))
            .collect()
    }

    #[test]
    fn sequences_without_shared_rows_are_trees_of_one_segment() -> Result<()> {
        let tree = PrefixTree::new(&[2, 1])?;
        assert_eq!(
            segments(&tree),
            [(0..2, None, 0, false), (2..3, None, 0, false)]
        );
        assert_eq!(tree.trees(), [vec![0], vec![1]]);
        assert_eq!(tree.before(), [PrefixTree::NONE, 0, PrefixTree::NONE]);
        Ok(())
    }

    #[test]
    fn a_segment_ends_where_sequences_part() -> Result<()> {
        // A branch from the first sequence follows a sequence in another tree.
        let rows = [0, 1, 2, 3, 4, 0, 1, 5, 0, 1, 2, 6];
        let tree = PrefixTree::with_shared_rows(&[4, 1, 3, 4], &rows)?;
        assert_eq!(
            segments(&tree),
            [
                (0..2, None, 0, true),
                (2..3, Some(0), 2, true),
                (3..4, Some(1), 3, false),
                (4..5, None, 0, false),
                (5..6, Some(0), 4, false),
                (6..7, Some(1), 5, false),
            ]
        );
        assert_eq!(tree.trees(), [vec![0, 1, 2, 4, 5], vec![3]]);
        assert_eq!(tree.tree_of_rows(), [0, 0, 0, 0, 1, 0, 0]);
        Ok(())
    }

    /// A sequence that is a prefix of another, and one that occurs twice.
    #[test]
    fn a_sequence_that_ends_within_another_does_not_divide_it() -> Result<()> {
        let tree = PrefixTree::with_shared_rows(&[2, 3, 3], &[0, 1, 0, 1, 2, 0, 1, 2])?;
        assert_eq!(segments(&tree), [(0..3, None, 0, false)]);
        Ok(())
    }

    #[test]
    fn an_error_names_the_wrong_argument() {
        let message = |lengths: &[usize], rows: &[u32]| {
            PrefixTree::with_shared_rows(lengths, rows)
                .map(drop)
                .map_err(|error| error.to_string())
                .expect_err("an error")
        };
        assert!(message(&[], &[]).contains("lengths: none"));
        assert!(message(&[1, 0], &[0]).contains("lengths[1]: 0, must be at least 1"));
        assert!(message(&[2], &[0]).contains("rows: 1 positions, must be the sum"));
        assert!(message(&[usize::MAX, 2], &[0]).contains("rows: 1 positions"));
        let sum = PrefixTree::new(&[usize::MAX, 2]).map(drop);
        assert!(
            sum.expect_err("an error")
                .to_string()
                .contains("must fit in 32 bits")
        );
        assert!(message(&[2], &[0, 2]).contains("rows[1]: 2, must be at most 1"));
        assert!(message(&[2, 1], &[0, 1, 1]).contains("rows[2]: 1, must have the same rows"));
    }
}

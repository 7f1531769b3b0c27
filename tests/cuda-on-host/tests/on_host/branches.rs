//! Sequences that share a prefix, and their table for the kernels.

use candle_core::Result;
use candle_grpo_kernels::PrefixTree;

/// Rows of all sequences.
pub(crate) const ROWS: usize = 80;
/// Chunks of 32 rows of all segments.
pub(crate) const CHUNKS: usize = 6;
/// The first segment of each level, and the number of its segments.
pub(crate) const LEVELS: [(u32, u32); 2] = [(0, 2), (2, 2)];
/// The fields of `Segment` in `prefix_tree.cuh`, and the end of the table.
pub(crate) const SEGMENTS: &[u32] = [
    [0, 40, 0, NONE, 2, 0],
    [75, 5, 0, NONE, 4, 2],
    [40, 33, 40, 0, 4, 3],
    [73, 2, 40, 0, 4, 5],
    [0, 0, 0, NONE, 4, 6],
]
.as_flattened();
pub(crate) const NONE: u32 = u32::MAX;

/// Returns the sequences: 40 rows that precede both 33 and 2 rows, and 5 rows alone.
fn sequences() -> [Vec<u32>; 3] {
    [
        (0..73).collect(),
        (0..40).chain(73..75).collect(),
        (75..80).collect(),
    ]
}

pub(crate) fn tree() -> Result<PrefixTree> {
    let sequences = sequences();
    let lengths = sequences.each_ref().map(Vec::len);
    PrefixTree::with_shared_rows(&lengths, &sequences.concat())
}

/// Returns the row before each row.
pub(crate) fn before() -> Vec<u32> {
    let mut before = vec![NONE; ROWS];
    for sequence in sequences() {
        for pair in sequence.windows(2) {
            before[pair[1] as usize] = pair[0];
        }
    }
    before
}

/// Returns the segment of each row.
pub(crate) fn segment_of() -> Vec<u32> {
    let mut segments = vec![0; ROWS];
    for (at, segment) in SEGMENTS.chunks_exact(6).enumerate() {
        segments[segment[0] as usize..][..segment[1] as usize].fill(at as u32);
    }
    segments
}

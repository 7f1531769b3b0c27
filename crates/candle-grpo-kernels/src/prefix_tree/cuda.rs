//! [`PrefixTree`] tables on the GPU, as `prefix_tree.cuh` reads them.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{Device, Result, Tensor};

use super::Segment;
use crate::PrefixTree;

/// Rows per chunk in `gated_delta_rule.cu`.
pub(crate) const CHUNK: usize = 32;

/// One device's tables.
#[derive(Debug, Default)]
pub(crate) struct Tables(Mutex<Option<Arc<DeviceTree>>>);

/// A tree on a device. Its segments are sorted by level, and segments with the same parent are
/// adjacent.
#[derive(Debug)]
pub(crate) struct DeviceTree {
    /// u32 `[segments + 1, 6]`: the fields in `Segment`. The last entry ends the children and
    /// chunks of the others.
    pub(crate) segments: Tensor,
    /// u32 `[N]`: each row's segment.
    pub(crate) segment_of: Tensor,
    /// u32 `[N]`: the row before each row, or [`PrefixTree::NONE`].
    pub(crate) before: Tensor,
    /// Each level's segments. Their parents are in the previous level.
    pub(crate) levels: Vec<Range<usize>>,
    /// Number of chunks in all segments.
    pub(crate) chunks: usize,
}

impl DeviceTree {
    /// Returns a tree's tables. The tree keeps those for the last device.
    pub(crate) fn of(tree: &PrefixTree, device: &Device) -> Result<Arc<Self>> {
        let mut kept = tree
            .on_device
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(tables) if tables.before.device().same_device(device) => Ok(tables.clone()),
            _ => Ok(kept.insert(Arc::new(Self::new(tree, device)?)).clone()),
        }
    }

    fn new(tree: &PrefixTree, device: &Device) -> Result<Self> {
        let segments = tree.segments();
        let mut children = vec![Vec::new(); segments.len()];
        let mut order = Vec::with_capacity(segments.len());
        for (index, segment) in segments.iter().enumerate() {
            match segment.parent {
                Some(parent) => children[parent].push(index),
                None => order.push(index),
            }
        }
        let mut levels: Vec<Range<usize>> = Vec::new();
        // Each segment's place in `order` and its position in a sequence.
        let (mut places, mut positions) = (vec![0; segments.len()], vec![0; segments.len()]);
        let mut segment_of = vec![0u32; tree.rows()];
        let mut table: Vec<u32> = Vec::with_capacity((segments.len() + 1) * 6);
        let mut chunks = 0;
        while levels.last().map_or(0, |level| level.end) < order.len() {
            let level = levels.last().map_or(0, |level| level.end)..order.len();
            for place in level.clone() {
                let index = order[place];
                let Segment { rows, parent, .. } = &segments[index];
                places[index] = place;
                if let Some(parent) = *parent {
                    positions[index] = positions[parent] + segments[parent].rows.len();
                }
                segment_of[rows.clone()].fill(place as u32);
                let parent = parent.map_or(PrefixTree::NONE, |parent| places[parent] as u32);
                let [first, count, position] = [rows.start, rows.len(), positions[index]];
                let [child, chunk] = [order.len(), chunks];
                let numbers = [first, count, position, child, chunk].map(|x| x as u32);
                let [first, count, position, child, chunk] = numbers;
                table.extend([first, count, position, parent, child, chunk]);
                chunks += rows.len().div_ceil(CHUNK);
                order.extend(&children[index]);
            }
            levels.push(level);
        }
        table.extend([0, 0, 0, PrefixTree::NONE, order.len() as u32, chunks as u32]);
        Ok(Self {
            segments: Tensor::new(table, device)?,
            segment_of: Tensor::new(segment_of, device)?,
            before: Tensor::new(tree.before(), device)?,
            levels,
            chunks,
        })
    }

    /// Returns the number of segments.
    pub(crate) fn count(&self) -> usize {
        self.levels.last().map_or(0, |level| level.end)
    }
}

//! A rank without the others.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_grpo_collective::{Alone, Collective};

/// One of several ranks, which performs no operations: the others have the same values, and sums
/// are its own.
#[derive(Debug, Clone, Copy)]
pub struct LoneRank {
    /// The rank's number.
    pub rank: usize,
    /// The number of ranks.
    pub world_size: usize,
}

impl Collective for LoneRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<()> {
        Alone.all_reduce_sum(tensors)
    }

    fn reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<()> {
        Alone.reduce_scatter_sum(tensors)
    }

    fn all_gather(&self, tensors: &[&Tensor]) -> Result<()> {
        Alone.all_gather(tensors)
    }

    fn broadcast(&self, tensors: &[&Tensor], root: usize) -> Result<()> {
        Alone.broadcast(tensors, root)
    }

    fn barrier(&self) -> Result<()> {
        Alone.barrier()
    }

    fn split(&self, _color: usize) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(*self))
    }

    fn all_gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(vec![own.to_vec(); self.world_size])
    }
}

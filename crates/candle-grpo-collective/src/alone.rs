//! A single-process job.

use std::sync::Arc;

use candle_core::{Result, Tensor};

use crate::Collective;

/// The only rank in a single-process job. Its operations change nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn all_reduce_sum(&self, _tensors: &[&Tensor]) -> Result<()> {
        Ok(())
    }

    fn reduce_scatter_sum(&self, _tensors: &[&Tensor]) -> Result<()> {
        Ok(())
    }

    fn all_gather(&self, _tensors: &[&Tensor]) -> Result<()> {
        Ok(())
    }

    fn broadcast(&self, _tensors: &[&Tensor], _root: usize) -> Result<()> {
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn split(&self, _color: usize) -> Result<Arc<dyn Collective>> {
        Ok(Arc::new(Self))
    }
}

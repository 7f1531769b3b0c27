//! Divides tensors between ranks.

use std::fmt;
use std::sync::Arc;

use candle_core::{Result, Shape, Tensor};
use candle_grpo_collective::Collective;

/// Divides every tensor between ranks, for optimizer states that are not replicated: ZeRO, stage 1
/// (<https://arxiv.org/abs/1910.02054>).
///
/// Each rank gets an equal part of the elements. The remainder, which has fewer elements than there
/// are ranks, belongs to all of them.
#[derive(Clone)]
pub(crate) struct Shard(pub(crate) Arc<dyn Collective>);

impl Shard {
    /// Part size for a tensor with `elements` elements.
    fn part(&self, elements: usize) -> usize {
        elements / self.0.world_size()
    }

    /// Number of elements that a rank keeps from a tensor with `elements` elements.
    pub(crate) fn kept(&self, elements: usize) -> usize {
        self.part(elements) + elements % self.0.world_size()
    }

    /// Splits a contiguous tensor into views: all ranks' parts together, and the remainder.
    fn split(&self, tensor: &Tensor) -> Result<(Tensor, Tensor)> {
        let (elements, flat) = (tensor.elem_count(), tensor.detach().flatten_all()?);
        let shared = self.part(elements) * self.0.world_size();
        Ok((
            flat.narrow(0, 0, shared)?,
            flat.narrow(0, shared, elements - shared)?,
        ))
    }

    /// This rank's part and the remainder, as views into a contiguous tensor. Either may be empty.
    pub(crate) fn own(&self, tensor: &Tensor) -> Result<[Tensor; 2]> {
        let (shared, remainder) = self.split(tensor)?;
        let part = self.part(tensor.elem_count());
        Ok([shared.narrow(0, self.0.rank() * part, part)?, remainder])
    }

    /// Splits `kept`, which a rank keeps from a tensor with `elements` elements, into its part and
    /// the remainder.
    pub(crate) fn kept_parts(&self, kept: &Tensor, elements: usize) -> Result<[Tensor; 2]> {
        let (part, kept) = (self.part(elements), kept.detach());
        let remainder = kept.elem_count() - part;
        Ok([kept.narrow(0, 0, part)?, kept.narrow(0, part, remainder)?])
    }

    /// Gathers the tensor with this shape, of which each rank keeps `kept`.
    pub(crate) fn whole(&self, kept: &Tensor, shape: &Shape) -> Result<Tensor> {
        let whole = Tensor::zeros(shape.elem_count(), kept.dtype(), kept.device())?;
        let parts = self.kept_parts(kept, shape.elem_count())?;
        for (view, part) in self.own(&whole)?.iter().zip(parts) {
            if part.elem_count() > 0 {
                view.slice_set(&part, 0, 0)?;
            }
        }
        self.all_gather(std::slice::from_ref(&whole))?;
        whole.reshape(shape)
    }

    /// Sums tensors over all ranks. Each rank ends up with the sums for its part and the remainder.
    pub(crate) fn start_reduce_scatter_sum(&self, tensors: &[Tensor]) -> Result<()> {
        let (shared, remainders) = self.split_all(tensors)?;
        self.0
            .start_reduce_scatter_sum(&shared.iter().collect::<Vec<_>>())?;
        self.0
            .start_all_reduce_sum(&remainders.iter().collect::<Vec<_>>())
    }

    /// Fills in the other ranks' parts.
    pub(crate) fn all_gather(&self, tensors: &[Tensor]) -> Result<()> {
        let (shared, _) = self.split_all(tensors)?;
        self.0.all_gather(&shared.iter().collect::<Vec<_>>())
    }

    /// The nonempty views from [`Self::split`].
    fn split_all(&self, tensors: &[Tensor]) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let (mut shared, mut remainders) = (Vec::new(), Vec::new());
        for tensor in tensors {
            let (parts, remainder) = self.split(tensor)?;
            shared.push(parts);
            remainders.push(remainder);
        }
        for views in [&mut shared, &mut remainders] {
            views.retain(|view| view.elem_count() > 0);
        }
        Ok((shared, remainders))
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Shard({} of {})", self.0.rank(), self.0.world_size())
    }
}

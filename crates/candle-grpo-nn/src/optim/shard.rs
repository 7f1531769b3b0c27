//! The parts of tensors that the ranks of a job share.

use std::fmt;
use std::sync::Arc;

use candle_core::{Result, Shape, Tensor};
use candle_grpo_collective::Collective;

/// The division of every tensor between ranks, for optimizer states that are not replicated: ZeRO,
/// stage 1 (<https://arxiv.org/abs/1910.02054>).
///
/// The elements of a tensor are divided into one part of equal size for each rank. The remainder,
/// fewer elements than there are ranks, belongs to all of them.
#[derive(Clone)]
pub(crate) struct Shard(pub(crate) Arc<dyn Collective>);

impl Shard {
    /// The number of elements of a part of `elements` elements.
    fn part(&self, elements: usize) -> usize {
        elements / self.0.world_size()
    }

    /// The number of elements that a rank keeps of `elements` elements.
    pub(crate) fn kept(&self, elements: usize) -> usize {
        self.part(elements) + elements % self.0.world_size()
    }

    /// The parts of all ranks together, and the remainder; views of a contiguous tensor.
    fn split(&self, tensor: &Tensor) -> Result<(Tensor, Tensor)> {
        let (elements, flat) = (tensor.elem_count(), tensor.detach().flatten_all()?);
        let shared = self.part(elements) * self.0.world_size();
        Ok((
            flat.narrow(0, 0, shared)?,
            flat.narrow(0, shared, elements - shared)?,
        ))
    }

    /// The part of this rank, and the remainder; views of a contiguous tensor. Either may be empty.
    pub(crate) fn own(&self, tensor: &Tensor) -> Result<[Tensor; 2]> {
        let (shared, remainder) = self.split(tensor)?;
        let part = self.part(tensor.elem_count());
        Ok([shared.narrow(0, self.0.rank() * part, part)?, remainder])
    }

    /// The part of this rank and the remainder in what a rank keeps of a tensor of `elements`
    /// elements.
    pub(crate) fn kept_parts(&self, kept: &Tensor, elements: usize) -> Result<[Tensor; 2]> {
        let (part, kept) = (self.part(elements), kept.detach());
        let remainder = kept.elem_count() - part;
        Ok([kept.narrow(0, 0, part)?, kept.narrow(0, part, remainder)?])
    }

    /// Returns the tensor of a shape of which each rank keeps `kept`.
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

    /// Sums tensors over all ranks. Each rank has the sum of its part and of the remainder.
    pub(crate) fn start_reduce_scatter_sum(&self, tensors: &[Tensor]) -> Result<()> {
        let (shared, remainders) = self.split_all(tensors)?;
        self.0
            .start_reduce_scatter_sum(&shared.iter().collect::<Vec<_>>())?;
        self.0
            .start_all_reduce_sum(&remainders.iter().collect::<Vec<_>>())
    }

    /// Completes tensors with the parts of the other ranks.
    pub(crate) fn all_gather(&self, tensors: &[Tensor]) -> Result<()> {
        let (shared, _) = self.split_all(tensors)?;
        self.0.all_gather(&shared.iter().collect::<Vec<_>>())
    }

    /// The views of [`Self::split`] that are not empty.
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

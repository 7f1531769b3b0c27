//! Divides tensors between ranks.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use candle_grpo_collective::{Collective, Ticket};
use candle_grpo_kernels::moment_blocks;

/// Divides every tensor between ranks, for weights, gradients and optimizer states that are not
/// replicated (ZeRO, <https://arxiv.org/abs/1910.02054>).
///
/// Each rank gets an equal part of the elements, a multiple of `unit`. The remainder, which has
/// fewer than `unit` elements for each rank, belongs to all of them.
///
/// A tensor of u8 is [blocks of 8-bit codes](moment_blocks), which are divided if `unit` is a
/// multiple of the elements in a block.
#[derive(Clone)]
pub(crate) struct Shard {
    pub(crate) collective: Arc<dyn Collective>,
    unit: usize,
}

impl Shard {
    pub(crate) fn new(collective: Arc<dyn Collective>, unit: usize) -> Self {
        Self { collective, unit }
    }

    /// Each part is a multiple of this number of elements.
    pub(crate) fn unit(&self) -> usize {
        self.unit
    }

    /// Part size for a tensor with `elements` elements.
    fn part(&self, elements: usize) -> usize {
        elements / self.unit / self.collective.world_size() * self.unit
    }

    /// Number of elements in all ranks' parts together.
    fn shared(&self, elements: usize) -> usize {
        self.part(elements) * self.collective.world_size()
    }

    /// Number of elements that a rank keeps from a tensor with `elements` elements.
    pub(crate) fn kept(&self, elements: usize) -> usize {
        self.part(elements) + elements - self.shared(elements)
    }

    /// The elements in this rank's part, and those in the remainder.
    pub(crate) fn ranges(&self, elements: usize) -> [Range<usize>; 2] {
        let (part, shared) = (self.part(elements), self.shared(elements));
        let first = self.collective.rank() * part;
        [first..first + part, shared..elements]
    }

    /// This rank's part and the remainder of a tensor for `elements` elements, as views into a
    /// contiguous tensor. Either may be empty.
    pub(crate) fn own(&self, tensor: &Tensor, elements: usize) -> Result<[Tensor; 2]> {
        let [part, remainder] = self.ranges(elements);
        Ok([view(tensor, part)?, view(tensor, remainder)?])
    }

    /// Splits `kept`, which a rank keeps from a tensor with `elements` elements, into its part and
    /// the remainder.
    pub(crate) fn kept_parts(&self, kept: &Tensor, elements: usize) -> Result<[Tensor; 2]> {
        let (part, kept_elements) = (self.part(elements), self.kept(elements));
        Ok([view(kept, 0..part)?, view(kept, part..kept_elements)?])
    }

    /// Copies what this rank keeps from a tensor for `elements` elements.
    pub(crate) fn keep(&self, tensor: &Tensor, elements: usize) -> Result<Tensor> {
        self.read(elements, |range| view(&tensor.contiguous()?, range))
    }

    /// Copies what this rank keeps from `elements` elements, of which `read` returns a range, one
    /// after the other or in blocks.
    pub(crate) fn read(
        &self,
        elements: usize,
        read: impl Fn(Range<usize>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let [part, remainder] = self.ranges(elements).map(read);
        let (part, remainder) = (part?, remainder?);
        match (part.elem_count(), remainder.elem_count()) {
            (_, 0) => part.force_contiguous(),
            (0, _) => remainder.force_contiguous(),
            _ => Tensor::cat(&[part, remainder], 0),
        }
    }

    /// Gathers all ranks' parts into `whole`. This rank has `kept`.
    pub(crate) fn gather(&self, kept: &Tensor, whole: &Tensor, elements: usize) -> Result<()> {
        self.fill_in(kept, whole, elements)?;
        let shared = view(whole, 0..self.shared(elements))?;
        if shared.elem_count() > 0 {
            self.collective.all_gather(&[&shared])?;
        }
        Ok(())
    }

    /// Starts [`Self::gather`] for several tensors, each with what this rank has of it, in one
    /// operation.
    pub(crate) fn start_gather_all(&self, tensors: &[(Tensor, Tensor)]) -> Result<Ticket> {
        for (kept, whole) in tensors {
            self.fill_in(kept, whole, whole.elem_count())?;
        }
        let wholes: Vec<Tensor> = tensors.iter().map(|(_, whole)| whole.clone()).collect();
        self.start_all_gather(&wholes)
    }

    /// Copies `kept`, which a rank keeps from a tensor with `elements` elements, to its place in
    /// `whole`.
    fn fill_in(&self, kept: &Tensor, whole: &Tensor, elements: usize) -> Result<()> {
        let parts = self.kept_parts(kept, elements)?;
        for (view, part) in self.own(whole, elements)?.iter().zip(parts) {
            if part.elem_count() > 0 {
                view.slice_set(&part, 0, 0)?;
            }
        }
        Ok(())
    }

    /// Starts to sum tensors over all ranks. Each rank ends up with the sums for its part and the
    /// remainder.
    pub(crate) fn start_reduce_scatter_sum(&self, tensors: &[Tensor]) -> Result<Ticket> {
        let (shared, remainders) = self.split_all(tensors)?;
        let mut ticket = Ticket::default();
        if !shared.is_empty() {
            let shared: Vec<&Tensor> = shared.iter().collect();
            ticket = self.collective.start_reduce_scatter_sum(&shared)?;
        }
        if !remainders.is_empty() {
            let remainders: Vec<&Tensor> = remainders.iter().collect();
            let started = self.collective.start_all_reduce_sum(&remainders);
            let of_remainders = started.inspect_err(|_| {
                // The first sums use tensors that the caller may free now.
                let _ = self.collective.finish(ticket);
            });
            ticket = ticket.max(of_remainders?);
        }
        Ok(ticket)
    }

    /// Fills in the other ranks' parts.
    pub(crate) fn all_gather(&self, tensors: &[Tensor]) -> Result<()> {
        let ticket = self.start_all_gather(tensors)?;
        self.collective.finish(ticket)
    }

    fn start_all_gather(&self, tensors: &[Tensor]) -> Result<Ticket> {
        let (shared, _) = self.split_all(tensors)?;
        if shared.is_empty() {
            return Ok(Ticket::default());
        }
        self.collective
            .start_all_gather(&shared.iter().collect::<Vec<_>>())
    }

    /// Nonempty views into contiguous tensors: all ranks' parts together, and the remainders.
    fn split_all(&self, tensors: &[Tensor]) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        let (mut all, mut remainders) = (Vec::new(), Vec::new());
        for tensor in tensors {
            let elements = tensor.elem_count();
            let shared = self.shared(elements);
            all.push(view(tensor, 0..shared)?);
            remainders.push(view(tensor, shared..elements)?);
        }
        for views in [&mut all, &mut remainders] {
            views.retain(|view| view.elem_count() > 0);
        }
        Ok((all, remainders))
    }
}

/// These elements of a contiguous tensor, as a view. Blocks stay blocks.
fn view(tensor: &Tensor, elements: Range<usize>) -> Result<Tensor> {
    let tensor = tensor.detach();
    if tensor.dtype() == DType::U8 {
        let blocks = |elements| moment_blocks(elements).dims()[0];
        tensor.narrow(0, blocks(elements.start), blocks(elements.len()))
    } else {
        let flat = tensor.flatten_all()?;
        flat.narrow(0, elements.start, elements.len())
    }
}

impl fmt::Debug for Shard {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (rank, world_size) = (self.collective.rank(), self.collective.world_size());
        write!(f, "Shard({rank} of {world_size})")
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_grpo_test_support::LoneRank;

    use super::*;

    fn shards(world_size: usize, unit: usize) -> impl Iterator<Item = Shard> {
        (0..world_size).map(move |rank| Shard::new(Arc::new(LoneRank { rank, world_size }), unit))
    }

    /// Parts begin at multiples of the unit and are as long on every rank. Each element is in one
    /// part or in the remainder, which is short.
    #[test]
    fn every_element_is_in_one_part_or_in_the_remainder() -> Result<()> {
        for world_size in 1..=9 {
            for unit in [1, 8, 256] {
                for elements in [0, 1, 7, 255, 256, 257, 1000, 2304, 4096, 7777] {
                    let all = Tensor::arange(0u32, elements as u32, &Device::Cpu)?;
                    let (mut owners, mut remainders) = (Vec::new(), Vec::new());
                    for shard in shards(world_size, unit) {
                        let [part, remainder] = shard.own(&all, elements)?;
                        assert_eq!(part.elem_count() % unit, 0);
                        assert_eq!(shard.ranges(elements)[0].start % unit, 0);
                        owners.extend(part.to_vec1::<u32>()?);
                        remainders.push(remainder.to_vec1::<u32>()?);
                        let kept = shard.keep(&all, elements)?;
                        assert_eq!(kept.elem_count(), shard.kept(elements));
                        let kept = shard.kept_parts(&kept, elements)?;
                        assert_eq!(kept[0].to_vec1::<u32>()?, part.to_vec1::<u32>()?);
                        assert_eq!(kept[1].to_vec1::<u32>()?, remainder.to_vec1::<u32>()?);
                    }
                    assert!(
                        remainders
                            .iter()
                            .all(|remainder| *remainder == remainders[0])
                    );
                    assert!(remainders[0].len() < unit * world_size);
                    owners.extend(&remainders[0]);
                    assert_eq!(owners, (0..elements as u32).collect::<Vec<_>>());
                }
            }
        }
        Ok(())
    }

    #[test]
    fn blocks_are_divided_as_the_elements_in_them() -> Result<()> {
        for world_size in 1..=9 {
            for elements in [4096, 4097, 9999] {
                let shape = moment_blocks(elements);
                let blocks = shape.dims()[0];
                let numbers = Tensor::arange(0u32, blocks as u32, &Device::Cpu)?;
                let all = numbers.to_dtype(DType::U8)?.unsqueeze(1)?;
                let all = all.broadcast_as(shape.clone())?.contiguous()?;
                let mut owned = 0;
                for shard in shards(world_size, 256) {
                    let ranges = shard.ranges(elements);
                    let [part, remainder] = shard.own(&all, elements)?;
                    let of =
                        |tensor: &Tensor| tensor.narrow(1, 0, 1)?.flatten_all()?.to_vec1::<u8>();
                    for (found, range) in [&part, &remainder].into_iter().zip(ranges) {
                        let expected = range.start.div_ceil(256)..range.end.div_ceil(256);
                        let expected = expected.map(|block| block as u8);
                        assert_eq!(of(found)?, expected.collect::<Vec<_>>());
                    }
                    let kept = shard.keep(&all, elements)?;
                    assert_eq!(kept.dims(), moment_blocks(shard.kept(elements)).dims());
                    owned += part.dims()[0];
                    if shard.collective.rank() + 1 == world_size {
                        assert_eq!(owned + remainder.dims()[0], blocks);
                    }
                }
            }
        }
        Ok(())
    }
}

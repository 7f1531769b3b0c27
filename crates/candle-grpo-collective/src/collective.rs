//! The interface to all ranks.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};

/// The number of an operation that a rank has started. Later operations of the same [`Collective`]
/// have larger numbers, and 0 is before all of them. A group from [`Collective::split`] counts its
/// own.
#[must_use = "the tensors must not be used before Collective::finish"]
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Ticket(pub u64);

/// The ranks in a job, and the operations that all of them perform together.
///
/// Tensors must be contiguous, and operations change them in place. Sums support f32, f64 and bf16;
/// every rank receives the same bits. The other operations copy elements in any dtype.
///
/// Every rank must call the same operations in the same order, with the same number of tensors and
/// the same shapes and dtypes. Calls from several threads must not overlap, apart from
/// [`finish`](Self::finish).
///
/// An implementation that overrides a `start` function must also override
/// [`finish`](Self::finish). One that wraps another must forward all of them and
/// [`is_asynchronous`](Self::is_asynchronous), or operations do not run beside computation.
///
/// # Errors
///
/// Every operation fails if a tensor is not contiguous or has an unsupported dtype. If another rank
/// has ended, the operation fails, or ends this process with an error. A rank that fails on its own
/// must [`abort`](Self::abort), because the others wait for it.
///
/// # Examples
///
/// You can implement your own collective. This one counts the bytes that another one sums:
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_grpo_collective::{Collective, Ticket};
///
/// struct Counted<C> {
///     ranks: C,
///     bytes: AtomicUsize,
/// }
///
/// impl<C> Counted<C> {
///     fn count(&self, tensors: &[&Tensor]) {
///         for tensor in tensors {
///             let bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
///             self.bytes.fetch_add(bytes, Ordering::Relaxed);
///         }
///     }
/// }
///
/// impl<C: Collective> Collective for Counted<C> {
///     fn rank(&self) -> usize {
///         self.ranks.rank()
///     }
///     fn world_size(&self) -> usize {
///         self.ranks.world_size()
///     }
///     fn all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<()> {
///         self.count(tensors);
///         self.ranks.all_reduce_sum(tensors)
///     }
///     fn reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<()> {
///         self.ranks.reduce_scatter_sum(tensors)
///     }
///     fn all_gather(&self, tensors: &[&Tensor]) -> Result<()> {
///         self.ranks.all_gather(tensors)
///     }
///     fn broadcast(&self, tensors: &[&Tensor], root: usize) -> Result<()> {
///         self.ranks.broadcast(tensors, root)
///     }
///     fn barrier(&self) -> Result<()> {
///         self.ranks.barrier()
///     }
///     // The defaults of these would not run beside computation.
///     fn is_asynchronous(&self) -> bool {
///         self.ranks.is_asynchronous()
///     }
///     fn start_all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<Ticket> {
///         self.count(tensors);
///         self.ranks.start_all_reduce_sum(tensors)
///     }
///     fn start_reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<Ticket> {
///         self.ranks.start_reduce_scatter_sum(tensors)
///     }
///     fn start_all_gather(&self, tensors: &[&Tensor]) -> Result<Ticket> {
///         self.ranks.start_all_gather(tensors)
///     }
///     fn finish(&self, ticket: Ticket) -> Result<()> {
///         self.ranks.finish(ticket)
///     }
/// }
///
/// /// One process: each sum is its own tensor, and there is nobody to wait for.
/// struct Alone;
///
/// impl Collective for Alone {
///     fn rank(&self) -> usize {
///         0
///     }
///     fn world_size(&self) -> usize {
///         1
///     }
///     fn all_reduce_sum(&self, _: &[&Tensor]) -> Result<()> {
///         Ok(())
///     }
///     fn reduce_scatter_sum(&self, _: &[&Tensor]) -> Result<()> {
///         Ok(())
///     }
///     fn all_gather(&self, _: &[&Tensor]) -> Result<()> {
///         Ok(())
///     }
///     fn broadcast(&self, _: &[&Tensor], _root: usize) -> Result<()> {
///         Ok(())
///     }
///     fn barrier(&self) -> Result<()> {
///         Ok(())
///     }
/// }
///
/// let ranks = Counted { ranks: Alone, bytes: AtomicUsize::new(0) };
/// let gradient = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
/// ranks.all_reduce_sum(&[&gradient])?;
/// let ticket = ranks.start_all_reduce_sum(&[&gradient])?;
/// ranks.finish(ticket)?;
/// assert_eq!(ranks.bytes.into_inner(), 48);
/// assert_eq!(Alone.all_gather_bytes(b"metrics")?, [b"metrics"]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait Collective: Send + Sync {
    /// This process's number, below [`Self::world_size`].
    fn rank(&self) -> usize;

    /// The number of processes, at least 1.
    fn world_size(&self) -> usize;

    /// Replaces each tensor with its sum over all ranks.
    fn all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<()>;

    /// Sums each tensor over all ranks and gives each rank a part of the sum.
    ///
    /// A tensor's elements are divided into [`Self::world_size`] equal, consecutive parts. Rank r
    /// receives the sum in part r; the contents of the other parts are unspecified.
    fn reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<()>;

    /// Replaces part r in each tensor with rank r's, for all r. The parts are as in
    /// [`Self::reduce_scatter_sum`].
    fn all_gather(&self, tensors: &[&Tensor]) -> Result<()>;

    /// Replaces each tensor with rank `root`'s.
    fn broadcast(&self, tensors: &[&Tensor], root: usize) -> Result<()>;

    /// Waits until all ranks have called it.
    fn barrier(&self) -> Result<()>;

    /// Returns whether an operation that is started runs on the device, while this thread goes on
    /// and enqueues kernels. Otherwise a call that starts one waits for its end, so only another
    /// thread can do something else meanwhile.
    ///
    /// If so, an operation waits for the kernels that were launched before it starts.
    /// [`Self::finish`] makes kernels that are launched afterwards wait for it, and never the host.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Starts [`Self::all_reduce_sum`]. The tensors must not be used, or their memory freed, before
    /// [`Self::finish`].
    ///
    /// The default implementation sums them at once.
    fn start_all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<Ticket> {
        self.all_reduce_sum(tensors)?;
        Ok(Ticket::default())
    }

    /// Starts [`Self::reduce_scatter_sum`], like [`Self::start_all_reduce_sum`].
    fn start_reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<Ticket> {
        self.reduce_scatter_sum(tensors)?;
        Ok(Ticket::default())
    }

    /// Starts [`Self::all_gather`], like [`Self::start_all_reduce_sum`].
    fn start_all_gather(&self, tensors: &[&Tensor]) -> Result<Ticket> {
        self.all_gather(tensors)?;
        Ok(Ticket::default())
    }

    /// Makes the results of an operation, and of those that started before it, visible to later
    /// operations on tensors. Later ones may still run. It may be called again.
    ///
    /// Any thread may call it, also from `drop`, and while another operation runs. It must not wait
    /// for operations that have not started.
    fn finish(&self, _ticket: Ticket) -> Result<()> {
        Ok(())
    }

    /// Ends all ranks' processes with exit code `code`, after an error in this one.
    fn abort(&self, code: i32) -> ! {
        std::process::exit(code)
    }

    /// Divides the ranks into groups, and returns this rank's group: those that pass the same
    /// `color`, in the order of their numbers. All ranks must call it.
    ///
    /// Call the operations of a group and those of all ranks in one order, and not at the same time
    /// from several threads.
    ///
    /// # Errors
    ///
    /// The default implementation has no groups.
    fn split(&self, color: usize) -> Result<Arc<dyn Collective>> {
        bail!(
            "split: color {color} of rank {}, but this implementation of Collective has no groups",
            self.rank()
        )
    }

    /// Returns the ranks that pass the same `color`, in order. All ranks must call it.
    fn ranks_of_color(&self, color: usize) -> Result<Vec<usize>> {
        let own = (color as u64).to_le_bytes();
        let all = self.all_gather_bytes(&own)?;
        let all = all.iter().enumerate();
        let same = all.filter(|(_, other)| other.as_slice() == own.as_slice());
        Ok(same.map(|(rank, _)| rank).collect())
    }

    /// Returns each rank's bytes, in rank order. Their lengths may differ.
    fn all_gather_bytes(&self, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let (rank, world_size) = (self.rank(), self.world_size());
        let gathered = |own: &[u8], width: usize| -> Result<Vec<u8>> {
            let mut all = vec![0u8; width * world_size];
            all[rank * width..][..own.len()].copy_from_slice(own);
            let all = Tensor::from_vec(all, width * world_size, &Device::Cpu)?;
            self.all_gather(&[&all])?;
            all.to_vec1()
        };
        let lengths: Vec<usize> = gathered(&(own.len() as u64).to_le_bytes(), 8)?
            .chunks_exact(8)
            .map(|bytes| {
                bytes
                    .iter()
                    .rev()
                    .fold(0, |n, &byte| n << 8 | usize::from(byte))
            })
            .collect();
        let width = lengths.iter().copied().max().unwrap_or(0);
        if lengths.get(rank) != Some(&own.len()) {
            bail!(
                "all_gather_bytes: length {:?} of rank {rank}, must be {}",
                lengths.get(rank),
                own.len()
            );
        }
        if width == 0 {
            return Ok(vec![Vec::new(); world_size]);
        }
        let all = gathered(own, width)?;
        Ok(all
            .chunks_exact(width)
            .zip(lengths)
            .map(|(bytes, length)| bytes[..length].to_vec())
            .collect())
    }
}

//! Ranks in an MPI job.

use std::cell::RefCell;
use std::ops::{AddAssign, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ::mpi::Threading;
use ::mpi::environment::Universe;
use ::mpi::topology::{Color, SimpleCommunicator};
use ::mpi::traits::{Communicator, CommunicatorCollectives, Equivalence, Root};
use bytemuck::{Pod, cast_slice, cast_slice_mut};
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor, bail};
use half::bf16;

use crate::copies::with_copies;
use crate::{Collective, arguments};

/// Message size in bytes, 4 M f32 values. MPI counts are 32-bit, and this message size was the
/// fastest.
const MESSAGE: usize = 16 << 20;

/// If all ranks' numbers have at most this size in bytes, each rank computes the whole sum, in one
/// call of MPI in place of two.
const SHORT: usize = 64 << 10;

/// Ranks in an MPI job started by `mpirun` or `srun`.
///
/// CPU tensors are changed in place, through a 16 MiB buffer for one message. Small tensors share
/// messages. For each operation, tensors on other devices are copied to the CPU and back, which is
/// slow.
///
/// Sums add in the order of the ranks. So their bits depend on the numbers of each rank alone: not
/// on other tensors in the same call, on the MPI library, or on whether a rank receives all sums or
/// its part. bf16 is summed in f32 and rounded once.
///
/// MPI ends all processes after a communication error, or if a rank ends without finalizing.
/// Dropping the last handle from [`Self::init`] finalizes MPI, which waits for the other ranks.
/// During a panic it aborts the job instead.
pub struct Mpi {
    rank: usize,
    world_size: usize,
    /// Ends before the process's MPI.
    communicator: Ranks,
    process: Arc<Process>,
    /// All ranks, of which these are a group.
    _world: Option<Arc<Mpi>>,
}

/// MPI in this process.
struct Process {
    /// Message buffers. The lock also keeps calls from several threads apart.
    buffers: Mutex<Vec<u64>>,
    universe: Universe,
}

/// The ranks that communicate.
struct Ranks(SimpleCommunicator);

// SAFETY: MPI allows calls from any thread, one at a time, which the lock of the process ensures.
#[allow(unsafe_code)]
unsafe impl Send for Ranks {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Ranks {}

impl Mpi {
    /// Initializes MPI, once per process. Later calls return the same ranks.
    ///
    /// # Errors
    ///
    /// Fails if MPI cannot be called from several threads, or if the process has initialized MPI in
    /// another way or has finalized it.
    pub fn init() -> Result<Arc<Self>> {
        static WORLD: Mutex<Weak<Mpi>> = Mutex::new(Weak::new());
        let mut world = WORLD.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ranks) = world.upgrade() {
            return Ok(ranks);
        }
        let Some((universe, threading)) = ::mpi::initialize_with_threading(Threading::Serialized)
        else {
            bail!("MPI: already initialized or finalized, which a process can do only once");
        };
        if threading < Threading::Serialized {
            bail!(
                "MPI: the library provides threading {threading:?}, must be Serialized or Multiple"
            );
        }
        let communicator = universe.world();
        let process = Process {
            buffers: Mutex::default(),
            universe,
        };
        let ranks = Arc::new(Self::new(communicator, Arc::new(process), None)?);
        *world = Arc::downgrade(&ranks);
        Ok(ranks)
    }

    fn new(
        communicator: SimpleCommunicator,
        process: Arc<Process>,
        world: Option<Arc<Self>>,
    ) -> Result<Self> {
        Ok(Self {
            rank: count(communicator.rank())?,
            world_size: count(communicator.size())?,
            communicator: Ranks(communicator),
            process,
            _world: world,
        })
    }

    /// Replaces each tensor with its sum, in messages of `W`.
    fn sum<W: Wire>(&self, tensors: &[&Tensor]) -> Result<()> {
        let mut buffers = self.lock();
        let lengths: Vec<usize> = tensors.iter().map(|tensor| tensor.elem_count()).collect();
        for message in messages(&lengths, MESSAGE / size_of::<W>()) {
            let length = message.length();
            if length * self.world_size * size_of::<W>() <= SHORT {
                let (send, receive) = split::<W>(&mut buffers, length, length * self.world_size);
                message.read(tensors, 0, send)?;
                self.communicator.0.all_gather_into(&*send, receive);
                message.write(tensors, 0, add_in_order(receive, length))?;
                continue;
            }
            // Each rank adds a part. The end of the last one has no meaning.
            let part = length.div_ceil(self.world_size);
            let all = part * self.world_size;
            let (send, receive) = split::<W>(&mut buffers, all, all);
            message.read(tensors, 0, &mut send[..length])?;
            self.communicator.0.all_to_all_into(&*send, receive);
            let own = add_in_order(receive, part);
            self.communicator.0.all_gather_into(own, send);
            message.write(tensors, 0, &send[..length])?;
        }
        Ok(())
    }

    /// Replaces this rank's part of each tensor with its sum, in messages of `W`.
    fn sum_parts<W: Wire>(&self, tensors: &[&Tensor]) -> Result<()> {
        let mut buffers = self.lock();
        let part = |tensor: &&Tensor| tensor.elem_count() / self.world_size;
        let parts: Vec<usize> = tensors.iter().map(part).collect();
        for message in messages(&parts, self.part_of_message::<W>()) {
            let length = message.length();
            let all = length * self.world_size;
            let (send, receive) = split::<W>(&mut buffers, all, all);
            for (rank, part) in send.chunks_exact_mut(length).enumerate() {
                message.read(tensors, rank, part)?;
            }
            self.communicator.0.all_to_all_into(&*send, receive);
            message.write(tensors, self.rank, add_in_order(receive, length))?;
        }
        Ok(())
    }

    /// Number of `W` elements in each tensor's part.
    fn parts<W: Wire>(&self, tensors: &[&Tensor]) -> Vec<usize> {
        let part =
            |tensor: &&Tensor| tensor.elem_count() * W::count(tensor.dtype()) / self.world_size;
        tensors.iter().map(part).collect()
    }

    /// Number of `W` elements per rank in a message for all ranks.
    fn part_of_message<W>(&self) -> usize {
        (MESSAGE / size_of::<W>() / self.world_size).max(1)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u64>> {
        let buffers = self.process.buffers.lock();
        buffers.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<()> {
        arguments::all_reduce_sum(tensors)?;
        on_host(tensors, |tensors| {
            runs(tensors).try_for_each(|run| match run[0].dtype() {
                DType::F64 => self.sum::<f64>(run),
                _ => self.sum::<f32>(run),
            })
        })
    }

    fn reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<()> {
        arguments::reduce_scatter_sum(tensors, self.world_size)?;
        on_host(tensors, |tensors| {
            runs(tensors).try_for_each(|run| match run[0].dtype() {
                DType::F64 => self.sum_parts::<f64>(run),
                _ => self.sum_parts::<f32>(run),
            })
        })
    }

    fn all_gather(&self, tensors: &[&Tensor]) -> Result<()> {
        arguments::all_gather(tensors, self.world_size)?;
        on_host(tensors, |tensors| {
            let ranks = &self.communicator.0;
            let mut buffers = self.lock();
            for message in messages(&self.parts::<u8>(tensors), self.part_of_message::<u8>()) {
                let length = message.length();
                let (send, receive) = split::<u8>(&mut buffers, length, length * self.world_size);
                message.read(tensors, self.rank, send)?;
                ranks.all_gather_into(&*send, receive);
                for (rank, part) in receive.chunks_exact(length).enumerate() {
                    if rank != self.rank {
                        message.write(tensors, rank, part)?;
                    }
                }
            }
            Ok(())
        })
    }

    fn broadcast(&self, tensors: &[&Tensor], root: usize) -> Result<()> {
        arguments::broadcast(tensors, root, self.world_size)?;
        on_host(tensors, |tensors| {
            let ranks = &self.communicator.0;
            let root_process =
                ranks.process_at_rank(i32::try_from(root).map_err(candle_core::Error::wrap)?);
            let mut buffers = self.lock();
            let bytes = |tensor: &&Tensor| tensor.elem_count() * u8::count(tensor.dtype());
            let lengths: Vec<usize> = tensors.iter().map(bytes).collect();
            for message in messages(&lengths, MESSAGE) {
                if let Some((tensor, range)) = message.only(tensors) {
                    in_place(tensor, |storage, start| {
                        let start = start * u8::count(tensor.dtype());
                        root_process
                            .broadcast_into(&mut bytes_of(storage)?[shifted(&range, start)]);
                        Ok(())
                    })?;
                    continue;
                }
                let (buffer, _) = split::<u8>(&mut buffers, message.length(), 0);
                if self.rank == root {
                    message.read(tensors, 0, buffer)?;
                }
                root_process.broadcast_into(buffer);
                if self.rank != root {
                    message.write(tensors, 0, buffer)?;
                }
            }
            Ok(())
        })
    }

    fn barrier(&self) -> Result<()> {
        let _calls = self.lock();
        self.communicator.0.barrier();
        Ok(())
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Collective>> {
        let value = i32::try_from(color).map_err(candle_core::Error::wrap)?;
        let calls = self.lock();
        let group = self.communicator.0.split_by_color(Color::with_value(value));
        drop(calls);
        match group {
            Some(group) => {
                let process = Arc::clone(&self.process);
                Ok(Arc::new(Self::new(group, process, Some(Self::init()?))?))
            }
            None => bail!("split: no group for color {color}"),
        }
    }

    /// Ends all ranks' processes with `MPI_Abort`, even if another thread is communicating.
    fn abort(&self, code: i32) -> ! {
        self.process.universe.world().abort(code)
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        // To finalize, MPI would wait for ranks that wait for this one.
        if std::thread::panicking() {
            self.abort(1);
        }
    }
}

/// Message dtypes: sums use f32 or f64, and other operations copy bytes.
trait Wire: Pod + Equivalence + AddAssign {
    /// Number of message elements per tensor element.
    fn count(dtype: DType) -> usize;

    /// Copies a range of tensor elements into a message.
    fn read(storage: &CpuStorage, range: Range<usize>, to: &mut [Self]) -> Result<()>;

    /// Copies message elements into a tensor range.
    fn write(storage: &mut CpuStorage, range: Range<usize>, from: &[Self]) -> Result<()>;
}

impl Wire for f32 {
    fn count(_: DType) -> usize {
        1
    }

    fn read(storage: &CpuStorage, range: Range<usize>, to: &mut [Self]) -> Result<()> {
        match storage {
            CpuStorage::F32(values) => to.copy_from_slice(&values[range]),
            CpuStorage::BF16(values) => {
                for (to, value) in to.iter_mut().zip(&values[range]) {
                    *to = value.to_f32();
                }
            }
            _ => bail!("a tensor must be f32 or bf16"),
        }
        Ok(())
    }

    fn write(storage: &mut CpuStorage, range: Range<usize>, from: &[Self]) -> Result<()> {
        match storage {
            CpuStorage::F32(values) => values[range].copy_from_slice(from),
            CpuStorage::BF16(values) => {
                for (value, from) in values[range].iter_mut().zip(from) {
                    *value = bf16::from_f32(*from);
                }
            }
            _ => bail!("a tensor must be f32 or bf16"),
        }
        Ok(())
    }
}

impl Wire for f64 {
    fn count(_: DType) -> usize {
        1
    }

    fn read(storage: &CpuStorage, range: Range<usize>, to: &mut [Self]) -> Result<()> {
        to.copy_from_slice(&storage.as_slice()?[range]);
        Ok(())
    }

    fn write(storage: &mut CpuStorage, range: Range<usize>, from: &[Self]) -> Result<()> {
        match storage {
            CpuStorage::F64(values) => values[range].copy_from_slice(from),
            _ => bail!("a tensor must be f64"),
        }
        Ok(())
    }
}

impl Wire for u8 {
    fn count(dtype: DType) -> usize {
        dtype.size_in_bytes()
    }

    fn read(storage: &CpuStorage, range: Range<usize>, to: &mut [Self]) -> Result<()> {
        let bytes: &[u8] = match storage {
            CpuStorage::U8(values) => values,
            CpuStorage::U32(values) => cast_slice(values),
            CpuStorage::I16(values) => cast_slice(values),
            CpuStorage::I32(values) => cast_slice(values),
            CpuStorage::I64(values) => cast_slice(values),
            CpuStorage::BF16(values) => cast_slice(values),
            CpuStorage::F16(values) => cast_slice(values),
            CpuStorage::F32(values) => cast_slice(values),
            CpuStorage::F64(values) => cast_slice(values),
            _ => bail!("a tensor must be an integer or a float of 16 to 64 bits"),
        };
        to.copy_from_slice(&bytes[range]);
        Ok(())
    }

    fn write(storage: &mut CpuStorage, range: Range<usize>, from: &[Self]) -> Result<()> {
        bytes_of(storage)?[range].copy_from_slice(from);
        Ok(())
    }
}

/// The bytes of a tensor that can be sent directly.
fn bytes_of(storage: &mut CpuStorage) -> Result<&mut [u8]> {
    Ok(match storage {
        CpuStorage::U8(values) => values,
        CpuStorage::U32(values) => cast_slice_mut(values),
        CpuStorage::I16(values) => cast_slice_mut(values),
        CpuStorage::I32(values) => cast_slice_mut(values),
        CpuStorage::I64(values) => cast_slice_mut(values),
        CpuStorage::BF16(values) => cast_slice_mut(values),
        CpuStorage::F16(values) => cast_slice_mut(values),
        CpuStorage::F32(values) => cast_slice_mut(values),
        CpuStorage::F64(values) => cast_slice_mut(values),
        _ => bail!("a tensor must be an integer or a float of 16 to 64 bits"),
    })
}

/// Ranges of tensor elements, or of each tensor part, that are sent together.
struct Message(Vec<Segment>);

/// A range of elements in a tensor, or in each of its parts. The length is the whole tensor's or
/// part's.
struct Segment {
    tensor: usize,
    length: usize,
    range: Range<usize>,
}

impl Message {
    fn length(&self) -> usize {
        self.0.iter().map(|segment| segment.range.len()).sum()
    }

    /// The tensor and range, if the message has only one segment.
    fn only<'a>(&self, tensors: &[&'a Tensor]) -> Option<(&'a Tensor, Range<usize>)> {
        match &self.0[..] {
            [segment] => Some((tensors[segment.tensor], segment.range.clone())),
            _ => None,
        }
    }

    /// Copies part `part` of the tensors into a message.
    fn read<W: Wire>(&self, tensors: &[&Tensor], part: usize, to: &mut [W]) -> Result<()> {
        let mut at = 0;
        for segment in &self.0 {
            let tensor = tensors[segment.tensor];
            let (storage, layout) = tensor.storage_and_layout();
            let Storage::Cpu(storage) = &*storage else {
                bail!(
                    "a tensor is on {:?}, must be on the CPU",
                    tensor.device().location()
                );
            };
            let start = layout.start_offset() * W::count(tensor.dtype()) + part * segment.length;
            let to = &mut to[at..][..segment.range.len()];
            W::read(storage, shifted(&segment.range, start), to)?;
            at += segment.range.len();
        }
        Ok(())
    }

    /// Copies a message into part `part` of the tensors.
    fn write<W: Wire>(&self, tensors: &[&Tensor], part: usize, from: &[W]) -> Result<()> {
        let mut at = 0;
        for segment in &self.0 {
            let tensor = tensors[segment.tensor];
            let from = &from[at..][..segment.range.len()];
            in_place(tensor, |storage, start| {
                let start = start * W::count(tensor.dtype()) + part * segment.length;
                W::write(storage, shifted(&segment.range, start), from)
            })?;
            at += segment.range.len();
        }
        Ok(())
    }
}

/// Divides tensors, or parts, with these lengths into messages with at most `limit` elements.
///
/// A long tensor gets its own messages, which a broadcast need not copy. Short ones share messages,
/// because a call takes longer than copying.
fn messages(lengths: &[usize], limit: usize) -> Vec<Message> {
    let mut messages = Vec::new();
    let mut shared = Message(Vec::new());
    for (tensor, &length) in lengths
        .iter()
        .enumerate()
        .filter(|(_, length)| **length > 0)
    {
        let segment = |range| Segment {
            tensor,
            length,
            range,
        };
        if length > limit / 64 {
            let starts = (0..length).step_by(limit);
            let own = |start| Message(vec![segment(start..length.min(start + limit))]);
            messages.extend(starts.map(own));
            continue;
        }
        if shared.length() + length > limit {
            messages.push(std::mem::replace(&mut shared, Message(Vec::new())));
        }
        shared.0.push(segment(0..length));
    }
    if !shared.0.is_empty() {
        messages.push(shared);
    }
    messages
}

/// Groups the tensors by the dtype in which they are summed.
fn runs<'a, 'b>(tensors: &'a [&'b Tensor]) -> impl Iterator<Item = &'a [&'b Tensor]> {
    let is_f64 = |tensor: &Tensor| tensor.dtype() == DType::F64;
    tensors.chunk_by(move |a, b| is_f64(a) == is_f64(b))
}

/// Calls `operation` with the tensors, after copying those on other devices to the CPU.
fn on_host(tensors: &[&Tensor], operation: impl FnOnce(&[&Tensor]) -> Result<()>) -> Result<()> {
    with_copies(tensors, &Device::Cpu, |dtype| dtype, operation)
}

/// Calls `write` with a contiguous CPU tensor's storage, and its first element's index.
fn in_place(
    tensor: &Tensor,
    write: impl FnOnce(&mut CpuStorage, usize) -> Result<()>,
) -> Result<()> {
    tensor.inplace_op1(&InPlace(RefCell::new(Some(write))))
}

/// Holds the closure in a cell, because an in-place operation only has a shared reference to
/// itself.
struct InPlace<F>(RefCell<Option<F>>);

impl<F: FnOnce(&mut CpuStorage, usize) -> Result<()>> InplaceOp1 for InPlace<F> {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match self.0.take() {
            Some(write) => write(storage, layout.start_offset()),
            None => Ok(()),
        }
    }
}

/// Adds all parts of `length` elements to the first one, in order.
fn add_in_order<W: Wire>(parts: &mut [W], length: usize) -> &[W] {
    let (sum, others) = parts.split_at_mut(length);
    for part in others.chunks_exact(length) {
        for (sum, value) in sum.iter_mut().zip(part) {
            *sum += *value;
        }
    }
    sum
}

/// Two buffers for `send` and `receive` elements.
fn split<W: Pod>(buffers: &mut Vec<u64>, send: usize, receive: usize) -> (&mut [W], &mut [W]) {
    let needed = ((send + receive) * size_of::<W>()).div_ceil(size_of::<u64>());
    if buffers.len() < needed {
        buffers.resize(needed, 0);
    }
    let (first, others) = cast_slice_mut(buffers).split_at_mut(send);
    (first, &mut others[..receive])
}

fn shifted(range: &Range<usize>, by: usize) -> Range<usize> {
    range.start + by..range.end + by
}

fn count(count: i32) -> Result<usize> {
    usize::try_from(count).map_err(candle_core::Error::wrap)
}

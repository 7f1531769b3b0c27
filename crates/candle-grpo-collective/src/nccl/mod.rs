//! Ranks in a job with GPUs.

mod library;
mod rendezvous;
mod transfer;
mod watchdog;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{DType, Device, Error, Result, Tensor, bail};

use crate::copies::with_copies;
use crate::gpu::{Memory, memory};
use crate::launch::{self, Environment};
use crate::{Collective, Ticket, arguments};
use library::{Comm, Library, Operation, UniqueId};
pub use transfer::NcclTransfer;
use watchdog::Watchdog;

/// Ranks in a job, each with its own GPU, that communicate with NVIDIA's NCCL.
///
/// Operations run on a separate stream, one after the other. Each waits for the kernels that were
/// launched before it starts. [`Collective::start_all_reduce_sum`] and similar calls return at
/// once, and kernels that are launched before [`Collective::finish`] run at the same time. With
/// tensors on the GPU, the host waits only in [`Collective::barrier`], and while NCCL connects the
/// ranks, which it may also do in the first operations. CPU tensors are copied to the GPU and back.
/// GPU tensors must be on the device with which the ranks connected. bf16 is summed in f32 and
/// rounded once.
///
/// # Determinism
///
/// All ranks have the same bits. NCCL selects its algorithm by tensor size and by the machine's
/// interconnect, so another job may add in another order. Set `NCCL_ALGO=Ring` and
/// `NCCL_PROTO=Simple` to get the same bits in every job with the same number of ranks on the same
/// machines.
///
/// # Failures
///
/// If another rank ends, this process ends too, with a message and exit status 1. Threads watch the
/// connections to other ranks, NCCL errors, and each operation's time.
pub struct Nccl {
    rank: usize,
    world_size: usize,
    device: Device,
    /// The stream for Candle's kernels.
    compute: Arc<CudaStream>,
    watchdog: Watchdog,
    comm: Arc<Comm>,
    /// The stream for operations.
    stream: Arc<CudaStream>,
    /// The lock also keeps calls from several threads apart.
    started: Mutex<Started>,
    /// The ranks that exchanged the identifier. They end last.
    #[cfg(feature = "mpi")]
    mpi: Option<Arc<crate::Mpi>>,
}

/// Operations that have started.
#[derive(Default)]
struct Started {
    /// The last one.
    last: Ticket,
    /// The ones for which the compute stream does not wait yet, in order.
    running: VecDeque<Running>,
}

/// An operation for which the compute stream does not wait yet.
struct Running {
    ticket: Ticket,
    end: Arc<CudaEvent>,
    /// They keep their memory.
    _tensors: Vec<Tensor>,
}

impl Nccl {
    /// Maximum time until all ranks are connected.
    pub const CONNECTION_BOUND: Duration = Duration::from_secs(300);

    /// Maximum time for an operation, which waits for the slowest rank.
    pub const OPERATION_BOUND: Duration = Duration::from_secs(1800);

    /// Connects to the other ranks in a job, using the GPU `device`.
    ///
    /// Rank 0 sends an identifier to the others. It uses TCP, on the port after `MASTER_PORT`, if
    /// `MASTER_ADDR` is set, or else MPI, with the feature `mpi`. As with torchrun, the connection
    /// has no authentication, so the machines must be on a private network.
    ///
    /// # Errors
    ///
    /// Fails if `device` is not a GPU, if NCCL is not installed, if the ranks do not find each
    /// other within [`Self::CONNECTION_BOUND`], or if two ranks use the same GPU.
    pub fn connect(device: &Device, environment: &Environment) -> Result<Arc<Self>> {
        let Environment {
            rank, world_size, ..
        } = *environment;
        let library = Library::get()?;
        let compute = device.as_cuda_device()?.cuda_stream();
        let stream = compute.context().new_stream().map_err(Error::wrap)?;
        let identifier = || library.unique_id();
        let exchange = Exchange::new(environment, identifier)?;
        let comm = Arc::new(Comm::connect(library, exchange.id, rank, world_size)?);
        let watchdog = Watchdog::start(rank, &comm, exchange.connections, Self::OPERATION_BOUND)?;
        Ok(Arc::new(Self {
            rank,
            world_size,
            device: device.clone(),
            compute,
            stream,
            started: Mutex::default(),
            watchdog,
            comm,
            #[cfg(feature = "mpi")]
            mpi: exchange.mpi,
        }))
    }

    /// Runs an operation, copying CPU tensors, and bf16 tensors for sums.
    fn run(&self, operation: Operation, tensors: &[&Tensor]) -> Result<()> {
        self.check_devices(tensors)?;
        let is_sum = matches!(
            operation,
            Operation::AllReduceSum | Operation::ReduceScatterSum
        );
        let dtype = |dtype| {
            if is_sum && dtype == DType::BF16 {
                DType::F32
            } else {
                dtype
            }
        };
        with_copies(tensors, &self.device, dtype, |tensors| {
            let ticket = self.start(operation, tensors)?;
            self.finish(ticket)
        })
    }

    /// Enqueues an operation after all kernels launched so far.
    fn start(&self, operation: Operation, tensors: &[&Tensor]) -> Result<Ticket> {
        let mut started = self.lock();
        self.stream.join(&self.compute).map_err(Error::wrap)?;
        let memory: Vec<Memory> = tensors
            .iter()
            .map(|tensor| memory(tensor, &self.stream))
            .collect::<Result<_>>()?;
        let kept: Vec<Tensor> = tensors.iter().map(|tensor| tensor.detach()).collect();
        let flags = Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC);
        let end = Arc::new(
            self.stream
                .context()
                .new_event(flags)
                .map_err(Error::wrap)?,
        );
        // SAFETY: the memory belongs to tensors on this device. `started` keeps them until the
        // compute stream, on which memory is freed, waits for this one. The callers check the
        // dtypes.
        #[allow(unsafe_code)]
        let enqueued = unsafe { self.comm.enqueue(operation, &memory, &self.stream) };
        // A part of an operation that failed may run, and wait for other ranks.
        if let Err(error) = end.record(&self.stream) {
            // Nothing can wait for the operation, so its memory is never freed.
            std::mem::forget(kept);
            return Err(enqueued.err().unwrap_or_else(|| Error::wrap(error)));
        }
        self.watchdog.operation(Arc::clone(&end));
        let ticket = Ticket(started.last.0 + 1);
        started.last = ticket;
        started.running.push_back(Running {
            ticket,
            end,
            _tensors: kept,
        });
        if let Err(error) = enqueued {
            // If this fails, the tensors stay until a later call finishes.
            let _ = self.wait(&mut started, ticket);
            return Err(error);
        }
        Ok(ticket)
    }

    /// Makes the compute stream wait for the end of an operation.
    fn wait(&self, started: &mut Started, ticket: Ticket) -> Result<()> {
        let running = &mut started.running;
        let count = running.partition_point(|running| running.ticket <= ticket);
        // Operations end in order.
        let Some(last) = count.checked_sub(1).and_then(|last| running.get(last)) else {
            return Ok(());
        };
        self.compute.wait(&last.end).map_err(Error::wrap)?;
        running.drain(..count);
        Ok(())
    }

    /// Checks that each tensor is on the CPU or on the ranks' device.
    fn check_devices(&self, tensors: &[&Tensor]) -> Result<()> {
        for (index, tensor) in tensors.iter().enumerate() {
            let device = tensor.device();
            if device.is_cuda() && !device.same_device(&self.device) {
                bail!(
                    "tensor {index}: on another handle of a GPU ({:?}), must be on the one that the ranks connected with \
                     ({:?}): open each GPU once in a process",
                    device.location(),
                    self.device.location()
                );
            }
        }
        Ok(())
    }

    /// Returns whether all tensors are on the ranks' device.
    fn are_here(&self, tensors: &[&Tensor]) -> bool {
        let mut devices = tensors.iter().map(|tensor| tensor.device());
        devices.all(|device| device.same_device(&self.device))
    }

    /// Returns whether the tensors can be summed without copies.
    fn are_direct(&self, tensors: &[&Tensor]) -> bool {
        let mut dtypes = tensors.iter().map(|tensor| tensor.dtype());
        self.are_here(tensors) && dtypes.all(|dtype| dtype != DType::BF16)
    }

    fn lock(&self) -> MutexGuard<'_, Started> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective for Nccl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<()> {
        arguments::all_reduce_sum(tensors)?;
        self.run(Operation::AllReduceSum, tensors)
    }

    fn reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<()> {
        arguments::reduce_scatter_sum(tensors, self.world_size)?;
        self.run(Operation::ReduceScatterSum, tensors)
    }

    fn all_gather(&self, tensors: &[&Tensor]) -> Result<()> {
        arguments::all_gather(tensors, self.world_size)?;
        self.run(Operation::AllGather, tensors)
    }

    fn broadcast(&self, tensors: &[&Tensor], root: usize) -> Result<()> {
        arguments::broadcast(tensors, root, self.world_size)?;
        self.run(Operation::Broadcast { root }, tensors)
    }

    fn barrier(&self) -> Result<()> {
        let one = Tensor::ones(1, DType::F32, &self.device)?;
        self.all_reduce_sum(&[&one])?;
        self.compute.synchronize().map_err(Error::wrap)
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    /// Starts the sums on their own stream. bf16 and CPU tensors are summed at once.
    fn start_all_reduce_sum(&self, tensors: &[&Tensor]) -> Result<Ticket> {
        if !self.are_direct(tensors) {
            self.all_reduce_sum(tensors)?;
            return Ok(Ticket::default());
        }
        arguments::all_reduce_sum(tensors)?;
        self.start(Operation::AllReduceSum, tensors)
    }

    fn start_reduce_scatter_sum(&self, tensors: &[&Tensor]) -> Result<Ticket> {
        if !self.are_direct(tensors) {
            self.reduce_scatter_sum(tensors)?;
            return Ok(Ticket::default());
        }
        arguments::reduce_scatter_sum(tensors, self.world_size)?;
        self.start(Operation::ReduceScatterSum, tensors)
    }

    /// CPU tensors are gathered at once.
    fn start_all_gather(&self, tensors: &[&Tensor]) -> Result<Ticket> {
        if !self.are_here(tensors) {
            self.all_gather(tensors)?;
            return Ok(Ticket::default());
        }
        arguments::all_gather(tensors, self.world_size)?;
        self.start(Operation::AllGather, tensors)
    }

    /// The compute stream waits for the end of the operation, and this call for nothing.
    fn finish(&self, ticket: Ticket) -> Result<()> {
        self.wait(&mut self.lock(), ticket)
    }

    /// The group shares the stream of these ranks, so that operations of both run in the order of
    /// their calls.
    fn split(&self, color: usize) -> Result<Arc<dyn Collective>> {
        let members = self.ranks_of_color(color)?;
        let library = Library::get()?;
        let first = members.first().copied().unwrap_or(self.rank);
        let own = if first == self.rank {
            library.unique_id()?.to_vec()
        } else {
            Vec::new()
        };
        let ids = self.all_gather_bytes(&own)?;
        let id = UniqueId::try_from(ids[first].as_slice()).map_err(Error::wrap)?;
        let rank = members.iter().take_while(|&&other| other != self.rank);
        let (rank, world_size) = (rank.count(), members.len());
        let comm = Arc::new(Comm::connect(library, id, rank, world_size)?);
        Ok(Arc::new(Self {
            rank,
            world_size,
            device: self.device.clone(),
            compute: Arc::clone(&self.compute),
            watchdog: Watchdog::start(self.rank, &comm, Vec::new(), Self::OPERATION_BOUND)?,
            comm,
            stream: Arc::clone(&self.stream),
            started: Mutex::default(),
            #[cfg(feature = "mpi")]
            mpi: self.mpi.clone(),
        }))
    }

    fn abort(&self, code: i32) -> ! {
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            mpi.abort(code);
        }
        self.watchdog.abort(code)
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        // The communicator ends after its operations. During a panic they may never end.
        if !std::thread::panicking() {
            let _ = self.stream.synchronize();
        }
    }
}

/// The identifier shared by all ranks, and the connections that show whether they are alive.
struct Exchange {
    id: UniqueId,
    connections: Vec<std::net::TcpStream>,
    #[cfg(feature = "mpi")]
    mpi: Option<Arc<crate::Mpi>>,
}

impl Exchange {
    fn new(environment: &Environment, id: impl FnOnce() -> Result<UniqueId>) -> Result<Self> {
        let Environment {
            rank, world_size, ..
        } = *environment;
        let own = |id, connections| Self {
            id,
            connections,
            #[cfg(feature = "mpi")]
            mpi: None,
        };
        if world_size == 1 {
            return Ok(own(id()?, Vec::new()));
        }
        if let Some(master) = launch::master()? {
            let bound = Nccl::CONNECTION_BOUND;
            if rank == 0 {
                let id = id()?;
                return Ok(own(id, rendezvous::serve(&master, world_size, &id, bound)?));
            }
            let (id, connection) = rendezvous::join(&master, rank, world_size, bound)?;
            return Ok(own(id, vec![connection]));
        }
        Self::over_mpi(environment, id)
    }

    #[cfg(feature = "mpi")]
    fn over_mpi(environment: &Environment, id: impl FnOnce() -> Result<UniqueId>) -> Result<Self> {
        let mpi = crate::connect::mpi(environment)?;
        let own = if mpi.rank() == 0 {
            id()?.to_vec()
        } else {
            Vec::new()
        };
        let all = mpi.all_gather_bytes(&own)?;
        match all[0].as_slice().try_into() {
            Ok(id) => Ok(Self {
                id,
                connections: Vec::new(),
                mpi: Some(mpi),
            }),
            Err(_) => bail!("NCCL: an identifier of {} bytes, must be 128", all[0].len()),
        }
    }

    #[cfg(not(feature = "mpi"))]
    fn over_mpi(environment: &Environment, _: impl FnOnce() -> Result<UniqueId>) -> Result<Self> {
        bail!(
            "MASTER_ADDR: not set, must be the machine of rank 0 as {} is {}: this program was built without the \
             feature mpi",
            environment.launcher.world_size_variable(),
            environment.world_size
        )
    }
}

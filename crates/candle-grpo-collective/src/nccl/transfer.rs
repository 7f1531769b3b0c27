//! Groups with the processes of another program.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use candle_core::{DType, Device, Error, Result, Tensor, bail};

use super::library::{Comm, Library, Operation};
use crate::gpu::{self, Memory};
use crate::transfer::{GroupId, TransferGroup, TransferTransport, Waiting};

/// Time between two checks of an operation.
const INTERVAL: Duration = Duration::from_millis(5);

/// Maximum time for NCCL to end its own operations.
const ABORT: Duration = Duration::from_secs(5);

/// Sends bytes over NCCL to processes of another program, such as vLLM's workers.
///
/// Messages go through a buffer on the GPU, on a stream of their own. Each group has its own
/// communicator. If an operation fails, NCCL aborts it, and this process continues.
///
/// NCCL needs about the same version in all processes, and a GPU for each of them.
pub struct NcclTransfer {
    device: Device,
    library: &'static Library,
}

impl NcclTransfer {
    /// Creates the transport for the GPU `device`, with which the tensors must have been created.
    ///
    /// # Errors
    ///
    /// Fails if `device` is not a GPU, or if NCCL is not installed.
    pub fn new(device: &Device) -> Result<Self> {
        device.as_cuda_device()?;
        Ok(Self {
            device: device.clone(),
            library: Library::get()?,
        })
    }
}

impl TransferTransport for NcclTransfer {
    fn new_id(&self) -> Result<GroupId> {
        self.library.unique_id()
    }

    fn connect(
        &self,
        id: &GroupId,
        receivers: usize,
        waiting: &mut Waiting<'_>,
    ) -> Result<Box<dyn TransferGroup>> {
        let compute = self.device.as_cuda_device()?.cuda_stream();
        let stream = compute.context().new_stream().map_err(Error::wrap)?;
        compute.context().bind_to_thread().map_err(Error::wrap)?;
        let mut connect = || {
            let connected =
                Comm::connect_while(self.library, *id, 0, receivers + 1, INTERVAL, waiting);
            let mut group = Group {
                device: self.device.clone(),
                stream: Arc::clone(&stream),
                comm: Arc::new(connected?),
                buffer: None,
                packed: 0,
            };
            let one = Tensor::ones(1, DType::F32, &self.device)?;
            group.pack(&[one])?;
            group.operate(Operation::AllReduceSum, DType::F32, waiting)?;
            Ok(Box::new(group) as _)
        };
        connect().map_err(|error: Error| {
            let version = self.library.version();
            Error::msg(format!(
                "with NCCL {version}, which the other processes need, too: {error}"
            ))
        })
    }
}

struct Group {
    device: Device,
    /// The stream for copies and operations.
    stream: Arc<CudaStream>,
    comm: Arc<Comm>,
    buffer: Option<CudaSlice<u8>>,
    /// Number of bytes in the next message.
    packed: usize,
}

impl Group {
    /// Runs an operation on the packed bytes. On a thread, because calls may take forever.
    fn operate(
        &mut self,
        operation: Operation,
        dtype: DType,
        waiting: &mut Waiting<'_>,
    ) -> Result<()> {
        let Some(buffer) = &self.buffer else {
            bail!("send: nothing is packed, must follow pack");
        };
        let address = buffer.device_ptr(&self.stream).0;
        let elements = self.packed / dtype.size_in_bytes();
        let (comm, stream) = (Arc::clone(&self.comm), Arc::clone(&self.stream));
        let (done, ended) = mpsc::channel();
        let operate = move || -> Result<()> {
            stream.context().bind_to_thread().map_err(Error::wrap)?;
            let memory = Memory {
                address,
                elements,
                dtype,
            };
            // SAFETY: the buffer is on the stream's device, and the group keeps it until this
            // thread has waited for the stream. A sum is of f32.
            #[allow(unsafe_code)]
            unsafe {
                comm.enqueue(operation, &[memory], &stream)?;
            }
            while comm.is_in_progress()? {
                thread::sleep(INTERVAL);
            }
            stream.synchronize().map_err(Error::wrap)
        };
        thread::Builder::new()
            .name("nccl-transfer".to_owned())
            .spawn(move || done.send(operate()))
            .map_err(Error::wrap)?;
        loop {
            let failed = match ended.recv_timeout(INTERVAL) {
                Ok(ended) => return ended,
                Err(RecvTimeoutError::Disconnected) => Err(Error::msg("NCCL: a thread panicked")),
                Err(RecvTimeoutError::Timeout) => waiting().and_then(|()| self.comm.async_error()),
            };
            let Err(error) = failed else { continue };
            self.comm.abort();
            if let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(ABORT) {
                // The GPU may still use it.
                std::mem::forget(self.buffer.take());
            }
            return Err(error);
        }
    }
}

impl TransferGroup for Group {
    fn pack(&mut self, tensors: &[Tensor]) -> Result<()> {
        let (buffer, packed) = (&mut self.buffer, &mut self.packed);
        let stream = &self.stream;
        gpu::pack(tensors, &self.device, stream, |bytes| {
            *packed = bytes;
            if buffer.as_ref().is_some_and(|buffer| buffer.len() < bytes) {
                // Before the larger one takes its memory.
                *buffer = None;
            }
            let buffer = match buffer {
                Some(buffer) => buffer,
                None => {
                    // SAFETY: the copies write all bytes that are sent.
                    #[allow(unsafe_code)]
                    let new = unsafe { stream.alloc::<u8>(bytes.max(1)) };
                    buffer.insert(new.map_err(Error::wrap)?)
                }
            };
            Ok(buffer.device_ptr(stream).0)
        })
    }

    fn send(&mut self, waiting: &mut Waiting<'_>) -> Result<()> {
        self.operate(Operation::Broadcast { root: 0 }, DType::U8, waiting)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Unlike the end of a communicator, this waits for no other process.
        self.comm.abort();
    }
}

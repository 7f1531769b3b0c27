//! Interfaces for sending bytes to the processes of another program.

use candle_core::{Result, Tensor};

/// A group's identifier. The other processes receive it in another way, such as a request.
pub type GroupId = [u8; 128];

/// Called at intervals while an operation waits for the other processes. Its error ends the
/// operation, which returns it.
pub type Waiting<'a> = dyn FnMut() -> Result<()> + 'a;

/// Opens groups in which this process sends bytes to the processes of another program, such as the
/// workers of an inference server.
///
/// A [`Collective`](crate::Collective) connects the ranks of one job, which end together. A group
/// ends alone: this process continues, and can open another one with a new identifier.
pub trait TransferTransport: Send + Sync {
    /// Makes the identifier for a new group.
    ///
    /// # Errors
    ///
    /// Fails if the library cannot make one.
    fn new_id(&self) -> Result<GroupId>;

    /// Connects to `receivers` processes, and returns once all are connected. This process is rank
    /// 0, and they are ranks 1 to `receivers`. Their first operation is the sum of one f32, with
    /// which vLLM's communicators begin.
    ///
    /// # Errors
    ///
    /// Fails if `waiting` does, or if the connection fails. The identifier cannot be used again.
    fn connect(
        &self,
        id: &GroupId,
        receivers: usize,
        waiting: &mut Waiting<'_>,
    ) -> Result<Box<dyn TransferGroup>>;
}

/// An open group. Dropping it closes it, and waits for no other process. After an error, it cannot
/// be used again.
pub trait TransferGroup: Send {
    /// Copies the bytes of contiguous `tensors`, one after another without gaps, into the next
    /// message. The tensors may change afterward. Synchronizes with the device.
    ///
    /// # Errors
    ///
    /// Fails if a tensor is on a device that the group cannot read, or if there is no memory.
    fn pack(&mut self, tensors: &[Tensor]) -> Result<()>;

    /// Sends the packed bytes to all other processes, as one broadcast from rank 0. Returns once
    /// they have been sent.
    ///
    /// # Errors
    ///
    /// Fails if `waiting` does, or if the connection is broken. It may not be: if another process
    /// has ended, an operation may wait forever.
    fn send(&mut self, waiting: &mut Waiting<'_>) -> Result<()>;
}

/// Allocates memory on this process's GPU that processes of another program can open, on the same
/// GPU. They then read the bytes where they are.
pub trait SharedMemory: Send + Sync {
    /// Allocates a buffer of `bytes` bytes.
    ///
    /// # Errors
    ///
    /// Fails if there is no memory, or if the device shares none.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn SharedBuffer>>;
}

/// Memory that other processes can open. Dropping it frees the memory, so they must have closed it.
pub trait SharedBuffer: Send {
    /// Returns the data with which another process opens the memory.
    fn handle(&self) -> MemoryHandle;

    /// Copies the bytes of contiguous `tensors`, one after another without gaps, to the start of
    /// the memory. Other processes can read them afterward, and the tensors may change.
    ///
    /// # Errors
    ///
    /// Fails if the tensors are larger than the memory, or if one is on a device that cannot be
    /// copied from.
    fn pack(&mut self, tensors: &[Tensor]) -> Result<()>;
}

/// The data with which a process opens memory of another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryHandle {
    /// The handle of the allocation (`CUipcMemHandle`).
    pub memory: [u8; 64],
    /// The UUID of the GPU.
    pub device: [u8; 16],
}

//! Tensors that are needed again in reverse order.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "cuda")]
mod page_locked;

use candle_core::{Device, Result, Tensor};

/// A stack of tensors, such as the inputs of a model's layers, which the backward pass needs again
/// in reverse order.
///
/// [`Self::on_device`] keeps them where they are. [`Self::in_main_memory`] moves those of a GPU to
/// page-locked main memory, and back before they are needed. The copies run beside the kernels that
/// are launched meanwhile, and no call waits for them, except where tensors become larger. At most
/// [`Self::ON_DEVICE`] of the tensors are then in the memory of the GPU.
///
/// This is activation offloading, as in `torch.autograd.graph.save_on_cpu` and in
/// <https://unsloth.ai/blog/long-context>. A copy of a tensor with B bytes takes B / 50 GB/s over
/// PCIe 5.0 with 16 lanes, so it is hidden behind a layer that computes for longer.
///
/// Page-locked memory is slow to allocate. The process keeps it for later stacks.
///
/// ```
/// use candle_core::Tensor;
/// use candle_grpo_kernels::{TensorStack, default_device};
///
/// let device = default_device()?;
/// let mut stack = TensorStack::in_main_memory(&device)?;
/// for layer in [1f32, 2., 3.] {
///     stack.push(&Tensor::new(&[layer], &device)?)?;
/// }
/// assert_eq!(stack.pop()?.unwrap().to_vec1::<f32>()?, [3.]);
/// assert_eq!(stack.pop()?.unwrap().to_vec1::<f32>()?, [2.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorStack(Place);

#[derive(Debug)]
enum Place {
    OnDevice(Vec<Tensor>),
    #[cfg(feature = "cuda")]
    InMainMemory(cuda::Moved),
}

impl TensorStack {
    /// The largest number of tensors of a stack in main memory that are on the GPU, too: one that
    /// is in use, and one that is copied meanwhile.
    pub const ON_DEVICE: usize = 2;

    /// Creates a stack that keeps tensors where they are.
    pub fn on_device() -> Self {
        Self(Place::OnDevice(Vec::new()))
    }

    /// Creates a stack that moves tensors on the GPU `device` to main memory. With another device,
    /// this is [`Self::on_device`].
    ///
    /// # Errors
    ///
    /// Fails if the GPU has a stream for each thread, or the driver does not respond.
    pub fn in_main_memory(device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            return Ok(Self(Place::InMainMemory(cuda::Moved::new(device)?)));
        }
        let _ = device;
        Ok(Self::on_device())
    }

    /// The bytes of main memory that a tensor of `bytes` bytes takes in a stack there, at most.
    pub fn main_memory_bytes(bytes: usize) -> usize {
        crate::with_room(bytes, usize::MAX)
    }

    /// Adds a tensor. It must not change while it is in the stack. Its graph is not kept.
    ///
    /// # Errors
    ///
    /// Fails if a stack in main memory receives a tensor of another device, or of another dtype
    /// than f32, bf16 or f16, or if there is not enough memory.
    pub fn push(&mut self, tensor: &Tensor) -> Result<()> {
        match &mut self.0 {
            Place::OnDevice(tensors) => {
                tensors.push(tensor.detach());
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Place::InMainMemory(moved) => moved.push(tensor),
        }
    }

    /// Removes the last tensor, and returns it on its device. `None` if there is none.
    ///
    /// # Errors
    ///
    /// Fails if the GPU does not have the memory.
    pub fn pop(&mut self) -> Result<Option<Tensor>> {
        match &mut self.0 {
            Place::OnDevice(tensors) => Ok(tensors.pop()),
            #[cfg(feature = "cuda")]
            Place::InMainMemory(moved) => moved.pop(),
        }
    }
}

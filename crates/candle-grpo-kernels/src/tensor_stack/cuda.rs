//! A stack in main memory, for tensors on a GPU.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Error, Result, Shape, Tensor, bail};

use super::page_locked::{Copies, PageLocked};
use crate::cpu::with_element;
use crate::cuda::device::stream;
use crate::cuda::tensor_list::address;
use crate::cuda::{alloc, as_tensor};
use crate::path;

#[derive(Debug)]
pub(super) struct Moved {
    device: Device,
    /// The stream of the kernels, on which memory of the GPU is freed.
    compute: Arc<CudaStream>,
    copies: Arc<Copies>,
    items: Vec<Item>,
}

/// A tensor in main memory, and perhaps on the GPU as well.
#[derive(Debug)]
struct Item {
    shape: Shape,
    dtype: DType,
    in_main_memory: PageLocked,
    on_gpu: Option<Copied>,
}

/// A tensor on the GPU, with the end of its copy to or from main memory.
#[derive(Debug)]
struct Copied {
    tensor: Tensor,
    end: CudaEvent,
}

impl Moved {
    pub(super) fn new(device: &Device) -> Result<Self> {
        let compute = stream(device.as_cuda_device()?)?;
        Ok(Self {
            device: device.clone(),
            copies: Copies::of(&compute)?,
            compute,
            items: Vec::new(),
        })
    }

    pub(super) fn push(&mut self, tensor: &Tensor) -> Result<()> {
        if !tensor.device().same_device(&self.device) {
            bail!(
                "tensor: on {:?}, must be on the device of the stack, {:?}",
                tensor.device().location(),
                self.device.location()
            );
        }
        let tensor = tensor.detach().contiguous()?;
        let (shape, dtype) = (tensor.shape().clone(), tensor.dtype());
        if !path::is_fused(&tensor) {
            bail!("tensor: {dtype:?}, must be f32, bf16 or f16");
        }
        let (from, bytes) = (address(&tensor, &self.compute)?, bytes(&shape, dtype));
        let memory = self.copies.take(bytes)?;
        // SAFETY: the memory has as many bytes.
        #[allow(unsafe_code)]
        let copied = self.copied(tensor, || unsafe {
            self.copies.to_main_memory(&memory, from, bytes)
        });
        let on_gpu = match copied {
            Ok(copied) => Some(copied),
            Err(error) => {
                self.copies.give_back(memory);
                return Err(error);
            }
        };
        let before = self.items.last_mut().and_then(|item| item.on_gpu.take());
        self.items.push(Item {
            shape,
            dtype,
            in_main_memory: memory,
            on_gpu,
        });
        // It was copied while the kernels ran that have been launched since.
        before.map_or(Ok(()), |before| self.end(before).map(drop))
    }

    pub(super) fn pop(&mut self) -> Result<Option<Tensor>> {
        let Some(last) = self.items.len().checked_sub(1) else {
            return Ok(None);
        };
        self.fetch(last)?;
        // It is copied while the last one is in use.
        if let Some(before) = last.checked_sub(1) {
            self.fetch(before)?;
        }
        let tensor = self.items.pop().map(|item| self.remove(item));
        Ok(tensor.transpose()?.flatten())
    }

    /// Starts to copy a tensor to the GPU if it is not there.
    fn fetch(&mut self, index: usize) -> Result<()> {
        let Item {
            shape,
            dtype,
            in_main_memory,
            on_gpu: None,
        } = &self.items[index]
        else {
            return Ok(());
        };
        let tensor = empty(self.device.as_cuda_device()?, shape, *dtype)?;
        let (to, bytes) = (address(&tensor, &self.compute)?, bytes(shape, *dtype));
        // SAFETY: the tensor has as many bytes.
        #[allow(unsafe_code)]
        let copied = self.copied(tensor, || unsafe {
            self.copies.to_gpu(to, in_main_memory, bytes)
        })?;
        self.items[index].on_gpu = Some(copied);
        Ok(())
    }

    /// Starts a copy to or from `tensor` after all kernels and allocations so far, and keeps the
    /// tensor. Memory is freed on the stream of the kernels, which must wait for the end before.
    fn copied(&self, tensor: Tensor, copy: impl FnOnce() -> Result<()>) -> Result<Copied> {
        let stream = &self.copies.stream;
        stream.join(&self.compute).map_err(Error::wrap)?;
        let started = copy();
        match stream.record_event(None) {
            Ok(end) => started.map(|()| Copied { tensor, end }),
            Err(error) => {
                // Nothing can wait for the copy, so the memory is never freed.
                std::mem::forget(tensor);
                Err(started.err().unwrap_or_else(|| Error::wrap(error)))
            }
        }
    }

    /// Makes kernels wait for the end of a copy.
    fn end(&self, copied: Copied) -> Result<Tensor> {
        match self.compute.wait(&copied.end) {
            Ok(()) => Ok(copied.tensor),
            Err(error) => {
                // As above.
                std::mem::forget(copied.tensor);
                Err(Error::wrap(error))
            }
        }
    }

    /// Frees the main memory of a tensor, and returns it if it is on the GPU.
    fn remove(&self, item: Item) -> Result<Option<Tensor>> {
        self.copies.give_back(item.in_main_memory);
        item.on_gpu.map(|copied| self.end(copied)).transpose()
    }
}

/// After an error, or without a backward pass.
impl Drop for Moved {
    fn drop(&mut self) {
        for item in std::mem::take(&mut self.items) {
            // An error leaves the memory as it is.
            let _ = self.remove(item);
        }
    }
}

fn bytes(shape: &Shape, dtype: DType) -> usize {
    shape.elem_count() * dtype.size_in_bytes()
}

/// Allocates a tensor for a copy, which fills it.
fn empty(device: &CudaDevice, shape: &Shape, dtype: DType) -> Result<Tensor> {
    let storage = with_element!(dtype, "tensor", T => {
        // SAFETY: the copy writes all elements.
        #[allow(unsafe_code)]
        let slice = unsafe { alloc::<T>(device, shape.elem_count())? };
        CudaStorage::wrap_cuda_slice(slice, device.clone())
    });
    Ok(as_tensor(storage, shape))
}

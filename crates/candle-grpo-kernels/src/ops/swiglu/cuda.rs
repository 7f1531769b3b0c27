//! The CUDA path of [`swiglu`](crate::swiglu) and [`geglu`](crate::geglu).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::{Layout, Result, Shape, Storage, Tensor};

use super::Activation;
use crate::cuda::elements::blocks;
use crate::cuda::{In, Out, alloc, as_tensor, kernels, with_cuda_floats};

/// Returns the result for contiguous `gate` and `up` with equal shapes.
pub(crate) fn forward(
    gate: &CudaStorage,
    gate_layout: &Layout,
    up: &CudaStorage,
    up_layout: &Layout,
    activation: Activation,
) -> Result<(CudaStorage, Shape)> {
    let device = gate.device();
    let stream = device.cuda_stream();
    let n = gate_layout.shape().elem_count();
    let y = with_cuda_floats!(gate, "gate", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let mut y = unsafe { alloc::<T>(device, n)? };
        if n > 0 {
            // SAFETY: all three have n elements, and the blocks cover them.
            #[allow(unsafe_code)]
            unsafe {
                let (gate, up) = (In::new(gate, gate_layout, &stream)?, In::new(up, up_layout, &stream)?);
                let (y, n, blocks) = (Out::new(&mut y, &stream), n as u64, blocks::<T>(n)?);
                match activation {
                    Activation::Silu => kernels::swiglu_forward::<T> { gate, up, y, n }.launch(device, blocks)?,
                    Activation::GeluTanh => kernels::geglu_forward::<T> { gate, up, y, n }.launch(device, blocks)?,
                }
            }
        }
        CudaStorage::wrap_cuda_slice(y, device.clone())
    });
    Ok((y, gate_layout.shape().clone()))
}

/// Returns the gradients with respect to `gate` and `up`. All must be contiguous with equal shapes.
pub(crate) fn backward(
    gate: &Tensor,
    up: &Tensor,
    gradient: &Tensor,
    activation: Activation,
) -> Result<(Tensor, Tensor)> {
    let device = gate.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let n = gate.elem_count();
    let (gate_storage, up_storage, gradient_storage) = (
        gate.storage_and_layout(),
        up.storage_and_layout(),
        gradient.storage_and_layout(),
    );
    let Storage::Cuda(gate_cuda) = &*gate_storage.0 else {
        candle_core::bail!("swiglu: gate left the GPU");
    };
    let (dgate, dup) = with_cuda_floats!(gate_cuda, "gate", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let (mut dgate, mut dup) = unsafe { (alloc::<T>(device, n)?, alloc::<T>(device, n)?) };
        if n > 0 {
            // SAFETY: all five have n elements, and the blocks cover them.
            #[allow(unsafe_code)]
            unsafe {
                let (gate, up) = (In::from_tensor(&gate_storage, &stream)?, In::from_tensor(&up_storage, &stream)?);
                let gradient = In::from_tensor(&gradient_storage, &stream)?;
                let (dgate, dup) = (Out::new(&mut dgate, &stream), Out::new(&mut dup, &stream));
                let (n, blocks) = (n as u64, blocks::<T>(n)?);
                match activation {
                    Activation::Silu => kernels::swiglu_backward::<T> { gate, up, gradient, dgate, dup, n }.launch(device, blocks)?,
                    Activation::GeluTanh => kernels::geglu_backward::<T> { gate, up, gradient, dgate, dup, n }.launch(device, blocks)?,
                }
            }
        }
        (
            CudaStorage::wrap_cuda_slice(dgate, device.clone()),
            CudaStorage::wrap_cuda_slice(dup, device.clone()),
        )
    });
    Ok((as_tensor(dgate, gate.shape()), as_tensor(dup, up.shape())))
}

//! The CUDA path of [`linear_rows`](crate::linear_rows()): cuBLAS products.

use candle_core::{CudaStorage, DType, Result, Shape, Storage, Tensor, bail};

use crate::cuda::argument::Argument;
use crate::cuda::matmul::{Batch, Matrix, products};
use crate::cuda::{In, Out, alloc, as_tensor, with_cuda_floats};

/// Computes `x w^T` for each weight, in their dtype. Two consecutive weights with the same shape
/// form one batch, whose step is the distance between their addresses.
pub(crate) fn forward(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
    let x = x.contiguous()?;
    let (m, k) = x.dims2()?;
    let weights = weights.iter().map(|&weight| match weight.dtype() {
        DType::U8 => crate::dequantize(weight, x.dtype()),
        _ => Ok(weight.clone()),
    });
    let weights = weights.collect::<Result<Vec<_>>>()?;
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let x = x.storage_and_layout();
    let Storage::Cuda(x_cuda) = &*x.0 else {
        bail!("x: on the CPU, must be on a GPU");
    };
    let mut results = Vec::with_capacity(weights.len());
    with_cuda_floats!(x_cuda, "x", T => {
        let mut rest = weights.as_slice();
        while let Some((first, others)) = rest.split_first() {
            let count = 1 + usize::from(others.first().is_some_and(|w| w.dims() == first.dims()));
            let (batch, after) = rest.split_at(count);
            rest = after;
            let batch = batch.iter().map(|weight| weight.contiguous()).collect::<Result<Vec<_>>>()?;
            let storages: Vec<_> = batch.iter().map(Tensor::storage_and_layout).collect();
            let mut inputs = storages
                .iter()
                .enumerate()
                .map(|(index, storage)| Ok((index, In::<T>::from_tensor(storage, &stream)?)))
                .collect::<Result<Vec<_>>>()?;
            // The step must not be negative.
            inputs.sort_by_key(|(_, input)| *input.bits());
            let distance = *inputs[count - 1].1.bits() - *inputs[0].1.bits();
            let order: Vec<usize> = inputs.iter().map(|(index, _)| *index).collect();
            let n = first.dim(0)?;
            // SAFETY: the products write every element.
            #[allow(unsafe_code)]
            let mut y = unsafe { alloc::<T>(device, count * m * n)? };
            if m > 0 && n > 0 {
                let a = Matrix { elements: In::<T>::from_tensor(&x, &stream)?, is_transposed: false };
                let b = Matrix { elements: inputs.swap_remove(0).1, is_transposed: true };
                let batch = Batch { count, b_step: (distance / size_of::<T>() as u64) as i64 };
                // SAFETY: the sizes match the tensors, and the second weight is at this distance
                // from the first.
                #[allow(unsafe_code)]
                unsafe {
                    products(device, [m, k, n], &a, &b, &Out::new(&mut y, &stream), false, batch)?;
                }
            }
            let y = CudaStorage::wrap_cuda_slice(y, device.clone());
            let y = as_tensor(y, &Shape::from((count, m, n)));
            for index in 0..count {
                let place = order.iter().position(|other| *other == index).unwrap_or(index);
                results.push(y.narrow(0, place, 1)?.squeeze(0)?);
            }
        }
    });
    Ok(results)
}

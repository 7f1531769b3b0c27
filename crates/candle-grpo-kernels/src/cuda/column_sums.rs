//! Sums of the parts that blocks leave, for gradients that all rows share.

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, LaunchConfig};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{Result, Tensor};

use super::{CudaElement, In, Out, alloc, as_tensor, kernels};

/// Warps per block, as in the kernel.
const WARPS: u32 = 32;

/// Sums the rows of `parts` `[first + second, columns]`: the first ones, and, unless there are
/// none, the second ones. Returns `[1, columns]` or `[2, columns]`. Rows are added in order, so the
/// result is deterministic.
pub(crate) fn column_sums<T: CudaElement>(
    device: &CudaDevice,
    parts: &CudaSlice<f32>,
    [first, second]: [usize; 2],
    columns: usize,
) -> Result<Tensor> {
    let stream = device.cuda_stream();
    let groups = if second > 0 { 2 } else { 1 };
    let by_columns = LaunchConfig {
        grid_dim: (columns.div_ceil(32) as u32, groups as u32, 1),
        block_dim: (32, WARPS, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the kernel writes every element.
    #[allow(unsafe_code)]
    let mut sums = unsafe { alloc::<T>(device, groups * columns)? };
    // SAFETY: each row of the parts has a number for each column.
    #[allow(unsafe_code)]
    unsafe {
        kernels::column_sums::<T> {
            parts: In::from_slice(parts, &stream),
            sums: Out::new(&mut sums, &stream),
            first_rows: first as i32,
            second_rows: second as i32,
            columns: columns as i32,
        }
        .launch(device, by_columns)?;
    }
    let sums = CudaStorage::wrap_cuda_slice(sums, device.clone());
    Ok(as_tensor(sums, &(groups, columns).into()))
}

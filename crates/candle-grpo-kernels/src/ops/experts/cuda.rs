//! The CUDA path of [`experts`](crate::experts()).

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, LaunchConfig};
use candle_core::{CudaStorage, Layout, Result, Storage, Tensor, bail};

use super::ExpertWeights;
use crate::cuda::tensor_list::address;
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

/// Threads per block, and columns in a fragment, as in the kernels.
const THREADS: u32 = 128;
const COLUMNS: usize = 16;
const THREADS_OF_SUM: u32 = 256;

/// The addresses of all gate weights, then of all up weights, then of all down weights.
#[derive(Debug, Clone)]
pub(crate) struct Table(Arc<CudaSlice<u64>>);

impl Table {
    /// Copies the addresses to the GPU. `None` if the kernels do not take the weights. The table is
    /// valid while the weights exist.
    pub(crate) fn new(weights: &[[Tensor; 3]]) -> Result<Option<Self>> {
        let Some([first, ..]) = weights.first() else {
            return Ok(None);
        };
        if !ExpertWeights::have_kernel(first.dtype(), first.device()) {
            return Ok(None);
        }
        let device = first.device().as_cuda_device()?;
        let stream = device.cuda_stream();
        let maps = (0..3).flat_map(|map| weights.iter().map(move |weights| &weights[map]));
        let addresses = maps.map(|weight| address(weight, &stream));
        let addresses = addresses.collect::<Result<Vec<_>>>()?;
        Ok(Some(Self(Arc::new(device.clone_htod(&addresses)?))))
    }
}

/// Returns the sums `[N, H]` for arguments that are checked, not empty, and few enough.
pub(crate) fn forward(
    x: &Tensor,
    weights: &ExpertWeights,
    table: &Table,
    chosen: &Tensor,
    gates: &Tensor,
) -> Result<Tensor> {
    let [x, chosen, gates] = [x, chosen, gates].map(Tensor::contiguous);
    let (x, chosen, gates) = (x?, chosen?, gates?);
    let ((n, top_k), experts) = (chosen.dims2()?, weights.weights.len());
    let (hidden, width, pairs) = (weights.hidden, weights.width, n * top_k);
    // With fewer pairs than experts, a block belongs to a pair.
    let launch = |columns: usize, per_block: usize| LaunchConfig {
        grid_dim: (
            columns.div_ceil(per_block) as u32,
            pairs.min(experts) as u32,
            1,
        ),
        block_dim: (THREADS, 1, 1),
        // The list of pairs.
        shared_mem_bytes: (pairs * size_of::<u16>()) as u32,
    };
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (x_storage, chosen, gates) = (
        x.storage_and_layout(),
        chosen.storage_and_layout(),
        gates.storage_and_layout(),
    );
    let Storage::Cuda(cuda) = &*x_storage.0 else {
        bail!("x: on the CPU, must be on a GPU");
    };
    let y = with_cuda_floats!(cuda, "x", T => {
        // SAFETY: the kernels write the elements of each pair whose index is an expert, and read
        // only these. The last one writes all of `y`.
        #[allow(unsafe_code)]
        let (mut inner, mut parts, mut y) = unsafe {
            (
                alloc::<T>(device, pairs * width)?,
                alloc::<f32>(device, pairs * hidden)?,
                alloc::<T>(device, n * hidden)?,
            )
        };
        // SAFETY: the sizes match the tensors, and the blocks cover the columns. The table has the
        // addresses of three weights for each expert, which exist as long as `weights`, and the
        // stream orders the launches before they are freed. The list has a place for each pair.
        #[allow(unsafe_code)]
        unsafe {
            kernels::experts_gate_up::<T> {
                x: In::from_tensor(&x_storage, &stream)?,
                weights: In::from_slice(&table.0, &stream),
                chosen: In::from_tensor(&chosen, &stream)?,
                inner: Out::new(&mut inner, &stream),
                pairs: pairs as u32,
                top_k: top_k as u32,
                experts: experts as u32,
                hidden: hidden as i32,
                width: width as i32,
            }
            .launch(device, launch(width, COLUMNS))?;
            let inner = CudaStorage::wrap_cuda_slice(inner, device.clone());
            kernels::experts_down::<T> {
                inner: In::new(&inner, &Layout::contiguous((pairs, width)), &stream)?,
                weights: In::from_slice(&table.0, &stream),
                chosen: In::from_tensor(&chosen, &stream)?,
                parts: Out::new(&mut parts, &stream),
                pairs: pairs as u32,
                experts: experts as u32,
                hidden: hidden as i32,
                width: width as i32,
            }
            .launch(device, launch(hidden, 2 * COLUMNS))?;
            kernels::experts_sum::<T> {
                parts: In::from_slice(&parts, &stream),
                chosen: In::from_tensor(&chosen, &stream)?,
                gates: In::from_tensor(&gates, &stream)?,
                y: Out::new(&mut y, &stream),
                n: n as u64,
                top_k: top_k as u32,
                experts: experts as u32,
                hidden: hidden as u32,
            }
            .launch(device, grid((n * hidden).div_ceil(THREADS_OF_SUM as usize), THREADS_OF_SUM)?)?;
        }
        CudaStorage::wrap_cuda_slice(y, device.clone())
    });
    Ok(as_tensor(y, x.shape()))
}

//! The CUDA path of [`causal_conv`](crate::causal_conv()).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{Device, Layout, Result, Shape, Storage, Tensor, bail};

use crate::PrefixTree;
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};
use crate::prefix_tree::cuda::DeviceTree;

/// Threads per block in kernels outside [`Pass`].
pub(crate) const THREADS: u32 = 256;
/// Warps and channels per block in both passes, and taps per block in the backward pass, as in the
/// kernels.
const WARPS: u32 = 4;
const COLUMNS: usize = 128;
const NEAR: usize = 4;
/// Maximum grid size in y and z.
const MAX_BLOCKS: usize = 65_535;

/// Launches for both passes. The weight gradient is summed over the rows in a part, then over the
/// parts in order, so it is deterministic.
struct Pass {
    /// Rows per warp. Each block's warps cover one part of the rows.
    rows: usize,
    parts: usize,
    columns: u32,
}

impl Pass {
    fn new(n: usize, channels: usize) -> Self {
        // A warp also reads the rows next to its own. With few rows, many blocks are needed.
        let rows = (n / 128).clamp(8, 64);
        let rows = rows.max(n.div_ceil(WARPS as usize * MAX_BLOCKS));
        Self {
            rows,
            parts: n.div_ceil(WARPS as usize * rows),
            columns: channels.div_ceil(COLUMNS) as u32,
        }
    }

    /// Returns a kernel's launch for all rows and for groups of taps.
    fn by_rows(&self, groups: usize) -> LaunchConfig {
        Self::launch((self.columns, self.parts as u32, groups as u32))
    }

    fn by_segments(&self, segments: usize) -> LaunchConfig {
        Self::launch((segments as u32, self.columns, 1))
    }

    fn launch(grid_dim: (u32, u32, u32)) -> LaunchConfig {
        LaunchConfig {
            grid_dim,
            block_dim: (32, WARPS, 1),
            shared_mem_bytes: 0,
        }
    }
}

/// Checks the launch size limits.
pub(crate) fn check(channels: usize, taps: usize) -> Result<()> {
    if channels.div_ceil(COLUMNS) > MAX_BLOCKS || taps > MAX_BLOCKS {
        bail!("weight: shape [{channels}, {taps}], larger than one launch takes");
    }
    Ok(())
}

/// Returns the result for contiguous `x` `[N, channels]` and `weight` `[channels, taps]`.
pub(crate) fn forward(
    (x, x_layout): (&CudaStorage, &Layout),
    (weight, weight_layout): (&CudaStorage, &Layout),
    tree: &PrefixTree,
) -> Result<(CudaStorage, Shape)> {
    let device = x.device();
    let stream = device.cuda_stream();
    let (channels, taps) = weight_layout.shape().dims2()?;
    check(channels, taps)?;
    let tree = DeviceTree::of(tree, &Device::Cuda(device.clone()))?;
    let (segments, segment_of, before) = (
        tree.segments.storage_and_layout(),
        tree.segment_of.storage_and_layout(),
        tree.before.storage_and_layout(),
    );
    let elements = x_layout.shape().elem_count();
    let n = elements / channels;
    let pass = Pass::new(n, channels);
    let y = with_cuda_floats!(x, "x", T => {
        // SAFETY: the kernel writes every element. x and y have the tree's rows, and the blocks
        // cover them.
        #[allow(unsafe_code)]
        let y = unsafe {
            let mut y = alloc::<T>(device, elements)?;
            kernels::causal_conv_forward::<T> {
                x: In::new(x, x_layout, &stream)?,
                weight: In::new(weight, weight_layout, &stream)?,
                before: In::from_tensor(&before, &stream)?,
                segments: In::from_tensor(&segments, &stream)?,
                segment_of: In::from_tensor(&segment_of, &stream)?,
                y: Out::new(&mut y, &stream),
                n: n as u64,
                rows: pass.rows as u32,
                channels: channels as i32,
                taps: taps as i32,
            }
            .launch(device, pass.by_rows(1))?;
            y
        };
        CudaStorage::wrap_cuda_slice(y, device.clone())
    });
    Ok((y, x_layout.shape().clone()))
}

/// Returns the gradients with respect to `x` and `weight`. All tensors must be contiguous.
pub(crate) fn backward(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    tree: &PrefixTree,
) -> Result<(Tensor, Tensor)> {
    let device = x.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (channels, taps) = weight.dims2()?;
    check(channels, taps)?;
    let (elements, n) = (x.elem_count(), x.dim(0)?);
    let tree = DeviceTree::of(tree, x.device())?;
    let (segments, segment_of, before) = (
        tree.segments.storage_and_layout(),
        tree.segment_of.storage_and_layout(),
        tree.before.storage_and_layout(),
    );
    let (x_storage, weight_storage, gradient_storage) = (
        x.storage_and_layout(),
        weight.storage_and_layout(),
        gradient.storage_and_layout(),
    );
    let Storage::Cuda(x_cuda) = &*x_storage.0 else {
        bail!("causal_conv: x left the GPU");
    };
    let pass = Pass::new(n, channels);
    let by_weight = grid(weight.elem_count().div_ceil(THREADS as usize), THREADS)?;
    let (of_x, of_weight) = with_cuda_floats!(x_cuda, "x", T => {
        // SAFETY: the kernels write every element before they read it. x, its gradient and the
        // gradient have the tree's rows. The blocks cover them, the segments, the parts and the
        // weight.
        #[allow(unsafe_code)]
        unsafe {
            let mut parts = alloc::<f32>(device, pass.parts * weight.elem_count())?;
            let mut of_x = alloc::<T>(device, elements)?;
            let mut of_weight = alloc::<T>(device, weight.elem_count())?;
            kernels::causal_conv_backward::<T> {
                x: In::from_tensor(&x_storage, &stream)?,
                weight: In::from_tensor(&weight_storage, &stream)?,
                gradient: In::from_tensor(&gradient_storage, &stream)?,
                before: In::from_tensor(&before, &stream)?,
                segments: In::from_tensor(&segments, &stream)?,
                segment_of: In::from_tensor(&segment_of, &stream)?,
                of_x: Out::new(&mut of_x, &stream),
                parts: Out::new(&mut parts, &stream),
                n: n as u64,
                rows: pass.rows as u32,
                channels: channels as i32,
                taps: taps as i32,
            }
            .launch(device, pass.by_rows(taps.div_ceil(NEAR)))?;
            if tree.levels.len() > 1 && (2..=NEAR).contains(&taps) {
                kernels::causal_conv_of_last_rows::<T> {
                    x: In::from_tensor(&x_storage, &stream)?,
                    weight: In::from_tensor(&weight_storage, &stream)?,
                    gradient: In::from_tensor(&gradient_storage, &stream)?,
                    before: In::from_tensor(&before, &stream)?,
                    segments: In::from_tensor(&segments, &stream)?,
                    of_x: Out::new(&mut of_x, &stream),
                    channels: channels as i32,
                    taps: taps as i32,
                }
                .launch(device, pass.by_segments(tree.count()))?;
            }
            kernels::causal_conv_of_weight::<T> {
                parts: In::from_slice(&parts, &stream),
                gradient: Out::new(&mut of_weight, &stream),
                count: pass.parts as i32,
                channels: channels as i32,
                taps: taps as i32,
            }
            .launch(device, by_weight)?;
            (
                CudaStorage::wrap_cuda_slice(of_x, device.clone()),
                CudaStorage::wrap_cuda_slice(of_weight, device.clone()),
            )
        }
    });
    Ok((
        as_tensor(of_x, x.shape()),
        as_tensor(of_weight, weight.shape()),
    ))
}

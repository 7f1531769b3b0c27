//! The CUDA path of [`gated_delta_rule`](crate::gated_delta_rule()).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::{Device, Layout, Result, Shape, Storage, Tensor, bail};

use super::GatedDeltaRule;
use crate::DeltaHeads;
use crate::cuda::{In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};
use crate::prefix_tree::cuda::{CHUNK, DeviceTree};

/// Threads per block, as in the kernels: 8 warps.
pub(crate) const THREADS: u32 = 256;
const WARPS: usize = 8;
/// Value columns per block in the forward pass, as in the kernel.
const COLUMNS: usize = 64;
/// Maximum key width plus value width. Every GPU has enough shared memory for it, 99 KiB.
const MAX_DIMS: usize = 288;

/// Returns whether the kernels support these heads.
pub(crate) fn has_heads(heads: &DeltaHeads) -> bool {
    heads.key_dim + heads.value_dim <= MAX_DIMS && heads.value_heads <= 65_535
}

/// Returns a launch with blocks for segments or sequences, value heads and slices of value columns.
pub(crate) fn blocks(
    first: usize,
    heads: &DeltaHeads,
    slice: usize,
    floats: usize,
) -> Result<LaunchConfig> {
    let mut blocks = grid(first, THREADS)?;
    blocks.grid_dim.1 = heads.value_heads as u32;
    blocks.grid_dim.2 = heads.value_dim.div_ceil(slice) as u32;
    blocks.shared_mem_bytes = (floats * size_of::<f32>()) as u32;
    Ok(blocks)
}

/// Returns the number of elements in `states` states.
fn states_len(states: usize, heads: &DeltaHeads) -> usize {
    states * heads.value_heads * heads.key_dim * heads.value_dim
}

/// Launches the forward kernel for each tree level.
macro_rules! launch_forward {
    ($element:ident, $device:ident, $tree:ident, $heads:ident, $($name:ident: $value:expr,)*) => {{
        let floats = 2 * CHUNK * ($heads.key_dim + 1 + CHUNK + 1 + COLUMNS + 1);
        let segments = $tree.segments.storage_and_layout();
        let stream = $device.cuda_stream();
        for level in &$tree.levels {
            // SAFETY: the inputs and results have the tree's rows, and the states have a slot for
            // each segment, or for each chunk to advance. The blocks have the kernel's shared
            // memory. Each level reads the previous level's states.
            #[allow(unsafe_code)]
            unsafe {
                kernels::gated_delta_rule_forward::<$element> {
                    segments: In::from_tensor(&segments, &stream)?,
                    first_segment: level.start as u32,
                    key_heads: $heads.key_heads as i32,
                    value_heads: $heads.value_heads as i32,
                    key_dim: $heads.key_dim as i32,
                    value_dim: $heads.value_dim as i32,
                    $($name: $value,)*
                }
                .launch($device, blocks(level.len(), $heads, COLUMNS, floats)?)?;
            }
        }
    }};
}

/// Returns the result `[N, value_heads * value_dim]` for contiguous inputs.
pub(crate) fn forward(
    (qkv, qkv_layout): (&CudaStorage, &Layout),
    (g, g_layout): (&CudaStorage, &Layout),
    (beta, beta_layout): (&CudaStorage, &Layout),
    op: &GatedDeltaRule,
) -> Result<(CudaStorage, Shape)> {
    let device = qkv.device();
    let stream = device.cuda_stream();
    let heads = &op.heads;
    let tree = DeviceTree::of(&op.tree, &Device::Cuda(device.clone()))?;
    let shape = Shape::from((op.tree.rows(), heads.values()));
    let o = with_cuda_floats!(qkv, "qkv", T => {
        // SAFETY: the kernel writes each result element, and each state before it is read.
        #[allow(unsafe_code)]
        let (mut o, mut states) = unsafe {(
            alloc::<T>(device, shape.elem_count())?,
            alloc::<f32>(device, states_len(tree.count(), heads))?,
        )};
        launch_forward!(T, device, tree, heads,
            qkv: In::new(qkv, qkv_layout, &stream)?,
            g: In::new(g, g_layout, &stream)?,
            beta: In::new(beta, beta_layout, &stream)?,
            states: Out::new(&mut states, &stream),
            o: Out::new(&mut o, &stream),
            errors: Out::null(),
            changes: Out::null(),
            advance: 0,
        );
        CudaStorage::wrap_cuda_slice(o, device.clone())
    });
    Ok((o, shape))
}

/// Returns the gradients with respect to contiguous `qkv`, `g` and `beta`.
pub(crate) fn backward(
    [qkv, g, beta]: [&Tensor; 3],
    gradient: &Tensor,
    op: &GatedDeltaRule,
) -> Result<[Tensor; 3]> {
    let device = qkv.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let (heads, n) = (&op.heads, op.tree.rows());
    let tree = DeviceTree::of(&op.tree, qkv.device())?;
    let (qkv_storage, g_storage) = (qkv.storage_and_layout(), g.storage_and_layout());
    let (beta_storage, gradient_storage) =
        (beta.storage_and_layout(), gradient.storage_and_layout());
    let Storage::Cuda(qkv_cuda) = &*qkv_storage.0 else {
        bail!("gated_delta_rule: qkv left the GPU");
    };
    // SAFETY: the kernels write each element before they read it.
    #[allow(unsafe_code)]
    let allocate = |len| unsafe { alloc::<f32>(device, len) };
    let mut states = allocate(states_len(tree.chunks, heads))?;
    let mut errors = allocate(n * heads.values())?;
    let mut changes = allocate(n * heads.values())?;
    let mut state_gradients = allocate(states_len(tree.count(), heads))?;
    let mut key_gradients = allocate(n * heads.value_heads * 2 * heads.key_dim)?;
    let (mut of_g, mut of_beta) = (allocate(g.elem_count())?, allocate(g.elem_count())?);
    let of_qkv = with_cuda_floats!(qkv_cuda, "qkv", T => {
        launch_forward!(T, device, tree, heads,
            qkv: In::from_tensor(&qkv_storage, &stream)?,
            g: In::from_tensor(&g_storage, &stream)?,
            beta: In::from_tensor(&beta_storage, &stream)?,
            states: Out::new(&mut states, &stream),
            o: Out::null(),
            errors: Out::new(&mut errors, &stream),
            changes: Out::new(&mut changes, &stream),
            advance: 1,
        );
        // SAFETY: as above.
        #[allow(unsafe_code)]
        let mut of_qkv = unsafe { alloc::<T>(device, qkv.elem_count())? };
        let floats = 2 * CHUNK * (heads.key_dim + 1 + heads.value_dim + 1 + 2 * (CHUNK + 1))
            + CHUNK * (CHUNK + 1);
        let segments = tree.segments.storage_and_layout();
        for level in tree.levels.iter().rev() {
            // SAFETY: all have the tree's rows, the states have a slot per chunk, and their
            // gradients one per segment. The blocks have the kernel's shared memory. Each level
            // reads the next level's gradients.
            #[allow(unsafe_code)]
            unsafe {
                kernels::gated_delta_rule_backward::<T> {
                    qkv: In::from_tensor(&qkv_storage, &stream)?,
                    g: In::from_tensor(&g_storage, &stream)?,
                    beta: In::from_tensor(&beta_storage, &stream)?,
                    gradient: In::from_tensor(&gradient_storage, &stream)?,
                    segments: In::from_tensor(&segments, &stream)?,
                    states: In::from_slice(&states, &stream),
                    errors: In::from_slice(&errors, &stream),
                    changes: In::from_slice(&changes, &stream),
                    state_gradients: Out::new(&mut state_gradients, &stream),
                    key_gradients: Out::new(&mut key_gradients, &stream),
                    of_qkv: Out::new(&mut of_qkv, &stream),
                    of_g: Out::new(&mut of_g, &stream),
                    of_beta: Out::new(&mut of_beta, &stream),
                    first_segment: level.start as u32,
                    key_heads: heads.key_heads as i32,
                    value_heads: heads.value_heads as i32,
                    key_dim: heads.key_dim as i32,
                    value_dim: heads.value_dim as i32,
                }
                .launch(device, blocks(level.len(), heads, heads.value_dim, floats)?)?;
            }
        }
        // SAFETY: each key and query in n rows has a warp.
        #[allow(unsafe_code)]
        unsafe {
            kernels::gated_delta_rule_keys::<T> {
                qkv: In::from_tensor(&qkv_storage, &stream)?,
                key_gradients: In::from_slice(&key_gradients, &stream),
                of_qkv: Out::new(&mut of_qkv, &stream),
                n: n as u64,
                key_heads: heads.key_heads as i32,
                value_heads: heads.value_heads as i32,
                key_dim: heads.key_dim as i32,
                value_dim: heads.value_dim as i32,
            }
            .launch(device, grid((n * 2 * heads.key_heads).div_ceil(WARPS), THREADS)?)?;
        }
        CudaStorage::wrap_cuda_slice(of_qkv, device.clone())
    });
    let of_gate = |of_gate| {
        as_tensor(
            CudaStorage::wrap_cuda_slice(of_gate, device.clone()),
            g.shape(),
        )
    };
    Ok([
        as_tensor(of_qkv, qkv.shape()),
        of_gate(of_g),
        of_gate(of_beta),
    ])
}

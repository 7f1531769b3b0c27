//! The CUDA path of [`HeadTransform`].

use std::ops::Deref;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, LaunchConfig};
use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::{Layout, Result, Storage, Tensor, bail};

use super::{HeadGradients, HeadTransform};
use crate::cuda::column_sums::column_sums;
use crate::cuda::{In, Out, alloc, as_tensor, kernels, with_cuda_floats};
use crate::ops::rms_norm::RmsNormOptions;

/// Maximum head width. In the backward pass the sums of a block must fit in 48 KiB of shared
/// memory.
pub(crate) const MAX_WIDTH: usize = 1024;

/// Threads per block, as in the kernel.
const THREADS: u32 = 256;
/// Maximum number of blocks with query heads in the backward pass. The weight gradient is summed
/// over the heads in a block, then over the blocks in order, so it is deterministic.
const MAX_BLOCKS: usize = 512;

/// The heads in a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Rows.
    pub(crate) n: usize,
    /// Query heads per row.
    pub(crate) heads: usize,
    /// Key heads per row, which may be none.
    pub(crate) kv_heads: usize,
    /// Elements from one query head to the next, in the arguments.
    pub(crate) query_step: usize,
    pub(crate) head_dim: usize,
    /// Rotated pairs in a head.
    pub(crate) pairs: usize,
}

impl Shape {
    /// Returns the threads per head and the heads per block.
    fn block(self, size_in_bytes: usize) -> (u32, u32) {
        let pack = 16 / size_in_bytes;
        let is_packed = self.head_dim.is_multiple_of(pack) && self.pairs.is_multiple_of(pack);
        let count = if is_packed { pack } else { 1 };
        // A thread has two packs.
        let rest = (self.head_dim - 2 * self.pairs).div_ceil(2 * count);
        let slots = self.pairs / count + rest;
        let threads = slots.next_power_of_two().clamp(1, 32) as u32;
        (threads, THREADS / threads)
    }

    /// Returns the blocks with query heads and with key heads in the backward pass, which loop over
    /// further heads. A block has about as many heads for keys as for queries.
    fn backward_blocks(self, per_block: usize) -> [usize; 2] {
        let blocks = |heads: usize| (self.n * heads).div_ceil(per_block).max(1);
        let query_blocks = blocks(self.heads).min(MAX_BLOCKS);
        let in_proportion = (query_blocks * self.kv_heads).div_ceil(self.heads.max(1));
        [
            query_blocks,
            blocks(self.kv_heads).min(in_proportion.max(1)),
        ]
    }

    /// Fails if there are more heads than a launch takes.
    fn check(self) -> Result<()> {
        // A head's index exceeds the last one by less than a block.
        if self.n * (self.heads + self.kv_heads) > i32::MAX as usize - THREADS as usize {
            bail!(
                "query, key: {} rows of {} and {} heads, more than one launch takes",
                self.n,
                self.heads,
                self.kv_heads
            );
        }
        Ok(())
    }
}

/// Transforms contiguous queries, and keys with the same dtype, or with `back` rotates by the
/// negative angles. Without keys, the second result is empty.
pub(crate) fn forward(
    (query, query_layout): (&CudaStorage, &Layout),
    key: Option<(&CudaStorage, &Layout)>,
    (operands, back): (&Operands, bool),
    shape: Shape,
) -> Result<[CudaStorage; 2]> {
    shape.check()?;
    let Shape {
        n,
        heads,
        kv_heads,
        head_dim,
        ..
    } = shape;
    let device = query.device();
    let stream = device.cuda_stream();
    let (weights, angles) = (storages(&operands.weights), storages(&operands.angles));
    Ok(with_cuda_floats!(query, "query", T => {
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let (mut to_query, mut to_key) = unsafe {
            (alloc::<T>(device, n * heads * head_dim)?, alloc::<T>(device, n * kv_heads * head_dim)?)
        };
        let all_heads = n * (heads + kv_heads);
        if all_heads > 0 {
            let (threads, per_block) = shape.block(size_of::<T>());
            let grid = LaunchConfig {
                grid_dim: (all_heads.div_ceil(per_block as usize) as u32, 1, 1),
                block_dim: (threads, per_block, 1),
                shared_mem_bytes: 0,
            };
            let [query_weight, key_weight] = optional_pair::<T, _>(&weights, &stream)?;
            let [cos, sin] = optional_pair::<f32, _>(&angles, &stream)?;
            // SAFETY: queries and keys have n * heads and n * kv_heads heads, the weights head_dim
            // elements, and the angles n * pairs.
            #[allow(unsafe_code)]
            unsafe {
                kernels::head_transform_forward::<T> {
                    query: In::new(query, query_layout, &stream)?,
                    query_weight,
                    key: key.map_or(Ok(In::null()), |(key, layout)| In::new(key, layout, &stream))?,
                    key_weight,
                    cos,
                    sin,
                    to_query: Out::new(&mut to_query, &stream),
                    to_key: Out::new(&mut to_key, &stream),
                    n: n as u32,
                    heads: heads as u32,
                    kv_heads: kv_heads as u32,
                    query_step: shape.query_step as i32,
                    head_dim: head_dim as i32,
                    pairs: shape.pairs as i32,
                    sign: if back { -1.0 } else { 1.0 },
                    epsilon: operands.options.epsilon as f32,
                    offset: operands.options.offset(),
                }
                .launch(device, grid)?;
            }
        }
        [
            CudaStorage::wrap_cuda_slice(to_query, device.clone()),
            CudaStorage::wrap_cuda_slice(to_key, device.clone()),
        ]
    }))
}

/// [`HeadTransform::apply`] for arguments that [`Shape`] describes.
pub(crate) fn apply(
    transform: &HeadTransform,
    [query, key]: [&Tensor; 2],
    shape: Shape,
) -> Result<[Tensor; 2]> {
    let (query, key) = (query.contiguous()?, key.contiguous()?);
    let operands = Operands::new(transform)?;
    let (queries, keys) = (query.storage_and_layout(), key.storage_and_layout());
    let (Storage::Cuda(cuda_query), Storage::Cuda(cuda_key)) = (&*queries.0, &*keys.0) else {
        bail!("query, key: on the CPU, must be on a GPU");
    };
    let [to_query, to_key] = forward(
        (cuda_query, queries.1),
        Some((cuda_key, keys.1)),
        (&operands, false),
        shape,
    )?;
    let query_shape = (shape.n, shape.heads * shape.head_dim).into();
    Ok([
        as_tensor(to_query, &query_shape),
        as_tensor(to_key, key.shape()),
    ])
}

/// [`HeadTransform::gradients`] for arguments that [`Shape`] describes.
pub(crate) fn gradients(
    transform: &HeadTransform,
    heads: Option<[&Tensor; 2]>,
    of_heads: [&Tensor; 2],
    gated: Option<[&Tensor; 2]>,
    shape: Shape,
) -> Result<HeadGradients> {
    shape.check()?;
    let operands = Operands::new(transform)?;
    let contiguous = |pair: Option<[&Tensor; 2]>| pair.map(both_contiguous).transpose();
    let (heads, gated) = (contiguous(heads)?, contiguous(gated)?);
    let of_heads = both_contiguous(of_heads)?;
    let device = of_heads[0].device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let of_heads = of_heads.each_ref().map(Tensor::storage_and_layout);
    let (heads, gated) = (storages(&heads), storages(&gated));
    let (weights, angles) = (storages(&operands.weights), storages(&operands.angles));
    let Storage::Cuda(cuda) = &*of_heads[0].0 else {
        bail!("gradients: on the CPU, must be on a GPU");
    };
    let Shape { n, head_dim, .. } = shape;
    let (query_width, key_width) = (shape.heads * shape.query_step, shape.kv_heads * head_dim);
    let (of_query, of_key, of_weights) = with_cuda_floats!(cuda, "gradients", T => {
        let (threads, per_block) = shape.block(size_of::<T>());
        let [query_blocks, key_blocks] = shape.backward_blocks(per_block as usize);
        let parts = query_blocks + key_blocks;
        let sums = if weights.is_some() { parts * head_dim } else { 0 };
        // SAFETY: the kernel writes every element.
        #[allow(unsafe_code)]
        let (mut of_query, mut of_key, mut partial) = unsafe {(
            alloc::<T>(device, n * query_width)?,
            alloc::<T>(device, n * key_width)?,
            alloc::<f32>(device, sums)?,
        )};
        let by_heads = LaunchConfig {
            grid_dim: (parts as u32, 1, 1),
            block_dim: (threads, per_block, 1),
            shared_mem_bytes: (per_block as usize * head_dim * size_of::<f32>()) as u32,
        };
        let [query, key] = optional_pair::<T, _>(&heads, &stream)?;
        let [query_weight, key_weight] = optional_pair::<T, _>(&weights, &stream)?;
        let [of_gated, mixed] = optional_pair::<T, _>(&gated, &stream)?;
        let [cos, sin] = optional_pair::<f32, _>(&angles, &stream)?;
        // SAFETY: queries and keys have n * heads and n * kv_heads heads, the weights head_dim
        // elements, the angles n * pairs, and the partial sums head_dim for each block. The shared
        // memory has a row of sums per head in a block.
        #[allow(unsafe_code)]
        unsafe {
            kernels::head_transform_backward::<T> {
                query,
                query_weight,
                query_gradient: In::from_tensor(&of_heads[0], &stream)?,
                key,
                key_weight,
                key_gradient: In::from_tensor(&of_heads[1], &stream)?,
                cos,
                sin,
                of_gated,
                mixed,
                of_query: Out::new(&mut of_query, &stream),
                of_key: Out::new(&mut of_key, &stream),
                partial: if sums > 0 { Out::new(&mut partial, &stream) } else { Out::null() },
                n: n as u32,
                heads: shape.heads as u32,
                kv_heads: shape.kv_heads as u32,
                query_blocks: query_blocks as u32,
                query_step: shape.query_step as i32,
                head_dim: head_dim as i32,
                pairs: shape.pairs as i32,
                epsilon: operands.options.epsilon as f32,
                offset: operands.options.offset(),
            }
            .launch(device, by_heads)?;
        }
        let of_weights = || column_sums::<T>(device, &partial, [query_blocks, key_blocks], head_dim);
        (
            CudaStorage::wrap_cuda_slice(of_query, device.clone()),
            CudaStorage::wrap_cuda_slice(of_key, device.clone()),
            weights.is_some().then(of_weights).transpose()?,
        )
    });
    Ok(HeadGradients {
        heads: [
            as_tensor(of_query, &(n, query_width).into()),
            as_tensor(of_key, &(n, key_width).into()),
        ],
        weights: match of_weights {
            Some(both) => Some([both.get(0)?, both.get(1)?]),
            None => None,
        },
    })
}

/// Contiguous norm weights and angles.
pub(crate) struct Operands {
    /// `[head_dim]` for queries and for keys.
    pub(crate) weights: Option<[Tensor; 2]>,
    pub(crate) options: RmsNormOptions,
    /// Cosines and sines, `[N, pairs]`.
    pub(crate) angles: Option<[Tensor; 2]>,
}

impl Operands {
    fn new(transform: &HeadTransform) -> Result<Self> {
        let norms = transform.norms;
        let weights = norms.map(|norms| both_contiguous(norms.weights));
        Ok(Self {
            weights: weights.transpose()?,
            options: norms.map_or_else(Default::default, |norms| norms.options),
            angles: transform.angles.map(both_contiguous).transpose()?,
        })
    }
}

/// The storages of two tensors.
fn storages(pair: &Option<[Tensor; 2]>) -> Option<[(impl Deref<Target = Storage>, &Layout); 2]> {
    let pair = pair.as_ref()?;
    Some(pair.each_ref().map(Tensor::storage_and_layout))
}

/// Returns both tensors' elements, or null twice.
fn optional_pair<'a, T: CudaDType + 'a, S: Deref<Target = Storage>>(
    pair: &'a Option<[(S, &Layout); 2]>,
    stream: &'a CudaStream,
) -> Result<[In<'a, T>; 2]> {
    Ok(match pair {
        Some([a, b]) => [In::from_tensor(a, stream)?, In::from_tensor(b, stream)?],
        None => [In::null(), In::null()],
    })
}

fn both_contiguous([a, b]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
    Ok([a.contiguous()?, b.contiguous()?])
}

//! The CUDA path of [`draw_tokens`](crate::draw_tokens()).

use candle_core::cuda_backend::CudaStorage;
use candle_core::{Layout, Result, Storage, Tensor, bail};

use super::{Draw, DrawOptions, DrawnToken};
use crate::cuda::{In, Out, alloc, grid, kernels, with_cuda_floats};

/// Maximum threads per block, as in the kernel.
const THREADS: usize = 1024;
/// Logits per thread in a small vocabulary.
const LOGITS: usize = 8;
/// Threads of a block that reads a part of a row, as in the kernel.
const PART_THREADS: u32 = 256;
/// Tokens of such a part, and of a chunk whose weights are summed, as in the kernel.
const PART: usize = 4096;
const CHUNK: usize = 512;

/// Samples tokens from contiguous `logits` `[N, V]`. `draws` must not be empty.
pub(crate) fn draw(
    logits: &Tensor,
    draws: &[Draw],
    options: &DrawOptions,
) -> Result<Vec<Option<DrawnToken>>> {
    let (rows, vocab) = logits.dims2()?;
    let n = draws.len();
    if n > i32::MAX as usize || rows > u32::MAX as usize || vocab > i32::MAX as usize {
        bail!(
            "logits: shape {:?}, more than one launch takes",
            logits.dims()
        );
    }
    let bits = |draw: &Draw| draw.uniform.to_bits();
    let table: Vec<u32> = draws
        .iter()
        .map(|draw| draw.row as u32)
        .chain(draws.iter().map(|draw| bits(draw) as u32))
        .chain(draws.iter().map(|draw| (bits(draw) >> 32) as u32))
        .collect();
    let inverse_temperature = (1.0 / options.temperature) as f32;
    let warps = vocab.div_ceil(32 * LOGITS).min(THREADS / 32);
    let device = logits.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let table = CudaStorage::wrap_cuda_slice(device.clone_htod(&table)?, device.clone());
    let (parts, chunks) = (vocab.div_ceil(PART), vocab.div_ceil(CHUNK));
    // SAFETY: the first kernel writes every part and chunk, the second one all tokens, and the
    // log-probs of all valid ones.
    #[allow(unsafe_code)]
    let (mut largest, mut sums, mut drawn) = unsafe {
        (
            alloc::<f32>(device, n * parts)?,
            alloc::<f64>(device, n * chunks)?,
            alloc::<u32>(device, 3 * n)?,
        )
    };
    let storage = logits.storage_and_layout();
    let Storage::Cuda(cuda) = &*storage.0 else {
        bail!("logits: on the CPU, must be on a GPU");
    };
    with_cuda_floats!(cuda, "logits", T => {
        // SAFETY: logits have a row with `vocab` elements for each draw, which the caller has
        // checked. The table and the results have three numbers per draw.
        #[allow(unsafe_code)]
        unsafe {
            kernels::draw_parts::<T> {
                logits: In::from_tensor(&storage, &stream)?,
                draws: In::new(&table, &Layout::contiguous(3 * n), &stream)?,
                largest: Out::new(&mut largest, &stream),
                sums: Out::new(&mut sums, &stream),
                vocab: vocab as u32,
                parts: parts as u32,
                inverse_temperature,
            }
            .launch(device, grid(n * parts, PART_THREADS)?)?;
            kernels::draw_tokens::<T> {
                logits: In::from_tensor(&storage, &stream)?,
                draws: In::new(&table, &Layout::contiguous(3 * n), &stream)?,
                largest: In::from_slice(&largest, &stream),
                sums: In::from_slice(&sums, &stream),
                drawn: Out::new(&mut drawn, &stream),
                n: n as u32,
                vocab: vocab as u32,
                inverse_temperature,
                top_k: u32::try_from(options.top_k).unwrap_or(u32::MAX),
                top_p: options.top_p,
                min_p: options.min_p,
                greedy: u32::from(options.greedy),
            }
            .launch(device, grid(n, 32 * warps as u32)?)?;
        }
    });
    let drawn = device.clone_dtoh(&drawn)?;
    Ok((0..n)
        .map(|index| {
            let token = drawn[index];
            (token != u32::MAX).then(|| DrawnToken {
                token,
                log_prob: f32::from_bits(drawn[n + index]),
                drawn_log_prob: f32::from_bits(drawn[2 * n + index]),
            })
        })
        .collect())
}

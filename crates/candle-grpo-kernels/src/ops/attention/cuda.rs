//! The CUDA path of [`attention`](crate::attention()).

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::LaunchConfig;
use candle_core::cuda_backend::{CudaDevice, CudaStorage, WrapErr};
use candle_core::{Device, Layout, Result, Shape, Storage, Tensor, bail};

use super::{Attention, Sequence, Sizes};
use crate::cuda::launch::function;
use crate::cuda::{CudaElement, In, Out, alloc, as_tensor, grid, kernels, with_cuda_floats};

include!("../../../kernels/attention.rs");

/// Maximum head width.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// Returns the result, with the shape of `query`, and the log2 of each query head's weight sum, f32
/// `[queries, heads]`, for the backward pass. All inputs must be contiguous.
pub(crate) fn forward(
    (query, query_layout): (&CudaStorage, &Layout),
    (key, key_layout): (&CudaStorage, &Layout),
    (value, value_layout): (&CudaStorage, &Layout),
    op: &Attention,
) -> Result<(CudaStorage, Tensor)> {
    let device = query.device();
    let stream = device.cuda_stream();
    let (sizes, elements) = (&op.sizes, query_layout.shape().elem_count());
    let heads = elements / sizes.head_dim;
    let shape = Shape::from(heads);
    // SAFETY: the kernel writes every element.
    #[allow(unsafe_code)]
    let mut log_sums = unsafe { alloc::<f32>(device, heads)? };
    let y = with_cuda_floats!(query, "query", T => {
        // SAFETY: as above.
        #[allow(unsafe_code)]
        let mut y = unsafe { alloc::<T>(device, elements)? };
        if elements > 0 {
            let tiles = tiles_of::<T>(device, sizes)?;
            let query_tiles = query_tiles(tiles.forward_rows, &op.table.sequences, sizes)?;
            let blocks = blocks(
                query_tiles,
                sizes,
                1,
                tiles.forward_threads,
                tiles.forward_bytes,
            )?;
            let sequences = sequences(op)?.storage_and_layout();
            let mask = mask(op).map(Tensor::storage_and_layout);
            macro_rules! launch {
                ($kernel:ident $(, $option:ident)*) => {{
                    // SAFETY: the inputs have the rows for all sequences and heads, and mask has an
                    // entry per key or is null. The blocks cover the longest sequence's rows and
                    // have shared memory for their tiles.
                    #[allow(unsafe_code)]
                    unsafe {
                        kernels::$kernel::<T> {
                            query: In::new(query, query_layout, &stream)?,
                            key: In::new(key, key_layout, &stream)?,
                            value: In::new(value, value_layout, &stream)?,
                            mask: In::optional(mask.as_ref(), &stream)?,
                            sequences: In::from_tensor(&sequences, &stream)?,
                            y: Out::new(&mut y, &stream),
                            log_sums: Out::new(&mut log_sums, &stream),
                            tiles: query_tiles,
                            kv_heads: sizes.kv_heads as u32,
                            group: sizes.group as u32,
                            head_dim: sizes.head_dim as i32,
                            scale: op.scores.scale as f32,
                            $($option,)*
                        }
                        .launch(device, blocks)?;
                    }
                }};
            }
            match (tiles.width, op.scores.kernel_options()) {
                (64, None) => launch!(attention_forward_64),
                (128, None) => launch!(attention_forward_128),
                (_, None) => launch!(attention_forward_256),
                (64, Some((window, cap))) => launch!(scored_attention_forward_64, window, cap),
                (128, Some((window, cap))) => launch!(scored_attention_forward_128, window, cap),
                (_, Some((window, cap))) => launch!(scored_attention_forward_256, window, cap),
            }
        }
        CudaStorage::wrap_cuda_slice(y, device.clone())
    });
    let log_sums = CudaStorage::wrap_cuda_slice(log_sums, device.clone());
    Ok((y, as_tensor(log_sums, &shape)))
}

/// Like [`forward`], for tensors.
pub(crate) fn forward_of(
    [query, key, value]: [&Tensor; 3],
    op: &Attention,
) -> Result<(Tensor, Tensor)> {
    let (query_storage, query_layout) = query.storage_and_layout();
    let (key_storage, key_layout) = key.storage_and_layout();
    let (value_storage, value_layout) = value.storage_and_layout();
    let (y, log_sums) = forward(
        (on_gpu(&query_storage)?, query_layout),
        (on_gpu(&key_storage)?, key_layout),
        (on_gpu(&value_storage)?, value_layout),
        op,
    )?;
    Ok((as_tensor(y, query.shape()), log_sums))
}

/// Returns the gradients with respect to `query`, `key` and `value`. All tensors must be
/// contiguous. `y` and `log_sums` are the results from [`forward`].
pub(crate) fn backward(
    [query, key, value]: [&Tensor; 3],
    y: &Tensor,
    log_sums: &Tensor,
    gradient: &Tensor,
    op: &Attention,
) -> Result<[Tensor; 3]> {
    let device = query.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let sizes = &op.sizes;
    let (query_elements, key_elements) = (query.elem_count(), key.elem_count());
    if query_elements == 0 {
        return Ok([query.zeros_like()?, key.zeros_like()?, value.zeros_like()?]);
    }
    let heads = query_elements / sizes.head_dim;
    let [query_storage, key_storage, value_storage] =
        [query, key, value].map(Tensor::storage_and_layout);
    let [y_storage, gradient_storage, log_sums] =
        [y, gradient, log_sums].map(Tensor::storage_and_layout);
    let mask = mask(op).map(Tensor::storage_and_layout);
    let sequences = sequences(op)?.storage_and_layout();
    let [of_query, of_key, of_value] = with_cuda_floats!(on_gpu(&query_storage.0)?, "query", T => {
        // SAFETY: the kernels write every element.
        #[allow(unsafe_code)]
        let (mut of_query, mut of_key, mut of_value, mut dots) = unsafe {(
            alloc::<T>(device, query_elements)?,
            alloc::<T>(device, key_elements)?,
            alloc::<T>(device, key_elements)?,
            alloc::<f32>(device, heads)?,
        )};
        let tiles = tiles_of::<T>(device, sizes)?;
        let query_tiles = query_tiles(tiles.rows, &op.table.sequences, sizes)?;
        let key_tiles = key_tiles(tiles.rows, &op.table.sequences)?;
        let by_queries = blocks(query_tiles, sizes, 1, tiles.threads, tiles.query_bytes)?;
        let by_keys = blocks(key_tiles, sizes, tiles.parts, tiles.threads, tiles.key_bytes)?;
        macro_rules! launch {
            ($of_query:ident, $of_key:ident $(, $option:ident)*) => {{
                // SAFETY: as in `forward`. The gradients have the same sizes as their inputs. The
                // first launch writes the dots that the second reads.
                #[allow(unsafe_code)]
                unsafe {
                    kernels::$of_query::<T> {
                        query: In::from_tensor(&query_storage, &stream)?,
                        key: In::from_tensor(&key_storage, &stream)?,
                        value: In::from_tensor(&value_storage, &stream)?,
                        mask: In::optional(mask.as_ref(), &stream)?,
                        sequences: In::from_tensor(&sequences, &stream)?,
                        y: In::from_tensor(&y_storage, &stream)?,
                        gradient: In::from_tensor(&gradient_storage, &stream)?,
                        log_sums: In::from_tensor(&log_sums, &stream)?,
                        dots: Out::new(&mut dots, &stream),
                        of_query: Out::new(&mut of_query, &stream),
                        tiles: query_tiles,
                        kv_heads: sizes.kv_heads as u32,
                        group: sizes.group as u32,
                        head_dim: sizes.head_dim as i32,
                        scale: op.scores.scale as f32,
                        $($option,)*
                    }
                    .launch(device, by_queries)?;
                    let dots = CudaStorage::wrap_cuda_slice(dots, device.clone());
                    kernels::$of_key::<T> {
                        query: In::from_tensor(&query_storage, &stream)?,
                        key: In::from_tensor(&key_storage, &stream)?,
                        value: In::from_tensor(&value_storage, &stream)?,
                        mask: In::optional(mask.as_ref(), &stream)?,
                        sequences: In::from_tensor(&sequences, &stream)?,
                        gradient: In::from_tensor(&gradient_storage, &stream)?,
                        log_sums: In::from_tensor(&log_sums, &stream)?,
                        dots: In::new(&dots, &Layout::contiguous(heads), &stream)?,
                        of_key: Out::new(&mut of_key, &stream),
                        of_value: Out::new(&mut of_value, &stream),
                        tiles: key_tiles,
                        kv_heads: sizes.kv_heads as u32,
                        group: sizes.group as u32,
                        head_dim: sizes.head_dim as i32,
                        scale: op.scores.scale as f32,
                        $($option,)*
                    }
                    .launch(device, by_keys)?;
                }
            }};
        }
        match (tiles.width, op.scores.kernel_options()) {
            (64, None) => launch!(attention_of_query_64, attention_of_key_64),
            (128, None) => launch!(attention_of_query_128, attention_of_key_128),
            (_, None) => launch!(attention_of_query_256, attention_of_key_256),
            (64, Some((window, cap))) => {
                launch!(scored_attention_of_query_64, scored_attention_of_key_64, window, cap);
            }
            (128, Some((window, cap))) => {
                launch!(scored_attention_of_query_128, scored_attention_of_key_128, window, cap);
            }
            (_, Some((window, cap))) => {
                launch!(scored_attention_of_query_256, scored_attention_of_key_256, window, cap);
            }
        }
        [of_query, of_key, of_value].map(|x| CudaStorage::wrap_cuda_slice(x, device.clone()))
    });
    Ok([
        as_tensor(of_query, query.shape()),
        as_tensor(of_key, key.shape()),
        as_tensor(of_value, value.shape()),
    ])
}

fn on_gpu(storage: &Storage) -> Result<&CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("attention: a tensor left the GPU"),
    }
}

fn tiles_of<T: CudaElement>(device: &CudaDevice, sizes: &Sizes) -> Result<AttentionTiles> {
    // The machine code for 9.0 uses warpgroup products, with more threads: see build.rs. If the
    // driver compiles the PTX on 9.0, it loads the other code.
    let stream = crate::cuda::device::stream(device)?;
    let loaded = function(&stream, ["attention", "attention_forward_64", T::SUFFIX])?;
    let threads = loaded.max_threads_per_block().w()? as usize;
    let has_warpgroups = attention_tiles(64, size_of::<T>(), true)
        .is_some_and(|tiles| tiles.forward_threads == threads);
    match attention_tiles(sizes.head_dim, size_of::<T>(), has_warpgroups) {
        Some(tiles) => Ok(tiles),
        None => bail!(
            "head_dim: {}, must be at most {MAX_HEAD_DIM} on CUDA",
            sizes.head_dim
        ),
    }
}

/// Returns the sequences for the kernels: first query, new positions, first key, all positions.
pub(crate) fn table(sequences: &[Sequence], device: &Device) -> Result<Tensor> {
    let numbers = sequences.iter().flat_map(|sequence| {
        let &Sequence {
            first_query,
            new,
            first_key,
            total,
        } = sequence;
        [first_query, new, first_key, total]
    });
    match numbers
        .map(u32::try_from)
        .collect::<std::result::Result<Vec<_>, _>>()
    {
        Ok(table) => Tensor::new(table, device),
        Err(_) => bail!("attention: more than 2^32 positions"),
    }
}

/// Returns the mask, if it has a 0.
fn mask(op: &Attention) -> Option<&Tensor> {
    (!op.table.is_packed).then_some(&op.table.mask)
}

fn sequences(op: &Attention) -> Result<&Tensor> {
    match &op.table.on_gpu {
        Some(sequences) => Ok(sequences),
        None => bail!("attention: a tensor left the GPU"),
    }
}

/// Returns the number of tiles, with `of_tile` rows each, for the longest query sequence.
fn query_tiles(of_tile: usize, sequences: &[Sequence], sizes: &Sizes) -> Result<u32> {
    let new = sequences.iter().map(|sequence| sequence.new).max();
    tiles_in("query", new.unwrap_or(0).checked_mul(sizes.group), of_tile)
}

/// Like [`query_tiles`], for keys.
fn key_tiles(of_tile: usize, sequences: &[Sequence]) -> Result<u32> {
    let total = sequences.iter().map(|sequence| sequence.total).max();
    tiles_in("key", total, of_tile)
}

fn tiles_in(name: &str, rows: Option<usize>, of_tile: usize) -> Result<u32> {
    match rows {
        // The kernels count rows in 31 bits, up to one tile past the last row.
        Some(rows) if rows < i32::MAX as usize - 256 => Ok(rows.div_ceil(of_tile).max(1) as u32),
        _ => bail!("{name}: a sequence has more rows than one launch takes"),
    }
}

/// Returns the number of blocks in a launch: `in_row` tiles for each key head in each sequence,
/// with `parts` blocks per tile.
fn blocks(
    in_row: u32,
    sizes: &Sizes,
    parts: usize,
    threads: usize,
    shared_bytes: usize,
) -> Result<LaunchConfig> {
    let count = [sizes.kv_heads, sizes.batch, parts]
        .iter()
        .try_fold(in_row as usize, |product, x| product.checked_mul(*x));
    let mut blocks = grid(count.unwrap_or(usize::MAX), threads as u32)?;
    blocks.shared_mem_bytes = shared_bytes as u32;
    Ok(blocks)
}

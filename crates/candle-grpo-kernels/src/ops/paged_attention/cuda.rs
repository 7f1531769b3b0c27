//! The CUDA path of [`paged_attention`](crate::paged_attention()) and of page writes.

use candle_core::cuda_backend::cudarc::driver::{CudaSlice, LaunchConfig};
use candle_core::cuda_backend::{CudaDevice, CudaStorage};
use candle_core::{DType, Device, Layout, Result, Shape, Storage, Tensor, bail};

use super::{KeyValuePages, PAGE, PageSlot, PagedBatch, PagedRow};
use crate::cuda::in_place::write as write_in_place;
use crate::cuda::mapped::MappedTensor;
use crate::cuda::{CudaElement, In, Out, alloc, as_tensor, kernels, with_cuda_floats};
use crate::{HeadTransform, Scores, cuda_memory};

/// Maximum head width.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// Spans per sequence part, as in the kernel.
const PART: usize = 16;
/// Threads per attention block.
const THREADS: u32 = 128;
/// Heads per block in the other kernels, a warp each.
const HEADS: usize = 8;

/// A [`PagedBatch`]'s tables on the device, u32.
#[derive(Debug)]
pub(crate) struct Tables {
    /// `[slots]`: page * PAGE + position.
    slots: Tensor,
    /// `[3 * rows]`: each row's first span, then the ends, then the visible positions.
    rows: Tensor,
    /// `[2 * spans]`: each span's page, then its first position in the sequence.
    spans: Tensor,
    /// Number of parts per row, at least that of the longest.
    parts: usize,
}

/// The numbers in [`Tables`].
struct Numbers {
    slots: Vec<u32>,
    rows: Vec<u32>,
    pages: Vec<u32>,
    firsts: Vec<u32>,
    /// The largest number of spans in a row.
    longest: usize,
}

impl Numbers {
    /// Neighboring rows with the same spans share them.
    fn new(slots: &[PageSlot], rows: &[PagedRow]) -> Result<Self> {
        let (mut pages, mut firsts) = (Vec::new(), Vec::new());
        let (mut begins, mut ends) = (Vec::with_capacity(3 * rows.len()), Vec::new());
        let (mut begin, mut longest) = (0, 0);
        let mut previous: Option<&PagedRow> = None;
        for row in rows {
            if !previous.is_some_and(|other| std::ptr::eq(other.spans, row.spans)) {
                begin = pages.len();
                let mut first = 0;
                for span in row.spans.iter().filter(|span| span.len > 0) {
                    pages.push(number(span.page)?);
                    firsts.push(number(first)?);
                    first += span.len;
                }
            }
            previous = Some(row);
            let visible = number(row.visible)?;
            let spans = firsts[begin..].partition_point(|first| *first < visible);
            begins.push(number(begin)?);
            ends.push(number(begin + spans)?);
            longest = longest.max(spans);
        }
        begins.extend(ends);
        for row in rows {
            begins.push(number(row.visible)?);
        }
        let slots = slots.iter();
        let slots = slots.map(|slot| number(slot.page * PAGE + slot.position));
        Ok(Self {
            slots: slots.collect::<Result<_>>()?,
            rows: begins,
            pages,
            firsts,
            longest,
        })
    }

    fn parts(&self) -> usize {
        self.longest.div_ceil(PART)
    }

    /// All numbers, with zeros after the spans up to `spans` entries.
    fn concat(mut self, spans: usize) -> Vec<u32> {
        self.pages.resize(spans, 0);
        self.firsts.resize(spans, 0);
        [self.slots, self.rows, self.pages, self.firsts].concat()
    }
}

impl Tables {
    /// Copies all tables to the device at once.
    pub(crate) fn new(slots: &[PageSlot], rows: &[PagedRow], device: &Device) -> Result<Self> {
        let numbers = Numbers::new(slots, rows)?;
        let (parts, spans) = (numbers.parts(), numbers.pages.len());
        let all = numbers.concat(spans);
        let all = if all.is_empty() {
            Tensor::zeros(0, DType::U32, device)?
        } else {
            Tensor::new(all, device)?
        };
        Self::of(&all, slots.len(), rows.len(), spans, parts)
    }

    /// Splits `all` into its parts.
    fn of(all: &Tensor, slots: usize, rows: usize, spans: usize, parts: usize) -> Result<Self> {
        Ok(Self {
            slots: all.narrow(0, 0, slots)?,
            rows: all.narrow(0, slots, 3 * rows)?,
            spans: all.narrow(0, slots + 3 * rows, 2 * spans)?,
            parts,
        })
    }
}

/// Size of a decoding step: its rows, one per sequence, and, rounded up, the spans and parts in its
/// tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StepSize {
    rows: usize,
    spans: usize,
    parts: usize,
}

/// Tokens, positions and tables for a decoding step, with one row per sequence.
pub struct StepTables {
    size: StepSize,
    tokens_and_positions: Vec<u32>,
    tables: Numbers,
}

impl StepTables {
    /// Builds a step's tables. Row i writes to slot i.
    ///
    /// # Errors
    ///
    /// Fails unless each row has one of each, or if a position is above 2^32.
    pub fn new(
        tokens: &[u32],
        positions: &[u32],
        slots: &[PageSlot],
        rows: &[PagedRow],
    ) -> Result<Self> {
        if [tokens.len(), positions.len(), slots.len()] != [rows.len(); 3] {
            bail!(
                "rows: {} tokens, {} positions, {} slots and {} rows, must be one of each for a row",
                tokens.len(),
                positions.len(),
                slots.len(),
                rows.len()
            );
        }
        let tables = Numbers::new(slots, rows)?;
        Ok(Self {
            size: StepSize {
                rows: rows.len(),
                spans: tables.pages.len().max(64).next_power_of_two(),
                parts: tables.parts().next_power_of_two(),
            },
            tokens_and_positions: [tokens, positions].concat(),
            tables,
        })
    }

    /// The step's size.
    pub fn size(&self) -> StepSize {
        self.size
    }
}

/// Tokens, positions and tables for a decoding step, in GPU memory that later steps with this size
/// reuse. A [`Recording`](crate::Recording) reads them there.
#[derive(Debug)]
pub struct StepInputs {
    size: StepSize,
    /// Tokens, positions, then the tables, u32.
    all: Tensor,
}

impl StepInputs {
    /// Allocates the memory.
    ///
    /// # Errors
    ///
    /// Fails if `device` is not a GPU, or does not have enough memory.
    pub fn new(size: StepSize, device: &Device) -> Result<Self> {
        device.as_cuda_device()?;
        let numbers = 6 * size.rows + 2 * size.spans;
        let all = Tensor::zeros(numbers, DType::U32, device)?;
        Ok(Self { size, all })
    }

    /// The tokens, u32 `[rows]`.
    ///
    /// # Errors
    ///
    /// Same as Candle's operations.
    pub fn tokens(&self) -> Result<Tensor> {
        self.all.narrow(0, 0, self.size.rows)
    }

    /// The positions, u32 `[rows]`.
    ///
    /// # Errors
    ///
    /// Same as Candle's operations.
    pub fn positions(&self) -> Result<Tensor> {
        self.all.narrow(0, self.size.rows, self.size.rows)
    }

    /// Sets all numbers with one copy to the device.
    ///
    /// # Errors
    ///
    /// Fails if the tables have a different size.
    pub fn set(&self, step: StepTables) -> Result<()> {
        if step.size != self.size {
            bail!("step: {:?}, must be {:?}", step.size, self.size);
        }
        let mut all = step.tokens_and_positions;
        all.extend(step.tables.concat(self.size.spans));
        write_in_place(&self.all, |storage, _| {
            let device = storage.device.clone();
            device.memcpy_htod(&all, storage.as_cuda_slice_mut::<u32>()?)
        })
    }

    /// The batch with these tables. Its arguments are the same as in [`StepTables::new`].
    ///
    /// # Errors
    ///
    /// Same as [`PagedBatch::new`].
    pub fn batch<'a>(
        &self,
        slots: &'a [PageSlot],
        rows: &'a [PagedRow<'a>],
    ) -> Result<PagedBatch<'a>> {
        let StepSize {
            rows: n,
            spans,
            parts,
        } = self.size;
        let tables = self.all.narrow(0, 2 * n, 4 * n + 2 * spans)?;
        PagedBatch::with_tables(slots, rows, Some(Tables::of(&tables, n, n, spans, parts)?))
    }
}

fn number(n: usize) -> Result<u32> {
    match u32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("batch: position {n} of the pages, must be below 2^32 on CUDA"),
    }
}

fn tables<'a>(batch: &'a PagedBatch) -> Result<&'a Tables> {
    match &batch.tables {
        Some(tables) => Ok(tables),
        None => bail!("batch: made for the CPU, must be made for the device of the pages"),
    }
}

/// Reserves addresses for keys and for values. `None` if the device cannot map memory.
pub(crate) fn reserve(
    kv_heads: usize,
    head_dim: usize,
    dtype: DType,
    device: &Device,
) -> Result<Option<[MappedTensor; 2]>> {
    // Keys and values have the same size, so each has at most half of the memory.
    let most = cuda_memory(device)?.total / 2;
    let reserve = || MappedTensor::reserve(&[kv_heads, PAGE, head_dim], dtype, device, most);
    Ok(match reserve()? {
        None => None,
        Some(keys) => reserve()?.map(|values| [keys, values]),
    })
}

/// Writes keys and values to a batch's slots. With queries, transforms them and the keys, and
/// returns the queries.
pub(crate) fn write(
    pages: &KeyValuePages,
    queries: Option<(&Tensor, &HeadTransform)>,
    key: &Tensor,
    value: &Tensor,
    batch: &PagedBatch,
) -> Result<Option<Tensor>> {
    let tables = tables(batch)?;
    let (_, kv_heads, _, head_dim) = pages.values().dims4()?;
    let n = key.dim(0)?;
    if n == 0 {
        return Ok(queries.map(|(query, _)| query.clone()));
    }
    let transform = queries.map_or_else(HeadTransform::default, |(_, transform)| *transform);
    let contiguous = |x: Option<&Tensor>| x.map(Tensor::contiguous).transpose();
    let query = contiguous(queries.map(|(query, _)| query))?;
    let (key, value) = (key.contiguous()?, value.contiguous()?);
    let weights = transform.norms.map(|norms| norms.weights);
    let [query_weight, key_weight] = [0, 1].map(|i| contiguous(weights.map(|w| w[i])));
    let [cos, sin] = [0, 1].map(|i| contiguous(transform.angles.map(|a| a[i])));
    let (query_weight, key_weight, cos, sin) = (query_weight?, key_weight?, cos?, sin?);
    let width = query.as_ref().map_or(0, Tensor::elem_count) / n;
    let heads = width / head_dim;

    let device = key.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let query_storage = query.as_ref().map(Tensor::storage_and_layout);
    let query_weight_storage = query_weight.as_ref().map(Tensor::storage_and_layout);
    let key_weight_storage = key_weight.as_ref().map(Tensor::storage_and_layout);
    let (cos_storage, sin_storage) = (
        cos.as_ref().map(Tensor::storage_and_layout),
        sin.as_ref().map(Tensor::storage_and_layout),
    );
    let (key_storage, value_storage) = (key.storage_and_layout(), value.storage_and_layout());
    let slots = tables.slots.storage_and_layout();
    let Storage::Cuda(key_cuda) = &*key_storage.0 else {
        bail!("key: on the CPU, must be on a GPU");
    };
    let blocks = (n * (heads + 2 * kv_heads)).div_ceil(HEADS);
    if blocks > i32::MAX as usize {
        bail!("key: {n} rows, more than one launch takes");
    }
    let launch = LaunchConfig {
        grid_dim: (blocks as u32, 1, 1),
        block_dim: (32, HEADS as u32, 1),
        shared_mem_bytes: 0,
    };
    let epsilon = transform.norms.map_or(0.0, |norms| norms.epsilon as f32);
    with_cuda_floats!(key_cuda, "key", T => {
        // SAFETY: the kernel writes every element, and there are none without queries.
        #[allow(unsafe_code)]
        let mut rotated = unsafe { alloc::<T>(device, n * width)? };
        write_in_place(pages.keys(), |keys, layout| {
            let keys = Out::<T>::in_place(keys, layout, &stream)?;
            write_in_place(pages.values(), |values, layout| {
                let values = Out::<T>::in_place(values, layout, &stream)?;
                // SAFETY: the caller has checked the shapes, and that the slots are in the pages.
                // The blocks have a warp for each head in each row.
                #[allow(unsafe_code)]
                unsafe {
                    kernels::paged_write::<T> {
                        query: In::optional(query_storage.as_ref(), &stream)?,
                        query_weight: In::optional(query_weight_storage.as_ref(), &stream)?,
                        key: In::from_tensor(&key_storage, &stream)?,
                        key_weight: In::optional(key_weight_storage.as_ref(), &stream)?,
                        value: In::from_tensor(&value_storage, &stream)?,
                        cos: In::optional(cos_storage.as_ref(), &stream)?,
                        sin: In::optional(sin_storage.as_ref(), &stream)?,
                        slots: In::from_tensor(&slots, &stream)?,
                        rotated: Out::new(&mut rotated, &stream),
                        keys,
                        values,
                        n: n as u32,
                        heads: heads as u32,
                        kv_heads: kv_heads as u32,
                        head_dim: head_dim as i32,
                        epsilon,
                    }
                    .launch(device, launch)
                }
            })
        })?;
        let rotated = CudaStorage::wrap_cuda_slice(rotated, device.clone());
        Ok(query.as_ref().map(|query| as_tensor(rotated, query.shape())))
    })
}

/// Returns the attention for each row in a batch.
pub(crate) fn attend(
    query: &Tensor,
    pages: &KeyValuePages,
    batch: &PagedBatch,
    scores: &Scores,
) -> Result<Tensor> {
    let tables = tables(batch)?;
    let (_, kv_heads, _, head_dim) = pages.values().dims4()?;
    let (n, width) = query.dims2()?;
    if n == 0 {
        return Ok(query.clone());
    }
    let heads = width / head_dim;
    let group = heads / kv_heads;
    let parts = tables.parts;
    let grid = attention_blocks(query, [kv_heads, group, parts])?;
    let query = query.contiguous()?;
    let device = query.device().as_cuda_device()?;
    let stream = device.cuda_stream();
    let query_storage = query.storage_and_layout();
    let (keys, values) = (
        pages.keys().storage_and_layout(),
        pages.values().storage_and_layout(),
    );
    let (rows, spans) = (
        tables.rows.storage_and_layout(),
        tables.spans.storage_and_layout(),
    );
    let Storage::Cuda(query_cuda) = &*query_storage.0 else {
        bail!("query: on the CPU, must be on a GPU");
    };
    with_cuda_floats!(query_cuda, "query", T => {
        // SAFETY: the kernels write every element in the result. With several parts they write all
        // partial elements, with one none.
        #[allow(unsafe_code)]
        let (mut y, mut partial) = unsafe {
            let partial = if parts > 1 { n * heads * parts * (head_dim + 2) } else { 0 };
            (alloc::<T>(device, n * width)?, alloc::<f32>(device, partial)?)
        };
        macro_rules! launch {
            ($kernel:ident $(, $option:ident)*) => {{
                // SAFETY: the caller has checked the shapes, and that the spans are in the pages.
                // The tables have n rows, and the blocks cover rows, heads and parts.
                #[allow(unsafe_code)]
                unsafe {
                    kernels::$kernel::<T> {
                        query: In::from_tensor(&query_storage, &stream)?,
                        keys: In::from_tensor(&keys, &stream)?,
                        values: In::from_tensor(&values, &stream)?,
                        rows: In::from_tensor(&rows, &stream)?,
                        spans: In::from_tensor(&spans, &stream)?,
                        y: Out::new(&mut y, &stream),
                        partial: Out::new(&mut partial, &stream),
                        n: n as u32,
                        count: (tables.spans.elem_count() / 2) as u32,
                        kv_heads: kv_heads as u32,
                        group: group as u32,
                        head_dim: head_dim as i32,
                        scale: scores.scale as f32,
                        $($option,)*
                    }
                    .launch(device, grid)?;
                }
            }};
        }
        if let Some((window, cap)) = scores.kernel_options() {
            let window = window as u32;
            match (head_dim, group) {
                (..=64, ..=2) => launch!(scored_paged_attention_64_2, window, cap),
                (..=64, ..=4) => launch!(scored_paged_attention_64_4, window, cap),
                (..=64, _) => launch!(scored_paged_attention_64_8, window, cap),
                (..=128, ..=2) => launch!(scored_paged_attention_128_2, window, cap),
                (..=128, ..=4) => launch!(scored_paged_attention_128_4, window, cap),
                (..=128, _) => launch!(scored_paged_attention_128_8, window, cap),
                (_, ..=2) => launch!(scored_paged_attention_256_2, window, cap),
                (_, ..=4) => launch!(scored_paged_attention_256_4, window, cap),
                _ => launch!(scored_paged_attention_256_8, window, cap),
            }
        } else {
            match (head_dim, group) {
                (..=64, ..=2) => launch!(paged_attention_64_2),
                (..=64, ..=4) => launch!(paged_attention_64_4),
                (..=64, _) => launch!(paged_attention_64_8),
                (..=128, ..=2) => launch!(paged_attention_128_2),
                (..=128, ..=4) => launch!(paged_attention_128_4),
                (..=128, _) => launch!(paged_attention_128_8),
                (_, ..=2) => launch!(paged_attention_256_2),
                (_, ..=4) => launch!(paged_attention_256_4),
                _ => launch!(paged_attention_256_8),
            }
        }
        if parts > 1 {
            let partial = CudaStorage::wrap_cuda_slice(partial, device.clone());
            merge(&partial, &mut y, [n * heads, parts, head_dim], device)?;
        }
        let y = CudaStorage::wrap_cuda_slice(y, device.clone());
        Ok(as_tensor(y, &Shape::from((n, width))))
    })
}

/// The blocks of the attention for rows `[N, heads * head_dim]`.
fn attention_blocks(query: &Tensor, [kv_heads, group, parts]: [usize; 3]) -> Result<LaunchConfig> {
    // Kernels process two, four or eight heads in a group at once.
    let chunks = group.div_ceil(match group {
        ..=2 => 2,
        3..=4 => 4,
        _ => 8,
    });
    let (n, heads) = (query.dim(0)?, kv_heads * group);
    if kv_heads * chunks > 65_535 || parts > 65_535 || n * heads > i32::MAX as usize {
        bail!(
            "query: shape {:?}, more than one launch takes",
            query.dims()
        );
    }
    Ok(LaunchConfig {
        grid_dim: (n as u32, (kv_heads * chunks) as u32, parts as u32),
        block_dim: (THREADS, 1, 1),
        shared_mem_bytes: 0,
    })
}

/// Merges the `partial` results of each head, `[heads, parts, head_dim + 2]`, into `y`, `[heads,
/// head_dim]`. The heads are those of all rows.
fn merge<T: CudaElement>(
    partial: &CudaStorage,
    y: &mut CudaSlice<T>,
    [heads, parts, head_dim]: [usize; 3],
    device: &CudaDevice,
) -> Result<()> {
    let stream = device.cuda_stream();
    let layout = Layout::contiguous(heads * parts * (head_dim + 2));
    let blocks = LaunchConfig {
        grid_dim: (heads.div_ceil(HEADS) as u32, 1, 1),
        block_dim: (32, HEADS as u32, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: partial has a row for each part of each head, y head_dim elements per head. The
    // blocks have a warp per head.
    #[allow(unsafe_code)]
    unsafe {
        kernels::paged_attention_merge::<T> {
            partial: In::new(partial, &layout, &stream)?,
            y: Out::new(y, &stream),
            heads_in_all: heads as u64,
            parts: parts as i32,
            head_dim: head_dim as i32,
        }
        .launch(device, blocks)
    }
}

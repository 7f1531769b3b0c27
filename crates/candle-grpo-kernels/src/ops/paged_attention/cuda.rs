//! The CUDA path of [`paged_attention`](crate::paged_attention()) and of page writes.

use candle_core::cuda_backend::CudaStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, LaunchConfig};
use candle_core::{DType, Device, Layout, Result, Shape, Storage, Tensor, bail};

use super::{KeyValuePages, PAGE, PART, PageSlot, PagedBatch, PagedRow, groups, partial_elements};
use crate::cpu::with_element;
use crate::cuda::in_place::write as write_in_place;
use crate::cuda::mapped::MappedPair;
use crate::cuda::{CudaElement, In, NO_SLOT, Out, alloc, as_tensor, kernels, with_cuda_floats};
use crate::ops::delta_states::cuda as delta_states;
use crate::{HeadTransform, RmsNormOptions, Scores, SlotRows, StateBatch, cuda_memory};

/// Maximum rows in a unit.
const UNIT_ROWS: usize = 32;
/// Fewest span reads that units must save. With eight key heads of 128 elements in bf16, these are
/// 16 MiB per layer, which take 4 microseconds at 4.3 TB/s. Units take up to two more launches.
const LEAST_SAVED: usize = 256;
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
    units: Option<UnitTables>,
}

/// Tables of rows that begin with the same spans.
#[derive(Debug)]
struct UnitTables {
    /// `[rows]`: the number of spans that each row's unit reads.
    shared: Tensor,
    /// `[rows]`: the rows in units, unit by unit.
    members: Tensor,
    /// `[units + 1]`: each unit's first member, then the end.
    starts: Tensor,
    size: UnitSize,
}

/// The numbers in [`Tables`].
struct Numbers {
    slots: Vec<u32>,
    rows: Vec<u32>,
    pages: Vec<u32>,
    firsts: Vec<u32>,
    /// The largest number of spans in a row.
    longest: usize,
    units: Vec<Unit>,
    /// By row, the number of spans that its unit reads.
    shared: Vec<usize>,
}

/// Rows that begin with the same visible spans. One block reads these for all rows.
#[derive(Debug, PartialEq)]
struct Unit {
    rows: Vec<usize>,
    spans: usize,
}

impl Unit {
    /// Returns the units of these rows. None if they save few reads.
    fn all(rows: &[PagedRow]) -> Vec<Self> {
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|row| rows[*row].spans.first().map(|span| span.page));
        let sorted: Vec<PagedRow> = order.iter().map(|row| rows[*row]).collect();
        let mut units = Vec::new();
        for (range, same) in groups(&sorted, UNIT_ROWS) {
            let of_unit = &sorted[range.clone()];
            let visible = of_unit.iter().map(|row| row.visible).min().unwrap_or(0);
            let mut end = 0;
            let spans = of_unit[0].spans[..same].iter().filter(|span| span.len > 0);
            let spans = spans.take_while(|span| {
                end += span.len;
                end <= visible
            });
            units.push(Self {
                spans: spans.count(),
                rows: order[range].to_vec(),
            });
        }
        units.retain(|unit| unit.saved() > 0);
        if units.iter().map(Self::saved).sum::<usize>() < LEAST_SAVED {
            units.clear();
        }
        units
    }

    /// The number of span reads that it saves.
    fn saved(&self) -> usize {
        (self.rows.len() - 1) * self.spans
    }
}

impl Numbers {
    /// Neighboring rows with the same spans share them. There are units if `shares_reads`.
    fn new(slots: &[PageSlot], rows: &[PagedRow], shares_reads: bool) -> Result<Self> {
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
        // The largest number is no slot.
        let slots = slots
            .iter()
            .map(|slot| Ok(number(slot.page * PAGE + slot.position + 1)? - 1));
        let units = if shares_reads {
            Unit::all(rows)
        } else {
            Vec::new()
        };
        let mut shared = vec![0; rows.len()];
        for unit in &units {
            for row in &unit.rows {
                shared[*row] = unit.spans;
            }
        }
        Ok(Self {
            slots: slots.collect::<Result<_>>()?,
            rows: begins,
            pages,
            firsts,
            longest,
            units,
            shared,
        })
    }

    /// By row, the number of spans that it reads alone.
    fn own(&self) -> impl Iterator<Item = usize> {
        let (begins, ends) = self.rows.split_at(self.rows.len() / 3);
        let spans = begins.iter().zip(ends).map(|(begin, end)| end - begin);
        spans
            .zip(&self.shared)
            .map(|(all, shared)| all as usize - shared)
    }

    fn size(&self) -> StepSize {
        let most_parts = |spans: Option<usize>| spans.unwrap_or(0).div_ceil(PART).max(1);
        let size = || UnitSize {
            units: self.units.len(),
            rows: self
                .units
                .iter()
                .map(|unit| unit.rows.len())
                .max()
                .unwrap_or(0),
            own_parts: most_parts(self.own().max()),
            shared_parts: most_parts(self.units.iter().map(|unit| unit.spans).max()),
        };
        StepSize {
            rows: self.rows.len() / 3,
            spans: self.pages.len(),
            parts: self.longest.div_ceil(PART),
            units: (!self.units.is_empty()).then(size),
            has_states: false,
        }
    }

    /// All numbers in tables of this size, with `slots` slots. The rest is padding.
    fn concat(mut self, size: StepSize, slots: usize) -> Result<Vec<u32>> {
        self.slots.resize(slots, NO_SLOT);
        let mut of_units = Vec::new();
        if let Some(UnitSize { units, .. }) = size.units {
            for spans in &self.shared {
                of_units.push(number(*spans)?);
            }
            let (mut members, mut starts) = (Vec::new(), vec![0]);
            for unit in &self.units {
                for row in &unit.rows {
                    members.push(number(*row)?);
                }
                starts.push(number(members.len())?);
            }
            // Units of the padding have no rows.
            starts.resize(units + 1, number(members.len())?);
            members.resize(size.rows, 0);
            of_units.extend(members);
            of_units.extend(starts);
        }
        self.pages.resize(size.spans, 0);
        self.firsts.resize(size.spans, 0);
        Ok([self.slots, self.rows, self.pages, self.firsts, of_units].concat())
    }
}

impl Tables {
    /// Copies all tables to the device at once.
    pub(crate) fn new(
        slots: &[PageSlot],
        rows: &[PagedRow],
        shares_reads: bool,
        device: &Device,
    ) -> Result<Self> {
        let numbers = Numbers::new(slots, rows, shares_reads)?;
        let size = numbers.size();
        let all = numbers.concat(size, slots.len())?;
        let all = if all.is_empty() {
            Tensor::zeros(0, DType::U32, device)?
        } else {
            Tensor::new(all, device)?
        };
        Self::of(&all, slots.len(), size)
    }

    /// Splits `all` into its parts.
    fn of(all: &Tensor, slots: usize, size: StepSize) -> Result<Self> {
        let mut from = 0;
        let mut next = |len| {
            let table = all.narrow(0, from, len);
            from += len;
            table
        };
        Ok(Self {
            slots: next(slots)?,
            rows: next(3 * size.rows)?,
            spans: next(2 * size.spans)?,
            parts: size.parts,
            units: match size.units {
                None => None,
                Some(units) => Some(UnitTables {
                    shared: next(size.rows)?,
                    members: next(size.rows)?,
                    starts: next(units.units + 1)?,
                    size: units,
                }),
            },
        })
    }
}

/// Size of a decoding step: its rows, one per sequence, and, rounded up, the sizes of its tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StepSize {
    rows: usize,
    spans: usize,
    parts: usize,
    units: Option<UnitSize>,
    has_states: bool,
}

/// The number of units, and at least the largest number of rows in a unit, of parts that a row
/// reads alone, and of parts that a unit reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct UnitSize {
    units: usize,
    rows: usize,
    own_parts: usize,
    shared_parts: usize,
}

impl StepSize {
    /// Rounded up, so that fewer sizes occur.
    fn rounded_up(self) -> Self {
        Self {
            rows: self.rows,
            spans: self.spans.max(64).next_power_of_two(),
            parts: self.parts.next_power_of_two(),
            units: self.units.map(|units| UnitSize {
                units: units.units.next_power_of_two(),
                rows: units.rows.next_power_of_two(),
                own_parts: units.own_parts.next_power_of_two(),
                shared_parts: units.shared_parts.next_power_of_two(),
            }),
            has_states: self.has_states,
        }
    }

    /// Number of entries in the tables, with a slot per row.
    fn entries(self) -> usize {
        let of_units = self
            .units
            .map_or(0, |units| 2 * self.rows + units.units + 1);
        4 * self.rows + 2 * self.spans + of_units
    }

    /// Number of entries in the table of states.
    fn of_states(self) -> usize {
        if self.has_states { 3 * self.rows } else { 0 }
    }
}

/// Tokens, positions and tables for a decoding step, with one row per sequence.
pub struct StepTables {
    size: StepSize,
    tokens_and_positions: Vec<u32>,
    tables: Numbers,
    /// The table of a [`StateBatch`], or nothing.
    states: Vec<u32>,
}

impl StepTables {
    /// Builds a step's tables. Row i writes to slot i. Rows after the slots write nothing, so that
    /// fewer sizes occur. For `shares_reads`, see [`PagedBatch::new`]; without it, there are fewer
    /// sizes.
    ///
    /// `states` has a row of each sequence in the order of the slots, or is empty for a decoder
    /// without states.
    ///
    /// # Errors
    ///
    /// Fails unless each row has one of each, or if a position is above 2^32.
    pub fn new(
        tokens: &[u32],
        positions: &[u32],
        slots: &[PageSlot],
        rows: &[PagedRow],
        states: &[SlotRows],
        shares_reads: bool,
    ) -> Result<Self> {
        if [tokens.len(), positions.len()] != [rows.len(); 2] || slots.len() > rows.len() {
            bail!(
                "rows: {} tokens, {} positions, {} slots and {} rows, must be one of each for a row, and at most as many slots",
                tokens.len(),
                positions.len(),
                slots.len(),
                rows.len()
            );
        }
        let has_states = !states.is_empty();
        if has_states && (states.len() != slots.len() || states.iter().any(|state| state.rows != 1))
        {
            bail!(
                "states: {states:?}, must be one for each of {} slots, with one row",
                slots.len()
            );
        }
        let tables = Numbers::new(slots, rows, shares_reads)?;
        let of_states = if has_states { rows.len() } else { 0 };
        Ok(Self {
            size: StepSize {
                has_states,
                ..tables.size().rounded_up()
            },
            tokens_and_positions: [tokens, positions].concat(),
            tables,
            states: delta_states::numbers(states, of_states)?,
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
    /// Tokens, positions, the tables, then the table of states, u32.
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
        let entries = 2 * size.rows + size.entries() + size.of_states();
        let all = Tensor::zeros(entries, DType::U32, device)?;
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
        all.extend(step.tables.concat(self.size, self.size.rows)?);
        all.extend(step.states);
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
        let rows_in_all = self.size.rows;
        let tables = self.all.narrow(0, 2 * rows_in_all, self.size.entries())?;
        let tables = Tables::of(&tables, rows_in_all, self.size)?;
        let padding = rows_in_all.saturating_sub(slots.len());
        PagedBatch::with_tables(slots, rows, padding, Some(tables))
    }

    /// The batch of states with these tables, or one without sequences. Its argument is the same as
    /// in [`StepTables::new`].
    ///
    /// # Errors
    ///
    /// Same as Candle's operations.
    pub fn states<'a>(&self, states: &'a [SlotRows]) -> Result<StateBatch<'a>> {
        let StepSize { rows, .. } = self.size;
        let entries = self.size.of_states();
        if entries == 0 {
            return StateBatch::new(&[], self.all.device());
        }
        let table = self
            .all
            .narrow(0, self.all.elem_count() - entries, entries)?;
        let padding = rows.saturating_sub(states.len());
        Ok(StateBatch::with_table(states, padding, table))
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
) -> Result<Option<MappedPair>> {
    // Keys and values have the same size, so each has at most half of the memory.
    let most = cuda_memory(device)?.total / 2;
    let page: &[usize] = &[kv_heads, PAGE, head_dim];
    MappedPair::reserve([page, page], dtype, device, most)
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
    let transform = queries.map_or_else(HeadTransform::default, |(_, transform)| *transform);
    let query_step = transform.parts() * head_dim;
    let heads = queries.map_or(Ok(0), |(query, _)| query.dim(1))? / query_step;
    let width = heads * head_dim;
    if n == 0 {
        return queries
            .map(|(query, _)| query.narrow(1, 0, width))
            .transpose();
    }
    let contiguous = |x: Option<&Tensor>| x.map(Tensor::contiguous).transpose();
    let query = contiguous(queries.map(|(query, _)| query))?;
    let (key, value) = (key.contiguous()?, value.contiguous()?);
    let weights = transform.norms.map(|norms| norms.weights);
    let [query_weight, key_weight] = [0, 1].map(|i| contiguous(weights.map(|w| w[i])));
    let [cos, sin] = [0, 1].map(|i| contiguous(transform.angles.map(|a| a[i])));
    let (query_weight, key_weight, cos, sin) = (query_weight?, key_weight?, cos?, sin?);

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
    let options = transform
        .norms
        .map_or_else(RmsNormOptions::default, |norms| norms.options);
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
                        query_step: query_step as i32,
                        head_dim: head_dim as i32,
                        pairs: transform.pairs() as i32,
                        epsilon: options.epsilon as f32,
                        offset: options.offset(),
                    }
                    .launch(device, launch)
                }
            })
        })?;
        let rotated = CudaStorage::wrap_cuda_slice(rotated, device.clone());
        Ok(queries.map(|_| as_tensor(rotated, &(n, width).into())))
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
    let query = query.contiguous()?;
    let units = tables.units.as_ref();
    let attention = Attention {
        query: &query,
        pages,
        tables,
        units: units.filter(|_| reads_units(&query, head_dim, scores)),
        scores,
        n,
        kv_heads,
        group: width / head_dim / kv_heads,
        head_dim,
    };
    let (parts, heads) = (attention.parts(), kv_heads * attention.group);
    let device = query.device().as_cuda_device()?;
    with_element!(query.dtype(), "query", T => {
        // SAFETY: the kernels write every element in the result. They read the partial elements
        // that they have written.
        #[allow(unsafe_code)]
        let (mut y, mut partial) = unsafe {
            let partial = partial_elements((n, heads), head_dim, parts);
            (alloc::<T>(device, n * width)?, alloc::<f32>(device, partial)?)
        };
        if let Some(units) = attention.units {
            attention.attend_shared::<T>(units, &mut partial)?;
        }
        attention.attend_own(&mut y, &mut partial)?;
        if parts > 1 {
            let partial = CudaStorage::wrap_cuda_slice(partial, device.clone());
            attention.merge(&partial, &mut y)?;
        }
        let y = CudaStorage::wrap_cuda_slice(y, device.clone());
        Ok(as_tensor(y, &Shape::from((n, width))))
    })
}

/// Attention of rows `[n, kv_heads * group * head_dim]`.
struct Attention<'a> {
    /// Contiguous.
    query: &'a Tensor,
    pages: &'a KeyValuePages,
    tables: &'a Tables,
    /// The units, if blocks read for them.
    units: Option<&'a UnitTables>,
    scores: &'a Scores,
    n: usize,
    kv_heads: usize,
    group: usize,
    head_dim: usize,
}

/// Launches a kernel with the arguments that all kernels of attention have, and others.
macro_rules! launch {
    ($self:ident, $grid:ident, $kernel:ident::<$t:ident> { $($name:ident: $value:expr,)* }) => {{
        let device = $self.query.device().as_cuda_device()?;
        let stream = device.cuda_stream();
        let query = $self.query.storage_and_layout();
        let keys = $self.pages.keys().storage_and_layout();
        let values = $self.pages.values().storage_and_layout();
        let rows = $self.tables.rows.storage_and_layout();
        let spans = $self.tables.spans.storage_and_layout();
        let shared = $self.units.map(|units| units.shared.storage_and_layout());
        // SAFETY: the caller has checked the shapes, and that the spans are in the pages. The
        // tables have n rows, and the blocks cover rows or units, heads and parts.
        #[allow(unsafe_code)]
        unsafe {
            kernels::$kernel::<$t> {
                query: In::from_tensor(&query, &stream)?,
                keys: In::from_tensor(&keys, &stream)?,
                values: In::from_tensor(&values, &stream)?,
                rows: In::from_tensor(&rows, &stream)?,
                spans: In::from_tensor(&spans, &stream)?,
                shared: In::optional(shared.as_ref(), &stream)?,
                n: $self.n as u32,
                count: ($self.tables.spans.elem_count() / 2) as u32,
                kv_heads: $self.kv_heads as u32,
                group: $self.group as u32,
                parts: $self.parts() as u32,
                head_dim: $self.head_dim as i32,
                scale: $self.scores.scale as f32,
                $($name: $value,)*
            }
            .launch(device, $grid)
        }
    }};
}

impl Attention<'_> {
    /// The largest number of parts that a row reads alone.
    fn own_parts(&self) -> usize {
        self.units
            .map_or(self.tables.parts, |units| units.size.own_parts)
    }

    /// The parts of a row in `partial`.
    fn parts(&self) -> usize {
        self.own_parts() + self.units.map_or(0, |units| units.size.shared_parts)
    }

    /// Reads the spans that the rows of units share.
    fn attend_shared<T: CudaElement>(
        &self,
        units: &UnitTables,
        partial: &mut CudaSlice<f32>,
    ) -> Result<()> {
        let (width, grid) = self.unit_blocks(units.size)?;
        let stream = self.query.device().as_cuda_device()?.cuda_stream();
        let members = units.members.storage_and_layout();
        let starts = units.starts.storage_and_layout();
        macro_rules! shared {
            ($kernel:ident) => {
                launch!(
                    self,
                    grid,
                    $kernel::<T> {
                        members: In::from_tensor(&members, &stream)?,
                        starts: In::from_tensor(&starts, &stream)?,
                        partial: Out::new(partial, &stream),
                    }
                )
            };
        }
        match width {
            64 => shared!(shared_paged_attention_64),
            _ => shared!(shared_paged_attention_128),
        }
    }

    /// Reads the other spans of each row. With one part, writes the result.
    fn attend_own<T: CudaElement>(
        &self,
        y: &mut CudaSlice<T>,
        partial: &mut CudaSlice<f32>,
    ) -> Result<()> {
        let grid = self.blocks()?;
        let stream = self.query.device().as_cuda_device()?.cuda_stream();
        macro_rules! own {
            ($kernel:ident $(, $option:ident)*) => {
                launch!(self, grid, $kernel::<T> {
                    y: Out::new(y, &stream),
                    partial: Out::new(partial, &stream),
                    $($option: $option,)*
                })
            };
        }
        if let Some((window, cap)) = self.scores.kernel_options() {
            let (window, cap) = (window as u32, cap);
            match (self.head_dim, self.group) {
                (..=64, ..=2) => own!(scored_paged_attention_64_2, window, cap),
                (..=64, ..=4) => own!(scored_paged_attention_64_4, window, cap),
                (..=64, _) => own!(scored_paged_attention_64_8, window, cap),
                (..=128, ..=2) => own!(scored_paged_attention_128_2, window, cap),
                (..=128, ..=4) => own!(scored_paged_attention_128_4, window, cap),
                (..=128, _) => own!(scored_paged_attention_128_8, window, cap),
                (_, ..=2) => own!(scored_paged_attention_256_2, window, cap),
                (_, ..=4) => own!(scored_paged_attention_256_4, window, cap),
                _ => own!(scored_paged_attention_256_8, window, cap),
            }
        } else {
            match (self.head_dim, self.group) {
                (..=64, ..=2) => own!(paged_attention_64_2),
                (..=64, ..=4) => own!(paged_attention_64_4),
                (..=64, _) => own!(paged_attention_64_8),
                (..=128, ..=2) => own!(paged_attention_128_2),
                (..=128, ..=4) => own!(paged_attention_128_4),
                (..=128, _) => own!(paged_attention_128_8),
                (_, ..=2) => own!(paged_attention_256_2),
                (_, ..=4) => own!(paged_attention_256_4),
                _ => own!(paged_attention_256_8),
            }
        }
    }

    /// Merges the parts of each head.
    fn merge<T: CudaElement>(&self, partial: &CudaStorage, y: &mut CudaSlice<T>) -> Result<()> {
        let device = self.query.device().as_cuda_device()?;
        let stream = device.cuda_stream();
        let rows = self.tables.rows.storage_and_layout();
        let shared = self.units.map(|units| units.shared.storage_and_layout());
        let heads = self.kv_heads * self.group;
        let layout = Layout::contiguous(self.n * heads * self.parts() * (self.head_dim + 2));
        let blocks = LaunchConfig {
            grid_dim: ((self.n * heads).div_ceil(HEADS) as u32, 1, 1),
            block_dim: (32, HEADS as u32, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: partial has a row for each part of each head, y head_dim elements per head. The
        // blocks have a warp per head.
        #[allow(unsafe_code)]
        unsafe {
            kernels::paged_attention_merge::<T> {
                partial: In::new(partial, &layout, &stream)?,
                rows: In::from_tensor(&rows, &stream)?,
                shared: In::optional(shared.as_ref(), &stream)?,
                y: Out::new(y, &stream),
                n: self.n as u32,
                heads: heads as u32,
                parts: self.parts() as u32,
                head_dim: self.head_dim as i32,
            }
            .launch(device, blocks)
        }
    }

    /// The blocks of rows.
    fn blocks(&self) -> Result<LaunchConfig> {
        // Kernels process two, four or eight heads in a group at once.
        let chunks = self.group.div_ceil(match self.group {
            ..=2 => 2,
            3..=4 => 4,
            _ => 8,
        });
        let grid = [self.n, self.kv_heads * chunks, self.own_parts()];
        self.launch_config(grid, THREADS, 0)
    }

    /// The head width of the kernel, and the blocks of units.
    fn unit_blocks(&self, size: UnitSize) -> Result<(usize, LaunchConfig)> {
        // As in the kernel: f32 has half as many warps. Each has a span in a stage of keys and
        // values, of which there are two.
        let element = self.query.dtype().size_in_bytes();
        let warps = if element == 4 { 2 } else { 4 };
        let width = if self.head_dim <= 64 { 64 } else { 128 };
        let queries = size.rows * self.group;
        let chunks = queries.div_ceil(16 * warps);
        let query_rows = queries.next_power_of_two().clamp(16, 16 * warps);
        let bytes = (4 * warps * PAGE + query_rows) * (width * element + 16);
        let grid = [size.units, self.kv_heads * chunks, size.shared_parts];
        let blocks = self.launch_config(grid, 32 * warps as u32, bytes as u32)?;
        Ok((width, blocks))
    }

    fn launch_config(
        &self,
        [x, y, z]: [usize; 3],
        threads: u32,
        shared_mem_bytes: u32,
    ) -> Result<LaunchConfig> {
        let heads = self.n * self.kv_heads * self.group;
        if y > 65_535 || z > 65_535 || heads > i32::MAX as usize {
            bail!(
                "query: shape {:?}, more than one launch takes",
                self.query.dims()
            );
        }
        Ok(LaunchConfig {
            grid_dim: (x as u32, y as u32, z as u32),
            block_dim: (threads, 1, 1),
            shared_mem_bytes,
        })
    }
}

/// Returns whether units read the spans that rows share.
fn reads_units(query: &Tensor, head_dim: usize, scores: &Scores) -> bool {
    let offset = query.layout().start_offset() * query.dtype().size_in_bytes();
    offset.is_multiple_of(16) && PagedBatch::can_share_reads(head_dim, scores)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PageSpan;

    /// A prompt's spans from this page on, then pages of its own for each row.
    fn group(rows: usize, prompt: usize, own: usize, first_page: &mut usize) -> Vec<Vec<PageSpan>> {
        let mut take = |count: usize| {
            let pages = *first_page..*first_page + count;
            *first_page = pages.end;
            pages.map(|page| PageSpan { page, len: PAGE }).collect()
        };
        let prompt: Vec<_> = take(prompt);
        let rows = (0..rows).map(|_| [&prompt[..], &take(own)].concat());
        rows.collect()
    }

    fn all_visible(spans: &[Vec<PageSpan>]) -> Vec<PagedRow<'_>> {
        let rows = spans.iter().map(|spans| PagedRow {
            spans,
            visible: spans.iter().map(|span| span.len).sum(),
        });
        rows.collect()
    }

    fn units(rows: &[PagedRow]) -> Vec<(Vec<usize>, usize)> {
        let units = Unit::all(rows).into_iter();
        units.map(|unit| (unit.rows, unit.spans)).collect()
    }

    /// The kernels read exactly the spans in these tables. Keys and values of the prompts are read
    /// once for 8 rows: 56 % of the bytes.
    #[test]
    fn the_pages_of_a_prompt_are_read_once_for_its_rows() -> Result<()> {
        let mut page = 0;
        let spans: Vec<_> = (0..64).flat_map(|_| group(8, 16, 16, &mut page)).collect();
        let rows = all_visible(&spans);
        assert_eq!((rows.len(), rows[0].visible), (512, 512));
        let numbers = Numbers::new(&[], &rows, true)?;
        let shared = numbers.units.iter().map(|unit| unit.spans).sum::<usize>();
        let own = numbers.own().sum::<usize>();
        assert_eq!((shared, own), (64 * 16, 512 * 16));
        let alone = spans.iter().map(Vec::len).sum::<usize>();
        assert_eq!((shared + own) * 10_000 / alone, 5625);
        let size = UnitSize {
            units: 64,
            rows: 8,
            own_parts: 1,
            shared_parts: 1,
        };
        assert_eq!(numbers.size().units, Some(size));
        let alone = Numbers::new(&[], &rows, false)?;
        assert_eq!(
            (alone.size().units, alone.own().sum::<usize>()),
            (None, 512 * 32)
        );
        Ok(())
    }

    #[test]
    fn units_have_the_rows_that_begin_with_the_same_visible_spans() {
        let mut page = 0;
        let (a, b) = (group(17, 20, 1, &mut page), group(3, 5, 0, &mut page));
        // In turn, and a row alone.
        let mut spans: Vec<_> = (0..17)
            .flat_map(|i| [Some(&a[i]), b.get(i)])
            .flatten()
            .cloned()
            .collect();
        spans.push(group(1, 300, 0, &mut page).remove(0));
        let mut rows = all_visible(&spans);
        let of_b = vec![1, 3, 5];
        let of_a: Vec<_> = (0..20).filter(|row| !of_b.contains(row)).collect();
        assert_eq!(units(&rows), [(of_a.clone(), 20), (of_b.clone(), 5)]);
        // A row that sees a part of the fourth span.
        rows[3].visible = 4 * PAGE - 1;
        assert_eq!(units(&rows), [(of_a.clone(), 20), (of_b, 3)]);
        // One whose prompt has grown.
        rows[3].visible = PAGE;
        let mut longer = spans[3].clone();
        longer[0].len = 5;
        rows[3].spans = &longer;
        assert_eq!(units(&rows), [(of_a, 20)]);
        // 16 rows save 15 * 17 spans.
        let spans = group(16, 17, 1, &mut page);
        assert!(units(&all_visible(&spans)).is_empty());
        let spans = group(17, 16, 1, &mut page);
        assert_eq!(units(&all_visible(&spans)), [((0..17).collect(), 16)]);
        // More rows than a unit has.
        let spans = group(40, 9, 1, &mut page);
        let expected = [((0..32).collect(), 9), ((32..40).collect(), 9)];
        assert_eq!(units(&all_visible(&spans)), expected);
    }

    #[test]
    fn padded_tables_have_the_entries_of_their_size() -> Result<()> {
        let mut page = 0;
        let spans: Vec<_> = [9, 5, 7]
            .into_iter()
            .flat_map(|rows| group(rows, 35, 20, &mut page))
            .collect();
        let rows = all_visible(&spans);
        let slots = vec![
            PageSlot {
                page: 0,
                position: 0
            };
            rows.len()
        ];
        let numbers = Numbers::new(&slots, &rows, true)?;
        let (exact, size) = (numbers.size(), numbers.size().rounded_up());
        let units = |units, rows, own_parts, shared_parts| UnitSize {
            units,
            rows,
            own_parts,
            shared_parts,
        };
        assert_eq!(exact.units, Some(units(3, 9, 2, 3)));
        assert_eq!(size.units, Some(units(4, 16, 2, 4)));
        for size in [exact, size] {
            let all = Numbers::new(&slots, &rows, true)?.concat(size, slots.len())?;
            assert_eq!(all.len(), size.entries());
        }
        let all = numbers.concat(size, slots.len())?;
        assert_eq!(all[all.len() - 5..], [0, 9, 14, 21, 21]);
        Ok(())
    }
}

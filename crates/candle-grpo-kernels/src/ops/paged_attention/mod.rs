//! Attention to keys and values in pages, for decoding.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use std::ops::Range;

use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Result, Tensor, WithDType, bail};

use crate::cpu::{slice, with_element, with_floats};
#[cfg(feature = "cuda")]
use crate::cuda::mapped::MappedPair;
use crate::{HeadTransform, Scores, check, path};

/// Positions per page: a multiple of every vector width.
pub const PAGE: usize = 16;

/// Spans per part of a row, as in the kernels. The parts of a row are computed apart, and merged.
const PART: usize = 16;

/// Maximum head width of the kernels.
const MAX_HEAD_DIM: usize = 256;

/// Maximum head width of the kernels that read spans for several rows.
const MAX_SHARED_HEAD_DIM: usize = 128;

/// Keys and values for one layer, in pages with [`PAGE`] positions each
/// (<https://arxiv.org/abs/2309.06180>).
///
/// You keep each sequence's list of pages. Sequences can share pages, and grow without a copy.
///
/// On CUDA, f32, bf16 and f16 pages grow in place ([`Self::pages_in_place`]): their addresses never
/// change. Other pages are copied when they grow.
#[derive(Debug)]
pub struct KeyValuePages {
    /// Number of pages. Mapped tensors have more, without memory.
    len: usize,
    /// `[pages, kv_heads, PAGE, head_dim]`, or `[pages, kv_heads, head_dim, PAGE]` for the CPU
    /// path, whose vectors hold the same element at all positions.
    keys: Tensor,
    /// `[pages, kv_heads, PAGE, head_dim]`
    values: Tensor,
    /// Keys and values, if they grow in place.
    #[cfg(feature = "cuda")]
    mapped: Option<Box<MappedPair>>,
}

/// A part of a sequence in one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSpan {
    /// Page index.
    pub page: usize,
    /// Number of positions from the start of the page, at most [`PAGE`].
    pub len: usize,
}

/// The positions that one query attends to.
#[derive(Debug, Clone, Copy)]
pub struct PagedRow<'a> {
    /// The sequence's pages, in order.
    pub spans: &'a [PageSpan],
    /// Number of visible positions, counted from the first. At least 1 and at most the number in
    /// the spans.
    pub visible: usize,
}

/// A position in a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSlot {
    /// Page index.
    pub page: usize,
    /// Position within the page, below [`PAGE`].
    pub position: usize,
}

/// The rows in one decoding pass: where new keys and values go, and what each query attends to.
///
/// All layers in a pass share a batch. On CUDA its tables are copied to the device once.
#[derive(Debug)]
pub struct PagedBatch<'a> {
    slots: &'a [PageSlot],
    rows: &'a [PagedRow<'a>],
    /// Number of rows after the slots that write nothing.
    padding: usize,
    /// Number of pages that the slots and rows need.
    pages: usize,
    #[cfg(feature = "cuda")]
    pub(crate) tables: Option<cuda::Tables>,
}

/// Number of elements for `parts` parts of each row and head: a sum, a maximum and a sum of weights
/// each. A single part is the result.
fn partial_elements((rows, heads): (usize, usize), head_dim: usize, parts: usize) -> usize {
    if parts > 1 {
        rows * heads * parts * (head_dim + 2)
    } else {
        0
    }
}

impl<'a> PagedBatch<'a> {
    /// Returns a batch for pages on `device`. The slots must be distinct; this is not checked.
    ///
    /// With `shares_reads`, an attention that [can](Self::can_share_reads) reads spans that rows
    /// share once. On the CPU, all attention does.
    ///
    /// # Errors
    ///
    /// Fails if a position is not in a page, or if a row has no visible position or more than its
    /// spans.
    pub fn new(
        slots: &'a [PageSlot],
        rows: &'a [PagedRow<'a>],
        shares_reads: bool,
        device: &Device,
    ) -> Result<Self> {
        let pages = Self::check(slots, rows)?;
        #[cfg(not(feature = "cuda"))]
        let _ = (device, shares_reads);
        Ok(Self {
            slots,
            rows,
            padding: 0,
            pages,
            #[cfg(feature = "cuda")]
            tables: device
                .is_cuda()
                .then(|| cuda::Tables::new(slots, rows, shares_reads, device))
                .transpose()?,
        })
    }

    /// Returns whether attention with heads of this width and these scores can read spans that rows
    /// share once on a GPU. Its blocks load 16 bytes at a time, and know no window and no cap.
    pub fn can_share_reads(head_dim: usize, scores: &Scores) -> bool {
        head_dim <= MAX_SHARED_HEAD_DIM
            && head_dim.is_multiple_of(8)
            && scores.window.is_none()
            && scores.cap.is_none()
    }

    /// The most bytes that attention on a GPU takes beside its result: the parts of rows that begin
    /// with `prompt` positions, which they may share, and have `response` positions of their own.
    /// Recorded steps have as many parts as their tables, which are rounded up.
    pub fn partial_bytes(
        (rows, heads): (usize, usize),
        head_dim: usize,
        (prompt, response): (usize, usize),
    ) -> usize {
        if head_dim > MAX_HEAD_DIM {
            return 0;
        }
        let [shared, own] = [prompt, response].map(|positions| positions.div_ceil(PAGE));
        let parts = |spans: usize| spans.div_ceil(PART).next_power_of_two();
        let most = parts(shared + own).max(parts(shared) + parts(own));
        partial_elements((rows, heads), head_dim, most) * size_of::<f32>()
    }

    /// Like [`Self::new`], with existing tables, and with `padding` rows that write nothing.
    #[cfg(feature = "cuda")]
    pub(crate) fn with_tables(
        slots: &'a [PageSlot],
        rows: &'a [PagedRow<'a>],
        padding: usize,
        tables: Option<cuda::Tables>,
    ) -> Result<Self> {
        Ok(Self {
            slots,
            rows,
            padding,
            pages: Self::check(slots, rows)?,
            tables,
        })
    }

    /// Returns the number of pages that the slots and rows need.
    fn check(slots: &[PageSlot], rows: &[PagedRow]) -> Result<usize> {
        let mut pages = 0;
        for (index, slot) in slots.iter().enumerate() {
            if slot.position >= PAGE {
                bail!(
                    "slots[{index}]: position {}, must be below {PAGE}",
                    slot.position
                );
            }
            pages = pages.max(slot.page + 1);
        }
        for (index, row) in rows.iter().enumerate() {
            let mut there = 0;
            for span in row.spans {
                if span.len > PAGE {
                    bail!(
                        "rows[{index}]: {} positions of page {}, must be at most {PAGE}",
                        span.len,
                        span.page
                    );
                }
                there += span.len;
                pages = pages.max(span.page + 1);
            }
            if row.visible == 0 || row.visible > there {
                bail!(
                    "rows[{index}]: {} visible positions, must be at least 1 and at most the {there} of its spans",
                    row.visible
                );
            }
        }
        Ok(pages)
    }

    /// Number of rows of new keys and values.
    fn written(&self) -> usize {
        self.slots.len() + self.padding
    }

    fn check_pages(&self, there: usize) -> Result<()> {
        if self.pages > there {
            bail!(
                "batch: page {}, must be below the number of pages, {there}",
                self.pages - 1
            );
        }
        Ok(())
    }
}

impl KeyValuePages {
    /// Creates zeroed pages. On the CPU the system allocates a page when it is first written.
    ///
    /// # Errors
    ///
    /// Fails if a size is 0 or `dtype` is not a float dtype.
    pub fn new(
        pages: usize,
        kv_heads: usize,
        head_dim: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        for (name, size) in [("kv_heads", kv_heads), ("head_dim", head_dim)] {
            if size == 0 {
                bail!("{name}: 0, must be at least 1");
            }
        }
        check::one_stream(device)?;
        if !dtype.is_float() {
            bail!("dtype: {dtype:?}, must be a float dtype");
        }
        #[cfg(feature = "cuda")]
        if device.is_cuda()
            && path::fuses(dtype, device)
            && head_dim <= MAX_HEAD_DIM
            && let Some(mapped) = cuda::reserve(kv_heads, head_dim, dtype, device)?
        {
            let [keys, values] = mapped.tensors();
            let mut new = Self {
                len: 0,
                keys,
                values,
                mapped: Some(Box::new(mapped)),
            };
            new.grow(pages)?;
            return Ok(new);
        }
        Self::allocate(pages, kv_heads, head_dim, dtype, device)
    }

    fn allocate(
        pages: usize,
        kv_heads: usize,
        head_dim: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let values = Tensor::zeros((pages, kv_heads, PAGE, head_dim), dtype, device)?;
        let key_shape = if path::is_fused_on_cpu(&values) {
            [pages, kv_heads, head_dim, PAGE]
        } else {
            [pages, kv_heads, PAGE, head_dim]
        };
        let keys = Tensor::zeros(&key_shape, dtype, device)?;
        Ok(Self {
            len: pages,
            keys,
            values,
            #[cfg(feature = "cuda")]
            mapped: None,
        })
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of pages by which memory grows, if pages grow in place. Their keys, and
    /// their values, take a multiple of the least memory that the GPU maps, which is 2 MiB.
    pub fn pages_in_place(&self) -> Option<usize> {
        #[cfg(feature = "cuda")]
        if let Some(mapped) = &self.mapped {
            return Some(mapped.rows_without_rest());
        }
        None
    }

    /// Appends zeroed pages until there are `pages`.
    ///
    /// # Errors
    ///
    /// Fails if there are already more pages, or if there is not enough memory. Then there are as
    /// many as before, with the same content.
    pub fn grow(&mut self, pages: usize) -> Result<()> {
        if pages < self.len {
            bail!(
                "pages: {pages}, must be at least the current number, {}",
                self.len
            );
        }
        #[cfg(feature = "cuda")]
        if let Some(mapped) = &mut self.mapped {
            mapped.grow(self.len, pages)?;
            self.len = pages;
            return Ok(());
        }
        let (_, kv_heads, _, head_dim) = self.values.dims4()?;
        let (dtype, device) = (self.keys.dtype(), self.keys.device());
        let grown = Self::allocate(pages, kv_heads, head_dim, dtype, device)?;
        if !self.is_empty() {
            grown.keys.slice_set(&self.keys, 0, 0)?;
            grown.values.slice_set(&self.values, 0, 0)?;
        }
        *self = grown;
        Ok(())
    }

    /// Removes the pages from `pages` on, if pages grow in place. Their memory returns to the
    /// device, after the work on it.
    ///
    /// # Errors
    ///
    /// Fails if there are fewer pages, if they do not grow in place, or if work on the device has
    /// failed.
    pub fn shrink(&mut self, pages: usize) -> Result<()> {
        if pages > self.len {
            bail!(
                "pages: {pages}, must be at most the current number, {}",
                self.len
            );
        }
        #[cfg(feature = "cuda")]
        if let Some(mapped) = &mut self.mapped {
            self.len = pages;
            return mapped.shrink(pages);
        }
        bail!("pages: do not grow in place, must do so to be removed")
    }

    /// Writes row i of `key` and `value`, `[N, kv_heads * head_dim]` in the pages' dtype, to slot i
    /// in `batch`.
    ///
    /// # Errors
    ///
    /// Fails if an argument is in a graph, if shapes or dtypes do not match, or if a slot is out of
    /// range.
    pub fn write(&self, key: &Tensor, value: &Tensor, batch: &PagedBatch) -> Result<()> {
        self.check_write(key, value, batch)?;
        #[cfg(feature = "cuda")]
        if self.is_fused_on_cuda() {
            return cuda::write(self, None, key, value, batch).map(drop);
        }
        if !self.has_transposed_keys() {
            return composed::write(self, key, value, batch.slots);
        }
        let write = |transposed| WriteRows {
            slots: batch.slots,
            transposed,
        };
        self.keys.inplace_op2(&key.contiguous()?, &write(true))?;
        self.values.inplace_op2(&value.contiguous()?, &write(false))
    }

    /// Transforms the heads in `query` and `key`, and writes like [`Self::write`]. Returns the
    /// transformed `query`, `[N, heads * head_dim]`.
    ///
    /// On CUDA this takes one launch.
    ///
    /// # Errors
    ///
    /// Same as [`Self::write`] and [`HeadTransform::apply`].
    pub fn write_transformed(
        &self,
        [query, key, value]: [&Tensor; 3],
        batch: &PagedBatch,
        transform: &HeadTransform,
    ) -> Result<Tensor> {
        check::constant("query", query)?;
        #[cfg(feature = "cuda")]
        if self.is_fused_on_cuda()
            && transform.fits(query.dim(0)?, self.values.dim(3)?, &self.values)
        {
            self.check_write(key, value, batch)?;
            self.check_query(query, batch.written(), transform.parts())?;
            let queries = Some((query, transform));
            let rotated = cuda::write(self, queries, key, value, batch)?;
            return Ok(rotated.unwrap_or_else(|| query.clone()));
        }
        // A head norm may have a variable.
        let [query, key] = transform.apply([query, key])?.map(|heads| heads.detach());
        self.write(&key, value, batch)?;
        Ok(query)
    }

    fn check_write(&self, key: &Tensor, value: &Tensor, batch: &PagedBatch) -> Result<()> {
        let (_, kv_heads, _, head_dim) = self.values.dims4()?;
        let slots = batch.written();
        for (name, x) in [("key", key), ("value", value)] {
            if x.dims() != [slots, kv_heads * head_dim] {
                bail!(
                    "{name}: shape {:?}, must be [{slots}, {}], a row for each slot",
                    x.dims(),
                    kv_heads * head_dim
                );
            }
            check::constant(name, x)?;
            check::same_dtype(name, x, "the pages", &self.keys)?;
            check::same_device(&[("the pages", &self.keys), (name, x)])?;
        }
        batch.check_pages(self.len())
    }

    /// `parts` is 2 if a gate follows each query head, else 1.
    fn check_query(&self, query: &Tensor, rows: usize, parts: usize) -> Result<()> {
        let (_, kv_heads, _, head_dim) = self.values.dims4()?;
        let width = parts * kv_heads * head_dim;
        if !matches!(query.dims(), &[n, wide] if n == rows && wide > 0 && wide % width == 0) {
            bail!(
                "query: shape {:?}, must be [{rows}, a multiple of {width}], a row for each of rows",
                query.dims(),
            );
        }
        check::constant("query", query)?;
        check::same_dtype("query", query, "the pages", &self.keys)?;
        check::same_device(&[("the pages", &self.keys), ("query", query)])
    }

    #[cfg(feature = "cuda")]
    fn is_fused_on_cuda(&self) -> bool {
        self.keys.device().is_cuda()
            && path::is_fused(&self.keys)
            && self.keys.dims()[3] <= MAX_HEAD_DIM
    }

    pub(crate) fn keys(&self) -> &Tensor {
        &self.keys
    }

    pub(crate) fn has_transposed_keys(&self) -> bool {
        path::is_fused_on_cpu(&self.keys)
    }

    pub(crate) fn values(&self) -> &Tensor {
        &self.values
    }
}

/// Grouped-query attention for one token per sequence: `softmax(scale * query key^T) value` for
/// each head, with the options in [`Scores`].
///
/// Row i in `query` attends to row i in `batch`, which includes its own position, so write its key
/// and value first. On the CPU a row is bit-identical no matter what the other rows are, given the
/// same spans. On CUDA, rows that begin with the same spans read these together if that saves
/// enough, which changes the order of a row's sums. Arithmetic is in f32.
///
/// # Shapes
///
/// `query` and the result are `[N, heads * head_dim]` in the pages' dtype, with the heads side by
/// side. `heads` is a multiple of `kv_heads`; adjacent query heads share a key head.
///
/// # Errors
///
/// Fails if `query` is in a graph, if shapes or dtypes do not match, if a scale or cap is not
/// positive and finite, if the window is 0, or if a page does not exist.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_grpo_kernels::{
///     KeyValuePages, PageSlot, PageSpan, PagedBatch, PagedRow, paged_attention,
/// };
///
/// let pages = KeyValuePages::new(1, 1, 2, DType::F32, &Device::Cpu)?;
/// let x = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
/// let slots = [PageSlot { page: 0, position: 0 }];
/// let rows = [PagedRow { spans: &[PageSpan { page: 0, len: 1 }], visible: 1 }];
/// let batch = PagedBatch::new(&slots, &rows, true, &Device::Cpu)?;
/// pages.write(&x, &x, &batch)?;
/// assert_eq!(paged_attention(&x, &pages, &batch, 0.5)?.to_vec2::<f32>()?, [[1., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn paged_attention(
    query: &Tensor,
    pages: &KeyValuePages,
    batch: &PagedBatch,
    scores: impl Into<Scores>,
) -> Result<Tensor> {
    let scores = scores.into();
    check(query, pages, batch, &scores)?;
    #[cfg(feature = "cuda")]
    if pages.is_fused_on_cuda() {
        return cuda::attend(query, pages, batch, &scores);
    }
    if !path::is_fused_on_cpu(query) || batch.rows.is_empty() {
        return composed::unchecked(query, pages, batch.rows, &scores);
    }
    let attended = query.contiguous()?;
    let (shape, rows) = (query.shape(), batch.rows);
    with_element!(query.dtype(), "query", Float => {
        let mixed = cpu::forward::<Float>(&attended, pages, rows, &scores)?;
        Tensor::from_vec(mixed, shape, &Device::Cpu)
    })
}

/// Returns the rows in `batch` if the arguments are valid.
pub(crate) fn check<'a>(
    query: &Tensor,
    pages: &KeyValuePages,
    batch: &PagedBatch<'a>,
    scores: &Scores,
) -> Result<&'a [PagedRow<'a>]> {
    scores.check()?;
    pages.check_query(query, batch.rows.len(), 1)?;
    batch.check_pages(pages.len())?;
    Ok(batch.rows)
}

/// Groups up to `most` neighboring rows, and returns how many spans each group shares. Groups with
/// several rows share at least one. A row that shares less than half as much as the rows before it
/// starts a new group.
fn groups(rows: &[PagedRow], most: usize) -> Vec<(Range<usize>, usize)> {
    let mut groups: Vec<(Range<usize>, usize)> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        if let Some((group, shared)) = groups.last_mut()
            && group.len() < most
        {
            let first = rows[group.start].spans[..*shared].iter();
            let same = first.zip(row.spans).take_while(|(a, b)| a == b).count();
            if same > 0 && (group.len() == 1 || 2 * same >= *shared) {
                group.end = index + 1;
                *shared = same;
                continue;
            }
        }
        groups.push((index..index + 1, row.spans.len()));
    }
    groups
}

/// Writes rows to page slots.
struct WriteRows<'a> {
    slots: &'a [PageSlot],
    transposed: bool,
}

impl InplaceOp2 for WriteRows<'_> {
    fn name(&self) -> &'static str {
        "write_pages"
    }

    fn cpu_fwd(
        &self,
        pages: &mut CpuStorage,
        layout: &Layout,
        rows: &CpuStorage,
        rows_layout: &Layout,
    ) -> Result<()> {
        let (range, rows_range) = (slice::range(layout)?, slice::range(rows_layout)?);
        let &[_, kv_heads, a, b] = layout.dims() else {
            bail!(
                "pages: shape {:?}, must have four dimensions",
                layout.dims()
            );
        };
        let head_dim = a * b / PAGE;
        with_floats!(pages, "the pages", pages => {
            let rows = &WithDType::cpu_storage_as_slice(rows)?[rows_range];
            cpu::write(&mut pages[range], rows, self.slots, [kv_heads, head_dim], self.transposed);
        });
        Ok(())
    }
}

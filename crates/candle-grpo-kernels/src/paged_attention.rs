//! Attention to keys and values in pages, for decoding.

use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Result, Tensor, WithDType, bail};

use crate::cpu::{with_element, with_floats};
use crate::{check, composed, cpu, path};

/// Positions of a page: a multiple of every vector width.
pub const PAGE: usize = 16;

/// Keys and values of one layer in pages of [`PAGE`] positions (<https://arxiv.org/abs/2309.06180>).
///
/// The caller keeps the list of pages of each sequence. Sequences may share pages, and grow without
/// a copy.
#[derive(Debug, Clone)]
pub struct KeyValuePages {
    /// `[pages, kv_heads, PAGE, head_dim]`, or `[pages, kv_heads, head_dim, PAGE]` for the CPU
    /// path, whose vectors hold the same element of all positions.
    keys: Tensor,
    /// `[pages, kv_heads, PAGE, head_dim]`
    values: Tensor,
}

/// A part of a sequence in one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSpan {
    /// Index of the page.
    pub page: usize,
    /// Number of positions from the start of the page, at most [`PAGE`].
    pub len: usize,
}

/// The positions that one query attends to.
#[derive(Debug, Clone, Copy)]
pub struct PagedRow<'a> {
    /// The pages of the sequence, in order.
    pub spans: &'a [PageSpan],
    /// Number of visible positions from the first, at least 1 and at most those of the spans.
    pub visible: usize,
}

/// A position in a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSlot {
    /// Index of the page.
    pub page: usize,
    /// Position in the page, below [`PAGE`].
    pub position: usize,
}

impl KeyValuePages {
    /// Returns pages of zeros. On the CPU the system allocates a page when it is first written.
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
        if !dtype.is_float() {
            bail!("dtype: {dtype:?}, must be a float dtype");
        }
        let values = Tensor::zeros((pages, kv_heads, PAGE, head_dim), dtype, device)?;
        let key_shape = if path::is_fused_on_cpu(&values) {
            [pages, kv_heads, head_dim, PAGE]
        } else {
            [pages, kv_heads, PAGE, head_dim]
        };
        let keys = Tensor::zeros(&key_shape, dtype, device)?;
        Ok(Self { keys, values })
    }

    /// Returns the number of pages.
    pub fn len(&self) -> usize {
        self.keys.dims()[0]
    }

    /// Returns whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends pages of zeros up to `pages` pages.
    ///
    /// # Errors
    ///
    /// Fails if there are more pages already.
    pub fn grow(&mut self, pages: usize) -> Result<()> {
        let Some(more) = pages.checked_sub(self.len()) else {
            bail!(
                "pages: {pages}, must be at least the current number, {}",
                self.len()
            );
        };
        let (_, kv_heads, _, head_dim) = self.values.dims4()?;
        let grown = Self::new(
            self.len() + more,
            kv_heads,
            head_dim,
            self.keys.dtype(),
            self.keys.device(),
        )?;
        if !self.is_empty() {
            grown.keys.slice_set(&self.keys, 0, 0)?;
            grown.values.slice_set(&self.values, 0, 0)?;
        }
        *self = grown;
        Ok(())
    }

    /// Writes row i of `key` and `value`, `[N, kv_heads * head_dim]` in the dtype of the pages, to
    /// slot i.
    ///
    /// The slots must be distinct; this is not checked.
    ///
    /// # Errors
    ///
    /// Fails if an argument is in a graph, on other shapes and dtypes, and on slots out of range.
    pub fn write(&self, key: &Tensor, value: &Tensor, slots: &[PageSlot]) -> Result<()> {
        let (pages, kv_heads, _, head_dim) = self.values.dims4()?;
        for (name, x) in [("key", key), ("value", value)] {
            if x.dims() != [slots.len(), kv_heads * head_dim] {
                bail!(
                    "{name}: shape {:?}, must be [{}, {}], a row for each slot",
                    x.dims(),
                    slots.len(),
                    kv_heads * head_dim
                );
            }
            check::constant(name, x)?;
            check::same_dtype(name, x, "the pages", &self.keys)?;
            check::same_device(&[("the pages", &self.keys), (name, x)])?;
        }
        for (row, slot) in slots.iter().enumerate() {
            if slot.page >= pages || slot.position >= PAGE {
                bail!(
                    "slots[{row}]: position {} of page {}, must be below {PAGE} and {pages}",
                    slot.position,
                    slot.page
                );
            }
        }
        if !self.has_transposed_keys() {
            return composed::paged_attention::write(self, key, value, slots);
        }
        let write = |transposed| WriteRows { slots, transposed };
        self.keys.inplace_op2(&key.contiguous()?, &write(true))?;
        self.values.inplace_op2(&value.contiguous()?, &write(false))
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

/// Grouped-query attention of one token for each sequence: `softmax(scale * query key^T) value` for
/// each head.
///
/// Row i of `query` attends to `rows[i]`, which includes its own position: write its key and value
/// first. On the CPU a row is bit-identical for any other rows, given the same spans. Arithmetic is
/// in f32.
///
/// # Shapes
///
/// `query` and the result are `[N, heads * head_dim]` in the dtype of the pages, with the heads
/// side by side. `heads` is a multiple of `kv_heads`; adjacent query heads share a key head.
///
/// # Errors
///
/// Fails if `query` is in a graph, on other shapes and dtypes, on a scale that is not positive and
/// finite, and on rows with no visible position or with positions that do not exist.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_grpo_kernels::{KeyValuePages, PageSlot, PageSpan, PagedRow, paged_attention};
///
/// let pages = KeyValuePages::new(1, 1, 2, DType::F32, &Device::Cpu)?;
/// let x = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
/// pages.write(&x, &x, &[PageSlot { page: 0, position: 0 }])?;
/// let row = PagedRow { spans: &[PageSpan { page: 0, len: 1 }], visible: 1 };
/// assert_eq!(paged_attention(&x, &pages, &[row], 0.5)?.to_vec2::<f32>()?, [[1., 2.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn paged_attention(
    query: &Tensor,
    pages: &KeyValuePages,
    rows: &[PagedRow],
    scale: f64,
) -> Result<Tensor> {
    check(query, pages, rows, scale)?;
    if !path::is_fused_on_cpu(query) || rows.is_empty() {
        return composed::paged_attention::unchecked(query, pages, rows, scale);
    }
    let attended = query.contiguous()?;
    let shape = query.shape();
    with_element!(query.dtype(), "query", Float => {
        let mixed = cpu::paged_attention::forward::<Float>(&attended, pages, rows, scale as f32)?;
        Tensor::from_vec(mixed, shape, &Device::Cpu)
    })
}

pub(crate) fn check(
    query: &Tensor,
    pages: &KeyValuePages,
    rows: &[PagedRow],
    scale: f64,
) -> Result<()> {
    check::positive("scale", scale)?;
    check::constant("query", query)?;
    let (num_pages, kv_heads, _, head_dim) = pages.values.dims4()?;
    let width = kv_heads * head_dim;
    if !matches!(query.dims(), &[n, wide] if n == rows.len() && wide > 0 && wide % width == 0) {
        bail!(
            "query: shape {:?}, must be [{}, a multiple of {width}], a row for each of rows",
            query.dims(),
            rows.len()
        );
    }
    check::same_dtype("query", query, "the pages", &pages.keys)?;
    check::same_device(&[("the pages", &pages.keys), ("query", query)])?;
    for (index, row) in rows.iter().enumerate() {
        let mut there = 0;
        for span in row.spans {
            if span.page >= num_pages || span.len > PAGE {
                bail!(
                    "rows[{index}]: {} positions of page {}, must be at most {PAGE} and below {num_pages}",
                    span.len,
                    span.page
                );
            }
            there += span.len;
        }
        if row.visible == 0 || row.visible > there {
            bail!(
                "rows[{index}]: {} visible positions, must be at least 1 and at most the {there} of its spans",
                row.visible
            );
        }
    }
    Ok(())
}

/// Writes rows to slots of pages.
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
        let (range, rows_range) = (cpu::range(layout)?, cpu::range(rows_layout)?);
        let &[_, kv_heads, a, b] = layout.dims() else {
            bail!(
                "pages: shape {:?}, must have four dimensions",
                layout.dims()
            );
        };
        let head_dim = a * b / PAGE;
        with_floats!(pages, "the pages", pages => {
            let rows = &WithDType::cpu_storage_as_slice(rows)?[rows_range];
            cpu::paged_attention::write(&mut pages[range], rows, self.slots, [kv_heads, head_dim], self.transposed);
        });
        Ok(())
    }
}

//! Attention of new tokens to keys and values that are kept in pages.

use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Result, Tensor, WithDType, bail};

use crate::cpu::{with_element, with_floats};
use crate::{check, composed, cpu, path};

/// Positions of a page. A multiple of every vector width, so that the scores of a page are whole vectors.
pub const PAGE: usize = 16;

/// Keys and values of one layer in pages of [`PAGE`] positions (PagedAttention, Kwon et al. 2023, vLLM): which pages a
/// sequence has is written elsewhere, so sequences may share them, and grow without being moved.
#[derive(Debug, Clone)]
pub struct KeyValuePages {
    /// Like `values`; for the path on the CPU transposed, `[pages, kv_heads, head_dim, PAGE]`, as a vector takes the same element
    /// of all positions.
    keys: Tensor,
    /// `[pages, kv_heads, PAGE, head_dim]`
    values: Tensor,
}

/// A piece of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSpan {
    /// The number of the page.
    pub page: usize,
    /// How many of its first positions belong to the sequence, at most [`PAGE`].
    pub len: usize,
}

/// What one query sees.
#[derive(Debug, Clone, Copy)]
pub struct PagedRow<'a> {
    /// The pages of its sequence in order.
    pub spans: &'a [PageSpan],
    /// How many positions it sees, from the first one on; at least 1, and at most those of the spans.
    pub visible: usize,
}

/// A position in a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageSlot {
    /// The number of the page.
    pub page: usize,
    /// The position in it, below [`PAGE`].
    pub position: usize,
}

impl KeyValuePages {
    /// Pages of zeros. Errs if a size is 0 or `dtype` is not of floats.
    ///
    /// On the CPU memory is taken from the system as pages are written.
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
        let of_keys = match path::is_fused_on_cpu(&values) {
            true => [pages, kv_heads, head_dim, PAGE],
            false => [pages, kv_heads, PAGE, head_dim],
        };
        let keys = Tensor::zeros(&of_keys, dtype, device)?;
        Ok(Self { keys, values })
    }

    /// The number of pages.
    pub fn len(&self) -> usize {
        self.keys.dims()[0]
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As many more pages of zeros as make `pages`; those that are there keep their numbers. Errs if there are more already.
    pub fn grow(&mut self, pages: usize) -> Result<()> {
        let Some(more) = pages.checked_sub(self.len()) else {
            bail!(
                "pages: {pages}, must be at least those there are, {}",
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

    /// Writes row i of `key` and `value`, `[N, kv_heads * head_dim]` of the dtype of the pages, to slot i.
    ///
    /// Errs on what is in a graph, other shapes and dtypes, and slots that are not there. A slot may not occur twice, which is not checked.
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
            return composed::write_pages(self, key, value, slots);
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

/// Grouped-query attention of one token each to the positions that [`KeyValuePages`] hold: `softmax(scale * query key^T)
/// value` for each head.
///
/// `query` `[N, heads * head_dim]`, the heads side by side as a linear layer leaves them, of the dtype of the pages; `heads` is
/// a multiple of `kv_heads`, and query heads that lie side by side share a key head. Row i sees what `rows[i]` says, its own
/// position included, whose key and value are written before. The result is like `query`; on the CPU the bits of a row depend
/// on that row and what it sees, cut into spans as they are, and on nothing else. Arithmetic in f32. For inference: errs
/// on what is in a graph, other shapes and dtypes, a scale that is not positive and finite, and rows that see nothing or what
/// is not there.
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
        return composed::paged_attention_unchecked(query, pages, rows, scale);
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
    let (of_pages, kv_heads, _, head_dim) = pages.values.dims4()?;
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
            if span.page >= of_pages || span.len > PAGE {
                bail!(
                    "rows[{index}]: {} positions of page {}, must be at most {PAGE}, and the page below {of_pages}",
                    span.len,
                    span.page
                );
            }
            there += span.len;
        }
        if row.visible == 0 || row.visible > there {
            bail!(
                "rows[{index}]: sees {} positions, must be at least 1 and at most the {there} of its spans",
                row.visible
            );
        }
    }
    Ok(())
}

/// Writes rows to slots of pages, transposed or not.
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
        let (range, of_rows) = (cpu::range(layout)?, cpu::range(rows_layout)?);
        let &[_, kv_heads, a, b] = layout.dims() else {
            bail!(
                "the pages have shape {:?}, must be of four dimensions",
                layout.dims()
            );
        };
        let head_dim = a * b / PAGE;
        with_floats!(pages, "the pages", pages => {
            let rows = &WithDType::cpu_storage_as_slice(rows)?[of_rows];
            cpu::paged_attention::write(&mut pages[range], rows, self.slots, [kv_heads, head_dim], self.transposed);
        });
        Ok(())
    }
}

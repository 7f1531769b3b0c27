//! The composed twin of [`paged_attention`](crate::paged_attention()).

use candle_core::{Result, Tensor};

use crate::composed;
use crate::paged_attention::{self, KeyValuePages, PAGE, PageSlot, PagedRow};

/// [`paged_attention`](crate::paged_attention()) in plain Candle operations: what the rows see is copied into one rectangle.
pub fn paged_attention(
    query: &Tensor,
    pages: &KeyValuePages,
    rows: &[PagedRow],
    scale: f64,
) -> Result<Tensor> {
    paged_attention::check(query, pages, rows, scale)?;
    unchecked(&query.detach(), pages, rows, scale)
}

pub(crate) fn unchecked(
    query: &Tensor,
    pages: &KeyValuePages,
    rows: &[PagedRow],
    scale: f64,
) -> Result<Tensor> {
    if rows.is_empty() {
        return Ok(query.clone());
    }
    let (_, kv_heads, head_dim, _) = pages.keys().dims4()?;
    let longest = rows.iter().map(|row| row.visible).max().unwrap_or(0);
    // The pages in order, and what each row sees at the right end of a rectangle.
    let mut selected = Vec::new();
    let mut positions = vec![0u32; rows.len() * longest];
    let mut mask = vec![0u8; rows.len() * longest];
    for ((row, positions), mask) in rows
        .iter()
        .zip(positions.chunks_exact_mut(longest))
        .zip(mask.chunks_exact_mut(longest))
    {
        let mut next = longest - row.visible;
        mask[next..].fill(1);
        for span in row.spans {
            let first = (selected.len() * PAGE) as u32;
            selected.push(span.page as u32);
            let len = span.len.min(longest - next);
            for (offset, position) in positions[next..next + len].iter_mut().enumerate() {
                *position = first + offset as u32;
            }
            next += len;
        }
    }
    let device = query.device();
    let selected = Tensor::from_vec(selected.clone(), selected.len(), device)?;
    let positions = Tensor::from_vec(positions, rows.len() * longest, device)?;
    let mask = Tensor::from_vec(mask, (rows.len(), longest), device)?;
    let width = kv_heads * head_dim;
    let gather = |of_pages: &Tensor, to_rows: [usize; 4]| {
        of_pages
            .index_select(&selected, 0)?
            .permute(to_rows)?
            .contiguous()?
            .reshape(((), width))?
            .index_select(&positions, 0)
    };
    let key = gather(pages.keys(), [0, 3, 1, 2])?;
    let value = gather(pages.values(), [0, 2, 1, 3])?;
    composed::attention(query, &key, &value, &mask, head_dim, scale)
}

/// [`KeyValuePages::write`] in plain Candle operations.
pub(crate) fn write(
    pages: &KeyValuePages,
    key: &Tensor,
    value: &Tensor,
    slots: &[PageSlot],
) -> Result<()> {
    if slots.is_empty() {
        return Ok(());
    }
    let (_, kv_heads, head_dim, _) = pages.keys().dims4()?;
    let width = kv_heads * head_dim;
    let device = key.device();
    // Where each element goes: an offset of its slot, and one of its place in the row.
    let put = |of_pages: &Tensor, rows: &Tensor, position_stride: usize, element_stride: usize| {
        let of_slots: Vec<i64> = slots
            .iter()
            .map(|slot| (slot.page * width * PAGE + slot.position * position_stride) as i64)
            .collect();
        let of_elements: Vec<i64> = (0..width)
            .map(|i| (i / head_dim * head_dim * PAGE + i % head_dim * element_stride) as i64)
            .collect();
        let indexes = Tensor::from_vec(of_slots, (slots.len(), 1), device)?
            .broadcast_add(&Tensor::from_vec(of_elements, (1, width), device)?)?
            .flatten_all()?;
        of_pages
            .flatten_all()?
            .scatter_set(&indexes, &rows.flatten_all()?.contiguous()?, 0)
    };
    put(pages.keys(), key, 1, PAGE)?;
    put(pages.values(), value, head_dim, 1)
}

//! The composed twin of [`paged_attention`](crate::paged_attention()).

use candle_core::{Result, Tensor};

use super::{KeyValuePages, PAGE, PageSlot, PagedBatch, PagedRow};
use crate::Scores;
use crate::ops::attention;

/// [`paged_attention`](crate::paged_attention()) in plain Candle operations. Copies the visible
/// positions to one padded tensor.
pub fn paged_attention(
    query: &Tensor,
    pages: &KeyValuePages,
    batch: &PagedBatch,
    scores: impl Into<Scores>,
) -> Result<Tensor> {
    let scores = scores.into();
    let rows = super::check(query, pages, batch, &scores)?;
    unchecked(query, pages, rows, &scores)
}

pub(crate) fn unchecked(
    query: &Tensor,
    pages: &KeyValuePages,
    rows: &[PagedRow],
    scores: &Scores,
) -> Result<Tensor> {
    if rows.is_empty() {
        return Ok(query.clone());
    }
    let (_, kv_heads, _, head_dim) = pages.values().dims4()?;
    let longest = rows.iter().map(|row| row.visible).max().unwrap_or(0);
    // The pages in order, and each row's visible positions, padded on the left.
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
    let gather = |pages: &Tensor, is_transposed: bool| {
        let heads = pages.index_select(&selected, 0)?;
        let rows = if is_transposed {
            heads.permute((0, 3, 1, 2))?
        } else {
            heads.permute((0, 2, 1, 3))?
        };
        rows.contiguous()?
            .reshape(((), width))?
            .index_select(&positions, 0)
    };
    let key = gather(pages.keys(), pages.has_transposed_keys())?;
    let value = gather(pages.values(), false)?;
    attention::composed::attention(query, &key, &value, &mask, head_dim, *scores)
}

/// [`KeyValuePages::write`] in plain Candle operations, for keys that are not transposed.
pub(crate) fn write(
    pages: &KeyValuePages,
    key: &Tensor,
    value: &Tensor,
    slots: &[PageSlot],
) -> Result<()> {
    if slots.is_empty() {
        return Ok(());
    }
    let (_, kv_heads, _, head_dim) = pages.values().dims4()?;
    // Treats the pages as rows with one head each. Candle's kernel has one thread per column, which
    // writes all rows.
    let rows: Vec<i64> = slots
        .iter()
        .flat_map(|slot| {
            (0..kv_heads).map(|head| ((slot.page * kv_heads + head) * PAGE + slot.position) as i64)
        })
        .collect();
    let shape = (rows.len(), head_dim);
    let rows = Tensor::from_vec(rows, (shape.0, 1), key.device())?
        .broadcast_as(shape)?
        .contiguous()?;
    let put = |pages: &Tensor, x: &Tensor| {
        pages
            .flatten(0, 2)?
            .scatter_set(&rows, &x.contiguous()?.reshape(shape)?, 0)
    };
    put(pages.keys(), key)?;
    put(pages.values(), value)
}

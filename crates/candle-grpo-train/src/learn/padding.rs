//! Padding of token rows of unequal length.

use candle_core::{Device, Result, Tensor};

/// The padding token. Masks make its value irrelevant.
const PADDING: u32 = 0;

/// Returns `rows` as u32 `[rows, width]`, padded on the left.
pub(crate) fn left_padded(rows: &[&[u32]], width: usize, device: &Device) -> Result<Tensor> {
    rectangle(rows, width, device, |row| (width - row.len(), row.to_vec()))
}

/// Returns `rows` as u32 `[rows, width]`, padded on the right.
pub(crate) fn right_padded(rows: &[&[u32]], width: usize, device: &Device) -> Result<Tensor> {
    rectangle(rows, width, device, |row| (0, row.to_vec()))
}

/// Returns the mask of [`left_padded`]: 1 at tokens, else 0.
pub(crate) fn padding_mask(rows: &[&[u32]], width: usize, device: &Device) -> Result<Tensor> {
    rectangle(rows, width, device, |row| {
        (width - row.len(), vec![1; row.len()])
    })
}

/// Returns the mask of [`right_padded`]: 1 at tokens, else 0.
pub(crate) fn response_mask(rows: &[&[u32]], width: usize, device: &Device) -> Result<Tensor> {
    rectangle(rows, width, device, |row| (0, vec![1; row.len()]))
}

fn rectangle(
    rows: &[&[u32]],
    width: usize,
    device: &Device,
    place: impl Fn(&[u32]) -> (usize, Vec<u32>),
) -> Result<Tensor> {
    let mut cells = vec![PADDING; rows.len() * width];
    for (row, cells) in rows.iter().zip(cells.chunks_exact_mut(width)) {
        let (start, values) = place(row);
        cells[start..start + values.len()].copy_from_slice(&values);
    }
    Tensor::from_vec(cells, (rows.len(), width), device)
}

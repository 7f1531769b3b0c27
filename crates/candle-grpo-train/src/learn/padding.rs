//! Rows of tokens of unequal length as rectangles.

use candle_core::{Device, Result, Tensor};

/// Stands where there is no token. Any token would do: masks keep it from mattering.
const PADDING: u32 = 0;

/// `rows` as u32 `[rows, width]`, each at the right end.
pub(crate) fn left_padded(rows: &[&[u32]], width: usize, device: &Device) -> Result<Tensor> {
    rectangle(rows, width, device, |row| (width - row.len(), row.to_vec()))
}

/// `rows` as u32 `[rows, width]`, each at the left end.
pub(crate) fn right_padded(rows: &[&[u32]], width: usize, device: &Device) -> Result<Tensor> {
    rectangle(rows, width, device, |row| (0, row.to_vec()))
}

/// 1 where [`left_padded`] has a token, else 0.
pub(crate) fn padding_mask(rows: &[&[u32]], width: usize, device: &Device) -> Result<Tensor> {
    rectangle(rows, width, device, |row| {
        (width - row.len(), vec![1; row.len()])
    })
}

/// 1 where [`right_padded`] has a token, else 0.
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

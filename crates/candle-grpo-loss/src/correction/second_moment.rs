//! Selects tokens so that their log-ratios have a bounded second moment.

use candle_core::{DType, Result, Tensor};
use candle_grpo_core::Mask;

/// Drops as few tokens as possible, those with the largest `d^2` first, until the others' mean
/// `d^2` is below `threshold` (M2PO, <https://arxiv.org/abs/2510.01161>). Returns the kept tokens: u8
/// `[B, T]`.
///
/// One token always stays. Copies `d` to the host, which synchronizes with the device.
pub(super) fn below(threshold: f64, d: &Tensor, mask: &Mask) -> Result<Tensor> {
    let squares = d.sqr()?.flatten_all()?.to_dtype(DType::F64)?;
    let squares = squares.to_vec1::<f64>()?;
    let flags = mask.selected().flatten_all()?.to_vec1::<u8>()?;
    let mut places: Vec<usize> = (0..flags.len()).filter(|&i| flags[i] != 0).collect();
    // NaN sorts above every number.
    places.sort_by(|&a, &b| squares[a].total_cmp(&squares[b]));
    let mut sum = 0.;
    let mut stays = 0;
    // The mean over the n smallest squares grows with n.
    for (count, &place) in places.iter().enumerate() {
        sum += squares[place];
        if sum / (count as f64 + 1.) < threshold {
            stays = count + 1;
        }
    }
    let mut kept = vec![0u8; flags.len()];
    for &place in places.iter().take(stays.max(1)) {
        kept[place] = 1;
    }
    Tensor::from_vec(kept, mask.dims()?, mask.selected().device())
}

//! Largest entries per row.

use candle_core::{D, DType, Result, Tensor, bail};
use rayon::prelude::*;

/// Returns the indices of the k largest entries in each row of `[.., V]`, the largest first: u32
/// `[.., K]`, where K is the smaller of k and V. Ties come in order. NaN is the smallest. There is
/// no gradient.
///
/// Rows are read on the host: on a GPU this copies `x` and synchronizes.
///
/// # Errors
///
/// If k or V is 0, or `x` is a scalar.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::top_k;
///
/// let x = Tensor::new(&[[1f32, 3., 2., 3.]], &Device::Cpu)?;
/// assert_eq!(top_k(&x, 3)?.to_vec2::<u32>()?, [[1, 3, 2]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn top_k(x: &Tensor, k: usize) -> Result<Tensor> {
    let Some(&width) = x.dims().last().filter(|&&width| width > 0 && k > 0) else {
        bail!(
            "top_k: k {k} of shape {:?}, must be at least 1 of [.., V]",
            x.dims()
        );
    };
    let k = k.min(width);
    let mut shape = x.dims().to_vec();
    shape[x.rank() - 1] = k;
    let rows = x.detach().flatten_to(D::Minus1)?;
    let places = match x.dtype() {
        DType::F64 => places(&rows.to_vec1::<f64>()?, width, k),
        _ => places(&rows.to_dtype(DType::F32)?.to_vec1::<f32>()?, width, k),
    };
    Tensor::from_vec(places, shape, x.device())
}

fn places<T: Copy + PartialOrd + Send + Sync>(rows: &[T], width: usize, k: usize) -> Vec<u32> {
    let mut places = vec![0; rows.len() / width * k];
    places
        .par_chunks_mut(k)
        .zip(rows.par_chunks(width))
        .for_each(|(places, row)| largest(row, places));
    places
}

/// Sets `places` to the largest entries in `row`, which must have at least as many.
fn largest<T: Copy + PartialOrd>(row: &[T], places: &mut [u32]) {
    let is_nan = |x: &T| x.partial_cmp(x).is_none();
    let is_larger = |a: &T, b: &T| a > b || is_nan(b) && !is_nan(a);
    // The largest entries so far, in order. Few entries in a row get this far.
    let mut found: Vec<(T, u32)> = Vec::with_capacity(places.len() + 1);
    for (place, entry) in (0u32..).zip(row) {
        if found.len() == places.len() && !is_larger(entry, &found[places.len() - 1].0) {
            continue;
        }
        let at = found.partition_point(|(other, _)| !is_larger(entry, other));
        found.insert(at, (*entry, place));
        found.truncate(places.len());
    }
    for (place, (_, found)) in places.iter_mut().zip(found) {
        *place = found;
    }
}

//! The CPU path of [`linear_rows`](crate::linear_rows()).
//!
//! Each result is one chain of multiply-adds, so its bits depend only on two rows.

use candle_core::{Result, Tensor};

use crate::cpu::element::Element;
use crate::cpu::matmul::{Product, run};
use crate::cpu::matrix::Matrix;
use crate::cpu::panel::{Columns, Panels, WeightRows};
use crate::cpu::slice;
use crate::cpu::word::Numbers;

/// Multiplies `x` `[N, inputs]` by each weight `[outputs, inputs]`, dense or in blocks, all
/// contiguous and optionally with panels. Returns the concatenated results `[N, outputs]`.
pub(crate) fn forward<T: Element>(
    x: &Tensor,
    weights: &[(Tensor, Option<&Panels>)],
) -> Result<Vec<T>> {
    let (rows, inputs) = x.dims2()?;
    let storages = weights
        .iter()
        .map(|(weight, _)| weight.storage_and_layout());
    let held: Vec<_> = storages.collect();
    let weights = held
        .iter()
        .zip(weights)
        .map(|((storage, layout), (weight, panels))| {
            WeightRows::<T>::new(storage, layout, weight, inputs, *panels)
        })
        .collect::<Result<Vec<_>>>()?;
    let outputs: usize = weights.iter().map(WeightRows::len).sum();
    slice::read::<T, _>(x, |x| {
        let mut wide = Vec::new();
        let x = Matrix::of(Numbers::of(x, &mut wide), rows, inputs, inputs);
        let mut results = vec![0.0; rows * outputs];
        let mut rest = &mut *results;
        let mut products = Vec::with_capacity(weights.len());
        for weight in weights {
            let outputs = weight.len();
            let (target, after) = std::mem::take(&mut rest).split_at_mut(rows * outputs);
            rest = after;
            products.push(Product::new(target, outputs, false, x, weight));
        }
        run(&products, true);
        drop(products);
        Ok(T::rounded(results))
    })
}

//! The composed twin of [`causal_conv`](crate::causal_conv()).

use candle_core::{Result, Tensor};

use super::check;
use crate::PrefixTree;
use crate::precision::arithmetic_dtype;

/// [`causal_conv`](crate::causal_conv()) in plain Candle operations.
pub fn causal_conv(x: &Tensor, weight: &Tensor, tree: &PrefixTree) -> Result<Tensor> {
    check(x, weight, tree)?;
    unchecked(x, weight, tree)
}

pub(crate) fn unchecked(x: &Tensor, weight: &Tensor, tree: &PrefixTree) -> Result<Tensor> {
    let wide = arithmetic_dtype(x.dtype());
    let (rows, weight) = (x.to_dtype(wide)?.contiguous()?, weight.to_dtype(wide)?);
    let taps = weight.dim(1)?;
    let mut selected: Vec<u32> = (0..tree.rows() as u32).collect();
    let mut sum = rows.broadcast_mul(&weight.narrow(1, taps - 1, 1)?.t()?)?;
    for tap in (0..taps - 1).rev() {
        for row in &mut selected {
            // The row before none is none. Candle selects zeros for it.
            *row = tree
                .before()
                .get(*row as usize)
                .copied()
                .unwrap_or(PrefixTree::NONE);
        }
        let rows = rows.index_select(&Tensor::new(&*selected, x.device())?, 0)?;
        sum = (sum + rows.broadcast_mul(&weight.narrow(1, tap, 1)?.t()?)?)?;
    }
    sum.silu()?.to_dtype(x.dtype())
}

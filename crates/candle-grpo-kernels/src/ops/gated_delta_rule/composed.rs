//! The composed twin of [`gated_delta_rule`](crate::gated_delta_rule()).

use candle_core::{D, DType, Device, Result, Tensor};

use super::{NORM_EPSILON, check};
use crate::precision::arithmetic_dtype;
use crate::{DeltaHeads, PrefixTree};

/// Rows per chunk.
const CHUNK: usize = 64;

/// [`gated_delta_rule`](crate::gated_delta_rule()) in plain Candle operations, in chunks of rows.
pub fn gated_delta_rule(
    qkv: &Tensor,
    g: &Tensor,
    beta: &Tensor,
    heads: DeltaHeads,
    tree: &PrefixTree,
) -> Result<Tensor> {
    check(qkv, g, beta, heads)?;
    tree.check_rows("qkv", qkv.dim(0)?)?;
    unchecked([qkv, g, beta], heads, tree)
}

pub(crate) fn unchecked(
    [qkv, g, beta]: [&Tensor; 3],
    heads: DeltaHeads,
    tree: &PrefixTree,
) -> Result<Tensor> {
    let wide = arithmetic_dtype(qkv.dtype());
    let state = Tensor::zeros(
        (heads.value_heads, heads.key_dim, heads.value_dim),
        wide,
        qkv.device(),
    )?;
    let masks = Masks::new(CHUNK, wide, qkv.device())?;
    let inputs = Rows::new(qkv, g, beta, heads)?;
    let mut results = Vec::new();
    let mut states: Vec<Tensor> = Vec::new();
    for segment in tree.segments() {
        let mut state = match segment.parent {
            Some(parent) => states[parent].clone(),
            None => state.clone(),
        };
        for first in segment.rows.clone().step_by(CHUNK) {
            let rows = CHUNK.min(segment.rows.end - first);
            let (o, next) = inputs
                .narrow(first, rows)?
                .chunk(&masks.narrow(rows)?, &state)?;
            results.push(o);
            state = next;
        }
        states.push(state);
    }
    Tensor::cat(&results, 0)?.to_dtype(qkv.dtype())
}

/// Rows in the arithmetic dtype, with the value heads first.
pub(crate) struct Rows {
    /// `[value_heads, N, key_dim]`, normalized to length `1 / sqrt(key_dim)`.
    query: Tensor,
    /// `[value_heads, N, key_dim]`, normalized to length 1.
    key: Tensor,
    /// `[value_heads, N, value_dim]`
    value: Tensor,
    /// `[value_heads, N]`
    g: Tensor,
    /// `[value_heads, N, 1]`
    beta: Tensor,
}

impl Rows {
    pub(crate) fn new(qkv: &Tensor, g: &Tensor, beta: &Tensor, heads: DeltaHeads) -> Result<Self> {
        let rows = qkv.dim(0)?;
        let (keys, dim) = (heads.keys(), heads.key_dim);
        let qkv = qkv.to_dtype(arithmetic_dtype(qkv.dtype()))?;
        // A key head is repeated for its value heads.
        let unit = |first: usize| {
            let x = qkv
                .narrow(1, first, keys)?
                .reshape((rows, heads.key_heads, 1, dim))?;
            let squares = (x.sqr()?.sum_keepdim(D::Minus1)? + NORM_EPSILON)?;
            x.broadcast_div(&squares.sqrt()?)?
                .broadcast_as((rows, heads.key_heads, heads.group(), dim))?
                .reshape((rows, heads.value_heads, dim))?
                .transpose(0, 1)?
                .contiguous()
        };
        Ok(Self {
            query: (unit(0)? / (dim as f64).sqrt())?,
            key: unit(keys)?,
            value: qkv
                .narrow(1, 2 * keys, heads.values())?
                .reshape((rows, heads.value_heads, heads.value_dim))?
                .transpose(0, 1)?
                .contiguous()?,
            g: g.t()?.contiguous()?,
            beta: beta.t()?.unsqueeze(2)?.contiguous()?,
        })
    }

    /// Returns the result `[1, value_heads * value_dim]` for one row, and the state after it.
    pub(crate) fn row(&self, row: usize, state: &Tensor) -> Result<(Tensor, Tensor)> {
        let row = self.narrow(row, 1)?;
        let state = state.broadcast_mul(&row.g.exp()?.unsqueeze(2)?)?;
        let change = (&row.value - row.key.matmul(&state)?)?.broadcast_mul(&row.beta)?;
        let state = (state + row.key.t()?.contiguous()?.matmul(&change)?)?;
        Ok((row.query.matmul(&state)?.reshape((1, ()))?, state))
    }

    fn narrow(&self, first: usize, rows: usize) -> Result<Self> {
        let narrow = |x: &Tensor| x.narrow(1, first, rows)?.contiguous();
        Ok(Self {
            query: narrow(&self.query)?,
            key: narrow(&self.key)?,
            value: narrow(&self.value)?,
            g: narrow(&self.g)?,
            beta: narrow(&self.beta)?,
        })
    }

    /// Returns the result `[rows, value_heads * value_dim]` for a chunk, and the state after it.
    fn chunk(&self, masks: &Masks, state: &Tensor) -> Result<(Tensor, Tensor)> {
        let (heads, rows) = self.g.dims2()?;
        let total = self.g.cumsum(1)?;
        let decay = total.exp()?.unsqueeze(2)?;
        // exp(c_i - c_j) for i >= j. The mask comes first, because other entries may overflow.
        let between = total
            .unsqueeze(2)?
            .broadcast_sub(&total.unsqueeze(1)?)?
            .broadcast_mul(&masks.lower)?
            .exp()?
            .broadcast_mul(&masks.lower)?;
        let transposed = self.key.t()?;
        let mixing = (self.query.matmul(&transposed)? * &between)?;
        let system = (self.key.matmul(&transposed)? * &between)?.broadcast_mul(&self.beta)?;
        // The prediction errors, each without the changes from earlier rows.
        let predicted = self.key.broadcast_mul(&decay)?.matmul(state)?;
        let errors = (&self.value - predicted)?.broadcast_mul(&self.beta)?;
        let changes = masks.inverse(&system)?.matmul(&errors)?;
        let of_state = self.query.broadcast_mul(&decay)?.matmul(state)?;
        let o = (of_state + mixing.matmul(&changes)?)?;

        let last = total.narrow(1, rows - 1, 1)?;
        let rest = last.broadcast_sub(&total)?.exp()?.unsqueeze(2)?;
        let written = self
            .key
            .broadcast_mul(&rest)?
            .t()?
            .contiguous()?
            .matmul(&changes)?;
        let state = (state.broadcast_mul(&last.exp()?.unsqueeze(2)?)? + written)?;
        let o = o
            .transpose(0, 1)?
            .contiguous()?
            .reshape((rows, heads * self.value.dim(2)?))?;
        Ok((o, state))
    }
}

/// 0/1 matrices over a chunk's rows and columns.
struct Masks {
    /// The diagonal and below.
    lower: Tensor,
    diagonal: Tensor,
    /// For each size 1, 2, 4 .., the lower left quarters of blocks twice that size.
    quarters: Vec<Tensor>,
}

impl Masks {
    fn new(rows: usize, dtype: DType, device: &Device) -> Result<Self> {
        let matrix = |holds: &dyn Fn(usize, usize) -> bool| {
            let entries = (0..rows * rows).map(|at| u8::from(holds(at / rows, at % rows)));
            Tensor::from_iter(entries, device)?
                .reshape((rows, rows))?
                .to_dtype(dtype)
        };
        let mut quarters = Vec::new();
        let mut size = 1;
        while size < rows {
            quarters.push(matrix(&|i, j| {
                i / (2 * size) == j / (2 * size) && i / size > j / size
            })?);
            size *= 2;
        }
        Ok(Self {
            lower: matrix(&|i, j| i >= j)?,
            diagonal: matrix(&|i, j| i == j)?,
            quarters,
        })
    }

    fn narrow(&self, rows: usize) -> Result<Self> {
        let narrow = |x: &Tensor| x.narrow(0, 0, rows)?.narrow(1, 0, rows)?.contiguous();
        let sizes = rows.next_power_of_two().ilog2() as usize;
        Ok(Self {
            lower: narrow(&self.lower)?,
            diagonal: narrow(&self.diagonal)?,
            quarters: self.quarters[..sizes]
                .iter()
                .map(narrow)
                .collect::<Result<_>>()?,
        })
    }

    /// Inverts a lower triangular matrix with ones on the diagonal and the entries of `system`
    /// `[heads, rows, rows]` below it. A block's inverse follows from its quarters: `-D^-1 C A^-1`
    /// is below `A^-1` and `D^-1`.
    fn inverse(&self, system: &Tensor) -> Result<Tensor> {
        let mut inverse = self.diagonal.broadcast_as(system.shape())?.contiguous()?;
        for quarters in &self.quarters {
            let below = inverse
                .matmul(&system.broadcast_mul(quarters)?)?
                .matmul(&inverse)?;
            inverse = (inverse - below)?;
        }
        Ok(inverse)
    }
}

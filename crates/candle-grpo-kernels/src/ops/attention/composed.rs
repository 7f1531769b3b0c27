//! The composed twin of [`attention`](crate::attention()).

use candle_core::{D, DType, Result, Tensor};

use super::{Sequences, Sizes};
use crate::precision::arithmetic_dtype;
use crate::{Scores, check, soft_cap};

/// [`attention`](crate::attention()) in plain Candle operations. Stores the score matrix.
pub fn attention<'a>(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: impl Into<Sequences<'a>>,
    head_dim: usize,
    scores: impl Into<Scores>,
) -> Result<Tensor> {
    let (sequences, scores) = (sequences.into(), scores.into());
    let sizes = Sizes::new(query, key, value, sequences, head_dim, &scores)?;
    unchecked(query, key, value, sequences, &sizes, &scores)
}

pub(crate) fn unchecked(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    sequences: Sequences,
    sizes: &Sizes,
    scores: &Scores,
) -> Result<Tensor> {
    match sequences {
        Sequences::Padded(mask) => padded(query, key, value, mask, sizes, scores),
        Sequences::Packed(lengths) => {
            let ends: Vec<_> = lengths.iter().map(|&length| (length, length)).collect();
            concatenated(query, key, value, &ends, sizes, scores)
        }
        Sequences::Continued(ends) => concatenated(query, key, value, ends, sizes, scores),
    }
}

/// Processes one sequence after another.
fn concatenated(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    ends: &[(usize, usize)],
    sizes: &Sizes,
    scores: &Scores,
) -> Result<Tensor> {
    let flat = |x: &Tensor| x.reshape(((), x.dim(D::Minus1)?));
    let (query_rows, key_rows, value_rows) = (flat(query)?, flat(key)?, flat(value)?);
    let (mut first_query, mut first_key) = (0, 0);
    let mut mixed = Vec::with_capacity(ends.len());
    for &(new, total) in ends {
        let all = Tensor::ones((1, total), DType::U8, query.device())?;
        let sizes = Sizes {
            batch: 1,
            new,
            total,
            ..*sizes
        };
        mixed.push(padded(
            &query_rows.narrow(0, first_query, new)?,
            &key_rows.narrow(0, first_key, total)?,
            &value_rows.narrow(0, first_key, total)?,
            &all,
            &sizes,
            scores,
        )?);
        first_query += new;
        first_key += total;
    }
    Tensor::cat(&mixed, 0)?.reshape(query.shape())
}

fn padded(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: &Tensor,
    sizes: &Sizes,
    scores: &Scores,
) -> Result<Tensor> {
    let &Sizes {
        batch,
        new,
        total,
        kv_heads,
        group,
        head_dim,
    } = sizes;
    if query.elem_count() == 0 {
        return Ok(query.clone());
    }
    let wide = arithmetic_dtype(query.dtype());
    let real = check::mask(mask, mask.dims())?.reshape((batch, total))?;
    let past = total - new;
    let real_queries = real.narrow(1, past, new)?;
    // [B, positions, ..], zeroed at padding, so that NaN there has no effect.
    let clean = |x: &Tensor, real: &Tensor| {
        let x = x.reshape((batch, real.dim(1)?, ()))?.to_dtype(wide)?;
        real.unsqueeze(2)?
            .broadcast_as(x.shape())?
            .where_cond(&x, &x.zeros_like()?)
    };
    // [B, kv_heads, positions for all heads in a group, head_dim]
    let split = |x: Tensor, positions: usize, group: usize| {
        x.reshape((batch, positions, kv_heads * group, head_dim))?
            .transpose(1, 2)?
            .contiguous()?
            .reshape((batch, kv_heads, group * positions, head_dim))
    };
    let query_rows = split(clean(query, &real_queries)?, new, group)?;
    let key_rows = split(clean(key, &real)?, total, 1)?;
    let value_rows = split(clean(value, &real)?, total, 1)?;

    let device = query.device();
    let positions = Tensor::arange(0, total as u32, device)?.reshape((1, total))?;
    let own = Tensor::arange(past as u32, total as u32, device)?.reshape((new, 1))?;
    let mut causal = positions.broadcast_le(&own)?.to_dtype(DType::U8)?;
    if let Some(window) = scores.window {
        // Not wider than the row, so that the sum fits in 32 bits.
        let end = positions.broadcast_add(&Tensor::new(window.min(total) as u32, device)?)?;
        causal = (causal * end.broadcast_gt(&own)?.to_dtype(DType::U8)?)?;
    }
    let visible = real
        .reshape((batch, 1, 1, total))?
        .broadcast_mul(&causal.reshape((1, 1, new, total))?)?;

    let Scores { scale, cap, .. } = *scores;
    let scores = (query_rows.matmul(&key_rows.t()?)? * scale)?.reshape((
        batch,
        kv_heads * group,
        new,
        total,
    ))?;
    let scores = soft_cap(&scores, cap)?;
    // Finite, so that a padded query without visible positions does not give NaN.
    let hidden = Tensor::new(-1e30f32, device)?
        .to_dtype(wide)?
        .broadcast_as(scores.shape())?;
    let scores = visible
        .broadcast_as(scores.shape())?
        .where_cond(&scores, &hidden)?;
    let weights = softmax(&scores)?.reshape((batch, kv_heads, group * new, total))?;
    let mixed = weights
        .matmul(&value_rows)?
        .reshape((batch, kv_heads * group, new, head_dim))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape((batch, new, ()))?;
    clean(&mixed, &real_queries)?
        .reshape(query.shape())?
        .to_dtype(query.dtype())
}

pub(crate) fn softmax(scores: &Tensor) -> Result<Tensor> {
    let largest = scores.detach().max_keepdim(D::Minus1)?;
    let weights = scores.broadcast_sub(&largest)?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)
}

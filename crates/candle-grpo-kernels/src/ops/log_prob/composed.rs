//! The composed twin of [`log_prob`](crate::log_prob).

use candle_core::{D, Result, Tensor};

use super::{Arguments, LogProbOptions, Rows, TokenLogProbs};
use crate::precision::arithmetic_dtype;
use crate::soft_cap;

/// [`log_prob`](crate::log_prob) in plain Candle operations. Never overwrites the logits.
pub fn log_prob(
    logits: &Tensor,
    targets: &Tensor,
    temperature: f64,
    options: LogProbOptions,
) -> Result<TokenLogProbs> {
    unchecked(&Arguments::new(logits, targets, temperature, options)?)
}

pub(crate) fn unchecked(arguments: &Arguments) -> Result<TokenLogProbs> {
    let z = arguments
        .logits
        .to_dtype(arithmetic_dtype(arguments.logits.dtype()))?;
    if z.elem_count() == 0 {
        // Candle cannot take the maximum of an empty tensor. The sum keeps the graph.
        let none = z.sum(D::Minus1)?.reshape(arguments.outer.as_slice())?;
        return Ok(TokenLogProbs {
            log_probs: none.clone(),
            entropy: none.clone(),
            log_sum_exp: none,
        });
    }
    let Rows { targets, mask, .. } = &arguments.rows;
    let z = z.reshape((targets.elem_count(), z.dim(D::Minus1)?))?;
    let (z, targets) = match mask {
        None => (z, targets.clone()),
        // A masked row must not reach the arithmetic: 0 times NaN is NaN.
        Some(mask) => (
            mask.unsqueeze(1)?
                .broadcast_as(z.shape())?
                .where_cond(&z, &z.zeros_like()?)?,
            mask.where_cond(targets, &targets.zeros_like()?)?,
        ),
    };
    let z = soft_cap(&z, arguments.rows.logit_cap)?;
    let z = (z / arguments.temperature)?;
    // Relative to the largest logit, to avoid overflow.
    let largest = z.detach().max_keepdim(D::Minus1)?;
    let weights = z.broadcast_sub(&largest)?.exp()?;
    let total = weights.sum_keepdim(D::Minus1)?;
    let log_sum_exp = (total.log()? + &largest)?;
    let target_logits = z.gather(&targets.unsqueeze(1)?, D::Minus1)?;
    let inside = z.detach().ne(f64::NEG_INFINITY)?;
    let finite_z = inside.where_cond(&z, &z.zeros_like()?)?;
    let mean_logit = ((weights * finite_z)?.sum_keepdim(D::Minus1)? / &total)?;
    let finish = |x: Tensor| {
        let x = x.squeeze(1)?;
        let x = match mask {
            None => x,
            Some(mask) => mask.where_cond(&x, &x.zeros_like()?)?,
        };
        x.reshape(arguments.outer.as_slice())
    };
    Ok(TokenLogProbs {
        log_probs: finish((target_logits - &log_sum_exp)?)?,
        entropy: finish((&log_sum_exp - mean_logit)?)?,
        log_sum_exp: finish(log_sum_exp)?,
    })
}

//! The composed twin of [`linear_log_prob`](crate::linear_log_prob).

use candle_core::{D, Result, Tensor};

use super::Arguments;
use crate::ops::log_prob::{self, LogProbOptions, TokenLogProbs};
use crate::precision::arithmetic_dtype;

/// [`linear_log_prob`](crate::linear_log_prob) in plain Candle operations. Stores the logits.
pub fn linear_log_prob(
    hidden: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    temperature: f64,
    options: LogProbOptions,
) -> Result<TokenLogProbs> {
    unchecked(Arguments::new(
        hidden,
        weight,
        bias,
        targets,
        temperature,
        options,
    )?)
}

pub(crate) fn unchecked(arguments: Arguments) -> Result<TokenLogProbs> {
    let Arguments {
        hidden,
        weight,
        bias,
        rows,
        temperature,
        outer,
    } = arguments;
    let dtype = arithmetic_dtype(hidden.dtype());
    if hidden.elem_count() == 0 {
        // Candle's product of empty tensors has no graph, so zero gradients need another path.
        let mut parts = vec![hidden.to_dtype(dtype)?.sum(D::Minus1)?.flatten_all()?];
        parts.push(weight.to_dtype(dtype)?.narrow(0, 0, 0)?.sum(1)?);
        if let Some(bias) = bias {
            parts.push(bias.to_dtype(dtype)?.narrow(0, 0, 0)?);
        }
        let none = Tensor::cat(&parts, 0)?;
        let none = none.reshape(outer)?;
        return Ok(TokenLogProbs {
            log_probs: none.clone(),
            entropy: none.clone(),
            log_sum_exp: none,
        });
    }
    let hidden = hidden.reshape((rows.targets.elem_count(), hidden.dim(D::Minus1)?))?;
    let hidden = match &rows.mask {
        None => hidden,
        // A masked row must not reach the weight gradient: 0 times NaN is NaN.
        Some(mask) => mask
            .unsqueeze(1)?
            .broadcast_as(hidden.shape())?
            .where_cond(&hidden, &hidden.zeros_like()?)?,
    };
    let logits = hidden
        .to_dtype(dtype)?
        .matmul(&weight.to_dtype(dtype)?.t()?)?;
    let logits = match bias {
        None => logits,
        Some(bias) => logits.broadcast_add(&bias.to_dtype(dtype)?)?,
    };
    log_prob::composed::unchecked(&log_prob::Arguments {
        logits,
        rows,
        temperature,
        outer,
    })
}

//! Log-softmax along the last dimension.

use candle_core::{D, DType, Result, Tensor};
use candle_grpo_core::validate::{Checked, check};
use candle_grpo_kernels::{LogProbOptions, TEMPERATURES, TokenLogProbs, log_prob};

/// Checks a softmax temperature.
pub(crate) fn check_temperature(value: f64) -> Checked {
    let valid = TEMPERATURES.contains(&value);
    check(
        valid,
        "temperature",
        format_args!("{value:?}"),
        "be from 1e-6 to 1e6",
    )
}

/// Computes `x - log sum exp(x)`. Entries that are minus infinity stay; at least one entry must be
/// finite.
pub(crate) fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let total = statistics(x, None)?.log_sum_exp;
    x.broadcast_sub(&total.unsqueeze(D::Minus1)?)
}

/// Computes `log sum exp(x)` and keeps the last dimension with size 1. If no entry is finite, the
/// result is minus infinity, without a gradient.
pub(crate) fn log_sum_exp(x: &Tensor) -> Result<Tensor> {
    let some = x.detach().max(D::Minus1)?.gt(f64::NEG_INFINITY)?;
    let total = statistics(x, Some(&some))?.log_sum_exp;
    let none = (total.zeros_like()? + f64::NEG_INFINITY)?;
    some.where_cond(&total, &none)?.unsqueeze(D::Minus1)
}

/// Computes `log(exp(a) + exp(b))` for two tensors with the same shape. Where both are minus
/// infinity, so is the result, without a gradient.
pub(crate) fn log_add_exp(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let larger = a.detach().maximum(&b.detach())?;
    let none = larger.eq(f64::NEG_INFINITY)?;
    let shift = none.where_cond(&larger.zeros_like()?, &larger)?;
    let sum = ((a - &shift)?.exp()? + (b - &shift)?.exp()?)?;
    let sum = none.where_cond(&sum.ones_like()?, &sum)?;
    none.where_cond(&larger, &(sum.log()? + &shift)?)
}

/// Computes each row's entropy and log-sum-exp, 0 where `mask` is 0.
pub(crate) fn statistics(x: &Tensor, mask: Option<&Tensor>) -> Result<TokenLogProbs> {
    let outer = &x.dims()[..x.rank() - 1];
    let targets = Tensor::zeros(outer, DType::U32, x.device())?;
    let options = LogProbOptions {
        mask,
        ..LogProbOptions::default()
    };
    log_prob(x, &targets, 1., options)
}

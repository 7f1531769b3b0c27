//! Log-probs of tokens from logits.

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_grpo_core::result_dtype;

use crate::limits::check_positive;

/// What [`token_log_probs`] says of each position, all differentiable, in f32 (f64 for f64 logits).
#[derive(Debug, Clone)]
pub struct TokenLogProbs {
    /// The log-probability of the target, of the shape of the targets.
    pub log_probs: Tensor,
    /// The entropy of the distribution in nats, of the same shape.
    pub entropy: Tensor,
    /// The logarithm of the sum of `exp(logits / temperature)`, of the same shape.
    pub log_sum_exp: Tensor,
}

/// Log-probs of `targets` under `softmax(logits / temperature)`, with the entropy of that distribution.
///
/// `logits` `[.., V]` of any float dtype, `targets` integers `[..]` below V. `temperature` is that of sampling: it must
/// be the same here, or the ratio of new to old policy starts away from 1. Entries of minus infinity are outside the
/// distribution: probability 0, no part in the entropy, gradient 0.
///
/// Errs on other shapes and dtypes, a temperature that is not positive and finite, and targets that are out of range
/// (checked on the CPU; on a GPU that would be a transfer, so it is up to the caller there).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_loss::token_log_probs;
///
/// let logits = Tensor::new(&[[0f32, 0., 0., 0.], [0., 0., f32::NEG_INFINITY, f32::NEG_INFINITY]], &Device::Cpu)?;
/// let targets = Tensor::new(&[2u32, 1], &Device::Cpu)?;
/// let tokens = token_log_probs(&logits, &targets, 1.0)?;
/// let log_probs = tokens.log_probs.to_vec1::<f32>()?;
/// assert!((log_probs[0] - 0.25f32.ln()).abs() < 1e-6 && (log_probs[1] - 0.5f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn token_log_probs(
    logits: &Tensor,
    targets: &Tensor,
    temperature: f64,
) -> Result<TokenLogProbs> {
    check_positive("temperature", temperature)?;
    let targets = check_targets(logits, targets)?;
    let dtype = result_dtype(logits.dtype());
    let z = (logits.to_dtype(dtype)? / temperature)?;
    let Weights {
        weights,
        total,
        largest,
    } = Weights::of(&z)?;
    let log_sum_exp = (total.log()? + &largest)?;
    let target_logits = z.gather(&targets.unsqueeze(D::Minus1)?, D::Minus1)?;
    let inside = z.detach().ne(f64::NEG_INFINITY)?;
    let finite_z = inside.where_cond(&z, &z.zeros_like()?)?;
    let mean_logit = ((weights * finite_z)?.sum_keepdim(D::Minus1)? / &total)?;
    Ok(TokenLogProbs {
        log_probs: (target_logits - &log_sum_exp)?.squeeze(D::Minus1)?,
        entropy: (&log_sum_exp - mean_logit)?.squeeze(D::Minus1)?,
        log_sum_exp: log_sum_exp.squeeze(D::Minus1)?,
    })
}

/// The sum over the vocabulary of the squared probabilities of `softmax(logits / temperature)`: `[.., V]` to `[..]`.
/// The optimal token baseline needs it.
pub fn sum_of_squared_probs(logits: &Tensor, temperature: f64) -> Result<Tensor> {
    check_positive("temperature", temperature)?;
    if logits.rank() == 0 || logits.elem_count() == 0 {
        bail!("logits: shape {:?}, must be [.., V]", logits.dims());
    }
    let z = (logits.to_dtype(result_dtype(logits.dtype()))? / temperature)?;
    let Weights { weights, total, .. } = Weights::of(&z)?;
    weights.broadcast_div(&total)?.sqr()?.sum(D::Minus1)
}

/// The softmax before it is divided by its sum, relative to the largest logit so that nothing overflows.
struct Weights {
    weights: Tensor,
    total: Tensor,
    largest: Tensor,
}

impl Weights {
    fn of(z: &Tensor) -> Result<Self> {
        let largest = z.detach().max_keepdim(D::Minus1)?;
        let weights = z.broadcast_sub(&largest)?.exp()?;
        Ok(Self {
            total: weights.sum_keepdim(D::Minus1)?,
            weights,
            largest,
        })
    }
}

fn check_targets(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let Some((&vocab, outer)) = logits.dims().split_last() else {
        bail!("logits: a scalar, must be [.., V]");
    };
    if !logits.dtype().is_float() {
        bail!("logits: {:?}, must be of a float dtype", logits.dtype());
    }
    if !targets.dtype().is_int() {
        bail!(
            "targets: {:?}, must be of an integer dtype",
            targets.dtype()
        );
    }
    if targets.dims() != outer {
        bail!(
            "targets: shape {:?}, must be that of logits without the last dimension, {outer:?}",
            targets.dims()
        );
    }
    if logits.elem_count() == 0 {
        bail!("logits: shape {:?} is empty", logits.dims());
    }
    if matches!(targets.device(), Device::Cpu) {
        let ids = targets
            .flatten_all()?
            .to_dtype(DType::I64)?
            .to_vec1::<i64>()?;
        if let Some(id) = ids.iter().find(|&&id| id < 0 || id >= vocab as i64) {
            bail!("targets: token id {id} is out of range for logits of {vocab} tokens");
        }
    }
    if targets.dtype() == DType::U32 || targets.dtype() == DType::I64 {
        targets.contiguous()
    } else {
        targets.to_dtype(DType::U32)?.contiguous()
    }
}

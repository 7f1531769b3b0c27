//! Discounted returns and generalized advantage estimation.

use candle_core::{D, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::mask::Mask;

/// Treatment for tokens that the policy did not generate, such as tool output between two turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MaskedTokens {
    /// They are not time steps: discounts and values pass from one masked-in token to the next
    /// (verl, twinkle). The default.
    #[default]
    Skipped,
    /// Each is a time step with reward 0 and value 0 (OpenRLHF, ROLL).
    Counted,
}

/// Computes `y[.., t] = input[.., t] + factor[.., t] * y[.., t + 1]` along the last dimension, with
/// 0 after the last position.
///
/// Discounted returns, generalized advantages and sums over token runs have this form. The scan
/// doubles its width in each pass, so it needs log2(T) passes instead of T. Differentiable.
///
/// # Errors
///
/// Fails if the shapes of `input` and `factor` differ.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::advantage::reverse_recurrence;
///
/// let rewards = Tensor::new(&[[0f32, 0., 1.]], &Device::Cpu)?;
/// let discount = Tensor::full(0.5f32, (1, 3), &Device::Cpu)?;
/// let returns = reverse_recurrence(&rewards, &discount)?;
/// assert_eq!(returns.to_vec2::<f32>()?, [[0.25, 0.5, 1.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reverse_recurrence(input: &Tensor, factor: &Tensor) -> Result<Tensor> {
    if input.dims() != factor.dims() {
        bail!(
            "factor: shape {:?}, must be that of input, {:?}",
            factor.dims(),
            input.dims()
        );
    }
    let tokens = input.dim(D::Minus1)?;
    let (mut y, mut factor) = (input.clone(), factor.clone());
    let mut width = 1;
    // After the pass with width k, y[t] holds the terms from k positions.
    while width < tokens {
        y = (&y + (&factor * shift_left(&y, width)?)?)?;
        factor = (&factor * shift_left(&factor, width)?)?;
        width *= 2;
    }
    Ok(y)
}

/// `x[.., t + by]`, and 0 past the end.
fn shift_left(x: &Tensor, by: usize) -> Result<Tensor> {
    let tokens = x.dim(D::Minus1)?;
    x.narrow(D::Minus1, by, tokens - by)?
        .pad_with_zeros(D::Minus1, 0, by)
}

/// Returns a recurrence factor that applies `factor` once per time step, `[B, T]`.
fn factor_per_step(
    like: &Tensor,
    factor: f64,
    mask: &Mask,
    masked: MaskedTokens,
) -> Result<Tensor> {
    let step = (like.zeros_like()? + factor)?;
    match masked {
        MaskedTokens::Counted => Ok(step),
        MaskedTokens::Skipped => mask.selected().where_cond(&step, &like.ones_like()?),
    }
}

/// Computes `G_t = r_t + gamma * G_{t+1}` from `rewards` `[B, T]`, which must be 0 outside the
/// mask. The returns are 0 there, too.
pub(crate) fn discounted_returns(
    rewards: &Tensor,
    gamma: f64,
    mask: &Mask,
    masked: MaskedTokens,
) -> Result<Tensor> {
    let gamma = factor_per_step(rewards, gamma, mask, masked)?;
    mask.select(&reverse_recurrence(rewards, &gamma)?)
}

/// Computes `A_t = d_t + gamma * lambda * A_{t+1}` with `d_t = r_t + gamma * V_{t+1} - V_t`
/// (<https://arxiv.org/abs/1506.02438>): `[B, T]`. `rewards` and `values` must be 0 outside the mask,
/// and so is the result. The value after the last token is 0.
pub(crate) fn generalized_advantages(
    rewards: &Tensor,
    values: &Tensor,
    gamma: f64,
    lambda: f64,
    mask: &Mask,
    masked: MaskedTokens,
) -> Result<Tensor> {
    let next_values = match masked {
        MaskedTokens::Counted => shift_left(values, 1)?,
        MaskedTokens::Skipped => {
            // Each token's own value or, outside the mask, the next masked-in token's value.
            let outside = mask.selected().eq(0u8)?.to_dtype(values.dtype())?;
            shift_left(&reverse_recurrence(values, &outside)?, 1)?
        }
    };
    let deltas = ((rewards + (next_values * gamma)?)? - values)?;
    let deltas = match masked {
        MaskedTokens::Counted => deltas,
        MaskedTokens::Skipped => mask.select(&deltas)?,
    };
    let factor = factor_per_step(rewards, gamma * lambda, mask, masked)?;
    mask.select(&reverse_recurrence(&deltas, &factor)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_grpo_test_support::{assert_close, devices, numbers};

    #[test]
    fn the_scan_equals_the_loop_over_tokens() -> Result<()> {
        let input: Vec<f64> = (0..7).map(|i| f64::from(i * i) - 9.).collect();
        let factor: Vec<f64> = (0..7).map(|i| 0.3 + 0.1 * f64::from(i)).collect();
        let mut expected = vec![0.; 7];
        let mut next = 0.;
        for t in (0..7).rev() {
            next = input[t] + factor[t] * next;
            expected[t] = next;
        }
        for device in devices() {
            let input = Tensor::new(input.as_slice(), device)?;
            let factor = Tensor::new(factor.as_slice(), device)?;
            let got = numbers(&reverse_recurrence(&input, &factor)?)?;
            assert_close(&got, &expected, 1e-12);
        }
        Ok(())
    }
}

//! Sums of what comes after a token: discounted returns and generalised advantages.

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::advantage::recurrence::{reverse_recurrence, shift_left};
use crate::mask::Mask;

/// Whether time passes at a token that the policy did not write, such as the output of a tool between two turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskedTokens {
    /// It does not: discounts and values go from one token of the mask to the next (verl, twinkle).
    #[default]
    Skipped,
    /// It does: such a token is a step with reward 0 and value 0 (OpenRLHF, ROLL).
    Counted,
}

/// The factor of a recurrence that is `factor` for each step of time, `[B, T]`.
fn factor_of_step(like: &Tensor, factor: f64, mask: &Mask, masked: MaskedTokens) -> Result<Tensor> {
    let step = (like.zeros_like()? + factor)?;
    match masked {
        MaskedTokens::Counted => Ok(step),
        MaskedTokens::Skipped => mask.selected().where_cond(&step, &like.ones_like()?),
    }
}

/// An error that names the discount unless it is one.
pub(crate) fn check_discount(name: &str, discount: f64) -> Result<()> {
    if !(0. ..=1.).contains(&discount) {
        bail!("{name}: {discount}, must be from 0 to 1");
    }
    Ok(())
}

/// `G_t = r_t + gamma * G_{t+1}` of `rewards` `[B, T]`, which are 0 outside the mask; the returns are as well.
pub(crate) fn discounted_returns(
    rewards: &Tensor,
    gamma: f64,
    mask: &Mask,
    masked: MaskedTokens,
) -> Result<Tensor> {
    let gamma = factor_of_step(rewards, gamma, mask, masked)?;
    mask.select(&reverse_recurrence(rewards, &gamma)?)
}

/// `A_t = d_t + gamma * lambda * A_{t+1}` with `d_t = r_t + gamma * V_{t+1} - V_t`
/// (<https://arxiv.org/abs/1506.02438>): `[B, T]`, 0 outside the mask, where `rewards` and `values` are 0 as well. The
/// value after the last token is 0.
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
            // The value at this token or, outside the mask, at the next token of it.
            let outside = mask.selected().eq(0u8)?.to_dtype(values.dtype())?;
            shift_left(&reverse_recurrence(values, &outside)?, 1)?
        }
    };
    let deltas = ((rewards + (next_values * gamma)?)? - values)?;
    let deltas = match masked {
        MaskedTokens::Counted => deltas,
        MaskedTokens::Skipped => mask.select(&deltas)?,
    };
    let factor = factor_of_step(rewards, gamma * lambda, mask, masked)?;
    mask.select(&reverse_recurrence(&deltas, &factor)?)
}

//! Selects the highest-entropy tokens.

use candle_core::{DType, Result, Tensor};

use crate::mask::Mask;
use crate::validate;

/// Selects the `fraction` of tokens in `mask` with the highest entropy
/// (<https://arxiv.org/abs/2506.01939>; TRL's `top_entropy_quantile`).
///
/// A token is selected if its entropy is at least the `1 - fraction` quantile over all tokens in
/// the mask, interpolated linearly. Pass the whole step's `entropy` `[B, T]`: the selection then
/// does not depend on micro-batches. A mask without a token is returned unchanged. Copies the
/// entropies to the host, which synchronizes with the device.
///
/// # Errors
///
/// Fails if the shapes differ or `fraction` is not above 0 and at most 1.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::Mask;
/// use candle_grpo_core::selection::top_entropy_tokens;
///
/// let mask = Mask::new(&Tensor::new(&[[1u8, 1, 1], [1, 1, 0]], &Device::Cpu)?)?;
/// let entropy = Tensor::new(&[[0.1f32, 2., 0.3], [1., 0., 9.]], &Device::Cpu)?;
/// let top = top_entropy_tokens(&entropy, &mask, 0.4)?;
/// assert_eq!(top.selected().to_vec2::<u8>()?, [[0, 1, 0], [1, 0, 0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn top_entropy_tokens(entropy: &Tensor, mask: &Mask, fraction: f64) -> Result<Mask> {
    mask.check("entropy", entropy)?;
    validate::share("fraction", fraction)?;
    // Masked entries may be NaN, and any comparison with NaN is false.
    let entropy = mask.select(&entropy.detach().to_dtype(DType::F32)?)?;
    let numbers = entropy.flatten_all()?.to_vec1::<f32>()?;
    let selected = mask.selected().flatten_all()?.to_vec1::<u8>()?;
    let mut valid: Vec<f32> = numbers
        .into_iter()
        .zip(selected)
        .filter_map(|(x, selected)| (selected != 0).then_some(x))
        .collect();
    if valid.is_empty() {
        return Ok(mask.clone());
    }
    valid.sort_by(f32::total_cmp);
    let place = (1. - fraction) * (valid.len() - 1) as f64;
    let below = f64::from(valid[place.floor() as usize]);
    let above = f64::from(valid[place.ceil() as usize]);
    // f32 like the entropies, so that a quantile that equals an entropy selects it.
    let threshold = (below + (above - below) * place.fract()) as f32;
    mask.and(&entropy.ge(threshold)?)
}

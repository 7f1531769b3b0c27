//! Which tokens are forks in the road.

use candle_core::{DType, Result, Tensor, bail};

use crate::mask::Mask;

/// The tokens of the mask with the highest entropy, that part `fraction` of them which a policy gradient needs
/// (<https://arxiv.org/abs/2506.01939>; TRL's `top_entropy_quantile`): those whose entropy is at least the
/// `1 - fraction` quantile over all tokens of the mask, linear between two of them.
///
/// `entropy` `[B, T]` of the whole step, so that the choice does not depend on how it is split. The quantile is taken on the
/// host, which costs one copy of the entropies. A mask without a token comes back as it is.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_core::{Mask, top_entropy_tokens_to_host};
///
/// let mask = Mask::new(&Tensor::new(&[[1u8, 1, 1], [1, 1, 0]], &Device::Cpu)?)?;
/// let entropy = Tensor::new(&[[0.1f32, 2., 0.3], [1., 0., 9.]], &Device::Cpu)?;
/// let top = top_entropy_tokens_to_host(&entropy, &mask, 0.4)?;
/// assert_eq!(top.selected().to_vec2::<u8>()?, [[0, 1, 0], [1, 0, 0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn top_entropy_tokens_to_host(entropy: &Tensor, mask: &Mask, fraction: f64) -> Result<Mask> {
    mask.check_shape("entropy", entropy)?;
    if !(fraction > 0. && fraction <= 1.) {
        bail!("fraction: {fraction}, must be above 0 and at most 1");
    }
    // Masked entries may hold anything; comparing has to be with numbers.
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
    // Rounded as the entropies are, so that a quantile that is one of them selects it.
    let threshold = (below + (above - below) * place.fract()) as f32;
    mask.and(&entropy.ge(threshold)?)
}

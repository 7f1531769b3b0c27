//! Whitening over the tokens of a batch, and normalising each sequence.

use candle_core::{Result, Tensor, bail};

use crate::mask::Mask;
use crate::moments::Moments;
use crate::precision::{for_statistics, result_dtype};

/// `(x - mean) / sqrt(variance + epsilon)` with the moments of the positions of `mask`, all sequences together; the
/// variance is that of a sample (n - 1), as in verl and ROLL.
///
/// `values` `[B, T]` gives `[B, T]` in f32 (f64 for f64). With `shift_mean` false the mean is added back. Positions
/// outside the mask are transformed as well: select by the mask afterwards. With fewer than two positions in the mask
/// there is no variance, and the values come back as they are.
pub fn masked_whiten(
    values: &Tensor,
    mask: &Mask,
    shift_mean: bool,
    epsilon: f64,
) -> Result<Tensor> {
    mask.check_shape("values", values)?;
    check_epsilon(epsilon)?;
    let x = for_statistics(values)?;
    let moments = Moments::new(&x.flatten_all()?, &mask.selected().flatten_all()?)?;
    let std = (moments.variance(1)? + epsilon)?.sqrt()?;
    let whitened = x.broadcast_sub(&moments.mean)?.broadcast_div(&std)?;
    let whitened = if shift_mean {
        // Equal values are 0 exactly, however the mean is rounded.
        let centered = moments.centered.reshape(x.shape())?.broadcast_div(&std)?;
        mask.selected().where_cond(&centered, &whitened)?
    } else {
        whitened.broadcast_add(&moments.mean)?
    };
    let enough = moments.count.ge(2.)?.broadcast_as(x.shape())?;
    enough
        .where_cond(&whitened, &x)?
        .to_dtype(result_dtype(values.dtype()))
}

/// `(x - mean) / sqrt(max(variance, min_variance))` for each sequence, with the moments of its positions of `mask` and
/// the variance of a population (n), as in OpenRLHF and ROLL.
///
/// `values` `[B, T]` gives `[B, T]` in f32 (f64 for f64). Positions outside the mask count as 0 and are transformed as
/// well: select by the mask afterwards.
pub fn masked_normalize(values: &Tensor, mask: &Mask, min_variance: f64) -> Result<Tensor> {
    mask.check_shape("values", values)?;
    check_epsilon(min_variance)?;
    let x = mask.select(&for_statistics(values)?)?;
    let moments = Moments::new(&x, mask.selected())?;
    let std = moments.variance(0)?.maximum(min_variance)?.sqrt()?;
    let centered = mask
        .selected()
        .where_cond(&moments.centered, &x.broadcast_sub(&moments.mean)?)?;
    centered
        .broadcast_div(&std)?
        .to_dtype(result_dtype(values.dtype()))
}

fn check_epsilon(epsilon: f64) -> Result<()> {
    if !(epsilon > 0. && epsilon.is_finite()) {
        bail!("epsilon: {epsilon}, must be positive and finite");
    }
    Ok(())
}

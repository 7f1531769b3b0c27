//! Argument checks that several operators share.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::precision::arithmetic_dtype;

/// Valid softmax temperatures. Logits up to 1e30 stay finite in f32.
pub const TEMPERATURES: RangeInclusive<f64> = 1e-6..=1e6;

/// Fails unless `value` is in [`TEMPERATURES`].
pub(crate) fn temperature(value: f64) -> Result<()> {
    if !TEMPERATURES.contains(&value) {
        bail!("temperature: {value:?}, must be from 1e-6 to 1e6");
    }
    Ok(())
}

/// Fails unless `value` is positive and finite.
pub(crate) fn positive(name: &str, value: f64) -> Result<()> {
    if value > 0.0 && value.is_finite() {
        Ok(())
    } else {
        bail!("{name}: {value}, must be positive and finite")
    }
}

/// Fails unless `value` is at least 0 and finite.
pub(crate) fn not_negative(name: &str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        Ok(())
    } else {
        bail!("{name}: {value}, must be at least 0 and finite")
    }
}

/// Fails on a device with a separate stream per thread.
pub(crate) fn one_stream(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(device) = device {
        crate::cuda::device::stream(device)?;
    }
    #[cfg(not(feature = "cuda"))]
    let _ = device;
    Ok(())
}

/// Fails unless `x` has a float dtype and its device passes [`one_stream`].
pub(crate) fn float(name: &str, x: &Tensor) -> Result<()> {
    one_stream(x.device())?;
    if x.dtype().is_float() {
        Ok(())
    } else {
        bail!("{name}: {:?}, must be of a float dtype", x.dtype())
    }
}

/// Fails if `x` is in a graph, because the operator is not differentiable.
pub(crate) fn constant(name: &str, x: &Tensor) -> Result<()> {
    if x.track_op() {
        bail!(
            "{name}: a variable or computed from one, must be detached: the operator has no gradient"
        );
    }
    Ok(())
}

/// Fails unless all named tensors are on one device.
pub(crate) fn same_device(tensors: &[(&str, &Tensor)]) -> Result<()> {
    if let Some(((first_name, first), rest)) = tensors.split_first() {
        for (name, tensor) in rest {
            if !tensor.device().same_device(first.device()) {
                bail!(
                    "{name}: on {:?}, must be on the device of {first_name}, {:?}",
                    tensor.device().location(),
                    first.device().location()
                );
            }
        }
    }
    Ok(())
}

/// Fails unless `x` has the same dtype as `like`.
pub(crate) fn same_dtype(name: &str, x: &Tensor, like_name: &str, like: &Tensor) -> Result<()> {
    if x.dtype() == like.dtype() {
        Ok(())
    } else {
        bail!(
            "{name}: {:?}, must be of the dtype of {like_name}, {:?}",
            x.dtype(),
            like.dtype()
        )
    }
}

/// Fails unless `sum`, to which `dtype` values are added in place, is contiguous and has the
/// arithmetic dtype.
pub(crate) fn accumulator(name: &str, sum: &Tensor, dtype: DType) -> Result<()> {
    let wide = arithmetic_dtype(dtype);
    if sum.dtype() != wide {
        bail!(
            "{name}: {:?}, must be {wide:?} to add {dtype:?} to it",
            sum.dtype()
        );
    }
    contiguous(name, sum)
}

/// Fails unless `x`, which is written in place, is contiguous.
pub(crate) fn contiguous(name: &str, x: &Tensor) -> Result<()> {
    if !x.is_contiguous() {
        bail!(
            "{name}: shape {:?} with the strides {:?}, must be contiguous",
            x.dims(),
            x.stride()
        );
    }
    Ok(())
}

/// Fails unless `x` has the same shape, dtype and device as `like`.
pub(crate) fn same_shape(name: &str, x: &Tensor, like_name: &str, like: &Tensor) -> Result<()> {
    if x.dims() != like.dims() {
        bail!(
            "{name}: shape {:?}, must be that of {like_name}, {:?}",
            x.dims(),
            like.dims()
        );
    }
    same_dtype(name, x, like_name, like)?;
    same_device(&[(like_name, like), (name, x)])
}

/// Fails unless `gradient` has the same shape, dtype and device as `like`.
pub(crate) fn gradient(gradient: &Tensor, like_name: &str, like: &Tensor) -> Result<()> {
    same_shape("gradient", gradient, like_name, like)
}

/// Returns the last dimension of `x`. Fails if there is none or if it is 0.
pub(crate) fn width(name: &str, x: &Tensor) -> Result<usize> {
    match x.dims().last() {
        Some(&width) if width > 0 => Ok(width),
        _ => bail!(
            "{name}: shape {:?}, must have a last dimension that is not empty",
            x.dims()
        ),
    }
}

/// Fails if a tensor in `written` shares memory with another one or with a tensor in `read`.
pub(crate) fn apart(name: &str, written: &[&Tensor], read: &[&Tensor]) -> Result<()> {
    let memory = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0).addr();
    let mut seen = HashSet::new();
    for tensor in written {
        if !seen.insert(memory(tensor)) {
            bail!(
                "{name}: a tensor of shape {:?} shares its memory with another that is written",
                tensor.dims()
            );
        }
    }
    if let Some(tensor) = read.iter().find(|tensor| seen.contains(&memory(tensor))) {
        bail!(
            "{name}: a tensor of shape {:?} is read and shares its memory with one that is written",
            tensor.dims()
        );
    }
    Ok(())
}

/// Converts a mask with shape `outer` and any dtype to contiguous u8 `[N]` with values 0 and 1.
pub(crate) fn mask(mask: &Tensor, outer: &[usize]) -> Result<Tensor> {
    if mask.dims() != outer {
        bail!(
            "mask: shape {:?}, must be that of targets, {outer:?}",
            mask.dims()
        );
    }
    if mask.elem_count() == 0 {
        // Candle cannot compare empty tensors on CUDA.
        return Tensor::zeros(0, DType::U8, mask.device());
    }
    mask.detach().flatten_all()?.ne(0f64)?.contiguous()
}

/// Converts targets with shape `outer` to contiguous u32 `[N]`, like [`token_ids`].
///
/// `outer` is the shape of the argument `source` without the last dimension.
pub(crate) fn targets(
    targets: &Tensor,
    source: &str,
    outer: &[usize],
    vocab: usize,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    if targets.dims() != outer {
        bail!(
            "targets: shape {:?}, must be that of {source} without the last dimension, {outer:?}",
            targets.dims()
        );
    }
    token_ids("targets", targets, vocab, mask)
}

/// Converts integers below `vocab`, in any shape, to contiguous u32 `[N]`.
///
/// Where `mask`, u8 `[N]`, is 0, any id is valid. Only the CPU checks ids, because the check would
/// synchronize a GPU.
pub(crate) fn token_ids(
    name: &str,
    ids: &Tensor,
    vocab: usize,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    if !ids.dtype().is_int() {
        bail!("{name}: {:?}, must be of an integer dtype", ids.dtype());
    }
    let mut flat = ids.detach().flatten_all()?;
    if matches!(ids.device(), Device::Cpu) {
        let ids = flat.to_dtype(DType::I64)?.to_vec1::<i64>()?;
        let mask = mask.map(Tensor::to_vec1::<u8>).transpose()?;
        for (row, &id) in ids.iter().enumerate() {
            let kept = mask.as_ref().is_none_or(|mask| mask[row] != 0);
            if kept && !(0..vocab as i64).contains(&id) {
                bail!("{name}: token id {id} is out of range, must be below {vocab}");
            }
        }
    }
    if matches!(flat.dtype(), DType::I16 | DType::I32) {
        // Candle cannot convert these dtypes on CUDA.
        flat = flat.to_device(&Device::Cpu)?;
    }
    if flat.elem_count() == 0 {
        return Tensor::zeros(0, DType::U32, ids.device());
    }
    flat.to_dtype(DType::U32)?
        .contiguous()?
        .to_device(ids.device())
}

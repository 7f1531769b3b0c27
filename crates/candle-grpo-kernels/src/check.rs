//! Checks of arguments that several operators have.

use std::collections::HashSet;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::precision::arithmetic_dtype;

/// Errs unless `value` is positive and finite.
pub(crate) fn positive(name: &str, value: f64) -> Result<()> {
    if value > 0.0 && value.is_finite() {
        Ok(())
    } else {
        bail!("{name}: {value}, must be positive and finite")
    }
}

/// Errs unless `value` is at least 0 and finite.
pub(crate) fn not_negative(name: &str, value: f64) -> Result<()> {
    if value >= 0.0 && value.is_finite() {
        Ok(())
    } else {
        bail!("{name}: {value}, must be at least 0 and finite")
    }
}

/// Errs unless `x` is of a float dtype.
pub(crate) fn float(name: &str, x: &Tensor) -> Result<()> {
    if x.dtype().is_float() {
        Ok(())
    } else {
        bail!("{name}: {:?}, must be of a float dtype", x.dtype())
    }
}

/// Errs if `x` is in a graph, which an operator without a gradient would end without a word.
pub(crate) fn constant(name: &str, x: &Tensor) -> Result<()> {
    if x.track_op() {
        bail!(
            "{name}: a variable or computed from one, must be detached, as no gradient comes back"
        );
    }
    Ok(())
}

/// Errs unless the tensors are on one device; each is given with its name.
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

/// Errs unless `x` has the dtype of `like`.
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

/// Errs unless `sum`, to which numbers of `dtype` are added in place, is contiguous and of the dtype of such sums.
pub(crate) fn accumulator(name: &str, sum: &Tensor, dtype: DType) -> Result<()> {
    let wide = arithmetic_dtype(dtype);
    if sum.dtype() != wide {
        bail!(
            "{name}: {:?}, must be {wide:?} to add {dtype:?} to it",
            sum.dtype()
        );
    }
    if !sum.is_contiguous() {
        bail!(
            "{name}: shape {:?} with the strides {:?}, must be contiguous",
            sum.dims(),
            sum.stride()
        );
    }
    Ok(())
}

/// Errs unless `gradient`, that of a result like `like`, has its shape, dtype and device.
pub(crate) fn gradient(gradient: &Tensor, like_name: &str, like: &Tensor) -> Result<()> {
    if gradient.dims() != like.dims() {
        bail!(
            "gradient: shape {:?}, must be that of {like_name}, {:?}",
            gradient.dims(),
            like.dims()
        );
    }
    same_dtype("gradient", gradient, like_name, like)?;
    same_device(&[(like_name, like), ("gradient", gradient)])
}

/// The size of the last dimension of `x`; an error if there is none or if it is empty.
pub(crate) fn width(name: &str, x: &Tensor) -> Result<usize> {
    match x.dims().last() {
        Some(&width) if width > 0 => Ok(width),
        _ => bail!(
            "{name}: shape {:?}, must have a last dimension that is not empty",
            x.dims()
        ),
    }
}

/// Errs unless each of the tensors that are `written` has a memory of its own, apart from those that are only `read`.
pub(crate) fn apart(name: &str, written: &[&Tensor], read: &[&Tensor]) -> Result<()> {
    let memory = |tensor: &Tensor| std::ptr::from_ref(&*tensor.storage_and_layout().0).addr();
    let mut seen = HashSet::new();
    for tensor in written {
        if !seen.insert(memory(tensor)) {
            bail!(
                "{name}: one of shape {:?} shares its memory with another that is written",
                tensor.dims()
            );
        }
    }
    if let Some(tensor) = read.iter().find(|tensor| seen.contains(&memory(tensor))) {
        bail!(
            "{name}: what is read, of shape {:?}, shares its memory with what is written",
            tensor.dims()
        );
    }
    Ok(())
}

/// A mask of `outer` shape in any dtype as contiguous u8 `[N]`, 1 where it is not 0.
pub(crate) fn mask(mask: &Tensor, outer: &[usize]) -> Result<Tensor> {
    if mask.dims() != outer {
        bail!(
            "mask: shape {:?}, must be that of targets, {outer:?}",
            mask.dims()
        );
    }
    if mask.elem_count() == 0 {
        // Candle compares no empty tensors on CUDA.
        return Tensor::zeros(0, DType::U8, mask.device());
    }
    mask.detach().flatten_all()?.ne(0f64)?.contiguous()
}

/// Token ids of `outer` shape, that of the argument `source` without its last dimension, integers below `vocab`, as
/// contiguous u32 `[N]`. Where `mask` (`[N]` of u8) is 0 an id may be anything.
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

/// Integers below `vocab` of any shape as contiguous u32 `[N]`. Where `mask` (`[N]` of u8) is 0 an id may be anything.
/// On the CPU ids are checked; on a GPU that would be a transfer.
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
        // Which Candle does not convert on CUDA.
        flat = flat.to_device(&Device::Cpu)?;
    }
    if flat.elem_count() == 0 {
        return Tensor::zeros(0, DType::U32, ids.device());
    }
    flat.to_dtype(DType::U32)?
        .contiguous()?
        .to_device(ids.device())
}

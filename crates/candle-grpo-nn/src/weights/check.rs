//! Checks of tensors from files.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Error, Result, Tensor, bail};

use crate::DecoderConfig;
use crate::config::architecture::{EMBEDDING, OUTPUT};
use crate::weights::safetensors::TensorHeader;
use crate::weights::stacks;
use crate::weights::stored_tensor::StoredTensor;

/// The numbers of a tensor that are converted at once.
pub(crate) const CHUNK: usize = 1 << 20;
const ROTARY_FREQUENCIES: &str = "rotary_emb.inv_freq";

/// Checks that `found` has exactly the names of `expected`. The error lists what is missing and
/// what is surplus.
pub(crate) fn check_names<S, T>(
    argument: &str,
    expected: &BTreeMap<String, S>,
    found: &HashMap<String, T>,
) -> Result<()> {
    let missing: Vec<_> = expected
        .keys()
        .filter(|name| !found.contains_key(*name))
        .collect();
    let mut surplus: Vec<_> = found
        .keys()
        .filter(|name| !expected.contains_key(*name))
        .collect();
    surplus.sort();
    if !missing.is_empty() || !surplus.is_empty() {
        bail!(
            "{argument}: missing {}, surplus {}, must have exactly the names of the parameters",
            listed(&missing),
            listed(&surplus)
        );
    }
    Ok(())
}

/// The first names, and the number of the others.
fn listed(names: &[&String]) -> String {
    const MOST: usize = 8;
    match names.split_at_checked(MOST) {
        Some((first, others)) if !others.is_empty() => {
            format!("{first:?} and {} more", others.len())
        }
        _ => format!("{names:?}"),
    }
}

/// Checks that the headers of files have exactly the names and shapes of the parameters, beside
/// those that [`reduce_to_parameters`] removes.
pub(crate) fn check_headers(
    config: &DecoderConfig,
    headers: HashMap<String, TensorHeader>,
) -> Result<()> {
    config.validate()?;
    let mut headers = text_model(config, headers);
    headers.retain(|name, _| {
        !(name.ends_with(ROTARY_FREQUENCIES) || config.tie_word_embeddings && name == OUTPUT)
    });
    stacks::split(config, &mut headers)?;
    let shapes = config.parameter_shapes();
    check_names("tensors", &shapes, &headers)?;
    for (name, shape) in shapes {
        let header = &headers[&name];
        if header.shape != shape.dims() {
            bail!(
                "tensor {name}: shape {:?}, must be {:?}",
                header.shape,
                shape.dims()
            );
        }
        header
            .check_dtype()
            .map_err(|error| Error::msg(format!("tensor {name}: {error}")))?;
    }
    Ok(())
}

/// Returns `tensor` in `dtype`.
///
/// # Errors
///
/// If a number exceeds F16.
pub(crate) fn converted(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    let converted = tensor.to_dtype(dtype)?;
    if dtype == DType::F16 && tensor.dtype() != dtype {
        check_finite(&converted).map_err(|error| Error::msg(format!("in F16 {error}")))?;
    }
    Ok(converted)
}

/// Checks that a floating-point tensor has no NaN and no infinity, as stored and in f32.
pub(crate) fn check_finite(tensor: &Tensor) -> Result<()> {
    if tensor.dtype().is_float() && !all_finite(tensor)? {
        bail!("a NaN or an infinity in f32, must be finite")
    } else {
        Ok(())
    }
}

/// Returns true if all entries of a floating-point tensor are finite in f32. Synchronizes with the
/// device. A large tensor is not copied.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let weight = Tensor::new(&[1f32, f32::INFINITY], &Device::Cpu)?;
/// assert!(!candle_grpo_nn::all_finite(&weight)?);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn all_finite(tensor: &Tensor) -> Result<bool> {
    let numbers = tensor.flatten_all()?;
    let count = numbers.elem_count();
    for start in (0..count).step_by(CHUNK) {
        let numbers = numbers.narrow(0, start, CHUNK.min(count - start))?;
        // Zero times a number is zero, unless the number is not finite: then it is NaN, and so is
        // the sum.
        let sum = (numbers.to_dtype(DType::F32)? * 0.0)?.sum_all()?;
        if sum.to_scalar::<f32>()?.is_nan() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Selects the text model of a checkpoint that may have other parts, under the names of
/// [`DecoderConfig::parameter_shapes`].
pub fn text_model<T>(config: &DecoderConfig, tensors: HashMap<String, T>) -> HashMap<String, T> {
    let Some(multimodal) = &config.model_type.family().multimodal else {
        return tensors;
    };
    let tensors = tensors.into_iter();
    let tensors = tensors.filter(|(name, _)| !multimodal.is_other(name));
    let tensors = tensors.map(
        |(name, tensor)| match name.strip_prefix(multimodal.prefix) {
            Some(name) => (format!("model.{name}"), tensor),
            None => (name, tensor),
        },
    );
    tensors.collect()
}

/// Reduces the tensors of a checkpoint to the parameters: splits stacks, and removes what it may
/// hold beside the parameters. These are rotary frequencies, which follow from the configuration,
/// the output layer of a model with tied embeddings, which must equal the embedding, and parts that
/// are not the text model.
pub(crate) fn reduce_to_parameters(
    config: &DecoderConfig,
    tensors: &mut HashMap<String, StoredTensor>,
) -> Result<()> {
    *tensors = text_model(config, std::mem::take(tensors));
    stacks::split(config, tensors)?;
    tensors.retain(|name, _| !name.ends_with(ROTARY_FREQUENCIES));
    if config.tie_word_embeddings
        && let (Some(embedding), Some(output)) = (tensors.get(EMBEDDING), tensors.get(OUTPUT))
    {
        if !equal(&embedding.read()?, &output.read()?)? {
            bail!(
                "{OUTPUT}: differs from {EMBEDDING}, must be equal or absent with tie_word_embeddings"
            );
        }
        tensors.remove(OUTPUT);
    }
    Ok(())
}

fn equal(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.dims() != b.dims() || a.dtype() != b.dtype() {
        return Ok(false);
    }
    let differing = a.ne(b)?.to_dtype(DType::F32)?.sum_all()?;
    Ok(differing.to_scalar::<f32>()? == 0.0)
}

//! Weights in GGUF files.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_grpo_kernels::BLOCK_TYPES;

use super::config::{EMBEDDING, OUTPUT};
use super::header::{Header, TensorPlace};
use super::rope;
use crate::config::architecture::Initial;
use crate::config::families::GgufLayout;
use crate::weights::base_weights::FrozenForm;
use crate::weights::check::{check_finite, check_names};
use crate::{DecoderConfig, Parameters};

/// Block part that chooses experts. Rounding it would send tokens to other experts.
const ROUTER: &str = "ffn_gate_inp";

/// A tensor in a file, and the parameters that it contains.
struct Stored {
    shape: Shape,
    /// A single parameter, or one per expert, as the tensor's matrices.
    parameters: Vec<String>,
    change: Change,
}

/// The difference between a tensor in a file and its parameter.
#[derive(Clone, Copy)]
enum Change {
    None,
    /// The two rows of a rotated pair are adjacent within a head. In Hugging Face's layout, a
    /// head's first half rotates with its second.
    AdjacentPairs {
        heads: usize,
    },
    /// The norm's factor, which is 1 more than the parameter.
    Factor,
}

impl Change {
    fn new(layout: &GgufLayout, config: &DecoderConfig, name: &str, initial: Initial) -> Self {
        match name {
            _ if initial == Initial::OneLess => Self::Factor,
            _ if !layout.adjacent_pairs => Self::None,
            name if name.contains(".q_proj.") => Self::AdjacentPairs {
                heads: config.num_attention_heads,
            },
            name if name.contains(".k_proj.") => Self::AdjacentPairs {
                heads: config.num_key_value_heads,
            },
            _ => Self::None,
        }
    }

    fn parameter(self, stored: Tensor) -> Result<Tensor> {
        match self {
            Self::None => Ok(stored),
            Self::Factor => stored - 1.0,
            Self::AdjacentPairs { heads } => {
                let half = stored.dim(0)? / heads / 2;
                swap_rows(&stored, (heads, half, 2))
            }
        }
    }

    fn stored(self, parameter: Tensor) -> Result<Tensor> {
        match self {
            Self::None => Ok(parameter),
            Self::Factor => parameter + 1.0,
            Self::AdjacentPairs { heads } => {
                let half = parameter.dim(0)? / heads / 2;
                swap_rows(&parameter, (heads, 2, half))
            }
        }
    }
}

/// Splits row indices into `(a, b, c)`, and swaps b and c.
fn swap_rows(tensor: &Tensor, (a, b, c): (usize, usize, usize)) -> Result<Tensor> {
    tensor
        .reshape((a, b, c, ()))?
        .transpose(1, 2)?
        .reshape(tensor.shape())
}

/// File tensors for the parameters of `config`, by name.
fn stored_tensors(config: &DecoderConfig) -> Result<BTreeMap<String, Stored>> {
    let family = config.model_type.family();
    let Some(layout) = &family.gguf else {
        bail!("model_type: {}, has no GGUF files", family.name);
    };
    let mut stacks = BTreeMap::new();
    let mut stored = BTreeMap::new();
    for (name, parameter) in config.architecture().parameters(config) {
        let Some((stored_name, expert)) = stored_name(layout, &name) else {
            bail!("parameter {name}: must have a name in GGUF files");
        };
        let single = Stored {
            change: Change::new(layout, config, &name, parameter.initial),
            shape: parameter.shape,
            parameters: vec![name],
        };
        match expert {
            None => drop(stored.insert(stored_name, single)),
            Some(expert) => {
                let stack: &mut BTreeMap<usize, Stored> = stacks.entry(stored_name).or_default();
                stack.insert(expert, single);
            }
        }
    }
    for (name, stack) in stacks {
        let Some(first) = stack.values().next() else {
            continue;
        };
        let mut dims = vec![stack.len()];
        dims.extend(first.shape.dims());
        let whole = Stored {
            shape: dims.into(),
            change: first.change,
            parameters: stack.into_values().flat_map(|x| x.parameters).collect(),
        };
        stored.insert(name, whole);
    }
    Ok(stored)
}

/// The file's tensors with their locations.
fn places<'a>(
    header: &'a Header,
    config: &DecoderConfig,
) -> Result<Vec<(String, Stored, &'a TensorPlace)>> {
    let expected = stored_tensors(config)?;
    let found: HashMap<_, _> = header
        .tensors
        .iter()
        .filter(|(name, _)| !rope::TENSORS.contains(&name.as_str()))
        .map(|(name, place)| (name.clone(), place))
        .collect();
    let shapes = expected
        .iter()
        .map(|(name, stored)| (name.clone(), stored.shape.clone()));
    check_names("tensors", &shapes.collect(), &found)?;
    let mut places = Vec::new();
    for (name, stored) in expected {
        let place = found[&name];
        let dims = stored.shape.dims();
        if place.dims != dims {
            bail!("tensor {name}: shape {:?}, must be {dims:?}", place.dims);
        }
        places.push((name, stored, place));
    }
    Ok(places)
}

/// Checks tensor names and shapes.
///
/// # Errors
///
/// Names a tensor that is missing, surplus, or has a different shape.
pub(super) fn check(header: &Header, config: &DecoderConfig) -> Result<()> {
    places(header, config).map(drop)
}

/// Returns whether a tensor's parameters keep its blocks.
fn keeps_blocks(stored: &Stored, place: &TensorPlace, form: &FrozenForm) -> bool {
    let mut names = stored.parameters.iter();
    BLOCK_TYPES.contains(&place.dtype) && names.all(|name| form.keeps_blocks(name))
}

/// Total weight bytes for `config` in `form`.
///
/// # Errors
///
/// Same as [`check`].
pub(super) fn num_bytes(
    header: &Header,
    config: &DecoderConfig,
    form: &FrozenForm,
) -> Result<usize> {
    let shapes = config.parameter_shapes();
    let places = places(header, config)?;
    let bytes = places.iter().map(|(_, stored, place)| {
        let others = stored.parameters.iter();
        if keeps_blocks(stored, place, form) {
            place.length
        } else {
            others.map(|name| form.num_bytes(name, &shapes[name])).sum()
        }
    });
    Ok(bytes.sum())
}

/// Reads all `config` weights in `form`, and passes each to `insert` with its Hugging Face name. A
/// tensor is freed before the next is read.
pub(super) fn read(
    path: &Path,
    header: &Header,
    config: &DecoderConfig,
    form: &FrozenForm,
    mut insert: impl FnMut(&str, &Tensor) -> Result<()>,
) -> Result<()> {
    // Check all shapes before the first read.
    let places = places(header, config)?;
    let mut file = File::open(path)?;
    for (name, stored, place) in places {
        let mut read = || -> Result<()> {
            let bytes = bytes(&mut file, place)?;
            let numbers = numbers(&bytes, place)?;
            check_finite(&numbers)?;
            let whole = if keeps_blocks(&stored, place, form) {
                blocks(bytes, place)?
            } else {
                numbers
            };
            for (index, parameter) in stored.parameters.iter().enumerate() {
                let part = match stored.shape.rank() {
                    3 => whole.get(index)?,
                    _ => whole.clone(),
                };
                let part = stored.change.parameter(part)?;
                insert(parameter, &form.of(parameter, &part)?)?;
            }
            Ok(())
        };
        read().map_err(|error| Error::msg(format!("tensor {name}: {error}")))?;
    }
    Ok(())
}

/// Quantizes the `config` weights, and the rotary frequency divisors if files contain them.
pub(super) fn quantize(
    config: &DecoderConfig,
    parameters: &Parameters,
    dtype: GgmlDType,
) -> Result<Vec<(String, QTensor)>> {
    let mut tensors = Vec::new();
    for (name, numbers) in rope::divisors(config) {
        let numbers = Tensor::new(numbers, &Device::Cpu)?;
        tensors.push((
            name.to_owned(),
            QTensor::quantize(&numbers, GgmlDType::F32)?,
        ));
    }
    for (name, stored) in stored_tensors(config)? {
        let part = |parameter: &String| -> Result<Tensor> {
            let Some(value) = parameters.get(parameter) else {
                bail!("parameters: no {parameter}, must have it");
            };
            let value = value.as_detached_tensor().to_device(&Device::Cpu)?;
            stored.change.stored(value.to_dtype(DType::F32)?)
        };
        let parts = stored.parameters.iter().map(part);
        let parts = parts.collect::<Result<Vec<_>>>()?;
        let whole = match (stored.shape.rank(), parts.as_slice()) {
            (3, parts) => Tensor::stack(parts, 0)?,
            (_, parts) => Tensor::cat(parts, 0)?,
        };
        let dtype = match whole.dims() {
            _ if whole.rank() == 1 || name.contains(ROUTER) => GgmlDType::F32,
            // llama.cpp does the same.
            [.., row] if !row.is_multiple_of(dtype.block_size()) => GgmlDType::F16,
            _ => dtype,
        };
        tensors.push((name, QTensor::quantize(&whole.contiguous()?, dtype)?));
    }
    Ok(tensors)
}

/// Reads the values in the tensor `name`, if the file has it.
pub(super) fn values(path: &Path, header: &Header, name: &str) -> Result<Option<Vec<f32>>> {
    let Some(place) = header.tensors.get(name) else {
        return Ok(None);
    };
    let values = numbers(&bytes(&mut File::open(path)?, place)?, place)?;
    Ok(Some(values.flatten_all()?.to_vec1()?))
}

fn bytes(file: &mut File, place: &TensorPlace) -> Result<Vec<u8>> {
    // The header has been checked against the file length.
    let mut bytes = vec![0; place.length];
    file.seek(SeekFrom::Start(place.start))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A tensor's values in f32.
fn numbers(bytes: &[u8], place: &TensorPlace) -> Result<Tensor> {
    qtensor_from_ggml(place.dtype, bytes, place.dims.clone(), &Device::Cpu)?
        .dequantize(&Device::Cpu)
}

/// A tensor's blocks as u8. Two dimensions replace the last one: blocks per row, and bytes per
/// block.
fn blocks(bytes: Vec<u8>, place: &TensorPlace) -> Result<Tensor> {
    let mut dims = place.dims.clone();
    if let Some(row) = dims.last_mut() {
        *row /= place.dtype.block_size();
    }
    dims.push(place.dtype.type_size());
    Tensor::from_vec(bytes, dims, &Device::Cpu)
}

/// The GGUF name for a Hugging Face parameter name. Experts share one tensor, so the second result
/// is the expert's number.
fn stored_name(layout: &GgufLayout, name: &str) -> Option<(String, Option<usize>)> {
    match name {
        "model.embed_tokens.weight" => return Some((EMBEDDING.to_owned(), None)),
        "model.norm.weight" => return Some(("output_norm.weight".to_owned(), None)),
        "lm_head.weight" => return Some((OUTPUT.to_owned(), None)),
        _ => {}
    }
    let (layer, name) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (part, kind) = name.rsplit_once('.')?;
    let (part, expert) = without_expert(part)?;
    let own = layout.names.iter().find(|(name, _)| *name == part);
    let part = match own.map_or(part.as_str(), |(_, stored)| stored) {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        stored if own.is_some() => stored,
        _ => return None,
    };
    Some((format!("blk.{layer}.{part}.{kind}"), expert))
}

/// Splits the expert number off a block part's name.
fn without_expert(part: &str) -> Option<(String, Option<usize>)> {
    const EXPERTS: &str = "mlp.experts.";
    let Some(rest) = part.strip_prefix(EXPERTS) else {
        return Some((part.to_owned(), None));
    };
    let (number, map) = rest.split_once('.')?;
    Some((format!("{EXPERTS}{map}"), Some(number.parse().ok()?)))
}

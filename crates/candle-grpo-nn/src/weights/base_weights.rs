//! Frozen weights, either dense or in quantized blocks.

use std::collections::{BTreeSet, HashMap};

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use candle_grpo_kernels::{block_type, dequantize, quantize};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use serde::{Deserialize, Serialize};

use crate::DecoderConfig;
use crate::config::architecture::linear_maps;
use crate::weights::compute_copies::ensure_copy_dtype;

/// Storage of a model's linear maps while only adapters train (QLoRA,
/// <https://arxiv.org/abs/2305.14314>, with GGUF block formats).
///
/// Expert routers, embeddings, norms, biases and the output layer are never quantized. If a map's
/// row length is not a multiple of 256, it falls back to blocks of 32 with at least as many bits:
/// Q5_0 instead of Q4_K, Q5_1 instead of Q5_K, Q8_0 instead of Q6_K. If it is not a multiple of 32,
/// the map is not quantized.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BaseWeights {
    /// Dense, in the compute dtype.
    #[default]
    Dense,
    /// GGUF blocks as stored in the file. Types without an operator, such as Q2_K, become dense,
    /// and so do weights from other files.
    Stored,
    /// 4.5 bits each: 32 values with a common factor.
    #[serde(rename = "q4_0")]
    Q4_0,
    /// 5.5 bits each: 32 values with a common factor.
    #[serde(rename = "q5_0")]
    Q5_0,
    /// 8.5 bits each: 32 values with a common factor.
    #[serde(rename = "q8_0")]
    Q8_0,
    /// 4.5 bits each: 256 values in 8 parts, each with factor and offset.
    #[serde(rename = "q4_k")]
    Q4K,
    /// 5.5 bits each: 256 values in 8 parts, each with factor and offset.
    #[serde(rename = "q5_k")]
    Q5K,
    /// 6.6 bits each: 256 values in 16 parts, each with a factor.
    #[serde(rename = "q6_k")]
    Q6K,
}

impl BaseWeights {
    /// Total weight bytes for `model` in this form, with weights that are not quantized in `dtype`.
    /// Blocks from a file count as dense.
    ///
    /// # Errors
    ///
    /// If `dtype` is not F32, BF16 or F16.
    pub fn num_bytes(self, model: &DecoderConfig, dtype: DType) -> Result<usize> {
        let form = FrozenForm::new(model, self, dtype)?;
        let shapes = model.parameter_shapes().into_iter();
        let bytes = shapes.map(|(name, shape)| form.num_bytes(&name, &shape));
        Ok(bytes.sum())
    }

    /// Block type for rows with `inputs` values, if the weights are quantized.
    fn block_type(self, inputs: usize) -> Option<GgmlDType> {
        let by_256 = inputs.is_multiple_of(256);
        let block_type = match self {
            Self::Dense | Self::Stored => return None,
            Self::Q4K if by_256 => GgmlDType::Q4K,
            Self::Q5K if by_256 => GgmlDType::Q5K,
            Self::Q6K if by_256 => GgmlDType::Q6K,
            Self::Q4_0 => GgmlDType::Q4_0,
            Self::Q5_0 | Self::Q4K => GgmlDType::Q5_0,
            Self::Q5K => GgmlDType::Q5_1,
            Self::Q8_0 | Self::Q6K => GgmlDType::Q8_0,
        };
        inputs
            .is_multiple_of(block_type.block_size())
            .then_some(block_type)
    }
}

/// Storage of all model weights while only adapters train.
#[derive(Debug)]
pub(crate) struct FrozenForm {
    base: BaseWeights,
    /// Dtype for weights that are not in blocks.
    pub(crate) dtype: DType,
    /// Names of the weights that may be in blocks.
    maps: BTreeSet<String>,
}

impl FrozenForm {
    pub(crate) fn new(model: &DecoderConfig, base: BaseWeights, dtype: DType) -> Result<Self> {
        ensure_copy_dtype(dtype)?;
        let mut maps = BTreeSet::new();
        if base != BaseWeights::Dense {
            let routers = model.architecture().routers();
            let names = linear_maps(model).into_iter().map(|(name, _)| name);
            let names = names.filter(|name| !routers.contains(name));
            maps.extend(names.map(|name| format!("{name}.weight")));
        }
        Ok(Self { base, dtype, maps })
    }

    /// Returns whether the weight `name` keeps its blocks from a file.
    pub(crate) fn keeps_blocks(&self, name: &str) -> bool {
        self.base == BaseWeights::Stored && self.maps.contains(name)
    }

    /// Block type for the weight `name`, if it is quantized.
    pub(crate) fn block_type(&self, name: &str, shape: &Shape) -> Option<GgmlDType> {
        let inputs = shape.dims().last().copied().unwrap_or(0);
        let is_map = self.maps.contains(name);
        is_map.then(|| self.base.block_type(inputs)).flatten()
    }

    /// Bytes for the weight `name` in this form, unless it keeps blocks from a file.
    pub(crate) fn num_bytes(&self, name: &str, shape: &Shape) -> usize {
        match self.block_type(name, shape) {
            Some(block_type) => {
                shape.elem_count() / block_type.block_size() * block_type.type_size()
            }
            None => shape.elem_count() * self.dtype.size_in_bytes(),
        }
    }

    /// Converts the weight `name`, dense or in blocks, to this form.
    pub(crate) fn of(&self, name: &str, weight: &Tensor) -> Result<Tensor> {
        if weight.dtype() == DType::U8 {
            return Ok(weight.clone());
        }
        match self.block_type(name, weight.shape()) {
            Some(block_type) => quantize(weight, block_type),
            None => weight.to_dtype(self.dtype)?.contiguous(),
        }
    }
}

/// A weight's values: dequantized to `dtype`, or unchanged if dense.
pub(crate) fn numbers(weight: &Tensor, dtype: DType) -> Result<Tensor> {
    match weight.dtype() {
        DType::U8 => dequantize(weight, dtype),
        _ => Ok(weight.clone()),
    }
}

/// Shape of a weight that may be in blocks.
pub(crate) fn shape(weight: &Tensor) -> Result<Shape> {
    match weight.dtype() {
        DType::U8 => {
            let inputs = weight.dim(1)? * block_type(weight)?.block_size();
            Ok((weight.dim(0)?, inputs).into())
        }
        _ => Ok(weight.shape().clone()),
    }
}

/// Fails unless `weight` has the shape `expected`, either directly or as the blocks of a matrix.
pub(crate) fn check_shape(name: &str, weight: &Tensor, expected: &Shape) -> Result<()> {
    if !shape(weight).is_ok_and(|shape| shape == *expected) {
        bail!(
            "tensor {name}: shape {:?}, must be {:?}",
            weight.dims(),
            expected.dims()
        );
    }
    Ok(())
}

/// A builder over `tensors` in which blocks keep their dtype.
pub(crate) fn builder(
    tensors: HashMap<String, Tensor>,
    dtype: DType,
    device: &Device,
) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Tensors(tensors)), dtype, device.clone())
}

struct Tensors(HashMap<String, Tensor>);

impl SimpleBackend for Tensors {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        SimpleBackend::get(&self.0, shape, name, init, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        match self.0.get(name) {
            Some(blocks) if blocks.dtype() == DType::U8 => blocks.to_device(device),
            _ => self.0.get_unchecked(name, dtype, device),
        }
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }
}

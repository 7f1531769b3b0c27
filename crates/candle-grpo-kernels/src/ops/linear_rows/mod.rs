//! Linear maps with independent rows, for decoding.

pub(crate) mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod packed_weight;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::blocks::named_block_type;
use crate::cpu::panel::Panels;
use crate::cpu::with_element;
use crate::{PackedWeight, check, path};

/// Computes `x w^T` for each weight `w`. On the CPU, each result row is bit-identical, no matter
/// how many other rows there are.
///
/// Use it for inference with few rows: each weight is read once, in memory order, and all cores
/// share the weights. Sums are f32. Products are too, except for bf16 on processors with
/// `avx512_bf16`. On CUDA, two consecutive weights with the same shape take one product. Up to 64
/// rows read the blocks of quantized weights in place, in one or two launches for four weights, and
/// each result row is bit-identical with any other of these rows. For more, the blocks are
/// dequantized.
///
/// # Shapes
///
/// - `x`: `[N, inputs]`, any float dtype
/// - each weight: `[outputs, inputs]`, the same dtype; or its blocks, as from
///   [`quantize`](crate::quantize), u8 `[outputs, blocks per row, bytes per block]`. Products are
///   of the numbers that [`dequantize`](crate::dequantize()) returns. The results are bit-identical
///   to those of these numbers on the CPU. On CUDA, sums have another order.
/// - results: `[N, outputs]`, in the order of the weights
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, or if an argument is in a graph.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::linear_rows;
///
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let a = Tensor::new(&[[1f32, 1.]], &Device::Cpu)?;
/// let b = Tensor::new(&[[1f32, 0.], [0., 2.]], &Device::Cpu)?;
/// let y = linear_rows(&x, &[&a, &b])?;
/// assert_eq!(y[0].to_vec2::<f32>()?, [[3.], [7.]]);
/// assert_eq!(y[1].to_vec2::<f32>()?, [[1., 4.], [3., 8.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear_rows(x: &Tensor, weights: &[&Tensor]) -> Result<Vec<Tensor>> {
    let plain: Vec<_> = weights.iter().map(|weight| (*weight, None)).collect();
    compute(x, &plain)
}

/// Like [`linear_rows`], with packed weights. The results have the same bits.
///
/// # Errors
///
/// Same as [`linear_rows`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{PackedWeight, packed_linear_rows};
///
/// let weight = Tensor::new(&[[1f32, 0.], [0., 2.]], &Device::Cpu)?;
/// let packed = PackedWeight::new(&weight)?;
/// for token in [1f32, 3.] {
///     let x = Tensor::new(&[[token, token]], &Device::Cpu)?;
///     let y = packed_linear_rows(&x, &[&packed])?;
///     assert_eq!(y[0].to_vec2::<f32>()?, [[token, 2. * token]]);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn packed_linear_rows(x: &Tensor, weights: &[&PackedWeight]) -> Result<Vec<Tensor>> {
    let packed: Vec<_> = weights
        .iter()
        .map(|packed| (&packed.weight, packed.panels.as_deref()))
        .collect();
    compute(x, &packed)
}

/// Computes `x w^T` for each weight, using its panels if available.
fn compute(x: &Tensor, weights: &[(&Tensor, Option<&Panels>)]) -> Result<Vec<Tensor>> {
    let tensors: Vec<_> = weights.iter().map(|(weight, _)| *weight).collect();
    check(x, &tensors)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && path::is_fused(x) {
        return cuda::forward(x, &tensors);
    }
    if !path::is_fused_on_cpu(x) {
        return composed::unchecked(x, &tensors);
    }
    let x = x.contiguous()?;
    let weights = weights
        .iter()
        .map(|&(weight, panels)| Ok((weight.contiguous()?, panels)))
        .collect::<Result<Vec<_>>>()?;
    let (rows, outputs) = (x.dim(0)?, tensors.iter().map(|w| w.dims()[0]));
    let results = with_element!(x.dtype(), "x", Float => {
        let results = cpu::forward::<Float>(&x, &weights)?;
        Tensor::from_vec(results, rows * outputs.clone().sum::<usize>(), &Device::Cpu)?
    });
    let mut start = 0;
    outputs
        .map(|outputs| {
            let result = results.narrow(0, start, rows * outputs)?;
            start += rows * outputs;
            result.reshape((rows, outputs))
        })
        .collect()
}

pub(crate) fn check(x: &Tensor, weights: &[&Tensor]) -> Result<()> {
    check::float("x", x)?;
    check::constant("x", x)?;
    let &[_, inputs] = x.dims() else {
        bail!("x: shape {:?}, must be [N, inputs]", x.dims());
    };
    check::width("x", x)?;
    for (index, weight) in weights.iter().enumerate() {
        let name = format!("weights[{index}]");
        check::constant(&name, weight)?;
        check::same_device(&[("x", x), (&name, weight)])?;
        if weight.dtype() == DType::U8 {
            let width = named_block_type(&name, weight)?.block_size() * weight.dim(1)?;
            if width != inputs {
                bail!("{name}: blocks of {width} numbers per row, must be of {inputs}");
            }
            continue;
        }
        if !matches!(weight.dims(), &[_, width] if width == inputs) {
            bail!(
                "{name}: shape {:?}, must be [outputs, {inputs}]",
                weight.dims()
            );
        }
        check::same_dtype(&name, weight, "x", x)?;
    }
    Ok(())
}

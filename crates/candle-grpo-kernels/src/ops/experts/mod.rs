//! A mixture of experts for few rows, for decoding.

pub(crate) mod composed;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{DType, Device, Result, Tensor, bail};

use crate::ops::route::check_experts;
use crate::{arithmetic_dtype, check, path};

/// Most pairs of a row and an expert that the kernel takes. A block has their list in shared
/// memory.
const MAX_PAIRS: usize = 8192;

/// Most pairs for each expert, on average. An expert with R rows takes 2 R FLOP for each weight, so
/// R FLOP for each byte of bf16. An H200 reads 4.3 TB/s, and products with `mma.sync` reach 264
/// TFLOPS in `attention`, which is 61 FLOP per byte. With more rows, the products take longer than
/// the weights.
const PAIRS_OF_EXPERT: usize = 64;

/// The weights of several experts with the same sizes, for [`experts`].
///
/// The weights are not copied: later calls see updates in place.
#[derive(Debug, Clone)]
pub struct ExpertWeights {
    /// Each expert's gate, up and down.
    weights: Vec<[Tensor; 3]>,
    hidden: usize,
    width: usize,
    /// The addresses of the weights, if there is a kernel for them.
    #[cfg(feature = "cuda")]
    table: Option<cuda::Table>,
}

impl ExpertWeights {
    /// Takes each expert's gate and up weight, `[I, H]`, and down weight, `[H, I]`.
    ///
    /// # Errors
    ///
    /// Fails if there are no experts, or a weight is empty, is not contiguous, is in a graph, or
    /// has another shape, dtype or device than its counterpart.
    pub fn new(weights: Vec<[Tensor; 3]>) -> Result<Self> {
        let Some(first) = weights.first() else {
            bail!("weights: no experts, must have at least one");
        };
        check::float("weights[0][0]", &first[0])?;
        let &[width, hidden] = first[0].dims() else {
            bail!("weights[0][0]: shape {:?}, must be [I, H]", first[0].dims());
        };
        for (expert, weights) in weights.iter().enumerate() {
            let shapes = [[width, hidden], [width, hidden], [hidden, width]];
            for (map, (weight, shape)) in weights.iter().zip(shapes).enumerate() {
                let name = format!("weights[{expert}][{map}]");
                if weight.dims() != shape || weight.elem_count() == 0 || !weight.is_contiguous() {
                    bail!(
                        "{name}: shape {:?} with the strides {:?}, must be {shape:?}, contiguous and not empty",
                        weight.dims(),
                        weight.stride()
                    );
                }
                check::constant(&name, weight)?;
                check::same_dtype(&name, weight, "weights[0][0]", &first[0])?;
                check::same_device(&[("weights[0][0]", &first[0]), (&name, weight)])?;
            }
        }
        Ok(Self {
            hidden,
            width,
            #[cfg(feature = "cuda")]
            table: cuda::Table::new(&weights)?,
            weights,
        })
    }

    /// Returns whether [`experts`] has a kernel for weights in this dtype on this device.
    pub fn have_kernel(dtype: DType, device: &Device) -> bool {
        device.is_cuda() && path::fuses(dtype, device)
    }

    /// Returns whether [`experts`] uses its kernel for this number of rows, with `top_k` experts
    /// each. The kernel is for few rows: up to 64 for each expert on average, and up to 8,192
    /// experts of all rows together.
    pub fn fuse(&self, rows: usize, top_k: usize) -> bool {
        let most = MAX_PAIRS.min(self.weights.len() * PAIRS_OF_EXPERT);
        let weight = &self.weights[0][0];
        rows.saturating_mul(top_k) <= most
            && Self::have_kernel(weight.dtype(), weight.device())
            && self.hidden <= i32::MAX as usize
            && self.width <= i32::MAX as usize
    }
}

/// A mixture of experts, each a SwiGLU layer (<https://arxiv.org/abs/1701.06538>,
/// <https://arxiv.org/abs/2002.05202>): the sum of `down(silu(gate(x)) * up(x))` over a row's
/// experts, weighted by its gates.
///
/// On a GPU with few rows ([`ExpertWeights::fuse`]), three launches compute all rows without a
/// wait. They read each chosen expert's weights once for each 32 of its rows. A row's result has
/// the same bits for any other rows. Otherwise every expert computes every row, in plain Candle
/// operations.
///
/// # Shapes
///
/// - `x`: `[N, H]`, the dtype of the weights
/// - `chosen`: u32 `[N, top_k]`, as from [`route`](crate::route())
/// - `gates`: `[N, top_k]`, f64 for f64 weights, else f32
/// - result: `[N, H]`, the dtype of `x`
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, or if an argument is in a graph. An expert index must be
/// below the number of experts. The CPU checks this. On a GPU another index makes its row NaN.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{ExpertWeights, experts};
///
/// let one = |x: f32| Tensor::new(&[[x]], &Device::Cpu);
/// let weights = ExpertWeights::new(vec![
///     [one(0.)?, one(5.)?, one(6.)?], // silu(0) is 0
///     [one(30.)?, one(2.)?, one(0.5)?], // silu(30) is 30
/// ])?;
/// let chosen = Tensor::new(&[[1u32], [0]], &Device::Cpu)?;
/// let gates = Tensor::new(&[[0.5f32], [1.]], &Device::Cpu)?;
/// let y = experts(&Tensor::new(&[[1f32], [1.]], &Device::Cpu)?, &weights, &chosen, &gates)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[15.], [0.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn experts(
    x: &Tensor,
    weights: &ExpertWeights,
    chosen: &Tensor,
    gates: &Tensor,
) -> Result<Tensor> {
    let top_k = check(x, weights, chosen, gates)?;
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    #[cfg(feature = "cuda")]
    if let Some(table) = &weights.table
        && weights.fuse(x.dim(0)?, top_k)
    {
        return cuda::forward(x, weights, table, chosen, gates);
    }
    let _ = top_k;
    composed::unchecked(x, weights, chosen, gates)
}

/// Returns `top_k`.
fn check(x: &Tensor, weights: &ExpertWeights, chosen: &Tensor, gates: &Tensor) -> Result<usize> {
    check::float("x", x)?;
    check::constant("x", x)?;
    check::constant("gates", gates)?;
    let hidden = weights.hidden;
    let &[n, width] = x.dims() else {
        bail!("x: shape {:?}, must be [N, {hidden}]", x.dims());
    };
    if width != hidden {
        bail!("x: shape {:?}, must be [N, {hidden}]", x.dims());
    }
    let weight = &weights.weights[0][0];
    check::same_dtype("x", x, "weights", weight)?;
    let tensors = [
        ("weights", weight),
        ("x", x),
        ("chosen", chosen),
        ("gates", gates),
    ];
    check::same_device(&tensors)?;
    let &[rows, top_k] = chosen.dims() else {
        bail!("chosen: shape {:?}, must be [{n}, top_k]", chosen.dims());
    };
    if rows != n || top_k == 0 || chosen.dtype() != DType::U32 {
        bail!(
            "chosen: {:?} of {:?}, must be [{n}, top_k] of U32, with top_k at least 1",
            chosen.dims(),
            chosen.dtype()
        );
    }
    let wide = arithmetic_dtype(x.dtype());
    if gates.dims() != chosen.dims() || gates.dtype() != wide {
        bail!(
            "gates: {:?} of {:?}, must be [{n}, {top_k}] of {wide:?}",
            gates.dims(),
            gates.dtype()
        );
    }
    check_experts(chosen, weights.weights.len())?;
    Ok(top_k)
}

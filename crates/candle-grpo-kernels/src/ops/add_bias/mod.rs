//! Biases for linear maps.

pub(crate) mod composed;
#[cfg(feature = "cuda")]
mod cuda;

use candle_core::{Result, Tensor, bail};

use crate::check;
#[cfg(feature = "cuda")]
use crate::path;

/// Computes `x + bias` for each pair of rows `x` and their `bias`.
///
/// All arguments get gradients. On CUDA, up to three pairs take one launch if no argument is in a
/// graph.
///
/// # Shapes
///
/// - each `x`, and its result: `[N, C]`, any float dtype; N is the same for all pairs
/// - its `bias`: `[C]`, the same dtype
///
/// # Errors
///
/// Fails if shapes or dtypes do not match.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::add_bias;
///
/// let x = Tensor::new(&[[1f32, 2.], [3., 4.]], &Device::Cpu)?;
/// let bias = Tensor::new(&[10f32, 20.], &Device::Cpu)?;
/// let y = add_bias(&[(&x, &bias)])?;
/// assert_eq!(y[0].to_vec2::<f32>()?, [[11., 22.], [13., 24.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add_bias(pairs: &[(&Tensor, &Tensor)]) -> Result<Vec<Tensor>> {
    check(pairs)?;
    #[cfg(feature = "cuda")]
    if pairs.iter().all(|(x, bias)| {
        x.device().is_cuda() && path::is_fused(x) && !x.track_op() && !bias.track_op()
    }) {
        let pairs = pairs
            .iter()
            .map(|(x, bias)| Ok((x.contiguous()?, bias.contiguous()?)))
            .collect::<Result<Vec<_>>>()?;
        return cuda::forward(&pairs);
    }
    composed::unchecked(pairs)
}

/// Computes the bias gradient in [`add_bias`], which is the row sum of `gradient`, and adds it to
/// `sum` in place, without a graph.
///
/// Tensors that share memory with `sum` change too. The result does not depend on the number of
/// cores.
///
/// # Shapes
///
/// - `sum`: `[C]`, contiguous, f32 (f64 for f64)
/// - `gradient`, for the result: `[N, C]`, any float dtype
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, or if `gradient` shares memory with `sum`.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::add_bias_gradient;
///
/// let sum = Tensor::new(&[1f32, 2.], &Device::Cpu)?;
/// add_bias_gradient(&sum, &Tensor::new(&[[10f32, 20.], [30., 40.]], &Device::Cpu)?)?;
/// assert_eq!(sum.to_vec1::<f32>()?, [41., 62.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add_bias_gradient(sum: &Tensor, gradient: &Tensor) -> Result<()> {
    check_gradient(sum, gradient)?;
    if gradient.elem_count() == 0 {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if gradient.device().is_cuda() && path::is_fused(gradient) {
        let gradient = gradient.detach().contiguous()?;
        return cuda::add_gradient(&sum.detach(), &gradient);
    }
    composed::add_gradient(sum, gradient)
}

pub(crate) fn check(pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    for (index, (x, bias)) in pairs.iter().enumerate() {
        let (first, _) = pairs[0];
        let (x_name, bias_name) = (format!("x[{index}]"), format!("bias[{index}]"));
        check::float(&x_name, x)?;
        let &[rows, columns] = x.dims() else {
            bail!("{x_name}: shape {:?}, must be [N, C]", x.dims());
        };
        check::width(&x_name, x)?;
        if rows != first.dims()[0] {
            bail!(
                "{x_name}: {rows} rows, must be as many as of x[0], {}",
                first.dims()[0]
            );
        }
        if bias.dims() != [columns] {
            bail!("{bias_name}: shape {:?}, must be [{columns}]", bias.dims());
        }
        for (name, tensor) in [(&x_name, x), (&bias_name, bias)] {
            check::same_dtype(name, tensor, "x[0]", first)?;
            check::same_device(&[("x[0]", first), (name, tensor)])?;
        }
    }
    Ok(())
}

fn check_gradient(sum: &Tensor, gradient: &Tensor) -> Result<()> {
    check::float("gradient", gradient)?;
    check::accumulator("sum", sum, gradient.dtype())?;
    match (sum.dims(), gradient.dims()) {
        (&[width], &[_, columns]) if width == columns => {}
        _ => bail!(
            "sum, gradient: shapes {:?} and {:?}, must be [C] and [N, C]",
            sum.dims(),
            gradient.dims()
        ),
    }
    check::same_device(&[("sum", sum), ("gradient", gradient)])?;
    check::apart("sum", &[sum], &[gradient])
}

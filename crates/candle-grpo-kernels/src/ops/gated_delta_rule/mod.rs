//! The gated delta rule.

pub(crate) mod composed;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType, bail};

use crate::cpu::{slice, with_element, with_floats};
use crate::precision::arithmetic_dtype;
use crate::{PrefixTree, check, graph, path};

/// The gated delta rule (<https://arxiv.org/abs/2412.06464>), the token mixer in Qwen3-Next and
/// Qwen3.5. Its state is a matrix per value head, 0 before a sequence:
///
/// ```text
/// S = exp(g) S
/// S = S + k (beta (v - S^T k))^T
/// o = S^T q / sqrt(key_dim)
/// ```
///
/// `q` and `k` are a head's query and key divided by `sqrt(sum x^2 + 1e-6)`. Adjacent value heads
/// share a key head. Rows in a shared prefix are computed once, and each branch starts from the
/// state after them.
///
/// `qkv`, `g` and `beta` get gradients. Arithmetic and state are f32. The CPU path processes chunks
/// of rows as matrix products and stores no states for the backward pass. On CUDA, heads fall back
/// to Candle operations if `key_dim + value_dim` exceeds 288.
///
/// # Shapes
///
/// - `qkv`: `[N, width]`, any float dtype: queries and keys for `key_heads` heads, then values for
///   `value_heads` heads, as a linear layer returns them
/// - `g`, `beta`: `[N, value_heads]`, f32 (f64 for f64). `g` is the logarithm of the decay, at most
///   0 and finite
/// - result: `[N, value_heads * value_dim]` in the dtype of `qkv`
///
/// # Errors
///
/// Fails if shapes or dtypes do not match, or if a head size is 0.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{DeltaHeads, PrefixTree, gated_delta_rule};
///
/// let heads = DeltaHeads { key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1 };
/// // Two rows of query, key and value. The second state is 0.5 * 3 + 0.5 * (4 - 0.5 * 3).
/// let qkv = Tensor::new(&[[2f32, 1., 3.], [2., 1., 4.]], &Device::Cpu)?;
/// let g = Tensor::new(&[[0f32], [0.5f32.ln()]], &Device::Cpu)?;
/// let beta = Tensor::new(&[[1f32], [0.5]], &Device::Cpu)?;
/// let o = gated_delta_rule(&qkv, &g, &beta, heads, &PrefixTree::new(&[2])?)?.to_vec2::<f32>()?;
/// assert!((o[0][0] - 3.).abs() < 1e-5 && (o[1][0] - 2.75).abs() < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn gated_delta_rule(
    qkv: &Tensor,
    g: &Tensor,
    beta: &Tensor,
    heads: DeltaHeads,
    tree: &PrefixTree,
) -> Result<Tensor> {
    check(qkv, g, beta, heads)?;
    tree.check_rows("qkv", qkv.dim(0)?)?;
    if !is_fused(qkv, heads) {
        return composed::unchecked([qkv, g, beta], heads, tree);
    }
    let op = GatedDeltaRule {
        heads,
        tree: tree.clone(),
    };
    qkv.contiguous()?
        .apply_op3(&g.contiguous()?, &beta.contiguous()?, op)
}

/// Computes the backward pass for [`gated_delta_rule`], without a graph.
///
/// `gradient` is the gradient with respect to the result. Returns the gradients with respect to
/// `qkv`, `g` and `beta`.
///
/// # Errors
///
/// Same as [`gated_delta_rule`]. Also fails if `gradient` does not have the shape and dtype of the
/// result.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::{DeltaHeads, PrefixTree, gated_delta_rule_gradient};
///
/// let heads = DeltaHeads { key_heads: 1, value_heads: 1, key_dim: 1, value_dim: 1 };
/// // A first row: the result is beta times the value.
/// let qkv = Tensor::new(&[[2f32, 1., 3.]], &Device::Cpu)?;
/// let (g, beta) = (Tensor::new(&[[0f32]], &Device::Cpu)?, Tensor::new(&[[0.5f32]], &Device::Cpu)?);
/// let one = Tensor::new(&[[1f32]], &Device::Cpu)?;
/// let tree = PrefixTree::new(&[1])?;
/// let [_, _, beta_gradient] = gated_delta_rule_gradient([&qkv, &g, &beta], heads, &tree, &one)?;
/// assert!((beta_gradient.to_vec2::<f32>()?[0][0] - 3.).abs() < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn gated_delta_rule_gradient(
    inputs: [&Tensor; 3],
    heads: DeltaHeads,
    tree: &PrefixTree,
    gradient: &Tensor,
) -> Result<[Tensor; 3]> {
    let [qkv, g, beta] = inputs;
    check(qkv, g, beta, heads)?;
    tree.check_rows("qkv", qkv.dim(0)?)?;
    let result = [qkv.dim(0)?, heads.values()];
    if gradient.dims() != result {
        bail!(
            "gradient: shape {:?}, must be that of the result, {result:?}",
            gradient.dims()
        );
    }
    check::same_dtype("gradient", gradient, "qkv", qkv)?;
    check::same_device(&[("qkv", qkv), ("gradient", gradient)])?;
    if !is_fused(qkv, heads) {
        return graph::gradients(inputs, gradient, |inputs| {
            composed::unchecked(inputs, heads, tree)
        });
    }
    let op = GatedDeltaRule {
        heads,
        tree: tree.clone(),
    };
    op.gradients(
        [&qkv.contiguous()?, &g.contiguous()?, &beta.contiguous()?],
        gradient,
    )
}

/// Heads for [`gated_delta_rule`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaHeads {
    /// Number of query and key heads.
    pub key_heads: usize,
    /// Number of value and state heads, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Query and key width per head.
    pub key_dim: usize,
    /// Value width per head.
    pub value_dim: usize,
}

impl DeltaHeads {
    /// Value heads that share a key head.
    pub(crate) fn group(&self) -> usize {
        self.value_heads / self.key_heads
    }

    /// Elements in a row's queries, or in its keys; at most `usize::MAX`.
    pub const fn keys(&self) -> usize {
        self.key_heads.saturating_mul(self.key_dim)
    }

    /// Elements in a row's values; at most `usize::MAX`.
    pub const fn values(&self) -> usize {
        self.value_heads.saturating_mul(self.value_dim)
    }

    /// Elements in a row's queries, keys and values; at most `usize::MAX`.
    pub const fn width(&self) -> usize {
        self.keys().saturating_mul(2).saturating_add(self.values())
    }

    /// Fails if a size is 0, or if the number of value heads is not a multiple of the number of key
    /// heads.
    pub(crate) fn check(&self) -> Result<()> {
        for (name, size) in [
            ("key_heads", self.key_heads),
            ("value_heads", self.value_heads),
            ("key_dim", self.key_dim),
            ("value_dim", self.value_dim),
        ] {
            if size == 0 {
                bail!("heads.{name}: 0, must be at least 1");
            }
        }
        if !self.value_heads.is_multiple_of(self.key_heads) {
            bail!(
                "heads.value_heads: {}, must be a multiple of key_heads, {}",
                self.value_heads,
                self.key_heads
            );
        }
        Ok(())
    }
}

/// Added to the sum of squares in a query or key.
pub(crate) const NORM_EPSILON: f64 = 1e-6;

/// Returns whether the fused path supports these heads.
pub(crate) fn is_fused(qkv: &Tensor, heads: DeltaHeads) -> bool {
    #[cfg(feature = "cuda")]
    if qkv.device().is_cuda() && !cuda::has_heads(&heads) {
        return false;
    }
    let _ = heads;
    path::is_fused(qkv)
}

/// Checks the arguments except the tree.
pub(crate) fn check(qkv: &Tensor, g: &Tensor, beta: &Tensor, heads: DeltaHeads) -> Result<()> {
    heads.check()?;
    check::float("qkv", qkv)?;
    let rows = match *qkv.dims() {
        [rows, width] if width == heads.width() => rows,
        _ => bail!(
            "qkv: shape {:?}, must be [N, {}], 2 * {} * {} + {} * {} from heads",
            qkv.dims(),
            heads.width(),
            heads.key_heads,
            heads.key_dim,
            heads.value_heads,
            heads.value_dim
        ),
    };
    for (name, gate) in [("g", g), ("beta", beta)] {
        if gate.dims() != [rows, heads.value_heads] {
            bail!(
                "{name}: shape {:?}, must be [{rows}, {}], the rows of qkv and the value heads",
                gate.dims(),
                heads.value_heads
            );
        }
        let wide = arithmetic_dtype(qkv.dtype());
        if gate.dtype() != wide {
            bail!(
                "{name}: {:?}, must be {wide:?} for qkv of {:?}",
                gate.dtype(),
                qkv.dtype()
            );
        }
    }
    check::same_device(&[("qkv", qkv), ("g", g), ("beta", beta)])
}

/// The rule on contiguous `qkv` `[N, width]`, `g` and `beta` `[N, value_heads]`.
pub(crate) struct GatedDeltaRule {
    pub(crate) heads: DeltaHeads,
    pub(crate) tree: PrefixTree,
}

impl GatedDeltaRule {
    /// Returns the gradients for contiguous inputs.
    fn gradients(&self, inputs: [&Tensor; 3], gradient: &Tensor) -> Result<[Tensor; 3]> {
        let gradient = gradient.contiguous()?;
        #[cfg(feature = "cuda")]
        if gradient.device().is_cuda() {
            return cuda::backward(inputs, &gradient, self);
        }
        with_element!(inputs[0].dtype(), "qkv", T => {
            cpu::backward::<T>(inputs, &gradient, self)
        })
    }
}

impl CustomOp3 for GatedDeltaRule {
    fn name(&self) -> &'static str {
        "gated_delta_rule"
    }

    fn cpu_fwd(
        &self,
        qkv: &CpuStorage,
        qkv_layout: &Layout,
        g: &CpuStorage,
        g_layout: &Layout,
        beta: &CpuStorage,
        beta_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let range = slice::range(qkv_layout)?;
        let g = &g.as_slice::<f32>()?[slice::range(g_layout)?];
        let beta = &beta.as_slice::<f32>()?[slice::range(beta_layout)?];
        let o = with_floats!(qkv, "qkv", qkv => {
            let inputs = cpu::Inputs { qkv: &qkv[range], g, beta };
            WithDType::to_cpu_storage_owned(cpu::forward(&inputs, self))
        });
        let rows = qkv_layout.dims()[0];
        Ok((o, (rows, self.heads.values()).into()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        qkv: &candle_core::CudaStorage,
        qkv_layout: &Layout,
        g: &candle_core::CudaStorage,
        g_layout: &Layout,
        beta: &candle_core::CudaStorage,
        beta_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        cuda::forward((qkv, qkv_layout), (g, g_layout), (beta, beta_layout), self)
    }

    fn bwd(
        &self,
        qkv: &Tensor,
        g: &Tensor,
        beta: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [of_qkv, of_g, of_beta] = self.gradients([qkv, g, beta], gradient)?;
        Ok((Some(of_qkv), Some(of_g), Some(of_beta)))
    }
}

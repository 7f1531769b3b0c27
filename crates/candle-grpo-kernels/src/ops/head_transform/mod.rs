//! Operations on query and key heads before attention.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;

#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Result, Tensor, bail};

use crate::check;
use crate::ops::gate_heads;
use crate::ops::rms_norm::{RmsNormOptions, rms_norm, rms_norm_gradient};
use crate::ops::rope::{rope, rope_gradient};

/// Operations on each query and key head before attention: the norms, then the rotation.
///
/// [`Self::apply`] transforms heads, and [`Self::gradients`] is its backward pass.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_grpo_kernels::HeadTransform;
///
/// // A position with two query heads and a key head, rotated by a right angle.
/// let cos = Tensor::new(&[[0f32]], &Device::Cpu)?;
/// let sin = Tensor::new(&[[1f32]], &Device::Cpu)?;
/// let transform = HeadTransform { angles: Some([&cos, &sin]), ..Default::default() };
/// let query = Tensor::new(&[[1f32, 0., 2., 3.]], &Device::Cpu)?;
/// let key = Tensor::new(&[[0f32, 5.]], &Device::Cpu)?;
/// let heads = transform.apply([&query, &key])?;
/// assert_eq!(heads[0].to_vec2::<f32>()?, [[0., 1., -3., 2.]]);
/// assert_eq!(heads[1].to_vec2::<f32>()?, [[-5., 0.]]);
///
/// let back = transform.gradients(None, heads.each_ref(), None)?.heads;
/// assert_eq!(back[1].to_vec2::<f32>()?, [[0., 5.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadTransform<'a> {
    /// Head norms. Absent by default.
    pub norms: Option<HeadNorms<'a>>,
    /// Rotation cosines and sines, `[N, pairs]` each; see [`rope`](crate::rope()). Absent by
    /// default.
    pub angles: Option<[&'a Tensor; 2]>,
    /// Head width, if only its first elements rotate: twice as many as there are angles. `None`
    /// means that all rotate. Absent by default.
    pub head_dim: Option<usize>,
    /// Each query head is followed by a gate of its width, for
    /// [`gate_heads`](crate::gate_heads()): queries are `[N, heads * 2 * head_dim]`. Requires
    /// `head_dim`. Default `false`.
    pub has_gates: bool,
}

/// RMSNorms for query and key heads; see [`rms_norm`].
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms<'a> {
    /// Weights `[head_dim]` for queries and for keys.
    pub weights: [&'a Tensor; 2],
    /// Options for both.
    pub options: RmsNormOptions,
}

/// Results of [`HeadTransform::gradients`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HeadGradients {
    /// Gradients with respect to the query, with its gates, and the key.
    pub heads: [Tensor; 2],
    /// Gradients with respect to [`HeadNorms::weights`], if there are norms.
    pub weights: Option<[Tensor; 2]>,
}

impl HeadTransform<'_> {
    /// Transforms query and key heads, `[N, heads * head_dim]` each. Gates are left out.
    ///
    /// The arguments and the norm weights get gradients. On CUDA this takes one launch if none of
    /// them is in a graph.
    ///
    /// # Errors
    ///
    /// Same as [`rms_norm`] and [`rope`](crate::rope()). Also fails if there are gates and no
    /// `head_dim`.
    pub fn apply(&self, [query, key]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        #[cfg(feature = "cuda")]
        if let Some(shape) = self.shape_on_cuda([query, key])?
            && ![query, key].iter().any(|x| x.track_op())
            && !self.has_variables()
        {
            return cuda::apply(self, [query, key], shape);
        }
        let query = self.without_gates(query)?;
        let [query, key] = match &self.norms {
            Some(norms) => [norms.apply(&query, 0)?, norms.apply(key, 1)?],
            None => [query, key.clone()],
        };
        Ok([self.rotate(&query, false)?, self.rotate(&key, false)?])
    }

    /// Computes the backward pass for [`Self::apply`], without a graph, given the gradients with
    /// respect to its results. On CUDA this takes one launch, and a second one with norms.
    ///
    /// `heads` are the arguments to [`Self::apply`], which norms and gates require. With gates,
    /// `gated` has the gradient with respect to the gated attention output, and the output before
    /// the gates, `[N, heads * head_dim]` each.
    ///
    /// # Errors
    ///
    /// Same as [`Self::apply`]. Also fails if an argument is missing, or if shapes or dtypes do not
    /// match.
    pub fn gradients(
        &self,
        heads: Option<[&Tensor; 2]>,
        gradients: [&Tensor; 2],
        gated: Option<[&Tensor; 2]>,
    ) -> Result<HeadGradients> {
        if heads.is_none() && (self.norms.is_some() || self.has_gates) {
            bail!("heads: None, must be given with norms or gates");
        }
        if gated.is_some() != self.has_gates {
            bail!("gated: must be given with gates, and only with them");
        }
        for gradient in gradients.into_iter().chain(gated.into_iter().flatten()) {
            check::float("gradients", gradient)?;
        }
        #[cfg(feature = "cuda")]
        if let Some(shape) = self.gradient_shape_on_cuda(heads, gradients, gated)? {
            return cuda::gradients(self, heads, gradients, gated, shape);
        }
        let mut found = HeadGradients {
            heads: [
                self.rotate(&gradients[0].detach(), true)?,
                self.rotate(&gradients[1].detach(), true)?,
            ],
            weights: None,
        };
        let Some([query, key]) = heads else {
            return Ok(found);
        };
        if let Some(norms) = &self.norms {
            let query = self.without_gates(query)?;
            let [of_query, of_key] = found.heads.each_ref();
            let (of_query, of_query_weight) = norms.gradients(&query, of_query, 0)?;
            let (of_key, of_key_weight) = norms.gradients(key, of_key, 1)?;
            found = HeadGradients {
                heads: [of_query, of_key],
                weights: Some([of_query_weight, of_key_weight]),
            };
        }
        if let Some([gradient, mixed]) = gated {
            let head_dim = self.width_with_gates()?;
            let of_gates = gate_heads::gates_gradient(mixed, query, head_dim, gradient)?;
            found.heads[0] = gate_heads::join([&found.heads[0], &of_gates], head_dim)?;
        }
        Ok(found)
    }

    /// The query heads without the gates.
    fn without_gates(&self, query: &Tensor) -> Result<Tensor> {
        if !self.has_gates {
            return Ok(query.clone());
        }
        gate_heads::half(query, self.width_with_gates()?, 0)
    }

    fn width_with_gates(&self) -> Result<usize> {
        match self.head_dim {
            Some(head_dim) if head_dim > 0 => Ok(head_dim),
            _ => bail!(
                "head_dim: {:?}, must be positive where queries have gates",
                self.head_dim
            ),
        }
    }

    /// Rotates all heads in `x`, or with `back` inverts it.
    fn rotate(&self, x: &Tensor, back: bool) -> Result<Tensor> {
        let Some([cos, sin]) = self.angles else {
            return Ok(x.clone());
        };
        let turn = |x: &Tensor| {
            if back {
                rope_gradient(cos, sin, x)
            } else {
                rope(x, cos, sin)
            }
        };
        let width = 2 * check::width("cos", cos)?;
        let Some(head_dim) = self.head_dim.filter(|&head_dim| head_dim != width) else {
            return turn(x);
        };
        let parts = PartOfHeads::new(x, width, head_dim)?;
        parts.join(&turn(&parts.first)?)
    }

    /// Returns whether a kernel supports the norms and the angles, for `n` rows of heads with this
    /// width in the dtype and on the device of `like`. If not, [`Self::apply`] may fail.
    #[cfg(feature = "cuda")]
    pub(crate) fn fits(&self, n: usize, head_dim: usize, like: &Tensor) -> bool {
        let here = |x: &Tensor| x.device().same_device(like.device());
        let norms = self.norms.is_none_or(|norms| {
            let fits = |w: &Tensor| w.dims() == [head_dim] && w.dtype() == like.dtype() && here(w);
            let epsilon = norms.options.epsilon;
            epsilon > 0.0 && epsilon.is_finite() && norms.weights.into_iter().all(fits)
        });
        let pairs = self.pairs();
        let angles = self.angles.is_none_or(|angles| {
            let fits = |x: &Tensor| x.dims() == [n, pairs] && x.dtype() == DType::F32 && here(x);
            angles.into_iter().all(fits)
        });
        let width = self
            .head_dim
            .map_or(2 * pairs, |width| width.max(2 * pairs));
        let rotates = self.angles.is_none() || (pairs > 0 && width == head_dim);
        norms && angles && rotates && (!self.has_gates || self.head_dim == Some(head_dim))
    }

    /// Returns 2 if a gate follows each query head, else 1.
    #[cfg(feature = "cuda")]
    pub(crate) fn parts(&self) -> usize {
        if self.has_gates { 2 } else { 1 }
    }

    /// Rotated pairs in a head.
    #[cfg(feature = "cuda")]
    pub(crate) fn pairs(&self) -> usize {
        let last = |[cos, _]: [&Tensor; 2]| cos.dims().last().copied();
        self.angles.and_then(last).unwrap_or(0)
    }

    /// The shape for the kernel, if it supports the arguments to [`Self::apply`]. If not, the
    /// individual operators run or return an error.
    #[cfg(feature = "cuda")]
    fn shape_on_cuda(&self, [query, key]: [&Tensor; 2]) -> Result<Option<cuda::Shape>> {
        check::float("query", query)?;
        let parts = self.parts();
        let norm_width = self.norms.map(|norms| norms.weights[0].elem_count());
        let width = self.head_dim.or(norm_width).unwrap_or(2 * self.pairs());
        let (&[n, query_width], &[key_rows, key_width]) = (query.dims(), key.dims()) else {
            return Ok(None);
        };
        let fits = query.device().is_cuda()
            && crate::path::is_fused(query)
            && key.dtype() == query.dtype()
            && key.device().same_device(query.device())
            && (self.norms.is_some() || self.angles.is_some() || self.has_gates)
            && (1..=cuda::MAX_WIDTH).contains(&width)
            && n == key_rows
            && query_width.is_multiple_of(parts * width)
            && key_width.is_multiple_of(width)
            && self.fits(n, width, query);
        Ok(fits.then(|| cuda::Shape {
            n,
            heads: query_width / (parts * width),
            kv_heads: key_width / width,
            query_step: parts * width,
            head_dim: width,
            pairs: self.pairs(),
        }))
    }

    /// Like [`Self::shape_on_cuda`], for the arguments to [`Self::gradients`].
    #[cfg(feature = "cuda")]
    fn gradient_shape_on_cuda(
        &self,
        heads: Option<[&Tensor; 2]>,
        gradients: [&Tensor; 2],
        gated: Option<[&Tensor; 2]>,
    ) -> Result<Option<cuda::Shape>> {
        let Some(shape) = self.shape_on_cuda(heads.unwrap_or(gradients))? else {
            return Ok(None);
        };
        let is_like = |x: &Tensor, heads: usize| {
            x.dims() == [shape.n, heads * shape.head_dim]
                && x.dtype() == gradients[0].dtype()
                && x.device().same_device(gradients[0].device())
        };
        let [of_query, of_key] = gradients;
        let mut of_queries = gated.into_iter().flatten().chain([of_query]);
        let fits = heads.is_none_or(|[query, _]| query.dtype() == of_query.dtype())
            && of_queries.all(|x| is_like(x, shape.heads))
            && is_like(of_key, shape.kv_heads);
        Ok(fits.then_some(shape))
    }

    #[cfg(feature = "cuda")]
    fn has_variables(&self) -> bool {
        let weights = self.norms.map(|norms| norms.weights);
        weights.into_iter().flatten().any(Tensor::track_op)
    }
}

/// Heads `[N, heads * head_dim]`, split in two.
struct PartOfHeads {
    /// First elements in each head, `[N, heads * width]`.
    first: Tensor,
    /// The rest, `[N, heads, head_dim - width]`.
    rest: Tensor,
}

impl PartOfHeads {
    fn new(x: &Tensor, width: usize, head_dim: usize) -> Result<Self> {
        if width > head_dim || !check::width("x", x)?.is_multiple_of(head_dim) {
            bail!(
                "head_dim: {head_dim}, must be at least twice the pairs of angles, {width}, and divide the width of {:?}",
                x.dims()
            );
        }
        let heads = heads_of(x, head_dim)?;
        let (n, count, _) = heads.dims3()?;
        let first = heads.narrow(2, 0, width)?.contiguous()?;
        Ok(Self {
            first: first.reshape((n, count * width))?,
            rest: heads.narrow(2, width, head_dim - width)?,
        })
    }

    /// The heads with a new first part.
    fn join(&self, first: &Tensor) -> Result<Tensor> {
        let (n, heads, rest) = self.rest.dims3()?;
        let width = first.dim(1)? / heads.max(1);
        let first = first.reshape((n, heads, width))?;
        Tensor::cat(&[&first, &self.rest], 2)?.reshape((n, heads * (width + rest)))
    }
}

impl HeadNorms<'_> {
    /// Normalizes the heads in `x` with the weight at this index.
    fn apply(&self, x: &Tensor, index: usize) -> Result<Tensor> {
        let weight = self.weights[index];
        rms_norm(&heads_of(x, weight.elem_count())?, weight, self.options)?.reshape(x.shape())
    }

    /// Returns the gradients with respect to `x` and the weight at this index.
    fn gradients(&self, x: &Tensor, gradient: &Tensor, index: usize) -> Result<(Tensor, Tensor)> {
        let weight = self.weights[index];
        let heads = |x: &Tensor| heads_of(x, weight.elem_count());
        let (of_x, of_weight) =
            rms_norm_gradient(&heads(x)?, weight, self.options, &heads(gradient)?)?;
        Ok((of_x.reshape(x.shape())?, of_weight))
    }
}

/// Reshapes `[N, heads * width]` to `[N, heads, width]`.
pub(crate) fn heads_of(x: &Tensor, width: usize) -> Result<Tensor> {
    match x.dims() {
        &[n, all] if width > 0 && all.is_multiple_of(width) => x.reshape((n, all / width, width)),
        dims => bail!("heads: shape {dims:?}, must be [N, heads * {width}]"),
    }
}

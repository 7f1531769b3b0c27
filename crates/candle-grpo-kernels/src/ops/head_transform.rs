//! Operations on query and key heads before attention.

#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Result, Tensor, bail};

use crate::check;
use crate::ops::rope::rope_both;
use crate::rms_norm;

/// Operations on each query and key head before attention, starting with the norms.
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
}

/// RMSNorms for query and key heads; see [`rms_norm`].
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms<'a> {
    /// Weights `[head_dim]` for queries and for keys.
    pub weights: [&'a Tensor; 2],
    /// Epsilon for both.
    pub epsilon: f64,
}

impl HeadTransform<'_> {
    /// Transforms query and key heads, `[N, heads * head_dim]` each.
    ///
    /// The arguments and the norm weights get gradients. On CUDA both rotations take one launch if
    /// neither is in a graph.
    ///
    /// # Errors
    ///
    /// Same as [`rms_norm`] and [`rope`](crate::rope()).
    pub fn apply(&self, [query, key]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        let [query, key] = match &self.norms {
            Some(norms) => [norms.apply(query, 0)?, norms.apply(key, 1)?],
            None => [query.clone(), key.clone()],
        };
        self.rotate([query, key], false)
    }

    /// Returns the gradients with respect to the heads before the rotation, given those for the
    /// results of [`Self::apply`], without a graph. On CUDA this takes one launch.
    ///
    /// # Errors
    ///
    /// Same as [`rope`](crate::rope()).
    pub fn rotate_back(&self, [query, key]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        self.rotate([query.detach(), key.detach()], true)
    }

    fn rotate(&self, [query, key]: [Tensor; 2], back: bool) -> Result<[Tensor; 2]> {
        let Some(angles) = self.angles else {
            return Ok([query, key]);
        };
        let width = 2 * check::width("cos", angles[0])?;
        let Some(head_dim) = self.head_dim.filter(|&head_dim| head_dim != width) else {
            return rope_both([&query, &key], angles, back);
        };
        let [query, key] = [
            PartOfHeads::new(&query, width, head_dim)?,
            PartOfHeads::new(&key, width, head_dim)?,
        ];
        let [rotated_query, rotated_key] = rope_both([&query.first, &key.first], angles, back)?;
        Ok([query.join(&rotated_query)?, key.join(&rotated_key)?])
    }

    /// Returns whether the kernel that writes pages supports all tensors, for `n` rows and the
    /// pages' `values`. If not, [`Self::apply`] fails.
    #[cfg(feature = "cuda")]
    pub(crate) fn fits(&self, n: usize, values: &Tensor) -> Result<bool> {
        let head_dim = values.dim(3)?;
        let here = |x: &Tensor| x.device().same_device(values.device());
        let norms = self.norms.is_none_or(|norms| {
            let fits =
                |w: &Tensor| w.dims() == [head_dim] && w.dtype() == values.dtype() && here(w);
            norms.epsilon > 0.0 && norms.epsilon.is_finite() && norms.weights.into_iter().all(fits)
        });
        let angles = self.angles.is_none_or(|angles| {
            let fits =
                |x: &Tensor| x.dims() == [n, head_dim / 2] && x.dtype() == DType::F32 && here(x);
            head_dim.is_multiple_of(2) && angles.into_iter().all(fits)
        });
        Ok(norms && angles)
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
        if width > head_dim || !x.elem_count().is_multiple_of(head_dim) {
            bail!(
                "head_dim: {head_dim}, must be at least twice the pairs of angles, {width}, and divide the width of {:?}",
                x.dims()
            );
        }
        let n = x.dim(0)?;
        let heads = x.reshape((n, (), head_dim))?;
        Ok(Self {
            first: heads.narrow(2, 0, width)?.contiguous()?.reshape((n, ()))?,
            rest: heads.narrow(2, width, head_dim - width)?,
        })
    }

    /// The heads with a new first part.
    fn join(&self, first: &Tensor) -> Result<Tensor> {
        let (n, heads, _) = self.rest.dims3()?;
        let first = first.reshape((n, heads, ()))?;
        Tensor::cat(&[&first, &self.rest], 2)?.reshape((n, ()))
    }
}

impl HeadNorms<'_> {
    /// Normalizes the heads in `x` with the weight at this index.
    fn apply(&self, x: &Tensor, index: usize) -> Result<Tensor> {
        let weight = self.weights[index];
        let heads = x.reshape((x.dim(0)?, (), weight.elem_count()))?;
        rms_norm(&heads, weight, self.epsilon)?.reshape(x.shape())
    }
}

//! The operations on heads of queries and keys before attention.

#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Result, Tensor};

use crate::rms_norm;
use crate::rope::rope_both;

/// The operations on each head of queries and keys before attention, the norms first.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadTransform<'a> {
    /// The RMSNorms of the heads.
    pub norms: Option<HeadNorms<'a>>,
    /// Cosines and sines of the rotation, `[N, head_dim / 2]` each; see
    /// [`rope`](crate::rope()).
    pub angles: Option<[&'a Tensor; 2]>,
}

/// The RMSNorms of the heads of queries and keys; see [`rms_norm`].
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms<'a> {
    /// The weights `[head_dim]` for queries and for keys.
    pub weights: [&'a Tensor; 2],
    /// The epsilon of both.
    pub epsilon: f64,
}

impl HeadTransform<'_> {
    /// Transforms the heads of queries and keys, `[N, heads * head_dim]` each.
    ///
    /// The arguments and the weights of the norms have gradients. On CUDA the rotations are one
    /// launch if none is in a graph.
    ///
    /// # Errors
    ///
    /// Fails as [`rms_norm`] and [`rope`](crate::rope()).
    pub fn apply(&self, [query, key]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        let [query, key] = match &self.norms {
            Some(norms) => [norms.apply(query, 0)?, norms.apply(key, 1)?],
            None => [query.clone(), key.clone()],
        };
        match self.angles {
            Some(angles) => rope_both([&query, &key], angles, false),
            None => Ok([query, key]),
        }
    }

    /// Returns the gradients of the heads before the rotation from those of [`Self::apply`]'s
    /// results, without a graph. On CUDA this is one launch.
    ///
    /// # Errors
    ///
    /// Fails as [`rope`](crate::rope()).
    pub fn rotate_back(&self, [query, key]: [&Tensor; 2]) -> Result<[Tensor; 2]> {
        let [query, key] = [query.detach(), key.detach()];
        match self.angles {
            Some(angles) => rope_both([&query, &key], angles, true),
            None => Ok([query, key]),
        }
    }

    /// Returns whether all tensors are as the kernel of writes to pages takes them, for `n` rows
    /// and the `values` of the pages. The others are errors of [`Self::apply`].
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

impl HeadNorms<'_> {
    /// Norms the heads of `x` with the weight of this index.
    fn apply(&self, x: &Tensor, index: usize) -> Result<Tensor> {
        let weight = self.weights[index];
        let heads = x.reshape((x.dim(0)?, (), weight.elem_count()))?;
        rms_norm(&heads, weight, self.epsilon)?.reshape(x.shape())
    }
}

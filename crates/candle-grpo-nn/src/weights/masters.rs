//! The weights that ranks divide.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_grpo_collective::Collective;

use crate::weights::divided_weights::DividedWeights;
use crate::weights::shard::Shard;

/// The division of weights between ranks, see
/// [`AdamWConfig::division`](crate::AdamWConfig::division).
#[derive(Debug, Clone)]
pub struct WeightDivision {
    /// The dtype of the weights that the ranks compute with.
    dtype: DType,
    shard: Shard,
    /// True if the ranks also divide f32 weights, from which those in `dtype` are rounded.
    has_masters: bool,
    /// True if the ranks divide the weights that they compute with.
    is_full: bool,
}

impl WeightDivision {
    /// The division of f32 weights. Each rank has all weights in `dtype`.
    pub(crate) fn of_masters(dtype: DType, shard: Shard) -> Self {
        Self {
            dtype,
            shard,
            has_masters: true,
            is_full: false,
        }
    }

    /// The division of weights in `dtype`, and of f32 weights if there are such masters.
    pub(crate) fn full(dtype: DType, shard: Shard, has_masters: bool) -> Self {
        Self {
            dtype,
            shard,
            has_masters: has_masters && dtype != DType::F32,
            is_full: true,
        }
    }

    /// The division of weights that do not train, in `dtype`, between the ranks in `collective`.
    /// `None` with one rank.
    pub fn frozen(dtype: DType, collective: &Arc<dyn Collective>) -> Option<Self> {
        let shard = Shard::new(Arc::clone(collective), 1);
        (collective.world_size() > 1).then(|| Self::full(dtype, shard, false))
    }
}

/// The weights of a model that ranks divide: f32 master weights, weights in the dtype of the
/// computation, or both.
#[derive(Debug, Clone)]
pub(crate) struct Masters {
    division: WeightDivision,
    /// This rank's part of each f32 master weight, as [`Shard::keep`] lays it out.
    kept: BTreeMap<String, Var>,
    /// The weights that the ranks compute with, if they divide these.
    weights: Option<Arc<DividedWeights>>,
}

impl Masters {
    /// Creates the masters without weights.
    pub(crate) fn new(division: &WeightDivision) -> Self {
        let weights = || Arc::new(DividedWeights::new(division.shard.clone()));
        Self {
            kept: BTreeMap::new(),
            weights: division.is_full.then(weights),
            division: division.clone(),
        }
    }

    pub(crate) fn shard(&self) -> &Shard {
        &self.division.shard
    }

    /// The weights that the ranks compute with, if they divide these.
    pub(crate) fn weights(&self) -> Option<&Arc<DividedWeights>> {
        self.weights.as_ref()
    }

    /// The dtype of a [gathered](Self::gather) weight.
    pub(crate) fn dtype(&self) -> DType {
        if self.division.has_masters {
            DType::F32
        } else {
            self.division.dtype
        }
    }

    /// Keeps this rank's part of a weight, and returns the variable that models compute with.
    pub(crate) fn divide(&mut self, name: &str, weight: &Tensor) -> Result<Var> {
        let has_masters = self.division.has_masters;
        if has_masters && weight.dtype() != DType::F32 {
            bail!("{name}: {:?}, must be F32 to be divided", weight.dtype());
        }
        if !weight.dtype().is_float() {
            bail!("{name}: blocks of quantized numbers, must be dense to be divided");
        }
        let variable = Var::from_tensor(&weight.to_dtype(self.division.dtype)?)?;
        self.keep(
            name,
            &variable,
            self.shard().keep(weight, weight.elem_count())?,
        )?;
        Ok(variable)
    }

    /// [`Self::divide`] for a weight on `device` of which `read` returns a range, where ranks
    /// divide all weights. This rank reads only its part.
    pub(crate) fn divide_read(
        &mut self,
        name: &str,
        (shape, device): (&Shape, &Device),
        read: impl Fn(Range<usize>) -> Result<Tensor>,
    ) -> Result<Var> {
        let own = self.shard().read(shape.elem_count(), read)?;
        let variable = Var::zeros(shape, self.division.dtype, device)?;
        self.keep(name, &variable, own.to_device(device)?)?;
        Ok(variable)
    }

    /// Keeps `own`, this rank's part of the weight that `variable` has in the dtype of the
    /// computation.
    fn keep(&mut self, name: &str, variable: &Var, own: Tensor) -> Result<()> {
        if let Some(weights) = &self.weights {
            let own = own.to_dtype(self.division.dtype)?;
            weights.insert(name, variable, Var::from_tensor(&own)?)?;
        }
        if self.division.has_masters {
            self.kept.insert(name.to_owned(), Var::from_tensor(&own)?);
        }
        Ok(())
    }

    /// This rank's part of the f32 master weight of this name.
    pub(crate) fn kept(&self, name: &str) -> Option<&Var> {
        self.kept.get(name)
    }

    /// This rank's part of the weight of this name in the dtype of the computation, if the ranks
    /// divide it.
    pub(crate) fn own(&self, name: &str) -> Option<Var> {
        self.weights.as_ref()?.own(name)
    }

    /// Gathers the weight of `variable`: the one in f32, if the ranks divide that. A weight that
    /// they do not divide is the variable itself.
    pub(crate) fn gather(&self, name: &str, variable: &Var) -> Result<Tensor> {
        let Some(kept) = self.kept(name).cloned().or_else(|| self.own(name)) else {
            return Ok(variable.as_detached_tensor());
        };
        let elements = variable.elem_count();
        let whole = Tensor::zeros(elements, kept.dtype(), kept.device())?;
        self.shard().gather(&kept, &whole, elements)?;
        whole.reshape(variable.shape())
    }
}

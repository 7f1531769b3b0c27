//! The weights that ranks divide, and f32 weights in host memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, bail};
use candle_grpo_collective::Collective;

use crate::optim::StateMemory;
use crate::weights::divided_weights::DividedWeights;
use crate::weights::shard::Shard;

/// The division of weights between ranks, or between a device and the host, see
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
    /// The memory for the f32 weights.
    memory: StateMemory,
}

impl WeightDivision {
    /// The division of f32 weights. Each rank has all weights in `dtype`.
    pub(crate) fn of_masters(dtype: DType, shard: Shard) -> Self {
        Self {
            dtype,
            shard,
            has_masters: true,
            is_full: false,
            memory: StateMemory::Device,
        }
    }

    /// The division of weights in `dtype`, and of f32 weights if there are such masters.
    pub(crate) fn full(dtype: DType, shard: Shard, has_masters: bool) -> Self {
        Self {
            dtype,
            shard,
            has_masters,
            is_full: true,
            memory: StateMemory::Device,
        }
    }

    /// This division with the f32 weights in `memory`.
    pub(crate) fn with_memory(self, memory: StateMemory) -> Self {
        Self { memory, ..self }
    }

    /// Returns whether there is another rank or another memory for weights of a model on `device`.
    pub(crate) fn divides_on(&self, device: &Device) -> bool {
        let has_ranks = self.shard.collective.world_size() > 1;
        has_ranks || !self.memory.beside(device).same_device(device)
    }

    /// The division of weights that do not train, in `dtype`, between the ranks in `collective`.
    /// `None` with one rank.
    pub fn frozen(dtype: DType, collective: &Arc<dyn Collective>) -> Option<Self> {
        let shard = Shard::new(Arc::clone(collective), 1);
        (collective.world_size() > 1).then(|| Self::full(dtype, shard, false))
    }
}

/// The weights of a model that ranks divide: f32 master weights, weights in the dtype of the
/// computation, or both. One rank alone has f32 master weights in host memory.
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

    /// Returns whether several ranks divide the weights.
    pub(crate) fn has_ranks(&self) -> bool {
        self.shard().collective.world_size() > 1
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
        let weight = weight.to_device(&self.division.memory.beside(weight.device()))?;
        let own = self.shard().keep(&weight, weight.elem_count())?;
        self.keep(name, &variable, &own)?;
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
        self.keep(name, &variable, &own)?;
        Ok(variable)
    }

    /// Keeps `own`, this rank's part of the weight that `variable` has in the dtype of the
    /// computation.
    fn keep(&mut self, name: &str, variable: &Var, own: &Tensor) -> Result<()> {
        let device = variable.device();
        if let Some(weights) = &self.weights {
            let own = own.to_device(device)?.to_dtype(self.division.dtype)?;
            weights.insert(name, variable, Var::from_tensor(&own)?)?;
        }
        if self.division.has_masters {
            let own = own.to_device(&self.division.memory.beside(device))?;
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

    /// Gathers the weight of `variable`: the one in f32, if the ranks divide that, or there is one
    /// in host memory, which stays there. A weight that they do not divide is the variable itself.
    pub(crate) fn gather(&self, name: &str, variable: &Var) -> Result<Tensor> {
        let Some(kept) = self.kept(name).cloned().or_else(|| self.own(name)) else {
            return Ok(variable.as_detached_tensor());
        };
        if !self.has_ranks() {
            return kept.as_detached_tensor().reshape(variable.shape());
        }
        let elements = variable.elem_count();
        let kept = kept.to_device(variable.device())?;
        let whole = Tensor::zeros(elements, kept.dtype(), kept.device())?;
        self.shard().gather(&kept, &whole, elements)?;
        whole.reshape(variable.shape())
    }
}

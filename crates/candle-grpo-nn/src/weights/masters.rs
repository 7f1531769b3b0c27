//! The f32 weights that ranks divide.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Result, Tensor, Var, bail};

use crate::weights::shard::Shard;

/// The division of f32 weights between ranks, see
/// [`AdamWConfig::division`](crate::AdamWConfig::division).
#[derive(Debug, Clone)]
pub struct WeightDivision {
    /// The dtype of the copies that each rank has of all weights.
    dtype: DType,
    shard: Shard,
}

impl WeightDivision {
    pub(crate) fn new(dtype: DType, shard: Shard) -> Self {
        Self { dtype, shard }
    }
}

/// The f32 master weights of variables in another dtype, which ranks divide.
#[derive(Debug, Clone)]
pub(crate) struct Masters {
    division: WeightDivision,
    /// This rank's part of each, as [`Shard::keep`] lays it out.
    kept: BTreeMap<String, Var>,
}

impl Masters {
    /// Creates the masters without weights.
    pub(crate) fn new(division: &WeightDivision) -> Self {
        Self {
            division: division.clone(),
            kept: BTreeMap::new(),
        }
    }

    pub(crate) fn shard(&self) -> &Shard {
        &self.division.shard
    }

    /// Keeps this rank's part of a weight, and returns the rounded copy of the whole.
    pub(crate) fn divide(&mut self, name: &str, weight: &Tensor) -> Result<Tensor> {
        if weight.dtype() != DType::F32 {
            bail!("{name}: {:?}, must be F32 to be divided", weight.dtype());
        }
        let own = self.shard().keep(weight, weight.elem_count())?;
        self.kept.insert(name.to_owned(), Var::from_tensor(&own)?);
        weight.to_dtype(self.division.dtype)
    }

    /// This rank's part of the weight of this name.
    pub(crate) fn kept(&self, name: &str) -> Option<&Var> {
        self.kept.get(name)
    }

    /// Gathers the weight that `variable` is the rounded copy of.
    pub(crate) fn gather(&self, name: &str, variable: &Var) -> Result<Tensor> {
        let Some(kept) = self.kept.get(name) else {
            bail!("{name}: no master weight, must have one");
        };
        let elements = variable.elem_count();
        let whole = Tensor::zeros(elements, kept.dtype(), kept.device())?;
        self.shard().gather(kept, &whole, elements)?;
        whole.reshape(variable.shape())
    }

    /// Sends rank 0's `request` to all ranks: the index of a weight to gather, or [`END`].
    pub(crate) fn request(&self, request: i64) -> Result<i64> {
        let message = Tensor::new(&[request], &Device::Cpu)?;
        self.shard().collective.broadcast(&[&message], 0)?;
        Ok(message.to_vec1::<i64>()?[0])
    }
}

/// The [request](Masters::request) after the last one.
pub(crate) const END: i64 = -1;

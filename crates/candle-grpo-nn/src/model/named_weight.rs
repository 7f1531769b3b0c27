//! A weight and its name.

use candle_core::{Result, Shape, Tensor};
use candle_nn::VarBuilder;

use crate::weights::base_weights::check_shape;

/// A tensor from a builder, with its name there.
///
/// The name matches the variable in [`Parameters`](crate::Parameters). A backward pass without a
/// graph stores the gradient under it.
#[derive(Debug, Clone)]
pub(crate) struct NamedWeight {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
}

impl NamedWeight {
    pub(crate) fn get(vb: &VarBuilder, shape: impl Into<Shape>, name: &str) -> Result<Self> {
        let tensor = vb.get(shape.into(), name)?;
        Ok(Self::new(vb, tensor, name))
    }

    /// Reads a linear map's weight: `[outputs, inputs]`, or quantized blocks.
    pub(crate) fn map(vb: &VarBuilder, shape: (usize, usize)) -> Result<Self> {
        const WEIGHT: &str = "weight";
        let Ok(weight) = vb.get_unchecked_dtype(WEIGHT, vb.dtype()) else {
            // A builder that creates variables needs the shape.
            return Self::get(vb, shape, WEIGHT);
        };
        let weight = Self::new(vb, weight, WEIGHT);
        check_shape(&weight.name, &weight.tensor, &shape.into())?;
        Ok(weight)
    }

    /// Wraps `tensor` with its name in `vb`.
    pub(crate) fn new(vb: &VarBuilder, tensor: Tensor, name: &str) -> Self {
        let prefix = vb.prefix();
        let name = if prefix.is_empty() {
            name.to_owned()
        } else {
            format!("{prefix}.{name}")
        };
        Self { name, tensor }
    }
}

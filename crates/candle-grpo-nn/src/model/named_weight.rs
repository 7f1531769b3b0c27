//! A weight and its name.

use candle_core::{Result, Shape, Tensor};
use candle_nn::VarBuilder;

/// What a builder handed out. The name is that of the variable among [`Parameters`](crate::Parameters): a backward pass
/// without a graph knows by it where the gradient goes.
#[derive(Debug, Clone)]
pub(crate) struct Weight {
    pub(crate) name: String,
    pub(crate) tensor: Tensor,
}

impl Weight {
    pub(crate) fn get(vb: &VarBuilder, shape: impl Into<Shape>, name: &str) -> Result<Self> {
        let tensor = vb.get(shape.into(), name)?;
        Ok(Self::new(vb, tensor, name))
    }

    /// `tensor` under the name that it has in `vb`.
    pub(crate) fn new(vb: &VarBuilder, tensor: Tensor, name: &str) -> Self {
        let prefix = vb.prefix();
        let name = match prefix.is_empty() {
            true => name.to_owned(),
            false => format!("{prefix}.{name}"),
        };
        Self { name, tensor }
    }
}

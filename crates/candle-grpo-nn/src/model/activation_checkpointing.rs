//! Activation checkpointing.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::DecoderConfig;

/// The layers of which a recorded pass keeps only the input, and which the backward pass recomputes
/// (<https://arxiv.org/abs/1604.06174>). Gradients have the same bits for every choice.
///
/// A checkpointed layer is computed a second time. If all of them are, a step takes about a third
/// longer. Recomputed layers come first, as with Megatron's `recompute_method: block`: when the
/// backward pass reaches them, it has released the activations of the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(
    untagged,
    expecting = "expected true, false or the number of layers to recompute"
)]
pub enum ActivationCheckpointing {
    /// All layers, or none.
    All(bool),
    /// This number of layers, beginning with the first one.
    Layers(usize),
}

impl Default for ActivationCheckpointing {
    /// No layer.
    fn default() -> Self {
        Self::All(false)
    }
}

impl From<bool> for ActivationCheckpointing {
    fn from(all: bool) -> Self {
        Self::All(all)
    }
}

impl std::fmt::Display for ActivationCheckpointing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::All(all) => all.fmt(f),
            Self::Layers(layers) => layers.fmt(f),
        }
    }
}

impl ActivationCheckpointing {
    /// Returns the number of recomputed layers in `model`.
    ///
    /// # Errors
    ///
    /// If the model has fewer layers.
    pub fn layers(self, model: &DecoderConfig) -> Result<usize> {
        let all = model.num_hidden_layers;
        match self {
            Self::All(false) => Ok(0),
            Self::All(true) => Ok(all),
            Self::Layers(layers) if layers > all => bail!(
                "activation_checkpointing: {layers}, must be true, false or at most {all}, the number of layers of the model"
            ),
            Self::Layers(layers) => Ok(layers),
        }
    }

    /// Returns whether no layer is recomputed.
    pub fn is_off(self) -> bool {
        matches!(self, Self::All(false) | Self::Layers(0))
    }
}

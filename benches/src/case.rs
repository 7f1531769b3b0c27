//! The benchmark cases.

use candle_core::{DType, Device, Result, Tensor};

use crate::bandwidth::Bandwidth;
use crate::region::{Sample, region};

/// A run that measures itself, without its preparation.
pub(crate) type Run = Box<dyn FnMut() -> Result<Sample>>;

/// Creates the inputs on a device and returns the operator and its twin.
pub(crate) type Prepare = Box<dyn Fn(&Device) -> Result<Pair>>;

/// A row in the table: an operator and its twin on one shape.
pub(crate) struct Case {
    /// The operator.
    pub(crate) op: &'static str,
    /// Its shape, in words.
    pub(crate) shape: String,
    /// Dtype of the main input.
    pub(crate) dtype: DType,
    /// The measured passes.
    pub(crate) direction: Direction,
    /// Called only when the case runs, because inputs are large.
    pub(crate) prepare: Prepare,
    /// The bandwidth goal, if the twin is a copy.
    pub(crate) bandwidth: Option<Bandwidth>,
}

/// The operator and its twin, on the same inputs.
pub(crate) struct Pair {
    /// The fused operator.
    pub(crate) ours: Run,
    /// Its composed twin, or another reference.
    pub(crate) composed: Run,
}

/// The measured passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Both passes.
    Both,
}

impl Direction {
    /// All directions.
    pub(crate) const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::Both];

    /// Returns the name in the table.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Both => "forward+backward",
        }
    }

    /// Creates a run from `forward`. If a backward pass is measured, `forward` returns a scalar in
    /// a graph.
    pub(crate) fn run(
        self,
        device: &Device,
        forward: impl Fn() -> Result<Tensor> + 'static,
    ) -> Run {
        let device = device.clone();
        Box::new(move || match self {
            Self::Forward => region(&device, &forward),
            Self::Backward => {
                let result = forward()?;
                region(&device, || result.backward())
            }
            Self::Both => region(&device, || forward()?.backward()),
        })
    }
}

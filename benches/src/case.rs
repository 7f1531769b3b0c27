//! What is measured.

use candle_core::{DType, Device, Result, Tensor};

use crate::bandwidth::Bandwidth;
use crate::region::{Sample, region};

/// A run that measures itself: what it has to prepare does not count.
pub(crate) type Run = Box<dyn FnMut() -> Result<Sample>>;

/// Makes the inputs on a device, and gives the operator and its twin.
pub(crate) type Prepare = Box<dyn Fn(&Device) -> Result<Pair>>;

/// One row of the table: an operator on one shape, with the twin that it is measured beside.
pub(crate) struct Case {
    /// The operator.
    pub(crate) op: &'static str,
    /// Its shape, in words.
    pub(crate) shape: String,
    /// The dtype of its main input.
    pub(crate) dtype: DType,
    /// Which passes count.
    pub(crate) direction: Direction,
    /// Only called when the case is run, since inputs are large.
    pub(crate) prepare: Prepare,
    /// Whether the twin is a copy, which the operator should be as fast as.
    pub(crate) bandwidth: Option<Bandwidth>,
}

/// The operator and its twin, on the same inputs.
pub(crate) struct Pair {
    /// The fused operator.
    pub(crate) ours: Run,
    /// Its composed twin, or what else it is measured beside.
    pub(crate) composed: Run,
}

/// Which passes count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The forward pass.
    Forward,
    /// The backward pass.
    Backward,
    /// Both.
    Both,
}

impl Direction {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::Both];

    /// As the table says it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Both => "forward+backward",
        }
    }

    /// A run of `forward`, which gives a scalar in a graph.
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

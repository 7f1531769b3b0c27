//! Memory layouts for operator arguments.

use candle_core::{Result, Tensor};
use proptest::prelude::*;

/// An argument's layout in memory.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Layout {
    Contiguous,
    /// Zeros precede and follow the entries.
    Offset,
    /// A zero follows each entry.
    Strided,
    /// The last two dimensions are swapped, if there are two.
    Transposed,
    /// The first dimension's first index is broadcast.
    BroadcastFirst,
    /// The last dimension's first index is broadcast.
    BroadcastLast,
}

impl Layout {
    pub(crate) const ALL: [Self; 6] = [
        Self::Contiguous,
        Self::Offset,
        Self::Strided,
        Self::Transposed,
        Self::BroadcastFirst,
        Self::BroadcastLast,
    ];

    /// Returns `values` in this layout. A layout that broadcasts drops most of them.
    pub(crate) fn apply(self, values: &Tensor) -> Result<Tensor> {
        self.view(&self.memory(values)?, values.dims())
    }

    /// Returns the contiguous tensor whose [`view`](Self::view) is `values` in this layout.
    pub(crate) fn memory(self, values: &Tensor) -> Result<Tensor> {
        let rank = values.rank();
        let first = |dim| values.narrow(dim, 0, values.dim(dim)?.min(1));
        match self {
            Self::Contiguous => Ok(values.clone()),
            Self::Offset => values.pad_with_zeros(0, 2, 1),
            Self::Strided => Tensor::stack(&[values, &values.zeros_like()?], rank),
            Self::Transposed => values
                .transpose(rank.saturating_sub(2), rank - 1)?
                .contiguous(),
            Self::BroadcastFirst => first(0),
            Self::BroadcastLast => first(rank - 1),
        }
    }

    /// Returns the view with shape `dims` into a [`memory`](Self::memory).
    pub(crate) fn view(self, memory: &Tensor, dims: &[usize]) -> Result<Tensor> {
        let rank = dims.len();
        match self {
            Self::Contiguous => Ok(memory.clone()),
            Self::Offset => memory.narrow(0, 2, dims[0]),
            Self::Strided => memory.narrow(rank, 0, 1)?.squeeze(rank),
            Self::Transposed => memory.transpose(rank.saturating_sub(2), rank - 1),
            Self::BroadcastFirst | Self::BroadcastLast => memory.broadcast_as(dims),
        }
    }
}

pub(crate) fn layouts() -> impl Strategy<Value = Layout> {
    prop::sample::select(&Layout::ALL)
}

//! Strategies for dtypes and lengths.

use candle_core::DType;
use proptest::prelude::*;

/// The dtypes with a fused path.
pub(crate) fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::BF16), Just(DType::F16)]
}

/// Lengths for up to three tensors. The long ones are distributed over several cores.
pub(crate) fn lengths() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![
        0usize..40,
        1000usize..1100,
        Just(1 << 15),
        (1usize << 15)..(1 << 15) + 2000
    ];
    prop::collection::vec(len, 0..4)
}

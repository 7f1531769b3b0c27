//! In which dtype to do arithmetic that sums or exponentiates.

use candle_core::DType;

/// f32 for the half types, whose sums lose too much; f32 and f64 stay as they are.
pub(crate) fn arithmetic_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

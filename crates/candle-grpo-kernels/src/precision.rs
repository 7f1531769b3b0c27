//! In which dtype to do arithmetic that sums or exponentiates.

use candle_core::DType;

/// f32 for everything but f64, which stays: sums of the half types lose too much.
pub fn arithmetic_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

//! Arithmetic dtypes.

use candle_core::DType;

/// Returns the dtype for sums and exponentials, given inputs in `dtype`: f64 for f64, f32 for all
/// others.
pub fn arithmetic_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

//! Dtypes of arithmetic.

use candle_core::DType;

/// Returns the dtype of sums and exponentials of `dtype`: f64 for f64, f32 for all others.
pub fn arithmetic_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

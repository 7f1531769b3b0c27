//! The dtype in which a model computes.

use candle_core::DType;
use serde::{Deserialize, Serialize};

/// The dtype for a policy's forward and backward pass. Sums, norms, softmax, log-probs and losses
/// are always f32.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum ComputeDType {
    /// f32.
    #[default]
    F32,
    /// bfloat16: halves activation memory, and is much faster on GPUs and faster on CPUs with
    /// `avx512_bf16`.
    Bf16,
    /// IEEE half precision. Prefer bf16, which has a wider range.
    F16,
}

impl From<ComputeDType> for DType {
    fn from(dtype: ComputeDType) -> Self {
        match dtype {
            ComputeDType::F32 => DType::F32,
            ComputeDType::Bf16 => DType::BF16,
            ComputeDType::F16 => DType::F16,
        }
    }
}

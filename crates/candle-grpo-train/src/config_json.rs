//! The file `config.json` of a model.

use candle_core::DType;
use serde_json::{Value, json};

/// Returns PyTorch's name for the dtype of weights.
pub(crate) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

/// Sets the dtype keys that exist.
pub(crate) fn set_dtype(config: &mut Value, dtype: DType) {
    let name = dtype_name(dtype);
    for key in ["dtype", "torch_dtype"] {
        if let Some(value) = config.get_mut(key) {
            *value = json!(name);
        }
    }
}

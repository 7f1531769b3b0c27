//! The file `config.json` of a model.

use candle_core::DType;
use serde_json::{Value, json};

/// Sets the dtype keys that exist.
pub(crate) fn set_dtype(config: &mut Value, dtype: DType) {
    let name = match dtype {
        DType::BF16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    };
    for key in ["dtype", "torch_dtype"] {
        if let Some(value) = config.get_mut(key) {
            *value = json!(name);
        }
    }
}

//! GGUF files.

use std::io::Cursor;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Result, Tensor};

/// Returns a GGUF file with these values and tensors, in name order. Tensors with rank 1 are f32,
/// and others have the dtype `dtype`.
pub fn gguf_bytes<'a>(
    metadata: impl IntoIterator<Item = (&'a String, &'a Value)>,
    tensors: impl IntoIterator<Item = (&'a String, &'a Tensor)>,
    dtype: GgmlDType,
) -> Result<Vec<u8>> {
    let mut metadata: Vec<_> = metadata
        .into_iter()
        .map(|(key, v)| (key.as_str(), v))
        .collect();
    metadata.sort_by_key(|(key, _)| *key);
    let mut quantized = Vec::new();
    for (name, tensor) in tensors {
        let dtype = match tensor.rank() {
            1 => GgmlDType::F32,
            _ => dtype,
        };
        quantized.push((name.as_str(), QTensor::quantize(tensor, dtype)?));
    }
    quantized.sort_by_key(|(name, _)| *name);
    let tensors: Vec<_> = quantized.iter().map(|(name, t)| (*name, t)).collect();
    let mut bytes = Cursor::new(Vec::new());
    gguf_file::write(&mut bytes, &metadata, &tensors)?;
    Ok(bytes.into_inner())
}

//! Quantized block types.

use candle_core::quantized::GgmlDType;
use candle_core::{DType, Result, Tensor, bail};

use crate::check;

/// Block types with a CPU and a CUDA path, which [`quantize`](crate::quantize) writes and
/// [`dequantize`](crate::dequantize()) reads. Block sizes in bytes are all different.
pub const BLOCK_TYPES: [GgmlDType; 8] = [
    GgmlDType::Q4_0,
    GgmlDType::Q4_1,
    GgmlDType::Q5_0,
    GgmlDType::Q5_1,
    GgmlDType::Q8_0,
    GgmlDType::Q4K,
    GgmlDType::Q5K,
    GgmlDType::Q6K,
];

/// Returns the type of `blocks`, which determines how many values they hold.
///
/// # Errors
///
/// Fails unless they have the shape and dtype that [`dequantize`](crate::dequantize()) requires.
pub fn block_type(blocks: &Tensor) -> Result<GgmlDType> {
    named_block_type("blocks", blocks)
}

pub(crate) fn named_block_type(name: &str, blocks: &Tensor) -> Result<GgmlDType> {
    check::one_stream(blocks.device())?;
    let found = match (blocks.dtype(), blocks.dims()) {
        (DType::U8, &[_, _, bytes]) => BLOCK_TYPES.iter().find(|t| t.type_size() == bytes),
        _ => None,
    };
    match found {
        Some(found) => Ok(*found),
        None => bail!(
            "{name}: {:?} of {:?}, must be u8 [outputs, blocks, bytes of a block]",
            blocks.dims(),
            blocks.dtype()
        ),
    }
}

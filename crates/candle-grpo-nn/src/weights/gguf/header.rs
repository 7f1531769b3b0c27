//! GGUF file header: metadata and tensor locations.

use std::collections::BTreeMap;
use std::io::Read;

use candle_core::quantized::GgmlDType;
use candle_core::{Error, Result, bail};

use super::GgufValue;
use super::bytes::Bytes;

#[derive(Debug)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, GgufValue>,
    pub(super) tensors: BTreeMap<String, TensorPlace>,
}

/// A tensor's type, shape and byte range in the file.
#[derive(Debug, Clone)]
pub(super) struct TensorPlace {
    pub(super) dtype: GgmlDType,
    /// Slowest dimension first.
    pub(super) dims: Vec<usize>,
    pub(super) start: u64,
    pub(super) length: usize,
}

const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMS: u32 = 4;

impl Header {
    pub(super) fn read(reader: impl Read, file_length: u64) -> Result<Self> {
        let mut bytes = Bytes::new(reader, file_length);
        let magic: [u8; 4] = bytes.array()?;
        if magic != *MAGIC {
            let found = String::from_utf8_lossy(&magic);
            bail!("begins with {found:?}, must begin with GGUF");
        }
        let version = bytes.u32()?;
        if !(2..=3).contains(&version) {
            bail!("version: {version}, must be 2 or 3 of a little-endian file");
        }
        let (tensor_count, metadata_count) = (bytes.u64()?, bytes.u64()?);
        // Minimum sizes: an empty string, a type and a byte; an empty string, the rank, a type and
        // an offset.
        bytes.ensure_left("metadata entries", metadata_count, 13)?;
        bytes.ensure_left("tensors", tensor_count, 24)?;

        let mut metadata = BTreeMap::new();
        for _ in 0..metadata_count {
            let key = bytes.string()?;
            let value_type = bytes.u32()?;
            let value = value(&mut bytes, value_type)
                .map_err(|error| Error::msg(format!("metadata {key}: {error}")))?;
            if metadata.insert(key.clone(), value).is_some() {
                bail!("metadata {key}: twice, must occur once");
            }
        }
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let name = bytes.string()?;
            let place =
                place(&mut bytes).map_err(|error| Error::msg(format!("tensor {name}: {error}")))?;
            if tensors.insert(name.clone(), place).is_some() {
                bail!("tensor {name}: twice, must occur once");
            }
        }

        let alignment = match metadata.get(ALIGNMENT) {
            None => DEFAULT_ALIGNMENT,
            Some(value) => match value.as_u64() {
                Some(alignment @ 1..=0x1_0000) => alignment,
                _ => bail!("metadata {ALIGNMENT}: {value}, must be from 1 to 65536"),
            },
        };
        let data = bytes.position().next_multiple_of(alignment);
        let mut total = 0u64;
        for (name, place) in &mut tensors {
            let end = data
                .checked_add(place.start)
                .inspect(|&start| place.start = start)
                .and_then(|start| start.checked_add(place.length as u64));
            if end.is_none_or(|end| end > file_length) {
                bail!(
                    "tensor {name}: {} bytes from byte {}, must be within the file of {file_length} bytes",
                    place.length,
                    place.start
                );
            }
            // Overlapping tensors would allocate more memory than the file has.
            total = total.saturating_add(place.length as u64);
        }
        if total > file_length {
            bail!(
                "tensors: {total} bytes together, must be at most the length of the file, {file_length}"
            );
        }
        Ok(Self { metadata, tensors })
    }
}

fn value(bytes: &mut Bytes<impl Read>, value_type: u32) -> Result<GgufValue> {
    Ok(match value_type {
        6 | 12 => GgufValue::Float(float(bytes, value_type)?),
        7 => GgufValue::Bool(match bytes.array()? {
            [0] => false,
            [1] => true,
            [other] => bail!("a boolean: {other}, must be 0 or 1"),
        }),
        8 => GgufValue::String(bytes.string()?),
        9 => array(bytes)?,
        _ => GgufValue::Integer(integer(bytes, value_type)?),
    })
}

fn array(bytes: &mut Bytes<impl Read>) -> Result<GgufValue> {
    let (element_type, count) = (bytes.u32()?, bytes.u64()?);
    let size = match element_type {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        _ => bail!("an array of type {element_type}, must be one of numbers, booleans or strings"),
    };
    bytes.ensure_left("array", count, size)?;
    Ok(match element_type {
        6 | 12 => GgufValue::Floats(
            (0..count)
                .map(|_| float(bytes, element_type))
                .collect::<Result<_>>()?,
        ),
        8 => GgufValue::Strings((0..count).map(|_| bytes.string()).collect::<Result<_>>()?),
        _ => GgufValue::Integers(
            (0..count)
                .map(|_| {
                    let value = match element_type {
                        7 => i128::from(bytes.array::<1>()?[0]),
                        _ => integer(bytes, element_type)?,
                    };
                    i64::try_from(value).map_err(Error::wrap)
                })
                .collect::<Result<_>>()?,
        ),
    })
}

fn integer(bytes: &mut Bytes<impl Read>, value_type: u32) -> Result<i128> {
    Ok(match value_type {
        0 => u8::from_le_bytes(bytes.array()?).into(),
        1 => i8::from_le_bytes(bytes.array()?).into(),
        2 => u16::from_le_bytes(bytes.array()?).into(),
        3 => i16::from_le_bytes(bytes.array()?).into(),
        4 => u32::from_le_bytes(bytes.array()?).into(),
        5 => i32::from_le_bytes(bytes.array()?).into(),
        10 => u64::from_le_bytes(bytes.array()?).into(),
        11 => i64::from_le_bytes(bytes.array()?).into(),
        other => bail!("a value of type {other}, must be a type of GGUF"),
    })
}

fn float(bytes: &mut Bytes<impl Read>, value_type: u32) -> Result<f64> {
    if value_type == 12 {
        return Ok(f64::from_le_bytes(bytes.array()?));
    }
    let value = f32::from_le_bytes(bytes.array()?);
    // The shortest decimal: 1e-5 instead of 9.999999747378752e-6.
    value.to_string().parse().map_err(Error::wrap)
}

/// Reads a tensor's location. Its `start` is relative to the data section.
fn place(bytes: &mut Bytes<impl Read>) -> Result<TensorPlace> {
    let rank = bytes.u32()?;
    if !(1..=MAX_DIMS).contains(&rank) {
        bail!("{rank} dimensions, must be 1 to {MAX_DIMS}");
    }
    let mut dims = Vec::new();
    for _ in 0..rank {
        dims.push(usize::try_from(bytes.u64()?).map_err(Error::wrap)?);
    }
    dims.reverse();
    let dtype = dtype(bytes.u32()?)?;
    let start = bytes.u64()?;
    let row = dims[dims.len() - 1];
    if dims.contains(&0) || !row.is_multiple_of(dtype.block_size()) {
        bail!(
            "shape {dims:?}, must have no 0, and as last dimension a multiple of {} for type {dtype:?}",
            dtype.block_size()
        );
    }
    let length = dims
        .iter()
        .try_fold(1usize, |product, &dim| product.checked_mul(dim))
        .and_then(|elements| (elements / dtype.block_size()).checked_mul(dtype.type_size()))
        // The dequantized size in bytes must not overflow either.
        .filter(|&length| length < isize::MAX as usize / 16);
    let Some(length) = length else {
        bail!("shape {dims:?}, must be of a size that fits in memory");
    };
    Ok(TensorPlace {
        dtype,
        dims,
        start,
        length,
    })
}

/// Types that Candle can dequantize.
fn dtype(number: u32) -> Result<GgmlDType> {
    Ok(match number {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        10 => GgmlDType::Q2K,
        11 => GgmlDType::Q3K,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        other => bail!(
            "type {other} of ggml, must be F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 or Q2_K to Q6_K"
        ),
    })
}

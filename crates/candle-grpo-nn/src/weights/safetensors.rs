//! Weights in one safetensors file, or in several with an index.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::path::{Component, Path};
use std::str::FromStr;

use candle_core::{DType, Error, Result, bail};
use safetensors::Dtype;
use serde::Deserialize;

use candle_grpo_base::json;

const MODEL: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

#[derive(Deserialize)]
struct Index {
    /// Maps each tensor to its file.
    weight_map: BTreeMap<String, String>,
}

/// Reads `model.safetensors` with `read_file`, or, if absent, the files that
/// `model.safetensors.index.json` lists.
pub(crate) fn read_folder<T>(
    folder: &Path,
    read_file: impl Fn(&Path) -> Result<HashMap<String, T>>,
) -> Result<HashMap<String, T>> {
    let index = folder.join(INDEX);
    if folder.join(MODEL).exists() || !index.exists() {
        return read_file(&folder.join(MODEL));
    }
    let text = fs::read(index).map_err(|error| Error::msg(format!("{INDEX}: {error}")))?;
    let Index { weight_map } = serde_json::from_slice(&text)
        .map_err(|error| Error::msg(format!("{INDEX}: {}", json::message_with_place(&error))))?;
    let mut tensors = HashMap::new();
    for file in weight_map.values().collect::<BTreeSet<_>>() {
        let mut parts = Path::new(file).components();
        if !matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(_)), None)
        ) {
            bail!("{INDEX}: {file:?}, must be the name of a file in the same directory");
        }
        for (name, tensor) in read_file(&folder.join(file))? {
            if weight_map.get(&name) != Some(file) {
                bail!("{file}: {name}, must be where {INDEX} places it");
            }
            tensors.insert(name, tensor);
        }
    }
    if let Some((name, file)) = weight_map
        .iter()
        .find(|(name, _)| !tensors.contains_key(*name))
    {
        bail!("{file}: no {name}, must have it as {INDEX} places it there");
    }
    Ok(tensors)
}

/// A tensor's entry in a file header.
#[derive(Deserialize)]
pub(crate) struct TensorHeader {
    dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Start and end, in bytes after the header.
    data_offsets: [u64; 2],
}

impl TensorHeader {
    /// The entry for a part of this tensor.
    pub(crate) fn with_shape(&self, shape: Vec<usize>) -> Self {
        Self {
            dtype: self.dtype.clone(),
            shape,
            data_offsets: self.data_offsets,
        }
    }

    /// The dtype and the byte range after the header.
    pub(crate) fn stored(&self) -> Result<(Dtype, Range<u64>)> {
        let dtype: Dtype = serde_json::from_value(self.dtype.clone().into())
            .map_err(|_| Error::msg(format!("dtype {}, must be a known one", self.dtype)))?;
        let [start, end] = self.data_offsets;
        let bits = self
            .shape
            .iter()
            .try_fold(dtype.bitsize(), |bits, &size| bits.checked_mul(size));
        if bits.map(|bits| bits as u64)
            != end
                .checked_sub(start)
                .and_then(|bytes| bytes.checked_mul(8))
        {
            bail!(
                "bytes {start} to {end}, must be those of the shape {:?}",
                self.shape
            );
        }
        Ok((dtype, start..end))
    }

    /// Fails unless the dtype is a floating-point type that Candle can read.
    pub(crate) fn check_dtype(&self) -> Result<()> {
        let name = self.dtype.to_ascii_lowercase().replace('_', "");
        if !DType::from_str(&name).is_ok_and(|dtype| dtype.is_float()) {
            bail!("dtype {}, must be a floating-point type", self.dtype);
        }
        Ok(())
    }
}

/// Reads one safetensors header. Errors name the file.
pub(crate) fn read_header(path: &Path) -> Result<HashMap<String, TensorHeader>> {
    open_header(path).map(|(_, _, tensors)| tensors)
}

/// A safetensors file, the offset where its data starts, and its header entries.
type OpenHeader = (File, u64, HashMap<String, TensorHeader>);

/// Like [`read_header`], with the file kept open.
pub(crate) fn open_header(path: &Path) -> Result<OpenHeader> {
    let read = || -> Result<OpenHeader> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        let mut size = [0; 8];
        file.read_exact(&mut size)?;
        let size = u64::from_le_bytes(size);
        let Some(data) = length
            .checked_sub(8)
            .and_then(|rest| rest.checked_sub(size))
        else {
            bail!("a header of {size} bytes, must fit into the {length} bytes of the file");
        };
        let mut header = vec![0; size as usize];
        file.read_exact(&mut header)?;
        let mut header: serde_json::Map<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|error| {
                Error::msg(format!("the header, {}", json::message_with_place(&error)))
            })?;
        header.remove("__metadata__");
        let tensors: HashMap<String, TensorHeader> = json::typed(&header.into())?;
        let mut offsets: Vec<[u64; 2]> = tensors.values().map(|t| t.data_offsets).collect();
        offsets.sort_unstable();
        let end = offsets.iter().try_fold(0, |end, &[start, next]| {
            (start == end && next >= end).then_some(next)
        });
        let Some(end) = end else {
            bail!("data_offsets: gaps or overlaps, must place the tensors one after the other");
        };
        if end != data {
            bail!("{data} bytes of tensors, must have {end}");
        }
        Ok((file, length - data, tensors))
    };
    read().map_err(|error| in_file(path, error))
}

/// Returns the byte range of each tensor in a safetensors file, by its name.
///
/// # Errors
///
/// Returns an error that names the file if it cannot be read, or its header does not fit to it.
pub fn tensor_places(path: &Path) -> Result<HashMap<String, Range<u64>>> {
    let (_, begin, tensors) = open_header(path)?;
    let place = |tensor: TensorHeader| -> Result<Range<u64>> {
        let (_, place) = tensor.stored()?;
        Ok(begin + place.start..begin + place.end)
    };
    let places = tensors.into_iter();
    let places = places.map(|(name, tensor)| Ok((name, place(tensor)?)));
    places
        .collect::<Result<_>>()
        .map_err(|error| in_file(path, error))
}

pub(crate) fn in_file(path: &Path, error: Error) -> Error {
    let name = path.file_name().unwrap_or(path.as_os_str());
    Error::msg(format!("{}: {error}", name.display()))
}

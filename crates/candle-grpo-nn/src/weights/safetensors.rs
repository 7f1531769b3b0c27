//! Weights in one safetensors file, or in several with an index.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::{Component, Path};

use candle_core::{Device, Error, Result, Tensor, bail};
use serde::Deserialize;

use crate::weights::check::check_finite;

const MODEL: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

#[derive(Deserialize)]
struct Index {
    /// The file of each tensor.
    weight_map: BTreeMap<String, String>,
}

/// Reads all tensors of `model.safetensors`, or, without it, of the files that
/// `model.safetensors.index.json` lists.
pub(crate) fn read_folder(folder: &Path) -> Result<HashMap<String, Tensor>> {
    let index = folder.join(INDEX);
    if folder.join(MODEL).exists() || !index.exists() {
        return read_file(&folder.join(MODEL));
    }
    let text = fs::read(index).map_err(|error| Error::msg(format!("{INDEX}: {error}")))?;
    let Index { weight_map } =
        serde_json::from_slice(&text).map_err(|error| Error::msg(format!("{INDEX}: {error}")))?;
    let mut tensors = HashMap::new();
    for file in weight_map.values().collect::<BTreeSet<_>>() {
        let mut parts = Path::new(file).components();
        if !matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(_)), None)
        ) {
            bail!("{INDEX}: {file:?}, must be the name of a file in the same folder");
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

/// Reads all tensors of one safetensors file and checks that they are finite. Errors name the file.
pub(crate) fn read_file(path: &Path) -> Result<HashMap<String, Tensor>> {
    let context = |error: Error| {
        let name = path.file_name().unwrap_or(path.as_os_str());
        Error::msg(format!("{}: {error}", name.display()))
    };
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).map_err(context)?;
    for (name, tensor) in &tensors {
        check_finite(tensor)
            .map_err(|error| context(Error::msg(format!("tensor {name}: {error}"))))?;
    }
    Ok(tensors)
}

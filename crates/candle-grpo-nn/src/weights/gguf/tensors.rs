//! The weights of a GGUF file under their Hugging Face names.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::{Device, Error, Result, Tensor, bail};

use super::config::{EMBEDDING, OUTPUT};
use super::header::{Header, TensorPlace};
use super::rope::FACTORS;
use crate::DecoderConfig;
use crate::weights::check::{check_finite, check_names};

/// Returns the Hugging Face name and the place of each weight of `config`, by its stored name.
///
/// # Errors
///
/// Names a tensor that is missing, surplus or of another shape.
pub(super) fn places<'a>(
    header: &'a Header,
    config: &DecoderConfig,
) -> Result<BTreeMap<String, (String, &'a TensorPlace)>> {
    let mut expected = BTreeMap::new();
    let mut names = BTreeMap::new();
    for (name, shape) in config.parameter_shapes() {
        let Some(stored) = stored_name(&name) else {
            bail!("parameter {name}: must have a name in GGUF files");
        };
        expected.insert(stored.clone(), shape);
        names.insert(stored, name);
    }
    let found: HashMap<_, _> = header
        .tensors
        .iter()
        .filter(|(name, _)| *name != FACTORS)
        .map(|(name, place)| (name.clone(), place))
        .collect();
    check_names("tensors", &expected, &found)?;
    for (stored, shape) in &expected {
        let dims = &found[stored].dims;
        if dims != shape.dims() {
            bail!(
                "tensor {stored}: shape {dims:?}, must be {:?}",
                shape.dims()
            );
        }
    }
    let place = |(stored, name)| {
        let place = found[&stored];
        (stored, (name, place))
    };
    Ok(names.into_iter().map(place).collect())
}

/// Reads all weights of `config` in f32 by their Hugging Face names.
pub(super) fn read(
    path: &Path,
    header: &Header,
    config: &DecoderConfig,
) -> Result<HashMap<String, Tensor>> {
    // All shapes before the first read.
    let places = places(header, config)?;
    let mut file = File::open(path)?;
    places
        .into_iter()
        .map(|(stored, (name, place))| {
            let read = |file: &mut File| -> Result<Tensor> {
                let tensor = tensor(file, place)?;
                check_finite(&tensor)?;
                rotate_by_halves(config, &name, tensor)
            };
            let tensor =
                read(&mut file).map_err(|error| Error::msg(format!("tensor {stored}: {error}")))?;
            Ok((name, tensor))
        })
        .collect()
}

/// Reads the divisors of the rotary frequencies, if the file has them.
pub(super) fn rope_factors(path: &Path, header: &Header) -> Result<Option<Vec<f32>>> {
    let Some(place) = header.tensors.get(FACTORS) else {
        return Ok(None);
    };
    let values = tensor(&mut File::open(path)?, place)?;
    Ok(Some(values.flatten_all()?.to_vec1()?))
}

fn tensor(file: &mut File, place: &TensorPlace) -> Result<Tensor> {
    // The header has been checked against the length of the file.
    let mut bytes = vec![0; place.length];
    file.seek(SeekFrom::Start(place.start))?;
    file.read_exact(&mut bytes)?;
    qtensor_from_ggml(place.dtype, &bytes, place.dims.clone(), &Device::Cpu)?
        .dequantize(&Device::Cpu)
}

/// Reorders the rows of query and key to Hugging Face's layout, where the first half of a head
/// rotates with the second. The files of Llama and SmolLM3 store the two rows of a pair side by
/// side, in weights and biases.
fn rotate_by_halves(config: &DecoderConfig, name: &str, tensor: Tensor) -> Result<Tensor> {
    let layout = config.model_type.family().gguf.as_ref();
    let heads = match name {
        _ if !layout.is_some_and(|layout| layout.adjacent_pairs) => return Ok(tensor),
        name if name.contains(".q_proj.") => config.num_attention_heads,
        name if name.contains(".k_proj.") => config.num_key_value_heads,
        _ => return Ok(tensor),
    };
    let rows = tensor.dim(0)?;
    tensor
        .reshape((heads, rows / heads / 2, 2, ()))?
        .transpose(1, 2)?
        .reshape(tensor.shape())
}

/// The name in GGUF files of the parameter with this Hugging Face name.
fn stored_name(name: &str) -> Option<String> {
    Some(match name {
        "model.embed_tokens.weight" => EMBEDDING.to_owned(),
        "model.norm.weight" => "output_norm.weight".to_owned(),
        "lm_head.weight" => OUTPUT.to_owned(),
        _ => {
            let (layer, name) = name.strip_prefix("model.layers.")?.split_once('.')?;
            let (name, kind) = name.rsplit_once('.')?;
            let name = match name {
                "input_layernorm" => "attn_norm",
                "post_attention_layernorm" => "ffn_norm",
                "self_attn.q_proj" => "attn_q",
                "self_attn.k_proj" => "attn_k",
                "self_attn.v_proj" => "attn_v",
                "self_attn.o_proj" => "attn_output",
                "self_attn.q_norm" => "attn_q_norm",
                "self_attn.k_norm" => "attn_k_norm",
                "mlp.gate_proj" => "ffn_gate",
                "mlp.up_proj" => "ffn_up",
                "mlp.down_proj" => "ffn_down",
                _ => return None,
            };
            format!("blk.{layer}.{name}.{kind}")
        }
    })
}

//! Training data.

use std::collections::BTreeMap;

use bytes::Bytes;
use candle_grpo_base::server::Refusal;
use serde::Deserialize;

use super::proto::{self, DType, chunk, tensor};

/// An example's tokens with its loss inputs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Datum {
    pub(crate) tokens: Vec<u32>,
    pub(crate) inputs: BTreeMap<String, Values>,
}

/// A one-dimensional tensor.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Values {
    Integers(Vec<i64>),
    Numbers(Vec<f32>),
}

impl Values {
    /// Returns the values as tokens.
    pub(crate) fn tokens(&self, name: &str) -> Result<Vec<u32>, Refusal> {
        match self {
            Self::Integers(values) => tokens(name, values.iter().copied()),
            Self::Numbers(_) => Err(Refusal::invalid(name, "float32", "be int64 tokens")),
        }
    }

    /// Returns the values as numbers.
    pub(crate) fn numbers(&self) -> Vec<f32> {
        match self {
            Self::Integers(values) => values.iter().map(|&value| value as f32).collect(),
            Self::Numbers(values) => values.clone(),
        }
    }
}

/// Converts signed tokens, as the clients send them.
fn tokens(name: &str, ids: impl Iterator<Item = i64>) -> Result<Vec<u32>, Refusal> {
    let token = |(at, id): (usize, i64)| {
        let name = format!("{name}[{at}]");
        u32::try_from(id).map_err(|_| Refusal::invalid(&name, id, "be a token of the model"))
    };
    ids.enumerate().map(token).collect()
}

/// Splits bytes into `N`-byte values.
fn words<const N: usize>(name: &str, bytes: &Bytes) -> Result<Vec<[u8; N]>, Refusal> {
    let (words, rest) = bytes.as_chunks::<N>();
    if rest.is_empty() {
        return Ok(words.to_vec());
    }
    let value = format!("{} bytes", bytes.len());
    Err(Refusal::invalid(
        name,
        value,
        &format!("be a multiple of {N} bytes"),
    ))
}

fn integers<const N: usize>(
    name: &str,
    bytes: &Bytes,
    of: fn([u8; N]) -> i64,
) -> Result<Vec<i64>, Refusal> {
    Ok(words(name, bytes)?.into_iter().map(of).collect())
}

/// Refuses an input part that is not text.
fn not_text(name: &str, kind: &str) -> Refusal {
    Refusal::invalid(name, kind, "be encoded_text: the server reads text only")
}

/// Checks that a tensor has one dimension, and all its values.
fn ensure_flat(name: &str, values: usize, shape: Option<&[i64]>) -> Result<(), Refusal> {
    match shape {
        None | Some([]) => Ok(()),
        Some(&[length]) if usize::try_from(length) == Ok(values) => Ok(()),
        Some(shape) => {
            let must = format!("be [{values}]: one value for each token");
            Err(Refusal::invalid(
                &format!("{name}.shape"),
                format!("{shape:?}"),
                &must,
            ))
        }
    }
}

impl Datum {
    /// Reads a protobuf message; `name` is its place in the request.
    pub(crate) fn from_proto(name: &str, datum: &proto::Datum) -> Result<Self, Refusal> {
        let mut all = Vec::new();
        for (at, chunk) in datum.model_input.iter().enumerate() {
            let name = format!("{name}.model_input[{at}]");
            let text = match &chunk.chunk {
                Some(chunk::Chunk::EncodedText(text)) => text,
                Some(chunk::Chunk::Image(_)) => return Err(not_text(&name, "image")),
                Some(chunk::Chunk::Dmel(_)) => return Err(not_text(&name, "dmel")),
                None => return Err(not_text(&name, "empty")),
            };
            let ids = integers(&name, &text.tokens, |x| i64::from(i32::from_le_bytes(x)))?;
            all.extend(tokens(&name, ids.into_iter())?);
        }
        let mut inputs = BTreeMap::new();
        for (key, tensor) in &datum.loss_fn_inputs {
            let name = format!("{name}.{key}");
            inputs.insert(key.clone(), Values::from_proto(&name, tensor)?);
        }
        Ok(Self {
            tokens: all,
            inputs,
        })
    }
}

impl Values {
    fn from_proto(name: &str, tensor: &proto::Tensor) -> Result<Self, Refusal> {
        let bytes = match &tensor.encoding {
            Some(tensor::Encoding::Dense(bytes)) => bytes.clone(),
            Some(tensor::Encoding::SparseCsr(_)) => {
                let must = "be dense: the server does not read sparse tensors";
                return Err(Refusal::invalid(name, "sparse_csr", must));
            }
            None => Bytes::new(),
        };
        let values = match DType::try_from(tensor.dtype) {
            Ok(DType::Int64) => Self::Integers(integers(name, &bytes, i64::from_le_bytes)?),
            Ok(DType::Int32) => Self::Integers(integers(name, &bytes, |x| {
                i64::from(i32::from_le_bytes(x))
            })?),
            Ok(DType::Float32) => Self::Numbers(
                words(name, &bytes)?
                    .into_iter()
                    .map(f32::from_le_bytes)
                    .collect(),
            ),
            _ => {
                let must = "be DTYPE_FLOAT32, DTYPE_INT64 or DTYPE_INT32";
                let name = format!("{name}.dtype");
                return Err(Refusal::invalid(&name, tensor.dtype, must));
            }
        };
        ensure_flat(name, values.len(), Some(&tensor.shape))?;
        Ok(values)
    }

    /// Returns the number of values.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Integers(values) => values.len(),
            Self::Numbers(values) => values.len(),
        }
    }
}

/// A [`Datum`] in JSON.
#[derive(Debug, Deserialize)]
pub(crate) struct JsonDatum {
    model_input: JsonInput,
    loss_fn_inputs: BTreeMap<String, JsonTensor>,
}

/// A prompt's or an example's tokens.
#[derive(Debug, Deserialize)]
pub(crate) struct JsonInput {
    chunks: Vec<JsonChunk>,
}

#[derive(Debug, Deserialize)]
struct JsonChunk {
    #[serde(rename = "type", default = "encoded_text")]
    kind: String,
    #[serde(default)]
    tokens: Vec<i64>,
}

fn encoded_text() -> String {
    "encoded_text".to_owned()
}

#[derive(Debug, Deserialize)]
struct JsonTensor {
    data: Vec<serde_json::Number>,
    dtype: String,
    shape: Option<Vec<i64>>,
    sparse_crow_indices: Option<serde_json::Value>,
}

impl JsonInput {
    /// Returns the tokens.
    pub(crate) fn tokens(&self, name: &str) -> Result<Vec<u32>, Refusal> {
        let mut all = Vec::new();
        for (at, chunk) in self.chunks.iter().enumerate() {
            let name = format!("{name}.chunks[{at}]");
            if chunk.kind != "encoded_text" {
                return Err(not_text(&format!("{name}.type"), &chunk.kind));
            }
            all.extend(tokens(
                &format!("{name}.tokens"),
                chunk.tokens.iter().copied(),
            )?);
        }
        Ok(all)
    }
}

impl JsonDatum {
    pub(crate) fn datum(&self, name: &str) -> Result<Datum, Refusal> {
        let mut inputs = BTreeMap::new();
        for (key, tensor) in &self.loss_fn_inputs {
            let name = format!("{name}.{key}");
            inputs.insert(key.clone(), tensor.values(&name)?);
        }
        Ok(Datum {
            tokens: self.model_input.tokens(&format!("{name}.model_input"))?,
            inputs,
        })
    }
}

impl JsonTensor {
    fn values(&self, name: &str) -> Result<Values, Refusal> {
        if self.sparse_crow_indices.is_some() {
            let must = "be dense: the server does not read sparse tensors";
            return Err(Refusal::invalid(name, "sparse", must));
        }
        ensure_flat(name, self.data.len(), self.shape.as_deref())?;
        let values = self.data.iter().enumerate();
        match self.dtype.as_str() {
            "int64" => {
                let integers = values.map(|(at, value)| {
                    let name = format!("{name}[{at}]");
                    let integer = value.as_i64();
                    integer.ok_or_else(|| Refusal::invalid(&name, value, "be an integer"))
                });
                Ok(Values::Integers(integers.collect::<Result<_, _>>()?))
            }
            "float32" => {
                let numbers = values.map(|(at, value)| {
                    let name = format!("{name}[{at}]");
                    let number = value.as_f64().map(|value| value as f32);
                    number.ok_or_else(|| Refusal::invalid(&name, value, "be a number"))
                });
                Ok(Values::Numbers(numbers.collect::<Result<_, _>>()?))
            }
            other => Err(Refusal::invalid(
                &format!("{name}.dtype"),
                other,
                "be int64 or float32",
            )),
        }
    }
}

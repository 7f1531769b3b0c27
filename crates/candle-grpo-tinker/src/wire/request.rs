//! Request bodies.

use std::collections::BTreeMap;

use bytes::Bytes;
use candle_grpo_base::server::Refusal;
use prost::Message;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::datum::{Datum, JsonDatum, JsonInput};
use super::proto;

/// Reads a JSON body.
pub(crate) fn json<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(body).map_err(|error| {
        let message = format!("body: must be JSON with the fields of this call: {error}");
        Refusal::new(400, "invalid_json", message)
    })
}

/// Undoes the body's `Content-Encoding`. The result has at most `limit` bytes.
pub(crate) fn decoded(body: Bytes, encoding: Option<&str>, limit: usize) -> Result<Bytes, Refusal> {
    match encoding {
        None | Some("" | "identity") => Ok(body),
        Some("zstd") => {
            let decoded = zstd::bulk::decompress(&body, limit);
            decoded.map(Bytes::from).map_err(|error| {
                let message = format!(
                    "body: cannot be decompressed as zstd into at most {limit} bytes, --max-request-bytes: {error}"
                );
                Refusal::new(400, "invalid_body", message)
            })
        }
        Some(other) => Err(Refusal::invalid(
            "Content-Encoding",
            other,
            "be zstd or absent",
        )),
    }
}

/// `session_heartbeat`.
#[derive(Debug, Deserialize)]
pub(crate) struct Heartbeat {
    pub(crate) session_id: String,
}

/// `create_model`.
#[derive(Debug, Deserialize)]
pub(crate) struct CreateModel {
    pub(crate) session_id: String,
    pub(crate) model_seq_id: u64,
    pub(crate) base_model: String,
    pub(crate) lora_config: Option<LoraOptions>,
    pub(crate) optimizer_config: Option<OptimizerKind>,
}

/// A model's adapters.
#[derive(Debug, Deserialize)]
pub(crate) struct LoraOptions {
    pub(crate) rank: usize,
    pub(crate) seed: Option<u64>,
    #[serde(default = "yes")]
    pub(crate) train_mlp: bool,
    #[serde(default = "yes")]
    pub(crate) train_attn: bool,
}

fn yes() -> bool {
    true
}

/// An optimizer kind.
#[derive(Debug, Deserialize)]
pub(crate) struct OptimizerKind {
    #[serde(rename = "type")]
    pub(crate) kind: String,
}

/// A body that only names a model.
#[derive(Debug, Deserialize)]
pub(crate) struct OfModel {
    pub(crate) model_id: String,
}

/// `optim_step`.
#[derive(Debug, Deserialize)]
pub(crate) struct OptimStep {
    pub(crate) model_id: String,
    pub(crate) seq_id: Option<u64>,
    pub(crate) adam_params: Option<AdamParams>,
    pub(crate) optimizer_params: Option<OptimizerKind>,
}

/// A step's options.
#[derive(Debug, Clone, PartialEq, Deserialize, serde::Serialize)]
#[serde(default)]
pub(crate) struct AdamParams {
    pub(crate) learning_rate: f64,
    pub(crate) beta1: f64,
    pub(crate) beta2: f64,
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    pub(crate) grad_clip_norm: f64,
}

impl Default for AdamParams {
    /// The client's values.
    fn default() -> Self {
        Self {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-12,
            weight_decay: 0.,
            grad_clip_norm: 0.,
        }
    }
}

/// `save_weights` and `save_weights_for_sampler`.
#[derive(Debug, Deserialize)]
pub(crate) struct Save {
    pub(crate) model_id: String,
    pub(crate) seq_id: Option<u64>,
    pub(crate) path: Option<String>,
    #[serde(default)]
    pub(crate) overwrite: bool,
    pub(crate) sampling_session_seq_id: Option<u64>,
    pub(crate) kind: Option<String>,
}

/// `load_weights`.
#[derive(Debug, Deserialize)]
pub(crate) struct Load {
    pub(crate) model_id: Option<String>,
    pub(crate) seq_id: Option<u64>,
    pub(crate) session_id: Option<String>,
    pub(crate) model_seq_id: Option<u64>,
    pub(crate) base_model: Option<String>,
    pub(crate) path: String,
    #[serde(default)]
    pub(crate) optimizer: bool,
}

/// `create_sampling_session`.
#[derive(Debug, Deserialize)]
pub(crate) struct CreateSampler {
    pub(crate) session_id: String,
    pub(crate) sampling_session_seq_id: u64,
    pub(crate) base_model: Option<String>,
    pub(crate) model_path: Option<String>,
}

/// `asample`.
#[derive(Debug, Deserialize)]
pub(crate) struct Sample {
    #[serde(default = "one")]
    pub(crate) num_samples: usize,
    pub(crate) prompt: JsonInput,
    pub(crate) sampling_params: SamplingParams,
    pub(crate) base_model: Option<String>,
    pub(crate) model_path: Option<String>,
    pub(crate) sampling_session_id: Option<String>,
    pub(crate) seq_id: Option<u64>,
    pub(crate) prompt_logprobs: Option<bool>,
    pub(crate) prompt_logprobs_last_n: Option<usize>,
    #[serde(default)]
    pub(crate) topk_prompt_logprobs: i64,
    #[serde(default)]
    pub(crate) topk_sample_logprobs: i64,
    #[serde(default)]
    pub(crate) prompt_alt_tokens_k: i64,
    pub(crate) target_prompt_logprobs: Option<Value>,
    pub(crate) record_stability_info: Option<bool>,
}

fn one() -> usize {
    1
}

/// The sampling distribution, and where samples end.
#[derive(Debug, Deserialize)]
#[serde(default)]
pub(crate) struct SamplingParams {
    pub(crate) max_tokens: Option<usize>,
    pub(crate) seed: Option<u64>,
    pub(crate) stop: Option<Stop>,
    pub(crate) temperature: f64,
    pub(crate) top_k: i64,
    pub(crate) top_p: f64,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: None,
            seed: None,
            stop: None,
            temperature: 1.,
            top_k: -1,
            top_p: 1.,
        }
    }
}

/// Sample ends.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, strings or tokens")]
pub(crate) enum Stop {
    String(String),
    Tokens(Vec<u32>),
    Strings(Vec<String>),
}

/// `retrieve_future`.
#[derive(Debug, Deserialize)]
pub(crate) struct Retrieve {
    pub(crate) request_id: String,
}

/// `weights_info`.
#[derive(Debug, Deserialize)]
pub(crate) struct WeightsInfo {
    pub(crate) tinker_path: String,
}

/// `forward` and `forward_backward`, in either form.
#[derive(Debug)]
pub(crate) struct Pass {
    pub(crate) model_id: String,
    pub(crate) seq_id: Option<u64>,
    pub(crate) backward: bool,
    /// The loss with its data. A refusal is the future's result, so that the requests after
    /// it have their turn.
    pub(crate) input: Result<PassInput, Refusal>,
}

/// A pass's input.
#[derive(Debug)]
pub(crate) struct PassInput {
    pub(crate) data: Vec<Datum>,
    pub(crate) loss_fn: String,
    pub(crate) loss_fn_config: BTreeMap<String, f64>,
}

#[derive(Debug, Deserialize)]
struct JsonPass {
    model_id: String,
    seq_id: Option<u64>,
    #[serde(alias = "forward_input")]
    forward_backward_input: Value,
}

#[derive(Debug, Deserialize)]
struct JsonPassInput {
    data: Vec<JsonDatum>,
    loss_fn: String,
    loss_fn_config: Option<BTreeMap<String, f64>>,
}

impl Pass {
    /// Reads a protobuf body.
    pub(crate) fn from_proto(body: Bytes) -> Result<Self, Refusal> {
        let request = proto::ForwardBackwardRequest::decode(body).map_err(|error| {
            let message = format!("body: must be a ForwardBackwardRequest: {error}");
            Refusal::new(400, "invalid_body", message)
        })?;
        let seq_id = u64::try_from(request.seq_id).ok().filter(|&id| id > 0);
        let seq_id =
            seq_id.ok_or_else(|| Refusal::invalid("seq_id", request.seq_id, "be at least 1"))?;
        Ok(Self {
            input: input_of_proto(&request),
            model_id: request.model_id,
            seq_id: Some(seq_id),
            backward: !request.forward_only,
        })
    }

    /// Reads a JSON body, as clients up to 0.24 send it.
    pub(crate) fn from_json(body: &[u8], backward: bool) -> Result<Self, Refusal> {
        let request: JsonPass = json(body)?;
        let input = |value: Value| -> Result<PassInput, Refusal> {
            let input: JsonPassInput = serde_json::from_value(value).map_err(|error| {
                let message = format!("forward_backward_input: {error}");
                Refusal::new(400, "invalid_json", message)
            })?;
            let data = input.data.iter().enumerate();
            let data = data.map(|(at, datum)| datum.datum(&format!("data[{at}]")));
            Ok(PassInput {
                data: data.collect::<Result<_, _>>()?,
                loss_fn: input.loss_fn,
                loss_fn_config: input.loss_fn_config.unwrap_or_default(),
            })
        };
        Ok(Self {
            input: input(request.forward_backward_input),
            model_id: request.model_id,
            seq_id: request.seq_id,
            backward,
        })
    }
}

fn input_of_proto(request: &proto::ForwardBackwardRequest) -> Result<PassInput, Refusal> {
    use proto::loss_config_value::Value::{Number, Text};
    let mut config: BTreeMap<String, f64> = request
        .loss_fn_config
        .iter()
        .map(|(name, value)| (name.clone(), *value))
        .collect();
    for (name, value) in &request.loss_fn_config_v2 {
        match &value.value {
            Some(Number(number)) => {
                config.insert(name.clone(), *number);
            }
            Some(Text(text)) => {
                let name = format!("loss_fn_config.{name}");
                return Err(Refusal::invalid(&name, text, "be a number"));
            }
            None => {}
        }
    }
    let data = request.data.iter().enumerate();
    let data = data.map(|(at, datum)| Datum::from_proto(&format!("data[{at}]"), datum));
    Ok(PassInput {
        data: data.collect::<Result<_, _>>()?,
        loss_fn: request.loss_fn.clone(),
        loss_fn_config: config,
    })
}

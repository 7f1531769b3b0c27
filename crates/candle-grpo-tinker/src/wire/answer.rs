//! Response bodies.

use std::collections::HashMap;

use bytes::Bytes;
use prost::Message;
use serde_json::{Value, json};

use super::proto::{
    ArrayRecord, BatchedTensor, DType, ForwardBackwardOutput, SampleResponse, SampledSequence,
};
use crate::work::{Outcome, SampledTokens, WeightsKind};

/// The output type, for the client.
const OUTPUT_TYPE: &str = "ArrayRecord";

/// A response body.
pub(crate) enum Body {
    Json(Value),
    Protobuf(Vec<u8>),
}

fn f32_bytes(values: &[f32]) -> Bytes {
    values
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect::<Vec<_>>()
        .into()
}

fn i32_bytes(values: &[u32]) -> Bytes {
    let bytes = values.iter().flat_map(|&x| (x as i32).to_le_bytes());
    bytes.collect::<Vec<_>>().into()
}

/// Encodes an outcome. Passes and samples are protobuf if `accepts_protobuf`.
pub(crate) fn body(outcome: &Outcome, accepts_protobuf: bool) -> Body {
    match outcome {
        Outcome::Pass { loss, log_probs } if accepts_protobuf => {
            Body::Protobuf(pass_proto(*loss, log_probs).encode_to_vec())
        }
        Outcome::Samples {
            sequences,
            prompt_log_probs,
        } if accepts_protobuf => {
            let response = samples_proto(sequences, prompt_log_probs.as_deref());
            Body::Protobuf(response.encode_to_vec())
        }
        _ => Body::Json(json_body(outcome)),
    }
}

fn pass_proto(loss: f64, log_probs: &[Vec<f32>]) -> ForwardBackwardOutput {
    let mut offsets = vec![0i64];
    let mut end = 0;
    for row in log_probs {
        end += size_of_val(row.as_slice()) as i64;
        offsets.push(end);
    }
    let tensor = BatchedTensor {
        data: f32_bytes(&log_probs.concat()),
        offsets: offsets
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect::<Vec<_>>()
            .into(),
        dtype: DType::Float32.into(),
        trailing_shape: Vec::new(),
    };
    ForwardBackwardOutput {
        loss_fn_output_type: OUTPUT_TYPE.to_owned(),
        loss_fn_outputs: vec![ArrayRecord {
            type_tag: OUTPUT_TYPE.to_owned(),
            fields: HashMap::from([("logprobs".to_owned(), tensor)]),
            num_datums: log_probs.len() as i64,
        }],
        metrics: HashMap::from([("loss:sum".to_owned(), loss)]),
    }
}

fn samples_proto(sequences: &[SampledTokens], prompt_log_probs: Option<&[f32]>) -> SampleResponse {
    let sequences = sequences.iter().map(|sequence| SampledSequence {
        stop_reason: i32::from(sequence.is_cut),
        tokens: i32_bytes(&sequence.tokens),
        logprobs: Some(f32_bytes(&sequence.log_probs)),
    });
    SampleResponse {
        sequences: sequences.collect(),
        prompt_logprobs: prompt_log_probs.map(f32_bytes),
    }
}

fn json_body(outcome: &Outcome) -> Value {
    match outcome {
        Outcome::Created { model_id } => json!({"model_id": model_id, "type": "create_model"}),
        Outcome::Pass { loss, log_probs } => {
            let output = |row: &Vec<f32>| {
                let tensor = json!({"data": row, "dtype": "float32", "shape": [row.len()]});
                json!({"logprobs": tensor})
            };
            json!({
                "loss_fn_output_type": OUTPUT_TYPE,
                "loss_fn_outputs": log_probs.iter().map(output).collect::<Vec<_>>(),
                "metrics": {"loss:sum": loss},
            })
        }
        Outcome::OptimStep {
            grad_norm,
            learning_rate,
        } => json!({"metrics": {"grad_norm": grad_norm, "learning_rate": learning_rate}}),
        Outcome::Saved {
            kind,
            path,
            sampling_session_id,
        } => match kind {
            WeightsKind::Training => json!({"path": path, "type": "save_weights"}),
            WeightsKind::Sampler => json!({
                "path": path,
                "sampling_session_id": sampling_session_id,
                "type": "save_weights_for_sampler",
            }),
        },
        Outcome::Loaded { path } => json!({"path": path, "type": "load_weights"}),
        Outcome::Samples {
            sequences,
            prompt_log_probs,
        } => {
            let sequence = |sequence: &SampledTokens| {
                json!({
                    "tokens": sequence.tokens,
                    "logprobs": sequence.log_probs,
                    "stop_reason": if sequence.is_cut { "length" } else { "stop" },
                })
            };
            // JSON has no NaN: `null`.
            json!({
                "type": "sample",
                "sequences": sequences.iter().map(sequence).collect::<Vec<_>>(),
                "prompt_logprobs": prompt_log_probs,
            })
        }
        Outcome::Refused(message) => json!({"error": message, "category": "user"}),
        Outcome::Failed(message) => json!({"error": message, "category": "unknown"}),
    }
}

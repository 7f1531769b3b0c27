//! A fake of llama.cpp's server, which takes no weights.
//!
//! Log-probs are those before the temperature.

use candle_grpo_test_support::{Reply, Request};
use candle_grpo_train::{FinishReason, SamplingConfig};
use serde_json::{Value, json};

use super::fake_server::{FakeServer, Shared, field, not_found, ok};
use super::served_policy::{Draw, Drawn, LogProbs, ServedPolicy};
use crate::common::END;

pub(crate) fn start() -> FakeServer {
    FakeServer::start(answer, ServedPolicy::new(LogProbs::Raw))
}

fn answer(shared: &Shared, request: &Request) -> Reply {
    let path = request.path();
    if !["/health", "/v1/models"].contains(&path) && !shared.is_authorized(request) {
        return error(401, "authentication_error", "Invalid API Key");
    }
    match (request.method.as_str(), path) {
        ("GET", "/health") => ok(json!({"status": "ok"})),
        ("GET", "/v1/models") => {
            let length = shared.engine().policy.max_model_len;
            let meta = json!({"n_vocab": 6, "n_ctx": length, "n_ctx_train": length});
            let model = json!({
                "id": "policy.gguf", "object": "model", "owned_by": "llamacpp", "meta": meta,
            });
            ok(json!({"object": "list", "data": [model]}))
        }
        ("POST", "/v1/completions") => completions(shared, request),
        _ => not_found(),
    }
}

fn error(status: u16, kind: &str, message: &str) -> Reply {
    let error = json!({"code": status, "message": message, "type": kind});
    Reply::new(status, json!({"error": error}).to_string())
}

fn completions(shared: &Shared, request: &Request) -> Reply {
    let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
    let draw = match read_draw(&body) {
        Ok(draw) => draw,
        Err(message) => return error(400, "invalid_request_error", &message),
    };
    let drawn = match shared.draw(None, &draw) {
        Ok(Some(drawn)) => drawn,
        Ok(None) => return Reply::closed(),
        Err((status, message)) => return error(status, "invalid_request_error", &message),
    };
    let choices: Vec<Value> = drawn.iter().map(|drawn| choice(drawn, &body)).collect();
    ok(json!({
        "id": "cmpl-0", "object": "text_completion", "created": 1763860000,
        "model": "policy.gguf", "choices": choices,
    }))
}

/// Fields that are absent have the defaults of the program. Those of other engines are ignored.
fn read_draw(body: &Value) -> Result<Draw, String> {
    let seed: u32 = field(body, "seed")?.unwrap_or(u32::MAX);
    Ok(Draw {
        prompt: field(body, "prompt")?.ok_or("prompt: missing")?,
        completions: field(body, "n")?.unwrap_or(1),
        seed: i64::from(seed),
        sampling: SamplingConfig {
            temperature: field(body, "temperature")?.unwrap_or(0.8),
            top_k: field(body, "top_k")?.unwrap_or(40),
            top_p: field(body, "top_p")?.unwrap_or(0.95),
            min_p: field(body, "min_p")?.unwrap_or(0.05),
            max_new_tokens: field(body, "max_tokens")?.unwrap_or(usize::MAX / 2),
            stop_token_ids: vec![END],
            stop_strings: field(body, "stop")?.unwrap_or_default(),
            ..SamplingConfig::default()
        },
    })
}

fn choice(drawn: &Drawn, body: &Value) -> Value {
    let tokens = drawn.tokens.iter().zip(&drawn.log_probs);
    let content: Vec<Value> = tokens
        .map(|(id, log_prob)| {
            json!({"id": id, "token": "?", "bytes": [63], "logprob": log_prob, "top_logprobs": []})
        })
        .collect();
    let finish_reason = match drawn.finish_reason {
        FinishReason::Length => "length",
        FinishReason::StopToken | FinishReason::StopString => "stop",
    };
    let log_probs = body["logprobs"].is_u64();
    json!({
        "text": drawn.text, "index": 0, "finish_reason": finish_reason,
        "logprobs": log_probs.then(|| json!({"content": content})),
    })
}

//! A fake llama.cpp server, which loads no weights.
//!
//! It answers in its own form, with the probabilities that it sampled from.

use candle_grpo_test_support::{Reply, Request};
use candle_grpo_train::{FinishReason, SamplingConfig};
use serde_json::{Value, json};

use super::fake_server::{FakeServer, Shared, field, not_found, ok};
use super::served_policy::{Draw, Drawn, ServedPolicy};

pub(crate) fn start(policy: ServedPolicy) -> FakeServer {
    FakeServer::start(answer, policy)
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
    let draw = match read_draw(&body, shared.end()) {
        Ok(draw) => draw,
        Err(message) => return error(400, "invalid_request_error", &message),
    };
    let drawn = match shared.draw(None, &draw) {
        Ok(Some(drawn)) => drawn,
        Ok(None) => return Reply::closed(),
        Err((status, message)) => return error(status, "invalid_request_error", &message),
    };
    let [drawn] = drawn.as_slice() else {
        return error(400, "invalid_request_error", "n: several");
    };
    let mut answer = json!({
        "id": "cmpl-0", "object": "text_completion", "created": 1763860000, "model": "policy.gguf",
    });
    if body["verbose"] == true {
        answer["__verbose"] = own_form(drawn, &body);
    }
    ok(answer)
}

/// Absent fields have the program's defaults. Other engines' fields are ignored.
fn read_draw(body: &Value, end: u32) -> Result<Draw, String> {
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
            stop_token_ids: vec![end],
            stop_strings: field(body, "stop")?.unwrap_or_default(),
            ..SamplingConfig::default()
        },
    })
}

fn own_form(drawn: &Drawn, body: &Value) -> Value {
    let probability = |(id, log_prob): (&u32, &f32)| json!({"id": id, "prob": log_prob.exp()});
    let tokens = drawn.tokens.iter().zip(&drawn.log_probs);
    let mut probabilities: Vec<Value> = tokens.map(probability).collect();
    let stop_type = match drawn.finish_reason {
        FinishReason::Length => "limit",
        FinishReason::StopToken => "eos",
        FinishReason::StopString => "word",
    };
    if stop_type == "word" {
        probabilities.pop();
    }
    let mut answer = json!({
        "content": drawn.text, "tokens": [], "stop": true, "stop_type": stop_type,
    });
    if body["return_tokens"] == true {
        answer["tokens"] = json!(drawn.tokens);
    }
    if body["logprobs"].as_u64().is_some_and(|n| n > 0) && !probabilities.is_empty() {
        assert_eq!(
            body["post_sampling_probs"], true,
            "the probabilities before sampling"
        );
        answer["completion_probabilities"] = json!(probabilities);
    }
    answer
}

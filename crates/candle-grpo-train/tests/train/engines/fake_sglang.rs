//! A fake SGLang server.
//!
//! Paths, fields and answers follow SGLang 0.5.

use candle_grpo_test_support::{Reply, Request};
use candle_grpo_train::{FinishReason, SamplingConfig};
use serde_json::{Value, json};

use super::fake_server::{FakeServer, Shared, adapter_to_load, field, not_found, object, ok};
use super::served_policy::{Draw, Drawn, ServedPolicy};

const FIELDS: &[&str] = &[
    "input_ids",
    "logprob_start_len",
    "lora_path",
    "return_logprob",
    "return_text_in_logprobs",
    "rid",
    "sampling_params",
    "stream",
    "top_logprobs_num",
];

const SAMPLING_FIELDS: &[&str] = &[
    "ebnf",
    "ignore_eos",
    "json_schema",
    "max_new_tokens",
    "min_p",
    "n",
    "no_stop_trim",
    "regex",
    "sampling_seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
];

pub(crate) fn start(policy: ServedPolicy) -> FakeServer {
    FakeServer::start(answer, policy)
}

fn answer(shared: &Shared, request: &Request) -> Reply {
    let path = request.path();
    if path != "/health" && !shared.is_authorized(request) {
        return Reply::new(401, json!({"error": "Unauthorized"}).to_string());
    }
    match (request.method.as_str(), path) {
        ("GET", "/health" | "/health_generate") => Reply::new(200, ""),
        ("GET", "/get_model_info" | "/model_info") => ok(json!({
            "model_path": "/start", "tokenizer_path": "/start", "is_generation": true,
            "preferred_sampling_params": null, "weight_version": shared.engine().version,
        })),
        ("GET", "/get_server_info" | "/server_info") => {
            let length = shared.engine().policy.max_model_len;
            ok(json!({
                "model_path": "/start", "served_model_name": "policy", "context_length": length,
                "enable_lora": true, "version": "0.5.23", "max_req_input_len": length - 1,
            }))
        }
        ("GET", "/v1/models") => {
            let length = shared.engine().policy.max_model_len;
            let card = json!({
                "id": "policy", "object": "model", "created": 1763860000, "owned_by": "sglang",
                "root": "policy", "parent": null, "max_model_len": length,
            });
            ok(json!({"object": "list", "data": [card]}))
        }
        ("POST", "/generate") => generate(shared, request),
        ("POST", "/update_weights_from_disk") => update_weights(shared, request),
        ("POST", "/update_weight_version") => {
            let body = object(&request.body, &["new_version", "abort_all_requests"]);
            match body.and_then(|body| field::<String>(&body, "new_version")) {
                Ok(Some(version)) => {
                    shared.engine().version.clone_from(&version);
                    ok(json!({"success": true, "new_version": version}))
                }
                other => error(422, &format!("{other:?}")),
            }
        }
        ("POST", "/load_lora_adapter") => load_adapter(shared, request),
        ("POST", "/unload_lora_adapter") => {
            let body = object(&request.body, &["lora_name"]).unwrap_or_default();
            let name = body["lora_name"].as_str().unwrap_or_default();
            let mut engine = shared.engine();
            let removed = engine.policy.remove_adapter(name);
            let loaded = json!(engine.policy.adapters());
            let message = format!("LoRA adapter {name} is not loaded.");
            adapter_reply(removed.then_some(()).ok_or(message), loaded)
        }
        ("POST", "/pause_generation") => {
            shared.set_paused(true);
            ok(json!({"message": "Generation paused successfully.", "status": "ok"}))
        }
        ("POST", "/continue_generation") => {
            shared.set_paused(false);
            ok(json!({"message": "Generation continued successfully.", "status": "ok"}))
        }
        ("POST", "/abort_request") => {
            let body = object(&request.body, &["abort_all", "rid"]).unwrap_or_default();
            if body["abort_all"] == true {
                shared.abort_all();
            }
            Reply::new(200, "")
        }
        ("GET" | "POST", "/flush_cache") => Reply::new(200, "Cache flushed.\n"),
        _ => not_found(),
    }
}

fn error(status: u16, message: &str) -> Reply {
    let error = json!({"message": message, "type": "BadRequest", "code": status});
    Reply::new(status, json!({"error": error}).to_string())
}

fn generate(shared: &Shared, request: &Request) -> Reply {
    let read = || -> Result<(Value, Draw), String> {
        let body = object(&request.body, FIELDS)?;
        let sampling = body["sampling_params"].to_string();
        let sampling = object(sampling.as_bytes(), SAMPLING_FIELDS)?;
        let draw = read_draw(&body, &sampling, shared.end())?;
        Ok((body, draw))
    };
    let (body, draw) = match read() {
        Ok(read) => read,
        Err(message) => return error(400, &message),
    };
    if draw.sampling.max_new_tokens == 0 {
        return score(shared, &draw, &body);
    }
    let drawn = match shared.draw(body["lora_path"].as_str(), &draw) {
        Ok(Some(drawn)) => drawn,
        Ok(None) => return Reply::closed(),
        // An adapter that is not loaded is a value error.
        Err((404, message)) => return error(400, &message),
        Err((status, message)) => return error(status, &message),
    };
    let version = shared.engine().version.clone();
    let mut answers: Vec<Value> = drawn
        .iter()
        .map(|drawn| completion(drawn, &draw, &body, &version))
        .collect();
    match answers.as_mut_slice() {
        [one] => ok(one.take()),
        _ => ok(Value::Array(answers)),
    }
}

/// Log-probs for a prompt's tokens from `logprob_start_len` on, without a completion.
fn score(shared: &Shared, draw: &Draw, body: &Value) -> Reply {
    let scored = match shared.score(&draw.prompt) {
        Ok(scored) => scored,
        Err(message) => return error(400, &message),
    };
    let start: usize = match field(body, "logprob_start_len") {
        Ok(Some(start)) => start,
        _ => return error(400, "logprob_start_len must not be negative here"),
    };
    let k: usize = match field(body, "top_logprobs_num") {
        Ok(k) => k.unwrap_or(0),
        Err(message) => return error(400, &message),
    };
    let entry = |log_probs: &[f32], id: u32| json!([log_probs[id as usize], id, null]);
    let (mut named, mut top) = (Vec::new(), Vec::new());
    for (&id, log_probs) in draw.prompt.iter().zip(&scored).skip(start) {
        match log_probs {
            None => {
                named.push(json!([null, id, null]));
                top.push(Value::Null);
            }
            Some(log_probs) => {
                named.push(entry(log_probs, id));
                let best = Shared::best(log_probs, k).into_iter();
                top.push(best.map(|id| entry(log_probs, id)).collect());
            }
        }
    }
    let mut meta = json!({
        "id": "0", "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": draw.prompt.len(), "completion_tokens": 0,
        "input_token_logprobs": named, "output_token_logprobs": [],
    });
    if k > 0 {
        meta["input_top_logprobs"] = json!(top);
    }
    ok(json!({"text": "", "output_ids": [], "meta_info": meta}))
}

/// Absent fields have the defaults in a model's `generation_config.json`.
fn read_draw(body: &Value, sampling: &Value, end: u32) -> Result<Draw, String> {
    let top_k: i64 = field(sampling, "top_k")?.unwrap_or(1);
    if top_k == 0 || top_k < -1 {
        return Err(format!(
            "top_k must be -1 (disable) or at least 1, got {top_k}."
        ));
    }
    let mut stop_token_ids: Vec<u32> = field(sampling, "stop_token_ids")?.unwrap_or_default();
    if sampling["ignore_eos"] == true {
        stop_token_ids.clear()
    } else {
        stop_token_ids.push(end)
    }
    Ok(Draw {
        prompt: field(body, "input_ids")?.ok_or("input_ids: missing")?,
        completions: field(sampling, "n")?.unwrap_or(1),
        seed: field(sampling, "sampling_seed")?.unwrap_or(0),
        sampling: SamplingConfig {
            temperature: field(sampling, "temperature")?.unwrap_or(0.2),
            top_k: top_k.max(0) as usize,
            top_p: field(sampling, "top_p")?.unwrap_or(0.3),
            min_p: field(sampling, "min_p")?.unwrap_or(0.2),
            greedy: false,
            max_new_tokens: field(sampling, "max_new_tokens")?.unwrap_or(128),
            stop_token_ids,
            stop_strings: field(sampling, "stop")?.unwrap_or_default(),
            ..SamplingConfig::default()
        },
    })
}

fn completion(drawn: &Drawn, draw: &Draw, body: &Value, version: &str) -> Value {
    let length = drawn.tokens.len();
    let finish_reason = match drawn.finish_reason {
        _ if drawn.is_aborted => json!({"type": "abort", "message": "Aborted"}),
        // The length is checked before the last token.
        _ if length == draw.sampling.max_new_tokens => json!({"type": "length", "length": length}),
        FinishReason::StopToken => json!({"type": "stop", "matched": drawn.tokens[length - 1]}),
        FinishReason::StopString => {
            json!({"type": "stop", "matched": draw.sampling.stop_strings[0]})
        }
        FinishReason::Length => json!({"type": "length", "length": length}),
    };
    let mut meta = json!({
        "id": "0", "finish_reason": finish_reason, "prompt_tokens": draw.prompt.len(),
        "weight_version": version, "completion_tokens": length, "cached_tokens": 0,
        "e2e_latency": 0.1,
    });
    if body["return_logprob"] == true {
        let tokens = drawn.tokens.iter().zip(&drawn.log_probs);
        let log_probs: Vec<Value> = tokens.map(|(id, x)| json!([x, id, null])).collect();
        meta["output_token_logprobs"] = json!(log_probs);
        meta["input_token_logprobs"] = json!([]);
    }
    json!({"text": drawn.text, "output_ids": drawn.tokens, "meta_info": meta})
}

/// An unreadable directory leaves the weights unchanged.
fn update_weights(shared: &Shared, request: &Request) -> Reply {
    let known = [
        "abort_all_requests",
        "flush_cache",
        "is_async",
        "keep_pause",
        "load_format",
        "model_path",
        "token_step",
        "weight_version",
    ];
    let read = || -> Result<(String, Option<String>), String> {
        let body = object(&request.body, &known)?;
        let folder = field(&body, "model_path")?.ok_or("model_path: missing")?;
        Ok((folder, field(&body, "weight_version")?))
    };
    let (folder, version) = match read() {
        Ok(read) => read,
        Err(message) => return error(422, &message),
    };
    let mut engine = shared.engine();
    let updated = engine.policy.read_weights(&folder);
    if let (Ok(()), Some(version)) = (&updated, version) {
        engine.version = version;
    }
    let message = match &updated {
        Ok(()) => "Succeeded to update model weights.".to_owned(),
        Err(e) => format!("Failed to update weights: {e:#}. Rolling back to original weights."),
    };
    let status = if updated.is_ok() { 200 } else { 400 };
    let content = json!({
        "success": updated.is_ok(), "message": message, "num_paused_requests": 0,
    });
    Reply::new(status, content.to_string())
}

/// An adapter is never replaced in place.
fn load_adapter(shared: &Shared, request: &Request) -> Reply {
    let (_, name, folder) = match adapter_to_load(&request.body, &["pinned"]) {
        Ok(read) => read,
        Err(message) => return error(422, &message),
    };
    let mut engine = shared.engine();
    let loaded = if engine.policy.adapters().contains_key(&name) {
        Err(format!("LoRA adapter {name} is already loaded."))
    } else {
        engine
            .policy
            .read_adapter(&name, &folder)
            .map_err(|e| format!("{e:#}"))
    };
    adapter_reply(loaded, json!(engine.policy.adapters()))
}

fn adapter_reply(result: Result<(), String>, loaded: Value) -> Reply {
    match result {
        Ok(()) => ok(json!({"success": true, "loaded_adapters": loaded})),
        Err(message) => {
            let content = json!({
                "success": false, "error_message": message, "loaded_adapters": loaded,
            });
            Reply::new(400, content.to_string())
        }
    }
}

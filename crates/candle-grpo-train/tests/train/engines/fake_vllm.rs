//! A fake vLLM server with `VLLM_SERVER_DEV_MODE` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING`, and with
//! `--weight-transfer-config` if it has [`Workers`](super::workers::Workers) or an
//! [`IpcWorker`](super::ipc_worker::IpcWorker). It can sleep if it has the state
//! [`Sleep`](super::fake_server::Sleep). A step in a wrong order is an error, also where vLLM would
//! go on without weights.
//!
//! Paths, fields and answers follow vLLM 0.32.

use std::path::Path;

use candle_grpo_test_support::{Reply, Request};
use candle_grpo_train::{FinishReason, SamplingConfig};
use serde_json::{Value, json};

use super::fake_server::{
    FakeServer, Shared, Sleep, adapter_to_load, field, not_found, object, ok,
};
use super::served_policy::{Draw, Drawn, ServedPolicy};
use super::workers::Workers;

/// Model name for the policy without adapters.
pub(crate) const MODEL: &str = "policy";

/// Default for `--max-logprobs`.
const MAX_LOGPROBS: u64 = 20;

/// Request fields that the fake supports. vLLM ignores others.
const FIELDS: &[&str] = &[
    "ignore_eos",
    "include_stop_str_in_output",
    "logprobs",
    "max_tokens",
    "min_p",
    "model",
    "n",
    "prompt",
    "prompt_logprobs",
    "return_token_ids",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "stream",
    "structured_outputs",
    "temperature",
    "top_k",
    "top_p",
];

pub(crate) fn start(policy: ServedPolicy) -> FakeServer {
    FakeServer::start(answer, policy)
}

fn answer(shared: &Shared, request: &Request) -> Reply {
    if request.path().starts_with("/v1") && !shared.is_authorized(request) {
        return Reply::new(401, json!({"error": "Unauthorized"}).to_string());
    }
    match (request.method.as_str(), request.path()) {
        ("GET", "/health") => Reply::new(200, ""),
        ("GET", "/v1/models") => models(shared),
        ("POST", "/v1/completions") => completions(shared, request),
        ("POST", "/v1/load_lora_adapter") => load_adapter(shared, request),
        ("POST", "/v1/unload_lora_adapter") => unload_adapter(shared, request),
        ("POST", "/collective_rpc") => collective_rpc(shared, request),
        ("POST", "/pause") => match request.query("mode").unwrap_or("abort") {
            "keep" | "wait" | "abort" => {
                shared.set_paused(true);
                ok(json!({"status": "paused"}))
            }
            other => error(422, "mode", other),
        },
        ("POST", "/resume") => {
            let sleep = shared.engine().sleep.unwrap_or_default();
            if !sleep.is_awake() {
                return error(500, "InternalServerError", "resumed while it sleeps");
            }
            shared.set_paused(false);
            ok(json!({"status": "resumed"}))
        }
        ("POST", "/sleep") => sleep(shared, request),
        ("POST", "/wake_up") => wake_up(shared, request),
        ("POST", "/abort_requests") => {
            shared.abort_all();
            ok(json!({"status": "aborted", "aborted": 1}))
        }
        ("GET", "/is_paused") => ok(json!({"is_paused": shared.engine().paused})),
        ("POST", "/reset_prefix_cache") => ok(json!({"success": true})),
        ("POST", "/update_weight_version") => {
            let body = object(&request.body, &["new_version"]);
            match body.and_then(|body| field::<String>(&body, "new_version")) {
                Ok(Some(version)) => {
                    shared.engine().version.clone_from(&version);
                    ok(json!({"success": true, "new_version": version}))
                }
                other => error(422, "Invalid", &format!("{other:?}")),
            }
        }
        ("GET", "/get_world_size") => {
            let engine = shared.engine();
            match (&engine.workers, &engine.ipc) {
                (Some(workers), _) => ok(json!({"world_size": workers.count()})),
                (None, Some(_)) => ok(json!({"world_size": 1})),
                (None, None) => not_found(),
            }
        }
        ("POST", "/shutdown_weight_transfer_engine") => transfer(shared, request, &[], shut_down),
        ("POST", "/init_weight_transfer_engine") => transfer(shared, request, &["init_info"], join),
        ("POST", "/start_weight_update") => transfer(shared, request, &[], start_update),
        ("POST", "/update_weights") => transfer(shared, request, &["update_info"], update),
        ("POST", "/finish_weight_update") => {
            transfer(shared, request, &["weight_version"], finish_update)
        }
        ("GET", "/weight_info") => ok(json!({"weight_version": shared.engine().version})),
        _ => not_found(),
    }
}

fn error(status: u16, kind: &str, message: &str) -> Reply {
    let error = json!({"message": message, "type": kind, "param": null, "code": status});
    Reply::new(status, json!({"error": error}).to_string())
}

fn bad_request(message: &str) -> Reply {
    error(400, "BadRequestError", message)
}

fn models(shared: &Shared) -> Reply {
    let engine = shared.engine();
    let card = |id: &str, root: &str, parent: Option<&str>, length: Option<usize>| {
        json!({
            "id": id, "object": "model", "created": 1763860000, "owned_by": "vllm", "root": root,
            "parent": parent, "max_model_len": length, "permission": [],
        })
    };
    let policy = &engine.policy;
    let mut data = vec![card(MODEL, "/start", None, Some(policy.max_model_len))];
    let adapters = policy.adapters();
    data.extend(
        adapters
            .iter()
            .map(|(name, folder)| card(name, folder, Some(MODEL), None)),
    );
    ok(json!({"object": "list", "data": data}))
}

fn completions(shared: &Shared, request: &Request) -> Reply {
    let read = || -> Result<(Value, Draw), String> {
        let body = object(&request.body, FIELDS)?;
        let draw = read_draw(&body, shared.end())?;
        Ok((body, draw))
    };
    let (body, draw) = match read() {
        Ok(read) => read,
        Err(message) => return bad_request(&message),
    };
    let model = body["model"].as_str().unwrap_or(MODEL);
    let adapter = (model != MODEL).then_some(model);
    let drawn = match shared.draw(adapter, &draw) {
        Ok(Some(drawn)) => drawn,
        Ok(None) => return Reply::closed(),
        Err((404, message)) => return error(404, "NotFoundError", &message),
        Err((400, message)) => return bad_request(&message),
        Err((status, message)) => return error(status, "InternalServerError", &message),
    };
    let mut choices: Vec<Value> = drawn
        .iter()
        .enumerate()
        .map(|(index, drawn)| choice(index, drawn, &draw, &body, shared.end()))
        .collect();
    if let Some(k) = body["prompt_logprobs"].as_u64() {
        if k > MAX_LOGPROBS {
            return bad_request(&format!(
                "Requested prompt logprobs of {k}, which is greater than max allowed: {MAX_LOGPROBS}"
            ));
        }
        let scored = match shared.score(&draw.prompt) {
            Ok(scored) => scored,
            Err(message) => return bad_request(&message),
        };
        let tokens = draw.prompt.iter().zip(scored);
        let named: Vec<Value> = tokens
            .map(|(token, log_probs)| match log_probs {
                None => Value::Null,
                Some(log_probs) => named_log_probs(*token, &log_probs, k as usize),
            })
            .collect();
        for choice in &mut choices {
            choice["prompt_logprobs"] = json!(named);
        }
    }
    ok(json!({
        "id": "cmpl-0", "object": "text_completion", "created": 1763860000, "model": model,
        "choices": choices, "service_tier": null, "system_fingerprint": null,
        "usage": {"prompt_tokens": draw.prompt.len(), "total_tokens": 0, "completion_tokens": 0},
    }))
}

/// A prompt token's entry: the token first, and the `k` most likely ones.
fn named_log_probs(token: u32, log_probs: &[f32], k: usize) -> Value {
    let order = Shared::best(log_probs, log_probs.len());
    let mut named = serde_json::Map::new();
    for id in [token]
        .into_iter()
        .chain(order[..k.min(order.len())].iter().copied())
    {
        let rank = order.iter().position(|&other| other == id).unwrap() + 1;
        let entry = json!({"logprob": log_probs[id as usize], "rank": rank, "decoded_token": "?"});
        named.insert(id.to_string(), entry);
    }
    Value::Object(named)
}

/// Absent fields have values that no client needs, like those in a model's
/// `generation_config.json`.
fn read_draw(body: &Value, end: u32) -> Result<Draw, String> {
    let top_k: i64 = field(body, "top_k")?.unwrap_or(1);
    if top_k < -1 {
        return Err(format!(
            "top_k must be 0 (disable), or at least 1, got {top_k}."
        ));
    }
    let stop: Option<Value> = field(body, "stop")?;
    let mut stop_token_ids: Vec<u32> = field(body, "stop_token_ids")?.unwrap_or_default();
    if body["ignore_eos"] != true {
        stop_token_ids.push(end);
    }
    Ok(Draw {
        prompt: field(body, "prompt")?.ok_or("prompt: missing")?,
        completions: field(body, "n")?.unwrap_or(1),
        seed: field(body, "seed")?.unwrap_or(0),
        sampling: SamplingConfig {
            temperature: field(body, "temperature")?.unwrap_or(0.2),
            top_k: top_k.max(0) as usize,
            top_p: field(body, "top_p")?.unwrap_or(0.3),
            min_p: field(body, "min_p")?.unwrap_or(0.2),
            greedy: false,
            max_new_tokens: field(body, "max_tokens")?.unwrap_or(16),
            stop_token_ids,
            stop_strings: match stop {
                Some(Value::String(one)) => vec![one],
                other => other
                    .map(serde_json::from_value)
                    .transpose()
                    .map_err(|e| format!("stop: {e}"))?
                    .unwrap_or_default(),
            },
            ..SamplingConfig::default()
        },
    })
}

fn choice(index: usize, drawn: &Drawn, draw: &Draw, body: &Value, end: u32) -> Value {
    let last = drawn.tokens.last();
    let (finish_reason, stop_reason) = match drawn.finish_reason {
        // The end-of-text token is not a stop token in a request.
        _ if drawn.is_aborted => ("abort", Value::Null),
        FinishReason::StopToken if body["ignore_eos"] != true && last == Some(&end) => {
            ("stop", Value::Null)
        }
        FinishReason::StopToken => ("stop", json!(last)),
        FinishReason::StopString => ("stop", json!(draw.sampling.stop_strings[0])),
        FinishReason::Length => ("length", Value::Null),
    };
    let ids = body["return_token_ids"] == true;
    let log_probs = body["logprobs"].is_u64().then(|| {
        json!({
            "text_offset": vec![0; drawn.tokens.len()],
            "token_logprobs": drawn.log_probs,
            "tokens": vec!["?"; drawn.tokens.len()],
            "top_logprobs": null,
        })
    });
    json!({
        "index": index, "text": drawn.text, "logprobs": log_probs, "finish_reason": finish_reason,
        "stop_reason": stop_reason, "token_ids": ids.then_some(&drawn.tokens),
        "prompt_logprobs": null, "prompt_token_ids": ids.then_some(&draw.prompt),
    })
}

fn load_adapter(shared: &Shared, request: &Request) -> Reply {
    let others = ["load_inplace", "is_3d_lora_weight"];
    let (body, name, folder) = match adapter_to_load(&request.body, &others) {
        Ok(read) => read,
        Err(message) => return error(422, "UnprocessableEntityError", &message),
    };
    let in_place = body["load_inplace"] == true;
    let mut engine = shared.engine();
    if !in_place && engine.policy.adapters().contains_key(&name) {
        return error(
            400,
            "InvalidUserInput",
            &format!("The lora adapter '{name}' has already been loaded."),
        );
    }
    if !Path::new(&folder).join("adapter_config.json").exists() {
        let message = format!("Loading lora {name} failed: No adapter found for {folder}");
        return error(404, "NotFoundError", &message);
    }
    match engine.policy.read_adapter(&name, &folder) {
        Ok(()) => Reply::new(
            200,
            format!("Success: LoRA adapter '{name}' added successfully."),
        ),
        Err(e) => error(500, "InternalServerError", &format!("{e:#}")),
    }
}

fn unload_adapter(shared: &Shared, request: &Request) -> Reply {
    let body = object(&request.body, &["lora_name", "lora_int_id"]).unwrap_or_default();
    let name = body["lora_name"].as_str().unwrap_or_default();
    if shared.engine().policy.remove_adapter(name) {
        Reply::new(
            200,
            format!("Success: LoRA adapter '{name}' removed successfully."),
        )
    } else {
        error(
            404,
            "NotFoundError",
            &format!("The lora adapter '{name}' cannot be found."),
        )
    }
}

/// A reload from an unreadable directory leaves an engine without weights, whose health is still
/// good.
fn collective_rpc(shared: &Shared, request: &Request) -> Reply {
    let body = object(&request.body, &["method", "kwargs", "args", "timeout"]);
    let body = body.unwrap_or_default();
    let folder = body["kwargs"]["weights_path"].as_str();
    let (Some("reload_weights"), Some(folder)) = (body["method"].as_str(), folder) else {
        return Reply::new(500, "Internal Server Error");
    };
    let mut engine = shared.engine();
    if engine.sleep.is_some_and(|sleep| sleep.weights) {
        return error(500, "InternalServerError", "no memory for weights");
    }
    match engine.policy.read_weights(folder) {
        Ok(()) => {
            if let Some(sleep) = &mut engine.sleep {
                sleep.lost = false;
            }
            ok(json!({"results": [null]}))
        }
        Err(_) => {
            engine.broken = true;
            Reply::new(500, "Internal Server Error")
        }
    }
}

/// Answers a request of a weight transfer, whose body has no other fields than `known`.
fn transfer(
    shared: &Shared,
    request: &Request,
    known: &[&str],
    answer: fn(&Shared, &Value) -> Result<(), String>,
) -> Reply {
    let body = match object(&request.body, known) {
        Ok(body) => body,
        Err(message) => return bad_request(&message),
    };
    match answer(shared, &body) {
        Ok(()) => ok(json!({"message": "done"})),
        Err(message) => error(500, "InternalServerError", &message),
    }
}

fn no_workers() -> String {
    "Weight transfer not configured. Please set weight_transfer_config".to_owned()
}

fn sleep(shared: &Shared, request: &Request) -> Reply {
    let mut engine = shared.engine();
    if engine.updating {
        return error(500, "InternalServerError", "sleeps in an update");
    }
    let Some(sleep) = &mut engine.sleep else {
        return not_found();
    };
    if request.query("level") != Some("2") {
        return error(500, "InternalServerError", "a level that keeps weights");
    }
    // vLLM ignores it while the weights are gone.
    if !sleep.weights {
        *sleep = Sleep {
            weights: true,
            cache: true,
            lost: true,
        };
    }
    engine.paused = true;
    drop(engine);
    shared.abort_all();
    ok(json!({"status": "sleeping", "level": 2}))
}

fn wake_up(shared: &Shared, request: &Request) -> Reply {
    let mut engine = shared.engine();
    let Some(sleep) = &mut engine.sleep else {
        return not_found();
    };
    match request.query("tags") {
        Some("weights") => sleep.weights = false,
        Some("kv_cache") if !sleep.lost => sleep.cache = false,
        tags => {
            let message = format!("{tags:?} while {sleep:?}");
            return error(500, "InternalServerError", &message);
        }
    }
    let is_awake = sleep.is_awake();
    drop(engine);
    if is_awake {
        shared.set_paused(false);
    }
    let status = if is_awake { "awake" } else { "sleeping" };
    ok(json!({"status": status, "tags": [request.query("tags")]}))
}

fn shut_down(shared: &Shared, _: &Value) -> Result<(), String> {
    let engine = shared.engine();
    if engine.updating {
        return Err("in an update".to_owned());
    }
    let ipc = engine.ipc.clone();
    drop(engine);
    ipc.map_or(Ok(()), |worker| worker.finish().map(drop))
}

fn join(shared: &Shared, body: &Value) -> Result<(), String> {
    if let Some(worker) = shared.engine().ipc.clone() {
        return worker.init(body);
    }
    let joining = shared.engine().workers.as_ref().map(Workers::joining);
    // The engine answers other requests meanwhile.
    let joined = joining.ok_or_else(no_workers)?.join(body)?;
    let mut engine = shared.engine();
    engine.workers.as_mut().ok_or_else(no_workers)?.set(joined);
    Ok(())
}

fn start_update(shared: &Shared, _: &Value) -> Result<(), String> {
    let mut engine = shared.engine();
    let has_workers = engine.workers.is_some() || engine.ipc.is_some();
    if !has_workers || engine.updating || !engine.paused {
        return Err("an update has started, or the engine runs".to_owned());
    }
    if engine.sleep.is_some_and(|sleep| sleep.weights) {
        return Err("no memory for weights".to_owned());
    }
    if let Some(worker) = &engine.ipc {
        worker.start();
    }
    engine.updating = true;
    Ok(())
}

fn update(shared: &Shared, body: &Value) -> Result<(), String> {
    let engine = shared.engine();
    if !engine.updating {
        return Err("no update has started".to_owned());
    }
    let joined = engine.workers.as_ref().map(Workers::joined);
    let ipc = engine.ipc.clone();
    drop(engine);
    if let Some(worker) = ipc {
        // An update that fails has ended.
        return worker
            .receive(body)
            .inspect_err(|_| shared.engine().updating = false);
    }
    let weights = joined.ok_or_else(no_workers)?.receive(body)?;
    let mut engine = shared.engine();
    let set = engine.policy.set_weights(weights);
    set.map_err(|e| format!("{e:#}"))
}

fn finish_update(shared: &Shared, body: &Value) -> Result<(), String> {
    let mut engine = shared.engine();
    if !std::mem::take(&mut engine.updating) {
        return Err("no update has started".to_owned());
    }
    if let Some(worker) = &engine.ipc {
        let weights = worker.finish()?;
        let set = engine.policy.set_weights(weights);
        set.map_err(|e| format!("{e:#}"))?;
    }
    if let Some(sleep) = &mut engine.sleep {
        sleep.lost = false;
    }
    if let Some(version) = body["weight_version"].as_str() {
        version.clone_into(&mut engine.version);
    }
    Ok(())
}

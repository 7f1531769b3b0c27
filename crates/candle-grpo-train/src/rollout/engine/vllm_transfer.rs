//! Whole weights from the policy's memory to a vLLM server: the parts that its backends share.

use serde_json::{Map, Value, json};

use super::live_weights::{Listed, LiveWeights};
use super::protocol::{Call, Failure, Server};
use super::weights::EngineWeights;
use crate::config_json::dtype_name;

/// Maximum number of processes that a server may report.
const MAX_PROCESSES: u64 = 1 << 16;

/// Returns what a server must be that receives weights over `backend`.
pub(super) fn requirement(backend: &str) -> String {
    let (version, variables) = match backend {
        "ipc" => (
            "0.32",
            "VLLM_SERVER_DEV_MODE=1, VLLM_ALLOW_INSECURE_SERIALIZATION=1",
        ),
        _ => ("0.30 or newer", "VLLM_SERVER_DEV_MODE=1"),
    };
    format!(
        "vLLM {version}, started with {variables} and --weight-transfer-config '{{\"backend\":\"{backend}\"}}'"
    )
}

/// Adds to a status what the server must be.
pub(super) fn with_requirement(failure: Failure, backend: &str) -> Failure {
    match failure {
        Failure::Status { status, message } => Failure::Status {
            status,
            message: format!("{message}; it must be {}", requirement(backend)),
        },
        failure => failure,
    }
}

/// Returns the number of the server's processes that have weights.
pub(super) fn processes(server: &Server, backend: &str) -> Result<usize, Failure> {
    let answer = server.call_briefly(&Call::get("/get_world_size"));
    let answer = answer.map_err(|failure| match failure {
        Failure::Status { status: 404, .. } => {
            Failure::Unsupported(with_requirement(failure, backend).to_string())
        }
        failure => failure,
    })?;
    let processes = answer["world_size"].as_u64();
    let processes = processes.filter(|processes| (1..=MAX_PROCESSES).contains(processes));
    let processes = processes.and_then(|processes| usize::try_from(processes).ok());
    processes.ok_or_else(|| {
        Failure::Malformed(format!(
            "/get_world_size: world_size: {}, must be a number of processes from 1",
            answer["world_size"]
        ))
    })
}

/// Returns the weights, which must be in memory.
pub(super) fn live(weights: &EngineWeights) -> Result<&LiveWeights, Failure> {
    weights.live.as_deref().ok_or_else(|| {
        Failure::Unsupported("the weights are in a directory, must be in memory".to_owned())
    })
}

/// Runs `update` while the server samples nothing.
pub(super) fn paused(
    server: &Server,
    update: impl FnOnce() -> Result<(), Failure>,
) -> Result<(), Failure> {
    server.call(&Call::post("/pause?mode=keep", json!({})))?;
    let updated = update();
    if server.sleeps {
        // It resumes when it is awake. Before that, it has no memory to sample with.
        return updated;
    }
    // A server that stays paused answers nothing.
    let resume = Call::post("/resume", json!({}));
    let resumed = match updated {
        Ok(()) => server.call(&resume),
        Err(_) => server.call_briefly(&resume),
    };
    updated?;
    resumed.map(drop)
}

/// Begins an update.
pub(super) fn start(server: &Server) -> Result<(), Failure> {
    let call = Call::post("/start_weight_update", json!({}));
    server.call(&call).map(drop)
}

/// Returns the description of the weights in an update.
pub(super) fn describe(listed: &[Listed], live: &LiveWeights) -> Map<String, Value> {
    let names: Vec<&str> = listed.iter().map(|weight| &*weight.name).collect();
    let shapes: Vec<&[usize]> = listed.iter().map(|weight| &*weight.shape).collect();
    let dtypes = vec![dtype_name(live.dtype()); listed.len()];
    let fields = [
        ("names", json!(names)),
        ("dtype_names", json!(dtypes)),
        ("shapes", json!(shapes)),
    ];
    let fields = fields.map(|(name, value)| (name.to_owned(), value));
    fields.into_iter().collect()
}

/// Returns the request that announces or passes on weights.
pub(super) fn update(fields: Map<String, Value>) -> Call {
    Call::post("/update_weights", json!({"update_info": fields}))
}

/// Ends an update, with which the server has the version of `weights`.
pub(super) fn finish(server: &Server, weights: &EngineWeights) -> Result<(), Failure> {
    let body = json!({"weight_version": weights.name()});
    server
        .call(&Call::post("/finish_weight_update", body))
        .map(drop)
}

/// Ends an update that has failed, in which the server may still be. The next one begins without
/// any of its weights.
pub(super) fn abandon(server: &Server) {
    let post = |path: &str| server.call_briefly(&Call::post(path, json!({})));
    // vLLM leaves an update that it has failed itself, and keeps the weights that it has received
    // for layers that lack others. Only the end of an update clears them.
    let ended = post("/finish_weight_update");
    if ended.is_err() && post("/start_weight_update").is_ok() {
        let _ = post("/finish_weight_update");
    }
}

/// Lets the server's processes end their connection to this one, best effort.
pub(super) fn shut_down(server: &Server) {
    if server.shares_memory() {
        // A transfer has failed, and vLLM does not close the connection within one.
        abandon(server);
    }
    let call = Call::post("/shutdown_weight_transfer_engine", json!({}));
    if let Err(failure) = server.call_briefly(&call) {
        tracing::debug!("{}: {failure}", server.url);
    }
}

pub(super) fn failed(error: candle_core::Error) -> Failure {
    Failure::Malformed(error.to_string())
}

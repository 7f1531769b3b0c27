//! Whole weights from the policy's memory to the processes of a vLLM server, over NCCL.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use candle_grpo_collective::TransferGroup;
use serde_json::json;

use super::live_weights::{Listed, LiveWeights};
use super::packing::messages;
use super::protocol::{Call, Failure, Server};
use super::transfer::Transfer;
use super::vllm::reset_prefix_cache;
use super::weights::EngineWeights;
use crate::config_json::dtype_name;

/// Maximum time until all processes are in the group.
const JOIN: Duration = Duration::from_secs(120);

/// Maximum number of processes that a server may report.
const MAX_PROCESSES: u64 = 1 << 16;

/// Opens the server's group, unless it is open.
pub(super) fn join(server: &Server) -> Result<(), Failure> {
    let transfer = server.transfer()?;
    let mut group = transfer.group();
    if group.is_none() {
        *group = Some(open(server, transfer)?);
    }
    Ok(())
}

/// Sends the weights to the server's processes. After a failure, the group is closed, and the next
/// call opens another one.
pub(super) fn load(server: &Server, weights: &EngineWeights) -> Result<(), Failure> {
    let transfer = server.transfer()?;
    let live = weights.live.as_deref().ok_or_else(|| {
        Failure::Unsupported("the weights are in a directory, must be in memory".to_owned())
    })?;
    // Taken, so that a failure closes it.
    let mut group = transfer.group();
    let mut joined = match group.take() {
        Some(joined) => joined,
        None => open(server, transfer)?,
    };
    server.call(&Call::post("/pause?mode=keep", json!({})))?;
    let updated = update(server, transfer, weights, live, &mut *joined);
    if updated.is_ok() {
        *group = Some(joined);
    } else {
        // The server's processes may wait for it.
        drop(joined);
        // A server that fails in the middle of an update stays in it.
        let _ = server.call_briefly(&Call::post("/finish_weight_update", json!({})));
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

fn open(server: &Server, transfer: &Transfer) -> Result<Box<dyn TransferGroup>, Failure> {
    let processes = processes(server)?;
    let transport = &transfer.transport;
    let id = transport.new_id().map_err(failed)?;
    let body = json!({"init_info": {
        "nccl_unique_id_b64": STANDARD.encode(id),
        "rank_offset": 1,
        "world_size": processes + 1,
        "packed": true,
        "packed_buffer_size_bytes": transfer.message,
        "packed_num_buffers": 2,
    }});
    let call = Call::post("/init_weight_transfer_engine", body);
    let limit = JOIN.min(server.timeout);
    let joined = transfer.alongside(server, call, limit, |waiting| {
        transport.connect(&id, processes, waiting)
    });
    joined.map_err(|failure| match failure {
        Failure::Status { status, message } => Failure::Status {
            status,
            message: format!("{message}; it must be {START}"),
        },
        failure => Failure::Connection(format!(
            "joining the {processes} processes that /get_world_size names: {failure}"
        )),
    })
}

/// The requirements of a server that receives weights over NCCL.
const START: &str = "vLLM 0.30 or newer, started with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{\"backend\":\"nccl\"}'";

/// Returns the number of the server's processes that have weights.
fn processes(server: &Server) -> Result<usize, Failure> {
    let answer = server.call_briefly(&Call::get("/get_world_size"));
    let answer = answer.map_err(|failure| match failure {
        Failure::Status { status: 404, .. } => {
            Failure::Unsupported(format!("{failure}; it must be {START}"))
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

fn update(
    server: &Server,
    transfer: &Transfer,
    weights: &EngineWeights,
    live: &LiveWeights,
    group: &mut dyn TransferGroup,
) -> Result<(), Failure> {
    let listed = live.list().map_err(failed)?;
    server.call(&Call::post("/start_weight_update", json!({})))?;
    let names: Vec<&str> = listed.iter().map(|weight| &*weight.name).collect();
    let shapes: Vec<&[usize]> = listed.iter().map(|weight| &*weight.shape).collect();
    let body = json!({"update_info": {
        "names": names,
        "dtype_names": vec![dtype_name(live.dtype()); listed.len()],
        "shapes": shapes,
    }});
    let call = Call::post("/update_weights", body);
    let sizes: Vec<usize> = listed.iter().map(|weight: &Listed| weight.bytes).collect();
    transfer.alongside(server, call, server.timeout, |waiting| {
        for message in messages(&sizes, transfer.message) {
            live.read(&listed[message], |tensors| group.pack(tensors))?;
            group.send(waiting)?;
        }
        Ok(())
    })?;
    let body = json!({"weight_version": weights.name()});
    server.call(&Call::post("/finish_weight_update", body))?;
    reset_prefix_cache(server)
}

fn failed(error: candle_core::Error) -> Failure {
    Failure::Malformed(error.to_string())
}

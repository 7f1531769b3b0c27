//! Whole weights from the policy's memory to the processes of a vLLM server, over NCCL.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use candle_grpo_collective::TransferGroup;
use serde_json::json;

use super::live_weights::Listed;
use super::packing::messages;
use super::protocol::{Call, Failure, Server};
use super::transfer::Transfer;
use super::vllm::reset_prefix_cache;
use super::vllm_transfer::{
    abandon, describe, failed, finish, live, paused, processes, start, update, with_requirement,
};
use super::weights::EngineWeights;

/// Maximum time until all processes are in the group.
const JOIN: Duration = Duration::from_secs(120);

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
    // Taken, so that a failure closes it.
    let mut group = transfer.group();
    let mut joined = match group.take() {
        Some(joined) => joined,
        None => open(server, transfer)?,
    };
    paused(server, || {
        match send(server, transfer, weights, &mut *joined) {
            Ok(()) => {
                *group = Some(joined);
                Ok(())
            }
            Err(failure) => {
                // The server's processes may wait for it.
                drop(joined);
                abandon(server);
                Err(failure)
            }
        }
    })
}

fn open(server: &Server, transfer: &Transfer) -> Result<Box<dyn TransferGroup>, Failure> {
    let processes = processes(server, "nccl")?;
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
        failure @ Failure::Status { .. } => with_requirement(failure, "nccl"),
        failure => Failure::Connection(format!(
            "joining the {processes} processes that /get_world_size names: {failure}"
        )),
    })
}

fn send(
    server: &Server,
    transfer: &Transfer,
    weights: &EngineWeights,
    group: &mut dyn TransferGroup,
) -> Result<(), Failure> {
    let live = live(weights)?;
    let listed = live.list().map_err(failed)?;
    start(server)?;
    let call = update(describe(&listed, live));
    let sizes: Vec<usize> = listed.iter().map(|weight: &Listed| weight.bytes).collect();
    transfer.alongside(server, call, server.timeout, |waiting| {
        for message in messages(&sizes, transfer.message) {
            live.read(&listed[message], |tensors| group.pack(tensors))?;
            group.send(waiting)?;
        }
        Ok(())
    })?;
    finish(server, weights)?;
    reset_prefix_cache(server)
}

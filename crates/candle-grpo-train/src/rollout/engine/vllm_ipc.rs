//! Whole weights from the policy's memory to a vLLM server on the same GPU, over CUDA IPC.
//!
//! The weights are copied into a buffer on the GPU, some at a time. A request passes on its handle,
//! and the server copies the weights out before it answers.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use candle_grpo_collective::{SharedBuffer, SharedMemory};
use serde_json::json;

use super::ipc_handles::ipc_handles;
use super::live_weights::Listed;
use super::packing::messages;
use super::protocol::{Call, Failure, Server};
use super::vllm::reset_prefix_cache;
use super::vllm_transfer::{
    abandon, describe, failed, finish, live, paused, processes, requirement, start, update,
    with_requirement,
};
use super::weights::EngineWeights;

/// The memory that this process shares with a server.
pub(super) struct Sharing {
    memory: Arc<dyn SharedMemory>,
    /// The limit for messages, in bytes.
    message: usize,
    /// The buffer of a transfer that has failed. The server may still have it open, so it is not
    /// freed before the next transfer ends.
    open: Mutex<Option<Box<dyn SharedBuffer>>>,
}

impl Sharing {
    pub(super) fn new(memory: Arc<dyn SharedMemory>, message: usize) -> Self {
        Self {
            memory,
            message,
            open: Mutex::new(None),
        }
    }

    /// Returns whether a server may have a buffer open after a failed transfer.
    pub(super) fn is_open(&self) -> bool {
        self.open.try_lock().is_ok_and(|open| open.is_some())
    }

    fn open(&self) -> MutexGuard<'_, Option<Box<dyn SharedBuffer>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Prepares the server for weights. It may have restarted since the last time.
pub(super) fn join(server: &Server) -> Result<(), Failure> {
    let processes = processes(server, "ipc")?;
    if processes != 1 {
        return Err(Failure::Unsupported(format!(
            "/get_world_size: world_size: {processes}, must be 1: only the process on the GPU of the policy can open its memory"
        )));
    }
    let body = json!({"init_info": {"packed": true}});
    let joined = server.call(&Call::post("/init_weight_transfer_engine", body));
    joined
        .map(drop)
        .map_err(|failure| with_requirement(failure, "ipc"))
}

/// Sends the weights to the server.
pub(super) fn load(server: &Server, weights: &EngineWeights) -> Result<(), Failure> {
    let sharing = server.sharing()?;
    join(server)?;
    // One call at a time has it.
    let mut open = sharing.open();
    paused(server, || {
        let sent = send(server, sharing, weights, &mut open);
        if sent.is_err() {
            abandon(server);
        }
        sent
    })
}

fn send(
    server: &Server,
    sharing: &Sharing,
    weights: &EngineWeights,
    open: &mut Option<Box<dyn SharedBuffer>>,
) -> Result<(), Failure> {
    let live = live(weights)?;
    let listed = live.list().map_err(failed)?;
    let sizes: Vec<usize> = listed.iter().map(|weight: &Listed| weight.bytes).collect();
    let messages = messages(&sizes, sharing.message);
    let bytes = messages.iter().map(|of| sizes[of.clone()].iter().sum());
    let bytes: usize = bytes.max().unwrap_or(0);
    // Before the buffer changes: the server has then ended an earlier update.
    start(server)?;
    let buffer = match open {
        // All transfers have the same sizes.
        Some(buffer) => buffer,
        None => open.insert(sharing.memory.allocate(bytes).map_err(failed)?),
    };
    let handles = STANDARD.encode(ipc_handles(&buffer.handle(), bytes));
    for message in messages {
        let listed = &listed[message.clone()];
        let packed = live.read(listed, |tensors| buffer.pack(tensors));
        packed.map_err(failed)?;
        let mut fields = describe(listed, live);
        fields.insert("tensor_sizes".to_owned(), json!(sizes[message]));
        fields.insert("ipc_handles_pickled".to_owned(), json!(handles));
        let sent = server.call(&update(fields));
        sent.map_err(|failure| match failure {
            Failure::Status { status, message } => Failure::Status {
                status,
                message: format!(
                    "{message}; it must be {}, on the policy's GPU",
                    requirement("ipc")
                ),
            },
            failure => failure,
        })?;
    }
    finish(server, weights)?;
    // The server has closed it.
    *open = None;
    reset_prefix_cache(server)
}

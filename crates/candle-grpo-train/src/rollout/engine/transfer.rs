//! A server's transfer group, over which its processes receive weights.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use candle_core::Error;
use candle_grpo_base::clock::running_time;
use candle_grpo_base::workers::POLL;
use candle_grpo_collective::{TransferGroup, TransferTransport, Waiting};
use serde_json::Value;

use super::protocol::{Call, Failure, Server};

/// A server's group, and how it is opened.
pub(super) struct Transfer {
    pub(super) transport: Arc<dyn TransferTransport>,
    /// The limit for messages, in bytes.
    pub(super) message: usize,
    group: Mutex<Option<Box<dyn TransferGroup>>>,
    is_closed: AtomicBool,
}

impl Transfer {
    pub(super) fn new(transport: Arc<dyn TransferTransport>, message: usize) -> Self {
        Self {
            transport,
            message,
            group: Mutex::new(None),
            is_closed: AtomicBool::new(false),
        }
    }

    /// Returns the open group, if there is one. One call at a time has it.
    pub(super) fn group(&self) -> MutexGuard<'_, Option<Box<dyn TransferGroup>>> {
        // After a panic, the group may be in the middle of a message.
        self.group.lock().unwrap_or_else(|poisoned| {
            let mut group = PoisonError::into_inner(poisoned);
            *group = None;
            group
        })
    }

    /// Returns whether a group is open, and no call has it.
    pub(super) fn is_open(&self) -> bool {
        self.group.try_lock().is_ok_and(|group| group.is_some())
    }

    /// Ends all operations, now and later.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
    }

    /// Runs `operation` while the server answers `call`, in which its processes do their part.
    /// Neither is left waiting for the other: if the request fails, `waiting` fails in the
    /// operation, and it fails after `limit`. If the operation fails, the answer is ignored.
    pub(super) fn alongside<T>(
        &self,
        server: &Server,
        call: Call,
        limit: Duration,
        operation: impl FnOnce(&mut Waiting<'_>) -> candle_core::Result<T>,
    ) -> Result<T, Failure> {
        let end = running_time() + limit;
        let path = call.path.clone();
        // Longer, so that the error says which of them has not ended.
        let answers = server.start(call, 2 * limit)?;
        let mut answer: Option<Result<Value, Failure>> = None;
        let mut waiting = || {
            if answer.is_none() {
                answer = match answers.try_recv() {
                    Ok(answer) => Some(answer),
                    Err(TryRecvError::Empty) => None,
                    Err(TryRecvError::Disconnected) => {
                        let message = format!("the thread of the request panicked ({path})");
                        Some(Err(Failure::Connection(message)))
                    }
                };
            }
            match &answer {
                Some(Err(failure)) => Err(Error::msg(failure)),
                _ if self.is_closed.load(Ordering::Acquire) => {
                    Err(Error::msg("the generator is closed"))
                }
                _ if running_time() >= end => {
                    let limit = limit.as_secs_f64();
                    Err(Error::msg(format!("no end within {limit} s ({path})")))
                }
                Some(Ok(_)) => Ok(true),
                None => Ok(false),
            }
        };
        let done = operation(&mut || waiting().map(drop)).and_then(|done| {
            while !waiting()? {
                thread::sleep(POLL);
            }
            Ok(done)
        });
        match (done, answer) {
            (Err(_), Some(Err(failure))) => Err(failure),
            (done, _) => done.map_err(|error| Failure::Connection(error.to_string())),
        }
    }
}

//! Several processes of a program that answer one request at a time.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, anyhow};
use serde_json::{Map, Value};

use super::{Answer, Failure, Process, Program};
use crate::Progress;

/// Processes of a program. One that fails is started again for its next request.
pub(crate) struct ProgramPool {
    program: Program,
    processes: Vec<Mutex<Option<Process>>>,
}

impl ProgramPool {
    /// Starts `workers` processes.
    ///
    /// # Errors
    ///
    /// If the program cannot be started.
    pub(crate) fn start(program: Program, workers: usize) -> Result<Self> {
        let processes = (0..workers).map(|_| Ok(Mutex::new(Some(program.start()?))));
        Ok(Self {
            processes: processes.collect::<Result<_>>()?,
            program,
        })
    }

    /// The answer to a request. Requests with the same `key` go to the same process, which answers
    /// one after the other.
    ///
    /// # Errors
    ///
    /// If the program hangs, ends or gives a wrong answer, or a stop is requested.
    pub(crate) fn ask<T>(
        &self,
        key: u64,
        request: Map<String, Value>,
        progress: &dyn Progress,
        read: impl Fn(&str) -> Result<Answer<T>>,
    ) -> Result<T, Failure> {
        let place = key % self.processes.len().max(1) as u64;
        let process = &self.processes[place as usize];
        let mut process = process.lock().unwrap_or_else(PoisonError::into_inner);
        let mut running = match process.take() {
            Some(running) => running,
            None => self.program.start().map_err(Failure::Ended)?,
        };
        let mut answer = [None];
        match running.ask(vec![request], progress, read, &mut answer) {
            Ok(()) if running.keeps_running() => *process = Some(running),
            Ok(()) => {
                let error = "its answer has no id, must echo the \"id\" of the request";
                return Err(Failure::Wrong(anyhow!(error)));
            }
            Err(_) if progress.is_canceled() => return Err(Failure::Interrupted),
            Err(failure) => return Err(failure.map(|error| running.stop(error))),
        }
        let [answer] = answer;
        answer.ok_or_else(|| Failure::Wrong(anyhow!("its answer is missing")))
    }
}

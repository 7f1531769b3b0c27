//! Several processes that run the same program and answer one request at a time.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, anyhow};
use serde_json::{Map, Value};

use super::{Answer, FIRST_ATTEMPTS, Failure, Process, Program, no_answer};
use crate::Progress;

/// A program's processes. A process that fails is restarted for its next request.
pub struct ProgramPool {
    program: Program,
    processes: Vec<Mutex<Option<Process>>>,
    /// True once a process has answered.
    has_answered: AtomicBool,
    /// Number of unanswered requests before the first answer, and the last error.
    first_failures: Mutex<(usize, String)>,
}

impl ProgramPool {
    /// Starts `workers` processes.
    ///
    /// # Errors
    ///
    /// Fails if the program cannot be started.
    pub fn start(program: Program, workers: usize) -> Result<Self> {
        let processes = (0..workers).map(|_| Ok(Mutex::new(Some(program.start()?))));
        Ok(Self {
            processes: processes.collect::<Result<_>>()?,
            has_answered: AtomicBool::new(false),
            first_failures: Mutex::default(),
            program,
        })
    }

    /// Returns the answer to a request. Requests with the same `key` go to the same process, which
    /// answers them one after the other.
    ///
    /// # Errors
    ///
    /// Fails if the program hangs, ends or answers wrongly, or if a stop is requested. A program
    /// that exceeds its time or ends twice before its first answer is not restarted.
    pub fn ask<T>(
        &self,
        key: u64,
        request: Map<String, Value>,
        progress: &dyn Progress,
        read: impl Fn(&str) -> Result<Answer<T>>,
    ) -> Result<T, Failure> {
        let place = key % self.processes.len().max(1) as u64;
        let process = &self.processes[place as usize];
        let mut process = process.lock().unwrap_or_else(PoisonError::into_inner);
        self.ensure_can_answer()?;
        let mut running = match process.take() {
            Some(running) => running,
            None => self.program.start().map_err(Failure::Ended)?,
        };
        let mut answer = [None];
        match running.ask(vec![request], progress, read, &mut answer) {
            Ok(()) if running.keeps_running() => {
                self.has_answered.store(true, Ordering::Relaxed);
                *process = Some(running);
            }
            Ok(()) => {
                let error = "its answer has no id, must echo the \"id\" of the request";
                return Err(Failure::Wrong(anyhow!(error)));
            }
            Err(_) if progress.is_canceled() => return Err(Failure::Interrupted),
            Err(failure) => {
                let failure = failure.map(|error| running.stop(error));
                if let Failure::Timeout(error) | Failure::Ended(error) = &failure {
                    self.note(error);
                    self.ensure_can_answer()?;
                }
                return Err(failure);
            }
        }
        let [answer] = answer;
        answer.ok_or_else(|| Failure::Wrong(anyhow!("its answer is missing")))
    }

    /// Records an unanswered request. Before the first answer, it is also logged.
    fn note(&self, error: &anyhow::Error) {
        if !self.has_answered.load(Ordering::Relaxed) {
            let error = format!("{error:#}");
            tracing::warn!("program {:?}: {error}", self.program.command);
            let failures = self.first_failures.lock();
            let mut failures = failures.unwrap_or_else(PoisonError::into_inner);
            *failures = (failures.0 + 1, error);
        }
    }

    fn ensure_can_answer(&self) -> Result<(), Failure> {
        if self.has_answered.load(Ordering::Relaxed) {
            return Ok(());
        }
        let failures = self.first_failures.lock();
        match &*failures.unwrap_or_else(PoisonError::into_inner) {
            (count, last) if *count >= FIRST_ATTEMPTS => {
                Err(Failure::Unusable(no_answer(*count, last)))
            }
            _ => Ok(()),
        }
    }
}

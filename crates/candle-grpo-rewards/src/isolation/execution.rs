//! One program execution.

use std::fs;
use std::io::{Read, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::sandbox::{Job, Sandbox};
use crate::processes::Running;
use crate::{Interrupted, Progress};
use candle_grpo_base::clock::running_time;

/// Maximum time between the sandbox start and the program start, on a busy machine.
const START: Duration = Duration::from_secs(60);

/// Time for the pipes to close after all processes have ended.
const QUIET: Duration = Duration::from_secs(10);

/// The same, if processes without isolation may be left.
const SHORT: Duration = Duration::from_millis(100);

/// Interval between checks for a stop request.
const POLL: Duration = Duration::from_millis(20);

/// Number of attempts to start a sandbox. A start may fail because the machine briefly lacks a
/// resource.
const ATTEMPTS: usize = 3;

/// Line on stderr before any program output.
const READY: &[u8] = b"ready\n";

/// Output chunks that wait to be read; more stay in the pipe.
const WAITING: usize = 16;

/// Environment for programs. Without random hashes, sets always have the same order.
const ENVIRONMENT: [(&str, &str); 7] = [
    (
        "PATH",
        "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin",
    ),
    ("HOME", "/work"),
    ("LANG", "C.UTF-8"),
    ("PYTHONHASHSEED", "0"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("PYTHONIOENCODING", "utf-8"),
    ("OPENBLAS_NUM_THREADS", "1"),
];

/// End of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// By itself or through a system limit; true if the status was 0.
    Exited(bool),
    /// It exceeded its time.
    Time,
    /// It wrote too much.
    Output,
}

/// An execution's result.
pub(crate) struct Outcome {
    pub(crate) end: End,
    /// Its stdout.
    pub(crate) output: Vec<u8>,
}

/// Why a program did not run.
enum NotRun {
    /// The sandbox did not start.
    Sandbox(anyhow::Error),
    Interrupted,
}

enum Event {
    Output(Vec<u8>),
    Errors(Vec<u8>),
}

impl Sandbox {
    /// Runs a program in its own directory, which is removed afterward.
    ///
    /// # Errors
    ///
    /// Fails if the sandbox cannot be started, or if a stop is requested. Whatever a program does
    /// is not an error.
    pub(crate) fn run(&self, job: &Job<'_>, progress: &dyn Progress) -> Result<Outcome> {
        let mut attempt = 1;
        loop {
            match self.attempt(job, progress) {
                Ok(outcome) => return Ok(outcome),
                Err(NotRun::Interrupted) => return Err(Interrupted.into()),
                Err(NotRun::Sandbox(error)) if attempt == ATTEMPTS => return Err(error),
                Err(NotRun::Sandbox(_)) => attempt += 1,
            }
        }
    }

    fn attempt(&self, job: &Job<'_>, progress: &dyn Progress) -> Result<Outcome, NotRun> {
        let place = self.place().map_err(NotRun::Sandbox)?;
        let start = || -> Result<(Running, Receiver<Event>)> {
            if let Some((name, text)) = job.file {
                fs::write(place.files().join(name), text)?;
            }
            let mut command = self.command(job, &place)?;
            command.env_clear().envs(ENVIRONMENT);
            let mut running = Running::start(&mut command, |command| self.spawn(command))?;
            let events = connect(&mut running, job.input.clone())?;
            Ok((running, events))
        };
        let (mut running, events) = start().map_err(NotRun::Sandbox)?;
        let outcome = self.watch(&mut running, &events, progress);
        running.kill();
        if self.is_isolated() {
            // The last process closes the pipes, and then nothing is left.
            let deadline = running_time() + QUIET;
            while running_time() < deadline
                && !matches!(
                    events.recv_timeout(POLL),
                    Err(RecvTimeoutError::Disconnected)
                )
            {}
        }
        drop(place);
        outcome
    }

    /// Waits until the program ends or exceeds a limit.
    fn watch(
        &self,
        running: &mut Running,
        events: &Receiver<Event>,
        progress: &dyn Progress,
    ) -> Result<Outcome, NotRun> {
        let mut written = Written::default();
        let mut deadline = running_time() + START;
        let mut status = None;
        loop {
            if progress.is_canceled() {
                return Err(NotRun::Interrupted);
            }
            let rest = deadline.saturating_sub(running_time());
            match events.recv_timeout(POLL.min(rest)) {
                Ok(event) => {
                    let was_ready = written.is_ready;
                    written.take(event);
                    if written.is_ready && !was_ready {
                        deadline =
                            running_time() + Duration::from_secs_f64(self.limits.time_seconds);
                    }
                    if written.bytes > self.limits.output_bytes {
                        return Ok(written.end(End::Output));
                    }
                    continue;
                }
                // All pipes are closed, and everything has been read.
                Err(RecvTimeoutError::Disconnected) if status.is_some() => break,
                // Everything that was written in time has been read. If the program ended in time,
                // that is found below.
                Err(_) if rest.is_zero() && !matches!(running.status(), Ok(Some(_))) => {
                    break;
                }
                Err(_) if rest.is_zero() && status.is_some() => break,
                Err(RecvTimeoutError::Disconnected) => thread::sleep(Duration::from_millis(1)),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if status.is_none()
                && let Ok(Some(ended)) = running.status()
            {
                status = Some(ended);
                // Without isolation, a remaining process may keep the pipes open.
                running.kill();
                let patience = if self.is_isolated() { QUIET } else { SHORT };
                deadline = running_time() + patience;
            }
        }
        if !written.is_ready {
            let errors = String::from_utf8_lossy(&written.errors);
            return Err(NotRun::Sandbox(anyhow!(
                "the sandbox does not start: {}",
                errors.trim()
            )));
        }
        Ok(written.end(match status {
            Some(status) => End::Exited(status.success()),
            None => End::Time,
        }))
    }
}

/// Bytes from the pipes.
#[derive(Default)]
struct Written {
    output: Vec<u8>,
    /// The sandbox's errors, which come before the program's.
    errors: Vec<u8>,
    /// True after the start of the program.
    is_ready: bool,
    /// Number of bytes that the program has written.
    bytes: usize,
}

impl Written {
    fn take(&mut self, event: Event) {
        match event {
            Event::Output(bytes) => {
                self.bytes += bytes.len();
                self.output.extend(bytes);
            }
            Event::Errors(bytes) if self.is_ready => self.bytes += bytes.len(),
            Event::Errors(bytes) => {
                self.errors.extend(bytes);
                let line = self
                    .errors
                    .windows(READY.len())
                    .position(|line| line == READY);
                if let Some(at) = line {
                    self.is_ready = true;
                    self.bytes += self.errors.len() - at - READY.len();
                }
            }
        }
    }

    fn end(self, end: End) -> Outcome {
        Outcome {
            end,
            output: self.output,
        }
    }
}

/// Writes `input`, and sends pipe output until both pipes are closed.
fn connect(running: &mut Running, input: Vec<u8>) -> Result<Receiver<Event>> {
    let (mut stdin, stdout, stderr) = running.pipes()?;
    // A program need not read its input.
    thread::spawn(move || drop(stdin.write_all(&input)));
    let (sender, events) = sync_channel(WAITING);
    let others = sender.clone();
    thread::spawn(move || send_all(stdout, &sender, Event::Output));
    thread::spawn(move || send_all(stderr, &others, Event::Errors));
    Ok(events)
}

fn send_all(mut pipe: impl Read, events: &SyncSender<Event>, event: fn(Vec<u8>) -> Event) {
    let mut bytes = [0; 1 << 14];
    while let Ok(count @ 1..) = pipe.read(&mut bytes) {
        if events.send(event(bytes[..count].to_vec())).is_err() {
            return;
        }
    }
}

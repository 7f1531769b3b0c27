//! A program that reads lines and does not answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::ChildStdin;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Result;

use super::Program;
use crate::processes::Running;

/// Number of lines that wait for the program.
const QUEUE: usize = 1 << 10;

/// Maximum length for an output line in the log, in bytes.
const LONGEST: u64 = 1 << 12;

/// A program that reads lines. It never delays this process: lines that it has no time for are
/// dropped, and its end is only a warning. Its output is logged.
pub struct Sink {
    name: String,
    running: Running,
    lines: Option<SyncSender<Vec<u8>>>,
    /// Threads that log its output.
    loggers: [JoinHandle<()>; 2],
    /// Number of dropped lines.
    left_out: usize,
    /// Maximum time to exit after its input ends.
    limit: Duration,
    /// True once it has had its time to exit.
    is_closed: bool,
}

impl Sink {
    /// Starts `program`, whose limit is the time to exit after its input ends.
    ///
    /// # Errors
    ///
    /// Fails if it cannot be started.
    pub(super) fn start(program: &Program) -> Result<Self> {
        let mut running = program.spawn(&[])?;
        // The last word in a command usually names it best.
        let name = program.command.last().cloned().unwrap_or_default();
        let (lines, waiting) = sync_channel(QUEUE);
        let (stdin, stdout, stderr) = running.pipes()?;
        thread::spawn(move || write(stdin, &waiting));
        let loggers = [log(&name, stdout), log(&name, stderr)];
        Ok(Self {
            name,
            running,
            lines: Some(lines),
            loggers,
            left_out: 0,
            limit: program.limit,
            is_closed: false,
        })
    }

    /// Sends a line, unless the queue is full or the program has ended.
    pub fn send(&mut self, mut line: Vec<u8>) {
        line.push(b'\n');
        let Some(lines) = &self.lines else {
            return;
        };
        match lines.try_send(line) {
            Ok(()) => {}
            Err(TrySendError::Full(_)) => {
                if self.left_out == 0 {
                    tracing::warn!(
                        "{}: {QUEUE} lines wait to be read, more are left out",
                        self.name
                    );
                }
                self.left_out += 1;
            }
            Err(TrySendError::Disconnected(_)) => {
                self.lines = None;
                tracing::warn!("{}: reads no more lines", self.name);
            }
        }
    }

    /// Closes the input, and waits until the program ends, its limit is over, or `is_canceled`.
    /// Kills whatever is left.
    pub fn end(mut self, is_canceled: &dyn Fn() -> bool) {
        self.close(is_canceled);
    }

    fn close(&mut self, is_canceled: &dyn Fn() -> bool) {
        self.lines = None;
        match self.running.wait(self.limit, is_canceled) {
            Some(status) if status.success() => {}
            Some(status) => tracing::warn!("{}: ended ({status})", self.name),
            None if is_canceled() => tracing::warn!(
                "{}: had not ended after its input when the run was canceled, and is killed",
                self.name
            ),
            None => tracing::warn!(
                "{}: has not ended within {} seconds after its input and is killed",
                self.name,
                self.limit.as_secs_f64()
            ),
        }
        // Dropping it does not wait again.
        self.is_closed = true;
    }
}

impl Drop for Sink {
    /// Closes the input, gives the program its time to exit, and then kills it.
    fn drop(&mut self) {
        if !self.is_closed {
            self.close(&|| false);
        }
        if self.left_out > 0 {
            tracing::warn!("{}: {} lines were left out", self.name, self.left_out);
        }
        self.running.kill_and_read(&self.loggers);
    }
}

/// Writes lines until the program ends or there are no more.
fn write(mut stdin: ChildStdin, lines: &Receiver<Vec<u8>>) {
    for line in lines {
        if stdin.write_all(&line).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

/// Logs a pipe's lines.
fn log(name: &str, pipe: impl Read + Send + 'static) -> JoinHandle<()> {
    let name = name.to_owned();
    thread::spawn(move || {
        let mut reader = BufReader::new(pipe);
        loop {
            let mut line = Vec::new();
            match (&mut reader).take(LONGEST).read_until(b'\n', &mut line) {
                Ok(1..) => {
                    let line = String::from_utf8_lossy(&line);
                    tracing::info!("{name}: {}", line.trim_end());
                }
                _ => return,
            }
        }
    })
}

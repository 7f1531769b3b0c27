//! A running program that reads and writes lines.

use std::io::{BufRead, BufReader, Read as _, Write};
use std::process::{ChildStdin, ChildStdout};
use std::slice;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::tail::Tail;
use super::{Program, quoted};
use crate::processes::Running;

/// Time for a program that has closed its output to exit.
const QUIET: Duration = Duration::from_millis(20);

/// Time for a dropped program to exit after its input ends.
const LAST_GRACE: Duration = Duration::from_secs(1);

/// A running program that reads and writes lines, with one thread per pipe, so that no pipe can
/// fill up and block it. Dropping it closes its input, gives it a second to exit, and then kills it
/// and everything that it has started.
pub struct Lines {
    running: Running,
    input: Option<Sender<Vec<u8>>>,
    output: Receiver<Result<String, String>>,
    errors: Arc<Mutex<Tail>>,
    error_reader: thread::JoinHandle<()>,
}

impl Lines {
    /// Starts `program`, whose output lines have at most `max_line` bytes. At most `max_waiting`
    /// lines wait to be received; more stay in the pipe.
    pub(super) fn start(program: &Program, max_line: usize, max_waiting: usize) -> Result<Self> {
        let mut running = program.spawn(&[])?;
        let (stdin, stdout, stderr) = running.pipes()?;
        let (input, batches) = channel();
        thread::spawn(move || write_batches(stdin, &batches));
        let (lines, output) = sync_channel(max_waiting);
        thread::spawn(move || read_lines(stdout, max_line, &lines));
        let (errors, error_reader) = Tail::read(stderr);
        Ok(Self {
            running,
            input: Some(input),
            output,
            errors,
            error_reader,
        })
    }

    /// Sends lines, each with its line break, without waiting.
    pub fn send(&self, lines: Vec<u8>) {
        if let Some(input) = &self.input {
            // An error means that the program has ended, which its output also shows.
            let _ = input.send(lines);
        }
    }

    /// Ends the program's input.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// Returns the next output line, or the error for a line that cannot be read, which is the last
    /// one.
    ///
    /// # Errors
    ///
    /// Fails if there is no line after `patience`, or the output has ended.
    pub fn receive(&self, patience: Duration) -> Result<Result<String, String>, RecvTimeoutError> {
        self.output.recv_timeout(patience)
    }

    /// Returns whether the program has exited.
    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.running.status(), Ok(None))
    }

    /// Kills the program, and adds its exit status and the end of its stderr to `error`.
    pub fn stop(mut self, error: anyhow::Error) -> anyhow::Error {
        // A program that has closed its output is about to exit, with its own status.
        let status = match self.running.wait(QUIET, &|| false) {
            Some(status) => format!(" ({status})"),
            None => String::new(),
        };
        self.running
            .kill_and_read(slice::from_ref(&self.error_reader));
        let mut tail = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        match tail.text().trim() {
            "" => anyhow!("{error:#}{status}; it wrote nothing to stderr"),
            text => anyhow!("{error:#}{status}; its stderr ends with:\n{text}"),
        }
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        self.input = None;
        self.running.wait(LAST_GRACE, &|| false);
    }
}

fn write_batches(mut stdin: ChildStdin, batches: &Receiver<Vec<u8>>) {
    for batch in batches {
        if stdin
            .write_all(&batch)
            .and_then(|()| stdin.flush())
            .is_err()
        {
            return;
        }
    }
}

/// Sends each line, or the error for a line that cannot be read.
fn read_lines(stdout: ChildStdout, max_line: usize, lines: &SyncSender<Result<String, String>>) {
    let mut reader = BufReader::new(stdout);
    while let Some(line) = next_line(&mut reader, max_line) {
        let is_last = line.is_err();
        if lines.send(line).is_err() || is_last {
            return;
        }
    }
}

fn next_line(reader: &mut impl BufRead, max_line: usize) -> Option<Result<String, String>> {
    let mut bytes = Vec::new();
    match reader.take(max_line as u64).read_until(b'\n', &mut bytes) {
        Ok(0) => return None,
        Ok(_) => {}
        Err(error) => return Some(Err(format!("its output cannot be read: {error}"))),
    }
    Some(match bytes.strip_suffix(b"\n") {
        Some(line) => match str::from_utf8(line) {
            Ok(line) => Ok(line.to_owned()),
            Err(_) => Err("a line that is not UTF-8".to_owned()),
        },
        None if bytes.len() == max_line => {
            Err(format!("a line of more than {} MiB", max_line >> 20))
        }
        None => {
            let line = quoted(&String::from_utf8_lossy(&bytes));
            Err(format!("ended within the line {line}"))
        }
    })
}

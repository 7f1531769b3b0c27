//! Programs that read one input and exit.

use std::io::Write;
use std::net::TcpListener;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
#[cfg(feature = "code")]
use std::time::Duration;

use anyhow::Result;

use super::tail::Tail;
use crate::processes::Running;

/// A program with one input, which exits on its own. Dropping it kills the program and everything
/// that it has started.
pub struct Job {
    running: Running,
    /// The end of its stderr.
    errors: Arc<Mutex<Tail>>,
    readers: [thread::JoinHandle<()>; 2],
}

impl Job {
    /// Writes `input` to a program that has just started, and closes its standard input.
    pub(super) fn new(mut running: Running, input: Vec<u8>) -> Result<Self> {
        let (mut stdin, stdout, stderr) = running.pipes()?;
        // A program that does not read its input may still be right.
        thread::spawn(move || stdin.write_all(&input));
        let (_, output_reader) = Tail::read(stdout);
        let (errors, error_reader) = Tail::read(stderr);
        Ok(Self {
            running,
            errors,
            readers: [output_reader, error_reader],
        })
    }

    /// Takes the listener at [`Program::server`](super::Program::server) in the program's own
    /// network, if it has one.
    pub fn take_server(&mut self) -> Option<TcpListener> {
        self.running.take_server()
    }

    /// Returns the exit status, if the program has ended.
    ///
    /// # Errors
    ///
    /// Fails if the system cannot report it.
    pub fn status(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.running.status()?)
    }

    /// Waits until the program ends or `patience` is over. Returns the exit status, if the program
    /// has ended.
    #[cfg(feature = "code")]
    pub(super) fn wait(&mut self, patience: Duration) -> Option<ExitStatus> {
        self.running.wait(patience, &|| false)
    }

    /// Kills whatever is left of the program. Returns the end of its stderr.
    pub fn end(mut self) -> String {
        self.running.kill_and_read(&self.readers);
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        errors.text().trim().to_owned()
    }
}

//! Programs that read one input and exit.

use std::io::Write;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::Result;

use super::tail::Tail;
use super::{ProcessGroup, Program};
use candle_grpo_base::clock::running_time;

/// Time for the pipes to close after a program has ended.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

const POLL: Duration = Duration::from_millis(2);

/// A program with one input, which exits on its own. Dropping it kills the program and everything
/// that it has started.
pub struct Job {
    program: Child,
    group: ProcessGroup,
    /// The end of its output.
    output: Arc<Mutex<Tail>>,
    readers: Vec<thread::JoinHandle<()>>,
}

impl Job {
    /// Starts `program` with additional environment variables. `input` is its standard input.
    pub(super) fn start(
        program: &Program,
        input: Vec<u8>,
        variables: &[(&str, String)],
    ) -> Result<Self> {
        let (mut child, group) = program.spawn(variables)?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that does not read its input may still be right.
            thread::spawn(move || stdin.write_all(&input));
        }
        let mut readers = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            readers.push(Tail::read(stdout).1);
        }
        let mut output = Arc::default();
        if let Some(stderr) = child.stderr.take() {
            let (tail, reader) = Tail::read(stderr);
            output = tail;
            readers.push(reader);
        }
        Ok(Self {
            program: child,
            group,
            output,
            readers,
        })
    }

    /// Returns the exit status, if the program has ended.
    ///
    /// # Errors
    ///
    /// Fails if the system cannot report it.
    pub fn status(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.program.try_wait()?)
    }

    /// Kills whatever is left of the program. Returns the end of its stderr.
    pub fn end(mut self) -> String {
        self.kill();
        let deadline = running_time() + LAST_OUTPUT;
        let is_read = |reader: &thread::JoinHandle<()>| reader.is_finished();
        while !self.readers.iter().all(is_read) && running_time() < deadline {
            thread::sleep(POLL);
        }
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        output.text().trim().to_owned()
    }

    fn kill(&mut self) {
        self.group.kill();
        let _ = self.program.kill();
        // Waiting leaves no zombie.
        let _ = self.program.wait();
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.kill();
    }
}

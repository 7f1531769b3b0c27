//! A running program's processes.

use std::io;
use std::net::TcpListener;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use super::group::ProcessGroup;
use candle_grpo_base::clock::running_time;

/// Interval between checks.
const POLL: Duration = Duration::from_millis(2);

/// Time for the last output after a program has ended.
const LAST_OUTPUT: Duration = Duration::from_secs(1);

/// A running program, and everything that it has started. Dropping it kills them.
pub(crate) struct Running {
    child: Child,
    group: ProcessGroup,
    /// Directories that the program uses until it has ended.
    place: Option<Box<dyn Send>>,
    /// Listener in the program's own network.
    server: Option<TcpListener>,
}

impl Running {
    /// Starts `command` with `spawn`, in its own group and with pipes.
    pub(crate) fn start(
        command: &mut Command,
        spawn: impl FnOnce(&mut Command) -> io::Result<Child>,
    ) -> Result<Self> {
        let group = ProcessGroup::start().context("starting sh")?;
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        group.add(command);
        let child = spawn(command);
        let child = child.with_context(|| format!("starting {:?}", command.get_program()))?;
        Ok(Self {
            child,
            group,
            place: None,
            server: None,
        })
    }

    /// Removes `place` after the program has been killed.
    #[cfg(feature = "code")]
    pub(crate) fn isolated(
        mut self,
        place: impl Send + 'static,
        server: Option<TcpListener>,
    ) -> Self {
        self.place = Some(Box::new(place));
        self.server = server;
        self
    }

    /// Takes the listener in the program's own network, if it has one.
    pub(crate) fn take_server(&mut self) -> Option<TcpListener> {
        self.server.take()
    }

    /// Takes the pipes to stdin, stdout and stderr.
    ///
    /// # Errors
    ///
    /// Fails if they have already been taken.
    pub(crate) fn pipes(&mut self) -> Result<(ChildStdin, ChildStdout, ChildStderr)> {
        let absent = || anyhow!("pipe: absent");
        let stdin = self.child.stdin.take().ok_or_else(absent)?;
        let stdout = self.child.stdout.take().ok_or_else(absent)?;
        let stderr = self.child.stderr.take().ok_or_else(absent)?;
        Ok((stdin, stdout, stderr))
    }

    /// Returns the exit status, if the program has ended.
    pub(crate) fn status(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits until the program ends, `patience` is over, or `is_canceled` returns true. Returns the
    /// exit status, if the program has ended.
    pub(crate) fn wait(
        &mut self,
        patience: Duration,
        is_canceled: &dyn Fn() -> bool,
    ) -> Option<ExitStatus> {
        let deadline = running_time() + patience;
        loop {
            match self.status() {
                Ok(None) if running_time() < deadline && !is_canceled() => thread::sleep(POLL),
                Ok(status) => return status,
                Err(_) => return None,
            }
        }
    }

    /// Kills the program and its group. You can call it again.
    pub(crate) fn kill(&mut self) {
        self.group.kill();
        let _ = self.child.kill();
        // Waiting leaves no zombie.
        let _ = self.child.wait();
    }

    /// Kills like [`Self::kill`], then waits until `readers` have read the rest. The pipes are
    /// closed by then, unless a process outside the group holds them.
    pub(crate) fn kill_and_read(&mut self, readers: &[JoinHandle<()>]) {
        self.kill();
        let deadline = running_time() + LAST_OUTPUT;
        while !readers.iter().all(JoinHandle::is_finished) && running_time() < deadline {
            thread::sleep(POLL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        drop(self.place.take());
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_canceled_wait_leaves_the_program_running() {
        let mut running = Running::start(&mut Command::new("cat"), Command::spawn).unwrap();
        let _open = running.pipes().unwrap();
        let asked = Cell::new(0);
        let cancel = || {
            asked.set(asked.get() + 1);
            true
        };
        assert_eq!(running.wait(Duration::from_secs(10), &cancel), None);
        assert_eq!(asked.get(), 1);
        assert_eq!(running.status().unwrap(), None);
    }
}

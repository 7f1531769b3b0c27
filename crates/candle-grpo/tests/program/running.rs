//! A program that a test follows while it runs.

use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use candle_grpo_test_support::Lines;

/// A running program whose lines on stdout are events. It is killed when it is dropped.
pub(crate) struct Running {
    child: Child,
    pub(crate) lines: Lines,
    errors: Option<JoinHandle<String>>,
}

impl Running {
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = Lines::new(child.stdout.take().unwrap());
        let errors = child.stderr.take().unwrap();
        Self {
            child,
            lines,
            errors: Some(thread::spawn(|| io::read_to_string(errors).unwrap())),
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Blocks until it prints its next step, and returns the step number.
    pub(crate) fn step(&self) -> usize {
        let line = self.lines.find("step ");
        let number = line.trim_start_matches("step ").split('/').next();
        number.unwrap().trim().parse().expect(&line)
    }

    /// Waits for its end. Returns its status and what it wrote to stderr.
    pub(crate) fn end(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        (status, self.errors.take().unwrap().join().unwrap())
    }

    /// Kills it after this time, unless it has ended well. Returns whether it was killed.
    pub(crate) fn kill_after(mut self, time: Duration) -> bool {
        if !self.lines.end_within(time) {
            self.child.kill().unwrap();
        }
        let (status, errors) = self.end();
        assert!(
            matches!(status.code(), None | Some(0)),
            "{status}: {errors}"
        );
        status.code().is_none()
    }

    /// Kills it and waits for its end. Fails if it has ended before.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        let (status, errors) = self.end();
        assert_eq!(status.code(), None, "{errors}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

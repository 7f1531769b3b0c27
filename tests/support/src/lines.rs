//! Lines that other processes write, as events in a test.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::WATCHDOG;

/// Creates a named pipe at `path`, which any user can read and write.
///
/// # Panics
///
/// If it cannot be created.
pub fn named_pipe(path: &Path) {
    let made = Command::new("mkfifo")
        .args(["-m", "666"])
        .arg(path)
        .status();
    assert!(made.is_ok_and(|status| status.success()), "mkfifo {path:?}");
}

/// Lines from a pipe that another process writes. A thread reads them, so that the process never
/// waits for the test.
///
/// ```
/// use candle_grpo_test_support::Lines;
/// use std::process::{Command, Stdio};
///
/// let mut shell = Command::new("sh");
/// let shell = shell.args(["-c", "echo started"]).stdout(Stdio::piped());
/// let mut child = shell.spawn()?;
/// let lines = Lines::new(child.stdout.take().expect("a pipe"));
/// assert_eq!(lines.find("start"), "started");
/// lines.wait_for_end();
/// child.wait()?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Lines {
    lines: Mutex<Receiver<String>>,
    /// A write end of a named pipe, so that the pipe does not end before its first process.
    own_end: Option<File>,
}

impl Lines {
    /// Reads lines from `pipe`.
    pub fn new(pipe: impl Read + Send + 'static) -> Self {
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
                // The test may need no more lines. They are read nevertheless.
                let _ = sender.send(String::from_utf8_lossy(&line).into_owned());
            }
        });
        Self {
            lines: Mutex::new(lines),
            own_end: None,
        }
    }

    /// Creates a [`named_pipe`] at `path` and reads its lines.
    ///
    /// # Panics
    ///
    /// If the pipe cannot be created.
    pub fn of_named_pipe(path: &Path) -> Self {
        named_pipe(path);
        // Opening both ends does not block, and then the pipe has a writer.
        let both = File::options().read(true).write(true).open(path);
        let pipe = both.and_then(|both| Ok((File::open(path)?, both)));
        let (pipe, own_end) = pipe.unwrap_or_else(|error| panic!("{path:?}: {error}"));
        Self {
            own_end: Some(own_end),
            ..Self::new(pipe)
        }
    }

    /// The next line.
    ///
    /// # Panics
    ///
    /// If the pipe ends, or no line comes within [`WATCHDOG`].
    pub fn line(&self) -> String {
        self.receive()
            .unwrap_or_else(|error| panic!("the next line: {error}"))
    }

    fn receive(&self) -> Result<String, RecvTimeoutError> {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.recv_timeout(WATCHDOG)
    }

    /// The next line that contains `words`.
    ///
    /// # Panics
    ///
    /// Same as [`Self::line`].
    pub fn find(&self, words: &str) -> String {
        loop {
            match self.line() {
                line if line.contains(words) => return line,
                _ => {}
            }
        }
    }

    /// Reads lines until the pipe ends, or until this time has passed. Returns whether it has
    /// ended.
    pub fn end_within(&self, time: Duration) -> bool {
        let start = Instant::now();
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match lines.recv_timeout(time.saturating_sub(start.elapsed())) {
                Ok(_) => {}
                Err(error) => return error == RecvTimeoutError::Disconnected,
            }
        }
    }

    /// Blocks until every process that has opened the pipe has closed it, usually by ending.
    ///
    /// # Panics
    ///
    /// If one still has it open after [`WATCHDOG`].
    pub fn wait_for_end(mut self) {
        self.own_end = None;
        loop {
            match self.receive() {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => panic!("a process still has the pipe open"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;
    use std::sync::mpsc::TryRecvError;

    use super::*;

    #[test]
    fn a_named_pipe_ends_with_the_last_process_that_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        let lines = Lines::of_named_pipe(&path);
        let script = "exec 3> \"$0\" 4<&0; echo first >&3; cat <&4 & echo \"$!\" >&3";
        let mut shell = Command::new("sh")
            .args(["-c", script])
            .arg(&path)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        assert_eq!(lines.line(), "first");
        let child: u32 = lines.line().parse().unwrap();
        assert!(child > 0);
        // The shell has ended, and its child ends with its input.
        let input = shell.stdin.take();
        shell.wait().unwrap();
        assert_eq!(
            lines.lines.lock().unwrap().try_recv(),
            Err(TryRecvError::Empty)
        );
        drop(input);
        lines.wait_for_end();
    }

    #[test]
    #[should_panic = "the next line: "]
    fn the_end_of_a_pipe_is_an_error_of_a_test_that_needs_a_line() {
        Lines::new(&b"a\nb\n"[..]).find("c");
    }
}

//! A program of the user's that scores completions.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{RewardFunction, Sample};

/// How a program that scores completions is run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramConfig {
    /// The program and its arguments. No shell is in between.
    pub command: Vec<String>,
    /// The folder that it runs in; absent: that of this process.
    #[serde(default)]
    pub folder: Option<PathBuf>,
    /// How long it may take for the completions of one batch.
    #[serde(default = "time_limit")]
    pub time_limit_seconds: f64,
    /// How often in a batch it is started again, and given the batch anew, when it ends or exceeds the time.
    #[serde(default = "restarts")]
    pub restarts: usize,
}

fn time_limit() -> f64 {
    60.
}

fn restarts() -> usize {
    1
}

/// A program that reads one line of JSON for each completion and writes one line with its score, in the same order.
///
/// It gets objects with `prompt`, `completion`, `finish_reason`, `completion_tokens` (their number) and `columns`, and answers
/// with a number, or an object with the number at `score`. It should flush each line, and ends when its input does. It is
/// started once and keeps running between batches, until this value is dropped.
///
/// ```no_run
/// use candle_grpo_train::{ProgramConfig, ProgramReward};
///
/// let config: ProgramConfig = serde_json::from_str(r#"{"command": ["python3", "reward.py"]}"#)?;
/// let reward = ProgramReward::new(config)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct ProgramReward {
    config: ProgramConfig,
    running: Mutex<Option<Running>>,
}

impl ProgramReward {
    /// Errs if the options mean nothing. The program starts with the first batch.
    pub fn new(config: ProgramConfig) -> Result<Self> {
        ensure!(
            config.command.first().is_some_and(|name| !name.is_empty()),
            "command: {:?}, must begin with the name of a program",
            config.command
        );
        ensure!(
            config.time_limit_seconds > 0. && config.time_limit_seconds <= 1e9,
            "time_limit_seconds: {}, must be above 0 and at most 1e9",
            config.time_limit_seconds
        );
        Ok(Self {
            config,
            running: Mutex::new(None),
        })
    }

    /// The scores of a batch from one run of the program, which is taken out of `slot` unless it did well.
    fn attempt(&self, slot: &mut Option<Running>, lines: &[String]) -> Result<Vec<f32>> {
        let running = match slot.take() {
            Some(running) => running,
            None => Running::start(&self.config)?,
        };
        let scores = running.exchange(
            lines,
            Duration::from_secs_f64(self.config.time_limit_seconds),
        );
        match scores {
            Ok(scores) => {
                *slot = Some(running);
                Ok(scores)
            }
            Err(error) => Err(running.stop(error)),
        }
    }
}

impl RewardFunction for ProgramReward {
    fn score(&self, samples: &[Sample]) -> Result<Vec<f32>> {
        let lines = samples.iter().map(line).collect::<Result<Vec<_>>>()?;
        // What a panic elsewhere left is a program, or none.
        let mut slot = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let mut restarts = 0;
        loop {
            match self.attempt(&mut slot, &lines) {
                Ok(scores) => return Ok(scores),
                Err(_) if restarts < self.config.restarts => restarts += 1,
                Err(error) => {
                    let tries = restarts + 1;
                    return Err(error).with_context(|| {
                        format!("program {:?}, tried {tries} times", self.config.command)
                    });
                }
            }
        }
    }
}

fn line(sample: &Sample) -> Result<String> {
    let mut line = serde_json::to_string(&json!({
        "prompt": sample.prompt,
        "completion": sample.completion,
        "finish_reason": sample.finish_reason,
        "completion_tokens": sample.completion_tokens.len(),
        "columns": sample.columns,
    }))?;
    line.push('\n');
    Ok(line)
}

/// A program with a thread for each of its pipes, so that none of them can fill up and stop it.
struct Running {
    child: Child,
    input: Sender<Vec<u8>>,
    output: Receiver<std::io::Result<String>>,
    errors: Arc<Mutex<Tail>>,
    error_reader: thread::JoinHandle<()>,
}

impl Running {
    fn start(config: &ProgramConfig) -> Result<Self> {
        let [name, arguments @ ..] = config.command.as_slice() else {
            bail!("command: empty");
        };
        let mut command = Command::new(name);
        command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(folder) = &config.folder {
            command.current_dir(folder);
        }
        // A group of its own: what it started ends with it, and Ctrl-C in the terminal does not reach it.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command
            .spawn()
            .with_context(|| format!("starting {name:?}"))?;
        let missing = || anyhow!("pipe: absent");
        let stdin = child.stdin.take().ok_or_else(missing)?;
        let stdout = child.stdout.take().ok_or_else(missing)?;
        let mut stderr = child.stderr.take().ok_or_else(missing)?;

        let (input, batches) = channel();
        thread::spawn(move || write_batches(stdin, &batches));
        let (lines, output) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines() {
                if lines.send(line).is_err() {
                    return;
                }
            }
        });
        let errors = Arc::new(Mutex::new(Tail::default()));
        let tail = Arc::clone(&errors);
        let error_reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = stderr.read(&mut bytes) {
                tail.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(&bytes[..count]);
            }
        });
        Ok(Self {
            child,
            input,
            output,
            errors,
            error_reader,
        })
    }

    fn exchange(&self, lines: &[String], limit: Duration) -> Result<Vec<f32>> {
        let deadline = Instant::now() + limit;
        if let Ok(Ok(line)) = self.output.try_recv() {
            bail!("wrote {line:?} after the last score it was asked for");
        }
        // An error means that the program has ended, which the other pipe says as well.
        let _ = self.input.send(lines.concat().into_bytes());
        let mut scores = Vec::with_capacity(lines.len());
        while scores.len() < lines.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = match self.output.recv_timeout(left) {
                Ok(line) => line.context("reading its output")?,
                Err(RecvTimeoutError::Timeout) => bail!(
                    "{} of {} scores after {} seconds, the limit",
                    scores.len(),
                    lines.len(),
                    limit.as_secs_f64()
                ),
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("ended after {} of {} scores", scores.len(), lines.len())
                }
            };
            scores.push(score(&line).with_context(|| format!("line {}", scores.len() + 1))?);
        }
        Ok(scores)
    }

    /// Ends the program, and adds to `error` how it ended and what it said last.
    fn stop(mut self, error: anyhow::Error) -> anyhow::Error {
        self.end(Duration::ZERO);
        let status = match self.child.try_wait() {
            Ok(Some(status)) => format!(" ({status})"),
            _ => String::new(),
        };
        // All pipes are closed now; a moment lets the reader take what is left.
        let deadline = Instant::now() + Duration::from_secs(1);
        while !self.error_reader.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(2));
        }
        let said = self
            .errors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .text();
        let said = match said.trim() {
            "" => "it wrote nothing to stderr".to_owned(),
            said => format!("its stderr ends with:\n{said}"),
        };
        anyhow!("{error:#}{status}; {said}")
    }

    /// Closes its input, gives it `patience` to end, and kills it.
    fn end(&mut self, patience: Duration) {
        let (closed, _) = channel();
        self.input = closed;
        let deadline = Instant::now() + patience;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        self.kill();
        // Waiting leaves no zombie behind.
        let _ = self.child.wait();
    }

    #[cfg(unix)]
    fn kill(&mut self) {
        use nix::sys::signal::{Signal, killpg};
        use nix::unistd::Pid;
        if let Ok(group) = i32::try_from(self.child.id()) {
            let _ = killpg(Pid::from_raw(group), Signal::SIGKILL);
        }
        let _ = self.child.kill();
    }

    #[cfg(not(unix))]
    fn kill(&mut self) {
        let _ = self.child.kill();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            self.end(Duration::from_secs(1));
        }
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

fn score(line: &str) -> Result<f32> {
    let value: Value =
        serde_json::from_str(line).with_context(|| format!("{line:?}, must be JSON"))?;
    let number = match &value {
        Value::Object(fields) => fields.get("score").and_then(Value::as_f64),
        other => other.as_f64(),
    };
    let number = number
        .map(|number| number as f32)
        .filter(|number| number.is_finite());
    number.with_context(|| {
        format!("{line:?}, must be a number or an object with the number \"score\"")
    })
}

/// The last few kilobytes of what was written.
#[derive(Default)]
struct Tail(VecDeque<u8>);

impl Tail {
    const KEPT: usize = 4096;

    fn push(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
        let excess = self.0.len().saturating_sub(Self::KEPT);
        self.0.drain(..excess);
    }

    fn text(&mut self) -> String {
        String::from_utf8_lossy(self.0.make_contiguous()).into_owned()
    }
}

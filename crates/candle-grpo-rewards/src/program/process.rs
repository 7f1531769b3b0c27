//! A running program.

use std::fmt;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};

use serde_json::{Map, Value};

use super::{Lines, Program};
use crate::{Interrupted, Progress};
use candle_grpo_base::clock::running_time;

/// Time for a pipe to close.
const QUIET: Duration = Duration::from_millis(20);

/// Time that a batch has after a stop request.
const STOP_GRACE: Duration = Duration::from_secs(3);

/// Interval between checks for a stop request.
const POLL: Duration = Duration::from_millis(50);

/// Time that a program has to exit after its input ends.
const END_GRACE: Duration = Duration::from_secs(5);

/// Maximum output line length, in bytes.
const MAX_LINE: usize = 1 << 20;

/// Lines that wait to be read; more stay in the pipe.
const MAX_LINES: usize = 1 << 10;

/// Why a batch does not have all answers.
pub enum Failure {
    /// The program exceeded its time: a restart may help.
    Timeout(anyhow::Error),
    /// The program ended: a restart may help.
    Ended(anyhow::Error),
    /// Its output is wrong.
    Wrong(anyhow::Error),
    /// It wrote a line that no request asked for, so answers cannot be assigned to requests.
    Surplus(anyhow::Error),
    /// It has never answered, so a restart does not help.
    Unusable(anyhow::Error),
    /// A stop was requested.
    Interrupted,
}

/// An answer, and its request's id if the program echoes it.
#[derive(Debug, PartialEq)]
pub struct Answer<T> {
    /// The request's id.
    pub id: Option<u64>,
    /// The answer.
    pub value: T,
}

impl Answer<()> {
    /// Removes and returns the id among an answer's fields.
    pub fn take_id(fields: &mut Map<String, Value>) -> Result<Option<u64>> {
        match fields.remove("id") {
            None => Ok(None),
            Some(id) => match id.as_u64() {
                Some(id) => Ok(Some(id)),
                None => bail!("id: {id}, must be the number of the request"),
            },
        }
    }
}

impl Failure {
    /// Returns this failure with another error.
    #[must_use]
    pub fn map(self, change: impl FnOnce(anyhow::Error) -> anyhow::Error) -> Self {
        match self {
            Self::Timeout(error) => Self::Timeout(change(error)),
            Self::Ended(error) => Self::Ended(change(error)),
            Self::Wrong(error) => Self::Wrong(change(error)),
            Self::Surplus(error) => Self::Surplus(change(error)),
            Self::Unusable(error) => Self::Unusable(change(error)),
            Self::Interrupted => Self::Interrupted,
        }
    }
}

impl From<Failure> for anyhow::Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Timeout(error) | Failure::Ended(error) | Failure::Wrong(error) => error,
            Failure::Surplus(error) | Failure::Unusable(error) => error.context(Unusable),
            Failure::Interrupted => Interrupted.into(),
        }
    }
}

/// Context for the error of a program that cannot be used in a run, whatever the policy does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unusable;

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the program cannot be used")
    }
}

/// A running program that answers requests.
pub(crate) struct Process {
    lines: Lines,
    /// Id for the next request.
    next_id: u64,
    /// True if its answers have ids; `None` before the first answer.
    echoes_ids: Option<bool>,
    /// Maximum time for an answer.
    limit: Duration,
    /// Additional time for the first answer.
    start_limit: Duration,
}

impl Process {
    pub(super) fn start(program: &Program) -> Result<Self> {
        let (limit, start_limit) = (program.limit, program.start_limit);
        Ok(Self {
            lines: Lines::start(program, MAX_LINE, MAX_LINES)?,
            next_id: 0,
            echoes_ids: None,
            limit,
            start_limit,
        })
    }

    /// Sends `requests`, each with an `id`, and fills in their answers, which must be absent
    /// before. `read` parses an output line. After a failure, answers that came earlier with ids
    /// are valid.
    ///
    /// Answers without ids can only be assigned by order. Therefore, a program without ids gets one
    /// batch: its input ends with the requests, and its output must end with the answers.
    pub(crate) fn ask<T>(
        &mut self,
        requests: Vec<Map<String, Value>>,
        progress: &dyn Progress,
        read: impl Fn(&str) -> Result<Answer<T>>,
        answers: &mut [Option<T>],
    ) -> Result<(), Failure> {
        let count = requests.len();
        let mut limit = match self.echoes_ids {
            None => self.limit.saturating_add(self.start_limit),
            Some(_) => self.limit,
        };
        let mut deadline = running_time().saturating_add(limit);
        let mut stops_at = None;
        self.ensure_silent().map_err(Failure::Surplus)?;
        let first = self.next_id;
        self.send(requests).map_err(Failure::Wrong)?;
        let mut answered = 0;
        loop {
            let is_complete = answered == count;
            if is_complete && self.keeps_running() {
                break;
            }
            let now = running_time();
            if stops_at.is_none() && progress.is_canceled() {
                stops_at = Some(now + STOP_GRACE);
                deadline = deadline.min(now + STOP_GRACE);
            }
            let rest = deadline.saturating_sub(now);
            let ended = match self.lines.receive(POLL.min(rest)) {
                Ok(line) if is_complete => return Err(Failure::Surplus(self.surplus(line))),
                Ok(Ok(line)) => {
                    let number = format!("answer {} of {count}", answered + 1);
                    let answer = read(&line)
                        .context(number.clone())
                        .map_err(Failure::Wrong)?;
                    self.take(&line, answer, (first, answered), answers)
                        .map_err(|failure| failure.map(|error| error.context(number)))?;
                    answered += 1;
                    limit = self.limit;
                    let next = running_time().saturating_add(self.limit);
                    deadline = stops_at.map_or(next, |stop| next.min(stop));
                    if !self.keeps_running() {
                        self.lines.close_input();
                    }
                    continue;
                }
                // The time only counts while no line is waiting, because a line that came in time
                // may be read late.
                Err(RecvTimeoutError::Timeout) if rest.is_zero() => {
                    return Err(match stops_at {
                        Some(_) => Failure::Interrupted,
                        None if is_complete => Failure::Wrong(anyhow!(NOT_ENDED)),
                        None => Failure::Timeout(overdue(answered, count, limit)),
                    });
                }
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) if is_complete => break,
                Ok(Err(error)) => error,
                Err(RecvTimeoutError::Disconnected) => "ended".to_owned(),
            };
            let error = anyhow!(
                "{ended} after {answered} of {count} answers; it must answer every line until its input ends"
            );
            return Err(Failure::Ended(error));
        }
        self.ensure_silent().map_err(Failure::Surplus)
    }

    /// Returns true if each answer so far has named its request.
    pub(crate) fn echoes_ids(&self) -> bool {
        self.echoes_ids == Some(true)
    }

    /// Returns false for a program whose answers have no ids: it ends with its first batch.
    pub(crate) fn keeps_running(&self) -> bool {
        self.echoes_ids != Some(false)
    }

    /// Checks that the program has only written answers so far.
    fn ensure_silent(&self) -> Result<()> {
        match self.lines.receive(Duration::ZERO) {
            Ok(line) => Err(self.surplus(line)),
            Err(_) => Ok(()),
        }
    }

    /// Returns the error for a line that no request asked for.
    fn surplus(&self, line: Result<String, String>) -> anyhow::Error {
        let line = line.map_or_else(|error| error, |line| quoted(&line));
        match self.next_id {
            0 => anyhow!("wrote {line} before the first request: {ELSEWHERE}"),
            _ => anyhow!(
                "wrote {line} after the last answer of a batch, so answers may belong to other \
                 requests: {ELSEWHERE}"
            ),
        }
    }

    fn send(&mut self, requests: Vec<Map<String, Value>>) -> Result<()> {
        let mut lines = String::new();
        for mut request in requests {
            request.insert("id".to_owned(), self.next_id.into());
            lines += &serde_json::to_string(&request)?;
            lines.push('\n');
            self.next_id += 1;
        }
        self.lines.send(lines.into_bytes());
        Ok(())
    }

    /// Records a line's answer, which is number `answered` among the requests from `first`.
    fn take<T>(
        &mut self,
        line: &str,
        answer: Answer<T>,
        (first, answered): (u64, usize),
        answers: &mut [Option<T>],
    ) -> Result<(), Failure> {
        let echoes = *self.echoes_ids.get_or_insert(answer.id.is_some());
        let place = match answer.id {
            _ if answer.id.is_some() != echoes => {
                return Err(Failure::Wrong(anyhow!(
                    "{}: {} an id, unlike the answers before: give one to all answers or to none",
                    quoted(line),
                    if echoes { "has not" } else { "has" }
                )));
            }
            None => Some(answered),
            Some(id) => id.checked_sub(first).map(|place| place as usize),
        };
        let last = first + answers.len().saturating_sub(1) as u64;
        match place.and_then(|place| answers.get_mut(place)) {
            Some(free @ None) => *free = Some(answer.value),
            Some(Some(_)) => {
                let error = anyhow!("{}: answers a request twice", quoted(line));
                return Err(Failure::Surplus(error));
            }
            None => {
                let error = anyhow!(
                    "{}: must have the id of one of the requests, {first} to {last}",
                    quoted(line)
                );
                return Err(match answer.id {
                    Some(id) if id < first => Failure::Surplus(error),
                    _ => Failure::Wrong(error),
                });
            }
        }
        Ok(())
    }

    /// Closes the input and lets the program exit.
    ///
    /// # Errors
    ///
    /// Fails if the program writes a line that no request asked for.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.lines.close_input();
        if self.next_id == 0 {
            return Ok(());
        }
        let deadline = running_time() + END_GRACE;
        loop {
            let ended = self.lines.has_ended();
            match self.lines.receive(QUIET) {
                Ok(line) => return Err(self.surplus(line)),
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) if ended || running_time() > deadline => {
                    return Ok(());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Kills the program, and adds its exit status and the end of its stderr to `error`.
    pub(crate) fn stop(self, error: anyhow::Error) -> anyhow::Error {
        self.lines.stop(error)
    }
}

const ELSEWHERE: &str = "write one line for each request and everything else to stderr, or echo \
    the \"id\" of the request so that each answer finds its place";

const NOT_ENDED: &str = "all answers are there, but the output goes on after the end of the input; \
    a program without ids must end with its input, or echo the \"id\" of each request";

fn overdue(answered: usize, of: usize, limit: Duration) -> anyhow::Error {
    anyhow!(
        "{answered} of {of} answers, and no other within {} seconds, the limit; it must answer each line when \
         it comes, not at the end of its input, and flush every line (in Python print(..., flush=True)); \
         a slow program needs a greater time_limit_seconds",
        limit.as_secs_f64()
    )
}

/// Quotes a line for messages, and cuts it if it is long.
pub fn quoted(line: &str) -> String {
    const SHOWN: usize = 200;
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?} ...", &line[..end]),
        None => format!("{line:?}"),
    }
}

//! A slot for a running program, which restarts it.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, ensure};

use super::ProgramConfig;
use super::answer::{Verdict, parse, request};
use crate::ScoreFailure;
use crate::program::{FIRST_ATTEMPTS, Failure, Process, no_answer};
use crate::{Interrupted, Progress, Sample};

/// A program that is restarted after a failure.
pub(super) struct Worker {
    process: Option<Process>,
    /// Number of completions that have failed since the last score.
    failures: usize,
    /// True once it has scored a completion.
    has_scored: bool,
    last_error: Option<anyhow::Error>,
}

/// Facts that a program's workers share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// True once a process has answered a line, even if its batch failed later.
    has_answered: AtomicBool,
    /// True once the first failure has been logged.
    has_warned: AtomicBool,
}

impl Worker {
    pub(super) fn start(config: &ProgramConfig) -> Result<Self> {
        Ok(Self {
            process: Some(config.program().start()?),
            failures: 0,
            has_scored: false,
            last_error: None,
        })
    }

    /// Scores `samples`.
    ///
    /// If the program ends or exceeds its time, the completion that caused it is uncertain.
    /// Completions without a score are then sent to another process one at a time, last one first.
    /// Most programs answer in order, so the cause comes last, to a process that is running.
    pub(super) fn score(
        &mut self,
        config: &ProgramConfig,
        samples: &[Sample],
        progress: &dyn Progress,
        shared: &Shared,
    ) -> Result<Vec<Verdict>> {
        let mut scores = vec![None; samples.len()];
        let mut attempts = 1;
        let mut failed = self.attempt(config, samples, progress, &mut scores, shared)?;
        for (place, sample) in samples.iter().enumerate().rev() {
            if scores[place].is_some() {
                continue;
            }
            let score = &mut scores[place..=place];
            let failed = match failed.take() {
                // It was sent alone.
                Some(failed) if samples.len() == 1 => Some(failed),
                _ => {
                    attempts += 1;
                    self.attempt(
                        config,
                        std::slice::from_ref(sample),
                        progress,
                        score,
                        shared,
                    )?
                }
            };
            if let Some((_, error)) = &failed
                && attempts >= FIRST_ATTEMPTS
                && !shared.has_answered.load(Ordering::Relaxed)
            {
                return Err(no_answer(attempts, format_args!("{error:#}")));
            }
            if let Some((failure, error)) = failed {
                self.failures += 1;
                ensure!(
                    self.failures <= config.max_failures,
                    "{} completions in a row failed, the last: {error:#}",
                    self.failures
                );
                let instead = config.on_timeout.score(config.timeout_score, failure);
                score[0] = Some(instead.into());
                self.last_error = Some(error);
            }
        }
        Ok(scores.into_iter().flatten().collect())
    }

    /// Sends `samples` to the program, and fills in the scores that it returns.
    fn attempt(
        &mut self,
        config: &ProgramConfig,
        samples: &[Sample],
        progress: &dyn Progress,
        scores: &mut [Option<Verdict>],
        shared: &Shared,
    ) -> Result<Option<(ScoreFailure, anyhow::Error)>> {
        let mut process = match self.process.take() {
            Some(process) => process,
            None => config.program().start()?,
        };
        let requests = samples.iter().map(request).collect();
        let asked = process.ask(requests, progress, parse, scores);
        let has_answered = scores.iter().any(Option::is_some);
        shared
            .has_answered
            .fetch_or(has_answered, Ordering::Relaxed);
        let failed = match asked {
            Ok(()) => {
                self.process = if process.keeps_running() {
                    Some(process)
                } else {
                    drop(process);
                    // It starts while the policy trains. An error appears in the next batch.
                    config.program().start().ok()
                };
                None
            }
            Err(failed) => {
                let (failure, error) = match failed {
                    Failure::Wrong(error) | Failure::Surplus(error) | Failure::Unusable(error) => {
                        return Err(process.stop(error));
                    }
                    Failure::Interrupted => return Err(Interrupted.into()),
                    _ if progress.is_canceled() => return Err(Interrupted.into()),
                    Failure::Timeout(error) => (ScoreFailure::Timeout, error),
                    Failure::Ended(error) => (ScoreFailure::Crash, error),
                };
                if !process.echoes_ids() {
                    scores.fill(None);
                }
                let error = process.stop(error);
                if !shared.has_warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "program {:?}: {error:#}; it is started again, and further failures are \
                         counted in reward_faults",
                        config.command
                    );
                }
                Some((failure, error))
            }
        };
        if scores.iter().any(Option::is_some) {
            self.failures = 0;
            self.has_scored = true;
        }
        Ok(failed)
    }

    pub(super) fn has_scored(&self) -> bool {
        self.has_scored
    }

    /// Removes and returns the last failed completion's error.
    pub(super) fn take_error(&mut self) -> Option<anyhow::Error> {
        self.last_error.take()
    }

    /// Lets the program exit.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.process.take().map_or(Ok(()), Process::finish)
    }
}

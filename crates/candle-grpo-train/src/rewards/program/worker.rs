//! A place for a running program, which restarts it.

use anyhow::{Result, ensure};

use super::ProgramConfig;
use super::answer::{parse, request};
use crate::program::{Failure, Process};
use crate::rewards::{Score, ScoreFailure};
use crate::{Interrupted, Progress, Sample};

/// A program that is started again after a failure.
pub(super) struct Worker {
    process: Option<Process>,
    /// The number of completions that have failed since the last score.
    failures: usize,
    /// True if it has scored a completion.
    has_scored: bool,
    last_error: Option<anyhow::Error>,
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

    /// The scores of `samples`.
    ///
    /// If the program ends or exceeds the time, it is not certain which completion is the cause. So
    /// those without a score are sent to another process one at a time. The last is first: most
    /// programs answer in order, so that the cause comes last, to a process that is running.
    pub(super) fn score(
        &mut self,
        config: &ProgramConfig,
        samples: &[Sample],
        progress: &dyn Progress,
    ) -> Result<Vec<Score>> {
        let mut scores = vec![None; samples.len()];
        let mut failed = self.attempt(config, samples, progress, &mut scores)?;
        for (place, sample) in samples.iter().enumerate().rev() {
            if scores[place].is_some() {
                continue;
            }
            let score = &mut scores[place..=place];
            let failed = match failed.take() {
                // It was alone.
                Some(failed) if samples.len() == 1 => Some(failed),
                _ => self.attempt(config, std::slice::from_ref(sample), progress, score)?,
            };
            if let Some((failure, error)) = failed {
                self.failures += 1;
                ensure!(
                    self.failures <= config.max_failures,
                    "{} completions in a row failed, the last: {error:#}",
                    self.failures
                );
                score[0] = Some(config.on_timeout.score(config.timeout_score, failure));
                self.last_error = Some(error);
            }
        }
        Ok(scores.into_iter().flatten().collect())
    }

    /// Sends `samples` to the program, and sets the scores that it gives.
    fn attempt(
        &mut self,
        config: &ProgramConfig,
        samples: &[Sample],
        progress: &dyn Progress,
        scores: &mut [Option<Score>],
    ) -> Result<Option<(ScoreFailure, anyhow::Error)>> {
        let mut process = match self.process.take() {
            Some(process) => process,
            None => config.program().start()?,
        };
        let requests = samples.iter().map(request).collect();
        let failed = match process.ask(requests, progress, parse, scores) {
            Ok(()) => {
                self.process = match process.keeps_running() {
                    true => Some(process),
                    false => {
                        drop(process);
                        // It starts while the policy trains. An error appears in the next batch.
                        config.program().start().ok()
                    }
                };
                None
            }
            Err(failed) => {
                let (failure, error) = match failed {
                    Failure::Wrong(error) => return Err(process.stop(error)),
                    Failure::Interrupted => return Err(Interrupted.into()),
                    _ if progress.is_canceled() => return Err(Interrupted.into()),
                    Failure::Timeout(error) => (ScoreFailure::Timeout, error),
                    Failure::Ended(error) => (ScoreFailure::Crash, error),
                };
                if !process.echoes_ids() {
                    scores.fill(None);
                }
                Some((failure, process.stop(error)))
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

    /// The error of the last completion that failed.
    pub(super) fn take_error(&mut self) -> Option<anyhow::Error> {
        self.last_error.take()
    }

    /// Lets the program end.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.process.take().map_or(Ok(()), Process::finish)
    }
}

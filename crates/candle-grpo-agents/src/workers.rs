//! Processes that play several episodes each.

use anyhow::{Result, bail};
use candle_grpo_base::server::Key;
use candle_grpo_rewards::program::Program;

use crate::endpoint::Entrances;
use crate::process::Process;

/// Number of ends in a row, without an episode, after which a restart has no use.
const MAX_ENDS: usize = 2;

/// Processes that request episodes. They end when dropped.
pub(crate) struct Workers {
    program: Program,
    entrances: Entrances,
    workers: Vec<Worker>,
    /// Number of ends in a row of workers without an episode.
    ends: usize,
}

struct Worker {
    key: Key,
    process: Process,
    has_episode: bool,
}

impl Workers {
    /// Starts one process for each key.
    pub(crate) fn start(program: Program, entrances: Entrances, keys: &[Key]) -> Result<Self> {
        let worker = |key: &Key| {
            Ok(Worker {
                process: start(&program, &entrances, key)?,
                key: key.clone(),
                has_episode: false,
            })
        };
        Ok(Self {
            workers: keys.iter().map(worker).collect::<Result<_>>()?,
            program,
            entrances,
            ends: 0,
        })
    }

    /// Restarts the processes that have ended. Calls `lost` with their numbers and messages.
    /// `has_episode` returns whether a worker has an episode.
    ///
    /// # Errors
    ///
    /// Fails if workers end again and again without an episode.
    pub(crate) fn restart(
        &mut self,
        has_episode: impl Fn(usize) -> bool,
        lost: impl Fn(usize, &str),
    ) -> Result<()> {
        for (number, worker) in self.workers.iter_mut().enumerate() {
            let had_episode = worker.has_episode;
            worker.has_episode |= has_episode(number);
            if worker.has_episode && !had_episode {
                self.ends = 0;
            }
            let Some(status) = worker.process.status()? else {
                continue;
            };
            let ended = std::mem::replace(
                &mut worker.process,
                start(&self.program, &self.entrances, &worker.key)?,
            );
            let message = match ended.end() {
                output if output.is_empty() => {
                    format!("the agents' process ended ({status}); it wrote nothing to stderr")
                }
                output => {
                    format!("the agents' process ended ({status}); its stderr ends with:\n{output}")
                }
            };
            tracing::warn!("worker {number}: {message}");
            if !std::mem::take(&mut worker.has_episode) {
                self.ends += 1;
            }
            if self.ends >= MAX_ENDS {
                bail!("agent: {message}\nit requested no episode");
            }
            lost(number, &message);
        }
        Ok(())
    }
}

fn start(program: &Program, entrances: &Entrances, key: &Key) -> Result<Process> {
    let variables = [
        (
            "GRPO_EPISODES_URL",
            format!("{}/episodes", entrances.origin()),
        ),
        ("GRPO_API_KEY", key.text().to_owned()),
    ];
    Process::start(program.clone(), entrances, Vec::new(), &variables)
}

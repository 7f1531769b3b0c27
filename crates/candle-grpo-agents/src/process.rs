//! Processes of agents.

use std::process::ExitStatus;

use anyhow::{Context, Result};
use candle_grpo_base::server::Entrance;
use candle_grpo_rewards::program::{Job, Program};

use crate::endpoint::Entrances;

/// An agent's process. Dropping it kills the process.
pub(crate) struct Process {
    job: Job,
    /// The server's second listener, if the process has its own network.
    _entrance: Option<Entrance>,
}

impl Process {
    /// Starts a program that can call the server.
    pub(crate) fn start(
        program: Program,
        entrances: &Entrances,
        input: Vec<u8>,
        variables: &[(&str, String)],
    ) -> Result<Self> {
        let program = Program {
            server: Some(entrances.address()),
            ..program
        };
        let mut job = program.start_job(input, variables).context("agent")?;
        let server = job.take_server();
        let entrance = server.map(|listener| entrances.open(listener));
        Ok(Self {
            _entrance: entrance.transpose()?,
            job,
        })
    }

    /// Returns the exit status, if the process has ended.
    pub(crate) fn status(&mut self) -> Result<Option<ExitStatus>> {
        self.job.status()
    }

    /// Kills whatever is left of the process. Returns the end of its stderr.
    pub(crate) fn end(self) -> String {
        self.job.end()
    }
}

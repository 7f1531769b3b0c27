//! The trajectories that share a process or a connection.

use candle_grpo_core::validate::{Checked, at_least_one, check};
use serde::{Deserialize, Serialize};

/// The trajectories that share an agent's process, or a session with an MCP server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SessionScope {
    /// None: each trajectory has its own.
    #[default]
    Episode,
    /// All.
    Shared,
}

impl SessionScope {
    /// Checks the number of workers, which only shared ones have.
    pub(super) fn check_workers(self, workers: usize) -> Checked {
        at_least_one("workers", workers)?;
        let fits = self == Self::Shared || workers == 1;
        check(fits, "workers", workers, "be 1 without session: shared")
    }
}

//! Options for isolated programs.

use std::path::PathBuf;

#[cfg(feature = "code")]
use candle_grpo_core::validate::Checked;
use serde::{Deserialize, Serialize};

#[cfg(feature = "code")]
use crate::isolation::{CodeLimits, check_visible};
use crate::network::Network;

/// Isolation for a program and everything that it starts, on Linux.
///
/// The program gets a root directory of its own. In it, the program can read the system
/// directories, its own installation and [`Self::visible`]. It can also read its working directory
/// if an option sets it, and otherwise only the files that its command names. It can write to
/// `/work`, which is its home, `/tmp` and `/dev/shm`.
///
/// Each process can open at most 256 files.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct IsolationConfig {
    /// `none`: no network. `loopback`: only its own processes, and for agents the server of this
    /// process. `host`: this machine's network.
    pub network: Network,
    /// Additional files and directories that the program can read. None may contain `/work`,
    /// `/tmp`, `/dev/shm` or `/proc`, which the program has for itself.
    pub visible: Vec<PathBuf>,
    /// Maximum virtual memory for each process, in MiB. Some runtimes reserve much more than they
    /// use: `fetch` in Node.js 20 needs 16384. If the run can create a cgroup, all processes
    /// together also have this limit, in addition to `disk_mib`.
    pub memory_mib: u64,
    /// Maximum number of processes and threads at the same time.
    pub processes: u64,
    /// Maximum CPU time for each process, in seconds. Absent: no limit.
    pub cpu_seconds: Option<u64>,
    /// Maximum size for a file, and for all files together, in MiB.
    pub disk_mib: u64,
    /// If true, a machine that cannot isolate programs is an error. Otherwise, it is a warning.
    pub require_isolation: bool,
}

impl Default for IsolationConfig {
    fn default() -> Self {
        Self {
            network: Network::None,
            visible: Vec::new(),
            memory_mib: 4096,
            processes: 64,
            cpu_seconds: None,
            disk_mib: 64,
            require_isolation: false,
        }
    }
}

#[cfg(feature = "code")]
impl IsolationConfig {
    pub(super) fn validate(&self) -> Checked {
        let mut visible = self.visible.iter();
        visible.try_for_each(|path| check_visible("visible", path))?;
        self.limits().validate()
    }

    /// Returns the limits, without those that [`Program`](super::Program) has.
    pub(crate) fn limits(&self) -> CodeLimits {
        CodeLimits {
            cpu_seconds: self.cpu_seconds.unwrap_or(CodeLimits::LARGEST),
            memory_mib: self.memory_mib,
            processes: self.processes,
            disk_mib: self.disk_mib,
            ..CodeLimits::default()
        }
    }
}

#[cfg(all(test, feature = "code"))]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_program_is_not_limited_by_default() {
        let limits = IsolationConfig::default().limits();
        limits.validate().unwrap();
        assert_eq!(limits.cpu_seconds, CodeLimits::LARGEST);
    }
}

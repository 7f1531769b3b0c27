//! Execution limits.

use candle_grpo_core::validate::{Checked, check};
use serde::{Deserialize, Serialize};

/// Limits for one program execution.
///
/// The defaults suit short functions. Raise `time_seconds` and `cpu_seconds` for programs that
/// compute for long.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct CodeLimits {
    /// Maximum time in seconds, from the program's start.
    pub time_seconds: f64,
    /// Maximum CPU time for each process, in seconds.
    pub cpu_seconds: u64,
    /// Maximum virtual memory for each process, in MiB. If the run can create a cgroup, all
    /// processes together also have this limit, in addition to `disk_mib`.
    pub memory_mib: u64,
    /// Maximum number of processes and threads at the same time.
    pub processes: u64,
    /// Maximum number of bytes that the program may write to stdout and stderr.
    pub output_bytes: usize,
    /// Maximum size for a file, and for all files together, in MiB.
    pub disk_mib: u64,
}

impl Default for CodeLimits {
    fn default() -> Self {
        Self {
            time_seconds: 10.,
            cpu_seconds: 10,
            memory_mib: 1024,
            processes: 32,
            output_bytes: 1 << 20,
            disk_mib: 64,
        }
    }
}

impl CodeLimits {
    /// Maximum value for limits that are whole numbers.
    pub(crate) const LARGEST: u64 = 1 << 30;

    pub(crate) fn validate(&self) -> Checked {
        check(
            self.time_seconds > 0. && self.time_seconds <= 1e6,
            "time_seconds",
            self.time_seconds,
            "be above 0 and at most 1e6",
        )?;
        let whole = [
            ("cpu_seconds", self.cpu_seconds),
            ("memory_mib", self.memory_mib),
            ("processes", self.processes),
            ("output_bytes", self.output_bytes as u64),
            ("disk_mib", self.disk_mib),
        ];
        whole.into_iter().try_for_each(|(name, value)| {
            let valid = (1..=Self::LARGEST).contains(&value);
            check(valid, name, value, "be from 1 to 2^30")
        })
    }
}

//! The limits of an execution.

use candle_grpo_core::validate::{Checked, check};
use serde::{Deserialize, Serialize};

/// The limits of one execution of a program.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CodeLimits {
    /// The longest time, from the start of the program.
    pub time_seconds: f64,
    /// The longest CPU time of each process, in seconds.
    pub cpu_seconds: u64,
    /// The largest virtual memory of each process, in MiB. Where the run can make a cgroup, all
    /// processes together have this memory, in addition to `disk_mib`.
    pub memory_mib: u64,
    /// The largest number of processes and threads at a time.
    pub processes: u64,
    /// The largest number of bytes that the program may write to stdout and stderr.
    pub output_bytes: usize,
    /// The largest size of a file, and of all files together, in MiB.
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
    pub(super) fn validate(&self) -> Checked {
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
            let valid = (1..=1 << 30).contains(&value);
            check(valid, name, value, "be from 1 to 2^30")
        })
    }
}

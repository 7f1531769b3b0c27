//! Trials of what a machine supports.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use candle_grpo_base::progress::NoProgress;

use super::cgroup::Cgroups;
use super::command_line::words;
use super::domain;
use super::execution::End;
use super::limits::CodeLimits;
use super::paths::visible_paths;
use super::sandbox::{Isolation, Job, Sandbox};
use super::system_calls::Filter;
use super::thread::on_thread;
use crate::network::Network;

/// A sandbox, and a sentence about the protection that it lacks.
pub(crate) struct Probed {
    pub(crate) sandbox: Sandbox,
    pub(crate) lacks: Option<String>,
}

/// Abilities of programs if the number of namespaces is not limited.
const MAKES_NAMESPACES: &str = "they can make user namespaces, in which they have all rights: the \
     limit of the disk and the missing network do not hold there";

/// Abilities of programs without a count of processes of their own.
const UNLIMITED_PROCESSES: &str = "the number of their processes is not limited";

/// Abilities of programs whose loopback interface must be their own, and is not.
const USES_NETWORK: &str = "they can use the network of this machine: only root gives them a \
     loopback interface of their own";

impl Sandbox {
    /// Creates the best sandbox that this machine supports, by trying. Isolated programs can read
    /// the system directories and `visible`, and have this network.
    ///
    /// # Errors
    ///
    /// Fails if not even a program without isolation can be started.
    pub(crate) fn probe(
        limits: CodeLimits,
        visible: &[PathBuf],
        network: Network,
    ) -> Result<Probed> {
        let filter = Filter::new();
        let unfiltered = filter.as_ref().err().map(|error| {
            format!(
                "all calls of the kernel are open to them, such as io_uring, keyrings and sockets \
                 of all kinds ({error:#})"
            )
        });
        let mut sandbox = Self {
            isolation: Isolation::Missing,
            filter: filter.ok().map(Arc::new),
            has_domain: false,
            limits,
            visible: visible_paths(visible),
            network,
            cgroups: None,
        };
        let mut reason = None;
        let mut limited = None;
        for isolation in [Isolation::Root, Isolation::User] {
            sandbox.isolation = isolation;
            sandbox.cgroups = Cgroups::find().filter(|cgroups| sandbox.works_in(cgroups));
            match sandbox.try_start() {
                Ok(()) if sandbox.limits_processes()? => {
                    let lacks = sandbox.makes_namespaces()?.then_some(MAKES_NAMESPACES);
                    return Ok(sandbox.probed(lacks.map(str::to_owned), unfiltered));
                }
                Ok(()) => {
                    limited.get_or_insert_with(|| sandbox.clone());
                }
                Err(error) => {
                    reason.get_or_insert(error);
                }
            }
        }
        if let Some(sandbox) = limited {
            let lacks = UNLIMITED_PROCESSES.to_owned();
            return Ok(sandbox.probed(Some(lacks), unfiltered));
        }
        sandbox.isolation = Isolation::Missing;
        sandbox.cgroups = None;
        let undivided = on_thread(|| domain::enter().map_err(io::Error::other)).err();
        sandbox.has_domain = undivided.is_none();
        sandbox.try_start()?;
        let reason = reason
            .map(|error| format!(" ({error:#})"))
            .unwrap_or_default();
        let memory = if cfg!(target_os = "linux") {
            ""
        } else {
            ", their memory is not limited"
        };
        let secrets = undivided
            .map(|error| {
                format!(", they can read the environment and the memory of this process ({error})")
            })
            .unwrap_or_default();
        let lacks = format!(
            "they can read and write files of this user, use the network and end other programs of \
             this user, {UNLIMITED_PROCESSES}, and those in another session go on{memory}{secrets}; \
             namespaces do not work here{reason}"
        );
        Ok(sandbox.probed(Some(lacks), unfiltered))
    }

    /// Returns this sandbox with what it lacks: `lacks`, its network, and the filter of calls.
    fn probed(self, lacks: Option<String>, unfiltered: Option<String>) -> Probed {
        let is_shared = self.network == Network::Loopback && self.isolation == Isolation::User;
        let network = is_shared.then(|| USES_NETWORK.to_owned());
        let lacks = [lacks, network, unfiltered].into_iter().flatten();
        let lacks: Vec<String> = lacks.collect();
        Probed {
            sandbox: self,
            lacks: (!lacks.is_empty()).then(|| lacks.join("; ")),
        }
    }

    fn works_in(&self, cgroups: &Cgroups) -> bool {
        let with = Self {
            cgroups: Some(cgroups.clone()),
            ..self.clone()
        };
        with.try_start().is_ok()
    }

    /// Starts a program that starts another one.
    fn try_start(&self) -> Result<()> {
        if self.forks()? {
            Ok(())
        } else {
            Err(anyhow!("a program that starts another one failed"))
        }
    }

    /// Returns true if a program that is limited to one process cannot start another one.
    fn limits_processes(&self) -> Result<bool> {
        let limits = CodeLimits {
            processes: 1,
            ..self.limits
        };
        let alone = Self {
            limits,
            ..self.clone()
        };
        Ok(!alone.forks()?)
    }

    /// Returns true if a program can create a user namespace, which must not be possible.
    fn makes_namespaces(&self) -> Result<bool> {
        self.succeeds(&["unshare", "--user", "true"])
    }

    fn forks(&self) -> Result<bool> {
        let command = ["timeout", "20", "true"];
        self.succeeds(match self.isolation {
            // Not every system has this program.
            Isolation::Missing => &command[2..],
            _ => &command,
        })
    }

    /// Returns true if a command ends without an error.
    fn succeeds(&self, command: &[&str]) -> Result<bool> {
        let command = words(command.iter().copied());
        let job = Job {
            command: &command,
            file: None,
            input: Vec::new(),
            helpers: 0,
            announced: true,
        };
        let limits = CodeLimits {
            time_seconds: 30.,
            cpu_seconds: 30,
            memory_mib: self.limits.memory_mib.max(256),
            ..self.limits
        };
        let trial = Self {
            limits,
            ..self.clone()
        };
        Ok(matches!(
            trial.run(&job, &NoProgress)?.end,
            End::Exited(true)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_network_is_named_beside_other_gaps() {
        let sandbox = |isolation, network| Sandbox {
            isolation,
            filter: None,
            has_domain: false,
            limits: CodeLimits::default(),
            visible: Vec::new(),
            network,
            cgroups: None,
        };
        let lacks = |isolation, network, lacks: Option<&str>, unfiltered: Option<&str>| {
            let [lacks, unfiltered] = [lacks, unfiltered].map(|text| text.map(str::to_owned));
            sandbox(isolation, network).probed(lacks, unfiltered).lacks
        };
        let (user, loopback) = (Isolation::User, Network::Loopback);
        let all = lacks(user, loopback, Some(UNLIMITED_PROCESSES), Some("filter"));
        let expected = format!("{UNLIMITED_PROCESSES}; {USES_NETWORK}; filter");
        assert_eq!(all, Some(expected));
        let network = Some(USES_NETWORK.to_owned());
        assert_eq!(lacks(user, loopback, None, None), network);
        assert_eq!(lacks(Isolation::Root, loopback, None, None), None);
        assert_eq!(lacks(user, Network::Host, None, None), None);
    }
}

//! The environment in which programs run.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;

use anyhow::{Context, Result};

use super::cgroup::Cgroups;
use super::command_line::{text, words};
use super::limits::CodeLimits;
use super::place::Place;
use super::system_calls::Filter;
use super::thread::on_thread;
use super::{domain, loopback};
use crate::network::Network;

const ISOLATE: &str = include_str!("isolate.sh");
const LIMITS: &str = include_str!("limits.sh");

/// A program to execute.
pub(crate) struct Job<'a> {
    /// The program and its arguments.
    pub(crate) command: &'a [String],
    /// Name and text for a file in its directory.
    pub(crate) file: Option<(&'a str, &'a str)>,
    /// Standard input.
    pub(crate) input: Vec<u8>,
    /// Number of its processes that do not count toward the limit.
    pub(crate) helpers: u64,
    /// If true, the line `ready` comes before its stderr.
    pub(crate) announced: bool,
}

/// The kind of namespaces that programs run in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isolation {
    /// Namespaces that root creates. The program runs as user 65534 in a user namespace.
    Root,
    /// Namespaces in a user namespace, which any user may create on most systems.
    User,
    /// None: only per-process limits apply, and the process group is killed at the end.
    Missing,
}

/// The environment in which programs run.
#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    pub(super) isolation: Isolation,
    /// Filter for kernel calls; `None` if there is none.
    pub(super) filter: Option<Arc<Filter>>,
    /// True if programs without namespaces run in their own domain.
    pub(super) has_domain: bool,
    pub(super) limits: CodeLimits,
    pub(super) visible: Vec<PathBuf>,
    pub(super) network: Network,
    pub(super) cgroups: Option<Cgroups>,
}

impl Sandbox {
    /// Returns whether a program has a loopback interface of its own.
    fn has_own_loopback(&self) -> bool {
        self.network == Network::Loopback && self.isolation == Isolation::Root
    }

    /// Creates the directories and the cgroup for an execution.
    pub(crate) fn place(&self) -> Result<Place> {
        let bytes = (self.limits.memory_mib + self.limits.disk_mib) << 20;
        let cgroup = self.cgroups.as_ref().map(|cgroups| cgroups.make(bytes));
        Place::new(cgroup.transpose()?)
    }

    /// Starts a command from [`Self::command`].
    pub(super) fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        self.spawn_with_server(command, None)
            .map(|(child, _)| child)
    }

    /// Starts a command as [`Self::spawn`] does. If the program has a loopback interface of its
    /// own, returns a listener there at `server`.
    ///
    /// A network, a filter and a domain belong to a thread and to what it starts. Therefore, a
    /// thread that does nothing else starts the program. This process needs no `fork`, which would
    /// copy its page tables.
    pub(crate) fn spawn_with_server(
        &self,
        command: &mut Command,
        server: Option<SocketAddr>,
    ) -> io::Result<(Child, Option<TcpListener>)> {
        on_thread(|| {
            let listener = if self.has_own_loopback() {
                loopback::enter(server)?
            } else {
                None
            };
            if self.has_domain {
                domain::enter().map_err(io::Error::other)?;
            }
            if let Some(filter) = &self.filter {
                filter.apply()?;
            }
            Ok((command.spawn()?, listener))
        })
    }

    /// Returns true if nothing that a program has started can outlive it.
    pub(crate) fn is_isolated(&self) -> bool {
        self.isolation != Isolation::Missing
    }

    /// Returns the command that starts a job in `place`.
    pub(crate) fn command(&self, job: &Job<'_>, place: &Place) -> Result<Command> {
        let line = self.command_line(job, place);
        let (name, arguments) = line.split_first().context("command: empty")?;
        let mut command = Command::new(name);
        command.args(arguments).current_dir(place.files());
        Ok(command)
    }

    fn command_line(&self, job: &Job<'_>, place: &Place) -> Vec<String> {
        let limits = &self.limits;
        let mut line: Vec<String> = Vec::new();
        let mut add = |all: &[&str]| line.extend(words(all.iter().copied()));
        let namespaces = [
            "--mount",
            "--ipc",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
        ];
        match self.isolation {
            Isolation::Root => {
                add(&["unshare"]);
                add(&namespaces);
            }
            Isolation::User => {
                add(&["unshare", "--user", "--map-root-user"]);
                add(&namespaces);
            }
            Isolation::Missing => {}
        }
        if self.is_isolated() {
            if self.network == Network::None {
                add(&["--net"]);
            }
            let kind = match self.isolation {
                Isolation::Root => "root",
                _ => "user",
            };
            let (root, files) = (text(place.root()), text(place.files()));
            let cgroup = place.cgroup().map(text).unwrap_or_default();
            let size = (limits.disk_mib << 20).to_string();
            let processes = (limits.processes + job.helpers).to_string();
            add(&["sh", "-c", ISOLATE, "isolate", &root, &files]);
            add(&[&size, &cgroup, kind, &processes]);
            self.visible.iter().for_each(|path| add(&[&text(path)]));
            add(&["--"]);
        }
        let blocks = (limits.disk_mib << 11).to_string();
        let memory = if cfg!(target_os = "linux") {
            (limits.memory_mib << 10).to_string()
        } else {
            "unlimited".to_owned()
        };
        add(&[
            "sh",
            "-c",
            LIMITS,
            "limits",
            &limits.cpu_seconds.to_string(),
        ]);
        add(&[&blocks, &memory, &job.announced.to_string()]);
        line.extend_from_slice(job.command);
        line
    }
}

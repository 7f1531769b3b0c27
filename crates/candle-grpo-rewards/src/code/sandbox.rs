//! Program isolation, as far as the machine supports it.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, anyhow};

use super::CodeLimits;
use super::cgroup::Cgroups;
use super::execution::{End, Job};
use super::place::Place;
use super::system_calls::Filter;
use super::{domain, loopback};
use crate::program::Network;
use candle_grpo_base::progress::NoProgress;

const ISOLATE: &str = include_str!("isolate.sh");
const LIMITS: &str = include_str!("limits.sh");

/// System directories that isolated programs can read.
const SYSTEM: [&str; 11] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/nix/store",
];

/// The kind of namespaces that programs run in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isolation {
    /// Namespaces that root creates. The program runs as user 65534 in a user namespace.
    Root,
    /// Namespaces in a user namespace, which any user may create on most systems.
    User,
    /// None: only per-process limits apply, and the process group is killed at the end.
    Missing,
}

/// The environment in which programs run.
#[derive(Debug, Clone)]
pub(super) struct Sandbox {
    isolation: Isolation,
    /// Filter for kernel calls; `None` if there is none.
    filter: Option<Arc<Filter>>,
    /// True if programs without namespaces run in their own domain.
    has_domain: bool,
    pub(super) limits: CodeLimits,
    visible: Vec<PathBuf>,
    network: Network,
    cgroups: Option<Cgroups>,
}

/// A sandbox, and a sentence about the protection that it lacks.
pub(super) struct Probed {
    pub(super) sandbox: Sandbox,
    pub(super) lacks: Option<String>,
}

/// Abilities of programs if the number of namespaces is not limited.
const MAKES_NAMESPACES: &str = "they can make user namespaces, in which they have all rights: the \
     limit of the disk and the missing network do not hold there";

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
    pub(super) fn probe(
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
        let probed = |sandbox, lacks: Option<String>| {
            let lacks = lacks.into_iter().filter(|text| !text.is_empty());
            let lacks: Vec<String> = lacks.chain(unfiltered).collect();
            let lacks = Some(lacks.join("; ")).filter(|lacks| !lacks.is_empty());
            Ok(Probed { sandbox, lacks })
        };
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
                    let lacks = [
                        (sandbox.makes_namespaces()?, MAKES_NAMESPACES),
                        (sandbox.shares_network(), USES_NETWORK),
                    ];
                    let lacks: Vec<&str> = lacks
                        .into_iter()
                        .filter_map(|(is_so, text)| is_so.then_some(text))
                        .collect();
                    return probed(sandbox, Some(lacks.join("; ")));
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
            let lacks = "the number of their processes is not limited".to_owned();
            return probed(sandbox, Some(lacks));
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
             this user, the number of their processes is not limited, and those in another session \
             go on{memory}{secrets}; namespaces do not work here{reason}"
        );
        probed(sandbox, Some(lacks))
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
        let command: Vec<String> = command.iter().map(|word| (*word).to_owned()).collect();
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

    /// Returns whether a program that must only use its own loopback interface has this machine's.
    fn shares_network(&self) -> bool {
        self.network == Network::Loopback && self.isolation != Isolation::Root
    }

    /// Creates the directories and the cgroup for an execution.
    pub(super) fn place(&self) -> Result<Place> {
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
    pub(super) fn spawn_with_server(
        &self,
        command: &mut Command,
        server: Option<SocketAddr>,
    ) -> io::Result<(Child, Option<TcpListener>)> {
        let has_own = self.network == Network::Loopback && !self.shares_network();
        on_thread(|| {
            let listener = if has_own {
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
    pub(super) fn is_isolated(&self) -> bool {
        self.isolation != Isolation::Missing
    }

    /// Returns the command that starts a job in `place`.
    pub(super) fn command(&self, job: &Job<'_>, place: &Place) -> Result<Command> {
        let line = self.command_line(job, place);
        let (name, arguments) = line.split_first().context("command: empty")?;
        let mut command = Command::new(name);
        command.args(arguments).current_dir(place.files());
        Ok(command)
    }

    fn command_line(&self, job: &Job<'_>, place: &Place) -> Vec<String> {
        let limits = &self.limits;
        let mut line: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| line.extend(words.iter().map(|word| (*word).to_owned()));
        let text = |path: &Path| path.to_string_lossy().into_owned();
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

/// Runs a function on its own thread.
pub(super) fn on_thread<T: Send>(run: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let ended = thread::Builder::new().spawn_scoped(scope, run)?.join();
        ended.map_err(|_| io::Error::other("the thread that starts a program panicked"))?
    })
}

/// Returns the system directories, and `more` with links resolved and without paths that another
/// one contains.
fn visible_paths(more: &[PathBuf]) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = SYSTEM.iter().map(PathBuf::from).collect();
    let mut more: Vec<PathBuf> = more.iter().filter_map(|path| real_path(path)).collect();
    more.sort();
    for path in more {
        // A directory around a visible one would cover it.
        let is_new = !paths.iter().any(|shown| path.starts_with(shown));
        let covers = SYSTEM
            .iter()
            .any(|shown| Path::new(shown).starts_with(&path));
        if is_new && !covers {
            paths.push(path);
        }
    }
    paths
}

/// Resolves links in the path, except in the last part, which may be a link that programs inspect.
pub(super) fn real_path(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let parent = path.parent()?.canonicalize().ok()?;
    Some(parent.join(path.file_name()?)).filter(|path| path.exists())
}

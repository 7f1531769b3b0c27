//! Program isolation, as far as the machine supports it.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread;

use anyhow::{Result, anyhow};

use super::CodeLimits;
use super::cgroup::Cgroups;
use super::domain;
use super::execution::{End, Job};
use super::system_calls::Filter;
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
    pub(super) cgroups: Option<Cgroups>,
}

/// A sandbox, and a sentence about the protection that it lacks.
pub(super) struct Probed {
    pub(super) sandbox: Sandbox,
    pub(super) lacks: Option<String>,
}

/// Abilities of programs if the number of namespaces is not limited.
const MAKES_NAMESPACES: &str = "they can make user namespaces, in which they have all rights: the \
     limit of the disk and the missing network do not hold there";

impl Sandbox {
    /// Creates the best sandbox that this machine supports, by trying. Isolated programs can read
    /// the system directories and `visible`.
    ///
    /// # Errors
    ///
    /// Fails if not even a program without isolation can be started.
    pub(super) fn probe(limits: CodeLimits, visible: &[PathBuf]) -> Result<Probed> {
        let filter = Filter::new();
        let unfiltered = filter.as_ref().err().map(|error| {
            format!(
                "all calls of the kernel are open to them, such as io_uring, keyrings and sockets \
                 of all kinds ({error:#})"
            )
        });
        let probed = |sandbox, lacks: Option<String>| {
            let lacks: Vec<String> = lacks.into_iter().chain(unfiltered).collect();
            let lacks = Some(lacks.join("; ")).filter(|lacks| !lacks.is_empty());
            Ok(Probed { sandbox, lacks })
        };
        let mut sandbox = Self {
            isolation: Isolation::Missing,
            filter: filter.ok().map(Arc::new),
            has_domain: false,
            limits,
            visible: visible_paths(visible),
            cgroups: None,
        };
        let mut reason = None;
        let mut limited = None;
        for isolation in [Isolation::Root, Isolation::User] {
            sandbox.isolation = isolation;
            sandbox.cgroups = Cgroups::find().filter(|cgroups| sandbox.works_in(cgroups));
            match sandbox.try_start() {
                Ok(()) if sandbox.limits_processes()? => {
                    let lacks = sandbox
                        .makes_namespaces()?
                        .then(|| MAKES_NAMESPACES.to_owned());
                    return probed(sandbox, lacks);
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

    /// Starts a line from [`Self::command_line`].
    ///
    /// A filter and a domain belong to a thread and to what it starts. Therefore, a thread that
    /// does nothing else starts the program. This process needs no `fork`, which would copy its
    /// page tables.
    pub(super) fn spawn(&self, command: &mut Command) -> io::Result<Child> {
        on_thread(|| {
            if self.has_domain {
                domain::enter().map_err(io::Error::other)?;
            }
            if let Some(filter) = &self.filter {
                filter.apply()?;
            }
            command.spawn()
        })
    }

    /// Returns true if nothing that a program has started can outlive it.
    pub(super) fn is_isolated(&self) -> bool {
        self.isolation != Isolation::Missing
    }

    /// Returns the name and arguments that start a job with the files in `files`. `root` is an
    /// empty directory.
    pub(super) fn command_line(
        &self,
        job: &Job<'_>,
        files: &Path,
        root: &Path,
        cgroup: Option<&Path>,
    ) -> Vec<String> {
        let limits = &self.limits;
        let mut line: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| line.extend(words.iter().map(|word| (*word).to_owned()));
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let namespaces = [
            "--mount",
            "--net",
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
            let kind = match self.isolation {
                Isolation::Root => "root",
                _ => "user",
            };
            let cgroup = cgroup.map(text).unwrap_or_default();
            let size = (limits.disk_mib << 20).to_string();
            let processes = (limits.processes + job.helpers).to_string();
            add(&["sh", "-c", ISOLATE, "isolate", &text(root), &text(files)]);
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
        add(&[&blocks, &memory]);
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

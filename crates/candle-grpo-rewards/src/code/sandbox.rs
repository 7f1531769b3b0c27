//! Program isolation, as far as the machine supports it.

use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, anyhow};
use candle_grpo_core::validate::{Checked, check};

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

/// Directories that each isolated program has for itself. A visible directory would cover them.
const OWN: [&str; 4] = ["/dev/shm", "/proc", "/tmp", "/work"];

/// Maximum number of links on the way to a file, which is that of Linux.
const MAX_LINKS: usize = 40;

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

    /// Returns whether a program has a loopback interface of its own.
    fn has_own_loopback(&self) -> bool {
        self.network == Network::Loopback && self.isolation == Isolation::Root
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

/// Checks that isolated programs can have a path that an option names.
pub(crate) fn check_visible(option: &str, path: &Path) -> Checked {
    let paths = [real_path(path), path.canonicalize().ok()];
    let covered = paths.iter().flatten().find_map(|path| covered(path));
    let must = format!(
        "not contain {}, which each isolated program has for itself",
        covered.unwrap_or_default()
    );
    check(covered.is_none(), option, path.display(), &must)
}

/// Returns a directory of the program's own that would be covered by `path`.
fn covered(path: &Path) -> Option<&'static str> {
    let mut own = OWN.into_iter();
    own.find(|own| Path::new(own).starts_with(path))
}

/// Returns the system directories, and `more` with links resolved and without paths that another
/// one contains.
fn visible_paths(more: &[PathBuf]) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = SYSTEM.iter().map(PathBuf::from).collect();
    let mut more: Vec<PathBuf> = more.iter().flat_map(|path| with_targets(path)).collect();
    more.sort();
    for path in more {
        if paths.iter().any(|shown| path.starts_with(shown)) {
            continue;
        }
        if let Some(own) = covered(&path) {
            // An interpreter lists it, for example because it is in `PYTHONPATH`.
            let path = path.display();
            tracing::warn!("isolated programs do not see {path}, which would cover {own}");
            continue;
        }
        paths.retain(|shown| !shown.starts_with(&path));
        paths.push(path);
    }
    paths
}

/// Returns the links on the way to a file, in the order in which they are followed, and then the
/// file. Their paths lead through no other links. Returns nothing if the file does not exist.
pub(super) fn with_targets(path: &Path) -> Vec<PathBuf> {
    let Some(path) = std::path::absolute(path).ok().filter(|path| path.exists()) else {
        return Vec::new();
    };
    let (mut all, mut real, mut left) = (Vec::new(), PathBuf::new(), reversed(&path));
    while let Some(part) = left.pop() {
        match part.to_str() {
            Some(".") => {}
            Some("..") => drop(real.pop()),
            _ => real.push(part),
        }
        if all.len() < MAX_LINKS
            && let Ok(target) = real.read_link()
        {
            left.extend(reversed(&target));
            all.push(real.clone());
            real.pop();
        }
    }
    all.push(real);
    all
}

/// Returns a path's parts, the last first.
fn reversed(path: &Path) -> Vec<OsString> {
    let parts = path.components().rev();
    parts.map(|part| part.as_os_str().to_owned()).collect()
}

/// Resolves links in the path, except in the last part, which may be a link that programs inspect.
pub(super) fn real_path(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let Some(name) = path.file_name() else {
        return path.canonicalize().ok();
    };
    let parent = path.parent()?.canonicalize().ok()?;
    Some(parent.join(name)).filter(|path| path.exists())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn visible(paths: &[&str]) -> Vec<PathBuf> {
        visible_paths(&paths.iter().map(PathBuf::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_directory_that_would_cover_a_programs_own_is_left_out() {
        let system = visible(&[]);
        for path in ["/", "/tmp", "/dev", "/dev/shm", "/proc", "/dev/.."] {
            assert_eq!(visible(&[path]), system, "{path}");
        }
    }

    #[test]
    fn a_directory_contains_others() {
        let all = visible(&["/etc", "/etc/passwd", "/usr/bin"]);
        let in_etc = all.iter().filter(|path| path.starts_with("/etc"));
        assert!(in_etc.eq(["/etc"].map(Path::new)), "{all:?}");
        assert!(all.contains(&PathBuf::from("/usr")));
    }

    #[test]
    fn targets_of_links_are_visible() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("data")).unwrap();
        std::os::unix::fs::symlink("data", path("new")).unwrap();
        std::os::unix::fs::symlink(path("new"), path("newest")).unwrap();
        let all = visible_paths(&[path("newest")]);
        for name in ["newest", "new", "data"] {
            assert!(all.contains(&path(name)), "{name}: {all:?}");
        }
    }

    #[test]
    fn links_on_the_way_are_visible() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap();
        let path = |name: &str| real.join(name);
        let link = |target: &str, name: &str| {
            std::os::unix::fs::symlink(target, path(name)).unwrap();
        };
        std::fs::create_dir_all(path("node-20/bin")).unwrap();
        std::fs::create_dir(path("bin")).unwrap();
        std::fs::write(path("node-20/bin/node"), "").unwrap();
        link("./node-20/", "node");
        link("../bin/../node/bin/node", "bin/node");
        link("/", "root");
        let given = path("root").join(path("bin/node").strip_prefix("/").unwrap());
        let expected = ["root", "bin/node", "node", "node-20/bin/node"].map(path);
        assert_eq!(with_targets(&given), expected);
        assert_eq!(with_targets(&path("node/bin/other")), [] as [PathBuf; 0]);
    }

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

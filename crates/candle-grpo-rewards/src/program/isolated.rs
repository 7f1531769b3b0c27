//! Isolation for programs that are not from the policy: environments, tools and agents.

use std::collections::BTreeMap;
use std::env;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::files::interpreter_name;
use super::job::Job;
use super::{IsolationConfig, Program};
use crate::isolation::{self, Interpreter, Probed, Sandbox, real_path, text, with_targets, words};
use crate::network::Network;
use crate::processes::Running;

/// Files with which programs find names in a network.
const OF_NETWORK: [&str; 6] = [
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/resolv.conf",
    "/etc/ssl",
    "/etc/pki",
    "/etc/ca-certificates",
];

/// Parts of an installation that its programs read, beside their own directory.
const OF_INSTALLATION: [&str; 3] = ["lib", "lib64", "libexec"];

/// Changes to the working directory, if it is visible, and starts the command.
const IN_FOLDER: &str = "cd \"$1\" 2> /dev/null || :; shift; exec \"$@\"";

/// Fails unless `$0` is a file that the user can execute.
const IS_EXECUTABLE: &str =
    "[ -x \"$0\" ] || { echo \"$0: not there, or not executable\" >&2; exit 1; }";

/// Fails unless `$0` is a file that the user can read. Then runs the command that follows.
const IS_READABLE: &str =
    "[ -r \"$0\" ] || { echo \"$0: not there, or not readable\" >&2; exit 1; }; exec \"$@\"";

/// Maximum number of scripts that interpret each other, which is that of Linux.
const MAX_SCRIPTS: usize = 5;

/// Maximum length of a script's first line in bytes, which is that of Linux.
const MAX_FIRST_LINE: u64 = 256;

/// Maximum time for a trial, on a busy machine.
const TRIAL_LIMIT: Duration = Duration::from_secs(60);

/// Options, command and working directory.
type Key = (IsolationConfig, Vec<String>, Option<PathBuf>);

/// The isolated programs so far. Probing a sandbox takes time.
static ISOLATED: Mutex<BTreeMap<Key, Arc<Isolated>>> = Mutex::new(BTreeMap::new());

/// An isolated program, before its start.
struct Isolated {
    /// The command, with absolute paths for the program and the working directory.
    command: Vec<String>,
    sandbox: Sandbox,
}

impl Isolated {
    fn new(config: &IsolationConfig, program: &Program) -> Result<Self> {
        let (name, arguments) = program.command.split_first().context("command: empty")?;
        let path = program.find_program(name).and_then(|path| real_path(&path));
        let path =
            path.with_context(|| format!("command: {name:?}, must be a program that exists"))?;
        let working = match &program.folder {
            Some(folder) => folder
                .canonicalize()
                .with_context(|| format!("folder: {}, must be a directory", folder.display()))?,
            None => env::current_dir()?,
        };
        let start = Start::new(program, &path, 0)?;
        let mut visible = config.visible.clone();
        visible.extend(program.folder.clone());
        visible.extend(program.files());
        visible.extend(start.files);
        if config.network != Network::None {
            visible.extend(OF_NETWORK.map(PathBuf::from));
        }
        let Probed { sandbox, lacks } = Sandbox::probe(config.limits(), &visible, config.network)?;
        if let Some(lacks) = lacks {
            ensure!(
                !config.require_isolation,
                "isolation.require_isolation: true, but programs are not isolated: {lacks}"
            );
            tracing::warn!("{name}: it has isolation, but is not isolated: {lacks}");
        }
        let mut command = words(["sh", "-c", IN_FOLDER, "sh"]);
        command.push(text(&working));
        command.extend(start.words);
        command.extend_from_slice(arguments);
        let isolated = Self { command, sandbox };
        if let Some(reason) = isolated.fault(&start.trial, program)? {
            bail!(
                "command: {name:?}, must start in isolation, with the limits and the files that \
                 programs have there: {reason}"
            );
        }
        Ok(isolated)
    }

    /// Starts `command` as the program is started.
    fn start(
        &self,
        command: &[String],
        program: &Program,
        variables: &[(&str, String)],
    ) -> Result<Running> {
        let sandbox = &self.sandbox;
        let job = isolation::Job {
            command,
            file: None,
            input: Vec::new(),
            helpers: 0,
            announced: false,
        };
        let place = sandbox.place()?;
        let mut command = sandbox.command(&job, &place)?;
        program.set_environment(&mut command, variables);
        let home = if sandbox.is_isolated() {
            Path::new("/work")
        } else {
            place.files()
        };
        command.env("HOME", home).env_remove("TMPDIR");
        let mut server = None;
        let running = Running::start(&mut command, |command| {
            let (child, listener) = sandbox.spawn_with_server(command, program.server)?;
            server = listener;
            Ok(child)
        })?;
        Ok(running.isolated(place, server))
    }

    /// Returns the reason why a command that ends by itself fails, if it does.
    fn fault(&self, command: &[String], program: &Program) -> Result<Option<String>> {
        let mut job = Job::new(self.start(command, program, &[])?, Vec::new())?;
        let status = job.wait(TRIAL_LIMIT);
        let errors = job.end();
        Ok(match status {
            Some(status) if status.success() => None,
            Some(status) => Some(format!("{errors} ({status})")),
            None => Some(format!("not within {TRIAL_LIMIT:?}")),
        })
    }

    /// Returns the isolated program for these options, which is probed once.
    fn find(config: &IsolationConfig, program: &Program) -> Result<Arc<Self>> {
        let mut all = ISOLATED.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (
            config.clone(),
            program.command.clone(),
            program.folder.clone(),
        );
        if let Some(isolated) = all.get(&key) {
            return Ok(Arc::clone(isolated));
        }
        let isolated = Arc::new(Self::new(config, program)?);
        all.insert(key, Arc::clone(&isolated));
        Ok(isolated)
    }
}

/// Checks that the program can be isolated as `config` requires, by trying.
///
/// # Errors
///
/// Fails if the program does not exist, or if isolation is required and does not work.
pub(super) fn check(config: &IsolationConfig, program: &Program) -> Result<()> {
    Isolated::find(config, program).map(drop)
}

/// Starts a program with environment variables.
///
/// # Errors
///
/// Fails if it cannot be started, or if isolation is required and does not work.
pub(super) fn start(
    config: &IsolationConfig,
    program: &Program,
    variables: &[(&str, String)],
) -> Result<Running> {
    let isolated = Isolated::find(config, program)?;
    isolated.start(&isolated.command, program, variables)
}

/// The start of an installed program.
struct Start {
    /// Absolute path. Before that of a script, its interpreter and the interpreter's options.
    words: Vec<String>,
    /// Files that it reads.
    files: Vec<PathBuf>,
    /// A command that ends by itself. It fails if Python does not start, another program is not
    /// executable, or a script is not readable.
    trial: Vec<String>,
}

impl Start {
    /// Finds out how the file `path` starts, to which `scripts` scripts have led.
    fn new(program: &Program, path: &Path, scripts: usize) -> Result<Self> {
        // A launcher such as that of pyenv starts another program. The user's packages are below
        // the home directory, which the program does not have.
        if interpreter_name(path) == Some("python") {
            let found = Interpreter::find(&words([&*text(path), "-s"]))?;
            let path = found.command.into_iter().next();
            let path = path.context("python: has no path")?;
            return Ok(Self {
                trial: words([&*path, "-c", ""]),
                words: vec![path],
                files: found.files,
            });
        }
        let mut files = installation(path);
        let Some((name, options)) = script_interpreter(path) else {
            return Ok(Self {
                trial: words(["sh", "-c", IS_EXECUTABLE, &*text(path)]),
                words: vec![text(path)],
                files,
            });
        };
        ensure!(
            scripts < MAX_SCRIPTS,
            "command: {path:?}, must not lead through more than {MAX_SCRIPTS} scripts"
        );
        let found = program
            .find_program(&name)
            .and_then(|path| real_path(&path));
        let found = found.with_context(|| {
            format!("command: {path:?}, its interpreter {name:?} must be a program that exists")
        })?;
        let mut start = Self::new(program, &found, scripts + 1)?;
        files.append(&mut start.files);
        // If the path of a virtual environment is long, its scripts are those of a shell first.
        // Other scripts of a shell do not need the interpreter beside them.
        if let Some(python) = python_beside(path).filter(|_| name.ends_with("sh"))
            && let Ok(python) = Interpreter::find(&words([&*text(&python), "-s"]))
        {
            files.extend(python.files);
        }
        start.words.extend(options);
        start.words.push(text(path));
        let mut trial = words(["sh", "-c", IS_READABLE, &*text(path)]);
        trial.append(&mut start.trial);
        Ok(Self {
            files,
            trial,
            ..start
        })
    }
}

/// Returns the interpreter that a script names in its first line, and the interpreter's options.
fn script_interpreter(path: &Path) -> Option<(String, Vec<String>)> {
    let mut line = Vec::new();
    let file = File::open(path).ok()?.take(MAX_FIRST_LINE);
    BufReader::new(file).read_until(b'\n', &mut line).ok()?;
    let line = String::from_utf8_lossy(line.strip_prefix(b"#!")?).into_owned();
    let line = line.trim();
    let (name, argument) = line.split_once([' ', '\t']).unwrap_or((line, ""));
    let argument = argument.trim_start();
    if Path::new(name).file_name() == Some("env".as_ref()) {
        let split = argument.strip_prefix("-S").map(str::split_whitespace);
        let all: Vec<&str> = split.map_or_else(|| vec![argument], Iterator::collect);
        if let [name, options @ ..] = all.as_slice()
            && !name.is_empty()
            && !name.starts_with('-')
            && !name.contains('=')
        {
            return Some(((*name).to_owned(), words(options.iter().copied())));
        }
    }
    let options = Some(argument).filter(|argument| !argument.is_empty());
    Some((name.to_owned(), words(options)))
}

/// Returns the files of an installed program: the program, with the links that lead to it, and the
/// libraries beside its directory.
fn installation(path: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for path in with_targets(path) {
        let bin = path.parent().filter(|parent| parent.ends_with("bin"));
        if let Some(installation) = bin.and_then(Path::parent) {
            all.extend(OF_INSTALLATION.map(|part| installation.join(part)));
            all.extend(bin.map(Path::to_owned));
        }
        all.push(path);
    }
    all
}

/// Returns the interpreter of the virtual environment in which a script is installed.
fn python_beside(path: &Path) -> Option<PathBuf> {
    with_targets(path).iter().find_map(|path| {
        let bin = path.parent()?;
        let settings = bin.parent()?.join("pyvenv.cfg");
        settings.is_file().then(|| bin.join("python"))
    })
}

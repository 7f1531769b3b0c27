//! Isolation for programs that are not from the policy: environments, tools and agents.

use std::collections::BTreeMap;
use std::env;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, ensure};

use super::execution::Job;
use super::python::Interpreter;
use super::sandbox::{Probed, Sandbox, real_path};
use crate::program::{IsolationConfig, Network, Program, Running, interpreter_name};

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

/// Maximum number of links in a chain.
const MAX_LINKS: usize = 16;

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
            Some(folder) => folder.canonicalize(),
            None => env::current_dir(),
        };
        let working = working.context("folder: must be a folder that exists")?;
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let (path, installation) = match interpreter_name(&path) {
            // A launcher such as that of pyenv starts another program. The user's packages are
            // below the home directory, which the program does not have.
            Some("python") => {
                let found = Interpreter::find(&[text(&path), "-s".to_owned()])?;
                (found.command.into_iter().take(1).collect(), found.files)
            }
            _ => (text(&path), installation(&path)),
        };
        let mut visible = config.visible.clone();
        visible.extend(program.folder.clone());
        visible.extend(program.files());
        visible.extend(installation);
        if config.network != Network::None {
            for path in OF_NETWORK.map(PathBuf::from) {
                visible.extend(path.canonicalize().ok());
                visible.push(path);
            }
        }
        let Probed { sandbox, lacks } = Sandbox::probe(config.limits(), &visible, config.network)?;
        if let Some(lacks) = lacks {
            ensure!(
                !config.require_isolation,
                "isolation.require_isolation: true, but programs are not isolated: {lacks}"
            );
            tracing::warn!("{name}: it has isolation, but is not isolated: {lacks}");
        }
        let mut command = ["sh", "-c", IN_FOLDER, "sh"].map(str::to_owned).to_vec();
        command.extend([text(&working), path]);
        command.extend_from_slice(arguments);
        Ok(Self { command, sandbox })
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
pub(crate) fn check(config: &IsolationConfig, program: &Program) -> Result<()> {
    Isolated::find(config, program).map(drop)
}

/// Starts a program with environment variables.
///
/// # Errors
///
/// Fails if it cannot be started, or if isolation is required and does not work.
pub(crate) fn start(
    config: &IsolationConfig,
    program: &Program,
    variables: &[(&str, String)],
) -> Result<Running> {
    let isolated = Isolated::find(config, program)?;
    let sandbox = &isolated.sandbox;
    let job = Job {
        command: &isolated.command,
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

/// Returns the files of an installed program: the program, with the links that lead to it, and the
/// libraries beside its directory.
fn installation(path: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    let mut link = Some(path.to_owned());
    for _ in 0..MAX_LINKS {
        let Some(path) = link else { break };
        let bin = path.parent().filter(|parent| parent.ends_with("bin"));
        if let Some(installation) = bin.and_then(Path::parent) {
            all.extend(OF_INSTALLATION.map(|part| installation.join(part)));
            all.extend(bin.map(Path::to_owned));
        }
        let target = path.read_link().ok();
        link = target.and_then(|target| real_path(&path.parent()?.join(target)));
        all.push(path);
    }
    all
}

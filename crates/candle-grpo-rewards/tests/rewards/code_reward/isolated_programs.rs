//! Programs of environments, tools and agents, isolated as those of the policy.

use std::fs::{self, Permissions};
use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use candle_grpo_rewards::program::{IsolationConfig, Lines, Network, Program};
use candle_grpo_test_support::WATCHDOG;
use rstest::rstest;
use tempfile::TempDir;

use super::weak::{PART, WITHOUT_NAMESPACES, again, again_as_user, install};
use super::{NEVER, Witness, is_isolated, python};

/// Small limits, which must hold.
fn small() -> IsolationConfig {
    IsolationConfig {
        memory_mib: 256,
        processes: 16,
        disk_mib: 8,
        require_isolation: true,
        ..IsolationConfig::default()
    }
}

/// A Python program in a directory of its own.
fn program(script: &str, isolation: &IsolationConfig) -> (Program, TempDir) {
    // Root's programs run as another user.
    let folder = open_folder();
    fs::write(folder.path().join("program.py"), script).unwrap();
    let python = python()[0].as_str().unwrap().to_owned();
    let command = [&python, "-s", "-S", "program.py"].map(str::to_owned);
    let path = folder.path().to_owned();
    let program = Program::new(&command, Some(&path), NEVER, NEVER);
    (program.with_isolation(Some(isolation)), folder)
}

fn start(program: &Program) -> Lines {
    program.start_lines(1 << 20, 16).unwrap()
}

/// Returns the program's next line, or the error for its end.
fn line(lines: Lines) -> String {
    match lines.receive(WATCHDOG) {
        Ok(line) => line.unwrap(),
        Err(end) => format!("{:#}", lines.stop(end.into())),
    }
}

fn line_of(program: &Program) -> String {
    line(start(program))
}

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

fn said(script: &str, isolation: &IsolationConfig) -> String {
    let (program, _folder) = program(script, isolation);
    line_of(&program)
}

/// Bounded, so that it does no harm if the limit does not hold.
const FORKS: &str = "
import os, time
for n in range(60):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(6000)
print(n)";

const LARGE: &str = "
try:
    x = bytearray(10 * 2**30)
except MemoryError:
    print('no memory')
else:
    print('a lot')";

const FILES: &str = "
try:
    for n in range(40):
        with open(f'/tmp/{n}', 'wb') as file:
            file.write(bytes(1 << 20))
except OSError:
    pass
print(4 < n < 9)";

const RIGHTS: &str = r"
import os, subprocess
status = open('/proc/self/status').read()
assert 'CapEff:\t0000000000000000' in status and 'NoNewPrivs:\t1' in status
def tries(*command):
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
print(tries('mount', '-t', 'tmpfs', 'x', '/work'), tries('unshare', '--user', 'true'))";

#[rstest]
#[case::processes(FORKS, "15")]
#[case::memory(LARGE, "no memory")]
#[case::files(FILES, "True")]
#[case::rights(RIGHTS, "False False")]
fn limits_hold_for_an_isolated_program(#[case] script: &str, #[case] expected: &str) {
    if is_isolated() {
        assert_eq!(said(script, &small()), expected);
    }
}

#[test]
fn an_isolated_program_ends_with_its_cpu_time() {
    if !is_isolated() {
        return;
    }
    let isolation = IsolationConfig {
        cpu_seconds: Some(1),
        ..small()
    };
    let end = said("while True:\n    pass", &isolation);
    assert!(end.contains("137"), "killed: {end}");
}

#[test]
fn an_isolated_program_sees_its_own_files_only() {
    if !is_isolated() {
        return;
    }
    let other = open_folder();
    let secret = other.path().join("secret");
    fs::write(&secret, "42").unwrap();
    let script = format!(
        "
import os
def works(action):
    try:
        return bool(action()) or True
    except OSError:
        return False
secret = {secret:?}
print([
    works(lambda: open('program.py').read()),
    works(lambda: open('new', 'w')),
    works(lambda: open(secret).read()),
    works(lambda: os.symlink(secret, '/tmp/link') or open('/tmp/link').read()),
    works(lambda: open('/proc/1/root' + secret).read()),
    works(lambda: open('/etc/new', 'w')),
    works(lambda: open(os.path.expanduser('~/new'), 'w')),
    os.path.exists('/root') or os.path.exists('/home'),
])"
    );
    let expected = "[True, False, False, False, False, False, True, False]";
    assert_eq!(said(&script, &small()), expected);
    // What is listed is readable, also if it is in a directory that others cannot enter.
    fs::set_permissions(other.path(), Permissions::from_mode(0o700)).unwrap();
    let isolation = IsolationConfig {
        visible: vec![secret.clone()],
        ..small()
    };
    let script = format!("print(open({secret:?}).read())");
    assert_eq!(said(&script, &isolation), "42");
    // Without a directory, there are the files that the command names.
    let (mut program, folder) = program("import os\nprint(os.listdir(FOLDER))", &small());
    let path = folder.path().join("program.py");
    let script = format!("import os\nprint(os.listdir({:?}))", folder.path());
    fs::write(&path, script).unwrap();
    fs::write(folder.path().join("answers.json"), "42").unwrap();
    program.folder = None;
    let last = program.command.last_mut().unwrap();
    *last = path.display().to_string();
    assert_eq!(line_of(&program), "['program.py']");
}

/// A directory that users other than root can enter, too.
fn open_folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).unwrap();
    folder
}

fn script(path: &Path) -> Program {
    let command = [path.display().to_string(), "of the command".to_owned()];
    Program::new(&command, None, NEVER, NEVER).with_isolation(Some(&small()))
}

/// An interpreter in `folder` that is a script itself. It prints its arguments, and what another
/// program of its installation reads from a library.
fn interpreter(folder: &Path) -> String {
    let place = |name: &str| folder.join("versions").join(name);
    let (path, other, library) = (
        place("bin/interpreter"),
        place("bin/other"),
        place("lib/library"),
    );
    install(&library, "library");
    install(&other, format!("#!/bin/sh\ncat {}\n", library.display()));
    let text = format!("#!/bin/sh\necho \"$*\" $({})\n", other.display());
    install(&path, &text);
    path.display().to_string()
}

#[rstest]
#[case::direct("#!{interpreter}", "")]
#[case::with_an_option("#! {interpreter} an option ", "an option ")]
#[case::through_env("#!/usr/bin/env {interpreter}", "")]
#[case::through_env_with_options("#!/usr/bin/env -S {interpreter} an option", "an option ")]
fn a_script_has_its_interpreter(#[case] line: &str, #[case] options: &str) {
    if !is_isolated() {
        return;
    }
    let (installed, folder) = (open_folder(), open_folder());
    let path = folder.path().join("script");
    let line = line.replace("{interpreter}", &interpreter(installed.path()));
    install(&path, format!("{line}\nno text for a shell (\n"));
    let expected = format!("{options}{} of the command library", path.display());
    assert_eq!(line_of(&script(&path)), expected);
}

#[test]
fn an_interpreter_may_be_in_any_directory() {
    if !is_isolated() {
        return;
    }
    let (elsewhere, folder) = (open_folder(), open_folder());
    let interpreter = elsewhere.path().join("interpreter");
    install(&interpreter, "#!/bin/sh\necho \"$2\"\n");
    let path = folder.path().join("script");
    install(&path, format!("#!{}\n", interpreter.display()));
    assert_eq!(line_of(&script(&path)), "of the command");
}

#[test]
fn a_script_of_a_name_in_path_starts() {
    if !is_isolated() {
        return;
    }
    let folder = open_folder();
    let path = folder.path().join("script");
    install(
        &path,
        "#!/usr/bin/env python3\nimport json, sys\nprint(sys.argv[1:])",
    );
    // It may be a launcher, such as that of pyenv, which starts a program elsewhere.
    let expected = "['of the command']";
    let readable = Command::new("python3").args(["-c", OTHERS_READ]).status();
    if !is_root() || readable.unwrap().success() {
        assert_eq!(line_of(&script(&path)), expected);
    }
}

/// Succeeds if all users can read the interpreter.
const OTHERS_READ: &str = "
import os, sys
path = os.path.realpath(sys.executable)
sys.exit(os.stat(path).st_mode & 5 != 5)";

/// A launcher, such as that of pyenv, reads its settings and starts the interpreter.
#[test]
fn a_launcher_of_python_need_not_be_visible() {
    if !is_isolated() {
        return;
    }
    let folder = open_folder();
    let (launcher, settings) = (
        folder.path().join("python3"),
        folder.path().join("settings"),
    );
    let (mut program, _folder) = program("import sys\nprint(sys.executable)", &small());
    let python = program.command[0].clone();
    install(&settings, format!("python={python}\n"));
    let text = format!("#!/bin/sh\n. {}\nexec $python \"$@\"\n", settings.display());
    install(&launcher, &text);
    let expected = line_of(&program);
    program.command[0] = launcher.display().to_string();
    assert_eq!(line_of(&program), expected);
}

#[test]
fn a_program_with_much_to_report_starts() {
    if !is_isolated() {
        return;
    }
    let folder = open_folder();
    let python = folder.path().join("python");
    // More than a pipe holds, in both of them. It names its files when it is asked, as Python does.
    let noise = "head -c 200000 /dev/zero >&2\nhead -c 200000 /dev/zero | tr '\\0' '\\n'";
    let text = format!("#!/bin/sh\necho {}\n{noise}\n", python.display());
    install(&python, &text);
    let expected = python.display().to_string();
    assert_eq!(line_of(&script(&python)), expected);
}

/// Scripts of a virtual environment with a long path name their interpreter in a later line.
#[test]
fn a_script_has_the_virtual_environment_around_it() {
    if !is_isolated() {
        return;
    }
    let (installed, folder) = (open_folder(), open_folder());
    let library = installed.path().join("library");
    install(&library, "library\n");
    let (python, library) = (folder.path().join("bin/python"), library.display());
    // It names its files when it is asked, as Python does.
    let text = format!(
        "#!/bin/sh\necho {}\necho {library}\ncat {library}\n",
        python.display()
    );
    install(&python, &text);
    install(&folder.path().join("pyvenv.cfg"), "");
    let path = folder.path().join("bin/server");
    install(&path, format!("#!/bin/sh\n'''exec' cat {library}\n' '''\n"));
    assert_eq!(line_of(&script(&path)), "library");
}

#[test]
fn a_script_starts_beside_a_broken_virtual_environment() {
    if !is_isolated() {
        return;
    }
    let folder = open_folder();
    let path = |name: &str| folder.path().join(name);
    install(&path("bin/python"), "#!/bin/sh\nexit 1\n");
    install(&path("pyvenv.cfg"), "");
    install(&path("bin/server"), "#!/bin/sh\necho \"$1\"\n");
    assert_eq!(line_of(&script(&path("bin/server"))), "of the command");
}

/// First line of a script that only its user can read.
const HIDDEN: &str = "#!/bin/sh";

#[rstest]
#[case::no_interpreter(
    "#!/no/such/program",
    "its interpreter \"/no/such/program\" must be a program"
)]
#[case::itself("#!{path}", "must not lead through more than 5 scripts")]
#[case::not_for_others("#!{secret}", "must start in isolation")]
#[case::hidden_from_others(HIDDEN, "must start in isolation")]
fn a_script_that_cannot_start_is_an_error(#[case] line: &str, #[case] words: &str) {
    if !is_isolated() || ["#!{secret}", HIDDEN].contains(&line) && !is_root() {
        return;
    }
    let folder = open_folder();
    let path = folder.path().join("script");
    let secret = folder.path().join("secret");
    fs::copy("/bin/sh", &secret).unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o700)).unwrap();
    let text = line.replace("{path}", path.to_str().unwrap());
    install(&path, text.replace("{secret}", secret.to_str().unwrap()));
    if line == HIDDEN {
        fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
    }
    let error = format!("{:#}", script(&path).check_files().unwrap_err());
    assert!(
        error.starts_with("command: ") && error.contains(words),
        "{error}"
    );
}

#[test]
fn an_interpreter_that_does_not_fit_in_the_limits_is_an_error() {
    if !is_isolated() {
        return;
    }
    let isolation = IsolationConfig {
        memory_mib: 1,
        ..small()
    };
    let (program, _folder) = program("", &isolation);
    let error = format!("{:#}", program.check_files().unwrap_err());
    assert!(error.contains("must start in isolation"), "{error}");
}

#[test]
fn a_program_starts_through_links_of_its_directories() {
    if !is_isolated() {
        return;
    }
    let folder = open_folder();
    let path = |name: &str| folder.path().join(name);
    let text = format!("#!/bin/sh\ncat {}\n", path("tool/lib/library").display());
    install(&path("versions/tool-2/bin/tool"), &text);
    install(&path("versions/tool-2/lib/library"), "library\n");
    fs::create_dir_all(path("local/bin")).unwrap();
    symlink("versions/tool-2", path("tool")).unwrap();
    symlink("../../tool/bin/tool", path("local/bin/tool")).unwrap();
    assert_eq!(line_of(&script(&path("local/bin/tool"))), "library");
}

#[test]
fn a_link_is_visible_with_its_target() {
    if !is_isolated() {
        return;
    }
    let (data, links) = (open_folder(), open_folder());
    fs::write(data.path().join("data"), "42").unwrap();
    let link = |name: &str, target: &Path| {
        symlink(target, links.path().join(name)).unwrap();
        links.path().join(name)
    };
    let visible = link("data", data.path());
    let (mut program, folder) = program("", &small());
    let text = format!("print(open({:?}).read())", visible.join("data"));
    fs::write(folder.path().join("program.py"), text).unwrap();
    program.folder = Some(link("folder", folder.path()));
    for path in [&visible, &visible.join("data")] {
        program.isolation.as_mut().unwrap().visible = vec![path.clone()];
        assert_eq!(line_of(&program), "42");
    }
}

/// Connects to this machine and to a server of the program's own.
fn connects(port: u16) -> String {
    format!(
        "
import socket
def works(port):
    try:
        return bool(socket.create_connection(('127.0.0.1', port), 5))
    except OSError:
        return False
own = socket.create_server(('127.0.0.1', 0))
print(works({port}), works(own.getsockname()[1]))"
    )
}

#[rstest]
#[case(Network::None, "False False")]
#[case(Network::Loopback, "False True")]
#[case(Network::Host, "True True")]
fn an_isolated_program_has_its_network(#[case] network: Network, #[case] expected: &str) {
    if !is_isolated() || network == Network::Loopback && !is_root() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let isolation = IsolationConfig { network, ..small() };
    assert_eq!(said(&connects(port), &isolation), expected);
}

/// A program finds names in its network.
#[rstest]
#[case(Network::None, "False")]
#[case(Network::Host, "True")]
fn files_of_the_network_are_there_with_a_network(#[case] network: Network, #[case] expected: &str) {
    if is_isolated() && fs::exists("/etc/hosts").unwrap() {
        let isolation = IsolationConfig { network, ..small() };
        let script = "import os\nprint(os.path.exists('/etc/hosts'))";
        assert_eq!(said(script, &isolation), expected);
    }
}

#[test]
fn an_isolated_program_inherits_variables_without_secrets() {
    if std::env::var_os(PART).is_none() {
        let name = "code_reward::isolated_programs::an_isolated_program_inherits_variables_without_secrets";
        let folder = open_folder();
        let files = format!("TMPDIR={}", folder.path().display());
        let variables = ["env", "HF_TOKEN=secret", &files, "OTHER=other"];
        assert_ne!(again(&variables, &[name], "variables"), Some(false));
        return;
    }
    if std::env::var(PART).unwrap() != "variables" {
        return;
    }
    let script = "
import os
print([os.environ.get(name) for name in ('HF_TOKEN', 'TMPDIR', 'OTHER', 'HOME')])";
    let isolation = IsolationConfig {
        require_isolation: false,
        ..small()
    };
    let (mut program, folder) = program(script, &isolation);
    let found = line_of(&program);
    assert!(found.starts_with("[None, None, 'other', "), "{found}");
    assert!(!is_isolated() || found.ends_with(" '/work']"), "{found}");
    // Files of its installation may run when it is asked for its directories.
    let launcher = folder.path().join("python");
    let text = format!(
        "#!/bin/sh\n[ -z \"$HF_TOKEN\" ] && exec {} \"$@\"\n",
        program.command[0]
    );
    install(&launcher, &text);
    program.command[0] = launcher.display().to_string();
    assert_eq!(line_of(&program), found);
    // Nothing is left in this process's directory for temporary files, and no cgroup.
    let left = |folder: &Path, start: &str| {
        let entries = fs::read_dir(folder).into_iter().flatten();
        let mut names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.find(|name| name.starts_with(start))
    };
    assert_eq!(left(&std::env::temp_dir(), "candle-grpo-"), None);
    let cgroup = format!("candle-grpo-{}-", std::process::id());
    for place in ["/sys/fs/cgroup", "/sys/fs/cgroup/memory"] {
        assert_eq!(left(Path::new(place), &cgroup), None);
    }
}

#[test]
fn a_program_with_its_own_network_reaches_the_server() {
    if !is_isolated() || !is_root() {
        return;
    }
    // The address is free in the program's network.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let script = format!(
        "import socket\nserver = socket.create_connection(('127.0.0.1', {}))\nserver.sendall(b'hello')",
        address.port()
    );
    let isolation = IsolationConfig {
        network: Network::Loopback,
        ..small()
    };
    let (mut program, _folder) = program(&script, &isolation);
    program.server = Some(address);
    let mut job = program.start_job(Vec::new(), &[]).unwrap();
    let server = job.take_server().unwrap();
    let mut text = String::new();
    let (mut connection, _) = server.accept().unwrap();
    connection.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
    taken.set_nonblocking(true).unwrap();
    assert!(taken.accept().is_err());
}

#[test]
fn nothing_outlives_an_isolated_program() {
    if !is_isolated() {
        return;
    }
    let witness = Witness::new();
    let isolation = IsolationConfig {
        visible: vec![witness.folder.path().to_owned()],
        ..small()
    };
    // A daemon, a bomb, and an attempt to kill everything.
    let script = witness.seen_by(
        "
import signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(6000)
    os._exit(0)
try:
    os.kill(-1, 0)
except OSError:
    pass
print('started', flush=True)
sys.stdin.readline()
while True:
    try:
        os.fork()
    except OSError:
        pass
",
    );
    let mut neighbor = Command::new("sleep")
        .arg("6000")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let (program, _folder) = program(&script, &isolation);
    let lines = start(&program);
    assert_eq!(lines.receive(WATCHDOG).unwrap().unwrap(), "started");
    lines.send(b"go\n".to_vec());
    drop(lines);
    witness.lines.wait_for_end();
    assert!(neighbor.try_wait().unwrap().is_none());
    neighbor.kill().unwrap();
    neighbor.wait().unwrap();
}

#[test]
fn a_program_that_outlives_nothing_leaves_no_files() {
    if !is_isolated() {
        return;
    }
    let script =
        "import os\nopen('/work/left', 'w').write('x')\nprint(sorted(os.listdir('/work')))";
    for _ in 0..2 {
        assert_eq!(said(script, &small()), "['left']");
    }
}

/// Users other than root have all limits but a loopback interface of their own.
#[test]
fn isolation_holds_for_users_without_rights() {
    again_as_user(&["isolated_programs"]);
}

#[test]
fn only_root_gives_a_loopback_interface() {
    if std::env::var(PART).ok().as_deref() != Some("user") {
        return;
    }
    let isolation = IsolationConfig {
        network: Network::Loopback,
        ..small()
    };
    let (program, _folder) = program("", &isolation);
    let error = program.check_files().unwrap_err().to_string();
    assert!(
        error.contains("they can use the network of this machine"),
        "{error}"
    );
}

#[test]
fn a_machine_without_namespaces_isolates_no_program() {
    if std::env::var_os(PART).is_none() {
        let name =
            "code_reward::isolated_programs::a_machine_without_namespaces_isolates_no_program";
        assert_ne!(again(&WITHOUT_NAMESPACES, &[name], "bare"), Some(false));
        return;
    }
    if std::env::var(PART).unwrap() != "bare" {
        return;
    }
    let (strict, _folder) = program("print('started')", &small());
    for error in [
        strict.check_files().unwrap_err(),
        strict.start_lines(100, 1).err().unwrap(),
    ] {
        let error = error.to_string();
        let start = "isolation.require_isolation: true, but programs are not isolated: ";
        assert!(error.starts_with(start), "{error}");
        assert!(error.contains("namespaces do not work here"), "{error}");
    }
    // Otherwise it runs, and the limits of each process remain.
    let weak = IsolationConfig {
        require_isolation: false,
        ..small()
    };
    assert_eq!(said(LARGE, &weak), "no memory");
    let home = "import os\nopen(os.path.expanduser('~/new'), 'w')\nprint(os.listdir('.'))";
    assert_eq!(said(home, &weak), "['program.py']");
    // What it leaves in its home is removed, also without its permissions.
    let leaves = "
import os
home = os.path.expanduser('~')
os.makedirs(home + '/x/y')
os.chmod(home + '/x', 0)
print(home)";
    let home = said(leaves, &weak);
    assert!(
        home.starts_with('/') && !fs::exists(&home).unwrap(),
        "{home}"
    );
}

#[rstest]
#[case(IsolationConfig { processes: 0, ..small() }, "isolation.processes: 0, must be from 1")]
#[case(IsolationConfig { cpu_seconds: Some(0), ..small() }, "isolation.cpu_seconds: 0, must be from 1")]
#[case(visible("/"), "isolation.visible: /, must not contain /")]
#[case(
    visible("/tmp"),
    "isolation.visible: /tmp, must not contain /tmp, which each"
)]
#[case(
    visible("/dev/../dev"),
    "isolation.visible: /dev/../dev, must not contain /dev/shm"
)]
fn an_isolation_option_that_is_not_valid_is_named(
    #[case] isolation: IsolationConfig,
    #[case] words: &str,
) {
    let (program, _folder) = program("", &isolation);
    let error = program.validate().unwrap_err().to_string();
    assert!(error.starts_with(words), "{error}");
}

fn visible(path: &str) -> IsolationConfig {
    IsolationConfig {
        visible: vec![path.into()],
        ..small()
    }
}

#[test]
fn an_isolated_programs_folder_must_not_cover_its_own() {
    let (mut program, folder) = program("", &small());
    program.validate().unwrap();
    let link = folder.path().join("link");
    symlink("/", &link).unwrap();
    for path in [Path::new("/tmp"), Path::new("/"), &link] {
        program.folder = Some(path.to_owned());
        let error = program.validate().unwrap_err().to_string();
        let start = format!("folder: {}, must not contain /", path.display());
        assert!(error.starts_with(&start), "{error}");
    }
    // Without isolation, it is the program's directory only.
    program.isolation = None;
    program.validate().unwrap();
}

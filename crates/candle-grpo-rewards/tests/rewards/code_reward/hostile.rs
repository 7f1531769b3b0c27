//! Hostile programs. Each would pass its test if the limit that it attacks did not hold.

use std::fs;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use candle_grpo_rewards::CodeReward;
use candle_grpo_rewards::{Interrupted, Progress, RewardFunction};
use candle_grpo_test_support::WATCHDOG;
use nix::libc;
use serde_json::{Value, json};

use super::{NEVER, Witness, fenced, isolated, score, scores};

const RIGHT: &str = "def f(n):\n    return n + 1";
const TEST: &str = "assert f(1) == 2";

/// Small limits. The time is [`NEVER`], unless the time limit ends the program.
fn small(time_seconds: f64, more: Value) -> Option<CodeReward> {
    let mut options = json!({"limits": {
        "time_seconds": time_seconds,
        "cpu_seconds": 30,
        "memory_mib": 256,
        "processes": 16,
        "output_bytes": 65536,
        "disk_mib": 8,
    }});
    options
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    isolated(options)
}

/// The program must fail, and the next one must be scored as usual.
fn fails(reward: &CodeReward, program: &str, test: &str) {
    assert_eq!(score(reward, program, json!(test)), 0., "{program}");
    assert_eq!(score(reward, RIGHT, json!(TEST)), 1., "after {program}");
}

fn passes(reward: &CodeReward, program: &str, test: &str) {
    assert_eq!(score(reward, program, json!(test)), 1., "{program}");
}

#[test]
fn the_number_of_processes_is_limited() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    // Bounded, so that it does no harm if the limit does not hold.
    let count = "
import os, time
def count():
    for n in range(60):
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            time.sleep(6000)
    return n
";
    fails(&reward, count, "assert count() >= 16");
    passes(&reward, count, "assert count() == 15");
    let threads = "
import threading, time
def count():
    n = 0
    try:
        for _ in range(60):
            threading.Thread(target=time.sleep, args=(6000,), daemon=True).start()
            n += 1
    except RuntimeError:
        pass
    return n
";
    fails(&reward, threads, "assert count() >= 16");
    // It is bounded: now without an end.
    let bomb = "print('x', flush=True)\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass";
    let witness = Witness::new();
    let short = small(1., json!({"visible": [witness.folder.path()]})).unwrap();
    let bomb = witness.seen_by(bomb);
    assert_eq!(score(&short, &bomb, json!([{"output": "x"}])), 0.);
    witness.lines.wait_for_end();
    passes(&reward, RIGHT, TEST);
}

#[test]
fn an_endless_loop_ends_with_the_cpu_time() {
    let limits = json!({"limits": {"time_seconds": NEVER, "cpu_seconds": 1, "memory_mib": 256}});
    let Some(reward) = isolated(limits) else {
        return;
    };
    let begun = Instant::now();
    fails(&reward, "while True:\n    pass", "assert True");
    // A signal can be caught, but the limit holds.
    fails(
        &reward,
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass",
        "assert True",
    );
    assert!(begun.elapsed() < WATCHDOG);
}

#[test]
fn a_sleeping_program_ends_with_the_time() {
    let (first, second) = (Witness::new(), Witness::new());
    let visible = [first.folder.path(), second.folder.path()];
    let Some(reward) = small(1., json!({"visible": visible})) else {
        return;
    };
    let asleep = first.seen_by("import time\ntime.sleep(6000)");
    assert_eq!(score(&reward, &asleep, json!("assert True")), 0.);
    // Its copy of the pipe stays open.
    let closed = second.seen_by(
        "import time\nos.dup2(witness, 200)\nprint('x', flush=True)\nos.closerange(0, 100)\ntime.sleep(6000)",
    );
    assert_eq!(score(&reward, &closed, json!([{"output": "x"}])), 0.);
    for witness in [first, second] {
        witness.lines.wait_for_end();
    }
}

#[test]
fn memory_is_limited() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    fails(
        &reward,
        "x = bytearray(10 * 2**30)",
        "assert len(x) == 10 * 2**30",
    );
    fails(&reward, "x = [0] * 10**10", "assert len(x)");
    fails(
        &reward,
        "import mmap\nx = mmap.mmap(-1, 10 * 2**30)",
        "assert len(x)",
    );
    // An expansion of 600 KB to 600 MB.
    let bomb = "
import zlib
packer = zlib.compressobj(1)
packed = b''.join(packer.compress(bytes(1 << 20)) for _ in range(600)) + packer.flush()
";
    fails(
        &reward,
        &format!("{bomb}x = zlib.decompress(packed)"),
        "assert len(x) == 600 << 20",
    );
}

#[test]
fn output_is_limited() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    for stream in ["stdout", "stderr"] {
        let program = format!(
            "import sys\nfor _ in range(1600):\n    sys.{stream}.write('x' * 65536)\nsys.{stream}.flush()"
        );
        fails(&reward, &program, "assert True");
        let said = format!("{program}\nprint('end')");
        let expected = format!(
            "{}end",
            "x".repeat(if stream == "stdout" { 1600 * 65536 } else { 0 })
        );
        assert_eq!(score(&reward, &said, json!([{"output": expected}])), 0.);
    }
    // Less than the limit.
    passes(&reward, "print('x' * 60000)", "assert True");
}

#[test]
fn files_are_limited() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    let one = "
with open('out', 'wb') as file:
    for _ in range(40):
        file.write(bytes(1 << 20))
";
    fails(&reward, one, "assert True");
    let several = "
for i in range(40):
    with open(f'out{i}', 'wb') as file:
        file.write(bytes(1 << 20))
";
    fails(&reward, several, "assert True");
    fails(
        &reward,
        &several.replace("out{i}", "/dev/shm/out{i}"),
        "assert True",
    );
    fails(
        &reward,
        "for i in range(30000):\n    open(f'{i}', 'w').close()",
        "assert True",
    );
    let bomb = "
import zlib
packer = zlib.compressobj(1)
packed = b''.join(packer.compress(bytes(1 << 20)) for _ in range(100)) + packer.flush()
unpack = zlib.decompressobj()
with open('out', 'wb') as file:
    while not unpack.eof:
        file.write(unpack.decompress(packed, 1 << 20))
        packed = unpack.unconsumed_tail
";
    fails(&reward, bomb, "assert True");
    // Less than the limit.
    passes(
        &reward,
        &one.replace("40", "4"),
        "import os\nassert os.path.getsize('out') == 4 << 20",
    );
}

#[test]
fn deep_nesting_is_an_error_of_the_program() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    for (open, close) in [("(", ")"), ("[", "]"), ("-", ""), ("f(", ")"), ("not ", "")] {
        let program = format!("x = {}1{}", open.repeat(10_000), close.repeat(10_000));
        assert_eq!(
            score(&reward, &program, json!("assert False")),
            0.,
            "{open}"
        );
    }
    let nested: String = (0..10_000)
        .map(|depth| format!("{}if 1:\n", " ".repeat(depth)))
        .collect();
    fails(&reward, &nested[..2_000_000], "assert False");
    fails(
        &reward,
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n):\n    return f(n)\nf(1)",
        "assert True",
    );
    fails(&reward, "x\0y = 1", "assert True");
}

#[test]
fn other_processes_survive_a_program_that_kills() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    let mut neighbor = Command::new("sleep")
        .arg("6000")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    for program in [
        "import os\nos.kill(-1, 9)",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.killpg(os.getpgid(os.getppid()), 9)",
        "import os\nos.killpg(0, 9)",
        "import os\nfor pid in range(1, 70000):\n    try:\n        pid != os.getpid() and os.kill(pid, 9)\n    except OSError:\n        pass",
    ] {
        // It may pass, since it harms nothing.
        let score = score(&reward, program, json!("assert 1"));
        assert!(score == 0. || score == 1.);
        passes(&reward, RIGHT, TEST);
        assert!(neighbor.try_wait().unwrap().is_none(), "{program}");
    }
    neighbor.kill().unwrap();
    neighbor.wait().unwrap();
}

#[test]
fn there_is_no_network() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let program = format!("import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)");
    fails(&reward, &program, "assert True");
    assert!(listener.accept().is_err());
    // The program itself works where there is a network.
    let control = Command::new(super::python()[0].as_str().unwrap())
        .args(["-c", &program])
        .status();
    assert!(control.unwrap().success() && listener.accept().is_ok());
    fails(
        &reward,
        "import socket\nsocket.create_connection(('1.1.1.1', 53), 5)",
        "assert True",
    );
}

#[test]
fn nothing_outlives_a_program() {
    let witness = Witness::new();
    let visible = json!({"visible": [witness.folder.path()]});
    let Some(reward) = small(NEVER, visible) else {
        return;
    };
    let program = "
import signal, time
read, write = os.pipe()
if os.fork() == 0:
    os.setsid()
    for number in range(1, 65):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    if os.fork() == 0:
        os.write(write, b'x')
        time.sleep(6000)
    os._exit(0)
os.read(read, 1)
print('started')
";
    let program = witness.seen_by(program);
    assert_eq!(score(&reward, &program, json!([{"output": "started"}])), 1.);
    witness.lines.wait_for_end();
}

#[test]
fn files_outside_the_folder_are_neither_read_nor_written() {
    // No other folder has a file of this name.
    let name = format!("outside_{}.py", std::process::id());
    let Some(reward) = small(NEVER, json!({"file": name})) else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("secret"), "42").unwrap();
    let path = folder.path().display().to_string();
    let dots = format!("{}{path}", "../".repeat(20));
    for place in [&path, &dots] {
        fails(
            &reward,
            &format!("open('{place}/new', 'w').write('x')"),
            "assert True",
        );
        fails(
            &reward,
            &format!("x = open('{place}/secret').read()"),
            "assert x == '42'",
        );
        let link =
            format!("import os\nos.symlink('{place}', 'link')\nopen('link/new', 'w').write('x')");
        fails(&reward, &link, "assert True");
    }
    // With all folders of the path, which are its own.
    let all = format!(
        "import os\nos.makedirs('{path}', exist_ok=True)\nopen('{path}/new', 'w').write('x')"
    );
    score(&reward, &all, json!("assert True"));
    let names: Vec<_> = fs::read_dir(folder.path())
        .unwrap()
        .map(|file| file.unwrap().file_name())
        .collect();
    assert_eq!(names, ["secret"]);
    for place in ["/usr", "/usr/bin", "/proc/1/root", "/sys", "/etc"] {
        fails(
            &reward,
            &format!("open('{place}/{name}', 'w').write('x')"),
            "assert True",
        );
    }
    fails(
        &reward,
        "import os",
        "assert os.path.exists('/root') and os.path.exists('/home')",
    );
    // Folders are removed, and a fresh one has the program only.
    passes(
        &reward,
        "import os\nopen('left', 'w').close()",
        "assert os.listdir() == ['left']",
    );
    assert_eq!(
        score(
            &reward,
            "import os\nprint(os.listdir())",
            json!([{"output": format!("['{name}']")}])
        ),
        1.
    );
    let folders = fs::read_dir(std::env::temp_dir()).unwrap();
    let left = folders.filter(|folder| {
        let folder = folder.as_ref().unwrap().path();
        folder.join("files").join(&name).exists() || folder.join("root/work").exists()
    });
    assert_eq!(left.count(), 0);
}

#[test]
fn a_program_has_no_rights_and_no_secrets() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    passes(
        &reward,
        "import os\nstatus = open('/proc/self/status').read()",
        "assert 'CapEff:\t0000000000000000' in status and 'NoNewPrivs:\t1' in status",
    );
    passes(
        &reward,
        "import os",
        "assert 'CARGO_MANIFEST_DIR' not in os.environ and len(os.environ) < 12",
    );
    passes(&reward, "import os", "assert os.read(0, 1) == b''");
    fails(
        &reward,
        "import os, subprocess\nsubprocess.run(['mount', '-t', 'tmpfs', 'x', '/work'], check=True)",
        "assert True",
    );
    fails(
        &reward,
        "import os, subprocess\nsubprocess.run(['umount', '/usr'], check=True)",
        "assert True",
    );
    fails(
        &reward,
        "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))",
        "assert True",
    );
    fails(
        &reward,
        "import os\nos.mkdir('x')\nos.chroot('x')",
        "assert True",
    );
}

/// A program that collects what it can read from the processes above it, as `found`, and a test
/// that this is nothing. Any program sees the command lines, which have no part of the test.
pub(super) fn reads_of_parents() -> (String, String) {
    let program = format!(
        "
import ctypes, os
kernel = ctypes.CDLL(None).syscall
here = ctypes.create_string_buffer(8)
class Part(ctypes.Structure):
    _fields_ = [('start', ctypes.c_void_p), ('size', ctypes.c_size_t)]
mine = Part(ctypes.addressof(here), 8)
def of(process, name):
    with open('/proc/%d/%s' % (process, name)) as file:
        return file.read()
def attempts(process):
    place = '/proc/%d/' % process
    for name in ['environ', 'maps', 'smaps', 'auxv', 'numa_maps', 'syscall', 'io']:
        yield name, lambda: of(process, name)
    yield 'mem', lambda: os.close(os.open(place + 'mem', os.O_RDONLY))
    for name in ['fdinfo', 'map_files']:
        yield name, lambda: os.listdir(place + name)
    # The numbers of open files may be seen, but not the files.
    for number in range(64):
        yield 'fd', lambda: os.close(os.open(place + 'fd/%d' % number, os.O_RDONLY))
    for name in ['fd/0', 'exe', 'cwd', 'root']:
        yield name, lambda: os.readlink(place + name)
    def copy():
        # A null pointer would be another error than a missing permission.
        theirs = Part(ctypes.addressof(here), 8)
        if kernel({read}, process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) < 0:
            raise OSError
    yield 'process_vm_readv', copy
    def attach():
        if kernel({trace}, 0x4206, process, None, None) < 0:
            raise OSError
    yield 'ptrace', attach
found, lines, process = [], '', os.getppid()
while process > 0:
    for name, attempt in attempts(process):
        try:
            attempt()
            found.append((process, name))
        except OSError:
            pass
    lines += of(process, 'cmdline')
    process = int(of(process, 'status').split('PPid:')[1].split()[0])
",
        read = libc::SYS_process_vm_readv,
        trace = libc::SYS_ptrace,
    );
    let test = "assert found == [], found\nassert lines and 'not in lines' not in lines";
    (program, test.to_owned())
}

#[test]
fn a_program_reads_nothing_of_its_parents() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    let (program, test) = reads_of_parents();
    passes(&reward, &program, &test);
    let pair = json!([{"output": "[]"}]);
    assert_eq!(
        score(&reward, &format!("{program}\nprint(found)"), pair),
        1.
    );
}

#[test]
fn output_that_is_not_utf8_is_wrong() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    let program = "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe\\x00')";
    assert_eq!(
        score(&reward, program, json!([{"output": "\u{fffd}\u{fffd}\0"}])),
        0.
    );
    // It is no output of assertions.
    passes(&reward, program, "assert True");
    fails(
        &reward,
        "# \u{1F600}\nx = '\\ud800'\nprint(x)",
        "assert True",
    );
}

#[test]
fn only_assertions_that_reach_their_end_pass() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    let everywhere = "
for number in range(3, 256):
    try:
        os.write(number, text.encode())
    except OSError:
        pass
os._exit(0)
";
    let frames = "
import gc, os, re, sys
text = ''
frame = sys._getframe()
while frame:
    for value in [*frame.f_locals.values(), *frame.f_code.co_consts]:
        text += ' '.join(re.findall('[0-9a-f]{32}', repr(value)))
    frame = frame.f_back
for value in gc.get_objects():
    text += ' '.join(re.findall('[0-9a-f]{32}', repr(value) if type(value) is list else ''))
";
    let command =
        "import os\ntext = open('/proc/self/cmdline').read() + open('/proc/1/environ').read()\n";
    for program in [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "exit()",
        "def f(n):\n    import os\n    os._exit(0)",
        "import sys\nsys.stdout.write('passed\\nok\\n1\\n')\nsys.exit()",
        "import os\nfor n in range(300):\n    try:\n        os.write(n, b'0' * 32)\n    except OSError:\n        pass\nos._exit(0)",
        "import builtins, os\nbuiltins.exec = builtins.compile = lambda *a: None\nos._exit = lambda n: None",
        "import os\nos.read = lambda *a: b''\nos.write = lambda *a: 0",
        "import threading, os\nthreading.Thread(target=os._exit, args=(0,)).start()\nimport time\ntime.sleep(6000)",
        &format!("{frames}{everywhere}"),
        &format!("{command}{everywhere}"),
        &format!(
            "{frames}\ndef f(n):\n    global text\n    {}",
            everywhere.trim_start().replace('\n', "\n    ")
        ),
    ] {
        fails(&reward, program, TEST);
    }
    // Text on stdout does not disturb.
    passes(
        &reward,
        "print('0' * 32)\ndef f(n):\n    print(n)\n    return 2",
        TEST,
    );
    // A module that is imported does not run the part of the main program.
    let main = "if __name__ == '__main__':\n    f = input()";
    passes(&reward, &format!("{RIGHT}\n{main}"), TEST);
    fails(&reward, RIGHT, "assert f(1) == 2\nassert f(1) == 3");
    fails(&reward, RIGHT, "assert f(1) ==");
}

/// Requests a stop once it is set.
#[derive(Default)]
struct Stop(AtomicBool);

impl Progress for Stop {
    fn is_canceled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_canceled_run_stops_and_leaves_no_process() {
    let witness = Witness::new();
    let options = json!({"visible": [witness.folder.path()], "workers": 2});
    let Some(mut reward) = small(NEVER, options) else {
        return;
    };
    let stop = Arc::new(Stop::default());
    reward.set_progress(stop.clone());
    let row = json!({"tests": [{"output": ""}]});
    let program = witness.seen_by("os.write(witness, b'runs\\n')\nimport time\ntime.sleep(6000)");
    let completions = vec![(fenced(&program), row); 4];
    let begun = Instant::now();
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            witness.lines.line();
            stop.0.store(true, Ordering::SeqCst);
        });
        scores(&reward, &completions).unwrap_err()
    });
    assert!(error.is::<Interrupted>(), "{error:#}");
    assert!(begun.elapsed() < WATCHDOG);
    witness.lines.wait_for_end();
}

/// In its own user namespace, a program would have all capabilities.
#[test]
fn a_program_cannot_make_user_namespaces() {
    // There, nothing can be written that would forbid them.
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    if mounts.contains(" /proc/sys proc ro") {
        return;
    }
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    for flags in ["0x10000000", "0x10020000"] {
        let program =
            format!("import ctypes\nmade = ctypes.CDLL(None, use_errno=True).unshare({flags})");
        passes(&reward, &program, "assert made != 0");
    }
    passes(
        &reward,
        "import os\nuser = os.getuid()\nrights = open('/proc/self/status').read()",
        "assert user in (0, 65534) and 'CapEff:\\t0000000000000000' in rights",
    );
}

/// With its own namespaces, a program would get another file system with any size.
#[test]
fn a_program_that_mounts_in_its_own_namespaces_has_no_more_disk() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    // Each step may fail. The files that it may make have 8 MiB together.
    let program = "
import ctypes, os
kernel = ctypes.CDLL(None)
user, group = os.getuid(), os.getgid()
mounts = []
for flags in [0x10020000, 0x20000, 0x10000000]:
    kernel.unshare(flags)
for file, text in [('setgroups', 'deny'), ('uid_map', f'0 {user} 1'), ('gid_map', f'0 {group} 1')]:
    try:
        open('/proc/self/' + file, 'w').write(text)
    except OSError:
        pass
for place in [b'/tmp', b'/work', b'/dev/shm']:
    mounts.append(kernel.mount(b'none', place, b'tmpfs', 0, b'size=1g'))
written = 0
for place in ['/tmp', '/work', '/dev/shm']:
    try:
        for i in range(8):
            with open(f'{place}/{i}', 'wb', buffering=0) as file:
                while file.tell() < 4 << 20:
                    written += file.write(bytes(1 << 18))
    except OSError:
        pass
";
    passes(
        &reward,
        program,
        "assert all(mounts), mounts\nassert written <= 8 << 20, written",
    );
}

/// The calls that programs must not make, as a Python condition: each fails with `EPERM`, also by
/// its number in the x32 ABI.
pub(super) fn kernel_calls_are_refused() -> (String, String) {
    let calls = [
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_keyctl,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
    ];
    let families = [
        libc::AF_NETLINK,
        libc::AF_PACKET,
        libc::AF_ALG,
        libc::AF_VSOCK,
        libc::AF_KEY,
        libc::AF_TIPC,
        libc::AF_BLUETOOTH,
        libc::AF_CAN,
    ];
    let x32 = if cfg!(target_arch = "x86_64") {
        "1 << 30"
    } else {
        "0"
    };
    let program = format!(
        "
import ctypes, errno
kernel = ctypes.CDLL(None, use_errno=True).syscall
def refused(call, *arguments):
    ctypes.set_errno(0)
    result = kernel(ctypes.c_long(call), *map(ctypes.c_long, arguments))
    return result == -1 and ctypes.get_errno() == errno.EPERM
made = [call for call in {calls:?} if not (refused(call, 0, 0, 0) and refused(call | {x32}, 0, 0, 0))]
for call in {sockets:?}:
    # The kernel reads the lower half of the family alone.
    for family in [*{families:?}, 1 << 30, (1 << 32) + 16]:
        made += [] if refused(call, family, 2, 0) and refused(call | {x32}, family, 2, 0) else [family]
",
        sockets = [libc::SYS_socket, libc::SYS_socketpair],
    );
    (program, "assert made == [], made".to_owned())
}

#[test]
fn a_program_has_no_io_uring_no_keys_and_no_odd_sockets() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    let (program, test) = kernel_calls_are_refused();
    passes(&reward, &program, &test);
    // What programs use still works.
    let usual = "
import asyncio, socket, subprocess
a, b = socket.socketpair()
a.send(b'x')
read = b.recv(1)
for family in (socket.AF_UNIX, socket.AF_INET):
    socket.socket(family).close()
try:
    socket.socket(socket.AF_INET6).close()
except OSError as error:
    assert not isinstance(error, PermissionError)
slept = asyncio.run(asyncio.sleep(0, 'slept'))
said = subprocess.run(['echo', 'said'], capture_output=True, text=True).stdout
";
    passes(
        &reward,
        usual,
        "assert (read, slept, said) == (b'x', 'slept', 'said\\n')",
    );
}

/// Each would read the end key before the test does, from the pipe that the driver reads.
#[test]
fn what_a_program_leaves_running_does_not_see_its_test() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    let thief = "
import os, threading
def piece(number):
    size, data = int(os.read(number, 16)), b''
    while len(data) < size:
        data += os.read(number, size - len(data))
    return data
def steal():
    sink, source = sorted(int(n) for n in os.listdir('/proc/self/fd') if 64 <= int(n) < 256)[:2]
    piece(source)
    end = piece(source) + b'1'
    os.write(sink, b'%016d' % len(end) + end)
";
    for start in [
        "threading.Thread(target=steal, daemon=True).start()",
        "
if os.fork() == 0:
    steal()
    os._exit(0)",
        "
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        steal()
    os._exit(0)
os.wait()",
    ] {
        fails(&reward, &format!("{thief}{start}"), "assert False");
    }
    // What has ended, and what the test starts, changes nothing.
    let program = "
import concurrent.futures, os, subprocess, threading
thread = threading.Thread(target=os.getpid)
thread.start()
thread.join()
subprocess.run(['true'])
pool = concurrent.futures.ThreadPoolExecutor(4)
def f(x):
    return sum(pool.map(int, range(x)))";
    passes(&reward, program, "assert f(4) == 6");
}

/// Each would write the marker before its test, if it found the driver's pipes or their key.
#[test]
fn the_variables_of_the_driver_are_out_of_reach() {
    let Some(reward) = small(NEVER, json!({})) else {
        return;
    };
    let forge = "
import os
def forge(numbers, keys=(b'',)):
    for number in numbers:
        for key in keys:
            try:
                os.write(number, b'%016d' % len(key) + key)
            except OSError:
                pass
";
    for search in [
        "import sys\nframe = sys._getframe(1)\nforge(v for v in frame.f_locals.values() if type(v) is int)",
        "
import sys
frame, ints, keys = sys._getframe(), set(), set()
while frame:
    for values in (frame.f_locals, frame.f_globals):
        for value in list(values.values()):
            for inner in [value] + [c.cell_contents for c in getattr(value, '__closure__', None) or ()]:
                ints |= {inner} if type(inner) is int else set()
                keys |= {inner} if type(inner) is bytes else set()
    frame = frame.f_back
forge(ints, keys)",
        "
import gc
ints, keys = set(), set()
for value in gc.get_objects():
    for cell in getattr(value, '__closure__', None) or ():
        try:
            inner = cell.cell_contents
        except ValueError:
            continue
        ints |= {inner} if type(inner) is int else set()
        keys |= {inner} if type(inner) is bytes else set()
forge(ints, keys)",
        "forge([int(n) for n in os.listdir('/proc/self/fd') if int(n) > 2], [b'0' * 16])",
        "open(f'/proc/{os.getppid()}/fd/1', 'w').write('passed')",
        "data = open(f'/proc/{os.getppid()}/mem', 'rb')",
        "open('ast.py', 'w').write('import os\\nos._exit(0)')",
    ] {
        fails(&reward, &format!("{forge}{search}"), "assert False");
    }
    // So are those of the frames that call the program from the test.
    let search = "
import sys
def f(x):
    frame, ints, keys = sys._getframe(), set(), set()
    while frame:
        for value in list(frame.f_locals.values()):
            ints |= {value} if type(value) is int else set()
            keys |= {value + b'1'} if type(value) is bytes else set()
        frame = frame.f_back
    forge(ints, keys)
    return 0";
    fails(&reward, &format!("{forge}{search}"), "assert f(2) == 4");
    // A trace would see the variables of what follows the program.
    for hook in ["settrace", "setprofile"] {
        let program = format!(
            "
import sys
seen = []
def trace(frame, event, value):
    seen.append(frame.f_code.co_name)
    return trace
sys._getframe(1).f_trace = trace
sys.{hook}(trace)"
        );
        passes(
            &reward,
            &program,
            "assert 'last' not in seen and 'receive' not in seen",
        );
    }
}

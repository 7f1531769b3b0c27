//! Machines and users that have less than this one.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use candle_grpo_test_support::is_long;
use serde_json::json;

use super::hostile::{kernel_calls_are_refused, reads_of_parents};
use super::{NEVER, is_isolated, score, with_options};

pub(super) const PART: &str = "CANDLE_GRPO_TEST_CODE";

/// Runs tests in a process with fewer rights. Returns `None` if that cannot start, and false if a
/// test fails or no test has such a name.
pub(super) fn again(launcher: &[&str], tests: &[&str], part: &str) -> Option<bool> {
    let (name, arguments) = launcher.split_first().unwrap();
    let trial = Command::new(name)
        .args(arguments)
        .arg("true")
        .stderr(Stdio::null())
        .status();
    if !trial.is_ok_and(|status| status.success()) {
        eprintln!("skipped: {launcher:?} does not work here");
        return None;
    }
    // Others can read a copy.
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("tests");
    #[cfg(unix)]
    std::fs::set_permissions(
        folder.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    install(
        &program,
        fs::read(std::env::current_exe().unwrap()).unwrap(),
    );
    let output = Command::new(name)
        .args(arguments)
        .arg(&program)
        .args(tests)
        .args(["--test-threads", "2", "--nocapture"])
        .current_dir("/")
        .env(PART, part)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    Some(output.status.success() && !text.contains("running 0 tests"))
}

/// Writes a file that all users can execute, below directories that are made.
///
/// Another process writes it: a file that this one writes could still be open in a program that
/// another test starts, and then it cannot be executed (ETXTBSY).
pub(super) fn install(path: &Path, content: impl AsRef<[u8]>) {
    let mut install = Command::new("install")
        .args(["-D", "-m", "755", "/dev/stdin"])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = install.stdin.take().unwrap();
    stdin.write_all(content.as_ref()).unwrap();
    drop(stdin);
    assert!(install.wait().unwrap().success());
}

/// Repeats tests as a user without rights. Root that drops its rights makes user namespaces, as
/// users do.
pub(super) fn again_as_user(tests: &[&str]) {
    if std::env::var_os(PART).is_some() || !is_isolated() {
        return;
    }
    let user = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups"];
    let works = [
        &user[..],
        &["unshare", "--user", "--map-root-user", "--mount"],
    ]
    .concat();
    // A system may deny it to users.
    if again(&works, &["no-such-test"], "").is_none() {
        return;
    }
    assert_ne!(again(&user, tests, "user"), Some(false));
}

#[test]
fn limits_hold_for_users_without_rights() {
    // One test of each limit that root has in another way.
    let few = [
        "hostile::the_number_of_processes",
        "hostile::files_are_limited",
        "hostile::there_is_no_network",
        "hostile::nothing_outlives",
        "hostile::a_program_has_no_rights",
        "hostile::a_program_has_no_io_uring",
        "hostile::a_program_reads_nothing",
        "hostile::a_program_that_mounts",
    ];
    let all = ["code_reward::hostile"];
    again_as_user(if is_long() { &all } else { &few });
}

/// In it no namespaces can be made.
pub(super) const WITHOUT_NAMESPACES: [&str; 6] = [
    "unshare",
    "--user",
    "--map-root-user",
    "sh",
    "-c",
    "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs \"$0\" \"$@\"",
];

/// The same, with the other rights of root, such as those over all processes.
const ROOT_WITHOUT_NAMESPACES: [&str; 6] = [
    "unshare",
    "--user",
    "--map-root-user",
    "sh",
    "-c",
    "echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-sys_admin --no-new-privs \"$0\" \"$@\"",
];

/// In it the number of namespaces cannot be set.
const WITH_FIXED_SETTINGS: [&str; 7] = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys && exec \"$0\" \"$@\"",
];

#[test]
fn programs_that_can_make_namespaces_are_not_isolated() {
    if std::env::var_os(PART).is_none() {
        let name = "code_reward::weak::programs_that_can_make_namespaces_are_not_isolated";
        assert_ne!(again(&WITH_FIXED_SETTINGS, &[name], "fixed"), Some(false));
        return;
    }
    if std::env::var(PART).unwrap() != "fixed" {
        return;
    }
    let reward = with_options(json!({})).unwrap();
    let lacks = reward.missing_isolation().unwrap();
    assert!(lacks.contains("namespaces"), "{lacks}");
    let strict = with_options(json!({"require_isolation": true}));
    let error = format!("{:#}", strict.err().unwrap());
    assert!(error.starts_with("require_isolation: true"), "{error}");
}

#[test]
fn without_namespaces_a_program_reads_nothing_of_its_parents() {
    if std::env::var_os(PART).is_none() {
        let name = "code_reward::weak::without_namespaces_a_program_reads_nothing_of_its_parents";
        for launcher in [WITHOUT_NAMESPACES, ROOT_WITHOUT_NAMESPACES] {
            assert_ne!(again(&launcher, &[name], "parents"), Some(false));
        }
        return;
    }
    if std::env::var(PART).unwrap() != "parents" {
        return;
    }
    let reward = with_options(json!({})).unwrap();
    let lacks = reward.missing_isolation().unwrap();
    assert!(lacks.contains("namespaces do not work here"), "{lacks}");
    let (program, test) = reads_of_parents();
    let found = format!("{program}\nprint(found == [])");
    // A kernel without Landlock is named.
    let expected = if lacks.contains("the environment and the memory of this process") {
        0.
    } else {
        1.
    };
    assert_eq!(score(&reward, &program, json!(test)), expected);
    let pair = json!([{"output": "True"}]);
    assert_eq!(score(&reward, &found, pair), expected);
    let moves = "import os\nos.mkdir('x')\nopen('y', 'w').close()\nos.rename('y', 'x/y')";
    assert_eq!(
        score(&reward, moves, json!("assert os.listdir('x') == ['y']")),
        1.
    );
}

#[test]
fn a_machine_without_namespaces_warns_and_keeps_other_limits() {
    if std::env::var_os(PART).is_none() {
        let name = "code_reward::weak::a_machine_without_namespaces_warns_and_keeps_other_limits";
        assert_ne!(again(&WITHOUT_NAMESPACES, &[name], "weak"), Some(false));
        return;
    }
    if std::env::var(PART).unwrap() != "weak" {
        return;
    }
    let error = with_options(json!({"require_isolation": true}))
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.starts_with("require_isolation: true, but programs are not isolated: "),
        "{error}"
    );
    let limits = json!({"cpu_seconds": 1, "time_seconds": NEVER, "memory_mib": 256, "output_bytes": 65536, "disk_mib": 8});
    let reward = with_options(json!({"limits": limits})).unwrap();
    let lacks = reward.missing_isolation().unwrap();
    assert!(
        lacks.contains("use the network") && lacks.contains("namespaces do not work here"),
        "{lacks}"
    );
    // A kernel without filters is named, and refuses nothing.
    let filters = !lacks.contains("io_uring");
    let right = "def f(n):\n    return n + 1";
    let (calls, refused) = kernel_calls_are_refused();
    for (program, test, expected) in [
        (
            calls.as_str(),
            refused.as_str(),
            if filters { 1. } else { 0. },
        ),
        (right, "assert f(1) == 2", 1.),
        (right, "assert f(1) == 3", 0.),
        ("while True:\n    pass", "assert True", 0.),
        ("x = bytearray(10 * 2**30)", "assert True", 0.),
        (
            "for _ in range(100):\n    print('x' * 65536)",
            "assert True",
            0.,
        ),
        ("open('x', 'wb').write(bytes(40 << 20))", "assert True", 0.),
        ("import os\nos._exit(0)", "assert True", 0.),
        (
            "import os, time\ndef f():\n    return os.fork() or time.sleep(6000)",
            "assert f()",
            1.,
        ),
        (
            "import os\nos.mkdir('x')\nopen('x/y', 'w').close()\nos.chmod('x', 0)",
            "assert True",
            1.,
        ),
    ] {
        assert_eq!(score(&reward, program, json!(test)), expected, "{program}");
    }
    let short = with_options(json!({"limits": {"time_seconds": 1}})).unwrap();
    let asleep = "import time\ntime.sleep(6000)";
    assert_eq!(score(&short, asleep, json!("assert True")), 0.);
    assert_eq!(
        score(
            &reward,
            "print(input())",
            json!([{"input": "a", "output": "a"}])
        ),
        1.
    );
}

//! Options, and programs in other languages.

use std::fs;

use candle_grpo_rewards::{CodeConfig, CodeReward};
use rstest::rstest;
use serde_json::{Value, json};

use super::{isolated, score};

#[test]
fn programs_of_another_language_pass_by_output_and_by_marker() {
    let Some(reward) = isolated(json!({
        "command": ["sh", "-e"],
        "report": "echo {marker}",
    })) else {
        return;
    };
    let square = "read n\necho $((n * n))";
    let pairs = json!([{"input": "3\n", "output": "9"}, {"input": "4\n", "output": "16"}]);
    assert_eq!(score(&reward, square, pairs.clone()), 1.);
    assert_eq!(score(&reward, "read n\necho 9", pairs), 0.);
    let function = "f() { echo $(($1 * $1)); }";
    for (program, expected) in [
        (function.to_owned(), 1.),
        (function.replace("* $1", "+ 1"), 0.),
        (format!("{function}\nexit 0"), 0.),
        ("f() { exit 0; }".to_owned(), 0.),
        ("echo {marker}; exit 0".to_owned(), 0.),
    ] {
        let score = score(
            &reward,
            &program,
            json!("test \"$(f 3)\" = 9\ntest \"$(f 2)\" = 4"),
        );
        assert_eq!(score, expected, "{program}");
    }
}

/// A script compiles the program, or stands for one that does.
#[test]
fn a_script_of_the_user_starts_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("wrapper.sh");
    fs::write(&script, "cp \"$1\" built\nsh built \"$2\"\n").unwrap();
    let Some(reward) = isolated(json!({
        "command": ["sh", script, "{file}", "argument"],
        "file": "main.x",
    })) else {
        return;
    };
    let tests = json!([{"output": "argument main.x built"}]);
    assert_eq!(
        score(
            &reward,
            "echo $1 $(ls)",
            json!([{"output": "argument built main.x"}])
        ),
        1.
    );
    assert_eq!(score(&reward, "echo $1 $(ls)", tests), 0.);
}

#[test]
fn visible_folders_can_be_read_and_not_written() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("data"), "7").unwrap();
    let path = folder.path().canonicalize().unwrap();
    // Programs have another user than root.
    #[cfg(unix)]
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let Some(reward) = isolated(json!({"visible": [path]})) else {
        return;
    };
    let read = format!("x = open('{}/data').read()", path.display());
    assert_eq!(score(&reward, &read, json!("assert x == '7'")), 1.);
    let write = format!("open('{}/new', 'w')", path.display());
    assert_eq!(score(&reward, &write, json!("assert True")), 0.);
    assert!(!path.join("new").exists());
}

#[rstest]
#[case(json!({"python": []}), "python: []")]
#[case(json!({"command": []}), "command: []")]
#[case(json!({"file": "../x"}), "file: \"../x\", must be a name without directories")]
#[case(json!({"report": "echo"}), "report: \"echo\", must contain {marker}")]
#[case(json!({"workers": 0}), "workers: 0")]
#[case(json!({"visible": ["/usr/share", "/tmp"]}), "visible: /tmp, must not contain /tmp")]
#[case(json!({"limits": {"time_seconds": 0}}), "limits.time_seconds: 0")]
#[case(json!({"limits": {"processes": 0}}), "limits.processes: 0")]
#[case(json!({"limits": {"memory_mib": 1u64 << 40}}), "limits.memory_mib: 1099511627776")]
fn an_option_that_is_not_valid_is_named(#[case] options: Value, #[case] words: &str) {
    let config: CodeConfig = serde_json::from_value(options).unwrap();
    let error = format!("{:#}", config.validate().unwrap_err());
    assert!(error.starts_with(words), "{error}");
}

#[rstest]
#[case(json!({"python": ["no-such-python"]}), "no-such-python")]
#[case(json!({"python": ["false"]}), "must start Python 3.6 or newer")]
#[case(json!({"command": ["no-such-program"]}), "must be a program that exists in PATH")]
#[case(json!({"command": ["sh", "no-such-script.sh"]}), "must be a file that exists")]
fn a_missing_program_is_an_error_at_the_start(#[case] options: Value, #[case] words: &str) {
    let config = serde_json::from_value(options).unwrap();
    let error = CodeReward::new(config)
        .err()
        .map(|error| format!("{error:#}"));
    assert!(
        error.as_ref().is_some_and(|error| error.contains(words)),
        "{error:?}"
    );
}

#[test]
fn assertions_in_another_language_need_a_report() {
    let config = json!({"command": ["sh"]});
    let config: CodeConfig = serde_json::from_value(config).unwrap();
    let error = config
        .check_row(&json!({"tests": "test 1 = 1"}))
        .unwrap_err();
    assert!(
        error.to_string().contains("need the key \"report\""),
        "{error}"
    );
    config
        .check_row(&json!({"tests": [{"output": "1"}]}))
        .unwrap();
}

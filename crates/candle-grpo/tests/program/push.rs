//! Uploads to the hub.

use std::fs;
use std::path::Path;
use std::process::Output;

use candle_grpo::train::RunDir;
use candle_grpo_test_support::{FakeHub, Reply};

use crate::support::{CONFIG, command, folder, said, succeeds};

const TOKEN: &str = "hf_secret";

/// Runs `grpo push` with a token.
fn push(hub: &FakeHub, folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    let mut command = command(folder, &[&["push"][..], arguments].concat());
    hub.set_environment(&mut command, &folder.join("hf"));
    command.env("HF_TOKEN", TOKEN);
    command.envs(variables.iter().copied()).output().unwrap()
}

fn assert_fails(output: &Output, code: i32, words: &str) {
    assert_eq!(output.status.code(), Some(code), "{}", said(output));
    assert!(
        said(output).contains(words),
        "{words:?} in {}",
        said(output)
    );
    assert!(!said(output).contains(TOKEN));
}

/// Files beside the run, of which an upload leaves none.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != "hf").collect();
    names.sort();
    names
}

#[test]
fn push_uploads_the_best_checkpoint_with_a_card_and_continues_after_a_failure() {
    let folder = folder(&CONFIG.replace("max_steps: 12", "max_steps: 3"));
    let path = folder.path();
    succeeds(path, &["train", "run.yaml"]);
    let before = names(path);
    let hub = FakeHub::start(None);

    // Without the commit, the weights are on the hub already.
    hub.set_refusal(|request| {
        request
            .path()
            .contains("/commit/")
            .then(|| Reply::new(403, ""))
    });
    let output = push(&hub, path, &["run", "org/policy"], &[]);
    assert_fails(&output, 1, "org/policy: the commit: the token in HF_TOKEN");
    hub.set_refusal(|_| None);
    let output = push(&hub, path, &["run", "org/policy"], &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    let commit = hub.change_repository(0, |r| r.commit().to_owned());
    let last = format!("{}/org/policy: commit {commit}, private\n", hub.url());
    assert!(printed.ends_with(&last), "{printed}");
    assert!(
        printed.contains("\nmodel.safetensors: 0.0 MB, on the hub already\n"),
        "{printed}"
    );
    assert!(printed.contains("\nREADME.md: 0.0 MB\n"), "{printed}");
    assert_eq!(hub.storage.requests().len(), 1);
    assert_eq!(names(path), before);

    succeeds(path, &["convert", "run", "converted"]);
    let mut found = hub.change_repository(0, |r| r.files("main").clone());
    assert_eq!(found.remove(".gitattributes"), Some(Vec::new()));
    let converted = names(&path.join("converted"));
    assert_eq!(
        found.keys().collect::<Vec<_>>(),
        converted.iter().collect::<Vec<_>>()
    );
    for (name, bytes) in &found {
        assert!(
            *bytes == fs::read(path.join("converted").join(name)).unwrap(),
            "{name}"
        );
    }
    let best = RunDir::best_checkpoint(&path.join("run")).unwrap().unwrap();
    assert!(found["model.safetensors"] == fs::read(best.path.join("model.safetensors")).unwrap());

    // A model folder is uploaded as it is, with other files in it.
    fs::write(path.join("model/notes.txt"), "mine").unwrap();
    let branch = ["model", "org/policy", "--revision", "start", "--quiet"];
    let output = push(&hub, path, &branch, &[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let files = hub.change_repository(0, |r| r.files("start").clone());
    assert_eq!(files["notes.txt"], b"mine");
    assert!(files["model.safetensors"] == fs::read(path.join("model/model.safetensors")).unwrap());

    // A run that has lost a file is no model folder, although it has a config.json.
    fs::remove_file(path.join("run/metrics.jsonl")).unwrap();
    let sent = hub.api.requests().len();
    let output = push(&hub, path, &["run", "org/policy"], &[]);
    assert_fails(&output, 5, "the run has lost metrics.jsonl");
    assert_eq!(hub.api.requests().len(), sent);
}

#[test]
fn push_checks_its_arguments_before_it_converts_or_asks() {
    let folder = folder(CONFIG);
    let hub = FakeHub::start(None);
    fs::create_dir(folder.path().join("empty")).unwrap();
    let fails = |arguments: &[&str], variables: &[(&str, &str)], code: i32, words: &str| {
        assert_fails(
            &push(&hub, folder.path(), arguments, variables),
            code,
            words,
        );
    };
    let model = ["model", "org/policy"];
    fails(&["model", "policy"], &[], 3, "policy: must be ORG/NAME");
    fails(
        &["model", "org/policy@v1"],
        &[],
        3,
        "org/policy@v1: must be ORG/NAME",
    );
    fails(
        &["model", "org/policy", "--revision", "a..b"],
        &[],
        3,
        "revision: \"a..b\"",
    );
    fails(
        &["model", "org/policy", "--merge"],
        &[],
        3,
        "is uploaded as it is",
    );
    fails(
        &["absent", "org/policy"],
        &[],
        5,
        "absent: there is no such directory",
    );
    fails(&["run.yaml", "org/policy"], &[], 5, "run.yaml: is a file");
    fails(
        &["empty", "org/policy"],
        &[],
        5,
        "empty: has neither config.json",
    );
    fails(&model, &[("HF_TOKEN", "")], 3, "set HF_TOKEN, or log in");
    fails(
        &model,
        &[("HF_HUB_OFFLINE", "1")],
        3,
        "HF_HUB_OFFLINE forbids uploads",
    );
    assert!(hub.api.requests().is_empty());
}

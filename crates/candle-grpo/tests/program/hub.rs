//! Hub models and data.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use candle_core::{DType, Device};
use candle_grpo::nn::Parameters;
use candle_grpo::train::Pretrained;
use candle_grpo_test_support::{FakeHub, HubRepository, Reply};
use serde_json::{Value, json};

use crate::models::write_reward_model;
use crate::support::{CONFIG, command, folder, lines, model, said};

type Files = Vec<(&'static str, Vec<u8>)>;

const MODEL_FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// A folder with a configuration that names hub models and data, and the hub.
struct Test {
    folder: tempfile::TempDir,
    hub: FakeHub,
}

fn read(folder: &Path, names: &[&'static str]) -> Files {
    let read = |name: &&'static str| (*name, fs::read(folder.join(name)).unwrap());
    names.iter().map(read).collect()
}

impl Test {
    fn new(config: &str) -> Self {
        let config = config.replace("model: model", "model: org/policy").replace(
            "train: data.jsonl",
            "train: hf://datasets/org/rows/d/data.jsonl",
        );
        let folder = folder(&config);
        let path = folder.path();
        let policy = read(&path.join("model"), &MODEL_FILES);
        let rows = fs::read(path.join("data.jsonl")).unwrap();
        fs::remove_dir_all(path.join("model")).unwrap();
        fs::remove_file(path.join("data.jsonl")).unwrap();
        Self {
            hub: FakeHub::start([
                HubRepository::new("org/policy", policy),
                HubRepository::new("datasets/org/rows", [("d/data.jsonl", rows)]),
                HubRepository::new("org/reward", reward_model()),
            ]),
            folder,
        }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = command(self.path(), arguments);
        if arguments.first() == Some(&"sample") {
            command.args(["--max-new-tokens", "4"]);
        }
        let home = self.path().join("hf");
        self.hub.set_environment(&mut command, &home);
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn succeeds(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn offline(&self, arguments: &[&str]) -> Output {
        let mut command = self.command(arguments);
        command
            .env("HF_HUB_OFFLINE", "1")
            .env("HF_ENDPOINT", "http://127.0.0.1:9");
        command.output().unwrap()
    }

    fn commit(&self, index: usize) -> String {
        self.hub.change_repository(index, |r| r.commit().to_owned())
    }

    /// Returns the model's files in `blobs`, complete or partial.
    fn blobs(&self) -> Vec<PathBuf> {
        let blobs = self.path().join("hf/hub/models--org--policy/blobs");
        let entries = fs::read_dir(blobs).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }

    fn has_part(&self) -> bool {
        let blobs = self.blobs();
        blobs
            .iter()
            .any(|path| path.to_string_lossy().contains("incomplete"))
    }

    fn weights(&self) -> PathBuf {
        let snapshots = self.path().join("hf/hub/models--org--policy/snapshots");
        snapshots.join(self.commit(0)).join("model.safetensors")
    }

    /// Changes the configuration.
    fn change(&self, from: &str, to: &str) {
        let path = self.path().join("run.yaml");
        let config = fs::read_to_string(&path).unwrap();
        assert!(config.contains(from), "{from}");
        fs::write(path, config.replace(from, to)).unwrap();
    }
}

/// The files for a reward model with the policy's tokenizer.
fn reward_model() -> Files {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("reward");
    write_reward_model(&path, "abcde");
    read(
        &path,
        &["config.json", "model.safetensors", "tokenizer.json"],
    )
}

/// The policy's files with other weights.
fn other_policy() -> Files {
    let folder = folder("");
    let path = folder.path().join("model");
    let pretrained = Pretrained::load(&path, &Device::Cpu).unwrap();
    let parameters = Parameters::init(&model(), 4, &Device::Cpu).unwrap();
    pretrained.with_parameters(parameters).save(&path).unwrap();
    read(&path, &MODEL_FILES)
}

fn assert_fails(output: &Output, code: i32, words: &[&str]) {
    assert_eq!(output.status.code(), Some(code), "{}", said(output));
    for words in words {
        assert!(
            said(output).contains(words),
            "{words:?} in {}",
            said(output)
        );
    }
}

#[test]
fn a_run_records_the_commits_and_resumes_with_them() {
    let test = Test::new(&CONFIG.replace("max_steps: 12", "max_steps: 4"));
    test.succeeds(&["train", "run.yaml"]);
    let commits = || -> Value {
        let inputs = fs::read(test.path().join("run/inputs.json")).unwrap();
        serde_json::from_slice::<Value>(&inputs).unwrap()["hub"].clone()
    };
    let expected = json!({"org/policy": test.commit(0), "datasets/org/rows": test.commit(1)});
    assert_eq!(commits(), expected);
    let settings: Value =
        serde_json::from_slice(&fs::read(test.path().join("run/config.json")).unwrap()).unwrap();
    assert_eq!(settings["model"]["path"], "org/policy");
    assert_eq!(
        settings["data"]["train"],
        json!(["hf://datasets/org/rows/d/data.jsonl"])
    );

    // Both branches move. The run keeps its commits, also with an empty cache.
    test.hub.change_repository(0, |r| r.push(other_policy()));
    test.hub.change_repository(1, |r| {
        r.push([("d/data.jsonl", b"{\"prompt\": \"a\"}\n".to_vec())])
    });
    fs::remove_dir_all(test.path().join("hf")).unwrap();
    test.change("max_steps: 4", "max_steps: 6");
    let output = test.run(&["train", "run.yaml", "--resume"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let warnings = said(&output);
    let warnings: Vec<_> = warnings
        .lines()
        .filter(|line| line.contains("WARN"))
        .collect();
    assert!(
        matches!(warnings.as_slice(), [line] if line.contains("max_steps")),
        "{warnings:?}"
    );
    assert_eq!(lines(&test.path().join("run/metrics.jsonl")).len(), 6);
    assert_eq!(commits(), expected);

    // A new run takes the commits of now.
    let output = test.run(&["train", "run.yaml", "--replace"]);
    assert_fails(
        &output,
        3,
        &["data.held_out_rows: 4, must be less than the 1 rows"],
    );
    // Another name is another model.
    test.change(
        "model: org/policy",
        &format!("model: org/policy@{}", test.commit(0)),
    );
    test.change("max_steps: 6", "max_steps: 7");
    let output = test.run(&["train", "run.yaml", "--resume"]);
    assert_fails(&output, 1, &["the model has other weights"]);
}

#[test]
fn check_downloads_no_weights_and_lists_them() {
    let test = Test::new(&CONFIG.replace(
        "rewards: [{kind: regex, pattern: '^[ab]'}]",
        "rewards: [{kind: reward_model, path: org/reward}]",
    ));
    let printed = test.succeeds(&["check", "--all", "run.yaml"]);
    for words in [
        format!("org/policy: commit {}.", test.commit(0)),
        format!("datasets/org/rows: commit {}.", test.commit(1)),
        "org/policy: the weights are not in the cache and were not checked; 0.0 MB in 1 file to download.".to_owned(),
        "org/reward: the weights are not in the cache".to_owned(),
        "path: org/policy".to_owned(),
        "path: org/reward".to_owned(),
    ] {
        assert!(printed.contains(&words), "{words:?} in {printed}");
    }
    assert!(!test.weights().exists());
    assert_eq!(test.hub.storage.requests(), []);
    assert_fails(
        &test.offline(&["check", "run.yaml"]),
        3,
        &["run.yaml:2: model: ", "HF_HUB_OFFLINE"],
    );

    test.succeeds(&["train", "run.yaml", "--quiet"]);
    let checked = test.offline(&["check", "run.yaml"]);
    assert_eq!(checked.status.code(), Some(0), "{}", said(&checked));
    assert!(!String::from_utf8_lossy(&checked.stdout).contains("not in the cache"));
    // Files of reward models have names that do not depend on the place of the cache.
    let inputs: Value =
        serde_json::from_slice(&fs::read(test.path().join("run/inputs.json")).unwrap()).unwrap();
    assert!(
        inputs["reward_files"]["org/reward/model.safetensors"].is_string(),
        "{inputs}"
    );

    // Weights in the cache are checked.
    let files = model_files_with_wrong_weights();
    test.hub.change_repository(0, |r| r.push(files));
    let printed = test.succeeds(&["check", "--all", "run.yaml"]);
    assert!(printed.contains("not in the cache"), "{printed}");
    test.run(&["sample", "org/policy", "a"]);
    assert_fails(&test.run(&["check", "run.yaml"]), 5, &["loading"]);
}

#[test]
fn an_error_of_a_reward_model_on_the_hub_names_its_key() {
    let test = Test::new(&CONFIG.replace(
        "rewards: [{kind: regex, pattern: '^[ab]'}]",
        "rewards: [{kind: ensemble, judges: [{kind: reward_model, path: org/absent}]}]",
    ));
    assert_fails(
        &test.run(&["check", "run.yaml"]),
        3,
        &["rewards[0].judges[0].path: ", "org/absent"],
    );
}

fn model_files_with_wrong_weights() -> Files {
    let mut files = other_policy();
    for (name, bytes) in &mut files {
        if *name == "model.safetensors" {
            bytes.truncate(bytes.len() / 2);
        }
    }
    files
}

#[test]
fn a_gguf_file_of_a_repository_is_a_model() {
    let test = Test::new(CONFIG);
    let policy = test.path().join("policy");
    test.succeeds(&["convert", "org/policy", "policy"]);
    let pretrained = Pretrained::load(&policy, &Device::Cpu).unwrap();
    assert_eq!(pretrained.parameters.dtype(), DType::F32);
    // The tokenizer of the test cannot be written to a GGUF file, so the file is not read.
    test.hub
        .change_repository(0, |r| r.push([("m.gguf", b"GGUF".to_vec())]));
    test.change("model: org/policy", "model: org/policy/m.gguf");
    let printed = test.succeeds(&["check", "--all", "run.yaml"]);
    assert!(
        printed.contains("org/policy/m.gguf: the weights are not in the cache"),
        "{printed}"
    );
    assert_fails(
        &test.run(&["sample", "org/policy/m.gguf", "a"]),
        5,
        &["m.gguf"],
    );
    assert_fails(
        &test.run(&["sample", "org/policy", "a"]),
        5,
        &["has no config.json; it has GGUF files, one of which the name must end in: m.gguf"],
    );
}

#[test]
fn names_are_models_of_every_command_and_paths_come_first() {
    let test = Test::new(CONFIG);
    let sampled = test.succeeds(&["sample", "org/policy", "ab", "--quiet", "--seed", "1"]);
    assert!(test.weights().is_file());
    let offline = test.offline(&["sample", "org/policy@main", "ab", "--quiet", "--seed", "1"]);
    assert_eq!(String::from_utf8_lossy(&offline.stdout), sampled);
    let metrics = test.succeeds(&["eval", "run.yaml", "--quiet", "--model", "hf://org/policy"]);
    assert!(metrics.contains("reward_mean"), "{metrics}");
    fs::create_dir_all(test.path().join("org/policy")).unwrap();
    let output = test.run(&["sample", "org/policy", "ab"]);
    assert_fails(&output, 5, &["loading org/policy"]);
}

#[test]
fn errors_have_the_line_of_the_name() {
    let test = Test::new(CONFIG);
    let sample = |name: &str| test.run(&["sample", name, "a"]);
    assert_fails(
        &sample("org/other"),
        5,
        &["org/other: there is no such file or directory, and http://127.0.0.1"],
    );
    assert_fails(
        &sample("hf://nothing"),
        5,
        &["hf://nothing: must be hf://ORG/NAME"],
    );
    assert_fails(
        &test.offline(&["sample", "org/policy", "a"]),
        5,
        &["`hf download org/policy`"],
    );
    test.change("model: org/policy", "model: org/policy@v9");
    for command in ["check", "train", "eval"] {
        let output = test.run(&[command, "run.yaml"]);
        assert_fails(
            &output,
            3,
            &["run.yaml:2: model: org/policy@v9: has no revision v9"],
        );
    }
    test.change("model: org/policy@v9", "model: org/policy");
    test.change("d/data.jsonl", "d/rows.jsonl");
    let output = test.run(&["train", "run.yaml"]);
    assert_fails(
        &output,
        3,
        &[
            "run.yaml:3: data.train: ",
            "has no file d/rows.jsonl; it has d/data.jsonl",
        ],
    );
    assert!(!test.path().join("run").exists());
}

#[test]
fn data_without_the_prefix_are_a_path() {
    let test = Test::new(CONFIG);
    test.change("hf://datasets/org/rows/d/data.jsonl", "data/train.jsonl");
    let output = test.run(&["train", "run.yaml"]);
    assert_fails(&output, 4, &["reading data/train.jsonl"]);
}

#[test]
fn a_wrong_variable_is_named() {
    let test = Test::new(CONFIG);
    let output = test
        .command(&["sample", "org/policy", "a"])
        .env("HF_ENDPOINT", "hub")
        .output();
    assert_fails(
        &output.unwrap(),
        5,
        &["HF_ENDPOINT: \"hub\", must be an address"],
    );
}

#[test]
fn a_program_that_is_killed_in_a_download_leaves_nothing_that_counts() {
    let test = Test::new(CONFIG);
    test.hub.set_change(|request, reply| {
        if request.target.contains("signature") {
            reply.held()
        } else {
            reply
        }
    });
    let mut child = test
        .command(&["sample", "org/policy", "a"])
        .spawn()
        .unwrap();
    test.hub.storage.wait_until_held(1);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(test.has_part());
    assert!(!test.weights().exists());
    assert_fails(
        &test.offline(&["sample", "org/policy", "a"]),
        5,
        &["HF_HUB_OFFLINE"],
    );
    test.hub.storage.release();
    test.hub.set_change(|_, reply| reply);
    test.succeeds(&["sample", "org/policy", "a"]);
    assert!(!test.has_part());
    assert!(test.weights().is_file());
}

#[cfg(unix)]
#[test]
fn a_download_can_be_interrupted() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    let test = Test::new(CONFIG);
    test.hub.set_change(|request, reply| {
        if request.target.contains("signature") {
            Reply::new(503, "").with_header("retry-after", 3600)
        } else {
            reply
        }
    });
    let mut command = test.command(&["train", "run.yaml"]);
    let child = command
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    test.hub
        .storage
        .wait_for_requests(|requests| !requests.is_empty());
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_fails(&output, 7, &["interrupted", "hub cache"]);
    assert!(!test.has_part() && !test.weights().exists() && !test.path().join("run").exists());
}

/// A file size limit stands for a full disk.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_and_leaves_no_part() {
    let test = Test::new(CONFIG);
    let weights = vec![1; 200_000];
    let mut files = other_policy();
    files
        .iter_mut()
        .find(|(name, _)| *name == "model.safetensors")
        .unwrap()
        .1 = weights;
    test.hub.change_repository(0, |r| r.push(files));
    let grpo = test.command(&[]);
    let mut command = Command::new("sh");
    let script = format!(
        "trap '' XFSZ; ulimit -f 100; exec {} sample org/policy a",
        grpo.get_program().to_str().unwrap()
    );
    command.args(["-c", &script]).current_dir(test.path());
    for (name, value) in grpo.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.output().unwrap();
    assert_fails(
        &output,
        1,
        &["writing model.safetensors (200000 bytes)", "HF_HUB_CACHE"],
    );
    assert!(!test.has_part() && !test.weights().exists());
}

//! The program on several ranks that `mpirun` starts. `scripts/test-mpi` runs these tests.

#[path = "program/support.rs"]
mod support;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor, safetensors};
use candle_grpo::train::RunDir;
use candle_grpo_test_support::{FakeHub, HubRepository};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use support::{CONFIG, folder, lines, said, succeeds};

/// The limit on the time in which a job ends after one of its ranks.
const BOUND: Duration = Duration::from_secs(120);

/// One job at a time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A larger epsilon than usual, so that updates do not depend on the rounding of small gradients.
fn config(steps: usize) -> String {
    CONFIG
        .replace("max_steps: 12", &format!("max_steps: {steps}"))
        .replace("learning_rate: 3e-3", "learning_rate: 3e-3, epsilon: 1e-3")
}

fn command(folder: &Path, ranks: usize, arguments: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command
        .args(["-n", &ranks.to_string(), "--oversubscribe"])
        .arg(env!("CARGO_BIN_EXE_grpo"))
        .args(arguments)
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn start(folder: &Path, ranks: usize, arguments: &[&str]) -> Child {
    let child = command(folder, ranks, arguments).spawn();
    child.expect("mpirun; scripts/mpi prints the environment")
}

fn job(folder: &Path, ranks: usize, arguments: &[&str]) -> Output {
    start(folder, ranks, arguments).wait_with_output().unwrap()
}

fn job_succeeds(folder: &Path, ranks: usize, arguments: &[&str]) -> String {
    let output = job(folder, ranks, arguments);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn checkpoint(folder: &Path, steps: usize) -> PathBuf {
    RunDir::checkpoints(&folder.join("run")).path(steps)
}

fn tensors(path: &Path) -> HashMap<String, Vec<f64>> {
    let tensors = safetensors::load(path, &Device::Cpu).unwrap();
    let values = |x: Tensor| x.to_dtype(DType::F64)?.flatten_all()?.to_vec1();
    let tensors = tensors.into_iter();
    tensors
        .map(|(name, x)| (name, values(x).unwrap()))
        .collect()
}

fn assert_close(found: &Value, expected: &Value, path: &str) {
    match (found, expected) {
        (Value::Object(found), Value::Object(expected)) => {
            let names = |map: &serde_json::Map<String, Value>| map.keys().cloned().collect();
            let (found_names, names): (Vec<String>, Vec<String>) = (names(found), names(expected));
            assert_eq!(found_names, names, "{path}");
            for (name, found) in found {
                assert_close(found, &expected[name], &format!("{path}/{name}"));
            }
        }
        _ => match (found.as_f64(), expected.as_f64()) {
            (Some(a), Some(b)) => {
                assert!(
                    (a - b).abs() <= 1e-4 * (1. + b.abs()),
                    "{path}: {a}, must be {b}"
                );
            }
            _ => assert_eq!(found, expected, "{path}"),
        },
    }
}

#[test]
fn the_first_rank_downloads_a_model_of_the_hub() {
    let _turn = turn();
    let folder = folder(&config(2).replace("model: model", "model: org/policy"));
    let path = folder.path();
    let files = ["config.json", "model.safetensors", "tokenizer.json"];
    let read = |name: &'static str| (name, fs::read(path.join("model").join(name)).unwrap());
    let hub = FakeHub::start([HubRepository::new("org/policy", files.map(read))]);
    let train = || {
        let mut command = command(path, 3, &["train", "run.yaml"]);
        hub.set_environment(&mut command, &path.join("hf"));
        command.output().unwrap()
    };
    let output = train();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert_eq!(lines(&path.join("run/metrics.jsonl")).len(), 2);
    assert_eq!(hub.storage.requests().len(), 1);
    // Rank 0 finds the error, and the others do not wait for it.
    fs::remove_dir_all(path.join("run")).unwrap();
    let wrong = config(2).replace("model: model", "model: org/policy@v9");
    fs::write(path.join("run.yaml"), wrong).unwrap();
    let output = train();
    assert_ne!(output.status.code(), Some(0));
    let words = "error of rank 0: run.yaml:2: model: org/policy@v9: has no revision v9";
    assert!(said(&output).contains(words), "{}", said(&output));
}

#[test]
fn two_and_four_ranks_train_as_one_process() {
    let _turn = turn();
    for algorithm in [
        "",
        "  preset: gspo\n",
        "  preset: dapo\n",
        "  preset: lite_ppo\n",
        "  whiten_advantages: true\n",
        "  recipe: {policy_loss: {surrogate: {kl_cov: {ratio: 0.1}}}}\n",
    ] {
        let config = config(5).replace("algorithm:\n", &format!("algorithm:\n{algorithm}"));
        let alone = folder(&config);
        succeeds(alone.path(), &["train", "run.yaml"]);
        for (ranks, sharded) in [(2, false), (4, true)] {
            let shared = folder(&format!(
                "{config}training: {{sharded_optimizer: {sharded}}}\n"
            ));
            let printed = job_succeeds(shared.path(), ranks, &["train", "run.yaml"]);
            // Rank 0 alone prints and writes.
            assert_eq!(printed.matches("\nstep ").count(), 5, "{printed}");
            for name in ["metrics.jsonl", "evaluations.jsonl"] {
                let of = |folder: &Path| lines(&folder.join("run").join(name));
                let (found, expected) = (of(shared.path()), of(alone.path()));
                assert_eq!(found.len(), expected.len(), "{name}");
                for (found, expected) in found.iter().zip(&expected) {
                    assert_close(found, expected, name);
                }
            }
            let samples = |folder: &Path| lines(&folder.join("run/samples.jsonl"));
            assert_eq!(samples(shared.path())[..16], samples(alone.path())[..16]);
            for name in ["model.safetensors", "optimizer.safetensors"] {
                let of = |folder: &Path| tensors(&checkpoint(folder, 5).join(name));
                let (found, expected) = (of(shared.path()), of(alone.path()));
                assert_eq!(found.len(), expected.len(), "{name}");
                for (tensor, expected) in &expected {
                    for (a, b) in found[tensor].iter().zip(expected) {
                        let close = (a - b).abs() <= 2e-5 * (1. + b.abs());
                        assert!(close, "{name}: {tensor}: {a}, must be {b}");
                    }
                }
            }
        }
    }
}

/// The processes of the program in `folder`.
fn ranks_in(folder: &Path) -> Vec<i32> {
    let folder = folder.canonicalize().unwrap();
    let processes = fs::read_dir("/proc").unwrap();
    let ids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    ids.filter(|id: &i32| {
        let link = |name: &str| fs::read_link(format!("/proc/{id}/{name}")).ok();
        link("cwd") == Some(folder.clone())
            && link("exe").is_some_and(|exe| exe == Path::new(env!("CARGO_BIN_EXE_grpo")))
    })
    .collect()
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < BOUND, "{what}");
        sleep(Duration::from_millis(5));
    }
}

/// Waits for the end of a job within the bound. Nothing of it is left.
fn ended(mut job: Child, folder: &Path) -> Output {
    let begun = Instant::now();
    while job.try_wait().unwrap().is_none() {
        if begun.elapsed() > BOUND {
            job.kill().unwrap();
            panic!("the job goes on without one of its ranks");
        }
        sleep(Duration::from_millis(5));
    }
    wait_until("a rank is left", || ranks_in(folder).is_empty());
    job.wait_with_output().unwrap()
}

#[test]
fn a_job_whose_ranks_are_killed_twenty_times_ends_bit_identical() {
    let _turn = turn();
    let set_steps = |folder: &Path, steps: usize| {
        let config = config(steps) + "training: {sharded_optimizer: true}\n";
        fs::write(folder.join("run.yaml"), config).unwrap();
    };
    let (killed, whole) = (folder(""), folder(""));
    set_steps(killed.path(), 1_000_000);
    let checkpoints = || RunDir::checkpoints(&killed.path().join("run"));
    for i in 0..20 {
        let job = start(killed.path(), 2, &["train", "run.yaml", "--resume", "-q"]);
        wait_until("the ranks do not start", || {
            ranks_in(killed.path()).len() == 2
        });
        // At the start, between checkpoints, and while they are written.
        sleep(Duration::from_millis(i * 97));
        // A slow machine needs more time for the first one.
        let has_checkpoint = || checkpoints().latest().is_ok_and(|l| l.checkpoint.is_some());
        wait_until("no checkpoint is made", || i < 19 || has_checkpoint());
        let ids = ranks_in(killed.path());
        let id = ids[i as usize % ids.len()];
        kill(Pid::from_raw(id), Signal::SIGKILL).unwrap();
        let output = ended(job, killed.path());
        assert!(!output.status.success(), "{}", said(&output));
    }
    let latest = checkpoints().latest().unwrap();
    assert!(latest.damaged.is_empty(), "{:?}", latest.damaged);
    let steps = latest.checkpoint.unwrap().step + 4;
    for (folder, how) in [(&killed, "--resume"), (&whole, "--replace")] {
        set_steps(folder.path(), steps);
        job_succeeds(folder.path(), 2, &["train", "run.yaml", how]);
    }
    for name in ["metrics.jsonl", "evaluations.jsonl", "samples.jsonl"] {
        let of = |folder: &Path| lines(&folder.join("run").join(name));
        assert_eq!(of(killed.path()), of(whole.path()), "{name}");
    }
    for name in ["model.safetensors", "optimizer.safetensors", "trainer.json"] {
        let of = |folder: &Path| fs::read(checkpoint(folder, steps).join(name)).unwrap();
        assert!(of(killed.path()) == of(whole.path()), "{name}");
    }
    // On another number of ranks, and in one process.
    set_steps(whole.path(), steps + 2);
    job_succeeds(whole.path(), 4, &["train", "run.yaml", "--resume"]);
    set_steps(whole.path(), steps + 4);
    succeeds(whole.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(
        lines(&whole.path().join("run/metrics.jsonl")).len(),
        steps + 4
    );
}

#[test]
fn a_request_to_stop_one_rank_saves_and_stops_all() {
    let _turn = turn();
    let stopped = folder(&config(1_000_000).replace("every_steps: 3", "every_steps: 1000000"));
    let job = start(stopped.path(), 2, &["train", "run.yaml"]);
    let steps = || fs::read_to_string(stopped.path().join("run/metrics.jsonl"));
    wait_until("no step was made", || {
        steps().unwrap_or_default().lines().count() > 1
    });
    let ids = ranks_in(stopped.path());
    kill(Pid::from_raw(ids[1]), Signal::SIGINT).unwrap();
    let output = ended(job, stopped.path());
    assert_eq!(output.status.code(), Some(7), "{}", said(&output));
    assert_eq!(said(&output).matches("to go on: grpo train").count(), 1);
    let run = stopped.path().join("run");
    let latest = RunDir::checkpoints(&run).latest().unwrap().checkpoint;
    assert_eq!(
        latest.unwrap().step,
        lines(&run.join("metrics.jsonl")).len()
    );
}

#[test]
fn an_error_of_one_rank_ends_the_job_with_its_exit_code() {
    let _turn = turn();
    let folder = folder(&config(2));
    job_succeeds(folder.path(), 2, &["train", "run.yaml"]);
    let output = ended(
        start(folder.path(), 2, &["train", "run.yaml"]),
        folder.path(),
    );
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(
        said(&output).contains("error of rank 0: run directory run: exists already"),
        "{}",
        said(&output)
    );
}

#[test]
fn check_says_which_ranks_there_are() {
    let _turn = turn();
    let folder = folder(&config(2));
    let printed = job_succeeds(folder.path(), 2, &["check", "run.yaml"]);
    assert_eq!(printed.matches("# Rank 0 of 2").count(), 1, "{printed}");
    assert_eq!(printed.matches("# Rank ").count(), 1, "{printed}");
}

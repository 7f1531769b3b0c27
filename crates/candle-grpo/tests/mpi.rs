//! The program on several ranks that `mpirun` starts. `scripts/test-mpi` runs these tests.

#[path = "program/close.rs"]
mod close;
#[path = "program/running.rs"]
#[allow(dead_code, reason = "the tests of the program need more of it")]
mod running;
#[path = "program/support.rs"]
#[allow(dead_code, reason = "the tests of the program need more of it")]
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_grpo::train::RunDir;
use candle_grpo_test_support::{FakeHub, HubRepository, Lines, cases};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rstest::rstest;

use close::assert_close_runs;
use running::Running;
use support::{CONFIG, folder, lines, said, succeeds, without};

/// One job at a time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A larger epsilon than usual, so that updates do not depend on rounding in small gradients.
fn config(steps: usize) -> String {
    CONFIG
        .replace("max_steps: 12", &format!("max_steps: {steps}"))
        .replace("learning_rate: 3e-3", "learning_rate: 3e-3, epsilon: 1e-3")
}

fn command(folder: &Path, ranks: usize, arguments: &[&str]) -> Command {
    let program = [env!("CARGO_BIN_EXE_grpo")];
    launched(folder, ranks, &[&program[..], arguments].concat())
}

/// `mpirun` with `words` as each rank's command.
fn launched(folder: &Path, ranks: usize, words: &[&str]) -> Command {
    let mut command = Command::new("mpirun");
    command
        .args(["-n", &ranks.to_string(), "--oversubscribe"])
        .args(words)
        .current_dir(folder)
        .stdin(Stdio::null());
    command
}

fn job(folder: &Path, ranks: usize, arguments: &[&str]) -> Output {
    let output = command(folder, ranks, arguments).output();
    output.expect("mpirun; scripts/mpi prints the environment")
}

/// A job that a test follows.
struct Job {
    mpirun: Running,
    /// The ranks' process ids.
    ids: Vec<i32>,
    /// A pipe that each rank has open.
    ranks: Lines,
}

impl Job {
    /// Starts a job, and waits until each rank begins.
    fn start(folder: &Path, ranks: usize, arguments: &[&str]) -> Self {
        let pipes = tempfile::tempdir().unwrap();
        let pipe = pipes.path().join("ranks");
        let lines = Lines::of_named_pipe(&pipe);
        let script = "exec 3> \"$0\"; echo $$ >&3; exec \"$@\"";
        let shell = ["sh", "-c", script, pipe.to_str().unwrap()];
        let words = [&shell[..], &[env!("CARGO_BIN_EXE_grpo")], arguments].concat();
        let mpirun = Running::start(launched(folder, ranks, &words));
        Self {
            mpirun,
            ids: (0..ranks).map(|_| lines.line().parse().unwrap()).collect(),
            ranks: lines,
        }
    }

    fn signal(&self, rank: usize, signal: Signal) {
        kill(Pid::from_raw(self.ids[rank]), signal).unwrap();
    }

    /// Waits until the job and each rank end. Returns the job's status and stderr.
    fn end(self) -> (ExitStatus, String) {
        self.ranks.wait_for_end();
        self.mpirun.end()
    }
}

fn job_succeeds(folder: &Path, ranks: usize, arguments: &[&str]) -> String {
    let output = job(folder, ranks, arguments);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn checkpoint(folder: &Path, steps: usize) -> PathBuf {
    RunDir::checkpoints(&folder.join("run")).path(steps)
}

/// Asserts that the checkpoints after these steps are byte for byte the same.
fn assert_same_checkpoints(found: &Path, expected: &Path, steps: usize) {
    for name in ["model.safetensors", "optimizer.safetensors", "trainer.json"] {
        let of = |folder: &Path| fs::read(checkpoint(folder, steps).join(name)).unwrap();
        assert!(of(found) == of(expected), "{name}");
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

/// `config` with one more key or several, each on its line.
fn with(config: &str, keys: &str) -> String {
    format!("{config}{keys}\n")
}

#[rstest]
#[case::grpo("recipe: {policy_loss: {kl: {coef: 0.01}}}")]
#[case::gspo("preset: gspo")]
#[case::dapo("preset: dapo")]
#[case::lite_ppo("preset: lite_ppo")]
#[case::whitened_advantages("preset: reinforce_plus_plus_baseline")]
#[case::tokens_of_all_ranks("recipe: {policy_loss: {surrogate: {kl_cov: {ratio: 0.1}}}}")]
fn ranks_train_as_one_process(#[case] algorithm: &str) {
    let _turn = turn();
    let config = with(&without(&config(5), "recipe"), algorithm);
    let alone = folder(&config);
    succeeds(alone.path(), &["train", "run.yaml"]);
    for (ranks, keys) in [
        (2, "sharding: none"),
        (4, "sharding: optimizer"),
        (3, "sharding: resident"),
        (2, "sharding: full"),
        (5, "sharding: full"),
        (2, "sequence_ranks: 2"),
        (4, "sequence_ranks: 2\nsharding: resident"),
    ] {
        let shared = folder(&with(&config, keys));
        let printed = job_succeeds(shared.path(), ranks, &["train", "run.yaml"]);
        // Rank 0 alone prints and writes.
        assert_eq!(printed.matches("\nstep ").count(), 5, "{printed}");
        assert_close_runs(&shared.path().join("run"), &alone.path().join("run"), 5);
        let samples = |folder: &Path| lines(&folder.join("run/samples.jsonl"));
        assert_eq!(samples(shared.path())[..16], samples(alone.path())[..16]);
    }
}

/// Each rank has one micro-batch in an update, so all sum gradients in the same order. In bf16,
/// ranks that divide the f32 weights compute with rounded ones.
#[rstest]
#[case::f32("f32", &["optimizer", "resident", "full"])]
#[case::bf16("bf16", &["resident", "full"])]
fn what_ranks_divide_does_not_change_the_bits(
    #[case] dtype: &str,
    #[case] shardings: &[&str],
    #[values(2, 3, 5)] ranks: usize,
) {
    let _turn = turn();
    let runs = shardings.iter().map(|sharding| {
        let keys = format!("compute_dtype: {dtype}\nsharding: {sharding}");
        let folder = folder(&with(&config(4), &keys));
        job_succeeds(folder.path(), ranks, &["train", "run.yaml"]);
        folder
    });
    let runs: Vec<_> = runs.collect();
    let metrics = |folder: &Path| lines(&folder.join("run/metrics.jsonl"));
    for (run, sharding) in runs.iter().zip(shardings).skip(1) {
        let (found, expected) = (run.path(), runs[0].path());
        assert_eq!(metrics(found), metrics(expected), "{sharding}");
        assert_same_checkpoints(found, expected, 4);
    }
}

/// The only update of the step follows forward passes, whose tokens have the bits of one rank.
/// Gradients differ by the rounding of sums.
#[rstest]
fn metrics_of_a_team_have_the_bits_of_one_rank(#[values(2, 4)] ranks: usize) {
    let _turn = turn();
    let (alone, team) = (folder(&config(1)), folder(""));
    succeeds(alone.path(), &["train", "run.yaml"]);
    let keys = format!("sequence_ranks: {ranks}");
    fs::write(team.path().join("run.yaml"), with(&config(1), &keys)).unwrap();
    job_succeeds(team.path(), ranks, &["train", "run.yaml"]);
    let metrics = |folder: &Path| {
        let mut metrics = lines(&folder.join("run/metrics.jsonl")).remove(0);
        metrics
            .as_object_mut()
            .unwrap()
            .remove("grad_norm")
            .unwrap();
        metrics
    };
    let expected = metrics(alone.path());
    assert!(expected["kl"].is_number(), "{expected}");
    assert_eq!(metrics(team.path()), expected);
}

/// Ranks, and what they divide.
type Division<'a> = (usize, &'a str);

#[rstest]
#[case::a_divided_optimizer("f32", (2, "sharding: optimizer"), (4, "sharding: optimizer"))]
#[case::divided_weights("bf16", (2, "sharding: resident"), (3, "sharding: full"))]
#[case::all_weights("bf16", (2, "sharding: full"), (4, "sequence_ranks: 2\nsharding: resident"))]
#[case::teams("f32", (4, "sequence_ranks: 2\nsharding: resident"), (3, "sharding: full"))]
fn a_job_whose_ranks_are_killed_again_and_again_ends_bit_identical(
    #[case] dtype: &str,
    #[case] (ranks, keys): Division,
    #[case] (other_ranks, other_keys): Division,
) {
    let _turn = turn();
    let set = |folder: &Path, steps: usize, keys: &str| {
        let config = with(&config(steps), &format!("compute_dtype: {dtype}\n{keys}"));
        fs::write(folder.join("run.yaml"), config).unwrap();
    };
    let (killed, whole) = (folder(""), folder(""));
    set(killed.path(), 1_000_000, keys);
    let checkpoints = || RunDir::checkpoints(&killed.path().join("run"));
    for i in 0..cases(10, 40) as usize {
        let job = Job::start(killed.path(), ranks, &["train", "run.yaml", "--resume"]);
        match i % 5 {
            // Before the ranks have met.
            0 => {}
            // Before the first step.
            1 => drop(job.mpirun.lines.line()),
            // Between checkpoints.
            2 => drop(job.mpirun.step()),
            // While rank 0 writes a checkpoint, which follows the third step.
            3 => while !job.mpirun.step().is_multiple_of(3) {},
            // After a checkpoint of this job.
            _ => {
                let first = job.mpirun.step();
                while job.mpirun.step() <= first + 3 {}
            }
        }
        job.signal([0, ranks - 1][i / 5 % 2], Signal::SIGKILL);
        let (status, errors) = job.end();
        assert!(!status.success(), "{errors}");
    }
    let latest = checkpoints().latest().unwrap();
    assert!(latest.damaged.is_empty(), "{:?}", latest.damaged);
    let steps = latest.checkpoint.unwrap().step + 4;
    for (folder, how) in [(&killed, "--resume"), (&whole, "--replace")] {
        set(folder.path(), steps, keys);
        job_succeeds(folder.path(), ranks, &["train", "run.yaml", how]);
    }
    for name in ["metrics.jsonl", "evaluations.jsonl", "samples.jsonl"] {
        let of = |folder: &Path| lines(&folder.join("run").join(name));
        assert_eq!(of(killed.path()), of(whole.path()), "{name}");
    }
    assert_same_checkpoints(killed.path(), whole.path(), steps);
    // On another number of ranks that divide other things, and in one process.
    set(whole.path(), steps + 2, other_keys);
    job_succeeds(
        whole.path(),
        other_ranks,
        &["train", "run.yaml", "--resume"],
    );
    set(whole.path(), steps + 4, "sharding: none");
    succeeds(whole.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(
        lines(&whole.path().join("run/metrics.jsonl")).len(),
        steps + 4
    );
}

/// In bf16, where ranks divide the f32 weights.
#[rstest]
#[case::divided_weights((2, "sharding: resident"))]
#[case::all_weights((3, "sharding: full"))]
#[case::teams((4, "sequence_ranks: 2"))]
fn what_ranks_divide_and_their_number_change_between_jobs(#[case] first: Division) {
    let _turn = turn();
    let train = |folder: &Path, steps: usize, (ranks, keys): Division| {
        let config = with(&config(steps), &format!("compute_dtype: bf16\n{keys}"));
        fs::write(folder.join("run.yaml"), config).unwrap();
        job_succeeds(folder, ranks, &["train", "run.yaml", "--resume"]);
    };
    let (changed, whole) = (folder(""), folder(""));
    for steps in [2, 4, 6] {
        train(changed.path(), steps, first);
    }
    train(whole.path(), 6, first);
    assert_same_checkpoints(changed.path(), whole.path(), 6);
    for (steps, division) in [
        (7, (5, "sharding: full")),
        (8, (3, "sharding: optimizer")),
        (9, (2, "sequence_ranks: 2\nsharding: resident")),
        (10, (2, "sharding: full")),
        (11, (1, "sharding: none")),
    ] {
        train(changed.path(), steps, division);
    }
    assert_eq!(lines(&changed.path().join("run/metrics.jsonl")).len(), 11);
}

#[test]
fn a_request_to_stop_one_rank_saves_and_stops_all() {
    let _turn = turn();
    let stopped = folder(&config(1_000_000).replace("every_steps: 3", "every_steps: 1000000"));
    let job = Job::start(stopped.path(), 2, &["train", "run.yaml"]);
    while job.mpirun.step() < 2 {}
    job.signal(1, Signal::SIGINT);
    let (status, errors) = job.end();
    assert_eq!(status.code(), Some(7), "{errors}");
    assert_eq!(errors.matches("to continue: grpo train").count(), 1);
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
    let (status, errors) = Job::start(folder.path(), 2, &["train", "run.yaml"]).end();
    assert_eq!(status.code(), Some(1), "{errors}");
    let words = "error of rank 0: run directory run: exists already";
    assert!(errors.contains(words), "{errors}");
}

#[test]
fn check_says_which_ranks_there_are() {
    let _turn = turn();
    let folder = folder(&config(2));
    let printed = job_succeeds(folder.path(), 2, &["check", "run.yaml"]);
    assert_eq!(printed.matches("Rank 0 of 2").count(), 1, "{printed}");
    assert_eq!(printed.matches("Rank ").count(), 1, "{printed}");
}

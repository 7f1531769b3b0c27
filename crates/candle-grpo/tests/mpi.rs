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
use support::{CONFIG, folder, lines, said, succeeds};

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
        for (ranks, sharding) in [(2, "none"), (4, "optimizer"), (3, "resident")] {
            let shared = folder(&format!("{config}training: {{sharding: {sharding}}}\n"));
            let printed = job_succeeds(shared.path(), ranks, &["train", "run.yaml"]);
            // Rank 0 alone prints and writes.
            assert_eq!(printed.matches("\nstep ").count(), 5, "{printed}");
            assert_close_runs(&shared.path().join("run"), &alone.path().join("run"), 5);
            let samples = |folder: &Path| lines(&folder.join("run/samples.jsonl"));
            assert_eq!(samples(shared.path())[..16], samples(alone.path())[..16]);
        }
    }
}

#[rstest]
#[case::a_divided_optimizer("sharding: optimizer")]
#[case::divided_weights("sharding: resident, compute_dtype: bf16")]
#[case::all_weights("sharding: full, compute_dtype: bf16")]
fn a_job_whose_ranks_are_killed_again_and_again_ends_bit_identical(#[case] training: &str) {
    let _turn = turn();
    let set_steps = |folder: &Path, steps: usize| {
        let config = config(steps) + &format!("training: {{{training}}}\n");
        fs::write(folder.join("run.yaml"), config).unwrap();
    };
    let (killed, whole) = (folder(""), folder(""));
    set_steps(killed.path(), 1_000_000);
    let checkpoints = || RunDir::checkpoints(&killed.path().join("run"));
    for i in 0..cases(10, 40) as usize {
        let job = Job::start(killed.path(), 2, &["train", "run.yaml", "--resume"]);
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
        job.signal(i / 5 % 2, Signal::SIGKILL);
        let (status, errors) = job.end();
        assert!(!status.success(), "{errors}");
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

/// In bf16, where ranks divide the f32 weights.
#[test]
fn what_ranks_divide_and_their_number_change_between_jobs() {
    let _turn = turn();
    let write = |folder: &Path, steps: usize, sharding: &str| {
        let keys = format!("training: {{sharding: {sharding}, compute_dtype: bf16}}\n");
        fs::write(folder.join("run.yaml"), config(steps) + &keys).unwrap();
    };
    let (changed, whole) = (folder(""), folder(""));
    for steps in [2, 4, 6] {
        write(changed.path(), steps, "resident");
        job_succeeds(changed.path(), 2, &["train", "run.yaml", "--resume"]);
    }
    write(whole.path(), 6, "resident");
    job_succeeds(whole.path(), 2, &["train", "run.yaml", "--replace"]);
    for name in ["model.safetensors", "optimizer.safetensors", "trainer.json"] {
        let of = |folder: &Path| fs::read(checkpoint(folder, 6).join(name)).unwrap();
        assert!(of(changed.path()) == of(whole.path()), "{name}");
    }
    for (steps, ranks, sharding) in [(7, 5, "resident"), (8, 3, "optimizer"), (9, 2, "resident")] {
        write(changed.path(), steps, sharding);
        job_succeeds(changed.path(), ranks, &["train", "run.yaml", "--resume"]);
    }
    write(changed.path(), 10, "none");
    succeeds(changed.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(lines(&changed.path().join("run/metrics.jsonl")).len(), 10);
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

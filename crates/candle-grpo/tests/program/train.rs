//! `grpo train`, from a model and prompts to a trained model, however often it is stopped.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use candle_grpo::train::RunDir;
use candle_grpo_test_support::{Lines, cases};
use rstest::rstest;
use serde_json::{Value, json};

use crate::models::write_reward_model;
use crate::running::Running;
use crate::support::{
    CONFIG, command, folder, grpo, lines, said, short_config, succeeds, write_model,
};

/// Asserts that two runs have the same files, however often each was stopped.
pub(crate) fn assert_same_run(folder: &Path, other: &Path, steps: usize) {
    for name in [
        "metrics.jsonl",
        "evaluations.jsonl",
        "samples.jsonl",
        "rollouts.jsonl",
    ] {
        let of = |folder: &Path| lines(&folder.join("run").join(name));
        assert_eq!(of(folder), of(other), "{name}");
    }
    let last = format!("run/checkpoints/step-{steps:06}");
    for name in ["model.safetensors", "optimizer.safetensors", "trainer.json"] {
        let of = |folder: &Path| fs::read(folder.join(&last).join(name)).unwrap();
        assert!(of(folder) == of(other), "{name}");
    }
}

#[test]
fn the_line_of_a_step_without_an_update_has_the_reason() {
    let config = CONFIG.replace("max_steps: 12", "max_steps: 1");
    let filters = "sample_filters: [{kind: shorter_than, length: 1}]\n";
    let folder = folder(&(config + filters));
    let printed = succeeds(folder.path(), &["train", "run.yaml"]);
    let reason = "all 16 completions filtered (shorter_than)";
    assert!(
        printed.contains(&format!("  no update: {reason}")),
        "{printed}"
    );
    let step = &lines(&folder.path().join("run/metrics.jsonl"))[0];
    assert_eq!(step["skip_reason"], reason);
    assert_eq!(step["updates"], 0);
}

#[test]
fn a_run_prints_each_alarm_when_it_begins() {
    // No completion has a digit.
    let config = short_config(3).replace("'^[ab]'", "'[0-9]'") + "alarms: {constant_rewards: 2}\n";
    let folder = folder(&config);
    let train = |arguments: &[&str]| {
        let output = grpo(folder.path(), &[&["train", "run.yaml"], arguments].concat());
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        said(&output)
    };
    let text = "step 2: all rewards have been 0 for 2 steps";
    let printed = train(&[]);
    assert_eq!(printed.matches(text).count(), 1, "{printed}");
    assert_eq!(printed.matches("(alarms.").count(), 1, "{printed}");
    // A resumed run counts on.
    let longer = config.replace("max_steps: 3", "max_steps: 5");
    fs::write(folder.path().join("run.yaml"), longer).unwrap();
    let printed = train(&["--resume"]);
    assert!(!printed.contains("(alarms."), "{printed}");
    let steps = lines(&folder.path().join("run/metrics.jsonl"));
    let found: Vec<Value> = steps.iter().map(|step| step["alarms"].clone()).collect();
    let counted = |n: f64| json!({"constant_rewards": n});
    let expected = [
        Value::Null,
        counted(2.),
        counted(3.),
        counted(4.),
        counted(5.),
    ];
    assert_eq!(found, expected);
}

#[test]
fn a_run_writes_files_for_every_other_command() {
    let folder = folder(CONFIG);
    let run = folder.path().join("run");
    let printed = succeeds(folder.path(), &["train", "run.yaml"]);
    assert_eq!(printed.matches("\nstep ").count(), 12, "{printed}");
    assert!(printed.contains("held out, after 0 steps:  pass_at_1 0."));
    assert_eq!(lines(&run.join("metrics.jsonl")).len(), 12);
    let evaluations = lines(&run.join("evaluations.jsonl"));
    let steps: Vec<_> = evaluations.iter().map(|line| &line["step"]).collect();
    assert_eq!(steps, [0, 4, 8, 12]);
    assert_eq!(lines(&run.join("samples.jsonl")).len(), 4 * 16);
    let rollouts = lines(&run.join("rollouts.jsonl"));
    let steps: Vec<_> = rollouts
        .iter()
        .map(|line| line["step"].as_u64().unwrap())
        .collect();
    // Four groups of four completions of steps 1 and 10.
    assert_eq!(steps, [[1; 16], [10; 16]].concat());
    let kept = RunDir::checkpoints(&run).all().unwrap();
    let kept: Vec<usize> = kept.iter().map(|checkpoint| checkpoint.step).collect();
    assert!(kept.ends_with(&[9, 12]) && kept.len() <= 3, "{kept:?}");

    // What it has learned is there to be used.
    let last = "run/checkpoints/step-000012";
    let eval = [
        "eval",
        "run.yaml",
        "--model",
        last,
        "--out",
        "answers.jsonl",
    ];
    let printed = succeeds(folder.path(), &eval);
    let reward = evaluations[3]["reward_mean"].as_f64().unwrap();
    assert!(
        printed.contains(&format!("reward_mean          {reward:.4}")),
        "{printed}"
    );
    let answers = lines(&folder.path().join("answers.jsonl"));
    assert_eq!(answers.len(), 16);
    let sample = [
        "sample",
        last,
        "ab",
        "-n",
        "3",
        "--max-new-tokens",
        "4",
        "--json",
    ];
    let printed = succeeds(folder.path(), &sample);
    assert_eq!(printed.lines().count(), 3);
    let answer: Value = serde_json::from_str(printed.lines().next().unwrap()).unwrap();
    assert_eq!(
        answer["tokens"].as_array().unwrap().len(),
        answer["log_probs"].as_array().unwrap().len()
    );
    succeeds(folder.path(), &["convert", last, "converted"]);
    assert!(folder.path().join("converted/config.json").exists());
    succeeds(folder.path(), &["report", "run"]);
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(
        page.contains("pass_at_1") || page.contains("pass@1"),
        "no evaluation in the page"
    );

    // It is not written over, and there is nothing left to do.
    let again = grpo(folder.path(), &["train", "run.yaml"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(said(&again).contains("run directory run: exists already: resume it (--resume)"));
    succeeds(folder.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(lines(&run.join("metrics.jsonl")).len(), 12);
}

/// The configuration trains with the folders that the example writes.
#[test]
fn the_example_of_a_reward_model_trains_a_policy() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/reward-model");
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("target");
    write_model(&target.join("reward-model-0-policy"), "abcdefgh");
    write_reward_model(&target.join("reward-model-0"), "abcdefgh");
    let data = folder.path().join("examples/reward-model");
    fs::create_dir_all(&data).unwrap();
    fs::copy(examples.join("prompts.jsonl"), data.join("prompts.jsonl")).unwrap();
    let config = fs::read_to_string(examples.join("run.yaml")).unwrap();
    assert!(config.contains("max_steps: 40"));
    let config = config.replace("max_steps: 40", "max_steps: 2");
    fs::write(folder.path().join("run.yaml"), config).unwrap();
    succeeds(folder.path(), &["train", "run.yaml"]);
    let steps = lines(&folder.path().join("runs/reward-model/metrics.jsonl"));
    assert_eq!(steps.len(), 2);
    for step in steps {
        assert!(step["reward_std"].as_f64().unwrap() > 0., "{step}");
    }
}

#[test]
fn training_raises_the_reward() {
    let config = CONFIG.replace("max_steps: 12", "max_steps: 60");
    let folder = folder(&config);
    succeeds(folder.path(), &["train", "run.yaml"]);
    let evaluations = lines(&folder.path().join("run/evaluations.jsonl"));
    let reward = |line: &Value| line["reward_mean"].as_f64().unwrap();
    let (first, last) = (reward(&evaluations[0]), reward(&evaluations[15]));
    assert!(last > first + 0.3, "from {first} to {last}");
}

fn start(folder: &Path) -> Running {
    Running::start(command(folder, &["train", "run.yaml", "--resume"]))
}

#[test]
fn a_run_that_is_killed_again_and_again_ends_bit_identical() {
    let (whole, killed) = (folder(CONFIG), folder(CONFIG));
    // It has no end while it is killed.
    let set_steps = |folder: &Path, steps: usize| {
        let config = CONFIG.replace("max_steps: 12", &format!("max_steps: {steps}"));
        fs::write(folder.join("run.yaml"), config).unwrap();
    };
    set_steps(killed.path(), 1_000_000);
    for i in 0..cases(10, 40) {
        let run = start(killed.path());
        match i % 5 {
            // Before its first line.
            0 => {}
            // Before its first step.
            1 => drop(run.lines.line()),
            // Between checkpoints.
            2 => drop(run.step()),
            // While it writes a checkpoint, which follows the third step.
            3 => while !run.step().is_multiple_of(3) {},
            // After a checkpoint of this process.
            _ => {
                let first = run.step();
                while run.step() <= first + 3 {}
            }
        }
        run.kill();
    }
    let run = killed.path().join("run");
    let latest = RunDir::checkpoints(&run).latest().unwrap();
    assert!(latest.damaged.is_empty(), "{:?}", latest.damaged);
    let steps = latest.checkpoint.expect("no checkpoint was made").step + 4;

    for (folder, how) in [(&killed, "--resume"), (&whole, "--replace")] {
        set_steps(folder.path(), steps);
        succeeds(folder.path(), &["train", "run.yaml", how]);
    }
    assert_same_run(killed.path(), whole.path(), steps);
    let checkpoints = fs::read_dir(run.join("checkpoints")).unwrap();
    for entry in checkpoints {
        let name = entry.unwrap().file_name();
        assert!(name.to_string_lossy().starts_with("step-"), "{name:?}");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_saves_and_prints_how_to_resume() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    let set_steps = |folder: &Path, steps: usize| {
        let config = CONFIG.replace("every_steps: 3", "every_steps: 1000000");
        let config = config.replace("max_steps: 12", &format!("max_steps: {steps}"));
        fs::write(folder.join("run.yaml"), config).unwrap();
    };
    let (whole, stopped) = (folder(CONFIG), folder(CONFIG));
    // It would not end by itself.
    set_steps(stopped.path(), 1_000_000);
    let child = start(stopped.path());
    let run = stopped.path().join("run");
    while child.step() < 2 {}
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let (status, errors) = child.end();
    assert_eq!(status.code(), Some(7), "{errors}");
    for words in [
        "stopping; press Ctrl-C again to stop without saving",
        "to continue: grpo train run.yaml --resume",
    ] {
        assert!(errors.contains(words), "{errors}");
    }
    let latest = RunDir::checkpoints(&run).latest().unwrap();
    let steps = latest.checkpoint.expect("nothing was saved").step + 3;
    for (folder, how) in [(&stopped, "--resume"), (&whole, "--replace")] {
        set_steps(folder.path(), steps);
        succeeds(folder.path(), &["train", "run.yaml", how]);
    }
    assert_same_run(stopped.path(), whole.path(), steps);
}

/// Starts a run, and sends it a signal after its first step.
#[cfg(unix)]
fn signaled(command: Command, signal: nix::sys::signal::Signal) -> Running {
    let run = Running::start(command);
    run.step();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(run.id() as i32), signal).unwrap();
    run
}

#[cfg(unix)]
#[test]
fn the_end_of_the_terminal_saves_like_a_request_to_terminate() {
    use nix::sys::signal::SigHandler::SigDfl;
    use nix::sys::signal::Signal::{SIGHUP, SIGTERM};

    // The program leaves SIGHUP ignored if it is, as under `nohup`.
    // SAFETY: no handler is installed.
    #[allow(unsafe_code)]
    unsafe { nix::sys::signal::signal(SIGHUP, SigDfl) }.unwrap();
    for signal in [SIGHUP, SIGTERM] {
        let folder = folder(&CONFIG.replace("max_steps: 12", "max_steps: 1000000"));
        let run = folder.path().join("run");
        let child = signaled(command(folder.path(), &["train", "run.yaml"]), signal);
        if signal == SIGHUP {
            // The shell and the system each send one.
            let again =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), signal);
            again.unwrap();
        }
        let (status, errors) = child.end();
        assert_eq!(status.code(), Some(7), "{errors}");
        assert!(
            RunDir::checkpoints(&run)
                .latest()
                .unwrap()
                .checkpoint
                .is_some()
        );
    }
}

// Libraries of MPI handle the signal before the program sees that it was ignored.
/// `nohup` starts a program this way.
#[cfg(all(unix, not(feature = "mpi")))]
#[test]
fn an_ignored_hangup_stays_ignored() {
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    let folder = folder(&CONFIG.replace("max_steps: 12", "max_steps: 1000000"));
    let mut shell = Command::new("sh");
    let script = "trap '' HUP; exec \"$0\" train run.yaml";
    shell.current_dir(folder.path());
    shell.args(["-c", script, env!("CARGO_BIN_EXE_grpo")]);
    let child = signaled(shell, Signal::SIGHUP);
    let before = child.step();
    while child.step() < before + 3 {}
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let (status, errors) = child.end();
    assert_eq!(status.code(), Some(7), "{errors}");
}

#[test]
fn a_damaged_checkpoint_is_skipped_with_a_warning() {
    let (whole, damaged) = (folder(CONFIG), folder(CONFIG));
    succeeds(whole.path(), &["train", "run.yaml"]);
    succeeds(damaged.path(), &["train", "run.yaml"]);
    let checkpoints = damaged.path().join("run/checkpoints");
    let file = checkpoints.join("step-000012/optimizer.safetensors");
    let mut file = File::options().write(true).open(file).unwrap();
    file.seek(SeekFrom::End(-3)).unwrap();
    file.write_all(&[0xff]).unwrap();
    let output = grpo(damaged.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    for words in [
        "run/checkpoints/step-000012: optimizer.safetensors: is damaged; it is skipped",
        "resuming from run/checkpoints/step-000009",
    ] {
        assert!(said(&output).contains(words), "{}", said(&output));
    }
    assert_same_run(damaged.path(), whole.path(), 12);

    for entry in fs::read_dir(&checkpoints).unwrap() {
        fs::write(entry.unwrap().path().join("trainer.json"), "{}").unwrap();
    }
    let output = grpo(damaged.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("the run has no other intact checkpoint"),
        "{}",
        said(&output)
    );
    assert_eq!(lines(&damaged.path().join("run/metrics.jsonl")).len(), 12);
}

/// It is removed, so it does not count as a kept checkpoint.
#[test]
fn a_checkpoint_after_a_damaged_one_is_kept() {
    let config = CONFIG.replace(
        "every_steps: 3",
        "every_steps: 4, keep: 2, keep_best: false",
    );
    let folder = folder(&config);
    let checkpoints = RunDir::checkpoints(&folder.path().join("run"));
    let steps = || -> Vec<usize> {
        let all = checkpoints.all().unwrap();
        all.iter().map(|checkpoint| checkpoint.step).collect()
    };
    succeeds(folder.path(), &["train", "run.yaml"]);
    assert_eq!(steps(), [8, 12]);
    let last = folder
        .path()
        .join("run/checkpoints/step-000012/trainer.json");
    fs::write(last, "{}").unwrap();
    fs::write(
        folder.path().join("run.yaml"),
        config.replace("max_steps: 12", "max_steps: 9"),
    )
    .unwrap();
    succeeds(folder.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(steps(), [8, 9]);
}

/// The best evaluation has a checkpoint at a step without a regular one.
#[test]
fn the_best_checkpoint_is_kept_and_used() {
    let config = CONFIG
        .replace("every_steps: 3", "every_steps: 100, keep: 1")
        .replace("max_steps: 12", "max_steps: 40");
    let folder = folder(&config);
    let run = folder.path().join("run");
    succeeds(folder.path(), &["train", "run.yaml"]);
    let evaluations = lines(&run.join("evaluations.jsonl"));
    let reward = |line: &Value| line["reward_mean"].as_f64().unwrap();
    let best = evaluations
        .iter()
        .rev()
        .max_by(|a, b| reward(a).total_cmp(&reward(b)))
        .unwrap();
    let step = best["step"].as_u64().unwrap() as usize;
    let kept = RunDir::checkpoints(&run).all().unwrap();
    let kept: Vec<usize> = kept.iter().map(|checkpoint| checkpoint.step).collect();
    let mut expected = vec![step, 40];
    expected.dedup();
    assert_eq!(kept, expected);
    assert_eq!(RunDir::best_checkpoint(&run).unwrap().unwrap().step, step);
    let printed = succeeds(folder.path(), &["eval", "run.yaml", "--model", "run"]);
    let expected = format!("reward_mean          {:.4}", reward(best));
    assert!(printed.contains(&expected), "{printed}");
}

/// `grpo train run.yaml | head -1` closes stdout.
#[test]
fn a_closed_stdout_does_not_end_a_run() {
    let folder = folder(CONFIG);
    let mut command = command(folder.path(), &["train", "run.yaml"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(lines(&folder.path().join("run/metrics.jsonl")).len(), 12);
}

#[test]
fn a_gradient_that_is_not_finite_ends_the_run() {
    // Gradients whose squares no f32 holds.
    let config = CONFIG.replace("recipe:", "preset: dr_grpo\nrecipe:");
    let folder = folder(&config.replace("'^[ab]'", "'^[ab]', weight: 1e30"));
    let output = grpo(folder.path(), &["train", "run.yaml"]);
    assert_eq!(output.status.code(), Some(6), "{}", said(&output));
    assert!(
        said(&output).contains("not finite, nothing was learned from it"),
        "{}",
        said(&output)
    );
}

#[test]
fn an_evaluation_has_at_most_max_prompts() {
    let config = CONFIG.replace("pass_at: [1, 2]", "pass_at: [1, 2], max_prompts: 3");
    let asked = folder(&config);
    let printed = succeeds(asked.path(), &["eval", "run.yaml"]);
    assert!(printed.contains("answers              12\n"), "{printed}");

    let none = folder(
        &CONFIG
            .replace(", held_out_rows: 4", "")
            .replace("every_steps: 4, ", "every_steps: null, "),
    );
    let output = grpo(none.path(), &["eval", "run.yaml"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    assert!(
        said(&output).contains("no held-out prompts"),
        "{}",
        said(&output)
    );
}

/// A program that saves at the end only leaves such a folder.
#[test]
fn a_run_folder_is_a_model_if_it_has_one_checkpoint() {
    let folder = folder(CONFIG);
    succeeds(folder.path(), &["train", "run.yaml"]);
    let run = folder.path().join("run");
    fs::rename(run.join("checkpoints/step-000012"), run.join("checkpoint")).unwrap();
    fs::remove_dir_all(run.join("checkpoints")).unwrap();
    let sample = ["sample", "run", "ab", "--max-new-tokens", "2", "--json"];
    assert_eq!(succeeds(folder.path(), &sample).lines().count(), 1);
    fs::remove_dir_all(run.join("checkpoint")).unwrap();
    let output = grpo(folder.path(), &sample);
    assert_eq!(output.status.code(), Some(5), "{}", said(&output));
    assert!(
        said(&output).contains("the run has no checkpoint"),
        "{}",
        said(&output)
    );
}

#[test]
fn a_second_program_cannot_open_a_run() {
    let folder = folder(&CONFIG.replace("max_steps: 12", "max_steps: 100000"));
    let first = start(folder.path());
    first.lines.line();
    for how in ["--resume", "--replace"] {
        let second = grpo(folder.path(), &["train", "run.yaml", how]);
        assert_eq!(second.status.code(), Some(1), "{}", said(&second));
        assert!(
            said(&second).contains("another program has the run open"),
            "{}",
            said(&second)
        );
    }
    first.kill();
}

#[test]
fn wrong_inputs_are_refused_before_the_folder_is_created() {
    let there = folder(CONFIG);
    let train = |from: &str, to: &str| {
        let config = CONFIG.replace(from, to);
        assert_ne!(config, CONFIG);
        fs::write(there.path().join("other.yaml"), config).unwrap();
        grpo(there.path(), &["train", "other.yaml"])
    };
    for (from, to, code, words) in [
        (
            "max_new_tokens: 6",
            "max_new_tokens: 22",
            3,
            "sampling.max_new_tokens: 22, must be at most 21",
        ),
        ("model: model", "model: run.yaml", 5, "run.yaml"),
        ("data.jsonl", "none.jsonl", 4, "none.jsonl"),
        ("kind: regex", "kind: regexp", 3, "regexp"),
    ] {
        let output = train(from, to);
        assert_eq!(output.status.code(), Some(code), "{}", said(&output));
        assert!(said(&output).contains(words), "{}", said(&output));
        assert!(!there.path().join("run").exists(), "{words}");
    }
    // Some prompts are left.
    let output = train("max_steps: 12", "max_steps: 12\nmax_prompt_tokens: 2");
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(
        said(&output).contains("prompts are dropped: they have more than 2 tokens"),
        "{}",
        said(&output)
    );
}

#[cfg(not(feature = "mpi"))]
#[test]
fn several_ranks_need_a_feature() {
    let folder = folder(CONFIG);
    let output = command(folder.path(), &["train", "run.yaml"])
        .envs([("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("WORLD_SIZE: 2, but this program was built without the feature"),
        "{}",
        said(&output)
    );
    assert!(!folder.path().join("run").exists());
}

/// Hangs with about one completion in a hundred, and reports it.
const HANGS: &str = r#"
import json, sys, time, zlib
for line in sys.stdin:
    sample = json.loads(line)
    text = sample["completion"]
    if zlib.crc32(text.encode()) % 100 == 11:
        with open("hangs", "a") as file:
            file.write(text + "\n")
        time.sleep(600)
    print(json.dumps({"id": sample["id"], "score": text[:1] in ("a", "b") and 1 or 0}), flush=True)
"#;

#[cfg(unix)]
#[rstest]
#[case("score", 1)]
#[case("exclude", 2)]
fn a_run_whose_reward_hangs_finishes_and_resumes_bit_identically(
    #[case] on_timeout: &str,
    #[case] workers: usize,
) {
    let reward = format!(
        "{{kind: program, command: [python3, reward.py], time_limit_seconds: 1, \
         on_timeout: {on_timeout}, timeout_score: -1, workers: {workers}}}"
    );
    let config = CONFIG
        .replace("{kind: regex, pattern: '^[ab]'}", &reward)
        .replace("max_steps: 12", "max_steps: 20");
    let (whole, killed) = (folder(&config), folder(&config));
    for folder in [&whole, &killed] {
        fs::write(folder.path().join("reward.py"), HANGS).unwrap();
    }
    succeeds(whole.path(), &["train", "run.yaml"]);
    let metrics = lines(&whole.path().join("run/metrics.jsonl"));
    assert_eq!(metrics.len(), 20);
    let count = |name: &str| -> u64 {
        let counts = metrics
            .iter()
            .map(|line| &line["reward_faults"]["program"][name]);
        counts.filter_map(Value::as_u64).sum()
    };
    let timeouts = count("timeouts");
    assert!((1..30).contains(&timeouts), "{timeouts} of 320");
    let excluded = if on_timeout == "exclude" { timeouts } else { 0 };
    assert_eq!((count("crashes"), count("excluded")), (0, excluded));

    // It is killed while its program hangs, after the first checkpoint.
    let hangs = Lines::of_named_pipe(&killed.path().join("hangs"));
    let run = start(killed.path());
    let checkpoints = RunDir::checkpoints(&killed.path().join("run"));
    let is_saved = || {
        checkpoints
            .latest()
            .is_ok_and(|latest| latest.checkpoint.is_some())
    };
    hangs.line();
    while !is_saved() {
        hangs.line();
    }
    run.kill();
    succeeds(killed.path(), &["train", "run.yaml", "--resume"]);
    assert_same_run(killed.path(), whole.path(), 20);
}

#[test]
fn an_evaluation_computes_in_the_dtype_of_the_run() {
    let folder = folder(&format!("{CONFIG}compute_dtype: bf16\n"));
    let folder = folder.path();
    succeeds(folder, &["train", "run.yaml", "--quiet"]);
    let model = "run/checkpoints/step-000012";
    let arguments = [
        "eval",
        "run.yaml",
        "--quiet",
        "--model",
        model,
        "--out",
        "answers.jsonl",
    ];
    succeeds(folder, &arguments);
    let mut of_run = lines(&folder.join("run/samples.jsonl"));
    of_run.retain(|line| line["step"] == 12);
    for line in &mut of_run {
        line.as_object_mut().unwrap().remove("step");
    }
    assert_eq!(lines(&folder.join("answers.jsonl")), of_run);
}

//! The program on GPUs: one process, and several ranks. Each run must match the CPU run.
//!
//! `scripts/cuda-test` runs these tests on emulated GPUs, which work only when the program waits
//! for them.

#[path = "program/close.rs"]
mod close;
#[path = "program/models.rs"]
#[allow(dead_code, reason = "the tests of the program need more of it")]
mod models;
#[path = "cuda/passes.rs"]
mod passes;
#[path = "program/running.rs"]
#[allow(dead_code, reason = "the tests of the program need more of it")]
mod running;
#[path = "program/support.rs"]
#[allow(dead_code, reason = "the tests of the program need more of it")]
mod support;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::Result;
use candle_core::Device;
use candle_grpo::config::RunConfig;
use candle_grpo::run::{Progress, RunPrompts, RunSession, Session, Start};
use candle_grpo::train::progress::NoProgress;
use candle_grpo::train::{Pretrained, RewardConfig};
use candle_grpo_test_support::{CudaCalls, ReservedPort, cuda};

use close::assert_close_runs;
use models::write_reward_model;
use running::Running;
use support::{command, folder, lines, write_long_model};

/// A reference, a teacher and a reward model beside the policy. `FOLDER` has the files.
const CONFIG: &str = "
model: FOLDER/model
teacher: {model: FOLDER/teacher}
data: {train: FOLDER/data.jsonl, held_out_rows: 2}
rewards: [{kind: regex, pattern: '^[ab]'}, {kind: reward_model, path: FOLDER/reward, weight: 0.5}]
prompts_per_step: 4
num_generations: 4
sampling: {max_new_tokens: 5}
recipe: {policy_loss: {kl: {coef: 0.01}, distillation: {coef: 0.1}}}
optimizer: {learning_rate: 3e-3, epsilon: 1e-3, memory: MEMORY}
sharding: SHARDING
evaluation: {every_steps: 2, samples_per_prompt: 2}
checkpoint: {every_steps: 1}
max_steps: STEPS
run_dir: FOLDER/RUN
threads: 1
";

/// Writes the models and prompts in [`CONFIG`].
fn inputs() -> tempfile::TempDir {
    let folder = folder("");
    write_long_model(&folder.path().join("teacher"), "abcde", 24, 4);
    write_reward_model(&folder.path().join("reward"), "abcde");
    folder
}

/// Writes [`CONFIG`] for the run directory `run`, with the optimizer in `memory`.
fn write_config(folder: &Path, run: &str, steps: usize, (sharding, memory): (&str, &str)) {
    let text = CONFIG
        .replace("FOLDER", folder.to_str().unwrap())
        .replace("SHARDING", sharding)
        .replace("MEMORY", memory)
        .replace("STEPS", &steps.to_string())
        .replace("RUN", run);
    fs::write(folder.join(format!("{run}.yaml")), text).unwrap();
}

/// Trains on the CPU, as the program does in a build without CUDA.
fn train_on_cpu(folder: &Path, steps: usize) -> Result<()> {
    write_config(folder, "cpu", steps, ("none", "device"));
    let config = RunConfig::read(&folder.join("cpu.yaml"))?;
    let pretrained = Pretrained::load(&config.model.path, &Device::Cpu)?;
    let (_, prompts) = RunPrompts::read(&config, &pretrained)?;
    let reward = RewardConfig::build(&config.rewards, &Device::Cpu)?;
    let progress = Arc::new(NoProgress);
    let mut session = Session::new(config, pretrained, prompts, reward, Start::New, progress)?;
    while session.advance()? != Progress::Finished {}
    Ok(())
}

/// The program on an emulated GPU that works only when a call waits for it.
fn lazy(folder: &Path, run: &str) -> Command {
    let mut command = command(folder, &["train", &format!("{run}.yaml"), "--resume"]);
    command.env("CUDA_ON_HOST_LAZY", "1").stdin(Stdio::null());
    command
}

/// Runs a job's ranks concurrently, with torchrun's variables.
fn run_ranks(commands: Vec<Command>) {
    let listening = ReservedPort::new();
    let world_size = commands.len();
    let start = |(rank, mut command): (usize, Command)| {
        let (rank, world_size) = (rank.to_string(), world_size.to_string());
        // Rank 0 listens at the port after this one.
        let port = (listening.number() - 1).to_string();
        command.envs([
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", &rank),
            ("WORLD_SIZE", &world_size),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port),
        ]);
        Running::start(command)
    };
    let running: Vec<Running> = commands.into_iter().enumerate().map(start).collect();
    let ended: Vec<_> = running.into_iter().map(Running::end).collect();
    for (rank, (status, errors)) in ended.iter().enumerate() {
        assert!(status.success(), "rank {rank}: {errors}");
    }
}

fn has_gpus(count: usize) -> bool {
    let has = CudaCalls::now().is_some()
        || candle_grpo::train::cuda_device_count().is_ok_and(|visible| visible >= count);
    if !has || cuda().is_err() {
        println!("skipped: fewer than {count} GPUs");
        return false;
    }
    true
}

#[test]
fn a_run_on_a_gpu_resumes_and_is_that_of_the_cpu() -> Result<()> {
    if !has_gpus(1) {
        return Ok(());
    }
    let inputs = inputs();
    let folder = inputs.path();
    train_on_cpu(folder, 4)?;
    for (steps, memory) in [(2, "device"), (4, "host")] {
        write_config(folder, "gpu", steps, ("none", memory));
        let (status, errors) = Running::start(lazy(folder, "gpu")).end();
        assert!(status.success(), "{errors}");
        assert_eq!(lines(&folder.join("gpu/metrics.jsonl")).len(), steps);
    }
    assert_close_runs(&folder.join("gpu"), &folder.join("cpu"), 4);
    Ok(())
}

#[test]
fn runs_of_several_gpus_resume_and_are_that_of_the_cpu() -> Result<()> {
    if !has_gpus(2) {
        return Ok(());
    }
    let inputs = inputs();
    let folder = inputs.path();
    train_on_cpu(folder, 3)?;
    for (run, sharding, memory, ranks, visible) in [
        ("whole", "none", "host", 2, "1"),
        ("sharded", "optimizer", "device", 2, "2"),
        ("divided", "resident", "host", 2, "2"),
        ("gathered", "full", "host", 2, "2"),
        ("gathered-by-four", "full", "device", 4, "4"),
    ] {
        if !has_gpus(ranks) {
            continue;
        }
        for (steps, memory) in [(2, memory), (3, "device")] {
            write_config(folder, run, steps, (sharding, memory));
            // With one emulated GPU, each rank sees its own as its first.
            let rank = |_| {
                let mut command = lazy(folder, run);
                command.env("CUDA_ON_HOST_DEVICES", visible);
                command
            };
            run_ranks((0..ranks).map(rank).collect());
            assert_eq!(lines(&folder.join(run).join("metrics.jsonl")).len(), steps);
        }
        assert_close_runs(&folder.join(run), &folder.join("cpu"), 3);
    }
    Ok(())
}

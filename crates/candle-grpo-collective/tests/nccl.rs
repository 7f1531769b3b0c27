//! The operations of `Nccl`: the test starts itself once for each rank.
//!
//! `scripts/cuda-test` runs these tests on emulated GPUs. On GPUs there are as many ranks as GPUs.

mod common;

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{Device, Result};
use candle_grpo_collective::launch::{Environment, Launcher};
use candle_grpo_collective::{Collective, Nccl, connect};
use candle_grpo_test_support::{CudaCalls, cuda};
use common::{Process, cases, check, end_early, run, trials_of_ends};
use libtest_mimic::{Failed, Trial};

type Outcome<T = ()> = std::result::Result<T, Failed>;

/// The limits on the time of a job.
const BOUND: Duration = Duration::from_secs(60);
const BOUND_OF_CASES: Duration = Duration::from_secs(600);

fn main() -> ExitCode {
    common::main(rank, || {
        let gpus = gpus();
        let cases = [1, 2, 4].into_iter().filter(|ranks| *ranks <= gpus);
        let mut trials: Vec<Trial> = cases
            .map(|ranks| {
                Trial::test(format!("every_operation_on_{ranks}_gpus"), move || {
                    for rank in run(job(ranks, "cases")?, BOUND_OF_CASES)? {
                        check(rank.status.success(), "a rank failed", &rank)?;
                    }
                    Ok(())
                })
            })
            .collect();
        if gpus > 1 {
            trials.extend(trials_of_ends(ends));
            trials.push(Trial::test("ranks_of_two_jobs_are_an_error", two_jobs));
        }
        if is_emulated() {
            trials.push(Trial::test(
                "a_missing_library_is_an_error",
                missing_library,
            ));
        }
        trials
    })
}

fn is_emulated() -> bool {
    CudaCalls::now().is_some()
}

/// The number of GPUs. Emulated ranks need none of their own.
fn gpus() -> i32 {
    if is_emulated() {
        4
    } else {
        CudaContext::device_count().unwrap_or(0)
    }
}

/// The commands of the ranks of a job, with the variables of torchrun.
fn job(ranks: i32, part: &str) -> Outcome<Vec<Command>> {
    // Rank 0 listens at the port after this one.
    let port = TcpListener::bind("0.0.0.0:0")?.local_addr()?.port() - 1;
    let program = std::env::current_exe()?;
    let command = |rank: i32| {
        let mut command = Command::new(&program);
        command.args(["rank", part]).envs([
            ("WORLD_SIZE", ranks.to_string()),
            ("RANK", rank.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
            ("CUDA_VISIBLE_DEVICES", rank.to_string()),
        ]);
        command
    };
    Ok((0..ranks).map(command).collect())
}

/// Rank 1 ends early, and all others must end with an error.
fn ends(part: &str) -> Outcome {
    let ranks = run(job(gpus().min(4), part)?, BOUND)?;
    for (index, rank) in ranks.iter().enumerate() {
        check(
            !rank.output.contains("survived"),
            "a rank has not ended",
            rank,
        )?;
        if index != 1 {
            check(!rank.status.success(), "must fail", rank)?;
            check(
                rank.output.contains("has ended before this one"),
                "must name the reason",
                rank,
            )?;
        }
    }
    Ok(())
}

fn two_jobs() -> Outcome {
    let mut ranks = job(2, "cases")?;
    ranks[1].env("WORLD_SIZE", "3");
    let ranks = run(ranks, BOUND)?;
    let expected = "WORLD_SIZE: 3 on rank 1, must be 2 as on rank 0";
    check(ranks[0].output.contains(expected), expected, &ranks[0])?;
    check(
        ranks[1].output.contains("sent no identifier"),
        "must fail",
        &ranks[1],
    )
}

/// Starts a rank with a folder of libraries that has no NCCL.
fn missing_library() -> Outcome {
    let folder = std::env::temp_dir().join(format!("candle-grpo-nccl-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let paths = std::env::var("LD_LIBRARY_PATH")?;
    for path in paths.split(':').filter(|path| Path::new(path).is_dir()) {
        for file in std::fs::read_dir(path)? {
            let file = file?;
            let is_nccl = file.file_name().to_string_lossy().starts_with("libnccl");
            if file.path().is_file() && !is_nccl {
                std::fs::copy(file.path(), folder.join(file.file_name()))?;
            }
        }
    }
    let mut ranks = job(1, "cases")?;
    ranks[0].env("LD_LIBRARY_PATH", &folder);
    let ranks: Outcome<Vec<Process>> = run(ranks, BOUND);
    std::fs::remove_dir_all(&folder)?;
    let rank = &ranks?[0];
    check(!rank.status.success(), "must fail", rank)?;
    check(
        rank.output.contains("Install NCCL 2"),
        "must say how to install it",
        rank,
    )
}

/// The work of one rank.
fn rank(part: &str) -> Result<()> {
    let device = cuda().map_err(candle_core::Error::msg)?;
    if part != "cases" {
        return end_early(part, &*connect(device)?, device);
    }
    let number = |name: &str| std::env::var(name).map_or(0, |value| value.parse().unwrap_or(0));
    let environment = Environment {
        launcher: Launcher::Torchrun,
        rank: number("RANK"),
        world_size: number("WORLD_SIZE"),
        local_rank: 0,
    };
    let ranks = Nccl::connect(device, &environment)?;
    assert_eq!(
        (ranks.rank(), ranks.world_size()),
        (environment.rank, environment.world_size)
    );
    cases::run(&*ranks, device)?;
    // Tensors on the CPU.
    cases::run(&*ranks, &Device::Cpu)
}

//! `Nccl` operations: the test starts itself once per rank.
//!
//! `scripts/cuda-test` runs these tests on emulated GPUs. On real GPUs there are as many ranks as
//! GPUs.

mod common;
#[path = "common/transfer.rs"]
mod transfer;

use std::ffi::CStr;
use std::process::{Command, ExitCode};

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_collective::launch::{Environment, Launcher};
use candle_grpo_collective::{Collective, Nccl, Ticket, connect};
use candle_grpo_test_support::{
    CudaCalls, ReservedPort, cuda, cuda_device, message, with_failing_calls,
};
use common::{Process, cases, check, end_early, one, run, trials_of_ends};
use libtest_mimic::{Failed, Trial};

type Outcome<T = ()> = std::result::Result<T, Failed>;

fn main() -> ExitCode {
    common::main(rank, || {
        let gpus = gpus();
        let cases = [1, 2, 4].into_iter().filter(|ranks| *ranks <= gpus);
        let mut trials: Vec<Trial> = cases
            .map(|ranks| {
                Trial::test(format!("every_operation_on_{ranks}_gpus"), move || {
                    for rank in run_job(job(ranks, "cases")?)? {
                        check(rank.status.success(), "a rank failed", &rank)?;
                    }
                    Ok(())
                })
            })
            .collect();
        if gpus > 1 {
            trials.extend(trials_of_ends(ends));
            trials.push(Trial::test(
                "a_rank_that_is_killed_in_a_gather_beside_computation_ends_the_others",
                || ends("kill_in_gather_beside"),
            ));
            trials.push(Trial::test("ranks_of_two_jobs_are_an_error", two_jobs));
        }
        if is_emulated() {
            // Each of the processes needs a GPU.
            trials.extend(transfer::trials());
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

/// Number of GPUs. Emulated ranks do not need their own.
fn gpus() -> i32 {
    if is_emulated() {
        4
    } else {
        CudaContext::device_count().unwrap_or(0)
    }
}

/// A job's ranks.
struct Job {
    ranks: Vec<Command>,
    /// The port on which rank 0 listens.
    port: ReservedPort,
}

fn run_job(job: Job) -> Outcome<Vec<Process>> {
    let ranks = run(job.ranks);
    drop(job.port);
    ranks
}

/// A job with torchrun's variables.
fn job(ranks: i32, part: &str) -> Outcome<Job> {
    let listening = ReservedPort::new();
    // Rank 0 listens on the port after this one.
    let port = listening.number() - 1;
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
    Ok(Job {
        ranks: (0..ranks).map(command).collect(),
        port: listening,
    })
}

/// Rank 1 ends early, and all others must end with an error.
fn ends(part: &str) -> Outcome {
    let ranks = run_job(job(gpus().min(4), part)?)?;
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
    let mut job = job(2, "cases")?;
    job.ranks[1].env("WORLD_SIZE", "3");
    let ranks = run_job(job)?;
    let expected = "WORLD_SIZE: 3 on rank 1, must be 2 as on rank 0";
    check(ranks[0].output.contains(expected), expected, &ranks[0])?;
    check(
        ranks[1].output.contains("sent no identifier"),
        "must fail",
        &ranks[1],
    )
}

/// Starts a rank whose library folders do not contain NCCL.
fn missing_library() -> Outcome {
    let without = tempfile::tempdir()?;
    let mut folders = vec![without.path().to_owned()];
    for folder in std::env::split_paths(&std::env::var("LD_LIBRARY_PATH")?) {
        let files = std::fs::read_dir(&folder).into_iter().flatten();
        let files = files.collect::<std::io::Result<Vec<_>>>()?;
        let is_nccl = |file: &std::fs::DirEntry| {
            let name = file.file_name();
            name.to_string_lossy().starts_with("libnccl")
        };
        if !files.iter().any(is_nccl) {
            folders.push(folder);
            continue;
        }
        for file in files.iter().filter(|file| !is_nccl(file)) {
            if file.path().is_file() {
                std::fs::copy(file.path(), without.path().join(file.file_name()))?;
            }
        }
    }
    let mut job = job(1, "cases")?;
    job.ranks[0].env("LD_LIBRARY_PATH", std::env::join_paths(folders)?);
    let rank = &run_job(job)?[0];
    check(!rank.status.success(), "must fail", rank)?;
    check(
        rank.output.contains("Install NCCL 2"),
        "must say how to install it",
        rank,
    )
}

/// One rank's work.
fn rank(part: &str) -> Result<()> {
    if let Some(done) = transfer::process(part) {
        return done;
    }
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
    // CPU tensors.
    cases::run(&*ranks, &Device::Cpu)?;
    sums_wait_for_the_device_that_is_opened_again(&*ranks)?;
    kernels_wait_for_the_operation_of_a_ticket(&*ranks)?;
    an_operation_that_fails_keeps_its_tensors(&*ranks)?;
    refuses_another_handle(&*ranks)
}

/// Sums a gradient on the device as the program opens it: opened again, and not taken from the
/// ranks. With `CUDA_ON_HOST_LAZY=1`, the kernels before a sum have not run when it starts.
fn sums_wait_for_the_device_that_is_opened_again(ranks: &dyn Collective) -> Result<()> {
    let device = cuda_device(0)?;
    for is_started in [false, true] {
        let gradient = Tensor::ones(4, DType::F32, &device)?;
        device.synchronize()?;
        let backward = Tensor::ones(4, DType::F32, &device)?;
        gradient.slice_set(&(backward * 2.)?, 0, 0)?;
        if is_started {
            let ticket = ranks.start_all_reduce_sum(&[&gradient])?;
            ranks.finish(ticket)?;
        } else {
            ranks.all_reduce_sum(&[&gradient])?;
        }
        let sum = 2. * ranks.world_size() as f32;
        assert_eq!(gradient.to_vec1::<f32>()?, [sum; 4]);
    }
    Ok(())
}

/// Kernels wait for the operation of a ticket and for those before it, not for later ones. The host
/// waits for none, and a second call for nothing.
fn kernels_wait_for_the_operation_of_a_ticket(ranks: &dyn Collective) -> Result<()> {
    assert!(ranks.is_asynchronous());
    let device = cuda_device(0)?;
    let n = ranks.world_size();
    let tensors: Vec<Tensor> = (0..3)
        .map(|_| Tensor::ones(n, DType::F32, &device))
        .collect::<Result<_>>()?;
    // Loads the kernel.
    let other = (Tensor::ones(n, DType::F32, &device)? * 2.)?;
    let before = CudaCalls::now();
    let first = ranks.start_all_reduce_sum(&[&tensors[0]])?;
    let second = ranks.start_reduce_scatter_sum(&[&tensors[1]])?;
    let third = ranks.start_all_gather(&[&tensors[2]])?;
    ranks.finish(second)?;
    let events = || CudaCalls::now().map(|calls| calls.events);
    let events_before = events();
    ranks.finish(first)?;
    assert_eq!(events(), events_before);
    let (first, other) = ((&tensors[0] * 2.)?, (other * 2.)?);
    if let Some(calls) = CudaCalls::now()
        .zip(before)
        .map(|(after, before)| after - before)
    {
        assert_eq!((calls.operations, calls.hidden), (3, 1), "{calls:?}");
        assert_eq!((calls.waits, calls.copies_to_host), (0, 0), "{calls:?}");
    }
    ranks.finish(third)?;
    assert_eq!(first.to_vec1::<f32>()?, vec![2. * n as f32; n]);
    assert_eq!(other.to_vec1::<f32>()?, vec![4.; n]);
    assert_eq!(tensors[2].to_vec1::<f32>()?, vec![1.; n]);
    Ok(())
}

/// Starts sums while calls of these names fail, each after this number of others. `None` without an
/// emulated GPU.
fn start_failing(
    calls: &[(&CStr, u64)],
    start: &dyn Fn() -> Result<Ticket>,
) -> Option<Result<Ticket>> {
    let Some((&(name, before), others)) = calls.split_first() else {
        return Some(start());
    };
    let (started, failed) = with_failing_calls(name, before, 1, || start_failing(others, start))?;
    assert_eq!(failed, 1, "{name:?}");
    started
}

/// The same operations fail on all ranks: in part, or because their end has no event. No memory is
/// freed while they may use it, which the emulated GPU refuses, and the first error is returned.
fn an_operation_that_fails_keeps_its_tensors(ranks: &dyn Collective) -> Result<()> {
    let device = cuda_device(0)?;
    // The events of the stream that starts to wait are first.
    let wait = (c"cuStreamWaitEvent", 1);
    let (create, record) = ((c"cuEventCreate", 1), (c"cuEventRecord", 1));
    let second_sum = (c"nccl", 1);
    for (calls, expected, operations) in [
        (&[second_sum][..], "ncclAllReduce", 1),
        (&[second_sum, wait], "ncclAllReduce", 1),
        (&[second_sum, record], "ncclAllReduce", 1),
        (&[record], "OUT_OF_MEMORY", 2),
        (&[create], "OUT_OF_MEMORY", 0),
    ] {
        let tensors = [1., 2.].map(|number| Tensor::full(number, 1000, &device));
        let [x, y] = tensors;
        let (x, y): (Tensor, Tensor) = (x?, y?);
        let before = CudaCalls::now();
        let Some(started) = start_failing(calls, &|| ranks.start_all_reduce_sum(&[&x, &y])) else {
            return Ok(());
        };
        let text = message(started.map(drop));
        assert!(text.contains(expected), "{calls:?}: {text}");
        let found = CudaCalls::now().zip(before);
        let found = found.map(|(after, before)| (after - before).operations);
        assert_eq!(found, Some(operations), "{calls:?}");
        drop((x, y));
        one(ranks, &device)?;
    }
    Ok(())
}

fn refuses_another_handle(ranks: &dyn Collective) -> Result<()> {
    let other = Device::new_cuda_with_stream(0)?;
    let own = cuda_device(0)?;
    let n = ranks.world_size();
    for dtype in [DType::F32, DType::BF16] {
        let (x, y) = (
            Tensor::ones(n, dtype, &own)?,
            Tensor::ones(n, dtype, &other)?,
        );
        for result in [
            ranks.all_reduce_sum(&[&x, &y]),
            ranks.reduce_scatter_sum(&[&y]),
            ranks.all_gather(&[&y]),
            ranks.broadcast(&[&y], 0),
            ranks.start_all_reduce_sum(&[&y]).map(drop),
            ranks.start_reduce_scatter_sum(&[&x, &y]).map(drop),
            ranks.start_all_gather(&[&x, &y]).map(drop),
        ] {
            let text = message(result);
            assert!(text.contains("on another handle of a GPU"), "{text}");
        }
    }
    Ok(())
}

//! The operations of `Mpi` on real ranks: the test starts itself with `mpirun`.
//!
//! `scripts/test-mpi` runs these tests. They need the feature `mpi` and `mpirun` on PATH.

mod cases;

use std::io::Read;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_grpo_collective::{Collective, Mpi, connect, launch};
use libtest_mimic::{Arguments, Failed, Trial};

/// The limit on the time of a job in which a rank ends.
const BOUND: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("rank") {
        let part = arguments.next().unwrap_or_default();
        if let Err(error) = rank(&part) {
            panic!("rank: {error}");
        }
        return ExitCode::SUCCESS;
    }
    let mut trials: Vec<Trial> = [1, 2, 4]
        .into_iter()
        .map(|ranks| {
            Trial::test(format!("every_operation_on_{ranks}_ranks"), move || {
                let (status, output) = job(ranks, "cases")?;
                check(status.success(), "a rank failed", &output)
            })
        })
        .collect();
    for (name, part) in [
        ("a_rank_that_aborts_ends_the_others", "abort"),
        ("a_killed_rank_ends_the_others", "kill"),
        ("a_rank_that_panics_ends_the_others", "panic"),
        ("a_rank_that_exits_early_ends_the_others", "exit"),
    ] {
        trials.push(Trial::test(name, move || {
            let (status, output) = job(4, part)?;
            check(!status.success(), "mpirun must fail", &output)?;
            check(
                !output.contains("survived"),
                "a rank has not ended",
                &output,
            )
        }));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn check(holds: bool, message: &str, output: &str) -> std::result::Result<(), Failed> {
    if holds {
        Ok(())
    } else {
        Err(format!("{message}:\n{output}").into())
    }
}

/// Runs this program as `ranks` ranks, and returns the output of all. A job that is not over within
/// the bound is an error.
fn job(ranks: usize, part: &str) -> std::result::Result<(ExitStatus, String), Failed> {
    let mut job = Command::new("mpirun")
        .args(["-n", &ranks.to_string(), "--oversubscribe"])
        .arg(std::env::current_exe()?)
        .args(["rank", part])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("mpirun: {error}; scripts/mpi prints the environment"))?;
    let read = |stream: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut text = Vec::new();
            let _ = stream.map(|mut stream| stream.read_to_end(&mut text));
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    let output = read(job.stdout.take().map(|stream| Box::new(stream) as _));
    let errors = read(job.stderr.take().map(|stream| Box::new(stream) as _));
    let end = Instant::now() + BOUND * if part == "cases" { 5 } else { 1 };
    let status = loop {
        match job.try_wait()? {
            Some(status) => break Some(status),
            None if Instant::now() > end => break None,
            None => thread::sleep(Duration::from_millis(50)),
        }
    };
    if status.is_none() {
        job.kill()?;
        job.wait()?;
    }
    let text = |thread: thread::JoinHandle<String>| thread.join().unwrap_or_default();
    let output = text(output) + &text(errors);
    match status {
        Some(status) => Ok((status, output)),
        None => Err(format!("the job is not over:\n{output}").into()),
    }
}

/// The work of one rank.
fn rank(part: &str) -> Result<()> {
    let device = Device::Cpu;
    if part == "cases" {
        let ranks = Mpi::init()?;
        assert!(Arc::ptr_eq(&ranks, &Mpi::init()?), "the same ranks");
        let environment = launch::environment()?;
        let found = environment.map(|environment| (environment.rank, environment.world_size));
        assert_eq!(found, Some((ranks.rank(), ranks.world_size())));
        let connected = connect(&device)?;
        assert_eq!(connected.rank(), ranks.rank());
        assert_eq!(connected.world_size(), ranks.world_size());
        cases::run(&*ranks, &device)?;
        // Calls of another thread.
        return thread::scope(|scope| {
            let calls = scope.spawn(|| one(&*ranks, &device));
            calls
                .join()
                .unwrap_or_else(|_| bail!("the thread panicked"))
        });
    }
    let ranks = connect(&device)?;
    one(&*ranks, &device)?;
    if ranks.rank() == 1 {
        match part {
            "abort" => ranks.abort(1),
            "kill" => {
                let own = std::process::id().to_string();
                Command::new("kill").args(["-9", &own]).status()?;
            }
            "panic" => panic!("a rank panics"),
            _ => std::process::exit(0),
        }
    }
    // The others wait for rank 1.
    one(&*ranks, &device)?;
    println!("survived");
    Ok(())
}

/// Sums a tensor over all ranks.
fn one(ranks: &dyn Collective, device: &Device) -> Result<()> {
    let own = Tensor::ones(5, DType::F32, device)?;
    ranks.all_reduce_sum(&[&own])?;
    assert_eq!(own.to_vec1::<f32>()?, [ranks.world_size() as f32; 5]);
    Ok(())
}

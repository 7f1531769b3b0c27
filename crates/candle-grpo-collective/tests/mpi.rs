//! The operations of `Mpi` on real ranks: the test starts itself with `mpirun`.
//!
//! `scripts/test-mpi` runs these tests. They need the feature `mpi` and `mpirun` on PATH.

mod common;

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_core::{Device, Result, bail};
use candle_grpo_collective::{Collective, Mpi, connect, launch};
use common::{Process, cases, check, end_early, one, run};
use libtest_mimic::{Arguments, Failed, Trial};

/// The limits on the time of a job.
const BOUND: Duration = Duration::from_secs(60);
const BOUND_OF_CASES: Duration = Duration::from_secs(300);

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
                let job = job(ranks, "cases", BOUND_OF_CASES)?;
                check(job.status.success(), "a rank failed", &job)
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
            let job = job(4, part, BOUND)?;
            check(!job.status.success(), "mpirun must fail", &job)?;
            check(
                !job.output.contains("survived"),
                "a rank has not ended",
                &job,
            )
        }));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// Runs this program as `ranks` ranks.
fn job(ranks: usize, part: &str, bound: Duration) -> std::result::Result<Process, Failed> {
    let mut job = Command::new("mpirun");
    job.args(["-n", &ranks.to_string(), "--oversubscribe"])
        .arg(std::env::current_exe()?)
        .args(["rank", part]);
    run(vec![job], bound)?
        .pop()
        .ok_or_else(|| "no process".into())
}

/// The work of one rank.
fn rank(part: &str) -> Result<()> {
    let device = Device::Cpu;
    if part != "cases" {
        return end_early(part, &*connect(&device)?, &device);
    }
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
    thread::scope(|scope| {
        let calls = scope.spawn(|| one(&*ranks, &device));
        calls
            .join()
            .unwrap_or_else(|_| bail!("the thread panicked"))
    })
}

//! `Mpi` operations on real ranks: the test starts itself with `mpirun`.
//!
//! `scripts/test-mpi` runs these tests. They need the feature `mpi` and `mpirun` on PATH.

mod common;

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;

use candle_core::{Device, Result, bail};
use candle_grpo_collective::{Collective, Mpi, connect, launch};
use common::{Process, cases, check, end_early, one, run, trials_of_ends};
use libtest_mimic::{Failed, Trial};

fn main() -> ExitCode {
    common::main(rank, || {
        let cases = [1, 2, 4].map(|ranks| {
            Trial::test(format!("every_operation_on_{ranks}_ranks"), move || {
                let job = job(ranks, "cases")?;
                check(job.status.success(), "a rank failed", &job)
            })
        });
        cases.into_iter().chain(trials_of_ends(ends)).collect()
    })
}

/// Rank 1 ends early, and all others must end.
fn ends(part: &str) -> std::result::Result<(), Failed> {
    let job = job(4, part)?;
    check(!job.status.success(), "mpirun must fail", &job)?;
    let survived = job.output.contains("survived");
    check(!survived, "a rank has not ended", &job)
}

/// Runs this program as `ranks` ranks.
fn job(ranks: usize, part: &str) -> std::result::Result<Process, Failed> {
    let mut job = Command::new("mpirun");
    job.args(["-n", &ranks.to_string(), "--oversubscribe"])
        .arg(std::env::current_exe()?)
        .args(["rank", part]);
    run(vec![job])?.pop().ok_or_else(|| "no process".into())
}

/// One rank's work.
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
    // Calls from another thread.
    thread::scope(|scope| {
        let calls = scope.spawn(|| one(&*ranks, &device));
        calls
            .join()
            .unwrap_or_else(|_| bail!("the thread panicked"))
    })
}

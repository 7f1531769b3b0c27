//! `Mpi` operations on real ranks: the test starts itself with `mpirun`.
//!
//! `scripts/test-mpi` runs these tests. They need the feature `mpi` and `mpirun` on PATH.

mod common;

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_grpo_collective::{Collective, Mpi, connect, launch};
use candle_grpo_test_support::noise_tensor;
use common::{Process, cases, check, end_early, one, run, trials_of_ends};
use libtest_mimic::{Failed, Trial};

fn main() -> ExitCode {
    common::main(rank, || {
        let cases = [1, 2, 3, 4].map(|ranks| {
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

/// Checks that a sum has the bits of the numbers added in the order of the ranks: alone, with
/// others, as a part of a longer tensor, in a group, and if each rank receives a part.
fn sums_do_not_depend_on_what_is_summed_with_them(ranks: &dyn Collective) -> Result<()> {
    let (rank, world_size) = (ranks.rank(), ranks.world_size());
    let group = ranks.split(0)?;
    let noise = |elements: usize, rank: usize| {
        let seed = (elements * 10 + rank) as u64;
        noise_tensor(elements, seed, DType::F32, &Device::Cpu)
    };
    // The longest one has several messages.
    let lengths = [1, 7, 64, 1000, 9001, 70_001, 300_000, (4 << 20) + 3];
    let lengths = lengths.map(|length: usize| length.next_multiple_of(world_size));
    let own = || lengths.map(|length| noise(length, rank));
    let sums = |sum: &dyn Fn(&[&Tensor]) -> Result<()>| -> Result<Vec<Vec<f32>>> {
        let all: Vec<Tensor> = own().into_iter().collect::<Result<_>>()?;
        sum(&all.iter().collect::<Vec<_>>())?;
        all.iter().map(Tensor::to_vec1).collect()
    };
    let expected = lengths.map(|length| -> Result<Vec<f32>> {
        let mut sum = noise(length, 0)?;
        for rank in 1..world_size {
            sum = (sum + noise(length, rank)?)?;
        }
        sum.to_vec1()
    });
    let expected = expected.into_iter().collect::<Result<Vec<_>>>()?;
    let together = sums(&|all| ranks.all_reduce_sum(all))?;
    assert!(together == expected, "together");
    let alone = sums(&|all| (all.iter()).try_for_each(|tensor| ranks.all_reduce_sum(&[*tensor])))?;
    assert!(alone == expected, "alone");
    assert!(
        sums(&|all| group.all_reduce_sum(all))? == expected,
        "a group"
    );
    let halves = sums(&|all| {
        all.iter().try_for_each(|tensor| {
            let length = tensor.elem_count();
            let [first, second] = [(0, length / 2), (length / 2, length - length / 2)]
                .map(|(start, length)| tensor.narrow(0, start, length));
            let both = [first?, second?];
            let both = both.iter().filter(|half| half.elem_count() > 0);
            both.into_iter()
                .try_for_each(|half| ranks.all_reduce_sum(&[half]))
        })
    })?;
    assert!(halves == expected, "halves");
    let scattered = sums(&|all| ranks.reduce_scatter_sum(all))?;
    for (found, expected) in scattered.iter().zip(&expected) {
        let part = expected.len() / world_size;
        let own = rank * part..(rank + 1) * part;
        assert!(found[own.clone()] == expected[own], "parts");
    }
    Ok(())
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
    sums_do_not_depend_on_what_is_summed_with_them(&*ranks)?;
    // Calls from another thread.
    thread::scope(|scope| {
        let calls = scope.spawn(|| one(&*ranks, &device));
        calls
            .join()
            .unwrap_or_else(|_| bail!("the thread panicked"))
    })
}

//! Jobs with several processes, and the cases that their ranks run.

pub(crate) mod cases;
mod job;

use std::process::{Command, ExitCode, ExitStatus};
use std::thread;

pub(crate) use job::{Process, check, run};

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_collective::Collective;
use libtest_mimic::{Arguments, Failed, Trial};

/// The `main` for a test that starts itself as ranks, with the arguments `rank` and the part.
pub(crate) fn main(
    rank: impl FnOnce(&str) -> Result<()>,
    trials: impl FnOnce() -> Vec<Trial>,
) -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("rank") {
        let part = arguments.next().unwrap_or_default();
        if let Err(error) = rank(&part) {
            panic!("rank: {error}");
        }
        return ExitCode::SUCCESS;
    }
    libtest_mimic::run(&Arguments::from_args(), trials()).exit_code()
}

/// Tests for [`end_early`]: `ends` runs the ranks for one part.
pub(crate) fn trials_of_ends(ends: fn(&str) -> std::result::Result<(), Failed>) -> Vec<Trial> {
    [
        ("a_rank_that_aborts_ends_the_others", "abort"),
        ("a_killed_rank_ends_the_others", "kill"),
        (
            "a_rank_that_is_killed_in_a_gather_ends_the_others",
            "kill_in_gather",
        ),
        (
            "a_rank_that_is_killed_in_a_gather_of_its_group_ends_all_groups",
            "kill_in_gather_of_group",
        ),
        ("a_rank_that_panics_ends_the_others", "panic"),
        ("a_rank_that_exits_early_ends_the_others", "exit"),
    ]
    .map(|(name, part)| Trial::test(name, move || ends(part)))
    .into()
}

/// Runs a rank in a job where rank 1 ends early, in the way `part`, and the others wait for it. A
/// rank that gets an answer prints `survived`.
///
/// # Errors
///
/// Fails if an operation does.
pub(crate) fn end_early(part: &str, ranks: &dyn Collective, device: &Device) -> Result<()> {
    one(ranks, device)?;
    if part.starts_with("kill_in_gather") {
        let pairs = part.ends_with("of_group");
        let group = pairs.then(|| ranks.split(ranks.rank() / 2)).transpose()?;
        let gathering = group.as_deref().unwrap_or(ranks);
        let killed = (ranks.rank() == 1).then(|| thread::spawn(kill_this_process));
        // 32 MiB for each rank.
        let tensor = Tensor::zeros(gathering.world_size() << 23, DType::F32, device)?;
        while killed.as_ref().is_none_or(|killed| !killed.is_finished()) {
            if part.ends_with("beside") {
                let ticket = gathering.start_all_gather(&[&tensor])?;
                Tensor::ones(1 << 10, DType::F32, device)?.sqr()?;
                gathering.finish(ticket)?;
            } else {
                gathering.all_gather(&[&tensor])?;
            }
            // Waits for a device.
            tensor.get(0)?.to_scalar::<f32>()?;
        }
    }
    if ranks.rank() == 1 {
        match part {
            "abort" => ranks.abort(1),
            "kill" => drop(kill_this_process()?),
            "panic" => panic!("a rank panics"),
            _ => std::process::exit(0),
        }
    }
    one(ranks, device)?;
    println!("survived");
    Ok(())
}

fn kill_this_process() -> std::io::Result<ExitStatus> {
    let own = std::process::id().to_string();
    Command::new("kill").args(["-9", &own]).status()
}

/// Sums a tensor over all ranks.
///
/// # Errors
///
/// Fails if the operation does.
pub(crate) fn one(ranks: &dyn Collective, device: &Device) -> Result<()> {
    let own = Tensor::ones(5, DType::F32, device)?;
    ranks.all_reduce_sum(&[&own])?;
    assert_eq!(own.to_vec1::<f32>()?, [ranks.world_size() as f32; 5]);
    Ok(())
}

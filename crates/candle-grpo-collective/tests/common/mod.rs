//! Jobs of several processes, and the cases that their ranks run.

pub(crate) mod cases;
mod job;

pub(crate) use job::{Process, check, run};

use candle_core::{DType, Device, Result, Tensor};
use candle_grpo_collective::Collective;

/// Runs the part of a rank that ends early: rank 1 ends in the way `part`, and the others wait for
/// it. A rank that gets an answer prints `survived`.
///
/// # Errors
///
/// Fails if an operation does.
pub(crate) fn end_early(part: &str, ranks: &dyn Collective, device: &Device) -> Result<()> {
    one(ranks, device)?;
    if ranks.rank() == 1 {
        match part {
            "abort" => ranks.abort(1),
            "kill" => {
                let own = std::process::id().to_string();
                std::process::Command::new("kill")
                    .args(["-9", &own])
                    .status()?;
            }
            "panic" => panic!("a rank panics"),
            _ => std::process::exit(0),
        }
    }
    one(ranks, device)?;
    println!("survived");
    Ok(())
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

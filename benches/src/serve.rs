//! One side in a comparison with another system, which alternates requests with its own runs.

use std::io::{BufRead, Write};

use anyhow::{Context, Result};
use candle_grpo_kernels::default_device;

use crate::case::Pair;
use crate::cases;

/// Reads lines `OP<tab>SHAPE<tab>DTYPE<tab>DIRECTION`, runs each case once and prints
/// `MS<tab>PEAK_MIB`.
///
/// The case stays prepared until a line names another one.
pub(crate) fn serve() -> Result<()> {
    let device = default_device()?;
    let cases = cases::on(&device);
    let mut prepared: Option<(String, Pair)> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        // Frees the inputs of the previous case before the next ones are allocated.
        if prepared.take_if(|(name, _)| *name != line).is_some() || prepared.is_none() {
            let wanted = cases.iter().find(|case| {
                let name = [
                    case.op,
                    &case.shape,
                    case.dtype.as_str(),
                    case.direction.name(),
                ];
                line.split('\t').eq(name)
            });
            let case = wanted.with_context(|| format!("there is no case {line:?}"))?;
            prepared = Some((line.clone(), (case.prepare)(&device)?));
        }
        if let Some((_, pair)) = &mut prepared {
            let sample = (pair.ours)()?;
            println!("{}\t{}", sample.ms, sample.peak_mib);
            std::io::stdout().flush()?;
        }
    }
    Ok(())
}

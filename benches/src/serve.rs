//! Our side of a comparison with another system, which asks for runs in alternation with its own.

use std::io::{BufRead, Write};

use anyhow::{Context, Result};

use crate::case::Pair;
use crate::{cases, device};

/// Reads `OP<tab>SHAPE<tab>DTYPE<tab>DIRECTION` lines, runs that case once, and answers `MS<tab>PEAK_MIB`. The case stays
/// prepared until another one is named.
pub(crate) fn serve() -> Result<()> {
    let device = device::open()?;
    let cases = cases::on(&device);
    let mut prepared: Option<(String, Pair)> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        // The inputs of one case make room before those of the next are made.
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

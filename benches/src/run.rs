//! The main program for the operator benchmarks.

use anyhow::{Result, bail};
use candle_core::Device;
use candle_grpo_kernels::default_device;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::Args;
use crate::case::Case;
use crate::median;
use crate::region::Sample;
use crate::results::{self, Row};
use crate::{cases, serve};

/// Runs the cases and writes the results. `allocator` names the program's allocator.
pub fn main(allocator: &str) -> Result<()> {
    let args = Args::parse();
    if args.serve {
        return serve::serve();
    }
    if args.rounds == 0 {
        bail!("--rounds: 0, must be at least 1");
    }
    let device = default_device()?;
    let cases: Vec<Case> = cases::on(&device)
        .into_iter()
        .filter(|case| case.op.contains(&args.only))
        .collect();
    if cases.is_empty() {
        bail!("--only: no operator's name contains {:?}", args.only);
    }
    let progress = ProgressBar::new(cases.len() as u64).with_style(ProgressStyle::with_template(
        "{bar:30} {pos}/{len} {msg} {elapsed} left {eta}",
    )?);
    let (mut rows, mut verdicts, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    for case in &cases {
        let name = format!("{} {} {}", case.op, case.shape, case.dtype.as_str());
        progress.set_message(name.clone());
        // A case that fails, for example without enough memory, does not stop the others.
        match measure(case, &device, allocator, args.rounds) {
            Ok(row) => {
                verdicts.extend(case.bandwidth.map(|bandwidth| bandwidth.verdict(&row)));
                rows.push(row);
            }
            Err(error) => failures.push(format!("{name}: {error}")),
        }
        progress.inc(1);
    }
    progress.finish_and_clear();
    print!("{}", results::table(&rows));
    for verdict in verdicts {
        println!("{verdict}");
    }
    results::merge(&args.out, rows)?;
    if !failures.is_empty() {
        bail!("cases failed:\n{}", failures.join("\n"));
    }
    Ok(())
}

fn measure(case: &Case, device: &Device, allocator: &str, rounds: usize) -> Result<Row> {
    let mut pair = (case.prepare)(device)?;
    // Warm-up: each side's first run loads code and caches.
    (pair.ours)()?;
    (pair.composed)()?;
    let (mut ours, mut composed) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push((pair.ours)()?);
        composed.push((pair.composed)()?);
    }
    let ms = |samples: &[Sample]| median(samples.iter().map(|sample| sample.ms));
    let peak = |samples: &[Sample]| median(samples.iter().map(|sample| sample.peak_mib));
    Ok(Row {
        op: case.op.to_owned(),
        shape: case.shape.clone(),
        dtype: case.dtype.as_str().to_owned(),
        device: if device.is_cpu() { "cpu" } else { "cuda" }.to_owned(),
        allocator: allocator.to_owned(),
        direction: case.direction.name().to_owned(),
        ours_ms: ms(&ours),
        composed_ms: ms(&composed),
        ratio: median(
            ours.iter()
                .zip(&composed)
                .map(|(ours, composed)| ours.ms / composed.ms),
        ),
        ours_peak_mib: peak(&ours),
        composed_peak_mib: peak(&composed),
    })
}

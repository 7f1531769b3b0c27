//! Runs the cases.

use anyhow::{Result, bail};
use candle_core::Device;
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::Args;
use crate::case::Case;
use crate::region::Sample;
use crate::results::{self, Row};
use crate::{cases, serve};

/// The program; `allocator` is the name of the one that it was built with.
pub fn main(allocator: &str) -> Result<()> {
    let args = Args::parse();
    if args.serve {
        return serve::serve();
    }
    if args.rounds == 0 {
        bail!("--rounds: 0, must be at least 1");
    }
    let cases: Vec<Case> = cases::all()
        .into_iter()
        .filter(|case| case.op.contains(&args.only))
        .collect();
    if cases.is_empty() {
        bail!("--only: no operator's name contains {:?}", args.only);
    }
    let progress = ProgressBar::new(cases.len() as u64).with_style(ProgressStyle::with_template(
        "{bar:30} {pos}/{len} {msg} {elapsed} left {eta}",
    )?);
    let mut rows = Vec::new();
    for device in devices()? {
        for case in &cases {
            progress.set_message(format!("{} {}", case.op, case.shape));
            rows.push(measure(case, &device, allocator, args.rounds)?);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    print!("{}", results::table(&rows));
    results::merge(&args.out, rows)
}

/// The GPU when it is built for one, else the CPU.
fn devices() -> Result<Vec<Device>> {
    Ok(vec![if cfg!(feature = "cuda") {
        Device::new_cuda(0)?
    } else {
        Device::Cpu
    }])
}

fn measure(case: &Case, device: &Device, allocator: &str, rounds: usize) -> Result<Row> {
    let mut pair = (case.prepare)(device)?;
    // The first run of each side loads code and caches.
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

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

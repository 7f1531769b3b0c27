//! Runs every case of the folder `GRPO_GOLDEN_DIR` (default: `tests/golden` of this project), on every device that there is,
//! against values computed by the published implementations, and prints how many ran, passed and were skipped.
//!
//! Cases are told apart by their `op`, `variant` and `config` alone, never by file names or numbers.

mod advantage;
mod aggregate;
mod case;
mod kl;
mod linear;
mod log_prob;
mod policy_loss;
mod reward_norm;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_grpo_test_support::cuda;
use case::{Case, Outcome};

fn main() -> ExitCode {
    if !is_selected(std::env::args().skip(1)) {
        println!("golden: not selected");
        return ExitCode::SUCCESS;
    }
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("golden: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// `cargo test some_name` runs every test binary with that filter, and with the options of the usual harness.
fn is_selected(mut arguments: impl Iterator<Item = String>) -> bool {
    let mut filters = Vec::new();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--list" => return false,
            "--test-threads" | "--format" | "--color" | "--logfile" | "--shuffle-seed" | "-Z" => {
                arguments.next();
            }
            "--skip" => {
                if arguments
                    .next()
                    .is_some_and(|skipped| "golden".contains(&skipped))
                {
                    return false;
                }
            }
            option if option.starts_with('-') => {}
            _ => filters.push(argument),
        }
    }
    filters.is_empty() || filters.iter().any(|filter| "golden".contains(filter))
}

#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

fn run() -> Result<bool> {
    let folder = std::env::var_os("GRPO_GOLDEN_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("golden"),
        PathBuf::from,
    );
    let mut paths = Vec::new();
    for entry in
        std::fs::read_dir(&folder).with_context(|| format!("reading {}", folder.display()))?
    {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            paths.push(path);
        }
    }
    paths.sort();
    ensure!(!paths.is_empty(), "no cases in {}", folder.display());

    let mut failed = 0;
    for (name, device) in [("CUDA", cuda()), ("the CPU", Ok(&Device::Cpu))] {
        match device {
            Ok(device) => failed += run_on(name, device, &paths),
            Err(reason) => println!("golden on {name}: skipped, {reason}"),
        }
    }
    Ok(failed == 0)
}

/// Runs the cases, prints the counts, and returns how many failed.
fn run_on(device_name: &str, device: &Device, paths: &[PathBuf]) -> usize {
    println!("golden on {device_name}:");
    let mut by_op: BTreeMap<String, Counts> = BTreeMap::new();
    let mut skips: BTreeMap<String, usize> = BTreeMap::new();
    for path in paths {
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let (op, outcome) = run_case(path, device);
        let counts = by_op.entry(op.clone()).or_default();
        match outcome {
            Ok(Outcome::Passed) => counts.passed += 1,
            Ok(Outcome::Skipped(reason)) => {
                counts.skipped += 1;
                *skips.entry(format!("{op}: {reason}")).or_default() += 1;
            }
            Err(error) => {
                counts.failed += 1;
                println!("FAILED {name}: {error:#}");
            }
        }
    }
    for (reason, count) in &skips {
        println!("golden skipped {count:4} of {reason}");
    }
    let mut all = Counts::default();
    for (op, c) in &by_op {
        println!(
            "golden {op}: {} passed, {} failed, {} skipped",
            c.passed, c.failed, c.skipped
        );
        all.passed += c.passed;
        all.failed += c.failed;
        all.skipped += c.skipped;
    }
    println!(
        "golden in all: {} passed, {} failed, {} skipped",
        all.passed, all.failed, all.skipped
    );
    all.failed
}

fn run_case(path: &Path, device: &Device) -> (String, Result<Outcome>) {
    match Case::read(path, device) {
        Err(error) => ("unreadable".to_owned(), Err(error)),
        Ok(case) => {
            let outcome = dispatch(&case);
            (
                case.op.clone(),
                outcome.with_context(|| format!("{} {}", case.variant, case.config)),
            )
        }
    }
}

fn dispatch(case: &Case) -> Result<Outcome> {
    let got = match case.op.as_str() {
        "advantage" => advantage::run(case)?,
        "aggregate" => aggregate::run(case)?,
        "kl" => kl::run(case)?,
        "log_prob" => log_prob::run(case)?,
        "policy_loss" => policy_loss::run(case)?,
        "reward_norm" => reward_norm::run(case)?,
        "linear_grpo_loss" => linear::grpo_loss(case)?,
        "linear_log_prob" => linear::log_prob(case)?,
        op => bail!("unknown operation {op}"),
    };
    match got {
        Ok(outputs) => case.compare(&outputs).map(|()| Outcome::Passed),
        Err(reason) => Ok(Outcome::Skipped(reason)),
    }
}

//! Golden cases: values computed by published implementations, one named test for each file and
//! device.
//!
//! The cases are in `tests/golden` and its folder `newer`. `GRPO_GOLDEN_DIR` replaces the first of
//! them. The last lines count how many cases passed, failed and were skipped. A case is identified
//! by its `op`, `variant` and `config`, never by its file name or number.

mod advantage;
mod aggregate;
mod case;
mod curriculum;
mod distillation;
mod kl;
mod length_reward;
mod linear;
mod log_prob;
mod policy_loss;
mod reward_norm;
mod rollout_correction;
mod value_loss;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use candle_grpo_test_support::cuda;
use case::Case;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// The number of cases that the library does not reproduce on purpose.
const KNOWN_SKIPS: usize = 6;

/// A folder of more cases inside the first one.
const MORE: &str = "newer";

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("golden: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let arguments = Arguments::from_args();
    let replaced = std::env::var_os("GRPO_GOLDEN_DIR").map(PathBuf::from);
    let folder = replaced
        .clone()
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("golden"));
    let mut paths = cases("", &folder)?;
    let more = folder.join(MORE);
    if more.is_dir() {
        paths.extend(cases(&format!("{MORE}::"), &more)?);
    }
    let mut devices = Vec::new();
    for (name, device) in [("cuda", cuda()), ("cpu", Ok(&Device::Cpu))] {
        match device {
            Ok(device) => devices.push((name, device)),
            Err(reason) => println!("golden on {name}: skipped, {reason}"),
        }
    }
    let tally = Arc::new(Tally::default());
    let trials: Vec<Trial> = devices
        .iter()
        .flat_map(|&(name, device)| paths.iter().map(move |file| (name, device, file)))
        .map(|(name, device, file)| trial(name, device, file, &tally))
        .collect();

    let conclusion = libtest_mimic::run(&arguments, trials);
    if arguments.list {
        return Ok(conclusion.exit_code());
    }
    let skipped = tally.print();
    let is_complete = conclusion.num_filtered_out == 0;
    let expected = KNOWN_SKIPS * devices.len();
    if replaced.is_none() && is_complete && skipped != expected {
        eprintln!("golden: {skipped} cases are skipped, expected {expected} (KNOWN_SKIPS)");
        return Ok(ExitCode::FAILURE);
    }
    Ok(conclusion.exit_code())
}

/// A case file, and the name of its test.
struct CaseFile {
    name: String,
    path: PathBuf,
}

/// The case files of a folder, sorted by name. Names of tests start with `prefix`.
fn cases(prefix: &str, folder: &Path) -> Result<Vec<CaseFile>> {
    let mut paths = Vec::new();
    let entries = std::fs::read_dir(folder);
    for entry in entries.with_context(|| format!("reading {}", folder.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let file = path.file_stem().unwrap_or_default().to_string_lossy();
            paths.push(CaseFile {
                name: format!("{prefix}{file}"),
                path,
            });
        }
    }
    paths.sort_by(|a, b| a.name.cmp(&b.name));
    ensure!(!paths.is_empty(), "no cases in {}", folder.display());
    Ok(paths)
}

/// A test named `golden::DEVICE::FILE`, or `golden::DEVICE::newer::FILE`.
fn trial(device_name: &str, device: &Device, file: &CaseFile, tally: &Arc<Tally>) -> Trial {
    let name = format!("golden::{device_name}::{}", file.name);
    let (path, tally) = (file.path.clone(), Arc::clone(tally));
    let device = device.clone();
    Trial::ignorable_test(name, move || {
        // Counted as failed until it has passed, so that a panic counts too.
        let started = tally.start();
        let case = match Case::read(&path, &device) {
            Ok(case) => case,
            Err(error) => {
                tally.finish(started, "unreadable", Outcome::Failed);
                return Err(Failed::from(format!("{error:#}")));
            }
        };
        tally.finish(started, &case.op, Outcome::Failed);
        let result = run_case(&case).with_context(|| format!("{} {}", case.variant, case.config));
        match result {
            Ok(None) => {
                tally.finish(started, &case.op, Outcome::Passed);
                Ok(Completion::Completed)
            }
            Ok(Some(reason)) => {
                tally.finish(started, &case.op, Outcome::Skipped(reason.clone()));
                Ok(Completion::ignored_with(reason))
            }
            Err(error) => Err(Failed::from(format!("{error:#}"))),
        }
    })
}

/// Runs a case and compares its outputs. Returns the reason if it is skipped.
fn run_case(case: &Case) -> Result<Option<String>> {
    let ran = match case.op.as_str() {
        "advantage" => advantage::run(case)?,
        "aggregate" => aggregate::run(case)?,
        "curriculum" => curriculum::run(case)?,
        "distillation_loss" => distillation::run(case)?,
        "kl" => kl::run(case)?,
        "length_reward" => length_reward::run(case)?,
        "log_prob" => log_prob::run(case)?,
        "policy_loss" => policy_loss::run(case)?,
        "proximal_log_prob" => rollout_correction::proximal(case)?,
        "reward_norm" => reward_norm::run(case)?,
        "rollout_correction" => rollout_correction::run(case)?,
        "value_loss" => value_loss::run(case)?,
        "linear_distillation_loss" => distillation::linear(case)?,
        "linear_grpo_loss" => linear::grpo_loss(case)?,
        "linear_log_prob" => linear::log_prob(case)?,
        op => bail!("unknown operation {op}"),
    };
    match ran {
        Ok(outputs) => case.compare(&outputs).map(|()| None),
        Err(reason) => Ok(Some(reason)),
    }
}

#[derive(Clone)]
enum Outcome {
    Passed,
    Failed,
    Skipped(String),
}

/// The outcomes of the cases that ran, with their operations.
#[derive(Default)]
struct Tally(Mutex<Vec<(String, Outcome)>>);

impl Tally {
    fn start(&self) -> usize {
        let mut outcomes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        outcomes.push(("unreadable".to_owned(), Outcome::Failed));
        outcomes.len() - 1
    }

    fn finish(&self, index: usize, op: &str, outcome: Outcome) {
        let mut outcomes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        outcomes[index] = (op.to_owned(), outcome);
    }

    /// Prints the counts for each operation and in total. Returns the number of skipped cases.
    fn print(&self) -> usize {
        let outcomes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Passed, failed, skipped.
        let mut by_op: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
        let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
        for (op, outcome) in outcomes.iter() {
            let column = match outcome {
                Outcome::Passed => 0,
                Outcome::Failed => 1,
                Outcome::Skipped(reason) => {
                    *reasons.entry(format!("{op}: {reason}")).or_default() += 1;
                    2
                }
            };
            by_op.entry(op).or_default()[column] += 1;
        }
        for (reason, count) in reasons {
            println!("golden skipped {count:4} of {reason}");
        }
        let mut total = [0; 3];
        for (op, counts) in by_op {
            print_counts(op, counts);
            for (sum, count) in total.iter_mut().zip(counts) {
                *sum += count;
            }
        }
        print_counts("in all", total);
        total[2]
    }
}

fn print_counts(name: &str, [passed, failed, skipped]: [usize; 3]) {
    println!("golden {name}: {passed} passed, {failed} failed, {skipped} skipped");
}

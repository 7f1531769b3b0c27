//! Commands that are killed at any instant and started again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use candle_grpo::nn::atomic_file::is_leftover;
use candle_grpo::train::RunDir;
use candle_grpo_test_support::cases;
use rstest::rstest;
use serde_json::Value;
use tempfile::TempDir;

use super::running::Running;
use super::support::{CONFIG, command, folder, lines, succeeds};
use super::{sft, suites};

/// The number of kills per folder, each in another process.
const KILLS: u32 = 2;

/// Returns the contents of all files below `path`, by name. Leaves out temporary files that killed
/// processes left behind, TensorBoard files, whose names contain the time, and whatever depends on
/// the machine's speed.
fn contents(path: &Path) -> BTreeMap<PathBuf, Contents> {
    let mut found = BTreeMap::new();
    if path.is_file() {
        found.insert(path.file_name().unwrap().into(), Contents::of(path));
    }
    for entry in fs::read_dir(path).into_iter().flatten().map(Result::unwrap) {
        let name = entry.file_name();
        if !is_leftover(&name) && !name.to_string_lossy().starts_with("events.out.") {
            let inside = contents(&entry.path()).into_iter();
            let is_file = entry.path().is_file();
            found.extend(inside.map(|(path, contents)| {
                if is_file {
                    (path, contents)
                } else {
                    (Path::new(&name).join(path), contents)
                }
            }));
        }
    }
    found
}

#[derive(PartialEq)]
enum Contents {
    Lines(Vec<Value>),
    Bytes(Vec<u8>),
}

impl Contents {
    fn of(path: &Path) -> Self {
        if path
            .extension()
            .is_none_or(|extension| extension != "jsonl")
        {
            return Self::Bytes(fs::read(path).unwrap());
        }
        let mut lines = lines(path);
        for line in lines.iter_mut().filter_map(Value::as_object_mut) {
            line.remove("tokens_per_second");
        }
        Self::Lines(lines)
    }
}

/// A folder with a run that has ended.
fn trained() -> TempDir {
    let folder = folder(CONFIG);
    succeeds(folder.path(), &["train", "run.yaml"]);
    folder
}

/// The kill times come from a sequence that covers the command's duration evenly. Each command
/// starts at another place in the sequence.
#[rstest]
#[case::train(|| folder(CONFIG), &["train", "run.yaml", "--resume"], "run", 0.1)]
#[case::sft(|| sft::folder(sft::CONFIG), &["sft", "sft.yaml", "--resume"], "sft", 0.3)]
#[case::convert(trained, &["convert", "run", "other", "--force"], "other", 0.5)]
#[case::eval(suites::folder, &["eval", "a", "--suite", "letters.yaml", "--out", "out"], "out", 0.7)]
#[case::report(trained, &["report", "run"], "report.html", 0.9)]
fn a_command_that_is_killed_at_any_instant_ends_bit_identical(
    #[case] prepare: fn() -> TempDir,
    #[case] arguments: &[&str],
    #[case] written: &str,
    #[case] first: f64,
) {
    let whole = prepare();
    let start = Instant::now();
    succeeds(whole.path(), arguments);
    let time = start.elapsed().as_secs_f64();
    let expected = contents(&whole.path().join(written));
    assert!(!expected.is_empty());
    let is_run = matches!(arguments[0], "train" | "sft");
    let mut killed = 0;
    for round in 0..cases(1, 10) {
        // Pages have the times of the run, so they are compared with those of the same one.
        let other = is_run.then(prepare);
        let folder = other.as_ref().unwrap_or(&whole);
        let out = folder.path().join(written);
        match is_run {
            true => {}
            false if out.is_dir() => fs::remove_dir_all(&out).unwrap(),
            false => fs::remove_file(&out).unwrap(),
        }
        for kill in 0..KILLS {
            let number = f64::from(round * KILLS + kill);
            let share = (first + number * 0.618_033_988_749_895).fract();
            let run = Running::start(command(folder.path(), arguments));
            killed += u32::from(run.kill_after(Duration::from_secs_f64(time * share)));
            if !is_run {
                for (name, contents) in contents(&out) {
                    assert!(expected.get(&name) == Some(&contents), "{name:?}");
                }
            } else if out.is_dir() {
                let latest = RunDir::checkpoints(&out).latest().unwrap();
                assert!(latest.damaged.is_empty(), "{:?}", latest.damaged);
            }
        }
        succeeds(folder.path(), arguments);
        let found = contents(&out);
        let names = |files: &BTreeMap<PathBuf, _>| files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(&found), names(&expected));
        for (name, contents) in &found {
            assert!(expected[name] == *contents, "{name:?}");
        }
    }
    println!("{}: {killed} killed", arguments[0]);
}

//! `micro_batch_tokens: auto`, and what `grpo check` advises.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::support::{command, folder, grpo, said, short_config, succeeds};
use super::train::assert_same_run;

fn config(steps: usize, more: &str) -> String {
    format!("{}{more}", short_config(steps))
}

fn fitted(steps: usize, mib: usize) -> String {
    config(
        steps,
        &format!("micro_batch_tokens: auto\nmax_memory_mib: {mib}\n"),
    )
}

fn recorded(folder: &Path) -> Value {
    let text = fs::read_to_string(folder.join("run/config.json")).unwrap();
    let settings: Value = serde_json::from_str(&text).unwrap();
    settings["micro_batch_tokens"].clone()
}

/// The second machine has too little memory for a plan, and the run keeps its first number.
#[test]
fn a_resumed_run_keeps_the_number_that_it_started_with() {
    let (whole, resumed) = (folder(&fitted(4, 100_000)), folder(&fitted(2, 100_000)));
    for folder in [&whole, &resumed] {
        let printed = succeeds(folder.path(), &["train", "run.yaml"]);
        // Two prompts with four completions of up to six tokens are fewer than 64 tokens.
        assert!(
            printed.contains("micro_batch_tokens: auto is 64"),
            "{printed}"
        );
        assert_eq!(recorded(folder.path()), 64);
    }
    fs::write(resumed.path().join("run.yaml"), fitted(4, 1)).unwrap();
    succeeds(resumed.path(), &["train", "run.yaml", "--resume"]);
    assert_eq!(recorded(resumed.path()), 64);
    assert_same_run(resumed.path(), whole.path(), 4);
}

#[test]
fn a_run_that_does_not_fit_is_an_error() {
    let folder = folder(&fitted(2, 1));
    for command in ["train", "check"] {
        let output = grpo(folder.path(), &[command, "run.yaml"]);
        assert_eq!(output.status.code(), Some(3), "{}", said(&output));
        let words = "micro_batch_tokens: auto, but the longest sequence does not fit into 1 MiB (max_memory_mib); no smaller setting is enough";
        assert!(said(&output).contains(words), "{}", said(&output));
        assert!(!folder.path().join("run").exists());
    }
}

#[test]
fn check_prints_the_number_and_whether_the_run_fits() {
    let check = |config: &str| {
        let folder = folder(config);
        succeeds(folder.path(), &["check", "run.yaml"])
    };
    let printed = check(&fitted(2, 100_000));
    assert!(
        printed.contains("micro_batch_tokens: auto is 64 here.\n"),
        "{printed}"
    );
    let printed = check(&config(2, "max_memory_mib: 1\n"));
    assert!(
        printed.contains("This is more than 1 MiB (max_memory_mib); no smaller setting is enough"),
        "{printed}"
    );
    let printed = check(&config(2, "max_memory_mib: 100000\n"));
    assert!(!printed.contains("This is more than"), "{printed}");
}

/// The plan is that of the run's threads, each of which has pages of its own.
#[test]
fn check_counts_the_threads_of_the_run() {
    let allocator = |threads: usize| {
        let threads = format!("threads: {threads}\n");
        let folder = folder(&short_config(2).replace("threads: 1\n", &threads));
        let printed = succeeds(folder.path(), &["check", "run.yaml"]);
        let (_, rest) = printed.split_once("allocator ").expect(&printed);
        rest.split_once(" MiB").unwrap().0.parse::<usize>().unwrap()
    };
    let (one, five) = (allocator(1), allocator(5));
    // 5 to 18 MiB were measured for one more thread (docs/llm.md).
    assert!((4 * 5..=4 * 18).contains(&(five - one)), "{one} and {five}");
}

/// The peaks in MiB that `grpo check` prints: of the run, and by sharding.
fn peaks(printed: &str) -> (usize, Vec<(String, usize)>) {
    let mib = |text: &str| text.split(' ').next().unwrap().parse::<usize>().unwrap();
    let (_, own) = printed.split_once("Memory: at most about ").expect(printed);
    let list = printed.split_once("On each rank, by sharding: ");
    let list = list.map_or("", |(_, list)| list.split_once('.').unwrap().0);
    let list = list.split(", ").filter_map(|part| part.split_once(' '));
    let list = list.map(|(sharding, peak)| (sharding.to_owned(), mib(peak)));
    (mib(own), list.collect())
}

/// A number of ranks is one of the option, or of a launcher.
#[test]
fn check_prints_what_each_rank_needs() {
    let folder = folder(&config(2, "sharding: resident\nmax_memory_mib: 8192\n"));
    let printed = |arguments: &[&str]| succeeds(folder.path(), arguments);
    let (_, alone) = peaks(&printed(&["check", "run.yaml"]));
    assert_eq!(alone, []);
    let (_, alone) = peaks(&printed(&["check", "--ranks", "1", "run.yaml"]));
    assert_eq!(alone, []);
    let mut launched = command(folder.path(), &["check", "run.yaml"]);
    for (variable, value) in [("WORLD_SIZE", "4"), ("RANK", "0"), ("LOCAL_RANK", "0")] {
        launched.env(variable, value);
    }
    let launched = launched.output().unwrap();
    assert!(launched.status.success(), "{}", said(&launched));
    for printed in [
        printed(&["check", "--ranks", "4", "run.yaml"]),
        String::from_utf8(launched.stdout).unwrap(),
    ] {
        let (own, all) = peaks(&printed);
        let names: Vec<&str> = all.iter().map(|(sharding, _)| sharding.as_str()).collect();
        let expected = ["none", "optimizer", "resident", "full"];
        assert_eq!(names, expected, "{printed}");
        // What the ranks of the run divide.
        assert_eq!(own, all[2].1, "{printed}");
        // To draw, ranks that divide all weights gather them beside their parts.
        assert!(all[..3].is_sorted_by(|a, b| a.1 >= b.1), "{printed}");
        let words = "Of these, sharding: optimizer fits into 8192 MiB (max_memory_mib).\n";
        assert!(printed.contains(words), "{printed}");
    }
    let output = grpo(folder.path(), &["check", "--ranks", "0", "run.yaml"]);
    assert_eq!(output.status.code(), Some(2), "{}", said(&output));
}

#[test]
fn another_word_than_auto_is_an_error() {
    let folder = folder(&config(2, "micro_batch_tokens: all\n"));
    let output = grpo(folder.path(), &["check", "run.yaml"]);
    assert_eq!(output.status.code(), Some(3), "{}", said(&output));
    let words = "micro_batch_tokens: expected a number of tokens or auto";
    assert!(said(&output).contains(words), "{}", said(&output));
}

/// The bits do not depend on the recomputed layers.
#[test]
fn a_resumed_run_may_recompute_other_layers() {
    let (whole, resumed) = (
        folder(&config(4, "")),
        folder(&config(2, "activation_checkpointing: 1\n")),
    );
    for folder in [&whole, &resumed] {
        succeeds(folder.path(), &["train", "run.yaml"]);
    }
    let config = config(4, "activation_checkpointing: true\n");
    fs::write(resumed.path().join("run.yaml"), config).unwrap();
    succeeds(resumed.path(), &["train", "run.yaml", "--resume"]);
    assert_same_run(resumed.path(), whole.path(), 4);
}

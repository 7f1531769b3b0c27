//! Event files as TensorBoard itself reads them.

use std::env;
use std::process::Command;

use candle_grpo::train::run::EventFile;
use serde_json::{Value, json};

/// Prints a folder's scalars by name, as lists of step and value.
const READER: &str = r#"
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1]).Reload()
print(json.dumps({tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"#;

#[test]
fn tensorboard_reads_what_is_written() {
    let Some(python) = env::var_os("CANDLE_GRPO_TENSORBOARD_PYTHON") else {
        eprintln!("skipped: CANDLE_GRPO_TENSORBOARD_PYTHON names no Python with tensorboard");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let mut first = EventFile::create(folder.path()).unwrap();
    first
        .write_scalars(1, [("reward_mean", 0.25), ("seconds/train", 1.5)])
        .unwrap();
    first
        .write_scalars(200, [("reward_mean", -0.5), ("seconds/train", 1e6)])
        .unwrap();
    // A run that is taken up again has a second file.
    let mut second = EventFile::create(folder.path()).unwrap();
    second.write_scalars(70_000, [("reward_mean", 1.)]).unwrap();
    let output = Command::new(python)
        .args(["-c", READER])
        .arg(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let read: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        read,
        json!({
            "reward_mean": [[1, 0.25], [200, -0.5], [70_000, 1.]],
            "seconds/train": [[1, 1.5], [200, 1e6]],
        })
    );
    for words in ["rror", "corrupt"] {
        assert!(!said.contains(words), "{said}");
    }
}

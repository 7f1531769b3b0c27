//! Runs the program once with a kill, and once without.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

fn program(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-grpo-example-own-model"));
    command.arg(folder).args(["6", "2"]).stdout(Stdio::piped());
    command
}

#[test]
fn a_killed_run_resumes_bit_identically() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, killed] = ["whole", "killed"].map(|name| folder.path().join(name));
    assert!(program(&whole).output().unwrap().status.success());

    let mut running = program(&killed).spawn().unwrap();
    let lines = BufReader::new(running.stdout.take().unwrap()).lines();
    let saved = lines
        .map(Result::unwrap)
        .find(|line| line.starts_with("saved"));
    assert_eq!(saved.as_deref(), Some("saved step 2"));
    running.kill().unwrap();
    running.wait().unwrap();
    let resumed = program(&killed).output().unwrap();
    assert!(resumed.status.success());
    assert!(String::from_utf8_lossy(&resumed.stdout).starts_with("resumed after step "));

    let last = Path::new("step-000006");
    for name in [
        "model.safetensors",
        "optimizer.safetensors",
        "trainer.json",
        "config.json",
    ] {
        let bytes = |run: &Path| fs::read(run.join(last).join(name)).unwrap();
        assert_eq!(bytes(&whole), bytes(&killed), "{name}");
    }
}

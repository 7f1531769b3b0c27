//! Files and folders that are written atomically.

use std::ffi::OsString;
use std::fs;
use std::io::Error;
use std::path::Path;

use candle_core::{Device, Result};
use candle_grpo_nn::{AdamW, AdamWConfig, Parameters, atomic_file};

use crate::small::config;

#[test]
fn parameters_and_optimizer_state_are_files_with_the_default_mode() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [model, state, other] = ["model", "state", "other"].map(|name| folder.path().join(name));
    let parameters = Parameters::init(&config(false), 1, &Device::Cpu)?;
    let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters)?;
    parameters.save(&model)?;
    optimizer.save_state(&state)?;
    fs::write(&other, "a plain file")?;
    optimizer.load_state(candle_core::safetensors::load(&state, &Device::Cpu)?)?;
    assert_eq!(fs::read_dir(folder.path())?.count(), 3);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path| fs::metadata(path).map(|m| m.permissions().mode());
        assert_eq!(mode(&model)?, mode(&other)?);
        assert_eq!(mode(&state)?, mode(&other)?);
    }
    Ok(())
}

#[test]
fn a_file_that_cannot_be_written_leaves_the_folder_unchanged() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("taken");
    fs::create_dir(&path)?;
    assert!(atomic_file::write(&path, b"x").is_err());
    assert!(atomic_file::write(&folder.path().join(".."), b"x").is_err());
    assert!(path.is_dir());
    assert_eq!(fs::read_dir(folder.path())?.count(), 1);
    Ok(())
}

fn names(folder: &Path) -> Vec<OsString> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

fn write_folder_with(path: &Path, name: &str) {
    atomic_file::write_folder(path, |fresh| fs::write(fresh.join(name), name)).unwrap();
}

#[test]
fn a_folder_replaces_the_previous_one_completely() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    write_folder_with(&path, "first");
    write_folder_with(&path, "second");
    assert_eq!(names(&path), ["second"]);
    assert_eq!(names(folder.path()), ["checkpoint"]);
}

#[test]
fn a_failed_write_keeps_the_previous_folder_and_leaves_no_temporary_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    write_folder_with(&path, "first");
    let error = atomic_file::write_folder(&path, |fresh| {
        fs::write(fresh.join("second"), "half of the s")?;
        Err(Error::other("disk full"))
    })
    .unwrap_err();
    assert_eq!(error.to_string(), "disk full");
    assert_eq!(names(&path), ["first"]);
    assert_eq!(names(folder.path()), ["checkpoint"]);
}

#[test]
fn only_temporary_names_are_removed_as_leftovers() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        ".a.7.tmp",
        ".a.b.12.old",
        ".config",
        "a.7.tmp",
        ".a.tmp",
        ".a.x.tmp",
    ] {
        fs::write(folder.path().join(name), "").unwrap();
    }
    fs::create_dir_all(folder.path().join(".c.3.tmp/full")).unwrap();
    atomic_file::remove_leftovers(folder.path()).unwrap();
    assert_eq!(
        names(folder.path()),
        [".a.tmp", ".a.x.tmp", ".config", "a.7.tmp"]
    );
}

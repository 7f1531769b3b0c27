//! Files on disk: whole, and readable by whom the umask lets.

use std::fs;

use candle_core::{Device, Result};
use candle_grpo_nn::{AdamW, AdamWConfig, Parameters, write_whole};

use crate::small::config;

#[test]
fn the_state_of_an_optimizer_is_a_file_like_the_parameters() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [model, state, other] = ["model", "state", "other"].map(|name| folder.path().join(name));
    let parameters = Parameters::init(&config(false), 1, &Device::Cpu)?;
    let mut optimizer = AdamW::new(AdamWConfig::default(), &parameters)?;
    parameters.save(&model)?;
    optimizer.save_state(&state)?;
    fs::write(&other, "made without ceremony")?;
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
fn a_file_that_cannot_be_written_leaves_what_was_there() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("taken");
    fs::create_dir(&path)?;
    assert!(write_whole(&path, b"x").is_err());
    assert!(write_whole(&folder.path().join(".."), b"x").is_err());
    assert!(path.is_dir());
    assert_eq!(fs::read_dir(folder.path())?.count(), 1);
    Ok(())
}

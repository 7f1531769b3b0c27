//! `grpo report`.

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use candle_grpo::nn::write_whole;
use candle_grpo::report::{Run, report_html};

use super::exit::Exit;

/// Writes a page about the runs in `folders` to `out`.
pub(super) fn report(folders: &[PathBuf], out: &Path) -> Result<(), Exit> {
    let runs = folders.iter().map(|folder| Run::read(folder));
    let runs: Vec<Run> = runs
        .collect::<anyhow::Result<_>>()
        .map_err(|error| Exit::Data(format!("{error:#}")))?;
    write_whole(out, report_html(&runs).as_bytes())
        .map_err(|error| Exit::Run(format!("writing {}: {error}", out.display())))?;
    writeln!(stdout(), "{}", out.display())?;
    Ok(())
}

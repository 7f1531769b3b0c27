//! `grpo report`.

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use candle_grpo::report::{REPORT_START, Run, report_html};

use super::exit::Exit;
use super::output;

/// Writes a page about the runs in `folders` to `out`.
pub(super) fn report(folders: &[PathBuf], out: &Path, force: bool) -> Result<(), Exit> {
    output::check(out, force, folders, |line| line.trim_end() == REPORT_START)?;
    let mut runs = Vec::new();
    for folder in folders {
        let run = Run::read(folder).map_err(|error| Exit::Data(format!("{error:#}")))?;
        if run.steps.is_empty() && run.evaluations.is_empty() {
            return Err(Exit::Data(format!(
                "{}: the run has no steps and no evaluations to show yet",
                folder.display()
            )));
        }
        runs.push(run);
    }
    output::write(out, report_html(&runs).as_bytes())?;
    writeln!(stdout(), "{}", out.display())?;
    Ok(())
}

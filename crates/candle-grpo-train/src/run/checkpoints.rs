//! The checkpoints of a run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_grpo_nn::atomic_file;

use super::checksums::{check_checksums, write_checksums};

const PREFIX: &str = "step-";

/// The folder in which a run keeps its checkpoints, `step-000010` and so on: each is there as a whole or not at all, with
/// the sums of its files in `SHA256SUMS`.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// A checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepCheckpoint {
    /// After so many steps.
    pub step: usize,
    /// Where it is.
    pub path: PathBuf,
}

/// What [`Checkpoints::latest`] finds.
#[derive(Debug, Default)]
pub struct LatestCheckpoint {
    /// The last one that is whole, if there is one.
    pub checkpoint: Option<StepCheckpoint>,
    /// Later ones, and what is wrong with each.
    pub damaged: Vec<(StepCheckpoint, String)>,
}

impl Checkpoints {
    /// Those in `folder`, which need not be there yet.
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
        }
    }

    /// Writes one: `fill` fills its folder, with files that are flushed to the disk.
    ///
    /// It appears when it is complete and its sums are noted. After an error, such as that of a full disk, nothing of it is left
    /// and the others are as they were.
    pub fn write(&self, step: usize, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        fs::create_dir_all(&self.folder)
            .with_context(|| format!("making {}", self.folder.display()))?;
        // What was being written when a program was killed would keep its place on a full disk.
        atomic_file::remove_leftovers(&self.folder)?;
        let path = self.folder.join(format!("{PREFIX}{step:06}"));
        atomic_file::write_folder(&path, |folder| {
            fill(folder)?;
            write_checksums(folder)
        })
        .with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// All that are there, in the order of their steps, whole or not.
    pub fn all(&self) -> Result<Vec<StepCheckpoint>> {
        if !self.folder.is_dir() {
            return Ok(Vec::new());
        }
        let mut found = Vec::new();
        let reading = || format!("reading {}", self.folder.display());
        for entry in fs::read_dir(&self.folder).with_context(reading)? {
            let entry = entry.with_context(reading)?;
            let name = entry.file_name();
            let step = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
            if let Some(Ok(step)) = step.map(str::parse) {
                let path = entry.path();
                found.push(StepCheckpoint { step, path });
            }
        }
        found.sort_by_key(|checkpoint| checkpoint.step);
        Ok(found)
    }

    /// The last one whose files are all as they were written.
    pub fn latest(&self) -> Result<LatestCheckpoint> {
        let mut latest = LatestCheckpoint::default();
        for checkpoint in self.all()?.into_iter().rev() {
            match check_checksums(&checkpoint.path) {
                Ok(()) => {
                    latest.checkpoint = Some(checkpoint);
                    break;
                }
                Err(error) => latest.damaged.push((checkpoint, format!("{error:#}"))),
            }
        }
        Ok(latest)
    }

    /// Removes all but the last `keep`, at least one, and those after the steps `also`.
    pub fn prune(&self, keep: usize, also: &[usize]) -> Result<()> {
        let mut old = self.all()?;
        old.truncate(old.len().saturating_sub(keep.max(1)));
        old.retain(|checkpoint| !also.contains(&checkpoint.step));
        old.iter().try_for_each(remove)
    }

    /// Removes those of later steps than `step`.
    pub fn remove_after(&self, step: usize) -> Result<()> {
        let mut later = self.all()?;
        later.retain(|checkpoint| checkpoint.step > step);
        later.iter().try_for_each(remove)
    }
}

fn remove(checkpoint: &StepCheckpoint) -> Result<()> {
    atomic_file::remove_folder(&checkpoint.path)
        .with_context(|| format!("removing {}", checkpoint.path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn checkpoints(steps: &[usize]) -> (tempfile::TempDir, Checkpoints) {
        let folder = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::new(&folder.path().join("checkpoints"));
        for &step in steps {
            write(&checkpoints, step);
        }
        (folder, checkpoints)
    }

    fn write(checkpoints: &Checkpoints, step: usize) {
        let fill = |folder: &Path| Ok(fs::write(folder.join("state"), step.to_string())?);
        checkpoints.write(step, fill).unwrap();
    }

    fn steps(checkpoints: &Checkpoints) -> Vec<usize> {
        let all = checkpoints.all().unwrap();
        all.into_iter().map(|checkpoint| checkpoint.step).collect()
    }

    #[test]
    fn the_latest_whole_one_is_found_and_what_is_wrong_with_later_ones() {
        let (_folder, checkpoints) = checkpoints(&[5, 10, 15, 100]);
        let latest = checkpoints.latest().unwrap();
        assert_eq!(latest.checkpoint.unwrap().step, 100);
        assert!(latest.damaged.is_empty());

        let file = |step| checkpoints.folder.join(format!("step-{step:06}/state"));
        fs::write(file(100), "1").unwrap();
        fs::remove_file(file(15)).unwrap();
        let latest = checkpoints.latest().unwrap();
        assert_eq!(latest.checkpoint.unwrap().step, 10);
        let damaged = latest.damaged.iter();
        let damaged: Vec<_> = damaged.map(|(c, what)| (c.step, what.as_str())).collect();
        assert_eq!(
            damaged,
            [(100, "state: is damaged"), (15, "state: is missing")]
        );
    }

    #[test]
    fn there_may_be_none() {
        let (_folder, checkpoints) = checkpoints(&[]);
        assert!(checkpoints.latest().unwrap().checkpoint.is_none());
        checkpoints.prune(1, &[]).unwrap();
    }

    #[test]
    fn the_last_ones_and_the_best_are_kept() {
        let (_folder, checkpoints) = checkpoints(&[5, 10, 15, 20]);
        checkpoints.prune(2, &[5]).unwrap();
        assert_eq!(steps(&checkpoints), [5, 15, 20]);
        checkpoints.remove_after(15).unwrap();
        assert_eq!(steps(&checkpoints), [5, 15]);
        checkpoints.prune(0, &[]).unwrap();
        assert_eq!(steps(&checkpoints), [15]);
        assert_eq!(fs::read_dir(&checkpoints.folder).unwrap().count(), 1);
    }

    #[test]
    fn what_a_killed_program_was_writing_goes() {
        let (_folder, checkpoints) = checkpoints(&[5]);
        fs::create_dir(checkpoints.folder.join(".step-000010.1.tmp")).unwrap();
        write(&checkpoints, 10);
        assert_eq!(fs::read_dir(&checkpoints.folder).unwrap().count(), 2);
    }

    #[test]
    fn one_that_could_not_be_written_leaves_the_others_as_they_were() {
        let (_folder, checkpoints) = checkpoints(&[5]);
        let full = |folder: &Path| -> Result<()> {
            fs::write(folder.join("state"), "1")?;
            bail!("no space left on device")
        };
        let error = format!("{:#}", checkpoints.write(10, full).unwrap_err());
        assert!(
            error.ends_with("step-000010: no space left on device"),
            "{error}"
        );
        assert_eq!(checkpoints.latest().unwrap().checkpoint.unwrap().step, 5);
        assert_eq!(fs::read_dir(&checkpoints.folder).unwrap().count(), 1);
    }
}

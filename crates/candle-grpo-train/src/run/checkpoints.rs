//! The checkpoints of a run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_grpo_base::atomic_file;

use crate::checksums::{check_checksums, write_checksums};
use crate::owned_files::Owned;

const PREFIX: &str = "step-";

/// The folder of the checkpoints of a run: `step-000010` and so on. Each appears complete or not at
/// all, with the sums of its files in `SHA256SUMS`.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    folder: PathBuf,
}

/// A checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepCheckpoint {
    /// The number of steps before it.
    pub step: usize,
    /// Its folder.
    pub path: PathBuf,
}

/// The result of [`Checkpoints::latest`].
#[derive(Debug, Default)]
pub struct LatestCheckpoint {
    /// The last intact checkpoint.
    pub checkpoint: Option<StepCheckpoint>,
    /// Later checkpoints that are damaged, with the reasons.
    pub damaged: Vec<(StepCheckpoint, String)>,
}

impl Checkpoints {
    /// The checkpoints in `folder`, which may be absent.
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_path_buf(),
        }
    }

    /// Writes a checkpoint. `fill` writes the files into its folder and flushes them.
    ///
    /// The checkpoint appears when it is complete and has its sums. After an error, such as a full
    /// disk, nothing of it is left, and the others are unchanged.
    pub fn write(&self, step: usize, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        fs::create_dir_all(&self.folder)
            .with_context(|| format!("making {}", self.folder.display()))?;
        self.remove_leftovers()?;
        let path = self.path(step);
        atomic_file::write_folder(&path, |folder| {
            fill(folder)?;
            write_checksums(folder)
        })
        .with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// Removes what a killed program has left, which takes space on a full disk.
    pub(super) fn remove_leftovers(&self) -> Result<()> {
        if self.folder.is_dir() {
            Ok(atomic_file::remove_leftovers(&self.folder)?)
        } else {
            Ok(())
        }
    }

    /// The folder of the checkpoint after `step` steps, which may be absent.
    pub fn path(&self, step: usize) -> PathBuf {
        self.folder.join(format!("{PREFIX}{step:06}"))
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

    /// Finds the last intact checkpoint: all sums are right.
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

    /// Removes all except the last `keep` (at least one) and those of the steps `also`.
    ///
    /// A checkpoint with files that no run writes is set aside: it is renamed. Returns the new
    /// paths of these.
    pub fn prune(&self, keep: usize, also: &[usize]) -> Result<Vec<PathBuf>> {
        let mut old = self.all()?;
        old.truncate(old.len().saturating_sub(keep.max(1)));
        old.retain(|checkpoint| !also.contains(&checkpoint.step));
        remove(&old)
    }

    /// Removes the checkpoints of steps after `step`, and sets aside as [`Self::prune`] does.
    pub fn remove_after(&self, step: usize) -> Result<Vec<PathBuf>> {
        let mut later = self.all()?;
        later.retain(|checkpoint| checkpoint.step > step);
        remove(&later)
    }
}

/// Removes checkpoints, and renames those that hold a file that no run writes.
fn remove(checkpoints: &[StepCheckpoint]) -> Result<Vec<PathBuf>> {
    let mut set_aside = Vec::new();
    for StepCheckpoint { path, .. } in checkpoints {
        let removing = || format!("removing {}", path.display());
        if Owned::Checkpoint.first_foreign(path)?.is_some() {
            let kept = path.with_extension(format!("kept-{}", std::process::id()));
            fs::rename(path, &kept).with_context(removing)?;
            set_aside.push(kept);
        } else {
            atomic_file::remove_folder(path).with_context(removing)?;
        }
    }
    Ok(set_aside)
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
        let fill = |folder: &Path| Ok(fs::write(folder.join("trainer.json"), step.to_string())?);
        checkpoints.write(step, fill).unwrap();
    }

    fn steps(checkpoints: &Checkpoints) -> Vec<usize> {
        let all = checkpoints.all().unwrap();
        all.into_iter().map(|checkpoint| checkpoint.step).collect()
    }

    #[test]
    fn the_latest_intact_checkpoint_is_found_and_later_damage_reported() {
        let (_folder, checkpoints) = checkpoints(&[5, 10, 15, 100]);
        let latest = checkpoints.latest().unwrap();
        assert_eq!(latest.checkpoint.unwrap().step, 100);
        assert!(latest.damaged.is_empty());

        let file = |step| {
            checkpoints
                .folder
                .join(format!("step-{step:06}/trainer.json"))
        };
        fs::write(file(100), "1").unwrap();
        fs::remove_file(file(15)).unwrap();
        let latest = checkpoints.latest().unwrap();
        assert_eq!(latest.checkpoint.unwrap().step, 10);
        let damaged = latest.damaged.iter();
        let damaged: Vec<_> = damaged.map(|(c, what)| (c.step, what.as_str())).collect();
        assert_eq!(
            damaged,
            [
                (100, "trainer.json: is damaged"),
                (15, "trainer.json: is missing")
            ]
        );
    }

    #[test]
    fn an_absent_folder_has_no_checkpoints() {
        let (_folder, checkpoints) = checkpoints(&[]);
        assert!(checkpoints.latest().unwrap().checkpoint.is_none());
        checkpoints.prune(1, &[]).unwrap();
    }

    #[test]
    fn files_of_others_outlive_their_checkpoint() {
        let (folder, checkpoints) = checkpoints(&[5, 10]);
        fs::write(checkpoints.folder.join("step-000005/notes.txt"), "mine").unwrap();
        let set_aside = checkpoints.prune(1, &[]).unwrap();
        assert_eq!(steps(&checkpoints), [10]);
        let kept = format!("checkpoints/step-000005.kept-{}", std::process::id());
        let kept = folder.path().join(kept);
        let notes = fs::read_to_string(kept.join("notes.txt")).unwrap();
        assert_eq!(set_aside, [kept]);
        assert_eq!(notes, "mine");
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
    fn leftovers_of_a_killed_program_are_removed() {
        let (_folder, checkpoints) = checkpoints(&[5]);
        fs::create_dir(checkpoints.folder.join(".step-000010.1.tmp")).unwrap();
        write(&checkpoints, 10);
        assert_eq!(fs::read_dir(&checkpoints.folder).unwrap().count(), 2);
    }

    #[test]
    fn a_checkpoint_that_cannot_be_written_leaves_the_others_unchanged() {
        let (_folder, checkpoints) = checkpoints(&[5]);
        let full = |folder: &Path| -> Result<()> {
            fs::write(folder.join("trainer.json"), "1")?;
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

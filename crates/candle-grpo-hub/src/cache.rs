//! The hub cache, in the same layout as Hugging Face's Python library.
//!
//! ```text
//! models--ORG--NAME/
//!   refs/main                     the commit of the branch
//!   blobs/ETAG                    the contents of a file
//!   snapshots/COMMIT/config.json  a link to ../../blobs/ETAG
//!   trees/COMMIT.json             the files of the commit; the Python library alone writes it
//! ```

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, Hasher};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::name::{HubKind, HubName};

/// Marks names of partial files written by this program.
const OWN: &str = "grpo-";
/// Suffix of partial file names.
const INCOMPLETE: &str = ".incomplete";

/// A cached repository.
pub(super) struct Repository {
    folder: PathBuf,
}

#[derive(Deserialize)]
struct Tree {
    files: BTreeMap<String, IgnoredAny>,
}

impl Repository {
    pub(super) fn new(cache: &Path, name: &HubName) -> Self {
        let kind = match name.kind() {
            HubKind::Model => "models",
            HubKind::Dataset => "datasets",
        };
        let id = name.id().replace('/', "--");
        Self {
            folder: cache.join(format!("{kind}--{id}")),
        }
    }

    /// The commit that a revision had when it was last requested.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = fs::read_to_string(self.folder.join("refs").join(revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Records a revision's commit.
    pub(super) fn set_commit(&self, revision: &str, commit: &str) -> io::Result<()> {
        if revision == commit || self.commit(revision).as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        replace(&path, |fresh| fs::write(fresh, commit))
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    pub(super) fn has(&self, commit: &str, file: &str) -> bool {
        self.snapshot(commit).join(file).is_file()
    }

    /// All files in a commit, if the Python library has listed them.
    pub(super) fn list(&self, commit: &str) -> Option<Vec<String>> {
        let list = self.folder.join("trees").join(format!("{commit}.json"));
        let list: Tree = serde_json::from_slice(&fs::read(list).ok()?).ok()?;
        Some(list.files.into_keys().collect())
    }

    /// A commit's cached files.
    pub(super) fn files(&self, commit: &str) -> Vec<String> {
        files_in(&self.snapshot(commit))
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// Links `file` in the commit to a blob.
    pub(super) fn link(&self, commit: &str, file: &str, etag: &str) -> io::Result<()> {
        // From the file's folder to the repository's.
        let mut target: PathBuf = vec![".."; file.split('/').count() + 1].iter().collect();
        target.extend(["blobs", etag]);
        replace(&self.snapshot(commit).join(file), |fresh| {
            symlink(&target, fresh).or_else(|_| copy(&self.blob(etag), fresh))
        })
    }
}

/// Calls `make` with another path, and moves the result to `place`. Several processes may do this
/// at once, even on several machines.
fn replace(place: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    create_parent(place)?;
    let fresh = beside(place);
    let made = make(&fresh).and_then(|()| fs::rename(&fresh, place));
    if made.is_err() {
        // Report the first error.
        let _ = fs::remove_file(&fresh);
    }
    made
}

/// A file that is being downloaded. It is removed unless it is finished.
///
/// The file is locked while it is open, so that other programs can see that it is in use.
pub(super) struct Part {
    pub(super) file: File,
    path: PathBuf,
    blob: PathBuf,
    is_finished: bool,
}

impl Part {
    /// Creates a file next to `blob`. Removes leftovers for the same blob from a killed run of this
    /// program.
    pub(super) fn create(blob: &Path) -> io::Result<Self> {
        create_parent(blob)?;
        remove_abandoned(blob);
        loop {
            let path = beside(blob);
            let mut options = OpenOptions::new();
            let file = options.write(true).create_new(true).open(&path)?;
            // File systems without locks return an error.
            let _ = file.lock();
            // Before it was locked, another program may have considered it abandoned.
            if path.exists() {
                return Ok(Self {
                    file,
                    path,
                    blob: blob.to_path_buf(),
                    is_finished: false,
                });
            }
        }
    }

    /// Moves the file to the blob's path.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.file.sync_all()?;
        fs::rename(&self.path, &self.blob)?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_finished {
            // Report the error that ended the download.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Returns whether `text` is a full commit hash.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40
        && text
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A free name for a partial `path` in the same folder.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    // Its keys are random.
    let random = RandomState::new().build_hasher().finish();
    name.push(format!(".{OWN}{random:016x}{INCOMPLETE}"));
    path.with_file_name(name)
}

/// Removes partial files for `blob` that this program has written and that no process has open.
fn remove_abandoned(blob: &Path) {
    let (Some(folder), Some(name)) = (blob.parent(), blob.file_name()) else {
        return;
    };
    let prefix = format!("{}.{OWN}", name.to_string_lossy());
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !(name.starts_with(&prefix) && name.ends_with(INCOMPLETE)) {
            continue;
        }
        if let Ok(part) = OpenOptions::new().write(true).open(entry.path())
            && part.try_lock().is_ok()
        {
            // If it cannot be removed, it only takes space.
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn create_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

/// Paths of all files in `folder` and its subfolders, with slashes.
fn files_in(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![(String::new(), folder.to_path_buf())];
    while let Some((prefix, folder)) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
            let path = entry.path();
            if path.is_dir() {
                folders.push((format!("{name}/"), path));
            } else if path.is_file() {
                found.push(name);
            }
        }
    }
    found.sort();
    found
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target, link)
}

#[cfg(not(any(unix, windows)))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(ErrorKind::Unsupported.into())
}

/// Hard-links `to` to `from`, or else copies it.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    match fs::remove_file(to) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::hard_link(from, to).or_else(|_| fs::copy(from, to).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn repository(folder: &Path) -> Repository {
        let name = HubName::of(Path::new("hf://a/b")).unwrap().unwrap();
        Repository::new(folder, &name)
    }

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn links_are_relative_and_replace_what_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let repository = repository(folder.path());
        for (etag, contents) in [("e1", "one"), ("e2", "two")] {
            create_parent(&repository.blob(etag)).unwrap();
            fs::write(repository.blob(etag), contents).unwrap();
            repository.link(COMMIT, "d/config.json", etag).unwrap();
            let place = repository.snapshot(COMMIT).join("d/config.json");
            assert_eq!(fs::read_to_string(&place).unwrap(), contents);
            #[cfg(unix)]
            assert_eq!(
                fs::read_link(&place).unwrap(),
                Path::new("../../../blobs").join(etag)
            );
        }
        assert_eq!(repository.files(COMMIT), ["d/config.json"]);
    }

    #[test]
    fn a_copy_takes_the_place_of_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("from"), folder.path().join("to"));
        fs::write(&from, "one").unwrap();
        for _ in 0..2 {
            copy(&from, &to).unwrap();
            assert_eq!(fs::read_to_string(&to).unwrap(), "one");
        }
        assert!(!to.is_symlink());
    }

    #[test]
    fn a_part_that_is_dropped_is_removed_and_one_in_use_stays() {
        let folder = tempfile::tempdir().unwrap();
        let blob = folder.path().join("blobs/etag");
        let parts = || fs::read_dir(folder.path().join("blobs")).unwrap().count();
        let first = Part::create(&blob).unwrap();
        let second = Part::create(&blob).unwrap();
        assert_eq!(parts(), 2);
        drop(second);
        assert_eq!(parts(), 1);
        let left = beside(&blob);
        let of_other_program = folder.path().join("blobs/etag.1a2b3c4d.incomplete");
        fs::write(&left, "killed").unwrap();
        fs::write(&of_other_program, "").unwrap();
        Part::create(&blob).unwrap().finish().unwrap();
        assert!(!left.exists() && of_other_program.exists() && blob.exists());
        drop(first);
        assert_eq!(parts(), 2);
    }

    #[test]
    fn a_list_of_files_has_also_those_that_are_missing() {
        let folder = tempfile::tempdir().unwrap();
        let repository = repository(folder.path());
        let trees = repository.folder.join("trees");
        fs::create_dir_all(&trees).unwrap();
        fs::create_dir_all(repository.snapshot(COMMIT)).unwrap();
        fs::write(repository.snapshot(COMMIT).join("a"), "").unwrap();
        assert_eq!(repository.files(COMMIT), ["a"]);
        assert_eq!(repository.list(COMMIT), None);
        let list = r#"{"format_version": 1, "files": {"a": {"size": 0}, "b": {"size": 1}}}"#;
        fs::write(trees.join(format!("{COMMIT}.json")), list).unwrap();
        assert_eq!(repository.list(COMMIT).unwrap(), ["a", "b"]);
    }

    #[test]
    fn references_that_are_no_commits_are_absent() {
        let folder = tempfile::tempdir().unwrap();
        let repository = repository(folder.path());
        assert_eq!(repository.commit("main"), None);
        repository.set_commit("refs/pr/1", COMMIT).unwrap();
        assert_eq!(repository.commit("refs/pr/1").as_deref(), Some(COMMIT));
        assert_eq!(repository.commit(COMMIT).as_deref(), Some(COMMIT));
        fs::write(repository.folder.join("refs/main"), "../../x").unwrap();
        assert_eq!(repository.commit("main"), None);
    }
}

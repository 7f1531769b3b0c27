//! Files to upload.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_grpo_base::checksum::hex;
use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::client::{Client, Failure};
use crate::name::is_file;

/// Folders that the hub rejects: git's, and the Python library's.
const SKIPPED: [&str; 2] = [".git", ".cache"];
/// Bytes from the beginning of a file, with which the hub decides on its storage.
const SAMPLE: u64 = 512;
const BUFFER: usize = 1 << 18;

/// A file to upload.
#[derive(Debug)]
pub(super) struct LocalFile {
    /// Path in the repository.
    pub(super) path: String,
    place: PathBuf,
    /// The size in bytes.
    pub(super) size: u64,
}

/// Lists the files in a folder and below, ordered by path. Links to files are files.
pub(super) fn list(folder: &Path) -> Result<Vec<LocalFile>> {
    ensure!(
        folder.is_dir(),
        "{}: must be a directory with the files to upload",
        folder.display()
    );
    let mut files = Vec::new();
    add(folder, "", &mut files)?;
    ensure!(
        !files.is_empty(),
        "{}: has no files, must be a directory with the files to upload",
        folder.display()
    );
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

/// Adds the files in a folder, whose path in the repository is `prefix`.
fn add(folder: &Path, prefix: &str, files: &mut Vec<LocalFile>) -> Result<()> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    for entry in entries {
        let place = entry.with_context(|| folder.display().to_string())?.path();
        let shown = place.display();
        let name = place.file_name().and_then(|name| name.to_str());
        let Some(name) = name.filter(|name| is_file(name)) else {
            bail!("{shown}: must have a name in UTF-8 without control characters, `\\` and `:`");
        };
        let path = format!("{prefix}{name}");
        let is_link = place.is_symlink();
        let metadata = fs::metadata(&place).with_context(|| shown.to_string())?;
        if metadata.is_file() {
            let size = metadata.len();
            files.push(LocalFile { path, place, size });
        } else if !metadata.is_dir() || is_link {
            bail!("{shown}: must be a file, a link to a file, or a directory");
        } else if !SKIPPED.contains(&name) {
            add(&place, &format!("{path}/"), files)?;
        }
    }
    Ok(())
}

impl LocalFile {
    /// Reads the first bytes.
    pub(super) fn sample(&self) -> Result<Vec<u8>> {
        let mut sample = Vec::new();
        let read =
            File::open(&self.place).and_then(|file| file.take(SAMPLE).read_to_end(&mut sample));
        read.with_context(|| self.place.display().to_string())?;
        Ok(sample)
    }

    /// Reads the whole file.
    pub(super) fn contents(&self) -> Result<Vec<u8>> {
        fs::read(&self.place).with_context(|| self.place.display().to_string())
    }

    /// The hash that names a file in large file storage.
    pub(super) fn sha256(&self, client: &Client) -> Result<String, Failure> {
        let failed = |error: io::Error| {
            let error = anyhow::Error::new(error).context(self.place.display().to_string());
            Failure::Other(error)
        };
        let mut file = File::open(&self.place).map_err(failed)?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; BUFFER];
        loop {
            client.ensure_not_canceled()?;
            match file.read(&mut buffer) {
                Ok(0) => return Ok(hex(&hash.finalize())),
                Ok(read) => hash.update(&buffer[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// Opens the `size` bytes from `start` on, which are reported as progress once, even if they
    /// are sent again.
    pub(super) fn open<'a>(
        &self,
        start: u64,
        size: u64,
        client: &'a Client,
        reported: &'a mut u64,
    ) -> Result<Part<'a>, Failure> {
        let opened = File::open(&self.place).and_then(|mut file| {
            file.seek(SeekFrom::Start(start))?;
            Ok(file)
        });
        let file = opened
            .with_context(|| self.place.display().to_string())
            .map_err(Failure::Other)?;
        Ok(Part {
            file,
            position: start,
            end: start + size,
            client,
            reported,
        })
    }
}

/// Returns git's hash of a file's contents.
pub(super) fn git_hash(contents: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(format!("blob {}\0", contents.len()));
    hash.update(contents);
    hex(&hash.finalize())
}

/// A part of a file while it is sent.
pub(super) struct Part<'a> {
    file: File,
    position: u64,
    end: u64,
    client: &'a Client<'a>,
    /// The end of the bytes that were reported as progress.
    reported: &'a mut u64,
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.client.progress.is_canceled() {
            return Err(io::Error::other("canceled"));
        }
        let left = usize::try_from(self.end - self.position).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        let read = self.file.read(&mut buffer[..length])?;
        if read == 0 && length > 0 {
            let message = "the file became shorter during the upload";
            return Err(io::Error::new(ErrorKind::UnexpectedEof, message));
        }
        self.position += read as u64;
        let new = self.position.saturating_sub(*self.reported);
        self.client.progress.advance(new as usize, 0);
        *self.reported += new;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_git() {
        // `git hash-object` of an empty file and of "what is up, doc?" (Pro Git, section 10.2).
        assert_eq!(git_hash(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert_eq!(
            git_hash(b"what is up, doc?"),
            "bd9dbf5aae1a3862dd1526723246b20206e5fc37"
        );
    }

    #[test]
    fn files_are_listed_by_path_without_those_of_git() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path();
        for name in [
            "b/é.json",
            "a.txt",
            ".git/config",
            "b/.cache/x",
            ".gitattributes",
        ] {
            let path = place.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, name).unwrap();
        }
        let files = list(place).unwrap();
        let found: Vec<_> = files
            .iter()
            .map(|file| (file.path.as_str(), file.size))
            .collect();
        assert_eq!(
            found,
            [(".gitattributes", 14), ("a.txt", 5), ("b/é.json", 9)]
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_link_is_the_file_that_it_leads_to_and_never_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path();
        fs::write(place.join("a.txt"), "abc").unwrap();
        std::os::unix::fs::symlink("a.txt", place.join("link")).unwrap();
        let files = list(place).unwrap();
        assert_eq!(files[1].path, "link");
        assert_eq!(files[1].contents().unwrap(), b"abc");
        std::os::unix::fs::symlink(".", place.join("loop")).unwrap();
        let error = list(place).unwrap_err().to_string();
        assert!(
            error.ends_with("loop: must be a file, a link to a file, or a directory"),
            "{error}"
        );
    }
}

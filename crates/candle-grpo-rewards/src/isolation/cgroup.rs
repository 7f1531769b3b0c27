//! Cgroups that limit a program's total memory, over all its processes.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

/// Directories where cgroups with memory may exist, and the file with the limit, for version 2 and
/// version 1.
const PLACES: [(&str, &str); 2] = [
    ("/sys/fs/cgroup", "memory.max"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
];

/// Creates cgroups, for which a process mostly needs to be root.
#[derive(Debug, Clone)]
pub(super) struct Cgroups {
    folder: &'static str,
    limit: &'static str,
}

/// One execution's cgroup. Dropping it removes it, once its processes have ended.
pub(super) struct Cgroup(PathBuf);

impl Cgroups {
    /// Returns the first place where a cgroup can be created.
    pub(super) fn find() -> Option<Self> {
        let places = PLACES.into_iter();
        let mut places = places.map(|(folder, limit)| Self { folder, limit });
        places.find(|place| place.make(1 << 30).is_ok())
    }

    /// Creates a cgroup with `bytes` of memory.
    pub(super) fn make(&self, bytes: u64) -> Result<Cgroup> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("candle-grpo-{}-{number}", std::process::id());
        let path = Path::new(self.folder).join(name);
        fs::create_dir(&path).with_context(|| path.display().to_string())?;
        let cgroup = Cgroup(path);
        let limit = cgroup.0.join(self.limit);
        // Only a cgroup has this file from the start.
        let file = OpenOptions::new().write(true).open(&limit);
        file.and_then(|mut file| file.write_all(bytes.to_string().as_bytes()))
            .with_context(|| limit.display().to_string())?;
        Ok(cgroup)
    }
}

impl Cgroup {
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The kernel removes the last process shortly after it ends.
        for _ in 0..200 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        tracing::warn!("{}: this cgroup cannot be removed", self.0.display());
    }
}

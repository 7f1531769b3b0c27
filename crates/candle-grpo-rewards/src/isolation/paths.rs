//! The files that isolated programs can read.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use candle_grpo_core::validate::{Checked, check};

/// System directories that isolated programs can read.
const SYSTEM: [&str; 11] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/nix/store",
];

/// Directories that each isolated program has for itself. A visible directory would cover them.
const OWN: [&str; 4] = ["/dev/shm", "/proc", "/tmp", "/work"];

/// Maximum number of links on the way to a file, which is that of Linux.
const MAX_LINKS: usize = 40;

/// Checks that isolated programs can have a path that an option names.
pub(crate) fn check_visible(option: &str, path: &Path) -> Checked {
    let paths = [real_path(path), path.canonicalize().ok()];
    let covered = paths.iter().flatten().find_map(|path| covered(path));
    let must = format!(
        "not contain {}, which each isolated program has for itself",
        covered.unwrap_or_default()
    );
    check(covered.is_none(), option, path.display(), &must)
}

/// Returns a directory of the program's own that would be covered by `path`.
fn covered(path: &Path) -> Option<&'static str> {
    let mut own = OWN.into_iter();
    own.find(|own| Path::new(own).starts_with(path))
}

/// Returns the system directories, and `more` with links resolved and without paths that another
/// one contains.
pub(super) fn visible_paths(more: &[PathBuf]) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = SYSTEM.iter().map(PathBuf::from).collect();
    let mut more: Vec<PathBuf> = more.iter().flat_map(|path| with_targets(path)).collect();
    more.sort();
    for path in more {
        if paths.iter().any(|shown| path.starts_with(shown)) {
            continue;
        }
        if let Some(own) = covered(&path) {
            // An interpreter lists it, for example because it is in `PYTHONPATH`.
            let path = path.display();
            tracing::warn!("isolated programs do not see {path}, which would cover {own}");
            continue;
        }
        paths.retain(|shown| !shown.starts_with(&path));
        paths.push(path);
    }
    paths
}

/// Returns the links on the way to a file, in the order in which they are followed, and then the
/// file. Their paths lead through no other links. Returns nothing if the file does not exist.
pub(crate) fn with_targets(path: &Path) -> Vec<PathBuf> {
    let Some(path) = std::path::absolute(path).ok().filter(|path| path.exists()) else {
        return Vec::new();
    };
    let (mut all, mut real, mut left) = (Vec::new(), PathBuf::new(), reversed(&path));
    while let Some(part) = left.pop() {
        match part.to_str() {
            Some(".") => {}
            Some("..") => drop(real.pop()),
            _ => real.push(part),
        }
        if all.len() < MAX_LINKS
            && let Ok(target) = real.read_link()
        {
            left.extend(reversed(&target));
            all.push(real.clone());
            real.pop();
        }
    }
    all.push(real);
    all
}

/// Returns a path's parts, the last first.
fn reversed(path: &Path) -> Vec<OsString> {
    let parts = path.components().rev();
    parts.map(|part| part.as_os_str().to_owned()).collect()
}

/// Resolves links in the path, except in the last part, which may be a link that programs inspect.
pub(crate) fn real_path(path: &Path) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let Some(name) = path.file_name() else {
        return path.canonicalize().ok();
    };
    let parent = path.parent()?.canonicalize().ok()?;
    Some(parent.join(name)).filter(|path| path.exists())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn visible(paths: &[&str]) -> Vec<PathBuf> {
        visible_paths(&paths.iter().map(PathBuf::from).collect::<Vec<_>>())
    }

    #[test]
    fn a_directory_that_would_cover_a_programs_own_is_left_out() {
        let system = visible(&[]);
        for path in ["/", "/tmp", "/dev", "/dev/shm", "/proc", "/dev/.."] {
            assert_eq!(visible(&[path]), system, "{path}");
        }
    }

    #[test]
    fn a_directory_contains_others() {
        let all = visible(&["/etc", "/etc/passwd", "/usr/bin"]);
        let in_etc = all.iter().filter(|path| path.starts_with("/etc"));
        assert!(in_etc.eq(["/etc"].map(Path::new)), "{all:?}");
        assert!(all.contains(&PathBuf::from("/usr")));
    }

    #[test]
    fn targets_of_links_are_visible() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir(path("data")).unwrap();
        std::os::unix::fs::symlink("data", path("new")).unwrap();
        std::os::unix::fs::symlink(path("new"), path("newest")).unwrap();
        let all = visible_paths(&[path("newest")]);
        for name in ["newest", "new", "data"] {
            assert!(all.contains(&path(name)), "{name}: {all:?}");
        }
    }

    #[test]
    fn links_on_the_way_are_visible() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().canonicalize().unwrap();
        let path = |name: &str| real.join(name);
        let link = |target: &str, name: &str| {
            std::os::unix::fs::symlink(target, path(name)).unwrap();
        };
        std::fs::create_dir_all(path("node-20/bin")).unwrap();
        std::fs::create_dir(path("bin")).unwrap();
        std::fs::write(path("node-20/bin/node"), "").unwrap();
        link("./node-20/", "node");
        link("../bin/../node/bin/node", "bin/node");
        link("/", "root");
        let given = path("root").join(path("bin/node").strip_prefix("/").unwrap());
        let expected = ["root", "bin/node", "node", "node-20/bin/node"].map(path);
        assert_eq!(with_targets(&given), expected);
        assert_eq!(with_targets(&path("node/bin/other")), [] as [PathBuf; 0]);
    }
}

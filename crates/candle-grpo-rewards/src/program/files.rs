//! The files that a command names.

use std::env;
use std::path::{Path, PathBuf};

use super::Program;
use super::imports::{module_files, with_imports};

/// Programs whose first argument is the script that they run.
const INTERPRETERS: [&str; 11] = [
    "python", "sh", "bash", "dash", "zsh", "node", "ruby", "perl", "Rscript", "julia", "php",
];

impl Program {
    /// Returns the files that determine scores: the program if it is given as a path, arguments
    /// that are files, the module in `python -m`, and the local Python modules that these import.
    pub fn files(&self) -> Vec<PathBuf> {
        let [name, arguments @ ..] = self.command.as_slice() else {
            return Vec::new();
        };
        let program = is_path(name).then_some(name);
        let paths = program.into_iter().chain(arguments);
        let mut files: Vec<PathBuf> = paths
            .map(|path| self.in_folder(path))
            .filter(|path| path.is_file())
            .collect();
        let mut from_option = arguments.iter().skip_while(|argument| *argument != "-m");
        if let Some(module) = from_option.nth(1) {
            files.extend(module_files(&self.in_folder(""), module));
        }
        with_imports(files, &self.in_folder(""))
    }

    pub(super) fn in_folder(&self, path: &str) -> PathBuf {
        match &self.folder {
            Some(folder) => folder.join(path),
            None => PathBuf::from(path),
        }
    }

    /// Returns the file for a program that is a path or a name in `PATH`.
    pub fn find_program(&self, name: &str) -> Option<PathBuf> {
        if is_path(name) {
            return Some(self.in_folder(name)).filter(|path| is_executable(path));
        }
        let folders = env::var_os("PATH")?;
        env::split_paths(&folders)
            .map(|folder| folder.join(name))
            .find(|path| is_executable(path) || path.with_extension("exe").is_file())
    }
}

/// Returns the name of an interpreter without its version, if `path` is one.
pub(super) fn interpreter_name(path: &Path) -> Option<&'static str> {
    let name = path.file_stem()?.to_str()?;
    let name = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    let mut known = INTERPRETERS.into_iter();
    known.find(|known| *known == name)
}

/// Returns whether `path` is a file that the system can execute.
fn is_executable(path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        path.metadata()
            .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
    }
    #[cfg(not(unix))]
    path.is_file()
}

pub(super) fn is_path(name: &str) -> bool {
    name.contains(std::path::MAIN_SEPARATOR) || name.contains('/')
}

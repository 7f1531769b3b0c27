//! The files that a command names.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::Result;
use candle_grpo_core::validate::check;

use super::Program;
use super::imports::{module_files, with_imports};

/// Programs whose first argument is the script that they run.
const INTERPRETERS: [&str; 11] = [
    "python", "sh", "bash", "dash", "zsh", "node", "ruby", "perl", "Rscript", "julia", "php",
];

/// Interpreter options without a value, after which the script comes.
const PLAIN_OPTIONS: [&str; 7] = ["-u", "-B", "-E", "-I", "-O", "-s", "-S"];

impl Program {
    /// Checks that the directory, the program and its script exist, and that they can be isolated.
    /// Does not start the program.
    ///
    /// # Errors
    ///
    /// Fails if one is missing, or if isolation is required and does not work.
    pub fn check_files(&self) -> Result<()> {
        if let Some(folder) = &self.folder {
            check(
                folder.is_dir(),
                "folder",
                folder.display(),
                "be a directory that exists",
            )?;
        }
        let Some(name) = self.command.first() else {
            return self.validate();
        };
        check(
            self.find_program(name).is_some(),
            "command",
            format_args!("{name:?}"),
            match is_path(name) {
                true if self.in_folder(name).is_file() => "be executable",
                true => "be a program that exists",
                false => "be a program that exists in PATH",
            },
        )?;
        if let Some(script) = self.script() {
            let path = self.in_folder(script);
            check(
                path.is_file(),
                "command",
                path.display(),
                "be a file that exists",
            )?;
        }
        #[cfg(feature = "code")]
        if let Some(isolation) = &self.isolation {
            crate::code::isolation::check(isolation, self)?;
        }
        Ok(())
    }

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

    fn in_folder(&self, path: &str) -> PathBuf {
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

    /// Returns an interpreter's script, if its options leave no doubt which argument it is.
    fn script(&self) -> Option<&str> {
        let [name, arguments @ ..] = self.command.as_slice() else {
            return None;
        };
        interpreter_name(Path::new(name))?;
        let script = arguments
            .iter()
            .find(|argument| !PLAIN_OPTIONS.contains(&argument.as_str()))?;
        Some(script.as_str()).filter(|script| !script.starts_with('-'))
    }
}

/// Returns the name of an interpreter without its version, if `path` is one.
pub(crate) fn interpreter_name(path: &Path) -> Option<&'static str> {
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

fn is_path(name: &str) -> bool {
    name.contains(std::path::MAIN_SEPARATOR) || name.contains('/')
}

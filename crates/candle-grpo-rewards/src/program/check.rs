//! Checks before a program starts.

use std::path::Path;

use anyhow::Result;
use candle_grpo_core::validate::check;

use super::Program;
use super::files::{interpreter_name, is_path};

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
            super::isolated::check(isolation, self)?;
        }
        Ok(())
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

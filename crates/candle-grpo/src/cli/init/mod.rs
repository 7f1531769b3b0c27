//! `grpo init`.

use std::fs;
use std::path::{Path, PathBuf};

use candle_grpo::nn::atomic_file;
use clap::ValueEnum;

use super::console::Console;
use super::exit::Exit;

/// A task with its files.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(super) enum Task {
    /// Answers that are numbers or formulas, compared with a column.
    Math,
    /// A reward program.
    Program,
    /// Several turns, with a program that replies.
    Environment,
    /// Supervised fine-tuning on given answers, for grpo sft.
    Sft,
}

#[derive(clap::Args)]
pub(super) struct InitArguments {
    /// The task.
    task: Task,
    /// The target directory. Default: the task name.
    #[arg(value_name = "DIRECTORY")]
    folder: Option<PathBuf>,
    /// The model to train: a directory, a GGUF file, or a Hugging Face hub name.
    #[arg(
        long,
        default_value = "Qwen/Qwen2.5-0.5B-Instruct",
        value_name = "MODEL"
    )]
    model: String,
}

impl Task {
    /// Returns the name, for the directories of the task and its run.
    fn name(self) -> &'static str {
        match self {
            Self::Math => "math",
            Self::Program => "program",
            Self::Environment => "environment",
            Self::Sft => "sft",
        }
    }

    /// Returns the files by name. In the first one, marks stand for paths.
    fn files(self) -> Vec<(&'static str, &'static str)> {
        match self {
            Self::Math => vec![
                ("run.yaml", include_str!("math.yaml")),
                ("train.jsonl", include_str!("math.jsonl")),
            ],
            Self::Program => vec![
                ("run.yaml", include_str!("program.yaml")),
                ("train.jsonl", include_str!("program.jsonl")),
                ("reward.py", include_str!("reward.py")),
            ],
            Self::Environment => vec![
                ("run.yaml", include_str!("environment.yaml")),
                ("train.jsonl", include_str!("environment.jsonl")),
                ("environment.py", include_str!("environment.py")),
            ],
            Self::Sft => vec![
                ("run.yaml", include_str!("sft.yaml")),
                ("train.jsonl", include_str!("sft.jsonl")),
            ],
        }
    }
}

/// Writes a task's files. None of them may exist.
pub(super) fn init(arguments: &InitArguments) -> Result<(), Exit> {
    let task = arguments.task;
    let folder = arguments.folder.clone();
    let folder = folder.unwrap_or_else(|| PathBuf::from(task.name()));
    let files = task.files();
    for (name, _) in &files {
        let path = folder.join(name);
        if path.exists() || path.is_symlink() {
            return Err(Exit::Config(format!(
                "{}: already exists and is not replaced; choose another directory",
                path.display()
            )));
        }
    }
    let run = Path::new("runs").join(folder.file_name().unwrap_or(task.name().as_ref()));
    let failed = |path: &Path, error: &dyn std::fmt::Display| {
        Exit::Run(format!("writing {}: {error}", path.display()))
    };
    fs::create_dir_all(&folder).map_err(|error| failed(&folder, &error))?;
    // The configuration is last: with it, everything is there.
    for (name, text) in files.iter().rev() {
        let path = folder.join(name);
        let text = if name.ends_with(".yaml") {
            filled(text, &arguments.model, &folder, &run)?
        } else {
            (*text).to_owned()
        };
        atomic_file::write(&path, text.as_bytes()).map_err(|error| failed(&path, &error))?;
    }
    let console = Console::new(true);
    for (name, _) in &files {
        console.print(&folder.join(name).display().to_string())?;
    }
    Ok(())
}

/// Returns the configuration with paths in place of the marks.
fn filled(text: &str, model: &str, folder: &Path, run: &Path) -> Result<String, Exit> {
    let mut text = text.to_owned();
    for (mark, value) in [
        ("@MODEL@", model.to_owned()),
        ("@DIR@", folder.display().to_string()),
        ("@RUN@", run.display().to_string()),
    ] {
        // They stand in quotes.
        if value.is_empty() || value.contains(['"', '\\']) || value.contains(char::is_control) {
            return Err(Exit::Config(format!(
                "{value:?}: must be a name without quotes, backslashes and control characters"
            )));
        }
        text = text.replace(mark, &value);
    }
    Ok(text)
}

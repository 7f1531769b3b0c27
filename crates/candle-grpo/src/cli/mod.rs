//! The command line.

mod check;
mod completions;
mod exit;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use clap_complete::Shell;

use exit::{EXIT_CODES, Exit};

/// GRPO training of language models: a model, prompts and a reward in, a trained model out.
#[derive(Parser)]
#[command(name = "grpo", version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check a configuration and print what it comes to, without loading a model.
    ///
    /// Reads the file, its data and its rewards, and prints every setting with defaults filled in, as a file that says the same.
    /// Of a ROLL file it says for each key whether it is used, has no meaning here, or is not supported.
    Check(CheckArguments),
    /// Write a page about runs: charts over the steps, answers before and after, settings.
    ///
    /// The page needs no other file and no network. Several runs are drawn over each other.
    Report(ReportArguments),
    /// Print a script that completes the commands of this program in a shell.
    ///
    /// For bash: grpo completions bash > ~/.local/share/bash-completion/completions/grpo
    Completions {
        /// The shell.
        shell: Shell,
    },
}

#[derive(clap::Args)]
struct CheckArguments {
    /// The configuration: YAML, or TOML if its name ends in .toml. docs/configuration.md lists the keys.
    file: PathBuf,
    /// Print nothing if all is well.
    #[arg(short, long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct ReportArguments {
    /// The folders of runs.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Where the page goes.
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
}

/// Runs the program.
pub(crate) fn run() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.command {
        Command::Check(arguments) => check::check(&arguments.file, arguments.quiet),
        Command::Report(arguments) => report::report(&arguments.runs, &arguments.out),
        Command::Completions { shell } => completions::print(shell),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(exit) => exit.report(),
    }
}

impl From<std::io::Error> for Exit {
    /// What is printed cannot be written: the reader has gone, as `head` does.
    fn from(_: std::io::Error) -> Self {
        Self::Quiet
    }
}

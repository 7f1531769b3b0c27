//! The command line.

mod check;
mod completions;
mod console;
mod convert;
mod eval;
mod exit;
mod load;
mod output;
mod report;
mod sample;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use candle_grpo::run::Start;
use clap::{Parser, Subcommand};
use clap_complete::Shell;

use exit::EXIT_CODES;
use sample::SampleArguments;

/// GRPO training of language models: a model, prompts and a reward in, a trained model out.
#[derive(Parser)]
#[command(name = "grpo", version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model as a configuration says.
    ///
    /// Leaves a folder (run_dir) with the settings, the figures of each step for grpo report and TensorBoard, the answers to held-out
    /// prompts, and checkpoints that transformers loads. Ctrl-C stops it and saves where it was.
    Train(TrainArguments),
    /// Let a model answer the held-out prompts of a configuration, and print how good the answers are.
    Eval(EvalArguments),
    /// Let a model answer a prompt.
    Sample(SampleArguments),
    /// Write a GGUF file, or a Hugging Face folder, as a Hugging Face folder in f32.
    Convert {
        /// The model.
        model: PathBuf,
        /// Where the folder goes.
        folder: PathBuf,
        /// Replace a folder that is there.
        #[arg(long)]
        force: bool,
    },
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
struct TrainArguments {
    /// The configuration: YAML, or TOML if its name ends in .toml. docs/configuration.md lists the keys.
    file: PathBuf,
    /// Go on from the last checkpoint of the run; begin it if there is none yet.
    #[arg(long, conflicts_with = "replace")]
    resume: bool,
    /// With --resume: accept another model, other held-out rows and changed settings.
    #[arg(long, requires = "resume")]
    accept_changes: bool,
    /// Remove a run that is in the folder, and begin anew.
    #[arg(long)]
    replace: bool,
    /// Log warnings only, and show no progress.
    #[arg(short, long)]
    quiet: bool,
}

#[derive(clap::Args)]
struct EvalArguments {
    /// The configuration, whose data, rewards and evaluation section say what is asked and what is right.
    file: PathBuf,
    /// The model, in place of that of the configuration: a folder, a GGUF file, or the folder of a run (its best checkpoint).
    #[arg(long)]
    model: Option<PathBuf>,
    /// Write the answers there, as lines of JSON.
    #[arg(short, long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Replace a file of --out that does not hold such answers.
    #[arg(long, requires = "out")]
    force: bool,
    /// Log warnings only, and show no progress.
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
    /// Replace a file that is not such a page.
    #[arg(long)]
    force: bool,
}

/// Runs the program.
pub(crate) fn run() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.command {
        Command::Check(arguments) => check::check(&arguments.file, arguments.quiet),
        Command::Train(arguments) => {
            let start = match (arguments.resume, arguments.replace) {
                (true, _) if arguments.accept_changes => Start::ResumeChanged,
                (true, _) => Start::Resume,
                (_, true) => Start::Replace,
                _ => Start::New,
            };
            train::train(&arguments.file, start, arguments.quiet)
        }
        Command::Eval(arguments) => eval::eval(
            &arguments.file,
            arguments.model,
            arguments.out.as_deref(),
            arguments.force,
            arguments.quiet,
        ),
        Command::Sample(arguments) => sample::sample(arguments),
        Command::Convert {
            model,
            folder,
            force,
        } => convert::convert(&model, &folder, force),
        Command::Report(arguments) => {
            report::report(&arguments.runs, &arguments.out, arguments.force)
        }
        Command::Completions { shell } => completions::print(shell),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(exit) => exit.report(),
    }
}

//! The command line.

mod chat;
mod check;
mod completions;
mod console;
mod convert;
mod eval;
mod exit;
mod import;
mod init;
mod load;
mod output;
mod report;
mod sample;
mod sft;
mod suites;
mod table;
mod train;

use std::path::PathBuf;
use std::process::ExitCode;

use candle_grpo::run::Start;
use clap::{Parser, Subcommand};
use clap_complete::Shell;

use chat::ChatArguments;
use check::Detail;
use convert::Dtype;
use eval::EvalArguments;
use exit::EXIT_CODES;
use init::InitArguments;
use sample::SampleArguments;

/// GRPO training of language models: from a model, prompts and a reward to a trained model.
#[derive(Parser)]
#[command(name = "grpo", version, after_help = EXIT_CODES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write a commented configuration for a task, with example data.
    ///
    /// Existing files are not replaced.
    Init(InitArguments),
    /// Train a model.
    ///
    /// Writes the folder run_dir: the settings, the metrics of each step for grpo report and
    /// TensorBoard, the answers to held-out prompts, and checkpoints that transformers loads.
    /// Ctrl-C saves and stops.
    Train(TrainArguments),
    /// Train a model on given answers: supervised fine-tuning.
    ///
    /// The configuration has the section sft. Writes the folder run_dir as grpo train does: the
    /// metrics of each step, and checkpoints that grpo train takes as its model. Ctrl-C saves and
    /// stops.
    Sft(TrainArguments),
    /// Evaluate a model on the held-out prompts of a configuration, or on suites of prompts.
    ///
    /// With --suite it prints pass@1, pass@k and maj@k with intervals of 95 % over the prompts.
    /// With --compare it compares two models by a paired test on the same prompts.
    Eval(Box<EvalArguments>),
    /// Print the answers of a model to a prompt.
    Sample(SampleArguments),
    /// Hold a conversation with a model: each line of standard input is a message.
    ///
    /// Answers appear while they are drawn. /reset begins another conversation, /exit ends the
    /// program, and Ctrl-C ends an answer.
    Chat(ChatArguments),
    /// Write a GGUF file, a Hugging Face folder or a run in another format.
    ///
    /// Of a run with adapters, a folder has the adapters alone in the format of PEFT. With --merge
    /// it has the whole model. A GGUF file always has the whole model.
    Convert {
        /// The model; also a name on the Hugging Face hub.
        model: PathBuf,
        /// The GGUF file to write if the name ends in .gguf, else the Hugging Face folder.
        target: PathBuf,
        /// The type of the weights: f32 for a folder, f16 for a GGUF file unless given.
        #[arg(long)]
        dtype: Option<Dtype>,
        /// Add the adapters of a run to the weights under them.
        #[arg(long)]
        merge: bool,
        /// Replace an existing GGUF file, or a folder that holds a model and nothing else.
        #[arg(long)]
        force: bool,
    },
    /// Check a configuration without loading the weights, and print what the run does.
    ///
    /// Reads the file, its data, its rewards and the shape of the model. Downloads those of the
    /// Hugging Face hub, except weights. Prints the model, the data, the batch, the algorithm and
    /// the memory. With --all it prints every setting as a configuration file, and what becomes of
    /// each key of a ROLL file.
    Check(CheckArguments),
    /// Print a file of ROLL, TRL, verl or OpenRLHF as a configuration of this program.
    ///
    /// Comments at the top say what becomes of each key, and how many completions a step and an
    /// update have on both sides. Reads YAML, TOML, and the options in a shell script.
    Import(ImportArguments),
    /// Write a page about runs: charts over the steps, answers before and after, settings.
    ///
    /// The page is one file and works offline. Several runs share the charts.
    Report(ReportArguments),
    /// Print a script that completes the commands in a shell.
    ///
    /// For bash: grpo completions bash > ~/.local/share/bash-completion/completions/grpo
    Completions {
        /// The shell.
        shell: Shell,
    },
}

#[derive(clap::Args)]
struct ImportArguments {
    /// The file of the other trainer.
    file: PathBuf,
    /// The number of processes that the file is for. TRL counts the completions of one.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    processes: u32,
}

#[derive(clap::Args)]
struct CheckArguments {
    /// The configuration: YAML, or TOML if its name ends in .toml (docs/configuration.md).
    file: PathBuf,
    /// Print every setting, as a configuration file with all defaults.
    #[arg(short, long, conflicts_with = "quiet")]
    all: bool,
    /// Print nothing if the configuration is valid.
    #[arg(short, long)]
    quiet: bool,
    /// Ignore keys of another trainer that change the run and have no counterpart.
    #[arg(long)]
    allow_unsupported: bool,
}

impl CheckArguments {
    fn detail(&self) -> Detail {
        match (self.quiet, self.all) {
            (true, _) => Detail::Quiet,
            (_, true) => Detail::All,
            _ => Detail::Summary,
        }
    }
}

#[derive(clap::Args)]
struct TrainArguments {
    /// The configuration: YAML, or TOML if its name ends in .toml (docs/configuration.md).
    file: PathBuf,
    /// Resume from the last checkpoint of the run; begin it if there is none.
    #[arg(long, conflicts_with = "replace")]
    resume: bool,
    /// With --resume: accept another model, other held-out rows and changed settings, if the
    /// checkpoint fits them.
    #[arg(long, requires = "resume")]
    accept_changes: bool,
    /// Replace the run in the folder. It is removed once the new run has a checkpoint.
    #[arg(long)]
    replace: bool,
    /// Log warnings only, and show no progress.
    #[arg(short, long)]
    quiet: bool,
    /// Ignore keys of another trainer that change the run and have no counterpart.
    #[arg(long)]
    allow_unsupported: bool,
}

impl TrainArguments {
    /// Returns the start of the run.
    fn start(&self) -> Start {
        match (self.resume, self.replace) {
            (true, _) if self.accept_changes => Start::ResumeChanged,
            (true, _) => Start::Resume,
            (_, true) => Start::Replace,
            _ => Start::New,
        }
    }
}

#[derive(clap::Args)]
struct ReportArguments {
    /// The folders of runs.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The file to write.
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Replace a file that is not a page of this command, unless it is in the folder of a run.
    #[arg(long)]
    force: bool,
}

/// Runs the program.
pub(crate) fn run() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match arguments.command {
        Command::Init(arguments) => init::init(&arguments),
        Command::Check(arguments) => check::check(
            &arguments.file,
            arguments.detail(),
            arguments.allow_unsupported,
        ),
        Command::Import(arguments) => import::import(&arguments.file, arguments.processes as usize),
        Command::Train(arguments) => train::train(
            &arguments.file,
            arguments.start(),
            arguments.quiet,
            arguments.allow_unsupported,
        ),
        Command::Sft(arguments) => sft::sft(&arguments.file, arguments.start(), arguments.quiet),
        Command::Eval(arguments) => eval::run(*arguments),
        Command::Sample(arguments) => sample::sample(arguments),
        Command::Chat(arguments) => chat::chat(&arguments),
        Command::Convert {
            model,
            target,
            dtype,
            merge,
            force,
        } => {
            let options = convert::Options {
                dtype,
                merge,
                force,
            };
            convert::convert(&model, &target, options)
        }
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

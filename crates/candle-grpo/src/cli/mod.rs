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
mod push;
mod report;
mod sample;
mod schema;
#[cfg(feature = "tinker")]
mod serve;
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
use push::PushArguments;
use sample::SampleArguments;
use schema::FileKind;
#[cfg(feature = "tinker")]
use serve::ServeArguments;

/// GRPO training for language models: a model, prompts and a reward become a trained model.
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
    /// Never replaces an existing file.
    Init(InitArguments),
    /// Train a model.
    ///
    /// Writes the run directory (run_dir): settings, step metrics for grpo report and TensorBoard,
    /// answers to held-out prompts, and checkpoints that transformers can load. Ctrl-C saves and
    /// stops.
    Train(TrainArguments),
    /// Train a model on given answers: supervised fine-tuning.
    ///
    /// The configuration needs the section sft. Writes the run directory (run_dir), as grpo train
    /// does: step metrics, and checkpoints that grpo train accepts as its model. Ctrl-C saves and
    /// stops.
    Sft(TrainArguments),
    /// Evaluate a model on a configuration's held-out prompts, or on prompt suites.
    ///
    /// With --suite, prints pass@1, pass@k and maj@k with 95% confidence intervals over the
    /// prompts. With --compare, compares two models with a paired test on the same prompts.
    Eval(Box<EvalArguments>),
    /// Print a model's answers to a prompt.
    Sample(SampleArguments),
    /// Chat with a model: each line on standard input is a message.
    ///
    /// Answers appear as they are sampled. /reset starts a new conversation, /exit quits, and
    /// Ctrl-C ends an answer.
    Chat(ChatArguments),
    /// Serve a model to training loops in Python that use the client of Tinker.
    ///
    /// Prints the URL for TINKER_BASE_URL. Clients train LoRA adapters, sample from them and save
    /// them as PEFT directories. Ctrl-C finishes the current request and stops. The same command
    /// continues with the sessions in the directory.
    #[cfg(feature = "tinker")]
    Serve(ServeArguments),
    /// Convert a GGUF file, a Hugging Face directory or a run to another format.
    ///
    /// For a run with adapters, a directory gets only the adapters, in PEFT format. With --merge it
    /// gets the whole model. A GGUF file always has the whole model.
    Convert {
        /// The model; also a Hugging Face hub name.
        model: PathBuf,
        /// The target: a GGUF file if the name ends in .gguf, otherwise a Hugging Face directory.
        target: PathBuf,
        /// The weight type. Default: f32 for a directory, f16 for a GGUF file.
        #[arg(long)]
        dtype: Option<Dtype>,
        /// Merge a run's adapters into the weights.
        #[arg(long)]
        merge: bool,
        /// Replace an existing GGUF file, or a directory that only holds a model.
        #[arg(long)]
        force: bool,
    },
    /// Upload a run's policy to the Hugging Face hub.
    ///
    /// Uploads what grpo convert writes for the run: the best checkpoint as a Hugging Face
    /// directory with a model card. A model directory is uploaded as it is. Creates the
    /// repository, which is private unless --public is given. The token is that of HF_TOKEN or
    /// `hf auth login`. After an interruption, the same command sends only files that the hub
    /// does not have.
    Push(PushArguments),
    /// Check a configuration without loading the weights, and print what the run does.
    ///
    /// Reads the file, its data, its rewards and the model's shape. Downloads everything but
    /// weights from the Hugging Face hub. Prints the model, data, batch, algorithm and memory. With
    /// --all, also prints every setting as a configuration file, and what becomes of each key in
    /// another trainer's file.
    Check(CheckArguments),
    /// Print a ROLL, TRL, verl or OpenRLHF file as a grpo configuration.
    ///
    /// Comments at the top explain what becomes of each key, and how many completions a step and an
    /// update have on both sides. Reads YAML, TOML, and the options in a shell script.
    Import(ImportArguments),
    /// Print the JSON schema of a configuration file, for editors.
    ///
    /// With it, an editor completes keys and marks wrong ones. For YAML files: grpo schema >
    /// grpo.schema.json, and the first line "# yaml-language-server: $schema=grpo.schema.json" in
    /// the configuration.
    Schema {
        /// The kind of file.
        #[arg(default_value = "run")]
        kind: FileKind,
    },
    /// Write a page about runs: charts over the steps, answers before and after, settings.
    ///
    /// The page is a single file that works offline. Several runs share the charts.
    Report(ReportArguments),
    /// Print shell completions.
    ///
    /// For bash: grpo completions bash > ~/.local/share/bash-completion/completions/grpo
    Completions {
        /// The shell.
        shell: Shell,
    },
}

#[derive(clap::Args)]
struct ImportArguments {
    /// The other trainer's file.
    file: PathBuf,
    /// The number of processes that the file was written for. TRL counts the completions per
    /// process.
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
    /// Ignore another trainer's keys that change the run and have no equivalent here.
    #[arg(long)]
    allow_unsupported: bool,
    /// Compute the memory of one of N ranks, for each sharding. Default: the ranks of the
    /// launcher.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    ranks: Option<u32>,
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
    /// Resume from the run's last checkpoint, or start from step 0 if there is none.
    #[arg(long, conflicts_with = "replace")]
    resume: bool,
    /// With --resume: accept another model, other held-out rows and changed settings, as long as
    /// they fit the checkpoint.
    #[arg(long, requires = "resume")]
    accept_changes: bool,
    /// Replace the existing run. It is removed once the new run has a checkpoint.
    #[arg(long)]
    replace: bool,
    /// Only log warnings, and show no progress.
    #[arg(short, long)]
    quiet: bool,
    /// Ignore another trainer's keys that change the run and have no equivalent here.
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
    /// The run directories.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// The output file.
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    out: PathBuf,
    /// Replace a file that is not a report, unless it is in a run directory.
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
            arguments.ranks.map(|ranks| ranks as usize),
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
        #[cfg(feature = "tinker")]
        Command::Serve(arguments) => serve::serve(&arguments),
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
        Command::Push(arguments) => push::push(arguments),
        Command::Report(arguments) => {
            report::report(&arguments.runs, &arguments.out, arguments.force)
        }
        Command::Schema { kind } => schema::print(kind),
        Command::Completions { shell } => completions::print(shell),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(exit) => exit.report(),
    }
}

//! `grpo push`.

use std::io::{Write, stdout};
use std::path::{Path, PathBuf};

use candle_grpo::hub::{HubName, Transfer, UploadOptions, Uploaded, is_gguf};
use candle_grpo::run::{check_upload, upload};
use candle_grpo::train::{ErrorKind, RunDir};

use super::console::Console;
use super::convert::{Dtype, Options, convert};
use super::exit::Exit;
use super::output::resolved;

/// Files of which a model directory has one.
const MODEL_FILES: [&str; 2] = ["config.json", "adapter_config.json"];

#[derive(clap::Args)]
pub(super) struct PushArguments {
    /// The run directory, or a model directory.
    run: PathBuf,
    /// The repository. ORG is your account or an organization.
    #[arg(value_name = "ORG/NAME")]
    repository: String,
    /// Create a public repository, or upload to one that exists.
    #[arg(long)]
    public: bool,
    /// The branch, which is created if it does not exist, or refs/pr/N. Default: main.
    #[arg(long, value_name = "BRANCH")]
    revision: Option<String>,
    /// The commit message.
    #[arg(short, long)]
    message: Option<String>,
    /// The weight type of a run's policy. Default: f32.
    #[arg(long)]
    dtype: Option<Dtype>,
    /// Merge a run's adapters into the weights.
    #[arg(long)]
    merge: bool,
    /// Print only the result, warnings and errors.
    #[arg(short, long)]
    quiet: bool,
}

/// Uploads a run's policy or a model directory.
pub(super) fn push(arguments: PushArguments) -> Result<(), Exit> {
    let PushArguments {
        run: source,
        repository,
        public,
        revision,
        message,
        dtype,
        merge,
        quiet,
    } = arguments;
    let console = Console::new(quiet);
    let options = UploadOptions {
        public,
        revision,
        message: message.unwrap_or(UploadOptions::default().message),
    };
    let wrong = |error: anyhow::Error| Exit::Config(format!("{error:#}"));
    let repository = name(&repository)?;
    check_upload(&repository, &options).map_err(wrong)?;
    // The folder with the converted policy exists during the upload.
    let (folder, _converted) = if is_model_folder(&source)? {
        if dtype.is_some() || merge {
            return Err(Exit::Config(format!(
                "{}: is a model directory and is uploaded as it is; --dtype and --merge are for runs. `grpo convert` converts models",
                source.display()
            )));
        }
        (source, None)
    } else {
        let (folder, converted) = converted(&source, dtype, merge)?;
        (folder, Some(converted))
    };
    console.stop_when_asked();
    let uploaded = upload(&folder, &repository, &options, &console);
    console.finish();
    let uploaded = uploaded.map_err(|error| match ErrorKind::of(&error) {
        ErrorKind::Interrupted => Exit::Interrupted(
            "Complete files stay on the hub: the same command continues with the others."
                .to_owned(),
        ),
        _ => Exit::Run(format!("{error:#}")),
    })?;
    print(&uploaded)
}

/// Returns the name of a model repository, even if a directory has this path.
fn name(text: &str) -> Result<HubName, Exit> {
    let prefixed = format!("hf://{}", text.trim_start_matches("hf://"));
    match HubName::of_prefixed(Path::new(&prefixed)) {
        Ok(Some(name)) => Ok(name),
        _ => Err(Exit::Config(format!(
            "{text}: must be ORG/NAME, the name of a model repository"
        ))),
    }
}

/// Returns whether `source` is a model outside of a run.
fn is_model_folder(source: &Path) -> Result<bool, Exit> {
    let wrong = |reason: &str| {
        let message = format!(
            "{}: {reason}, must be a run directory or a model directory",
            source.display()
        );
        Err(Exit::Model(message))
    };
    if !source.is_dir() {
        return wrong(if source.exists() {
            "is a file"
        } else {
            "there is no such directory"
        });
    }
    let lost = RunDir::lost_files(source).map_err(|error| Exit::Model(format!("{error:#}")))?;
    // The conversion reports what a run has lost.
    if lost.is_some() || resolved(source)?.ancestors().any(RunDir::is_run) {
        return Ok(false);
    }
    let mut entries = source.read_dir().into_iter().flatten().flatten();
    let is_model =
        |path: &Path| MODEL_FILES.iter().any(|file| path.ends_with(file)) || is_gguf(path);
    if entries.any(|entry| is_model(&entry.path())) {
        return Ok(true);
    }
    wrong("has neither config.json nor a GGUF file")
}

/// Converts a run, or a checkpoint in one, to a directory that is removed with the returned value.
/// It is beside the run, on a disk with room for its weights.
fn converted(
    source: &Path,
    dtype: Option<Dtype>,
    merge: bool,
) -> Result<(PathBuf, tempfile::TempDir), Exit> {
    let place = resolved(source)?;
    let mut ancestors = place.ancestors();
    let run = ancestors
        .find(|path| RunDir::is_run(path))
        .unwrap_or(&place);
    let beside = run.parent().unwrap_or(run);
    let temporary = tempfile::Builder::new()
        .prefix(".grpo-push-")
        .tempdir_in(beside)
        .map_err(|error| Exit::Run(format!("writing to {}: {error}", beside.display())))?;
    let folder = temporary.path().join("model");
    let options = Options {
        dtype,
        merge,
        force: false,
    };
    convert(source, &folder, options)?;
    Ok((folder, temporary))
}

/// Prints the files and the URL.
fn print(uploaded: &Uploaded) -> Result<(), Exit> {
    let mut out = stdout().lock();
    for file in &uploaded.files {
        let note = match file.transfer {
            Transfer::Present => ", on the hub already",
            Transfer::Ignored => ", ignored by .gitignore",
            _ => "",
        };
        let megabytes = file.bytes as f64 / 1e6;
        writeln!(out, "{}: {megabytes:.1} MB{note}", file.path)?;
    }
    let visibility = if uploaded.is_private {
        "private"
    } else {
        "public"
    };
    writeln!(
        out,
        "{}: commit {}, {visibility}",
        uploaded.url, uploaded.commit
    )?;
    Ok(())
}

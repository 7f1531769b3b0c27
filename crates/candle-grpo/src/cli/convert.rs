//! `grpo convert`.

use std::env;
use std::fs;
use std::io::{Write, stdout};
use std::path::Path;

use candle_core::Device;
use candle_grpo::hub::is_gguf;
use candle_grpo::nn::{BaseWeights, GgufDType, Lora, atomic_file};
use candle_grpo::report::{CARD_MARK, Run, model_card};
use candle_grpo::run::model_path;
use candle_grpo::train::{ComputeDType, Pretrained, RunDir};
use clap::ValueEnum;

use super::console::Console;
use super::exit::Exit;
use super::load;
use super::output::resolved;

/// A directory's model card.
const CARD: &str = "README.md";

/// The type to write the weights in; in a GGUF file, the matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Dtype {
    F32,
    Bf16,
    F16,
    Q8_0,
}

/// The target format, and its type.
enum Format {
    Folder(ComputeDType),
    File(GgufDType),
}

/// The options of [`convert`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    pub(super) dtype: Option<Dtype>,
    /// Merges adapters into the weights.
    pub(super) merge: bool,
    /// Replaces a file, or a directory with a model.
    pub(super) force: bool,
}

impl Format {
    /// Returns the target's format: a file if `is_file`.
    fn new(is_file: bool, dtype: Option<Dtype>) -> Option<Self> {
        Some(match (is_file, dtype) {
            (false, None | Some(Dtype::F32)) => Self::Folder(ComputeDType::F32),
            (false, Some(Dtype::Bf16)) => Self::Folder(ComputeDType::Bf16),
            (false, Some(Dtype::F16)) => Self::Folder(ComputeDType::F16),
            (true, Some(Dtype::F32)) => Self::File(GgufDType::F32),
            (true, None | Some(Dtype::F16)) => Self::File(GgufDType::F16),
            (true, Some(Dtype::Q8_0)) => Self::File(GgufDType::Q8_0),
            (false, Some(Dtype::Q8_0)) | (true, Some(Dtype::Bf16)) => return None,
        })
    }
}

/// Writes the model at `from` to `to`: a GGUF file if the name ends in `.gguf`, otherwise a Hugging
/// Face directory. `from` is a GGUF file, a Hugging Face directory, a run directory or a hub name.
/// A run's adapters are written alone, unless `merge` is set.
pub(super) fn convert(from: &Path, to: &Path, options: Options) -> Result<(), Exit> {
    let Options {
        dtype,
        merge,
        force,
    } = options;
    let is_file = is_gguf(to);
    let Some(format) = Format::new(is_file, dtype) else {
        let name = dtype.and_then(|dtype| dtype.to_possible_value());
        let name = name.as_ref().map_or("", |value| value.get_name());
        let to = to.display();
        return Err(Exit::Config(if is_file {
            format!("--dtype: {name}, must be f32, f16 or q8_0 for the GGUF file {to}")
        } else {
            format!(
                "--dtype: {name}, must be f32, bf16 or f16 for a Hugging Face directory; {to} does not end in .gguf"
            )
        }));
    };
    let source = load::model_file(from, &Console::new(false))?;
    let from = model_path(&source).map_err(|error| Exit::Model(format!("{error:#}")))?;
    let check = || {
        if is_file {
            check_file(&from, to, force)
        } else {
            check_folder(&from, to, force)
        }
    };
    check()?;
    if let Some(adapters) = RunDir::adapter_folder(&from)
        && !is_file
        && !merge
    {
        if !matches!(dtype, None | Some(Dtype::F32)) {
            return Err(Exit::Config(
                "--dtype: must be f32 or absent for adapters; to convert the whole model, pass --merge".to_owned(),
            ));
        }
        return write_adapters(&source, &from, &adapters, to);
    }
    let read_as = match format {
        Format::Folder(dtype) => dtype,
        Format::File(_) => ComputeDType::F32,
    };
    let pretrained = Pretrained::load_frozen(&from, &Device::Cpu, BaseWeights::Dense, read_as)
        .map_err(|error| Exit::Model(format!("{error:#}")))?;
    // The target may have changed while the model was loaded.
    check()?;
    let written = match format {
        Format::Folder(_) => pretrained.save(to),
        Format::File(dtype) => pretrained.save_gguf(to, dtype),
    };
    written.map_err(|error| Exit::Run(format!("{error:#}")))?;
    if !is_file && RunDir::is_run(&source) {
        write_card(&source, &from, to, "transformers")
            .map_err(|error| Exit::Run(format!("{error:#}")))?;
    }
    let mut out = stdout().lock();
    writeln!(
        out,
        "{:?}: {} layers, {:.1} million parameters, {} vocabulary tokens, {} positions, {}",
        pretrained.model.model_type,
        pretrained.model.num_hidden_layers,
        pretrained.parameters.num_elements() as f64 / 1e6,
        pretrained.model.vocab_size,
        pretrained.model.max_position_embeddings,
        match pretrained.chat_template {
            Some(_) => "with a chat template",
            None => "without a chat template",
        }
    )?;
    match pretrained.license {
        Some(license) => writeln!(out, "License in the source: {license}")?,
        None => writeln!(out, "License in the source: none")?,
    }
    Ok(())
}

/// Writes the `adapters` from the run `source`, or from its checkpoint, to the directory `to`.
fn write_adapters(
    source: &Path,
    checkpoint: &Path,
    adapters: &Path,
    to: &Path,
) -> Result<(), Exit> {
    let of_model = |error: anyhow::Error| Exit::Model(format!("{error:#}"));
    let of_run = |error: anyhow::Error| Exit::Run(format!("{error:#}"));
    let pretrained = Pretrained::load_without_weights(checkpoint).map_err(of_model)?;
    let adapters = Lora::load(adapters, &pretrained.model, &Device::Cpu)
        .map_err(|error| of_model(error.into()))?;
    let mut parents = checkpoint.ancestors();
    let base = match parents.find(|parent| RunDir::is_run(parent)) {
        Some(run) => Run::read(run).map_err(of_run)?.base_model(),
        None => None,
    };
    let written = pretrained.save_adapters(&adapters, base.as_deref(), to);
    written.map_err(of_run)?;
    if RunDir::is_run(source) {
        write_card(source, checkpoint, to, "peft").map_err(of_run)?;
    }
    let config = adapters.config();
    writeln!(
        stdout().lock(),
        "rank-{} adapters for {}: {:.1} million parameters, base model {}; --merge writes the whole model",
        config.rank,
        config.target_modules.join(", "),
        adapters.parameters().num_elements() as f64 / 1e6,
        base.as_deref().unwrap_or("unknown"),
    )?;
    Ok(())
}

/// Writes a model card into `folder`, for `library` to load. The run is `run`, its weights are in
/// `checkpoint`.
fn write_card(run: &Path, checkpoint: &Path, folder: &Path, library: &str) -> anyhow::Result<()> {
    let checkpoint = checkpoint.file_name().unwrap_or_default().to_string_lossy();
    let card = model_card(&Run::read(run)?, &checkpoint, library);
    Ok(atomic_file::write(&folder.join(CARD), card.as_bytes())?)
}

/// Returns an error unless `to` is free, or a file that `force` allows to replace.
fn check_file(from: &Path, to: &Path, force: bool) -> Result<(), Exit> {
    let refuse = |reason: &str| Err(Exit::Config(format!("{}: {reason}", to.display())));
    if resolved(to)?.starts_with(resolved(from)?) {
        return refuse("is inside the source, must be elsewhere");
    }
    if !to.exists() && !to.is_symlink() {
        return Ok(());
    }
    match (to.is_file() && !to.is_symlink(), force) {
        (true, true) => Ok(()),
        (true, false) => refuse("exists already, choose another file or pass --force"),
        (false, _) => refuse("is not a file and is not replaced"),
    }
}

/// Returns an error unless `to` is free, or only holds a model and `force` allows to replace it.
fn check_folder(from: &Path, to: &Path, force: bool) -> Result<(), Exit> {
    let refuse = |reason: String| Err(Exit::Config(format!("{}: {reason}", to.display())));
    let source = resolved(from)?;
    let folder = resolved(to)?;
    if source.starts_with(&folder) || folder.starts_with(&source) {
        let source = from.display();
        return refuse(format!("overlaps the source {source}, must be elsewhere"));
    }
    if !to.exists() && !to.is_symlink() {
        return Ok(());
    }
    if !force {
        return refuse("exists already, choose another directory or pass --force".to_owned());
    }
    if resolved(&env::current_dir()?)?.starts_with(&folder) {
        return refuse("contains the working directory and is not replaced".to_owned());
    }
    // A person may have written the card of a model.
    let card = to.join(CARD);
    if card.is_file() && !fs::read_to_string(&card).is_ok_and(|card| card.contains(CARD_MARK)) {
        return refuse(format!(
            "contains {CARD}, which grpo did not write; the directory is not replaced"
        ));
    }
    match Pretrained::first_foreign(to) {
        Err(error) => refuse(format!("{error:#}; it is not replaced")),
        Ok(Some(foreign)) => refuse(format!(
            "contains {}, which is not a model file; the directory is not replaced",
            foreign.strip_prefix(to).unwrap_or(&foreign).display()
        )),
        Ok(None) => Ok(()),
    }
}

//! `grpo convert`.

use std::env;
use std::io::{Write, stdout};
use std::path::Path;

use candle_core::Device;
use candle_grpo::run::model_path;
use candle_grpo::train::Pretrained;

use super::exit::Exit;
use super::output::resolved;

/// Writes the model at `from` to a Hugging Face folder in f32 at `to`. `from` is a GGUF file, a
/// Hugging Face folder, or the folder of a run.
pub(super) fn convert(from: &Path, to: &Path, force: bool) -> Result<(), Exit> {
    let from = model_path(from).map_err(|error| Exit::Model(format!("{error:#}")))?;
    check_folder(&from, to, force)?;
    let pretrained =
        Pretrained::load(&from, &Device::Cpu).map_err(|error| Exit::Model(format!("{error:#}")))?;
    // The folder may have changed while the model was loaded.
    check_folder(&from, to, force)?;
    pretrained
        .save(to)
        .map_err(|error| Exit::Run(format!("{error:#}")))?;
    let mut out = stdout().lock();
    writeln!(
        out,
        "a {:?} of {} layers and {:.1} million parameters, {} tokens, {} positions, {}",
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
        Some(license) => writeln!(out, "license, as the file has it: {license}")?,
        None => writeln!(out, "license: the file has none")?,
    }
    Ok(())
}

/// Returns an error unless `to` is free, or holds a model alone that `force` allows to replace.
fn check_folder(from: &Path, to: &Path, force: bool) -> Result<(), Exit> {
    let refuse = |reason: String| Err(Exit::Config(format!("{}: {reason}", to.display())));
    let source = resolved(from)?;
    let folder = resolved(to)?;
    if source.starts_with(&folder) || folder.starts_with(&source) {
        let source = from.display();
        return refuse(format!(
            "is, holds or lies in the source {source}, must be another folder"
        ));
    }
    if !to.exists() && !to.is_symlink() {
        return Ok(());
    }
    if !force {
        return refuse("exists already, choose another folder or give --force".to_owned());
    }
    if resolved(&env::current_dir()?)?.starts_with(&folder) {
        return refuse("holds the working directory and is not replaced".to_owned());
    }
    match Pretrained::first_foreign(to) {
        Err(error) => refuse(format!("{error:#}; it is not replaced")),
        Ok(Some(foreign)) => refuse(format!(
            "holds {}, which is not of a model; the folder is not replaced",
            foreign.strip_prefix(to).unwrap_or(&foreign).display()
        )),
        Ok(None) => Ok(()),
    }
}

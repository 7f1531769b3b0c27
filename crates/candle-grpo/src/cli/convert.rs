//! `grpo convert`.

use std::io::{Write, stdout};
use std::path::Path;

use candle_core::Device;
use candle_grpo::train::Pretrained;

use super::exit::Exit;

/// Writes the model at `from`, a GGUF file or a Hugging Face folder, to a Hugging Face folder in f32 at `to`.
pub(super) fn convert(from: &Path, to: &Path, force: bool) -> Result<(), Exit> {
    if to.exists() && !force {
        return Err(Exit::Config(format!(
            "{}: exists already, choose another folder or give --force",
            to.display()
        )));
    }
    if to.exists() && !to.join("config.json").is_file() {
        return Err(Exit::Config(format!(
            "{}: has no config.json, it is not a model and will not be replaced",
            to.display()
        )));
    }
    let pretrained =
        Pretrained::load(from, &Device::Cpu).map_err(|error| Exit::Model(format!("{error:#}")))?;
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
        Some(license) => writeln!(out, "licence, as the file says: {license}")?,
        None => writeln!(out, "licence: the file does not say")?,
    }
    Ok(())
}

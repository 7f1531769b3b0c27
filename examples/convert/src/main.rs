//! `convert MODEL FOLDER`: a GGUF file, or a Hugging Face folder, becomes a Hugging Face folder in f32.

use std::path::Path;

use anyhow::{Result, bail};
use candle_core::Device;
use candle_grpo_train::Pretrained;

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [from, to] = arguments.as_slice() else {
        bail!("usage: convert MODEL FOLDER, where MODEL is a GGUF file or a Hugging Face folder");
    };
    let (from, to) = (Path::new(from), Path::new(to));
    let pretrained = Pretrained::load(from, &Device::Cpu)?;
    pretrained.save(to)?;
    println!(
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
    );
    match pretrained.license {
        Some(license) => println!("licence, as the file says: {license}"),
        None => println!("licence: the file does not say"),
    }
    Ok(())
}

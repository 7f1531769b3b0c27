//! Policies on disk.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use candle_core::{Device, Tensor, safetensors};
use candle_grpo_nn::{DecoderConfig, Parameters};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use crate::Actor;
use crate::atomic_file::write_atomically;

const CONFIG: &str = "config.json";
const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const TOKENIZER: &str = "tokenizer.json";

/// What [`load_checkpoint`] reads.
pub struct Checkpoint {
    /// The shape of the policy.
    pub model: DecoderConfig,
    /// Its parameters.
    pub parameters: Parameters,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The state of the optimiser, if it was saved.
    pub optimizer_state: Option<HashMap<String, Tensor>>,
}

/// Writes a folder in the form of a Hugging Face model, readable by other programs as a Llama: `config.json`,
/// `model.safetensors` and `tokenizer.json`, and `optimizer.safetensors` to go on training.
///
/// `stop_token_ids` are noted as the end-of-sequence tokens. The folder appears when it is complete; one that was
/// there is replaced.
pub fn save_checkpoint(
    folder: &Path,
    actor: &Actor,
    tokenizer: &Tokenizer,
    stop_token_ids: &[u32],
) -> Result<()> {
    write_atomically(folder, |folder| {
        fs::create_dir_all(folder)?;
        let config = hugging_face_config(actor.model(), stop_token_ids)?;
        fs::write(folder.join(CONFIG), serde_json::to_vec_pretty(&config)?)?;
        actor.parameters().save(&folder.join(MODEL))?;
        safetensors::save(&actor.optimizer().state(), folder.join(OPTIMIZER))?;
        tokenizer
            .save(folder.join(TOKENIZER), true)
            .map_err(|e| anyhow!("{TOKENIZER}: {e}"))
    })
}

/// Reads what [`save_checkpoint`] wrote.
pub fn load_checkpoint(folder: &Path, device: &Device) -> Result<Checkpoint> {
    let read = || -> Result<Checkpoint> {
        let config = fs::read(folder.join(CONFIG)).context(CONFIG)?;
        let model: DecoderConfig = serde_json::from_slice(&config).context(CONFIG)?;
        let parameters = Parameters::load(&model, &folder.join(MODEL), device)?;
        let tokenizer = Tokenizer::from_file(folder.join(TOKENIZER))
            .map_err(|e| anyhow!("{TOKENIZER}: {e}"))?;
        let optimizer = folder.join(OPTIMIZER);
        let optimizer_state = if optimizer.exists() {
            Some(safetensors::load(optimizer, device)?)
        } else {
            None
        };
        Ok(Checkpoint {
            model,
            parameters,
            tokenizer,
            optimizer_state,
        })
    };
    read().with_context(|| format!("reading checkpoint {}", folder.display()))
}

fn hugging_face_config(model: &DecoderConfig, stop_token_ids: &[u32]) -> Result<Value> {
    let mut config = serde_json::to_value(model)?;
    let extra = [
        ("architectures", json!(["LlamaForCausalLM"])),
        ("model_type", json!("llama")),
        ("hidden_act", json!("silu")),
        ("torch_dtype", json!("float32")),
        ("head_dim", json!(model.head_dim())),
        ("bos_token_id", Value::Null),
        ("eos_token_id", json!(stop_token_ids)),
    ];
    if let Some(config) = config.as_object_mut() {
        config.extend(extra.map(|(name, value)| (name.to_owned(), value)));
    }
    Ok(config)
}

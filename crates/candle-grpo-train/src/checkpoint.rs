//! Policies on disk.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor, safetensors};
use candle_grpo_nn::{DecoderConfig, Parameters, write_whole};
use tokenizers::Tokenizer;

use crate::Actor;
use crate::atomic_file::write_folder;
use crate::hugging_face_config::{from_hugging_face, to_hugging_face};
use crate::pretrained::{CONFIG, MODEL, read_tokenizer, write_tokenizer};

const OPTIMIZER: &str = "optimizer.safetensors";
const ADAPTER: &str = "adapter";

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

/// Writes a folder in the form of a Hugging Face model, readable by other programs: `config.json`,
/// `model.safetensors` and `tokenizer.json`, and `optimizer.safetensors` for [`AdamW::load_state`].
///
/// Of a policy with adapters, `model.safetensors` is what they and the base make together. The folder `adapter` has the
/// adapters alone, in the form of PEFT, with the state of their optimiser: they belong to the base that training began with.
///
/// `stop_token_ids` are noted as the end-of-sequence tokens.
///
/// The folder appears when it is complete and replaces one that was there. Whenever the program is interrupted, the
/// folder is complete, or the previous one is kept beside it under another name (`.NAME.PID.old`).
///
/// It holds policy and optimiser, not the place in a run: for that there is [`Trainer::save_state`](crate::Trainer::save_state).
///
/// [`AdamW::load_state`]: candle_grpo_nn::AdamW::load_state
pub fn save_checkpoint(
    folder: &Path,
    actor: &Actor,
    tokenizer: &Tokenizer,
    stop_token_ids: &[u32],
) -> Result<()> {
    write_folder(folder, |folder| {
        let config = to_hugging_face(actor.model(), stop_token_ids)?;
        write_whole(&folder.join(CONFIG), &serde_json::to_vec_pretty(&config)?).context(CONFIG)?;
        write_tokenizer(folder, tokenizer)?;
        let Some(adapters) = actor.adapters() else {
            actor.parameters().save(&folder.join(MODEL))?;
            return Ok(actor.optimizer().save_state(&folder.join(OPTIMIZER))?);
        };
        let merged = adapters.merged(actor.model(), actor.parameters())?;
        merged.save(&folder.join(MODEL))?;
        let folder = folder.join(ADAPTER);
        fs::create_dir(&folder)?;
        adapters.save(&folder, None)?;
        Ok(actor.optimizer().save_state(&folder.join(OPTIMIZER))?)
    })
}

/// Reads what [`save_checkpoint`] wrote, or a Hugging Face Llama, Qwen2, Qwen3 or SmolLM3 in one safetensors file or
/// several.
///
/// Errs on a model that [`Decoder`](candle_grpo_nn::Decoder) would compute otherwise than it is meant, naming the key of
/// `config.json` that says so: another type of model, sliding windows, biases that the family does not have, another activation.
pub fn load_checkpoint(folder: &Path, device: &Device) -> Result<Checkpoint> {
    let read = || -> Result<Checkpoint> {
        let config = fs::read(folder.join(CONFIG)).context(CONFIG)?;
        let model = from_hugging_face(&config).context(CONFIG)?;
        let parameters = Parameters::load_folder(&model, folder, device)?;
        let tokenizer = read_tokenizer(folder)?;
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

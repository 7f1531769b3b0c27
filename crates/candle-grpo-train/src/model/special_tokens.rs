//! A model's special tokens.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use candle_grpo_base::json;
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

/// A token id and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    /// The token id.
    pub id: u32,
    /// The text, for example `<|im_end|>`.
    pub text: String,
}

/// A model's special tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The token at the start of a text.
    pub bos: Option<SpecialToken>,
    /// The token at the end of a turn or a text.
    pub eos: Option<SpecialToken>,
    /// The token for unknown text.
    pub unk: Option<SpecialToken>,
    /// The padding token. It may equal `eos`, so no mask can be derived from it.
    pub pad: Option<SpecialToken>,
    /// All tokens that end a completion, for
    /// [`SamplingConfig::stop_token_ids`](crate::SamplingConfig).
    pub stop_token_ids: Vec<u32>,
}

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

impl SpecialTokens {
    /// Reads `tokenizer_config.json` and `generation_config.json` from a Hugging Face folder, if
    /// they exist.
    ///
    /// `config` is its `config.json`, which has the stop tokens if `generation_config.json` does
    /// not.
    pub(crate) fn read(
        folder: &Path,
        config: &Map<String, Value>,
        tokenizer: &Tokenizer,
    ) -> Result<Self> {
        let names = read_object(folder, TOKENIZER_CONFIG)?;
        let token = |key: &str| -> Result<Option<SpecialToken>> {
            let text = match names.get(key) {
                None | Some(Value::Null) => return Ok(None),
                Some(Value::String(text)) => text,
                Some(Value::Object(token)) => match token.get("content").unwrap_or(&Value::Null) {
                    Value::String(text) => text,
                    other => bail!("{TOKENIZER_CONFIG}: {key}.content: {other}, must be a text"),
                },
                Some(other) => bail!("{TOKENIZER_CONFIG}: {key}: {other}, must be a text"),
            };
            // A tokenizer_config.json may name a token that the vocabulary lacks. It is ignored.
            Ok(tokenizer.token_to_id(text).map(|id| SpecialToken {
                id,
                text: text.clone(),
            }))
        };
        let eos = token("eos_token")?;
        let generation = read_object(folder, GENERATION_CONFIG)?;
        let mut stop_token_ids = match generation.get("eos_token_id").filter(|id| !id.is_null()) {
            Some(ids) => token_ids(ids).context(GENERATION_CONFIG)?,
            None => match config.get("eos_token_id").filter(|id| !id.is_null()) {
                Some(ids) => token_ids(ids).context("config.json")?,
                None => Vec::new(),
            },
        };
        // Often only this file names the end of a chat turn.
        if let Some(eos) = &eos
            && !stop_token_ids.contains(&eos.id)
        {
            stop_token_ids.push(eos.id);
        }
        Ok(Self {
            bos: token("bos_token")?,
            eos,
            unk: token("unk_token")?,
            pad: token("pad_token")?,
            stop_token_ids,
        })
    }

    /// Returns the tokens with their names in chat templates and in `tokenizer_config.json`.
    pub(crate) fn named(&self) -> impl Iterator<Item = (&'static str, &SpecialToken)> {
        [
            ("bos_token", &self.bos),
            ("eos_token", &self.eos),
            ("unk_token", &self.unk),
            ("pad_token", &self.pad),
        ]
        .into_iter()
        .filter_map(|(name, token)| Some((name, token.as_ref()?)))
    }
}

/// Reads a file's JSON object; empty if the file does not exist.
pub(crate) fn read_object(folder: &Path, file: &str) -> Result<Map<String, Value>> {
    let path = folder.join(file);
    if !path.exists() {
        return Ok(Map::new());
    }
    let bytes = fs::read(path).with_context(|| file.to_owned())?;
    serde_json::from_slice(&bytes)
        .map_err(|error| anyhow!("{file}: {}", json::message_with_place(&error)))
}

/// Reads one number or a list.
fn token_ids(value: &Value) -> Result<Vec<u32>> {
    let numbers = match value {
        Value::Array(numbers) => numbers.as_slice(),
        number => std::slice::from_ref(number),
    };
    numbers
        .iter()
        .map(|number| {
            number
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .with_context(|| format!("eos_token_id: {value}, must be token ids"))
        })
        .collect()
}

//! Tokens with a purpose.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::{Map, Value};
use tokenizers::Tokenizer;

/// A token and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its number.
    pub id: u32,
    /// Its text, `<|im_end|>` for example.
    pub text: String,
}

/// The tokens with a purpose of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Begins a text.
    pub bos: Option<SpecialToken>,
    /// Ends a turn or a text.
    pub eos: Option<SpecialToken>,
    /// Stands for what is unknown.
    pub unk: Option<SpecialToken>,
    /// Fills rows up. It may be the same as `eos`: no mask may be derived from it.
    pub pad: Option<SpecialToken>,
    /// All tokens at which a completion ends, for [`SamplingConfig::stop_token_ids`](crate::SamplingConfig).
    pub stop_token_ids: Vec<u32>,
}

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";

impl SpecialTokens {
    /// Reads `tokenizer_config.json` and `generation_config.json` of a Hugging Face folder, as far as they are there;
    /// `config` is its `config.json`, which names the stop tokens where the latter does not.
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
                Some(Value::Object(token)) => match token.get("content") {
                    Some(Value::String(text)) => text,
                    other => bail!("{TOKENIZER_CONFIG}: {key}.content: {other:?}, must be a text"),
                },
                Some(other) => bail!("{TOKENIZER_CONFIG}: {key}: {other}, must be a text"),
            };
            // A tokenizer_config.json may name a token that the vocabulary lacks; nothing can then be done with it.
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
        // The end of a turn of a chat is often named here alone.
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

    /// The names by which a chat template and `tokenizer_config.json` know them.
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

/// The object in a file, empty if there is no such file.
pub(crate) fn read_object(folder: &Path, file: &str) -> Result<Map<String, Value>> {
    let path = folder.join(file);
    if !path.exists() {
        return Ok(Map::new());
    }
    serde_json::from_slice(&fs::read(path).with_context(|| file.to_owned())?)
        .with_context(|| file.to_owned())
}

/// One number or several.
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

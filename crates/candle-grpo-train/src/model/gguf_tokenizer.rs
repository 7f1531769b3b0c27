//! The tokenizer in GGUF metadata.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_grpo_nn::GgufValue;
use serde_json::Value;
use tokenizers::decoders::byte_level::ByteLevel as ByteLevelDecoder;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

use super::special_tokens::{SpecialToken, SpecialTokens};

type Metadata = BTreeMap<String, GgufValue>;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TOKEN_TYPE: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";

/// Values of [`TOKEN_TYPE`].
const NORMAL: i64 = 1;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const UNUSED: i64 = 5;

/// Control tokens, other than the end-of-sequence token, that end a turn or text.
///
/// Files only name one or two of them. llama.cpp stops at every token with one of these texts.
const ENDS: [&str; 8] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
];

/// Builds the byte-level BPE tokenizer in `metadata`. You can save it as a `tokenizer.json` that
/// other programs read.
///
/// # Errors
///
/// Fails if the tokenizer is of another kind, or its pre-tokenizer is unknown, which would silently
/// give wrong tokens.
pub(crate) fn gguf_tokenizer(metadata: &Metadata) -> Result<Tokenizer> {
    match metadata.get(MODEL) {
        Some(GgufValue::String(model)) if model == "gpt2" => {}
        Some(model) => bail!(
            "{MODEL}: {model}, only \"gpt2\" (byte-level BPE) is read; a Hugging Face directory has its tokenizer.json"
        ),
        None => bail!("{MODEL}: absent, must be \"gpt2\""),
    }
    let name = match metadata.get(PRE) {
        None => "default",
        Some(value) => value
            .as_str()
            .with_context(|| format!("{PRE}: {value}, must be a text"))?,
    };
    let splitting =
        Splitting::named(name).with_context(|| format!("{PRE}: {name:?}, is not known"))?;
    let tokens = strings(metadata, TOKENS)?;
    let types = token_types(metadata, tokens.len())?;

    let mut vocabulary = Vocab::default();
    for (id, token) in tokens.iter().enumerate() {
        // Padding rows in an embedding with more rows than the vocabulary.
        if types[id] == UNUSED && *token == padding(id) {
            continue;
        }
        let id = u32::try_from(id)?;
        if let Some(other) = vocabulary.insert(token.clone(), id) {
            bail!("{TOKENS}: {token:?} is both token {other} and token {id}");
        }
    }
    let merges = strings(metadata, MERGES)?
        .iter()
        .enumerate()
        .map(|(at, merge)| match merge.split_once(' ') {
            Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
            None => {
                bail!("{MERGES}: entry {at} is {merge:?}, must be two parts with a space between")
            }
        })
        .collect::<Result<_>>()?;
    let model = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .ignore_merges(splitting.whole_words)
        .build()
        .map_err(|error| anyhow!("{MERGES}: {error}"))?;

    let mut tokenizer = Tokenizer::new(model);
    if splitting.composed {
        tokenizer
            .with_normalizer(Some(NFC))
            .map_err(|error| anyhow!("{PRE}: {error}"))?;
    }
    tokenizer.with_pre_tokenizer(Some(splitting.pre_tokenizer()?));
    tokenizer.with_decoder(Some(ByteLevelDecoder::new(true, true, true)));
    for (token, token_type) in tokens.iter().zip(types) {
        let added = match token_type {
            CONTROL => tokenizer.add_special_tokens([AddedToken::from(token.as_str(), true)]),
            USER_DEFINED => {
                tokenizer.add_tokens([AddedToken::from(token.as_str(), false).normalized(false)])
            }
            _ => continue,
        };
        added.map_err(|error| anyhow!("{TOKENS}: {token:?}: {error}"))?;
    }
    if metadata
        .get(ADD_BOS)
        .map_or(Some(splitting.begins_with_bos), GgufValue::as_bool)
        == Some(true)
        && let Some(bos) = gguf_special_tokens(metadata)?.bos
    {
        let template = TemplateProcessing::builder()
            .try_single(vec![bos.text.as_str(), "$A"])
            .map_err(|error| anyhow!("tokenizer.ggml.bos_token_id: {error}"))?
            .special_tokens(vec![(bos.text.as_str(), bos.id)])
            .build()
            .context("tokenizer.ggml.bos_token_id")?;
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

/// Text for an embedding row without a token.
fn padding(id: usize) -> String {
    format!("[PAD{id}]")
}

/// Metadata from which [`gguf_tokenizer`] and [`gguf_special_tokens`] read a tokenizer, for a model
/// with `vocab_size` tokens.
///
/// # Errors
///
/// Fails if the tokenizer is not a byte-level BPE with a known pre-tokenizer, or the metadata
/// cannot express its special tokens.
pub(crate) fn tokenizer_metadata(
    tokenizer: &Tokenizer,
    special_tokens: &SpecialTokens,
    vocab_size: usize,
) -> Result<Metadata> {
    let json = serde_json::to_value(tokenizer)?;
    let model = &json["model"];
    ensure!(
        model["type"] == "BPE" && model["byte_fallback"] != true,
        "tokenizer: model: {}, must be a byte-level BPE",
        model["type"]
    );
    let splitting = Splitting::name(&json)?;
    let merges: Vec<String> = match &model["merges"] {
        Value::Array(merges) => merges.iter().filter_map(merge_text).collect(),
        _ => Vec::new(),
    };
    ensure!(
        !merges.is_empty(),
        "tokenizer: model.merges: none, must have at least one"
    );
    let mut tokens: Vec<_> = (0..vocab_size).map(padding).collect();
    let mut types = vec![UNUSED; vocab_size];
    let mut set = |id: u32, text: String, token_type| -> Result<()> {
        let slot = usize::try_from(id)?;
        ensure!(
            slot < vocab_size,
            "tokenizer: token {id} is {text:?}, but the model has only {vocab_size} tokens"
        );
        (tokens[slot], types[slot]) = (text, token_type);
        Ok(())
    };
    for (text, id) in tokenizer.get_vocab(false) {
        set(id, text, NORMAL)?;
    }
    for (id, token) in tokenizer.get_added_tokens_decoder() {
        let token_type = if token.special { CONTROL } else { USER_DEFINED };
        set(id, token.content, token_type)?;
    }
    let text = |text: &str| GgufValue::String(text.to_owned());
    let mut metadata: Metadata = [
        (MODEL, text("gpt2")),
        (PRE, text(splitting)),
        (
            ADD_BOS,
            GgufValue::Bool(begins_with_bos(tokenizer, special_tokens)?),
        ),
        (MERGES, GgufValue::Strings(merges)),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect();
    let ends_by_text = |id: &u32| {
        let slot = *id as usize;
        types.get(slot) == Some(&CONTROL) && ENDS.contains(&tokens[slot].as_str())
    };
    let stops = &special_tokens.stop_token_ids;
    let eos = special_tokens.eos.as_ref().map(|token| token.id);
    let eos = eos.or(stops.first().copied());
    // Files name one token each that ends a text, a turn, and a message.
    let mut others = stops
        .iter()
        .filter(|id| Some(**id) != eos && !ends_by_text(id));
    let (eot, eom) = (others.next().copied(), others.next().copied());
    if let Some(id) = others.next() {
        bail!("eos_token_id: {id}, must be one of at most three tokens in a GGUF file");
    }
    let id = |token: &Option<SpecialToken>| token.as_ref().map(|token| token.id);
    for (name, id) in [
        ("bos", id(&special_tokens.bos)),
        ("eos", eos),
        ("eot", eot),
        ("eom", eom),
        ("unknown", id(&special_tokens.unk)),
        ("padding", id(&special_tokens.pad)),
    ] {
        if let Some(id) = id {
            metadata.insert(token_key(name), GgufValue::Integer(id.into()));
        }
    }
    metadata.insert(TOKENS.to_owned(), GgufValue::Strings(tokens));
    metadata.insert(TOKEN_TYPE.to_owned(), GgufValue::Integers(types));
    Ok(metadata)
}

/// The two parts of a merge in a `tokenizer.json`, as one text.
fn merge_text(merge: &Value) -> Option<String> {
    match merge {
        Value::String(merge) => Some(merge.clone()),
        merge => Some(format!("{} {}", merge[0].as_str()?, merge[1].as_str()?)),
    }
}

/// Returns whether the tokenizer starts texts with the BOS token.
fn begins_with_bos(tokenizer: &Tokenizer, special_tokens: &SpecialTokens) -> Result<bool> {
    let ids = |special: bool| -> Result<Vec<u32>> {
        let encoding = tokenizer
            .encode("a", special)
            .map_err(|error| anyhow!("{error}"))?;
        Ok(encoding.get_ids().to_vec())
    };
    let (plain, whole) = (ids(false)?, ids(true)?);
    let bos = special_tokens.bos.as_ref().map(|token| token.id);
    match whole.strip_suffix(plain.as_slice()) {
        Some([]) => Ok(false),
        Some([first]) if Some(*first) == bos => Ok(true),
        _ => bail!("tokenizer: post_processor: must add no token, or the BOS token before a text"),
    }
}

fn token_key(name: &str) -> String {
    format!("tokenizer.ggml.{name}_token_id")
}

/// Reads the special tokens from the keys `tokenizer.ggml.*_token_id`.
pub(crate) fn gguf_special_tokens(metadata: &Metadata) -> Result<SpecialTokens> {
    let tokens = strings(metadata, TOKENS)?;
    let token = |name: &str| -> Result<Option<SpecialToken>> {
        let key = token_key(name);
        let Some(value) = metadata.get(&key) else {
            return Ok(None);
        };
        let found = value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .and_then(|id| Some((id, tokens.get(id as usize)?)));
        match found {
            Some((id, text)) => Ok(Some(SpecialToken {
                id,
                text: text.clone(),
            })),
            None => bail!(
                "{key}: {value}, must be the number of one of the {} tokens",
                tokens.len()
            ),
        }
    };
    let (eos, eot, eom) = (token("eos")?, token("eot")?, token("eom")?);
    let mut stop_token_ids: Vec<u32> = [&eos, &eot, &eom]
        .into_iter()
        .flatten()
        .map(|token| token.id)
        .collect();
    for (id, token_type) in token_types(metadata, tokens.len())?.into_iter().enumerate() {
        if token_type == CONTROL && ENDS.contains(&tokens[id].as_str()) {
            stop_token_ids.push(u32::try_from(id)?);
        }
    }
    let mut seen = Vec::new();
    stop_token_ids.retain(|id| {
        !seen.contains(id) && {
            seen.push(*id);
            true
        }
    });
    Ok(SpecialTokens {
        bos: token("bos")?,
        eos,
        unk: token("unknown")?,
        pad: token("padding")?,
        stop_token_ids,
    })
}

fn strings<'a>(metadata: &'a Metadata, key: &str) -> Result<&'a [String]> {
    let value = metadata
        .get(key)
        .with_context(|| format!("{key}: absent"))?;
    value
        .as_strings()
        .with_context(|| format!("{key}: {value}, must be an array of texts"))
}

/// Reads one type per token. Without the key, all tokens are ordinary.
fn token_types(metadata: &Metadata, count: usize) -> Result<Vec<i64>> {
    let Some(value) = metadata.get(TOKEN_TYPE) else {
        return Ok(vec![NORMAL; count]);
    };
    let types = value.as_integers().unwrap_or_default();
    ensure!(
        types.len() == count,
        "{TOKEN_TYPE}: {value}, must be an array of {count} whole numbers, one a token"
    );
    Ok(types.to_vec())
}

/// The pre-tokenizer, which splits text into words. GGUF files name a model that uses it.
struct Splitting {
    /// Patterns that split the text, in order. Empty means only GPT-2's pattern.
    patterns: &'static [&'static str],
    /// If true, each digit is a word.
    digits: bool,
    /// If true, GPT-2's pattern follows.
    gpt2: bool,
    /// If true, characters are composed first (NFC).
    composed: bool,
    /// If true, a word that is a token skips the merges.
    whole_words: bool,
    begins_with_bos: bool,
}

const CONTRACTIONS_AND_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const WITH_NUMBERS_OF_THREE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl Splitting {
    /// Looks up the pre-tokenizer by its llama.cpp name.
    ///
    /// For Qwen, NFC is added as in its own tokenizer; llama.cpp omits it.
    fn named(name: &str) -> Option<Self> {
        let plain = Self {
            patterns: &[],
            digits: false,
            gpt2: false,
            composed: false,
            whole_words: false,
            begins_with_bos: false,
        };
        Some(match name {
            "default" => Self {
                patterns: &[r"[\p{P}\$\+<=>\^~\|]+"],
                gpt2: true,
                ..plain
            },
            "gpt-2" | "gpt2" => Self {
                gpt2: true,
                ..plain
            },
            "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" => Self {
                digits: true,
                gpt2: true,
                ..plain
            },
            "qwen2" | "deepseek-r1-qwen" => Self {
                patterns: &[CONTRACTIONS_AND_WORDS],
                composed: true,
                ..plain
            },
            "llama-bpe" | "llama3" | "llama-v3" => Self {
                patterns: &[WITH_NUMBERS_OF_THREE],
                whole_words: true,
                begins_with_bos: true,
                ..plain
            },
            "smaug-bpe" => Self {
                patterns: &[WITH_NUMBERS_OF_THREE],
                ..plain
            },
            _ => return None,
        })
    }

    /// llama.cpp names, one for each pre-tokenizer.
    const NAMES: [&str; 6] = [
        "gpt-2",
        "smollm",
        "qwen2",
        "llama-bpe",
        "smaug-bpe",
        "default",
    ];

    /// Returns the pre-tokenizer's name for a `tokenizer.json`.
    fn name(json: &Value) -> Result<&'static str> {
        let steps = |pre_tokenizer: &Value| -> Vec<Value> {
            let mut steps = match &pre_tokenizer["pretokenizers"] {
                Value::Array(steps) => steps.clone(),
                _ => vec![pre_tokenizer.clone()],
            };
            // Offsets do not affect the tokens.
            let objects = steps.iter_mut().filter_map(Value::as_object_mut);
            objects.for_each(|step| drop(step.remove("trim_offsets")));
            steps
        };
        let found = steps(&json["pre_tokenizer"]);
        for name in Self::NAMES {
            let Some(known) = Self::named(name) else {
                continue;
            };
            let is_composed = json["normalizer"]["type"] == "NFC";
            if steps(&serde_json::to_value(known.pre_tokenizer()?)?) == found
                && known.whole_words == (json["model"]["ignore_merges"] == true)
                && known.composed == is_composed
                && (is_composed || json["normalizer"].is_null())
            {
                return Ok(name);
            }
        }
        bail!(
            "tokenizer: pre_tokenizer {} with normalizer {}, must be one of {:?} of llama.cpp",
            json["pre_tokenizer"],
            json["normalizer"],
            Self::NAMES
        )
    }

    fn pre_tokenizer(&self) -> Result<PreTokenizerWrapper> {
        let split = |pattern: &str| -> Result<PreTokenizerWrapper> {
            let pattern = SplitPattern::Regex(pattern.to_owned());
            Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                .map(Into::into)
                .map_err(|error| anyhow!("{error}"))
        };
        let mut steps = Vec::new();
        for pattern in self.patterns {
            steps.push(split(pattern)?);
        }
        if self.digits {
            steps.push(Digits::new(true).into());
        }
        // No space before the text.
        steps.push(ByteLevel::new(false, true, self.gpt2).into());
        Ok(Sequence::new(steps).into())
    }
}

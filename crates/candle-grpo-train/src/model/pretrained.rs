//! Pretrained models with their tokenizer and chat template.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::{DType, Device};
use candle_grpo_hub::is_gguf;
use candle_grpo_nn::{
    BaseWeights, CheckpointForm, ComputeDType, DecoderConfig, Export, Gguf, GgufDType, GgufValue,
    Lora, Parameters, WeightDivision, atomic_file,
};
use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;

use super::gguf_tokenizer::{gguf_special_tokens, gguf_tokenizer, tokenizer_metadata};
use super::special_tokens::read_object;
use super::tokenizer_json::tokenizer_from_json;
use super::{DEFAULT, GenerationDefaults, SpecialToken, SpecialTokens};
use crate::config_json::set_dtype;
use crate::owned_files::{ADAPTER_CONFIG, CONFIG, Owned, WEIGHTS};
use crate::rollout::{LocalGenerator, PolicyWeights};
use crate::{ChatTemplate, Sampler, SamplingConfig};

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const CHAT_TEMPLATE: &str = "chat_template.jinja";
const ADDITIONAL_CHAT_TEMPLATES: &str = "additional_chat_templates";
const GGUF_CHAT_TEMPLATE: &str = "tokenizer.chat_template";
const GGUF_LICENSE: &str = "general.license";

/// The form of weights that are read.
struct WeightLoad<'a> {
    device: &'a Device,
    /// That of the linear maps, and the dtype of other weights.
    form: (BaseWeights, DType),
    /// The division of dense weights between ranks.
    division: Option<&'a WeightDivision>,
}

impl WeightLoad<'_> {
    fn of_gguf(&self, file: &Gguf) -> Result<Parameters> {
        let (base, dtype) = self.form;
        Ok(match self.division {
            Some(division) => file.divided_parameters(division, self.device)?,
            None => file.frozen_parameters(base, dtype, self.device)?,
        })
    }

    fn of_folder(&self, model: &DecoderConfig, folder: &Path) -> Result<Parameters> {
        let ((base, dtype), device) = (self.form, self.device);
        Ok(match self.division {
            Some(division) => Parameters::load_folder_divided(model, folder, division, device)?,
            None => Parameters::load_folder_frozen(model, folder, base, dtype, device)?,
        })
    }
}

/// A decoder with its weights, tokenizer and chat template.
///
/// Clones share the weights, so training one changes the other.
#[derive(Clone)]
pub struct Pretrained {
    /// Decoder configuration.
    pub model: DecoderConfig,
    /// Weights.
    pub parameters: Parameters,
    /// Tokenizer.
    pub tokenizer: Tokenizer,
    /// Special tokens, including the stop tokens.
    pub special_tokens: SpecialTokens,
    /// Sampling options that the model recommends in its `generation_config.json`.
    pub generation: GenerationDefaults,
    /// Chat template with the special tokens; `None` if the model has none.
    pub chat_template: Option<ChatTemplate>,
    /// The model's license, as stated in its file.
    pub license: Option<String>,
    /// Describes a checkpoint with a text model and other parts, such as a vision tower.
    /// [`Self::save`] keeps them.
    pub form: Option<CheckpointForm>,
}

impl Pretrained {
    /// Returns a model without special tokens, recommended options, a chat template or a license.
    pub fn new(model: DecoderConfig, parameters: Parameters, tokenizer: Tokenizer) -> Self {
        Self {
            model,
            parameters,
            tokenizer,
            special_tokens: SpecialTokens::default(),
            generation: GenerationDefaults::default(),
            chat_template: None,
            license: None,
            form: None,
        }
    }

    /// Reads a GGUF file, or a Hugging Face folder with safetensors files.
    ///
    /// # Errors
    ///
    /// If [`Decoder`](candle_grpo_nn::Decoder) does not support the model, if weights are missing,
    /// unexpected, not finite or have the wrong shape, or if the tokenizer does not match the
    /// model. The error names file and key.
    pub fn load(path: &Path, device: &Device) -> Result<Self> {
        Self::load_frozen(path, device, BaseWeights::Dense, ComputeDType::F32)
    }

    /// Like [`Self::load`], with linear maps in the form `base` and other weights in `dtype`, for a
    /// model that trains only adapters: see [`Parameters::frozen_as`].
    ///
    /// # Errors
    ///
    /// Same as [`Self::load`].
    pub fn load_frozen(
        path: &Path,
        device: &Device,
        base: BaseWeights,
        dtype: ComputeDType,
    ) -> Result<Self> {
        let weights = WeightLoad {
            device,
            form: (base, dtype.into()),
            division: None,
        };
        Self::read(path, Some(weights))
    }

    /// Like [`Self::load`], for weights that ranks divide: see
    /// [`Parameters::load_folder_divided`].
    ///
    /// # Errors
    ///
    /// Same as [`Self::load`].
    pub fn load_divided(path: &Path, device: &Device, division: &WeightDivision) -> Result<Self> {
        let weights = WeightLoad {
            device,
            form: (BaseWeights::Dense, DType::F32),
            division: Some(division),
        };
        Self::read(path, Some(weights))
    }

    /// Like [`Self::load`], without reading the weights. The parameters are empty.
    ///
    /// # Errors
    ///
    /// Same as [`Self::load`], except for the weights.
    pub fn load_without_weights(path: &Path) -> Result<Self> {
        Self::read(path, None)
    }

    /// Checks that the weights at `path` exist and have the model's names and shapes, without
    /// reading them.
    ///
    /// # Errors
    ///
    /// Same as [`Self::load`] for weights, except for values that are not finite.
    pub fn check_weights(&self, path: &Path) -> Result<()> {
        let checked = if path.is_dir() {
            Parameters::check_folder(&self.model, path)
        } else {
            Gguf::open(path).and_then(|file| file.check_parameters())
        };
        checked.with_context(|| format!("loading {}", path.display()))
    }

    fn read(path: &Path, weights: Option<WeightLoad<'_>>) -> Result<Self> {
        let read = || -> Result<Self> {
            if !path.exists() {
                bail!("there is no such file{}", missing_hint(path));
            }
            let pretrained = if path.is_dir() {
                Self::read_folder(path, weights)?
            } else {
                Self::read_gguf(path, weights)?
            };
            pretrained.ensure_tokens_fit()?;
            Ok(pretrained)
        };
        read().with_context(|| format!("loading {}", path.display()))
    }

    fn read_gguf(path: &Path, weights: Option<WeightLoad<'_>>) -> Result<Self> {
        let file = Gguf::open(path)?;
        let metadata = file.metadata();
        let text = |key: &str| metadata.get(key).and_then(GgufValue::as_str);
        // Small files are read before the weights.
        let model = file.config()?;
        let tokenizer = match text("tokenizer.huggingface.json") {
            Some(json) => {
                tokenizer_from_json(json.as_bytes()).context("tokenizer.huggingface.json")?
            }
            None => gguf_tokenizer(metadata)?,
        };
        let special_tokens = gguf_special_tokens(metadata)?;
        let chat_template = gguf_chat_template(metadata)?;
        Ok(Self {
            parameters: match weights {
                Some(weights) => weights.of_gguf(&file)?,
                None => Parameters::empty(),
            },
            model,
            tokenizer,
            chat_template: chat_template.map(|t| t.with_special_tokens(&special_tokens)),
            special_tokens,
            generation: GenerationDefaults::default(),
            license: text(GGUF_LICENSE).map(str::to_owned),
            form: None,
        })
    }

    fn read_folder(folder: &Path, weights: Option<WeightLoad<'_>>) -> Result<Self> {
        ensure!(
            folder.join(CONFIG).exists() || !folder.join(ADAPTER_CONFIG).exists(),
            "has adapters and no model; merge them with their model first, those of a run by grpo convert --merge"
        );
        let bytes = fs::read(folder.join(CONFIG)).context(CONFIG)?;
        let model = DecoderConfig::from_hugging_face(&bytes).context(CONFIG)?;
        let config: Map<String, Value> = serde_json::from_slice(&bytes).context(CONFIG)?;
        let tokenizer = read_tokenizer(folder)?;
        let special_tokens = SpecialTokens::read(folder, &config, &tokenizer)?;
        let generation = GenerationDefaults::new(&read_object(folder, GENERATION_CONFIG)?);
        let chat_template = read_chat_template(folder)?;
        let (parameters, form) = match weights {
            Some(weights) => (
                weights.of_folder(&model, folder)?,
                CheckpointForm::read(&model, folder)?,
            ),
            None => (Parameters::empty(), None),
        };
        Ok(Self {
            parameters,
            form,
            model,
            tokenizer,
            chat_template: chat_template.map(|t| t.with_special_tokens(&special_tokens)),
            special_tokens,
            generation,
            license: None,
        })
    }

    fn ensure_tokens_fit(&self) -> Result<()> {
        let vocab_size = self.model.vocab_size;
        ensure_tokens_fit(&self.tokenizer, vocab_size)?;
        for &id in &self.special_tokens.stop_token_ids {
            ensure!(
                (id as usize) < vocab_size,
                "eos_token_id: {id}, but the model has only {vocab_size} tokens"
            );
        }
        Ok(())
    }

    /// Writes a folder that Hugging Face transformers can load: `config.json`, `model.safetensors`
    /// in the parameters' dtype, `tokenizer.json`, `tokenizer_config.json` with the chat template,
    /// and `generation_config.json`.
    ///
    /// With a [`form`](Self::form), names and `config.json` are as in its checkpoint, and the other
    /// parts' bytes are copied from there.
    ///
    /// The folder appears when it is complete, and replaces an existing one.
    pub fn save(&self, folder: &Path) -> Result<()> {
        let weights = Export::new(&self.parameters);
        atomic_file::write_folder(folder, |folder| self.write_files(&weights, folder))
            .with_context(|| format!("writing {}", folder.display()))
    }

    /// Writes a GGUF file that llama.cpp can load, with matrices in `dtype`. The file appears when
    /// it is complete, and replaces an existing one.
    ///
    /// # Errors
    ///
    /// If GGUF cannot express a field or a part of the tokenizer. The error names it.
    pub fn save_gguf(&self, path: &Path, dtype: GgufDType) -> Result<()> {
        let write = || -> Result<()> {
            let (tokenizer, special_tokens) = (&self.tokenizer, &self.special_tokens);
            let mut metadata =
                tokenizer_metadata(tokenizer, special_tokens, self.model.vocab_size)?;
            let mut texts = Vec::new();
            if let Some(template) = &self.chat_template {
                texts.push((GGUF_CHAT_TEMPLATE.to_owned(), template.source().to_owned()));
                let named = template.named();
                texts.extend(named.map(|(name, source)| {
                    (format!("{GGUF_CHAT_TEMPLATE}.{name}"), source.to_owned())
                }));
            }
            let license = self.license.clone();
            texts.extend(license.map(|license| (GGUF_LICENSE.to_owned(), license)));
            let texts = texts.into_iter();
            metadata.extend(texts.map(|(key, text)| (key, GgufValue::String(text))));
            Ok(Gguf::write(
                path,
                &self.model,
                &self.parameters,
                dtype,
                metadata,
            )?)
        };
        write().with_context(|| format!("writing {}", path.display()))
    }

    /// Returns the first entry in `folder` that belongs neither to a model in the Hugging Face
    /// layout nor to PEFT adapters. `None` means that [`Self::save`] would only replace a model or
    /// adapters.
    ///
    /// # Errors
    ///
    /// If `folder` is a link or a file, or contains no model.
    pub fn first_foreign(folder: &Path) -> Result<Option<PathBuf>> {
        ensure!(
            folder.is_dir() && !folder.is_symlink(),
            "is not a directory, must be a model directory"
        );
        let foreign = Owned::Model.first_foreign(folder)?;
        ensure!(
            foreign.is_some() || Owned::has_model(folder)?,
            "has no {CONFIG} with safetensors, must be a model directory"
        );
        Ok(foreign)
    }

    /// Writes the same files as [`Self::save`] atomically into an existing folder, with `weights`
    /// for the same model in place of its own.
    pub fn write_files(&self, weights: &Export<'_>, folder: &Path) -> Result<()> {
        let write = |file: &str, value: &Value| write_json(&folder.join(file), value);
        write(CONFIG, &self.config(weights.dtype())?)?;
        let mut generation = self.token_ids();
        generation.extend(self.generation.keys());
        write(GENERATION_CONFIG, &Value::Object(generation))?;
        self.write_tokenizer_files(folder)?;
        let path = folder.join(WEIGHTS);
        let Some(form) = &self.form else {
            return Ok(weights.save(&path)?);
        };
        form.write_files(folder)?;
        Ok(form.save(weights, &path)?)
    }

    /// Writes a folder that PEFT and transformers can load: `adapters` in PEFT's format, and the
    /// tokenizer as in [`Self::save`]. `base_model` is the base model's name or path.
    ///
    /// The folder appears when it is complete, and replaces an existing one.
    pub fn save_adapters(
        &self,
        adapters: &Lora,
        base_model: Option<&str>,
        folder: &Path,
    ) -> Result<()> {
        atomic_file::write_folder(folder, |folder| -> Result<()> {
            adapters.save(folder, base_model)?;
            self.write_tokenizer_files(folder)
        })
        .with_context(|| format!("writing {}", folder.display()))
    }

    fn write_tokenizer_files(&self, folder: &Path) -> Result<()> {
        write_json(&folder.join(TOKENIZER_CONFIG), &self.tokenizer_config())?;
        write_tokenizer(folder, &self.tokenizer)
    }

    /// Adds the model's stop tokens to `sampling`, unless it already has some.
    pub fn sampling(&self, sampling: SamplingConfig) -> SamplingConfig {
        if sampling.stop_token_ids.is_empty() {
            SamplingConfig {
                stop_token_ids: self.special_tokens.stop_token_ids.clone(),
                ..sampling
            }
        } else {
            sampling
        }
    }

    /// Creates a sampler for the model with its stop tokens and tokenizer. On a GPU it records
    /// steps ([`LocalGenerator::with_recorded_steps`]), so no other thread may use the GPU while it
    /// samples.
    pub fn sampler(&self, sampling: SamplingConfig) -> Result<Sampler> {
        self.sampler_in(sampling, ComputeDType::F32)
    }

    /// Like [`Self::sampler`], computing in `dtype`, like a policy that trains in it.
    pub fn sampler_in(&self, sampling: SamplingConfig, dtype: ComputeDType) -> Result<Sampler> {
        let weights = PolicyWeights {
            version: 0,
            model: &self.model,
            parameters: &self.parameters,
            adapters: None,
        };
        let generator = LocalGenerator::in_dtype(&weights, dtype)?;
        let generator = Arc::new(generator.with_recorded_steps(true));
        let sampling = self.sampling(sampling);
        let sampler = Sampler::from_generator(generator, self.model.vocab_size, sampling)?;
        Ok(sampler.with_tokenizer(&self.tokenizer))
    }

    /// Returns the same model with other weights, for example from a run.
    #[must_use]
    pub fn with_parameters(&self, parameters: Parameters) -> Self {
        Self {
            parameters,
            ..self.clone()
        }
    }

    /// Builds `config.json` for weights in `dtype`.
    fn config(&self, dtype: DType) -> Result<Value> {
        let mut config = match &self.form {
            Some(form) => Value::Object(form.config(&self.model)?),
            None => (self.model).to_hugging_face(&self.special_tokens.stop_token_ids)?,
        };
        if let Some(config) = config.as_object_mut() {
            config.extend(self.token_ids());
        }
        set_dtype(&mut config, dtype);
        if let Some(text) = config.get_mut("text_config") {
            set_dtype(text, dtype);
        }
        Ok(config)
    }

    fn token_ids(&self) -> Map<String, Value> {
        let id = |token: &Option<SpecialToken>| token.as_ref().map(|token| token.id);
        [
            ("bos_token_id", json!(id(&self.special_tokens.bos))),
            ("eos_token_id", json!(self.special_tokens.stop_token_ids)),
            ("pad_token_id", json!(id(&self.special_tokens.pad))),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
    }

    fn tokenizer_config(&self) -> Value {
        let mut config = json!({
            // The class that loads tokenizer.json unchanged.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.model.max_position_embeddings,
            "clean_up_tokenization_spaces": false,
        });
        for (name, token) in self.special_tokens.named() {
            config[name] = json!(token.text);
        }
        if let Some(template) = &self.chat_template {
            let named = |(name, source)| json!({"name": name, "template": source});
            let mut named: Vec<Value> = template.named().map(named).collect();
            config["chat_template"] = if named.is_empty() {
                json!(template.source())
            } else {
                named.insert(0, json!({"name": DEFAULT, "template": template.source()}));
                Value::Array(named)
            };
        }
        config
    }
}

/// A GGUF file's chat templates, each under its own key.
fn gguf_chat_template(metadata: &BTreeMap<String, GgufValue>) -> Result<Option<ChatTemplate>> {
    let sources = metadata.iter().filter_map(|(key, value)| {
        let name = match key.strip_prefix(GGUF_CHAT_TEMPLATE)? {
            "" => DEFAULT,
            name => name.strip_prefix('.')?,
        };
        Some((name.to_owned(), value.as_str()?.to_owned()))
    });
    let sources: BTreeMap<String, String> = sources.collect();
    if sources.contains_key(DEFAULT) {
        Ok(Some(chat_template(sources, GGUF_CHAT_TEMPLATE)?))
    } else {
        Ok(None)
    }
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    atomic_file::write(path, &serde_json::to_vec_pretty(value)?)
        .with_context(|| path.file_name().unwrap_or_default().display().to_string())
}

/// Fails if a token in `tokenizer` is outside the model's vocabulary of `vocab_size` tokens.
pub(crate) fn ensure_tokens_fit(tokenizer: &Tokenizer, vocab_size: usize) -> Result<()> {
    let tokens = tokenizer.get_vocab(true).into_iter();
    if let Some((token, id)) = tokens.max_by_key(|(_, id)| *id) {
        ensure!(
            (id as usize) < vocab_size,
            "tokenizer: token {id} is {token:?}, but the model has only {vocab_size} tokens"
        );
    }
    Ok(())
}

pub(crate) fn read_tokenizer(folder: &Path) -> Result<Tokenizer> {
    let json = fs::read(folder.join(TOKENIZER)).context(TOKENIZER)?;
    tokenizer_from_json(&json).context(TOKENIZER)
}

pub(crate) fn write_tokenizer(folder: &Path, tokenizer: &Tokenizer) -> Result<()> {
    let text = tokenizer
        .to_string(true)
        .map_err(|e| anyhow!("{TOKENIZER}: {e}"))?;
    atomic_file::write(&folder.join(TOKENIZER), text.as_bytes()).context(TOKENIZER)
}

/// Guesses what a path without a model was meant to be.
fn missing_hint(path: &Path) -> &'static str {
    if path.starts_with("~") {
        "; the home directory must be named in full, ~ is not replaced"
    } else if path.components().count() == 1 && !is_gguf(path) {
        "; a model of the hub must be named ORG/NAME"
    } else {
        ""
    }
}

/// Reads a folder's chat templates as transformers does: `chat_template.jinja` and
/// `additional_chat_templates/NAME.jinja`, or else `chat_template` in `tokenizer_config.json`.
///
/// The latter is a single template, or several by name, where `default` is for chats without tools.
pub(crate) fn read_chat_template(folder: &Path) -> Result<Option<ChatTemplate>> {
    let mut files = BTreeMap::new();
    let file = folder.join(CHAT_TEMPLATE);
    if file.exists() {
        let source = fs::read_to_string(file).context(CHAT_TEMPLATE)?;
        files.insert(DEFAULT.to_owned(), source);
    }
    let additional = folder.join(ADDITIONAL_CHAT_TEMPLATES);
    if additional.is_dir() {
        for entry in fs::read_dir(&additional).context(ADDITIONAL_CHAT_TEMPLATES)? {
            let name = entry.context(ADDITIONAL_CHAT_TEMPLATES)?.file_name();
            let name = name.to_string_lossy();
            if let Some(stem) = name.strip_suffix(".jinja") {
                let file = format!("{ADDITIONAL_CHAT_TEMPLATES}/{name}");
                let source = fs::read_to_string(folder.join(&file)).context(file)?;
                files.insert(stem.to_owned(), source);
            }
        }
    }
    if !files.is_empty() {
        return Ok(Some(chat_template(files, CHAT_TEMPLATE)?));
    }
    let config = read_object(folder, TOKENIZER_CONFIG)?;
    let text = |template: &Value| template.as_str().map(str::to_owned);
    let sources = match config.get("chat_template") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(templates)) => templates
            .iter()
            .map(|template| Some((text(&template["name"])?, text(&template["template"])?)))
            .collect(),
        Some(template) => text(template).map(|text| BTreeMap::from([(DEFAULT.to_owned(), text)])),
    };
    let sources = sources.with_context(|| {
        format!("{TOKENIZER_CONFIG}: chat_template: must be a text, or a list of \"name\" and \"template\"")
    })?;
    Ok(Some(chat_template(sources, TOKENIZER_CONFIG)?))
}

/// Compiles the named templates from `file`.
fn chat_template(mut sources: BTreeMap<String, String>, file: &str) -> Result<ChatTemplate> {
    let default = sources.remove(DEFAULT).with_context(|| {
        let names: Vec<&String> = sources.keys().collect();
        format!("{file}: chat templates {names:?}, must have one named {DEFAULT:?}")
    })?;
    let template = ChatTemplate::new(&default).with_context(|| file.to_owned())?;
    sources
        .iter()
        .try_fold(template, |template, (name, source)| {
            let added = template.with_named(name, source);
            added.with_context(|| format!("{file}: {name}"))
        })
}

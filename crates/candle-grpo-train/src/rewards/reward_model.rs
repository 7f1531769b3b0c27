//! Scores from a reward model.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Error, Result, anyhow, ensure};
use candle_core::{DType, Device};
use candle_grpo_core::{Invalid, validate};
use candle_grpo_nn::{ComputeDType, PackedTokens, SequenceClassifier, SequenceClassifierConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::{RewardFunction, Sample, Score};
use crate::model::pretrained::{ensure_tokens_fit, read_chat_template, read_tokenizer};
use crate::model::special_tokens::read_object;
use crate::model::{Chat, SpecialTokens};
use crate::owned_files::CONFIG;
use crate::{ChatTemplate, Interrupted, Progress};
use candle_grpo_base::progress::NoProgress;
use candle_grpo_rewards::RewardModelOptions;

/// Options for [`RewardModel`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RewardModelConfig {
    /// Directory with a Hugging Face model whose class ends in `ForSequenceClassification`, and
    /// its tokenizer; or a model name on the [hub](guide.md#the-hugging-face-hub).
    pub path: PathBuf,
    /// Compute dtype: `f32`, `bf16` or `f16`.
    #[serde(default)]
    pub dtype: ComputeDType,
    /// Index of the label that is the score; absent: the only one.
    #[serde(default)]
    pub label: Option<usize>,
    /// Number of tokens that the model reads from the end of a longer text, where the scored token
    /// is. Absent: the model's `max_position_embeddings`.
    #[serde(default)]
    pub max_length: Option<usize>,
    /// Number of tokens in one forward pass. A longer text gets its own pass.
    #[serde(default = "batch_tokens")]
    pub batch_tokens: usize,
}

fn batch_tokens() -> usize {
    16_384
}

impl RewardModelConfig {
    /// Creates default options for the model at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            dtype: ComputeDType::default(),
            label: None,
            max_length: None,
            batch_tokens: batch_tokens(),
        }
    }

    /// Returns an option's error, or an error about the files at the path.
    fn of_path(&self, error: &Error) -> Error {
        let of_files = || {
            let must = format!("be a reward model directory: {error:#}");
            Invalid::new("path", self.path.display(), must)
        };
        // In a file, an invalid option is a cause with another type.
        let of_option = error.downcast_ref::<Invalid>().cloned();
        of_option.unwrap_or_else(of_files).into()
    }

    /// Returns the model configuration, and the score's index.
    fn read_config(&self) -> Result<(SequenceClassifierConfig, usize)> {
        validate::check(
            self.path.is_dir(),
            "path",
            self.path.display(),
            "be a directory that exists",
        )?;
        let bytes = fs::read(self.path.join(CONFIG)).context(CONFIG)?;
        let config = SequenceClassifierConfig::from_hugging_face(&bytes).context(CONFIG)?;
        let labels = config.num_labels;
        match self.label {
            None if labels > 1 => {
                let must = format!("be given for a model with {labels} labels");
                Err(Invalid::new("label", "absent", must).into())
            }
            Some(label) if label >= labels => {
                let must = format!("be below {labels}, the number of labels of the model");
                Err(Invalid::new("label", label, must).into())
            }
            label => Ok((config, label.unwrap_or(0))),
        }
    }
}

impl RewardModelOptions for RewardModelConfig {
    fn validate(&self) -> Result<()> {
        validate::at_least_one("max_length", self.max_length.unwrap_or(1))?;
        Ok(validate::at_least_one("batch_tokens", self.batch_tokens)?)
    }

    /// Checks the model's files without reading the weights.
    fn check_files(&self) -> Result<()> {
        let check = || -> Result<()> {
            let (config, _) = self.read_config()?;
            config.check_folder(&self.path)?;
            let tokenizer = read_tokenizer(&self.path)?;
            ensure_tokens_fit(&tokenizer, config.decoder.vocab_size)?;
            read_chat_template(&self.path)?;
            Ok(())
        };
        check().map_err(|error| self.of_path(&error))
    }

    /// Returns the files that determine scores.
    fn files(&self) -> Vec<PathBuf> {
        let is_read = |path: &Path| {
            let kind = path.extension().and_then(|kind| kind.to_str());
            path.is_file() && matches!(kind, Some("json" | "safetensors" | "jinja"))
        };
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        files.retain(|path| is_read(path));
        files.sort();
        files
    }

    fn path_mut(&mut self) -> &mut PathBuf {
        &mut self.path
    }

    fn load(&self, device: &Device) -> Result<Box<dyn RewardFunction>> {
        Ok(Box::new(RewardModel::load(self.clone(), device)?))
    }
}

/// A score from a reward model: `LlamaForSequenceClassification` in Hugging Face transformers, and
/// its counterpart in each [`Decoder`](candle_grpo_nn::Decoder) family.
///
/// Use one if no program can check the answer and you have preference data. Policies learn to
/// exploit reward models: add a KL term, and read some high-scoring answers.
///
/// The model reads prompt and completion as text. For a conversation, the reward model's own chat
/// template renders it, with the completion as the assistant's answer. Without a template, or for a
/// plain prompt, the completion text follows the prompt text. As in TRL, the reward model's
/// tokenizer adds no special tokens, and the last token that is not padding is scored.
///
/// ```no_run
/// use candle_core::Device;
/// use candle_grpo_train::rewards::{RewardModel, RewardModelConfig};
///
/// let reward = RewardModel::load(RewardModelConfig::new("models/reward"), &Device::Cpu)?;
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct RewardModel {
    config: RewardModelConfig,
    classifier: SequenceClassifier,
    label: usize,
    /// Maximum number of tokens that the model reads.
    max_length: usize,
    tokenizer: Tokenizer,
    chat_template: Option<ChatTemplate>,
    device: Device,
    progress: Arc<dyn Progress>,
}

impl RewardModel {
    /// Loads the model onto `device`.
    ///
    /// # Errors
    ///
    /// Fails if an option is invalid, or if a model file is missing or invalid.
    pub fn load(config: RewardModelConfig, device: &Device) -> Result<Self> {
        config.validate()?;
        Self::read(config.clone(), device).map_err(|error| config.of_path(&error))
    }

    fn read(config: RewardModelConfig, device: &Device) -> Result<Self> {
        let (model, label) = config.read_config()?;
        let folder = &config.path;
        let tokenizer = read_tokenizer(folder)?;
        ensure_tokens_fit(&tokenizer, model.decoder.vocab_size)?;
        let with_tokens = |template: ChatTemplate| -> Result<ChatTemplate> {
            let keys = read_object(folder, CONFIG)?;
            let tokens = SpecialTokens::read(folder, &keys, &tokenizer)?;
            Ok(template.with_special_tokens(&tokens))
        };
        let chat_template = read_chat_template(folder)?.map(with_tokens).transpose()?;
        let parameters = model.load_folder_frozen(folder, config.dtype.into(), device)?;
        let classifier = SequenceClassifier::new(&model, parameters.detached_var_builder())?;
        let limit = model.decoder.max_position_embeddings;
        Ok(Self {
            max_length: config.max_length.unwrap_or(limit).min(limit),
            classifier,
            label,
            tokenizer,
            chat_template,
            device: device.clone(),
            progress: Arc::new(NoProgress),
            config,
        })
    }

    /// Returns the text that the model scores.
    fn text(&self, sample: &Sample) -> Result<String> {
        let (Some(template), [.., last]) = (&self.chat_template, sample.messages) else {
            return Ok(format!("{}{}", sample.prompt, sample.completion));
        };
        let mut messages = sample.messages.to_vec();
        let answer = if last.get("role") == Some(&json!("assistant")) {
            // The answer's beginning.
            messages.pop();
            let prefill = last.get("content").and_then(Value::as_str);
            format!("{}{}", prefill.unwrap_or_default(), sample.completion)
        } else {
            sample.completion.to_owned()
        };
        messages.push(json!({"role": "assistant", "content": answer}));
        template.render(&Chat::new(messages))
    }

    fn tokens(&self, sample: &Sample) -> Result<Vec<u32>> {
        let text = self.text(sample)?;
        let encoding = self.tokenizer.encode(text.as_str(), false);
        let encoding = encoding
            .map_err(|error| anyhow!("the tokenizer of the reward model: {error}, for {text:?}"))?;
        let tokens = encoding.get_ids();
        ensure!(
            !tokens.is_empty(),
            "no tokens, must have at least one: {text:?}"
        );
        Ok(tokens[tokens.len().saturating_sub(self.max_length)..].to_vec())
    }
}

impl RewardFunction for RewardModel {
    fn score(&self, samples: &[Sample]) -> Result<Vec<Score>> {
        // Equal texts are read once, so their scores are bit-identical. Sorting puts texts with the
        // same beginning side by side, and a pass computes that beginning once.
        let mut samples_of: BTreeMap<Vec<u32>, Vec<usize>> = BTreeMap::new();
        for (index, sample) in samples.iter().enumerate() {
            samples_of
                .entry(self.tokens(sample)?)
                .or_default()
                .push(index);
        }
        let texts: Vec<_> = samples_of.into_iter().collect();
        let mut scores = vec![Score::NONE; samples.len()];
        let mut rest = texts.as_slice();
        while !rest.is_empty() {
            if self.progress.is_canceled() {
                return Err(Interrupted.into());
            }
            let mut tokens = 0;
            let fits = rest.iter().take_while(|(text, _)| {
                tokens += text.len();
                tokens <= self.config.batch_tokens
            });
            let (batch, after) = rest.split_at(fits.count().max(1));
            rest = after;
            let sequences: Vec<_> = batch.iter().map(|(text, _)| text.clone()).collect();
            let packed = PackedTokens::sharing_prefixes(&sequences, &self.device)?;
            let of_batch = self.classifier.scores(&packed)?;
            let of_batch = of_batch.narrow(1, self.label, 1)?.flatten_all()?;
            let of_batch = of_batch.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            for ((_, samples), score) in batch.iter().zip(of_batch) {
                for &index in samples {
                    scores[index] = score.into();
                }
            }
        }
        Ok(scores)
    }

    fn set_progress(&mut self, progress: Arc<dyn Progress>) {
        self.progress = progress;
    }

    fn set_clock(&mut self, now: &str) -> Result<()> {
        if let Some(template) = &self.chat_template {
            self.chat_template = Some(template.clone().with_clock_at(now)?);
        }
        Ok(())
    }
}

//! Scores of a model.

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

/// The options of [`RewardModel`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RewardModelConfig {
    /// The folder of a Hugging Face model whose class ends in `ForSequenceClassification`, with
    /// its tokenizer, or the name of one on the [hub](guide.md#the-hugging-face-hub).
    pub path: PathBuf,
    /// The dtype of its computation: `f32`, `bf16` or `f16`.
    #[serde(default)]
    pub dtype: ComputeDType,
    /// The index of the label that is the score; absent: the only one.
    #[serde(default)]
    pub label: Option<usize>,
    /// The number of tokens that the model reads of a longer text, from its end, which has the
    /// scored token. Absent: `max_position_embeddings` of the model.
    #[serde(default)]
    pub max_length: Option<usize>,
    /// Number of tokens of a pass of the model. A longer text is a pass of its own.
    #[serde(default = "batch_tokens")]
    pub batch_tokens: usize,
}

fn batch_tokens() -> usize {
    16_384
}

impl RewardModelConfig {
    /// The default options of the model at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            dtype: ComputeDType::default(),
            label: None,
            max_length: None,
            batch_tokens: batch_tokens(),
        }
    }

    /// The error of an option, or else of the files at the path.
    fn of_path(&self, error: &Error) -> Error {
        let of_files = || {
            let must = format!("be the folder of a reward model: {error:#}");
            Invalid::new("path", self.path.display(), must)
        };
        // An invalid option in a file is a cause of another type.
        let of_option = error.downcast_ref::<Invalid>().cloned();
        of_option.unwrap_or_else(of_files).into()
    }

    /// The configuration of the model, and the index of its score.
    fn read_config(&self) -> Result<(SequenceClassifierConfig, usize)> {
        validate::check(
            self.path.is_dir(),
            "path",
            self.path.display(),
            "be a folder that exists",
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

    /// Checks the files of the model without reading the weights.
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

    /// The files that decide scores.
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

/// The score of a reward model: `LlamaForSequenceClassification` of Hugging Face transformers, and
/// its counterpart of each family of [`Decoder`](candle_grpo_nn::Decoder).
///
/// The model reads the prompt and the completion as text. A conversation, with the completion as
/// the answer of the assistant, is rendered by the chat template of the reward model. Without one,
/// or for a plain prompt, the text of the completion follows that of the prompt. As in TRL, the
/// tokenizer of the reward model adds no special tokens, and the score is that of the last token
/// which is not padding.
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
    /// The number of tokens that the model reads at most.
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
    /// If an option is not valid, or a file of the model is missing or not valid.
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

    /// The text that the model scores.
    fn text(&self, sample: &Sample) -> Result<String> {
        let (Some(template), [.., last]) = (&self.chat_template, sample.messages) else {
            return Ok(format!("{}{}", sample.prompt, sample.completion));
        };
        let mut messages = sample.messages.to_vec();
        let answer = if last.get("role") == Some(&json!("assistant")) {
            // The beginning of the answer.
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
        // Equal texts are read once, so that their scores are bit-identical. Sorted texts have
        // others with the same beginning beside them, and a pass computes that once.
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

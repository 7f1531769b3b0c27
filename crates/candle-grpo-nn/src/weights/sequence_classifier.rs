//! Sequence classifier configuration and weights in Hugging Face folders.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use serde_json::{Map, Value, json};

use crate::config::SCORE;
use crate::config::architecture::OUTPUT;
use crate::weights::base_weights::FrozenForm;
use crate::weights::check::check_headers;
use crate::weights::parameters::INIT_STD;
use crate::weights::safetensors;
use crate::weights::stacks::Entry;
use crate::weights::standard_normal::StandardNormal;
use crate::weights::stored_tensor::StoredTensor;
use crate::{BaseWeights, DecoderConfig, Parameters, SequenceClassifierConfig};
use candle_grpo_base::json;

/// Number of labels if the configuration has no `id2label`, as in transformers.
const DEFAULT_LABELS: usize = 2;

impl SequenceClassifierConfig {
    /// Reads a Hugging Face model's `config.json`.
    ///
    /// The number of labels is the length of `id2label`, or else `num_labels`, or else 2. A
    /// `pad_token_id` that is no token's id counts as absent.
    ///
    /// # Errors
    ///
    /// If `architectures` is not the family's sequence classifier. Also as for
    /// [`DecoderConfig::from_hugging_face`]. The message starts with the key.
    pub fn from_hugging_face(config_json: &[u8]) -> Result<Self> {
        let decoder = DecoderConfig::from_hugging_face(config_json)?;
        let config: Map<String, Value> = serde_json::from_slice(config_json)
            .map_err(|error| Error::msg(json::message_with_place(&error)))?;
        let found = config.get("architectures").unwrap_or(&Value::Null);
        let expected = json!([class(&decoder)]);
        if *found != expected {
            bail!("architectures: {found}, must be {expected}");
        }
        let given = |key: &str| config.get(key).filter(|value| !value.is_null());
        let num_labels = match (given("id2label"), given("num_labels")) {
            (Some(Value::Object(labels)), _) => labels.len(),
            (Some(other), _) => bail!("id2label: {other}, must be an object"),
            (None, Some(number)) => match number.as_u64() {
                Some(number) => number as usize,
                None => bail!("num_labels: {number}, must be a whole number, at least 1"),
            },
            (None, None) => DEFAULT_LABELS,
        };
        if num_labels == 0 {
            bail!("id2label: no labels, must have at least one");
        }
        let text = given("text_config").and_then(|text| text.get("pad_token_id"));
        let pad_token_id = match given("pad_token_id").or(text.filter(|id| !id.is_null())) {
            Some(id) => match id.as_i64() {
                Some(id) => u32::try_from(id).ok(),
                None => bail!("pad_token_id: {id}, must be a token id"),
            },
            None => None,
        };
        Ok(Self {
            decoder,
            num_labels,
            pad_token_id,
        })
    }

    /// Builds a `config.json` that Hugging Face transformers can load.
    pub fn to_hugging_face(&self, stop_token_ids: &[u32]) -> Result<Value> {
        let mut config = self.decoder.to_hugging_face(stop_token_ids)?;
        let name = |label: usize| format!("LABEL_{label}");
        let labels = 0..self.num_labels;
        let names = labels.clone().map(|i| (i.to_string(), json!(name(i))));
        config["architectures"] = json!([class(&self.decoder)]);
        config["id2label"] = Value::Object(names.collect());
        config["label2id"] = Value::Object(labels.map(|i| (name(i), json!(i))).collect());
        config["pad_token_id"] = json!(self.pad_token_id);
        Ok(config)
    }

    /// Initializes new weights: the decoder like [`Parameters::init`], and `score.weight` normal
    /// with standard deviation 0.02.
    pub fn init(&self, seed: u64, device: &Device) -> Result<Parameters> {
        let mut normal = StandardNormal::new(seed);
        let (labels, width) = self.score_shape()?;
        let draws = (0..labels * width).map(|_| (normal.draw() * INIT_STD) as f32);
        let score = Tensor::from_vec(draws.collect(), (labels, width), device)?;
        Parameters::init(&self.body(), seed.wrapping_add(1), device)?.with(SCORE, &score)
    }

    /// Reads the weights in a Hugging Face folder: the decoder without its output layer, and
    /// `score.weight`. If the files have an output layer, it is skipped.
    ///
    /// # Errors
    ///
    /// Same as [`Parameters::load_folder`]. Also if `score.weight` is missing or not `[labels, H]`.
    pub fn load_folder(&self, folder: &Path, device: &Device) -> Result<Parameters> {
        self.load_folder_frozen(folder, DType::F32, device)
    }

    /// Like [`Self::load_folder`], for frozen weights. The decoder is in `dtype`: in bf16 and f16,
    /// a value takes 2 bytes.
    ///
    /// # Errors
    ///
    /// Same as [`Self::load_folder`]. Also if `dtype` is not F32, BF16 or F16.
    pub fn load_folder_frozen(
        &self,
        folder: &Path,
        dtype: DType,
        device: &Device,
    ) -> Result<Parameters> {
        let load = || {
            let body = self.body();
            let form = FrozenForm::new(&body, BaseWeights::Dense, dtype)?;
            let mut tensors = safetensors::read_folder(folder, StoredTensor::read_file)?;
            let score = self.take_score(&mut tensors)?.read()?;
            let parameters = Parameters::to_fill(None, device);
            parameters
                .filled_from(&body, tensors, &form)?
                .with(SCORE, &score)
        };
        load().map_err(|error| in_folder(folder, error))
    }

    /// Checks the weight names, shapes and types in a Hugging Face folder, and its file lengths,
    /// without reading the weights.
    ///
    /// # Errors
    ///
    /// Same as [`Self::load_folder`], except for values that are not finite.
    pub fn check_folder(&self, folder: &Path) -> Result<()> {
        let check = || {
            let mut headers = safetensors::read_folder(folder, safetensors::read_header)?;
            let score = self.take_score(&mut headers)?;
            score
                .check_dtype()
                .map_err(|error| Error::msg(format!("tensor {SCORE}: {error}")))?;
            check_headers(&self.body(), headers)
        };
        check().map_err(|error| in_folder(folder, error))
    }

    /// Removes `score.weight`, and any output layer, which has no effect.
    fn take_score<T: Entry>(&self, tensors: &mut HashMap<String, T>) -> Result<T> {
        tensors.remove(OUTPUT);
        let (labels, width) = self.score_shape()?;
        let Some(score) = tensors.remove(SCORE) else {
            bail!("tensors: no {SCORE}, must have it, of shape [{labels}, {width}]");
        };
        let found = score.dims();
        if found != [labels, width] {
            bail!(
                "tensor {SCORE}: shape {found:?}, must be [{labels}, {width}], the number of labels and hidden_size"
            );
        }
        Ok(score)
    }
}

/// The sequence classifier class in transformers.
fn class(decoder: &DecoderConfig) -> String {
    let class = decoder.model_type.family().transformers_class;
    class.replace("ForCausalLM", "ForSequenceClassification")
}

fn in_folder(folder: &Path, error: Error) -> Error {
    Error::msg(format!(
        "cannot load parameters from {}: {error}",
        folder.display()
    ))
}

//! The adapter file format of PEFT, Hugging Face's adapter library.

use candle_core::{Error, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{LoraConfig, json};

pub(crate) const ADAPTER_CONFIG: &str = "adapter_config.json";
pub(crate) const ADAPTER_MODEL: &str = "adapter_model.safetensors";
/// PEFT prepends this to base weight names.
pub(crate) const PREFIX: &str = "base_model.model.";

/// The `adapter_config.json` keys that are read and written.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PeftConfig {
    peft_type: String,
    #[serde(default)]
    task_type: Option<String>,
    #[serde(default)]
    base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: Value,
    target_modules: Value,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Keys that change what adapters compute, each with the only supported value. Absent and null are
/// fine.
fn supported() -> [(&'static str, Value); 14] {
    let empty = || Value::Object(Map::new());
    [
        ("bias", "none".into()),
        ("fan_in_fan_out", false.into()),
        ("use_rslora", false.into()),
        ("use_dora", false.into()),
        ("use_qalora", false.into()),
        ("lora_bias", false.into()),
        ("rank_pattern", empty()),
        ("alpha_pattern", empty()),
        ("modules_to_save", Value::Array(Vec::new())),
        ("layers_to_transform", Value::Array(Vec::new())),
        ("exclude_modules", Value::Array(Vec::new())),
        ("trainable_token_indices", Value::Array(Vec::new())),
        ("target_parameters", Value::Array(Vec::new())),
        ("layer_replication", Value::Array(Vec::new())),
    ]
}

impl PeftConfig {
    pub(crate) fn new(config: &LoraConfig, base_model: Option<&str>) -> Self {
        let others = [
            ("bias", "none".into()),
            ("fan_in_fan_out", false.into()),
            ("inference_mode", true.into()),
            ("init_lora_weights", true.into()),
            ("lora_dropout", Value::from(0.0)),
            ("use_dora", false.into()),
            ("use_rslora", false.into()),
        ];
        // PEFT usually writes an integer.
        let lora_alpha = if config.alpha.fract() == 0.0 && config.alpha < 1e15 {
            Value::from(config.alpha as u64)
        } else {
            Value::from(config.alpha)
        };
        Self {
            peft_type: "LORA".to_owned(),
            task_type: Some("CAUSAL_LM".to_owned()),
            base_model_name_or_path: base_model.map(str::to_owned),
            r: config.rank,
            lora_alpha,
            target_modules: config.target_modules.clone().into(),
            others: others
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect(),
        }
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self> {
        let parse = || {
            let value = serde_json::from_slice(bytes)
                .map_err(|error| Error::msg(json::message_with_place(&error)))?;
            json::typed(&value)
        };
        parse().map_err(|error| Error::msg(format!("{ADAPTER_CONFIG}: {error}")))
    }

    /// Converts to adapter options. `all_linear` expands PEFT's `all-linear`.
    pub(crate) fn lora(&self, all_linear: fn() -> Vec<String>) -> Result<LoraConfig> {
        if self.peft_type != "LORA" {
            bail!(
                "{ADAPTER_CONFIG}: peft_type: {:?}, must be LORA",
                self.peft_type
            );
        }
        for (key, supported) in supported() {
            if let Some(value) = self.others.get(key)
                && !value.is_null()
                && value != &supported
            {
                bail!("{ADAPTER_CONFIG}: {key}: {value}, must be {supported}");
            }
        }
        let Some(alpha) = self.lora_alpha.as_f64() else {
            bail!(
                "{ADAPTER_CONFIG}: lora_alpha: {}, must be a number",
                self.lora_alpha
            );
        };
        let target_modules = match &self.target_modules {
            Value::String(all) if all == "all-linear" => all_linear(),
            Value::Array(targets) if targets.iter().all(Value::is_string) => targets
                .iter()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect(),
            other => bail!(
                "{ADAPTER_CONFIG}: target_modules: {other}, must be a list of names or all-linear (regular expressions are not supported)"
            ),
        };
        Ok(LoraConfig {
            rank: self.r,
            alpha,
            target_modules,
        })
    }
}

//! Sampling options that a model recommends.

use anyhow::{Result, anyhow};
use serde_json::{Map, Value};

use crate::SamplingConfig;

/// Sampling keys in `generation_config.json`.
const KEYS: [&str; 12] = [
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
    "num_beams",
    "penalty_alpha",
];

/// Number of [`KEYS`] that [`GenerationDefaults::apply`] applies.
const APPLIED: usize = 5;

/// Sampling options from a model's `generation_config.json`, unchanged.
///
/// ```
/// use candle_grpo_train::SamplingConfig;
/// use candle_grpo_train::model::GenerationDefaults;
/// use serde_json::json;
///
/// let file = json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05});
/// let defaults = GenerationDefaults::new(file.as_object().unwrap());
/// let sampling = defaults.apply(SamplingConfig::default())?;
/// assert_eq!((sampling.temperature, sampling.top_k, sampling.greedy), (0.6, 20, false));
/// assert_eq!(defaults.not_applied(), ["repetition_penalty: 1.05"]);
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GenerationDefaults(Map<String, Value>);

impl GenerationDefaults {
    /// Selects the sampling keys in `generation_config.json`.
    pub fn new(file: &Map<String, Value>) -> Self {
        let keys = KEYS.into_iter().filter_map(|key| {
            let value = file.get(key).filter(|value| !value.is_null())?;
            Some((key.to_owned(), value.clone()))
        });
        Self(keys.collect())
    }

    /// The keys, for a `generation_config.json`.
    pub(crate) fn keys(&self) -> impl Iterator<Item = (String, Value)> {
        self.0.clone().into_iter()
    }

    /// Applies the file's distribution to `sampling`: `temperature`, `top_k`, `top_p` and `min_p`
    /// with `do_sample: true`, and otherwise greedy decoding, as in transformers.
    ///
    /// # Errors
    ///
    /// Fails if a value has the wrong kind. The error names the key.
    pub fn apply(&self, sampling: SamplingConfig) -> Result<SamplingConfig> {
        let wrong = |key: &str, must: &str| {
            let value = &self.0[key];
            anyhow!("generation_config.json: {key}: {value}, must be {must}")
        };
        let number = |key: &str, default: f64| match self.0.get(key) {
            None => Ok(default),
            Some(value) => value.as_f64().ok_or_else(|| wrong(key, "a number")),
        };
        let samples = match self.0.get("do_sample") {
            None => false,
            Some(value) => value
                .as_bool()
                .ok_or_else(|| wrong("do_sample", "true or false"))?,
        };
        if !samples {
            return Ok(SamplingConfig {
                greedy: true,
                ..sampling
            });
        }
        let temperature = number("temperature", 1.)?;
        let greedy = temperature == 0.;
        let top_k = match self.0.get("top_k") {
            None => sampling.top_k,
            Some(value) => {
                // Some files have a float or -1.
                let value = value.as_f64().filter(|k| *k >= -1. && k.fract() == 0.);
                value
                    .ok_or_else(|| wrong("top_k", "a whole number"))?
                    .max(0.) as usize
            }
        };
        Ok(SamplingConfig {
            temperature: if greedy { 1. } else { temperature },
            greedy,
            top_k,
            top_p: number("top_p", sampling.top_p)?,
            min_p: number("min_p", sampling.min_p)?,
            ..sampling
        })
    }

    /// Returns the keys that change sampling but are not applied, with their values.
    pub fn not_applied(&self) -> Vec<String> {
        let has_effect = |key: &str, value: &Value| match key {
            "no_repeat_ngram_size" | "epsilon_cutoff" | "eta_cutoff" | "penalty_alpha" => {
                value.as_f64() != Some(0.)
            }
            _ => value.as_f64() != Some(1.),
        };
        let keys = KEYS.into_iter().skip(APPLIED);
        keys.filter_map(|key| Some((key, self.0.get(key)?)))
            .filter(|(key, value)| has_effect(key, value))
            .map(|(key, value)| format!("{key}: {value}"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(file: Value) -> GenerationDefaults {
        GenerationDefaults::new(file.as_object().unwrap())
    }

    #[test]
    fn a_file_without_sampling_takes_the_likeliest_token() {
        for file in [json!({}), json!({"do_sample": false, "temperature": 0.5})] {
            let sampling = of(file).apply(SamplingConfig::default()).unwrap();
            assert!(sampling.greedy);
            assert_eq!(sampling.temperature, 1.);
        }
        let cold = of(json!({"do_sample": true, "temperature": 0.0, "top_k": -1}));
        let sampling = cold.apply(SamplingConfig::default()).unwrap();
        assert_eq!(
            (sampling.greedy, sampling.temperature, sampling.top_k),
            (true, 1., 0)
        );
    }

    #[test]
    fn a_value_of_another_kind_is_an_error_with_its_key() {
        for (key, value, must) in [
            (
                "temperature",
                json!("hot"),
                "temperature: \"hot\", must be a number",
            ),
            ("top_k", json!(0.5), "top_k: 0.5, must be a whole number"),
            ("top_p", json!([1]), "top_p: [1], must be a number"),
        ] {
            let file = of(json!({"do_sample": true, key: value}));
            let error = file.apply(SamplingConfig::default()).unwrap_err();
            assert_eq!(error.to_string(), format!("generation_config.json: {must}"));
        }
        let error = of(json!({"do_sample": 1})).apply(SamplingConfig::default());
        assert!(
            error
                .unwrap_err()
                .to_string()
                .ends_with("must be true or false")
        );
    }

    #[test]
    fn keys_without_an_effect_are_not_reported() {
        let file = json!({
            "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "typical_p": null, "num_beams": 4,
            "top_p": 0.9, "eos_token_id": 2,
        });
        assert_eq!(of(file).not_applied(), ["num_beams: 4"]);
    }
}

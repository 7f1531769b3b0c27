//! `config.json` of a Hugging Face Llama.

use anyhow::{Result, bail, ensure};
use candle_grpo_nn::DecoderConfig;
use serde_json::{Map, Value, json};

pub(crate) fn to_hugging_face(model: &DecoderConfig, stop_token_ids: &[u32]) -> Result<Value> {
    let mut config = serde_json::to_value(model)?;
    let extra = [
        ("architectures", json!(["LlamaForCausalLM"])),
        ("model_type", json!("llama")),
        ("hidden_act", json!("silu")),
        ("torch_dtype", json!("float32")),
        ("head_dim", json!(model.head_dim())),
        ("bos_token_id", Value::Null),
        ("eos_token_id", json!(stop_token_ids)),
    ];
    if let Some(config) = config.as_object_mut() {
        config.extend(extra.map(|(name, value)| (name.to_owned(), value)));
    }
    Ok(config)
}

/// The shape of the decoder; errs, with the key, if the file asks for what a [`DecoderConfig`] cannot say.
pub(crate) fn from_hugging_face(bytes: &[u8]) -> Result<DecoderConfig> {
    let mut config: Map<String, Value> = serde_json::from_slice(bytes)?;
    match config.get("model_type") {
        Some(model_type) => ensure!(
            model_type == "llama",
            "model_type: {model_type}, must be \"llama\""
        ),
        None => bail!("model_type: absent, must be \"llama\""),
    }
    for (key, only) in [
        ("hidden_act", json!("silu")),
        ("attention_bias", json!(false)),
        ("mlp_bias", json!(false)),
        ("rope_scaling", Value::Null),
        ("quantization_config", Value::Null),
    ] {
        let found = config.get(key).unwrap_or(&only);
        ensure!(
            found.is_null() || *found == only,
            "{key}: {found}, only {only} is supported"
        );
    }
    if let Some(theta) = config.get("rope_parameters").map(rope_theta).transpose()?
        && !theta.is_null()
    {
        if let Some(other) = config.get("rope_theta") {
            ensure!(
                other.as_f64() == theta.as_f64(),
                "rope_theta: {other}, but rope_parameters.rope_theta: {theta}"
            );
        }
        config.insert("rope_theta".to_owned(), theta);
    }
    Ok(serde_json::from_value(Value::Object(config))?)
}

/// The base of the rotary frequencies, or null; errs if that is not all there is to them.
fn rope_theta(parameters: &Value) -> Result<Value> {
    let Some(parameters) = parameters.as_object() else {
        ensure!(
            parameters.is_null(),
            "rope_parameters: {parameters}, must be an object"
        );
        return Ok(Value::Null);
    };
    let mut theta = Value::Null;
    for (key, value) in parameters {
        let known = match key.as_str() {
            "rope_theta" => {
                theta = value.clone();
                true
            }
            "rope_type" | "type" => value == "default",
            "partial_rotary_factor" => value.as_f64() == Some(1.),
            _ => value.is_null(),
        };
        ensure!(
            known,
            "rope_parameters.{key}: {value}, only rope_theta with rope_type \"default\" is supported"
        );
    }
    Ok(theta)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn read(extra: Value) -> Result<DecoderConfig> {
        let mut config = json!({
            "model_type": "llama", "vocab_size": 6, "hidden_size": 8, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
            "max_position_embeddings": 32, "hidden_act": "silu", "attention_bias": false,
        });
        let extra = extra.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(extra);
        from_hugging_face(&serde_json::to_vec(&config)?)
    }

    #[rstest]
    #[case(json!({}), 1e4)]
    #[case(json!({"rope_theta": 5e5, "rope_scaling": null, "mlp_bias": false}), 5e5)]
    #[case(json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}), 5e5)]
    #[case(json!({"rope_theta": 7, "rope_parameters": {"rope_type": "default"}}), 7.)]
    #[case(json!({"rope_theta": 7, "rope_parameters": null}), 7.)]
    fn a_plain_llama_is_read(#[case] extra: Value, #[case] theta: f64) {
        assert_eq!(read(extra).unwrap().rope_theta, theta);
    }

    #[rstest]
    #[case(json!({"model_type": "qwen3"}), "model_type: \"qwen3\"")]
    #[case(json!({"model_type": null}), "model_type: null")]
    #[case(json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.}}), "rope_scaling: {")]
    #[case(
        json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}),
        "rope_parameters.rope_type: \"llama3\""
    )]
    #[case(json!({"rope_parameters": {"factor": 8.}}), "rope_parameters.factor: 8.0")]
    #[case(json!({"rope_parameters": "default"}), "rope_parameters: \"default\"")]
    #[case(
        json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}),
        "rope_theta: 10000.0, but rope_parameters.rope_theta: 500000.0"
    )]
    #[case(json!({"attention_bias": true}), "attention_bias: true")]
    #[case(json!({"mlp_bias": true}), "mlp_bias: true")]
    #[case(json!({"hidden_act": "gelu"}), "hidden_act: \"gelu\"")]
    fn a_foreign_model_is_refused_by_its_key(#[case] extra: Value, #[case] words: &str) {
        let error = read(extra).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
}

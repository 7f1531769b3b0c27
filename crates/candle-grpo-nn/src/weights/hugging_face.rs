//! Hugging Face `config.json` files.

use candle_core::{Error, Result, bail};
use serde_json::{Map, Value, json};

use crate::config::families::absent;
use crate::config::rope_scaling::ORIGINAL;
use crate::{DecoderConfig, ModelType, RopeScaling};
use candle_grpo_base::json;

impl DecoderConfig {
    /// Reads a Hugging Face model's `config.json`.
    ///
    /// Accepts keys from transformers 4 (`rope_theta`, `rope_scaling`) and transformers 5
    /// (`rope_parameters`).
    ///
    /// # Errors
    ///
    /// If the file requires a computation that [`DecoderConfig`] cannot express. The message starts
    /// with the key.
    pub fn from_hugging_face(config_json: &[u8]) -> Result<Self> {
        from_hugging_face(config_json)
    }

    /// Builds a `config.json` that Hugging Face transformers can load.
    pub fn to_hugging_face(&self, stop_token_ids: &[u32]) -> Result<Value> {
        to_hugging_face(self, stop_token_ids)
    }
}

fn to_hugging_face(model: &DecoderConfig, stop_token_ids: &[u32]) -> Result<Value> {
    let mut config = serde_json::to_value(model).map_err(Error::wrap)?;
    let family = model.model_type.family();
    let extra = [
        ("architectures", json!([family.transformers_class])),
        ("hidden_act", json!("silu")),
        ("torch_dtype", json!("float32")),
        ("head_dim", json!(model.head_dim())),
        ("bos_token_id", Value::Null),
        ("pad_token_id", Value::Null),
        ("eos_token_id", json!(stop_token_ids)),
    ];
    if let Some(config) = config.as_object_mut() {
        config.extend(extra.map(|(name, value)| (name.to_owned(), value)));
        if model.rope_scaling == RopeScaling::Default {
            config.insert("rope_scaling".to_owned(), Value::Null);
        }
        (family.write)(model, config);
    }
    Ok(config)
}

fn from_hugging_face(bytes: &[u8]) -> Result<DecoderConfig> {
    let mut config: Map<String, Value> = serde_json::from_slice(bytes)
        .map_err(|error| Error::msg(json::message_with_place(&error)))?;
    read_text_config(&mut config);
    let found = config.get("model_type");
    let Some(model_type) = found.and_then(Value::as_str).and_then(ModelType::from_name) else {
        let found = found.map_or("absent".into(), Value::to_string);
        let known = ModelType::names();
        bail!("model_type: {found}, must be one of {known:?}");
    };
    let family = model_type.family();
    if let Value::Object(defaults) = (family.defaults)() {
        for (key, value) in defaults {
            config.entry(key).or_insert(value);
        }
    }
    (family.read)(&mut config)?;
    config.retain(|_, value| !value.is_null());
    for (key, only) in [
        ("hidden_act", json!("silu")),
        ("use_sliding_window", json!(false)),
        ("use_bidirectional_attention", json!(false)),
        ("partial_rotary_factor", json!(1.0)),
        ("quantization_config", Value::Null),
    ] {
        if family.keys.contains(&key) {
            continue;
        }
        if let Some(found) = config.get(key).filter(|&found| *found != only) {
            bail!("{key}: {found}, must be {only}");
        }
    }
    // Qwen files have a window that use_sliding_window disables. Other families have no such key.
    let has_key = |key| family.keys.contains(&key);
    if !config.contains_key("use_sliding_window")
        && !has_key("sliding_window")
        && let Some(window) = config.get("sliding_window")
    {
        bail!("sliding_window: {window}, must be null");
    }
    if let Some(layers) = config.get("layer_types").and_then(Value::as_array)
        && !has_key("layer_types")
        && let Some(other) = layers.iter().find(|&layer| layer != "full_attention")
    {
        bail!("layer_types: {other}, must be \"full_attention\"");
    }
    if !has_key("sliding_window") {
        config.remove("sliding_window");
    }
    if !has_key("layer_types") {
        config.remove("layer_types");
    }
    if !config.contains_key("num_key_value_heads")
        && let Some(heads) = config.get("num_attention_heads").cloned()
    {
        config.insert("num_key_value_heads".to_owned(), heads);
    }
    read_rope(&mut config)?;
    let model: DecoderConfig = json::typed(&Value::Object(config))?;
    model.validate()?;
    Ok(model)
}

/// Replaces a multimodal model's configuration with its text model's.
fn read_text_config(config: &mut Map<String, Value>) {
    let name = config.get("model_type").and_then(Value::as_str);
    if !name.is_some_and(ModelType::is_multimodal) {
        return;
    }
    const TIED: &str = "tie_word_embeddings";
    if let Some(Value::Object(mut text)) = config.remove("text_config") {
        if let (true, Some(tied)) = (absent(&text, TIED), config.remove(TIED)) {
            text.insert(TIED.to_owned(), tied);
        }
        *config = text;
    }
}

/// Converts both forms of rotary keys in `config`, which has no nulls, to `rope_theta` and
/// `rope_scaling`, with the [`RopeScaling`] keys.
fn read_rope(config: &mut Map<String, Value>) -> Result<()> {
    let longest = config.get("max_position_embeddings").cloned();
    let mut scaling: Option<Value> = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(found) = config.remove(key) else {
            continue;
        };
        let Value::Object(mut rope) = found else {
            bail!("{key}: {found}, must be an object");
        };
        if let Some(theta) = rope.remove("rope_theta").filter(|theta| !theta.is_null()) {
            if let Some(other) = config.get("rope_theta")
                && other.as_f64() != theta.as_f64()
            {
                bail!("rope_theta: {other}, must equal {key}.rope_theta, which is {theta}");
            }
            config.insert("rope_theta".to_owned(), theta);
        }
        let read = rope_scaling(key, rope, longest.as_ref())?;
        if let Some(other) = scaling.filter(|other| *other != read) {
            bail!("rope_parameters: {read}, must equal rope_scaling, which is {other}");
        }
        scaling = Some(read);
    }
    config.insert(
        "rope_scaling".to_owned(),
        scaling.unwrap_or_else(|| json!({"rope_type": "default"})),
    );
    Ok(())
}

/// Reduces `rope`, the object under `key`, to the [`RopeScaling`] keys. Other keys are errors.
fn rope_scaling(key: &str, mut rope: Map<String, Value>, longest: Option<&Value>) -> Result<Value> {
    rope.retain(|_, value| !value.is_null());
    let rope_type = match (rope.remove("rope_type"), rope.remove("type")) {
        (Some(rope_type), _) | (None, Some(rope_type)) => rope_type,
        (None, None) => json!("default"),
    };
    // transformers' default.
    if let Some("llama3" | "yarn" | "longrope") = rope_type.as_str()
        && let (false, Some(longest)) = (rope.contains_key(ORIGINAL), longest)
    {
        if !longest.is_u64() {
            bail!(
                "max_position_embeddings: {longest}, must be {}",
                json::kind("usize")
            );
        }
        rope.insert(ORIGINAL.to_owned(), longest.clone());
    }
    let known: &[&str] = match rope_type.as_str() {
        Some("default") => &[],
        Some("linear") => &["factor"],
        Some("llama3") => &["factor", "low_freq_factor", "high_freq_factor", ORIGINAL],
        Some("yarn") => &[
            "factor",
            ORIGINAL,
            "beta_fast",
            "beta_slow",
            "attention_factor",
        ],
        Some("longrope") => {
            let original = rope.get(ORIGINAL).and_then(Value::as_f64);
            let longest = longest.and_then(Value::as_f64);
            if let (false, Some(original), Some(longest)) =
                (rope.contains_key("factor"), original, longest)
            {
                rope.insert("factor".to_owned(), json!(longest / original));
            }
            &[
                "short_factor",
                "long_factor",
                "factor",
                ORIGINAL,
                "attention_factor",
            ]
        }
        _ => bail!(
            "{key}.rope_type: {rope_type}, must be \"default\", \"linear\", \"llama3\", \"yarn\" or \"longrope\""
        ),
    };
    for (name, value) in &rope {
        let one = name == "partial_rotary_factor" && value.as_f64() == Some(1.0);
        // Rounds YaRN's boundaries to whole pairs. False disables this.
        let truncated = name == "truncate" && *value == json!(true);
        let is_known = known.contains(&name.as_str());
        if !(one || truncated || is_known) {
            bail!("{key}.{name}: {value}, must be absent with rope_type {rope_type}");
        }
        let (fits, kind) = match name.as_str() {
            ORIGINAL => (value.is_u64(), "usize"),
            "short_factor" | "long_factor" => (value.is_array(), "a sequence"),
            _ => (value.is_number(), "f64"),
        };
        if is_known && !fits {
            bail!("{key}.{name}: {value}, must be {}", json::kind(kind));
        }
    }
    rope.insert("rope_type".to_owned(), rope_type);
    // Only a missing key can still be wrong, and the error begins with it.
    let scaling: RopeScaling =
        json::typed(&Value::Object(rope)).map_err(|error| Error::msg(format!("{key}.{error}")))?;
    scaling.validate(key)?;
    serde_json::to_value(scaling).map_err(Error::wrap)
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
        from_hugging_face(&serde_json::to_vec(&config).unwrap())
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
    #[case(json!({"rope_scaling": {"type": "linear", "factor": 2}}), RopeScaling::Linear { factor: 2. })]
    #[case(
        json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}, "rope_scaling": null}),
        RopeScaling::Linear { factor: 2. }
    )]
    #[case(
        json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}}),
        RopeScaling::Llama3 {
            factor: 8.,
            low_freq_factor: 1.,
            high_freq_factor: 4.,
            original_max_position_embeddings: 8192,
        }
    )]
    #[case(
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        RopeScaling::Yarn {
            factor: 4.,
            original_max_position_embeddings: 32,
            beta_fast: 32.,
            beta_slow: 1.,
            attention_factor: None,
        }
    )]
    fn scaled_frequencies_are_read_and_written(
        #[case] extra: Value,
        #[case] scaling: RopeScaling,
    ) -> Result<()> {
        let model = read(extra)?;
        assert_eq!(model.rope_scaling, scaling);
        let written = serde_json::to_vec(&to_hugging_face(&model, &[2])?).unwrap();
        let again = from_hugging_face(&written)?;
        assert_eq!(
            (again.rope_scaling, again.rope_theta),
            (scaling, model.rope_theta)
        );
        Ok(())
    }

    #[rstest]
    #[case(json!({"model_type": "llama"}), vec![])]
    #[case(json!({"model_type": "llama", "attention_bias": true, "mlp_bias": true}), vec![])]
    #[case(json!({"model_type": "llama", "attention_bias": null, "mlp_bias": null}), vec![])]
    #[case(json!({"model_type": "qwen3", "attention_bias": true}), vec![])]
    #[case(json!({"model_type": "qwen2", "use_sliding_window": false, "sliding_window": 4096}), vec![])]
    #[case(json!({"model_type": "qwen3", "head_dim": 16}), vec![])]
    #[case(json!({"model_type": "smollm3", "num_hidden_layers": 5}), vec![1, 1, 1, 0, 1])]
    #[case(
        json!({"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2}),
        vec![1, 0, 1]
    )]
    #[case(
        json!({"model_type": "smollm3", "num_hidden_layers": 2, "no_rope_layers": [0, 1]}),
        vec![0, 1]
    )]
    fn each_family_is_read_and_written(
        #[case] extra: Value,
        #[case] no_rope_layers: Vec<u8>,
    ) -> Result<()> {
        let mut model = read(extra.clone())?;
        assert_eq!(
            serde_json::to_value(model.model_type).unwrap(),
            extra["model_type"]
        );
        assert_eq!(model.no_rope_layers, no_rope_layers);
        assert_eq!(model.attention_bias, extra["attention_bias"] == true);
        assert_eq!(model.mlp_bias, extra["mlp_bias"] == true);
        let written = to_hugging_face(&model, &[2])?;
        // Without these keys, transformers would use the family's defaults.
        assert_eq!(written["eos_token_id"], json!([2]));
        assert_eq!(written.get("bos_token_id"), Some(&Value::Null));
        model.head_dim = Some(model.head_dim());
        assert_eq!(
            from_hugging_face(&serde_json::to_vec(&written).unwrap())?,
            model
        );
        Ok(())
    }

    #[rstest]
    #[case("llama", 4)]
    #[case("qwen2", 4)]
    #[case("qwen3", 128)]
    #[case("smollm3", 4)]
    #[case("mistral", 4)]
    #[case("gemma2", 256)]
    #[case("gemma3_text", 256)]
    #[case("qwen3_moe", 4)]
    fn an_absent_head_dim_is_that_of_the_family(#[case] model_type: &str, #[case] head_dim: usize) {
        let model = read(json!({"model_type": model_type})).unwrap();
        assert_eq!(model.head_dim(), head_dim);
    }

    /// Each family's defaults for absent keys.
    #[test]
    fn absent_keys_have_the_defaults_of_the_family() -> Result<()> {
        let layers = |model: &DecoderConfig| serde_json::to_value(&model.layer_types).unwrap();
        let model = read(json!({"model_type": "mistral"}))?;
        assert_eq!(model.sliding_window, Some(4096));
        let model = read(json!({"model_type": "mistral", "sliding_window": null}))?;
        assert_eq!(model.sliding_window, None);

        let model = read(json!({"model_type": "gemma2", "num_hidden_layers": 3}))?;
        assert_eq!(
            layers(&model),
            json!(["sliding_attention", "full_attention", "sliding_attention"])
        );
        let caps = (model.attn_logit_softcapping, model.final_logit_softcapping);
        assert_eq!(caps, (Some(50.), Some(30.)));
        assert_eq!(model.query_pre_attn_scalar, Some(256.));
        assert!(model.tie_word_embeddings);
        let model = read(
            json!({"model_type": "gemma2", "attn_logit_softcapping": null,
            "final_logit_softcapping": null}),
        )?;
        let caps = (model.attn_logit_softcapping, model.final_logit_softcapping);
        assert_eq!(caps, (None, None));

        let model = read(json!({"model_type": "gemma3_text", "num_hidden_layers": 7}))?;
        let mut expected = vec!["sliding_attention"; 7];
        expected[5] = "full_attention";
        assert_eq!(layers(&model), json!(expected));
        let bases = (model.rope_theta, model.rope_local_base_freq);
        assert_eq!(bases, (1e6, Some(1e4)));
        assert_eq!(model.final_logit_softcapping, None);

        let model = read(json!({"model_type": "phi3"}))?;
        assert_eq!(
            (model.sliding_window, model.partial_rotary_factor),
            (None, 1.0)
        );

        let model = read(
            json!({"model_type": "qwen3_moe", "num_hidden_layers": 5, "decoder_sparse_step": 2,
            "mlp_only_layers": [3]}),
        )?;
        assert_eq!(model.mlp_only_layers, [0, 2, 3, 4]);
        let experts = (
            model.num_experts,
            model.num_experts_per_tok,
            model.moe_intermediate_size,
        );
        assert_eq!(experts, (128, 8, 768));
        assert!(!model.norm_topk_prob);

        let model = read(json!({"model_type": "qwen3_5_text", "num_hidden_layers": 5}))?;
        let mut expected = vec!["linear_attention"; 5];
        expected[3] = "full_attention";
        assert_eq!(layers(&model), json!(expected));
        assert_eq!((model.head_dim(), model.partial_rotary_factor), (256, 0.25));
        let model = read(
            json!({"model_type": "qwen3_5_text", "partial_rotary_factor": 0.5,
            "rope_parameters": {"partial_rotary_factor": null}}),
        )?;
        assert_eq!(model.partial_rotary_factor, 0.5);
        let heads = (model.linear_num_key_heads, model.linear_num_value_heads);
        assert_eq!(heads, (Some(16), Some(32)));
        Ok(())
    }

    #[rstest]
    fn both_key_styles_of_every_golden_configuration_give_the_same_decoder(
        #[values("models", "families")] folder: &str,
    ) -> Result<()> {
        let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden");
        let mut count = 0;
        for entry in std::fs::read_dir(std::path::Path::new(golden).join(folder))? {
            let folder = entry?.path();
            if folder.is_dir() {
                let read_file = |file| from_hugging_face(&std::fs::read(folder.join(file))?);
                let mut model = read_file("config.json")?;
                assert_eq!(model, read_file("config_v4.json")?, "{}", folder.display());
                let written = serde_json::to_vec(&to_hugging_face(&model, &[2])?).unwrap();
                model.head_dim = Some(model.head_dim());
                assert_eq!(from_hugging_face(&written)?, model, "{}", folder.display());
                count += 1;
            }
        }
        assert!(count > 0);
        Ok(())
    }

    #[rstest]
    #[case(json!({"model_type": "gemma3"}), "model_type: \"gemma3\"")]
    #[case(json!({"logits_scaling": 2.0}), "logits_scaling: 2.0, must be absent for model_type llama")]
    #[case(json!({"model_type": "qwen3", "num_experts": 4}), "num_experts: 4, must be absent")]
    #[case(json!({"model_type": "mistral", "sliding_window": 0}), "sliding_window: 0, must be")]
    #[case(
        json!({"model_type": "qwen3_5_text", "attn_output_gate": false}),
        "attn_output_gate: false, must be true"
    )]
    #[case(
        json!({"model_type": "qwen3_5_text", "full_attention_interval": 0}),
        "full_attention_interval: 0, must be"
    )]
    #[case(
        json!({"model_type": "qwen3_5_text", "layer_types": ["sliding_attention"]}),
        "layer_types: sliding_attention, must be absent"
    )]
    #[case(
        json!({"model_type": "gemma2", "layer_types": ["linear_attention"]}),
        "layer_types: linear_attention, must be absent"
    )]
    #[case(
        json!({"model_type": "qwen3_5_text", "linear_num_value_heads": 24}),
        "linear_num_value_heads: 24, must be a multiple of linear_num_key_heads, which is 16"
    )]
    #[case(json!({"linear_num_value_heads": 24}), "linear_num_value_heads: 24, must be absent")]
    #[case(json!({"model_type": "qwen3_5"}), "model_type: \"qwen3_5\"")]
    #[case(json!({"model_type": "mistral", "attention_bias": true}), "attention_bias: true")]
    #[case(
        json!({"model_type": "gemma2", "hidden_activation": "gelu"}),
        "hidden_activation: \"gelu\", must be \"gelu_pytorch_tanh\""
    )]
    #[case(
        json!({"model_type": "gemma2", "layer_types": ["full_attention", "full_attention"]}),
        "layer_types: 2 entries, must be empty or have 1 entries"
    )]
    #[case(
        json!({"model_type": "gemma2", "use_bidirectional_attention": true}),
        "use_bidirectional_attention: true, must be false"
    )]
    #[case(
        json!({"model_type": "gemma2", "attn_logit_softcapping": -1.0}),
        "attn_logit_softcapping: -1, must be positive"
    )]
    #[case(
        json!({"model_type": "gemma3_text", "sliding_window_pattern": 0}),
        "sliding_window_pattern: 0, must be"
    )]
    #[case(
        json!({"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 8.0}}}),
        "rope_parameters.sliding_attention.factor: 8.0"
    )]
    #[case(
        json!({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e6}}),
        "rope_parameters.rope_theta: 1000000.0, must be in full_attention or sliding_attention"
    )]
    #[case(
        json!({"model_type": "phi3", "partial_rotary_factor": 0.3}),
        "partial_rotary_factor: 0.3, must make an even number of at least 2"
    )]
    #[case(
        json!({"model_type": "phi3", "rope_scaling": {"type": "su", "short_factor": [1.0, 1.0], "long_factor": [1.0]},
            "original_max_position_embeddings": 8}),
        "rope_scaling.long_factor: [1.0], must have 2 numbers"
    )]
    #[case(
        json!({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": 1}}),
        "rope_scaling.long_factor: 1, must be a list"
    )]
    #[case(
        json!({"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5}),
        "num_experts_per_tok: 5, must be at least 1 and at most num_experts, which is 4"
    )]
    #[case(
        json!({"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 5}),
        "num_local_experts: 5, must equal num_experts, which is 4"
    )]
    #[case(
        json!({"model_type": "qwen3_moe", "decoder_sparse_step": 0}),
        "decoder_sparse_step: 0, must be"
    )]
    #[case(
        json!({"model_type": "qwen3_moe", "num_experts": 100_001}),
        "num_experts: 100001, must be at most 100000 with 1 blocks"
    )]
    #[case(
        json!({"model_type": "qwen3_moe", "num_hidden_layers": 10_000, "num_experts": 10_000}),
        "num_experts: 10000, must be at most 10 with 10000 blocks"
    )]
    #[case(json!({"model_type": null}), "model_type: null")]
    #[case(json!({"num_hidden_layers": 1_000_000_000_000_u64}), "num_hidden_layers: 1000000000000")]
    #[case(
        json!({"model_type": "smollm3", "num_hidden_layers": 1_000_000_000_000_u64}),
        "num_hidden_layers: 1000000000000"
    )]
    #[case(
        json!({"model_type": "smollm3", "no_rope_layer_interval": 0}),
        "no_rope_layer_interval: 0, must be"
    )]
    #[case(
        json!({"rope_scaling": {"rope_type": "dynamic", "factor": 8.}}),
        "rope_scaling.rope_type: \"dynamic\""
    )]
    #[case(
        json!({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}),
        "rope_parameters.short_factor: absent, must be given"
    )]
    #[case(
        json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}),
        "rope_scaling.mscale: 1.0"
    )]
    #[case(json!({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}), "rope_scaling.factor: 0.5")]
    #[case(
        json!({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}),
        "rope_parameters.factor: 0.5, must be finite and at least 1"
    )]
    #[case(
        json!({"rope_scaling": {"rope_type": "linear", "factor": "8"}}),
        "rope_scaling.factor: \"8\", must be a number"
    )]
    #[case(
        json!({"rope_parameters": {"rope_type": "yarn", "factor": 8, "beta_slow": [1]}}),
        "rope_parameters.beta_slow: [1], must be a number"
    )]
    #[case(
        json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": -8192}}),
        "rope_scaling.original_max_position_embeddings: -8192, must be a whole number, at least 0"
    )]
    #[case(
        json!({"rope_scaling": {"rope_type": "linear"}}),
        "rope_scaling.factor: absent, must be given"
    )]
    #[case(
        json!({"max_position_embeddings": "32", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        "max_position_embeddings: \"32\", must be a whole number, at least 0"
    )]
    #[case(json!({"use_sliding_window": true}), "use_sliding_window: true")]
    #[case(json!({"sliding_window": 4096}), "sliding_window: 4096")]
    #[case(json!({"layer_types": ["sliding_attention"]}), "layer_types: \"sliding_attention\"")]
    #[case(json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor: 0.5")]
    #[case(json!({"model_type": "smollm3", "no_rope_layers": [1, 1]}), "no_rope_layers: [1, 1]")]
    #[case(json!({"no_rope_layers": [1]}), "no_rope_layers: [1]")]
    #[case(json!({"rope_parameters": {"factor": 8.}}), "rope_parameters.factor: 8.0")]
    #[case(json!({"rope_parameters": "default"}), "rope_parameters: \"default\"")]
    #[case(
        json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}),
        "rope_theta: 10000.0, must equal rope_parameters.rope_theta, which is 500000.0"
    )]
    #[case(
        json!({"model_type": "qwen2", "attention_bias": true}),
        "attention_bias: true, must be false"
    )]
    #[case(json!({"model_type": "qwen3", "mlp_bias": true}), "mlp_bias: true, must be false")]
    #[case(json!({"hidden_act": "gelu"}), "hidden_act: \"gelu\"")]
    fn an_unsupported_model_is_refused_by_its_key(#[case] extra: Value, #[case] words: &str) {
        let error = read(extra).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    }
}

//! Models in GGUF files, written here by Candle.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{Result, Tensor};
use candle_grpo_nn::{
    Decoder, DecoderConfig, Gguf, GgufDType, GgufValue, LayerType, ModelType, Parameters,
    RopeScaling,
};
use proptest::prelude::*;
use rstest::rstest;
use rstest_reuse::apply;
use tempfile::NamedTempFile;

use candle_grpo_test_support::{cases, device, gguf_bytes, message};

use crate::small::{
    Family, bits, config, each_family, left_padded, lively, lively_tensors, max_difference,
    next_token_log_probs,
};

/// A file's contents, which tests change.
struct Contents {
    metadata: HashMap<String, Value>,
    tensors: HashMap<String, Tensor>,
    dtype: GgmlDType,
}

impl Contents {
    fn new(config: &DecoderConfig, weights: &HashMap<String, Tensor>) -> Result<Self> {
        let architecture = match config.model_type {
            ModelType::Llama => "llama",
            ModelType::Qwen2 => "qwen2",
            ModelType::Qwen3 => "qwen3",
            ModelType::SmolLm3 => "smollm3",
            other => panic!("{other:?}: no GGUF files"),
        };
        let size = |value: usize| Value::U32(value as u32);
        let mut metadata: HashMap<_, _> = [
            ("block_count", size(config.num_hidden_layers)),
            ("embedding_length", size(config.hidden_size)),
            ("feed_forward_length", size(config.intermediate_size)),
            ("context_length", size(config.max_position_embeddings)),
            ("attention.head_count", size(config.num_attention_heads)),
            ("attention.head_count_kv", size(config.num_key_value_heads)),
            ("attention.key_length", size(config.head_dim())),
            ("attention.value_length", size(config.head_dim())),
            ("rope.dimension_count", size(config.head_dim())),
            (
                "attention.layer_norm_rms_epsilon",
                Value::F32(config.rms_norm_eps as f32),
            ),
            ("rope.freq_base", Value::F32(config.rope_theta as f32)),
        ]
        .into_iter()
        .map(|(key, value)| (format!("{architecture}.{key}"), value))
        .collect();
        let name = Value::String(architecture.to_owned());
        metadata.insert("general.architecture".to_owned(), name);
        let mut tensors = HashMap::new();
        for (name, weight) in weights {
            let heads = match name {
                name if name.contains("q_proj.") => config.num_attention_heads,
                name if name.contains("k_proj.") => config.num_key_value_heads,
                _ => 0,
            };
            let interleaved = matches!(config.model_type, ModelType::Llama | ModelType::SmolLm3);
            let weight = if heads > 0 && interleaved {
                pairs_side_by_side(weight, heads)?
            } else {
                weight.clone()
            };
            tensors.insert(stored_name(name), weight);
        }
        Ok(Self {
            metadata,
            tensors,
            dtype: GgmlDType::F32,
        })
    }

    fn write(&self, path: &Path) -> Result<()> {
        Ok(fs::write(path, self.bytes()?)?)
    }

    fn bytes(&self) -> Result<Vec<u8>> {
        gguf_bytes(&self.metadata, &self.tensors, self.dtype)
    }
}

/// Each head's rows in this order: the first in the first half, the first in the second half, the
/// second in the first half, ...
fn pairs_side_by_side(weight: &Tensor, heads: usize) -> Result<Tensor> {
    let rows = weight.dim(0)?;
    let half = rows / heads / 2;
    let order: Vec<u32> = (0..heads)
        .flat_map(|head| (0..half).flat_map(move |pair| [(head, pair), (head, pair + half)]))
        .map(|(head, row)| (head * 2 * half + row) as u32)
        .collect();
    weight.index_select(&Tensor::new(order, device())?, 0)
}

fn stored_name(name: &str) -> String {
    [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ]
    .iter()
    .fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

pub(crate) fn file() -> NamedTempFile {
    tempfile::Builder::new()
        .suffix("model.gguf")
        .tempfile()
        .unwrap()
}

fn read(file: &NamedTempFile) -> Result<(DecoderConfig, Parameters)> {
    let file = Gguf::open(file.path())?;
    Ok((file.config()?, file.parameters(device())?))
}

/// The message with which a file with these contents is rejected.
fn refused(contents: &Contents) -> String {
    refused_bytes(&contents.bytes().unwrap())
}

fn refused_bytes(bytes: &[u8]) -> String {
    let file = file();
    fs::write(file.path(), bytes).unwrap();
    message(read(&file))
}

fn contents() -> Contents {
    let config = config(true);
    Contents::new(&config, &lively_tensors(&config).unwrap()).unwrap()
}

#[test]
fn gguf_files_of_the_golden_models_are_read_bit_identically() -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/models");
    let file = file();
    let mut families = Vec::new();
    for name in [
        "llama_tied",
        "llama_untied",
        "llama_untied_sharded",
        "llama3_rope",
        "qwen2_tied",
        "qwen3_tied",
    ] {
        let folder = root.join(name);
        let expected = DecoderConfig::from_hugging_face(&fs::read(folder.join("config.json"))?)?;
        let weights = Parameters::load_folder(&expected, &folder, device())?;
        let mut contents = Contents::new(&expected, &weights.frozen_copy()?)?;
        if let RopeScaling::Llama3 { .. } = expected.rope_scaling {
            // Divisors for the eight frequencies 10^(-i / 2), computed by hand from the Llama 3
            // formula with 128 positions: two make more than four turns, the third 2.037, the
            // fourth 0.644 and the others less.
            let factors = [1f32, 1., 2.339_119, 8., 8., 8., 8., 8.];
            let factors = Tensor::new(&factors, device())?;
            contents.tensors.insert("rope_freqs.weight".into(), factors);
        }
        contents.write(file.path())?;
        let (config, parameters) = read(&file)?;
        let expected = DecoderConfig {
            head_dim: Some(expected.head_dim()),
            ..expected
        };
        assert_eq!(config, expected, "{name}");
        assert_eq!(bits(&parameters)?, bits(&weights)?, "{name}");
        families.push(config.model_type);
    }
    families.dedup();
    assert_eq!(
        families,
        [ModelType::Llama, ModelType::Qwen2, ModelType::Qwen3]
    );
    Ok(())
}

fn assert_is_read_bit_identically(config: &DecoderConfig) -> Result<()> {
    let weights = lively_tensors(config)?;
    let file = file();
    Contents::new(config, &weights)?.write(file.path())?;
    let (read, parameters) = read(&file)?;
    assert_eq!(read, *config);
    let weights = Parameters::from_tensors(config, weights, device())?;
    assert_eq!(bits(&parameters)?, bits(&weights)?);
    Ok(())
}

#[test]
fn smollm3_does_not_rotate_every_fourth_block() -> Result<()> {
    let config = DecoderConfig {
        model_type: ModelType::SmolLm3,
        num_hidden_layers: 5,
        no_rope_layers: vec![1, 1, 1, 0, 1],
        ..config(true)
    };
    assert_is_read_bit_identically(&config)
}

#[test]
fn biases_of_all_projections_are_read() -> Result<()> {
    let config = Family::LlamaWithBiases.config(false);
    assert_is_read_bit_identically(&config)
}

#[rstest]
#[case(GgmlDType::F16, 1e-3)]
#[case(GgmlDType::BF16, 1e-2)]
#[case(GgmlDType::Q8_0, 2e-2)]
#[case(GgmlDType::Q5_0, 0.1)]
#[case(GgmlDType::Q5_1, 0.1)]
#[case(GgmlDType::Q4_0, 0.2)]
#[case(GgmlDType::Q4_1, 0.2)]
#[case(GgmlDType::Q6K, 0.1)]
#[case(GgmlDType::Q5K, 0.1)]
#[case(GgmlDType::Q4K, 0.2)]
#[case(GgmlDType::Q3K, 0.5)]
#[case(GgmlDType::Q2K, 1.0)]
fn every_type_is_dequantized(#[case] dtype: GgmlDType, #[case] relative: f64) -> Result<()> {
    let config = DecoderConfig {
        hidden_size: 256,
        intermediate_size: 256,
        head_dim: Some(64),
        num_hidden_layers: 1,
        ..config(false)
    };
    let weights = lively_tensors(&config)?;
    let mut contents = Contents::new(&config, &weights)?;
    contents.dtype = dtype;
    let file = file();
    contents.write(file.path())?;
    let (_, parameters) = read(&file)?;
    let mut smallest = f64::INFINITY;
    for (name, weight) in &weights {
        let largest = max_difference(weight, &weight.zeros_like()?)?;
        let distance = max_difference(parameters.get(name).unwrap(), weight)? / largest;
        assert!(distance < relative, "{name}: {distance}");
        if weight.rank() == 2 {
            smallest = smallest.min(distance);
        }
    }
    assert!(smallest > 0.0, "{dtype:?} was not used");
    Ok(())
}

#[test]
fn metadata_values_keep_their_types() -> Result<()> {
    let mut contents = contents();
    let texts = |texts: &[&str]| {
        let texts = texts.iter().map(|text| Value::String((*text).to_owned()));
        Value::Array(texts.collect())
    };
    for (key, value) in [
        ("a", texts(&["é", ""])),
        ("b", Value::Array(vec![Value::I32(-3), Value::I32(4)])),
        ("c", Value::Array(vec![Value::F32(0.1)])),
        ("d", Value::Bool(true)),
        ("e", Value::U64(u64::MAX)),
        ("f", Value::F64(0.25)),
        ("g", Value::Array(vec![Value::Bool(true)])),
    ] {
        contents.metadata.insert(key.to_owned(), value);
    }
    let file = file();
    contents.write(file.path())?;
    let read = Gguf::open(file.path())?;
    let get = |key: &str| &read.metadata()[key];
    assert_eq!(
        *get("a"),
        GgufValue::Strings(vec!["é".to_owned(), String::new()])
    );
    assert_eq!(*get("b"), GgufValue::Integers(vec![-3, 4]));
    assert!(matches!(get("c"), GgufValue::Floats(x) if x.len() == 1 && (x[0] - 0.1).abs() < 1e-12));
    assert_eq!(get("d").as_bool(), Some(true));
    assert_eq!(get("e").as_u64(), Some(u64::MAX));
    assert_eq!(get("f").as_f64(), Some(0.25));
    assert_eq!(get("g").as_integers(), Some([1].as_slice()));
    assert_eq!(get("llama.block_count").as_u64(), Some(2));
    assert_eq!(get("llama.block_count").as_str(), None);
    Ok(())
}

#[rstest]
#[case(("rope.scaling.factor", Value::F32(4.0)), RopeScaling::Linear { factor: 4.0 })]
#[case(("rope.scale_linear", Value::F32(2.0)), RopeScaling::Linear { factor: 2.0 })]
#[case(("rope.scaling.type", Value::String("none".into())), RopeScaling::Default)]
fn scaled_frequencies_are_read(
    #[case] (key, value): (&str, Value),
    #[case] expected: RopeScaling,
) -> Result<()> {
    let mut contents = contents();
    contents.metadata.insert(format!("llama.{key}"), value);
    let file = file();
    contents.write(file.path())?;
    assert_eq!(read(&file)?.0.rope_scaling, expected);
    Ok(())
}

#[test]
fn yarn_is_read() -> Result<()> {
    let mut contents = contents();
    for (key, value) in [
        ("type", Value::String("yarn".into())),
        ("factor", Value::F32(4.0)),
        ("original_context_length", Value::U32(8)),
    ] {
        let key = format!("llama.rope.scaling.{key}");
        contents.metadata.insert(key, value);
    }
    let file = file();
    contents.write(file.path())?;
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_max_position_embeddings: 8,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: None,
    };
    assert_eq!(read(&file)?.0.rope_scaling, yarn);
    for (absent, words) in [
        (
            "original_context_length",
            "original_context_length: absent, must be present for YaRN",
        ),
        ("factor", "factor: absent, must be present for YaRN"),
    ] {
        let key = format!("llama.rope.scaling.{absent}");
        let value = contents.metadata.remove(&key).unwrap();
        let message = refused(&contents);
        assert!(
            message.contains(&format!("llama.rope.scaling.{words}")),
            "{message}"
        );
        contents.metadata.insert(key, value);
    }
    Ok(())
}

#[rstest]
#[case("general.architecture", Some(Value::String("gpt2".into())), "general.architecture: \"gpt2\", must be one of")]
#[case("general.architecture", None, "general.architecture: absent")]
#[case("llama.block_count", None, "llama.block_count: absent")]
#[case("llama.block_count", Some(Value::U64(1 << 60)), "llama.block_count: 1152921504606846976, must be at most the number of tensors")]
#[case("llama.block_count", Some(Value::I32(-1)), "llama.block_count: -1, must be one whole number")]
#[case("llama.block_count", Some(Value::U32(0)), "num_hidden_layers: 0")]
#[case("llama.block_count", Some(Value::U32(1)), "surplus [\"blk.1.")]
#[case(
    "llama.embedding_length",
    Some(Value::U64(u64::MAX)),
    "must be [12, 18446744073709551615]"
)]
#[case("llama.feed_forward_length", Some(Value::U64(1 << 62)), "tensor blk.0.ffn_down.weight: shape [12, 20]")]
#[case(
    "llama.context_length",
    Some(Value::U32(0)),
    "max_position_embeddings: 0"
)]
#[case(
    "llama.attention.head_count",
    Some(Value::U32(3)),
    "a multiple of num_key_value_heads"
)]
#[case(
    "llama.attention.head_count_kv",
    Some(Value::Array(vec![Value::U32(2), Value::U32(2)])),
    "llama.attention.head_count_kv: an array of 2 whole numbers, must be one whole number"
)]
#[case(
    "llama.attention.value_length",
    Some(Value::U32(8)),
    "llama.attention.value_length: 8, must be the width of a head, which is 6"
)]
#[case(
    "llama.rope.dimension_count",
    Some(Value::U32(4)),
    "llama.rope.dimension_count: 4, must be"
)]
#[case(
    "llama.attention.layer_norm_rms_epsilon",
    Some(Value::F32(f32::NAN)),
    "rms_norm_eps: NaN"
)]
#[case("llama.attention.layer_norm_rms_epsilon", Some(Value::String("1e-5".into())), "must be a number")]
#[case(
    "llama.vocab_size",
    Some(Value::U32(14)),
    "llama.vocab_size: 14, must be the number of rows of token_embd.weight, which is 13"
)]
#[case("llama.rope.scaling.type", Some(Value::String("longrope".into())), "llama.rope.scaling.type: \"longrope\", must be")]
#[case(
    "llama.rope.scaling.attn_factor",
    Some(Value::F32(1.2)),
    "llama.rope.scaling.attn_factor: 1.2, must be 1"
)]
#[case(
    "llama.rope.scaling.factor",
    Some(Value::F32(0.5)),
    "rope_scaling.factor: 0.5"
)]
#[case("llama.expert_count", Some(Value::U32(8)), "llama.expert_count: 8")]
#[case(
    "llama.attention.sliding_window",
    Some(Value::U32(4096)),
    "llama.attention.sliding_window: 4096"
)]
#[case("split.count", Some(Value::U16(2)), "split.count: 2")]
#[case(
    "general.alignment",
    Some(Value::U32(0)),
    "general.alignment: 0, must be from 1"
)]
#[case("general.alignment", Some(Value::String("x".into())), "general.alignment: \"x\"")]
fn unsupported_metadata_is_refused_by_key(
    #[case] key: &str,
    #[case] value: Option<Value>,
    #[case] expected: &str,
) {
    let mut contents = contents();
    match value {
        Some(value) => contents.metadata.insert(key.to_owned(), value),
        None => contents.metadata.remove(key),
    };
    let message = refused(&contents);
    assert!(message.contains("model.gguf: "), "{message}");
    assert!(message.contains(expected), "{message}");
}

/// A family's small decoder with options that its GGUF files can express.
pub(crate) fn statable(family: Family) -> DecoderConfig {
    let config = family.config(matches!(family, Family::Gemma2 | Family::Gemma3));
    match family {
        Family::Mistral => DecoderConfig {
            sliding_window: None,
            ..config
        },
        Family::SmolLm3 => DecoderConfig {
            no_rope_layers: Vec::new(),
            ..config
        },
        Family::Gemma2 => DecoderConfig {
            query_pre_attn_scalar: None,
            ..config
        },
        Family::Gemma3 => DecoderConfig {
            layer_types: vec![LayerType::SlidingAttention; 2],
            ..config
        },
        Family::Qwen3Moe => DecoderConfig {
            mlp_only_layers: Vec::new(),
            norm_topk_prob: true,
            ..config
        },
        _ => config,
    }
}

pub(crate) fn write(
    file: &NamedTempFile,
    config: &DecoderConfig,
    parameters: &Parameters,
    dtype: GgufDType,
) -> Result<()> {
    Gguf::write(file.path(), config, parameters, dtype, BTreeMap::new())
}

fn log_probs(config: &DecoderConfig, parameters: &Parameters) -> Result<Tensor> {
    let decoder = Decoder::new(config, parameters.var_builder())?;
    let (ids, mask) = left_padded()?;
    Ok(next_token_log_probs(&decoder, &ids, &mask)?.0)
}

/// Gemma's norm factors are rounded when 1 is added to the parameters.
fn rounding(family: Family) -> f64 {
    match family {
        Family::Gemma2 | Family::Gemma3 => 1.2e-7,
        _ => 0.0,
    }
}

#[apply(each_family)]
fn what_is_written_is_read(family: Family) -> Result<()> {
    if family == Family::Qwen3_5 {
        return Ok(());
    }
    let config = statable(family);
    let parameters = lively(&config)?;
    let file = file();
    write(&file, &config, &parameters, GgufDType::F32)?;
    let (read_config, read) = read(&file)?;
    assert_eq!(read.len(), parameters.len());
    for (name, value) in parameters.iter() {
        let distance = max_difference(read.get(name).unwrap(), value)?;
        assert!(distance <= rounding(family), "{name}: {distance}");
    }
    let distance = max_difference(
        &log_probs(&read_config, &read)?,
        &log_probs(&config, &parameters)?,
    )?;
    assert!(distance <= 100.0 * rounding(family), "{distance}");
    Ok(())
}

#[apply(each_family)]
fn written_matrices_are_rounded_to_their_type(family: Family) -> Result<()> {
    if family == Family::Qwen3_5 {
        return Ok(());
    }
    let config = DecoderConfig {
        hidden_size: 64,
        intermediate_size: 32,
        head_dim: Some(32),
        ..statable(family)
    };
    let config = DecoderConfig {
        moe_intermediate_size: 4 * config.moe_intermediate_size,
        ..config
    };
    let parameters = lively(&config)?;
    let file = file();
    // Half a step out of 127, whose factor is rounded to 11 bits; 11 bits.
    for (dtype, relative) in [
        (GgufDType::Q8_0, 0.5 / 127.0 + 4.9e-4),
        (GgufDType::F16, 4.9e-4),
    ] {
        write(&file, &config, &parameters, dtype)?;
        let (_, read) = read(&file)?;
        for (name, value) in parameters.iter() {
            let largest = max_difference(value, &value.zeros_like()?)?;
            let distance = max_difference(read.get(name).unwrap(), value)?;
            if value.rank() == 1 || name.ends_with("mlp.gate.weight") {
                assert!(distance <= rounding(family), "{name}: {distance}");
            } else {
                let bound = relative * largest;
                assert!(
                    0.0 < distance && distance <= bound,
                    "{dtype:?} {name}: {distance}"
                );
            }
        }
    }
    Ok(())
}

/// The first block's tensors, as in llama.cpp's own files.
#[rstest]
#[case(
    Family::Llama,
    "attn_k attn_norm attn_output attn_q attn_v ffn_down ffn_gate ffn_norm ffn_up"
)]
#[case(
    Family::Mistral,
    "attn_k attn_norm attn_output attn_q attn_v ffn_down ffn_gate ffn_norm ffn_up"
)]
#[case(
    Family::Granite,
    "attn_k attn_norm attn_output attn_q attn_v ffn_down ffn_gate ffn_norm ffn_up"
)]
#[case(
    Family::Phi3,
    "attn_norm attn_output attn_qkv ffn_down ffn_norm ffn_up"
)]
#[case(
    Family::Olmo2,
    "attn_k attn_k_norm attn_output attn_q attn_q_norm attn_v ffn_down ffn_gate ffn_up post_attention_norm post_ffw_norm"
)]
#[case(
    Family::Gemma2,
    "attn_k attn_norm attn_output attn_q attn_v ffn_down ffn_gate ffn_norm ffn_up post_attention_norm post_ffw_norm"
)]
#[case(
    Family::Gemma3,
    "attn_k attn_k_norm attn_norm attn_output attn_q attn_q_norm attn_v ffn_down ffn_gate ffn_norm ffn_up post_attention_norm post_ffw_norm"
)]
#[case(
    Family::Qwen3Moe,
    "attn_k attn_k_norm attn_norm attn_output attn_q attn_q_norm attn_v ffn_down_exps ffn_gate_exps ffn_gate_inp ffn_norm ffn_up_exps"
)]
fn tensors_have_the_names_and_values_of_llama_cpp(
    #[case] family: Family,
    #[case] names: &str,
) -> Result<()> {
    let config = statable(family);
    let parameters = lively(&config)?;
    let file = file();
    write(&file, &config, &parameters, GgufDType::F32)?;
    // Candle's reader.
    let mut reader = fs::File::open(file.path())?;
    let content = candle_core::quantized::gguf_file::Content::read(&mut reader)?;
    let mut found: Vec<_> = content
        .tensor_infos
        .keys()
        .filter_map(|name| name.strip_prefix("blk.0.")?.strip_suffix(".weight"))
        .collect();
    found.sort_unstable();
    assert_eq!(found.join(" "), names);
    let mut stored = |name: &str| {
        content
            .tensor(&mut reader, name, device())?
            .dequantize(device())
    };
    let parameter = |name: &str| parameters.get(name).unwrap().as_detached_tensor();
    if let Family::Llama | Family::Mistral | Family::Granite = family {
        let expected = pairs_side_by_side(&parameter("model.layers.0.self_attn.q_proj.weight"), 4)?;
        assert_eq!(
            max_difference(&stored("blk.0.attn_q.weight")?, &expected)?,
            0.0
        );
    }
    if let Family::Gemma2 | Family::Gemma3 = family {
        let expected = (parameter("model.layers.0.pre_feedforward_layernorm.weight") + 1.0)?;
        assert_eq!(
            max_difference(&stored("blk.0.ffn_norm.weight")?, &expected)?,
            0.0
        );
    }
    if family == Family::Qwen3Moe {
        let expected = parameter("model.layers.0.mlp.experts.2.down_proj.weight");
        let experts = stored("blk.0.ffn_down_exps.weight")?;
        assert_eq!(experts.dims(), [3, 12, 8]);
        assert_eq!(max_difference(&experts.get(2)?, &expected)?, 0.0);
    }
    Ok(())
}

#[test]
fn scaled_frequencies_are_written() -> Result<()> {
    let file = file();
    let longrope = |long: f64| RopeScaling::LongRope {
        short_factor: vec![1.0, 1.25, 1.5],
        long_factor: vec![1.0, 2.5, long],
        original_max_position_embeddings: 8,
        factor: 2.0,
        attention_factor: None,
        short_rows: false,
    };
    for (family, rope_scaling) in [
        (Family::Llama, RopeScaling::Linear { factor: 4.0 }),
        (
            Family::Qwen2,
            RopeScaling::Yarn {
                factor: 4.0,
                original_max_position_embeddings: 8,
                beta_fast: 16.0,
                beta_slow: 2.0,
                attention_factor: None,
            },
        ),
        (
            Family::Llama,
            RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 8,
            },
        ),
        (Family::Phi3, longrope(4.0)),
        // Not exact in 32 bits.
        (Family::Phi3, longrope(4.1)),
    ] {
        let config = DecoderConfig {
            partial_rotary_factor: 1.0,
            rope_scaling,
            ..statable(family)
        };
        let parameters = lively(&config)?;
        write(&file, &config, &parameters, GgufDType::F32)?;
        let (read, _) = read(&file)?;
        assert_eq!(
            std::mem::discriminant(&read.rope_scaling),
            std::mem::discriminant(&config.rope_scaling)
        );
        let distance = max_difference(
            &log_probs(&read, &parameters)?,
            &log_probs(&config, &parameters)?,
        )?;
        assert!(distance < 1e-6, "{:?}: {distance}", config.rope_scaling);
    }
    Ok(())
}

#[rstest]
#[case(Family::Mistral, |c: &mut DecoderConfig| c.sliding_window = Some(3), "sliding_window: 3, GGUF files of this architecture can only state absent")]
#[case(Family::SmolLm3, |c: &mut DecoderConfig| c.no_rope_layers = vec![1, 0], "no_rope_layers: [1,0], GGUF files of this architecture can only state [1,1]")]
#[case(Family::Gemma2, |c: &mut DecoderConfig| c.tie_word_embeddings = false, "tie_word_embeddings: false, ")]
#[case(Family::Gemma2, |c: &mut DecoderConfig| c.attn_logit_softcapping = None, "attn_logit_softcapping: absent, ")]
#[case(Family::Gemma3, |c: &mut DecoderConfig| c.final_logit_softcapping = Some(3.0), "final_logit_softcapping: 3.0, ")]
#[case(Family::Gemma3, |c: &mut DecoderConfig| c.layer_types[1] = LayerType::FullAttention, "layer_types: ")]
#[case(Family::Qwen3Moe, |c: &mut DecoderConfig| c.norm_topk_prob = false, "norm_topk_prob: absent, ")]
#[case(Family::Qwen3Moe, |c: &mut DecoderConfig| c.mlp_only_layers = vec![1], "mlp_only_layers: [1], ")]
#[case(Family::Qwen3_5, |_: &mut DecoderConfig| (), "model_type: qwen3_5_text, has no GGUF files")]
fn what_files_cannot_state_is_not_written(
    #[case] family: Family,
    #[case] change: fn(&mut DecoderConfig),
    #[case] expected: &str,
) -> Result<()> {
    let mut config = statable(family);
    change(&mut config);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.gguf");
    let written = Gguf::write(
        &path,
        &config,
        &lively(&config)?,
        GgufDType::F32,
        BTreeMap::new(),
    );
    let message = message(written);
    assert!(message.contains(expected), "{message}");
    assert_eq!(fs::read_dir(folder.path())?.count(), 0);
    Ok(())
}

type Tensors = HashMap<String, Tensor>;

fn ones(dims: impl Into<candle_core::Shape>) -> Tensor {
    Tensor::ones(dims, candle_core::DType::F32, device()).unwrap()
}

#[rstest]
#[case(|t: &mut Tensors| drop(t.remove("blk.1.attn_k.weight")), r#"missing ["blk.1.attn_k.weight"], surplus []"#)]
#[case(|t: &mut Tensors| drop(t.remove("token_embd.weight")), "tensor token_embd.weight: absent")]
#[case(|t: &mut Tensors| drop(t.insert("blk.0.attn_q.bias".into(), ones(24))), r#"tensors: missing ["blk.0.attn_k.bias", "blk.0.attn_output.bias", "#)]
#[case(|t: &mut Tensors| drop(t.insert("token_embd.weight".into(), ones(12))), "tensor token_embd.weight: shape [12], must have two dimensions")]
#[case(|t: &mut Tensors| drop(t.insert("token_embd.weight".into(), ones((13, 11)))), "tensor token_embd.weight: shape [13, 11], must be [13, 12]")]
#[case(|t: &mut Tensors| drop(t.insert("blk.1.ffn_up.weight".into(), ones((12, 20)))), "tensor blk.1.ffn_up.weight: shape [12, 20], must be [20, 12]")]
#[case(|t: &mut Tensors| drop(t.insert("output_norm.weight".into(), (ones(12) * f64::NAN).unwrap())), "tensor output_norm.weight: a NaN or an infinity")]
#[case(|t: &mut Tensors| drop(t.insert("blk.0.attn_q.weight".into(), (ones((24, 12)) / 0.0).unwrap())), "tensor blk.0.attn_q.weight: a NaN or an infinity")]
#[case(|t: &mut Tensors| drop(t.insert("rope_freqs.weight".into(), ones(4))), "tensor rope_freqs.weight: 4 numbers, must have half the width of a head, 3")]
#[case(|t: &mut Tensors| drop(t.insert("rope_freqs.weight".into(), Tensor::new(&[1f32, 3., 2.], device()).unwrap())), "tensor rope_freqs.weight: [1.0, 3.0, 2.0], must be the divisors")]
#[case(|t: &mut Tensors| drop(t.insert("rope_freqs.weight".into(), Tensor::new(&[1f32, f32::NAN, 2.], device()).unwrap())), "must be the divisors")]
fn tensors_that_do_not_fit_are_refused_by_name(
    #[case] spoil: fn(&mut Tensors),
    #[case] expected: &str,
) {
    let mut contents = contents();
    spoil(&mut contents.tensors);
    let message = refused(&contents);
    assert!(message.contains(expected), "{message}");
}

#[test]
fn a_truncated_file_is_refused_at_every_length() {
    let whole = contents().bytes().unwrap();
    // Each header byte, and some more. The last tensor ends before the padding at the end of the
    // file.
    let data = whole.len() - contents().tensors.values().map(padded).sum::<usize>();
    for length in (0..data).chain((data..whole.len() - 32).step_by(61)) {
        let message = refused_bytes(&whole[..length]);
        assert!(message.contains("model.gguf: "), "{length}: {message}");
    }
    let file = file();
    fs::remove_file(file.path()).unwrap();
    assert!(message(read(&file)).contains("model.gguf: "));
}

fn padded(tensor: &Tensor) -> usize {
    (tensor.elem_count() * 4).next_multiple_of(32)
}

/// Where a text occurs in a file.
fn find(bytes: &[u8], text: &str) -> usize {
    let text = text.as_bytes();
    let windows = bytes.windows(text.len());
    windows.into_iter().position(|w| w == text).unwrap()
}

/// A header with wrong sizes must be an error, and must not allocate that much memory.
#[rstest]
#[case::magic(|_: &[u8]| 0, &[0], "begins with ")]
#[case::version(|_: &[u8]| 4, &[0, 0, 0, 3], "version: 50331648")]
#[case::tensor_count(|_: &[u8]| 8, &[0xff; 8], "tensors at byte 24: 18446744073709551615")]
#[case::metadata_count(|_: &[u8]| 16, &[0xff; 7], "metadata entries at byte 24: 72057594037927935")]
#[case::key(|_: &[u8]| 24, &[0xff; 8], "string at byte 32: 18446744073709551615")]
#[case::value_type(|b: &[u8]| find(b, "llama.block_count") + 17, &[77], "metadata llama.block_count: a value of type 77")]
#[case::array(
    |b: &[u8]| find(b, "llama.block_count") + 17,
    // An array of bytes that is larger than the file.
    &[9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff],
    "metadata llama.block_count: array at byte"
)]
#[case::nested(|b: &[u8]| find(b, "llama.block_count") + 17, &[9, 0, 0, 0, 9, 0, 0, 0], "an array of type 9")]
#[case::rank(|b: &[u8]| find(b, "blk.0.attn_q.weight") + 19, &[200], "tensor blk.0.attn_q.weight: 200 dimensions")]
#[case::no_rank(|b: &[u8]| find(b, "blk.0.attn_q.weight") + 19, &[0], "tensor blk.0.attn_q.weight: 0 dimensions")]
#[case::empty(|b: &[u8]| find(b, "blk.0.attn_q.weight") + 23, &[0], "tensor blk.0.attn_q.weight: shape [24, 0]")]
#[case::product(
    |b: &[u8]| find(b, "blk.0.attn_q.weight") + 23,
    &[0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0],
    "tensor blk.0.attn_q.weight: shape [281474976710656, 281474976710656], must be of a size that fits"
)]
#[case::beyond(|b: &[u8]| find(b, "blk.0.attn_q.weight") + 28, &[1], "tensor blk.0.attn_q.weight: 105553116267648 bytes from byte")]
#[case::dtype(|b: &[u8]| find(b, "blk.0.attn_q.weight") + 39, &[20], "tensor blk.0.attn_q.weight: type 20 of ggml")]
#[case::blocks(|b: &[u8]| find(b, "blk.0.attn_q.weight") + 39, &[2], "as last dimension a multiple of 32 for type Q4_0")]
#[case::offset(|b: &[u8]| find(b, "blk.0.attn_q.weight") + 43, &[0xff; 8], "tensor blk.0.attn_q.weight: 1152 bytes from byte")]
#[case::shared(
    |b: &[u8]| find(b, "blk.0.attn_q.weight") + 31,
    // 250 rows from the start of the data: each tensor fits into the file, but not all together.
    &[250, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    "bytes together, must be at most"
)]
#[case::twice(|b: &[u8]| find(b, "blk.0.attn_q.weight") + 11, b"k", "tensor blk.0.attn_k.weight: twice, must occur once")]
#[case::key_twice(|b: &[u8]| find(b, "llama.attention.key_length") + 16, b"head_count", "metadata llama.attention.head_count: twice, must occur once")]
fn a_header_with_wrong_sizes_is_refused(
    #[case] at: fn(&[u8]) -> usize,
    #[case] wrong: &[u8],
    #[case] expected: &str,
) {
    let mut bytes = contents().bytes().unwrap();
    let at = at(&bytes);
    bytes[at..at + wrong.len()].copy_from_slice(wrong);
    let message = refused_bytes(&bytes);
    assert!(message.contains(expected), "{message}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(100, 3000)))]

    /// A file with any changed bytes is either read or rejected.
    #[test]
    fn changed_bytes_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), cut in any::<prop::sample::Index>(), torn: bool) {
        let mut bytes = contents().bytes().unwrap();
        // The header is a small part of the file, but the one that matters.
        let header = bytes.len() - contents().tensors.values().map(padded).sum::<usize>();
        for (at, value) in changes {
            bytes[at.index(header)] = value;
        }
        if torn {
            bytes.truncate(cut.index(bytes.len()));
        }
        let file = file();
        fs::write(file.path(), bytes).unwrap();
        if let Err(error) = read(&file) {
            prop_assert!(error.to_string().contains("model.gguf"));
        }
    }
}

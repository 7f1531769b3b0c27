//! Pretrained models: loading, saving, and rejected files.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use anyhow::Result;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{DType, Device, Tensor};
use candle_grpo_nn::{Gguf, GgufDType, GgufValue, ModelType};
use candle_grpo_test_support::gguf_bytes;
use candle_grpo_train::Pretrained;
use candle_grpo_train::model::Chat;
use rstest::rstest;
use serde_json::json;
use tokenizers::normalizers::NFKC;
use tokenizers::pre_tokenizers::whitespace::Whitespace;
use tokenizers::processors::template::TemplateProcessing;

use crate::common::file_names;

const WIDTH: usize = 8;
const SPECIAL: [&str; 4] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"];
const TEMPLATE: &str =
    "{% for m in messages %}{{ bos_token }}{{ m.content }}{{ eos_token }}{% endfor %}";

/// Special tokens, the printable ASCII characters, space and newline as in GPT-2, and merges.
fn tokens() -> Vec<String> {
    let mut tokens: Vec<String> = SPECIAL.map(str::to_owned).to_vec();
    tokens.extend((b'!'..=b'~').map(|byte| char::from(byte).to_string()));
    for token in ["Ġ", "Ċ", "he", "ll", "Ġhe", "12", "ab", "cd", "abcd"] {
        tokens.push(token.to_owned());
    }
    tokens
}

fn id(token: &str) -> u32 {
    tokens().iter().position(|other| other == token).unwrap() as u32
}

fn texts<T: AsRef<str>>(texts: impl IntoIterator<Item = T>) -> Value {
    Value::Array(
        texts
            .into_iter()
            .map(|text| Value::String(text.as_ref().to_owned()))
            .collect(),
    )
}

fn metadata() -> BTreeMap<String, Value> {
    let types = (0..tokens().len()).map(|id| match id {
        0..=2 => 3,
        3 => 4,
        _ => 1,
    });
    [
        ("general.architecture", Value::String("qwen2".into())),
        ("general.license", Value::String("apache-2.0".into())),
        ("qwen2.block_count", Value::U32(1)),
        ("qwen2.embedding_length", Value::U32(WIDTH as u32)),
        ("qwen2.feed_forward_length", Value::U32(WIDTH as u32)),
        ("qwen2.context_length", Value::U32(64)),
        ("qwen2.attention.head_count", Value::U32(2)),
        ("qwen2.attention.head_count_kv", Value::U32(1)),
        ("qwen2.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", texts(tokens())),
        (
            "tokenizer.ggml.token_type",
            Value::Array(types.map(Value::I32).collect()),
        ),
        (
            "tokenizer.ggml.merges",
            texts(["h e", "l l", "Ġ he", "1 2", "a b", "c d"]),
        ),
        ("tokenizer.ggml.bos_token_id", Value::U32(1)),
        ("tokenizer.ggml.eos_token_id", Value::U32(2)),
        ("tokenizer.ggml.padding_token_id", Value::U32(2)),
        ("tokenizer.chat_template", Value::String(TEMPLATE.into())),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

/// The weights, waves with different phases.
fn tensors() -> candle_core::Result<BTreeMap<String, Tensor>> {
    let embedding = tokens().len() + 3;
    let tensors = [
        ("token_embd.weight", vec![embedding, WIDTH]),
        ("output_norm.weight", vec![WIDTH]),
        ("blk.0.attn_norm.weight", vec![WIDTH]),
        ("blk.0.ffn_norm.weight", vec![WIDTH]),
        ("blk.0.attn_q.weight", vec![WIDTH, WIDTH]),
        ("blk.0.attn_k.weight", vec![WIDTH / 2, WIDTH]),
        ("blk.0.attn_v.weight", vec![WIDTH / 2, WIDTH]),
        ("blk.0.attn_q.bias", vec![WIDTH]),
        ("blk.0.attn_k.bias", vec![WIDTH / 2]),
        ("blk.0.attn_v.bias", vec![WIDTH / 2]),
        ("blk.0.attn_output.weight", vec![WIDTH, WIDTH]),
        ("blk.0.ffn_gate.weight", vec![WIDTH, WIDTH]),
        ("blk.0.ffn_up.weight", vec![WIDTH, WIDTH]),
        ("blk.0.ffn_down.weight", vec![WIDTH, WIDTH]),
    ];
    let mut written = BTreeMap::new();
    for (at, (name, shape)) in tensors.into_iter().enumerate() {
        let count: usize = shape.iter().product();
        let wave = Tensor::arange(0u32, count as u32, &Device::Cpu)?.to_dtype(DType::F32)?;
        let weight = (wave + at as f64)?.sin()?.reshape(shape)?;
        written.insert(name.to_owned(), weight);
    }
    Ok(written)
}

struct Folder {
    folder: tempfile::TempDir,
}

impl Folder {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn gguf(&self) -> PathBuf {
        self.folder.path().join("model.gguf")
    }

    fn model(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    fn load(&self, metadata: &BTreeMap<String, Value>) -> Result<Pretrained> {
        fs::write(
            self.gguf(),
            gguf_bytes(metadata, &tensors()?, GgmlDType::F32)?,
        )?;
        Pretrained::load(&self.gguf(), &Device::Cpu)
    }

    /// The model's folder, loaded from its file and saved.
    fn saved(&self) -> PathBuf {
        let pretrained = self.load(&metadata()).unwrap();
        pretrained.save(&self.model()).unwrap();
        self.model()
    }

    /// The message with which the folder is rejected.
    fn refused(&self) -> String {
        refusal(Pretrained::load(&self.model(), &Device::Cpu))
    }
}

fn refusal(result: Result<Pretrained>) -> String {
    format!("{:#}", result.err().expect("this must be an error"))
}

fn encode(pretrained: &Pretrained, text: &str) -> Vec<u32> {
    let encoding = pretrained.tokenizer.encode(text, false).unwrap();
    encoding.get_ids().to_vec()
}

fn ids(tokens: &[&str]) -> Vec<u32> {
    tokens.iter().map(|token| id(token)).collect()
}

#[test]
fn a_gguf_file_becomes_a_folder_that_is_the_same_model() -> Result<()> {
    let folder = Folder::new();
    let first = folder.load(&metadata())?;
    first.save(&folder.model())?;
    let second = Pretrained::load(&folder.model(), &Device::Cpu)?;
    assert_eq!(first.license.as_deref(), Some("apache-2.0"));
    assert_eq!(first.special_tokens.stop_token_ids, [2, 0]);
    // Nothing in the file says what is unknown.
    assert_eq!(first.special_tokens.unk, None);
    let mut model = first.model.clone();
    model.head_dim = Some(model.head_dim());
    assert_eq!(second.model, model);
    assert_eq!(second.special_tokens, first.special_tokens);
    for (name, weight) in first.parameters.iter() {
        let bits = |weight: &Tensor| weight.flatten_all()?.to_vec1::<f32>();
        assert_eq!(bits(second.parameters.get(name).unwrap())?, bits(weight)?);
    }
    for pretrained in [&first, &second] {
        for (text, expected) in [
            ("hello", vec!["he", "ll", "o"]),
            (" hello 12", vec!["Ġhe", "ll", "o", "Ġ", "1", "2"]),
            (
                "<|im_start|>he\n<|im_end|>",
                vec!["<|im_start|>", "he", "Ċ", "<|im_end|>"],
            ),
            ("a<tool>b", vec!["a", "<tool>", "b"]),
            ("abcd", vec!["ab", "cd"]),
        ] {
            assert_eq!(encode(pretrained, text), ids(&expected), "{text:?}");
            let plain = pretrained.tokenizer.decode(&ids(&expected), false).unwrap();
            assert_eq!(plain, text);
        }
        let decoded = pretrained
            .tokenizer
            .decode(&ids(&["<|im_end|>", "a", "<tool>"]), true);
        assert_eq!(decoded.unwrap(), "a<tool>");
        let chat = Chat::new(json!([{"content": "he"}]));
        let template = pretrained.chat_template.as_ref().unwrap();
        assert_eq!(template.render(&chat)?, "<|im_start|>he<|im_end|>");
    }
    assert_eq!(
        file_names(&folder.model()),
        [
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json"
        ]
    );
    Ok(())
}

#[rstest]
#[case("default", " he+12a", &["Ġhe", "+", "12", "a"])]
#[case("gpt-2", "he12a", &["he", "12", "a"])]
#[case("qwen2", " he 12\n\na", &["Ġhe", "Ġ", "1", "2", "Ċ", "Ċ", "a"])]
#[case("llama-bpe", "12 abcd", &["12", "Ġ", "ab", "cd"])]
#[case("llama-bpe", "abcd", &["abcd"])]
#[case("smaug-bpe", "abcd", &["ab", "cd"])]
fn each_way_of_splitting_is_known(
    #[case] pre: &str,
    #[case] text: &str,
    #[case] expected: &[&str],
) -> Result<()> {
    let mut metadata = metadata();
    metadata.insert("tokenizer.ggml.pre".into(), Value::String(pre.into()));
    let pretrained = Folder::new().load(&metadata)?;
    assert_eq!(encode(&pretrained, text), ids(expected));
    let with_special = pretrained.tokenizer.encode(text, true).unwrap();
    // By default, only Llama 3 starts with its BOS token.
    let begins = with_special.get_ids()[0] == 1;
    assert_eq!(begins, pre == "llama-bpe");
    Ok(())
}

#[rstest]
fn a_model_becomes_a_gguf_file_that_is_the_same_model(
    #[values("default", "gpt-2", "smollm", "qwen2", "llama-bpe", "smaug-bpe")] pre: &str,
    #[values(false, true)] of_a_folder: bool,
) -> Result<()> {
    let mut metadata = metadata();
    metadata.insert("tokenizer.ggml.pre".into(), Value::String(pre.into()));
    let folder = Folder::new();
    let mut first = folder.load(&metadata)?;
    if of_a_folder {
        first.save(&folder.model())?;
        first = Pretrained::load(&folder.model(), &Device::Cpu)?;
    }
    let path = folder.folder.path().join("written.gguf");
    first.save_gguf(&path, GgufDType::F32)?;
    let second = Pretrained::load(&path, &Device::Cpu)?;
    assert_eq!(second.license, first.license);
    assert_eq!(second.special_tokens, first.special_tokens);
    assert_eq!(second.model.vocab_size, first.model.vocab_size);
    for (name, weight) in first.parameters.iter() {
        let bits = |weight: &Tensor| weight.flatten_all()?.to_vec1::<f32>();
        assert_eq!(bits(second.parameters.get(name).unwrap())?, bits(weight)?);
    }
    let template = |model: &Pretrained| model.chat_template.as_ref().unwrap().source().to_owned();
    assert_eq!(template(&second), template(&first));
    let vocabulary = |model: &Pretrained| model.tokenizer.get_vocab(true);
    assert_eq!(vocabulary(&second), vocabulary(&first));
    for text in [
        " he+12a",
        "<|im_start|>he\n<|im_end|>",
        "a<tool>b <|endoftext|>",
        "12 abcd",
    ] {
        let ids = |model: &Pretrained, special: bool| {
            model
                .tokenizer
                .encode(text, special)
                .unwrap()
                .get_ids()
                .to_vec()
        };
        for special in [false, true] {
            assert_eq!(ids(&second, special), ids(&first, special), "{text:?}");
        }
        let decoded = |model: &Pretrained| model.tokenizer.decode(&ids(model, false), true);
        assert_eq!(decoded(&second).unwrap(), decoded(&first).unwrap());
    }
    let file = Gguf::open(&path)?;
    let written = |key: &str| &file.metadata()[key];
    assert_eq!(written("tokenizer.ggml.pre").as_str(), Some(pre));
    // Rows without a token have their own text.
    let mut texts = tokens();
    texts.extend((texts.len()..texts.len() + 3).map(|id| format!("[PAD{id}]")));
    assert_eq!(*written("tokenizer.ggml.tokens"), GgufValue::Strings(texts));
    Ok(())
}

#[rstest]
#[case(
    |model: &mut Pretrained| { let _ = model.tokenizer.with_pre_tokenizer(Some(Whitespace {})); },
    "must be one of [\"gpt-2\", \"smollm\""
)]
#[case(
    |model: &mut Pretrained| { let _ = model.tokenizer.with_normalizer(Some(NFKC)).unwrap(); },
    "with normalizer {\"type\":\"NFKC\"}, must be one of"
)]
#[case(
    |model: &mut Pretrained| model.special_tokens.stop_token_ids = vec![2, 0, 4, 5, 6],
    "eos_token_id: 6, must be one of at most three tokens in a GGUF file"
)]
#[case(
    |model: &mut Pretrained| { let _ = model.tokenizer.with_post_processor(Some(ends_with_eos())); },
    "post_processor: must add no token"
)]
#[case(
    |model: &mut Pretrained| model.model.model_type = ModelType::Qwen3_5,
    "model_type: qwen3_5_text, has no GGUF files"
)]
fn a_model_that_gguf_files_cannot_state_is_not_written(
    #[case] change: fn(&mut Pretrained),
    #[case] expected: &str,
) -> Result<()> {
    let folder = Folder::new();
    let mut model = folder.load(&metadata())?;
    change(&mut model);
    let path = folder.folder.path().join("written.gguf");
    let refused = model.save_gguf(&path, GgufDType::F32);
    let message = format!("{:#}", refused.expect_err("this must be an error"));
    assert!(message.contains(expected), "{message}");
    assert!(!path.exists());
    Ok(())
}

/// Adds the token that ends a text after it.
fn ends_with_eos() -> TemplateProcessing {
    TemplateProcessing::builder()
        .try_single(vec!["$A", "<|im_end|>"])
        .unwrap()
        .special_tokens(vec![("<|im_end|>", 2)])
        .build()
        .unwrap()
}

#[test]
fn the_beginning_is_added_where_the_file_says_so() -> Result<()> {
    let mut metadata = metadata();
    metadata.insert("tokenizer.ggml.add_bos_token".into(), Value::Bool(true));
    let folder = Folder::new();
    let first = folder.load(&metadata)?;
    first.save(&folder.model())?;
    for pretrained in [first, Pretrained::load(&folder.model(), &Device::Cpu)?] {
        let encoding = pretrained.tokenizer.encode("he", true).unwrap();
        assert_eq!(encoding.get_ids(), [1, id("he")]);
        assert_eq!(encode(&pretrained, "he"), [id("he")]);
    }
    Ok(())
}

#[rstest]
#[case("tokenizer.ggml.model", Some(Value::String("llama".into())), "tokenizer.ggml.model: \"llama\", only \"gpt2\"")]
#[case("tokenizer.ggml.model", None, "tokenizer.ggml.model: absent")]
#[case("tokenizer.ggml.pre", Some(Value::String("viking".into())), "tokenizer.ggml.pre: \"viking\", is not known")]
#[case(
    "tokenizer.ggml.pre",
    Some(Value::U8(1)),
    "tokenizer.ggml.pre: 1, must be a text"
)]
#[case("tokenizer.ggml.tokens", None, "tokenizer.ggml.tokens: absent")]
#[case(
    "tokenizer.ggml.tokens",
    Some(Value::U8(1)),
    "tokenizer.ggml.tokens: 1, must be an array of texts"
)]
#[case("tokenizer.ggml.tokens", Some(texts(vec!["a"; 107])), "tokenizer.ggml.tokens: \"a\" is both token 0 and token 1")]
#[case("tokenizer.ggml.token_type", Some(Value::Array(vec![Value::I32(1)])), "tokenizer.ggml.token_type: an array of 1 whole numbers, must be")]
#[case("tokenizer.ggml.merges", None, "tokenizer.ggml.merges: absent")]
#[case("tokenizer.ggml.merges", Some(texts(["h e", "he"])), "tokenizer.ggml.merges: entry 1 is \"he\"")]
#[case("tokenizer.ggml.merges", Some(texts(["q x"])), "tokenizer.ggml.merges: ")]
#[case(
    "tokenizer.ggml.eos_token_id",
    Some(Value::U32(1000)),
    "tokenizer.ggml.eos_token_id: 1000, must be the number of one of"
)]
#[case("tokenizer.ggml.bos_token_id", Some(Value::I32(-1)), "tokenizer.ggml.bos_token_id: -1, must be")]
#[case("tokenizer.chat_template", Some(Value::String("{% if %}".into())), "tokenizer.chat_template: chat template, line 1")]
#[case("tokenizer.huggingface.json", Some(Value::String("{".into())), "tokenizer.huggingface.json: ")]
fn metadata_that_is_no_tokenizer_is_refused_by_key(
    #[case] key: &str,
    #[case] value: Option<Value>,
    #[case] expected: &str,
) {
    let mut metadata = metadata();
    match value {
        Some(value) => metadata.insert(key.to_owned(), value),
        None => metadata.remove(key),
    };
    let message = refusal(Folder::new().load(&metadata));
    assert!(message.contains("model.gguf: "), "{message}");
    assert!(message.contains(expected), "{message}");
}

#[test]
fn more_tokens_than_rows_are_refused() {
    let mut metadata = metadata();
    let more = (0..4).map(|at| format!("more{at}"));
    let tokens = texts(tokens().into_iter().chain(more));
    metadata.insert("tokenizer.ggml.tokens".into(), tokens);
    metadata.remove("tokenizer.ggml.token_type");
    let message = refusal(Folder::new().load(&metadata));
    assert!(
        message.contains("is \"more3\", but the model has only"),
        "{message}"
    );
}

#[rstest]
#[case("tokenizer_config.json", json!({"eos_token": 3}), "tokenizer_config.json: eos_token: 3, must be a text")]
#[case("tokenizer_config.json", json!({"chat_template": 3}), "tokenizer_config.json: chat_template: must be a text")]
#[case("tokenizer_config.json", json!({"chat_template": "{{"}), "tokenizer_config.json: chat template, line 1")]
#[case("tokenizer_config.json", json!([]), "tokenizer_config.json: must be a mapping of keys")]
#[case("generation_config.json", json!({"eos_token_id": "x"}), "generation_config.json: eos_token_id: \"x\"")]
#[case("generation_config.json", json!({"eos_token_id": [2, 5000]}), "eos_token_id: 5000, but the model has only")]
#[case("tokenizer.json", json!({}), "tokenizer.json: ")]
#[case("tokenizer_config.json", json!({"eos_token": {"content": 7}}), "eos_token.content: 7, must be a text")]
#[case("config.json", json!({}), "config.json: model_type: absent")]
// Absent sizes fall back to transformers' defaults, which no such model has.
#[case("config.json", json!({"model_type": "llama"}), "tensors: missing [\"lm_head.weight\", \"model.layers.1.input_layernorm.weight\",")]
fn a_folder_with_a_file_that_makes_no_sense_is_refused_by_its_name(
    #[case] file: &str,
    #[case] contents: serde_json::Value,
    #[case] expected: &str,
) {
    let folder = Folder::new();
    fs::write(folder.saved().join(file), contents.to_string()).unwrap();
    let message = folder.refused();
    assert!(message.contains(expected), "{message}");
}

/// `tokenizers` panics on these.
#[rstest]
#[case(
    r#"{"decoder": {"type": : 1}}"#,
    "tokenizer.json: there must be a value at line 1"
)]
#[case(
    r#"{"normalizer": {"type": "Precompiled"}}"#,
    "tokenizer.json: normalizer: Precompiled: precompiled_charsmap: absent, must be given"
)]
#[case(
    r#"{"normalizer": {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": "AAAA"}]}}"#,
    "tokenizer.json: normalizer: Precompiled: "
)]
fn a_text_that_is_no_tokenizer_is_refused(#[case] json: &str, #[case] expected: &str) {
    let folder = Folder::new();
    fs::write(folder.saved().join("tokenizer.json"), json).unwrap();
    let message = folder.refused();
    assert!(message.contains(expected), "{message}");
}

#[test]
fn a_folder_has_what_older_and_newer_programs_write() -> Result<()> {
    let folder = Folder::new();
    let path = folder.saved();
    let config = json!({
        "bos_token": {"content": "<|im_start|>", "special": true}, "eos_token": "<|im_end|>", "unk_token": "<absent>",
        "chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ eos_token }}"}],
    });
    fs::write(path.join("tokenizer_config.json"), config.to_string())?;
    fs::write(
        path.join("generation_config.json"),
        r#"{"eos_token_id": 0}"#,
    )?;
    let read = Pretrained::load(&path, &Device::Cpu)?;
    let tokens = &read.special_tokens;
    assert_eq!(tokens.bos.as_ref().unwrap().id, 1);
    assert_eq!((tokens.unk.is_none(), tokens.pad.is_none()), (true, true));
    assert_eq!(tokens.stop_token_ids, [0, 2]);
    let render = |read: Pretrained| read.chat_template.unwrap().render(&Chat::new(json!([])));
    assert_eq!(render(read)?, "<|im_end|>");

    fs::write(path.join("chat_template.jinja"), "newer")?;
    assert_eq!(render(Pretrained::load(&path, &Device::Cpu)?)?, "newer");
    // With none of these files the model still loads; config.json says where it stops.
    for file in [
        "chat_template.jinja",
        "tokenizer_config.json",
        "generation_config.json",
    ] {
        fs::remove_file(path.join(file))?;
    }
    let bare = Pretrained::load(&path, &Device::Cpu)?;
    assert!(bare.chat_template.is_none());
    assert_eq!(bare.special_tokens.stop_token_ids, [2, 0]);
    Ok(())
}

#[test]
fn weights_that_do_not_fit_are_named_with_their_folder() {
    let folder = Folder::new();
    let weights = folder.saved().join("model.safetensors");
    let whole = fs::read(&weights).unwrap();
    fs::write(&weights, &whole[..whole.len() / 2]).unwrap();
    let torn = folder.refused();
    assert!(torn.contains("model.safetensors: "), "{torn}");
    fs::remove_file(weights).unwrap();
    let absent = folder.refused();
    assert!(absent.contains("model.safetensors: "), "{absent}");
    let nowhere = refusal(Pretrained::load("nowhere".as_ref(), &Device::Cpu));
    assert!(nowhere.starts_with("loading nowhere: "), "{nowhere}");
}

fn rendered(model: &Pretrained) -> [String; 2] {
    let template = model.chat_template.as_ref().unwrap();
    let chat = Chat::new(json!([{"content": "he"}]));
    let with_tools = chat.clone().tools(json!([{"name": "f"}]));
    [&chat, &with_tools].map(|chat| template.render(chat).unwrap())
}

/// transformers uses `tool_use` for tools, and separate files in place of `tokenizer_config.json`.
#[test]
fn the_template_for_tools_is_read_and_kept() -> Result<()> {
    let folder = Folder::new();
    let model = folder.saved();
    let path = model.join("tokenizer_config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    config["chat_template"] = json!([
        {"name": "tool_use", "template": "T{{ messages[0].content }}"},
        {"name": "default", "template": "D{{ messages[0].content }}"},
        {"name": "rag", "template": "R"},
    ]);
    fs::write(&path, config.to_string())?;
    let first = Pretrained::load(&model, &Device::Cpu)?;
    assert_eq!(rendered(&first), ["Dhe", "The"]);
    let copies = [
        folder.folder.path().join("copy"),
        folder.folder.path().join("copy.gguf"),
    ];
    first.save(&copies[0])?;
    first.save_gguf(&copies[1], GgufDType::F32)?;
    for copy in &copies {
        let copy = Pretrained::load(copy, &Device::Cpu)?;
        assert_eq!(rendered(&copy), ["Dhe", "The"]);
        let named = copy.chat_template.unwrap();
        let names: Vec<&str> = named.named().map(|(name, _)| name).collect();
        assert_eq!(names, ["rag", "tool_use"]);
    }
    fs::create_dir(model.join("additional_chat_templates"))?;
    let file = "additional_chat_templates/tool_use.jinja";
    fs::write(model.join(file), "F{{ messages[0].content }}\r\n")?;
    let words = "chat templates [\"tool_use\"], must have one named \"default\"";
    assert!(folder.refused().contains(words), "{}", folder.refused());
    fs::write(
        model.join("chat_template.jinja"),
        "J{{ messages[0].content }}",
    )?;
    let second = Pretrained::load(&model, &Device::Cpu)?;
    assert_eq!(rendered(&second), ["Jhe", "Fhe"]);
    Ok(())
}

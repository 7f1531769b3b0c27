//! Answers of a real vLLM, which `scripts/record-engines` records, through the client.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;

use candle_grpo_nn::{DecoderConfig, Lora, LoraConfig, Parameters};
use candle_grpo_test_support::{HttpServer, Reply, device};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::ServerGenerator;
use candle_grpo_train::rollout::{Engine, PolicyWeights, RolloutConfig, WeightSync};
use candle_grpo_train::{FinishReason, Generator, Prompt, Rollout, Sampler, SamplingConfig};
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::model;

/// The vocabulary of the recorded model.
const VOCABULARY: usize = 512;

fn recording(name: &str) -> Value {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/train/engines/recordings/vllm"
    );
    let path = format!("{folder}/{name}.json");
    let text = fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_json::from_slice(&text).unwrap()
}

/// Answers each path with a recording.
fn replay(names: &[(&str, &str)]) -> HttpServer {
    let replies: HashMap<String, Reply> = names
        .iter()
        .map(|(path, name)| {
            let response = &recording(name)["response"];
            let body = match &response["body"] {
                Value::String(text) => text.clone(),
                // The version that the test sends.
                value => value
                    .to_string()
                    .replace("step-1", "policy-000001")
                    .replace(r#""id":"adapter""#, r#""id":"policy-000001""#),
            };
            let status = response["status"].as_u64().unwrap() as u16;
            ((*path).to_owned(), Reply::new(status, body))
        })
        .collect();
    HttpServer::start(move |request| {
        let reply = replies.get(request.path()).cloned();
        reply.unwrap_or_else(|| Reply::new(404, r#"{"detail": "Not Found"}"#))
    })
}

/// A client of one server, whose folder of weights it keeps.
fn client(server: &HttpServer, sync: WeightSync, sampling: &SamplingConfig) -> Client {
    let config = RolloutConfig {
        engine: Engine::Vllm,
        base_url: vec![server.url()],
        weight_sync: sync,
        request_timeout: 600.,
        server_timeout: 0.2,
        max_retries: 1,
        // The weights of the recorded model are not here.
        log_prob_tolerance: 1e6,
        ..RolloutConfig::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights");
    let generator = ServerGenerator::new(&config, sampling, VOCABULARY, &path).unwrap();
    Client {
        generator: Arc::new(generator),
        _folder: folder,
    }
}

struct Client {
    generator: Arc<ServerGenerator>,
    _folder: TempDir,
}

impl Client {
    /// Draws the recorded completion.
    fn draw(&self, request: &Value, sampling: &SamplingConfig) -> anyhow::Result<Rollout> {
        let generator: Arc<dyn Generator> = Arc::clone(&self.generator) as _;
        let sampler = Sampler::from_generator(generator, VOCABULARY, sampling.clone())?
            .with_text_decoder(|_| Ok(String::new()));
        let prompt = Prompt {
            index: 0,
            text: String::new(),
            tokens: serde_json::from_value(request["prompt"].clone())?,
            columns: Value::Null,
        };
        Ok(sampler.sample(&[&prompt], 1, 0)?.remove(0))
    }
}

/// The settings of a recorded request.
fn sampling(request: &Value) -> SamplingConfig {
    let list = |name: &str| request[name].as_array().cloned().unwrap_or_default();
    let temperature = request["temperature"].as_f64().unwrap();
    SamplingConfig {
        greedy: temperature == 0.,
        temperature: if temperature == 0. { 1. } else { temperature },
        max_new_tokens: request["max_tokens"].as_u64().unwrap().max(1) as usize,
        stop_token_ids: serde_json::from_value(Value::Array(list("stop_token_ids"))).unwrap(),
        stop_strings: serde_json::from_value(Value::Array(list("stop"))).unwrap(),
        ..SamplingConfig::default()
    }
}

/// A recorded request through the client, and the answer `name` of the server.
struct Replayed {
    server: HttpServer,
    request: Value,
    sampling: SamplingConfig,
    drawn: anyhow::Result<Rollout>,
}

impl Replayed {
    fn new(request: &str, name: &str) -> Self {
        let request = recording(request)["request"]["body"].take();
        let sampling = sampling(&request);
        let server = replay(&[
            ("/health", "health"),
            ("/v1/models", "models"),
            ("/v1/completions", name),
        ]);
        let client = client(&server, WeightSync::None, &sampling);
        let drawn = client.draw(&request, &sampling);
        Self {
            server,
            request,
            sampling,
            drawn,
        }
    }
}

#[rstest]
#[case("one", FinishReason::Length)]
#[case("stop_token", FinishReason::StopToken)]
#[case("stop_string", FinishReason::StopString)]
#[case("eos", FinishReason::StopToken)]
fn a_recorded_completion_is_read(#[case] name: &str, #[case] reason: FinishReason) {
    let replayed = Replayed::new(name, name);
    let completion = replayed.drawn.unwrap().completion;

    let recorded = recording(name);
    let choice = &recorded["response"]["body"]["choices"][0];
    assert_eq!(json!(completion.tokens), choice["token_ids"]);
    assert_eq!(completion.finish_reason, reason);
    let log_probs = choice["logprobs"]["token_logprobs"].as_array().unwrap();
    assert_eq!(log_probs.len(), completion.tokens.len());
    if !replayed.sampling.greedy {
        let pairs = log_probs.iter().zip(&completion.drawn_log_probs);
        for (recorded, found) in pairs {
            assert_eq!(recorded.as_f64().unwrap() as f32, *found);
        }
    }
    // The client sends what the real server understood.
    let requests = replayed.server.requests();
    let sent: Value = serde_json::from_slice(&requests.last().unwrap().body).unwrap();
    for (field, value) in replayed.request.as_object().unwrap() {
        let same = match value.as_f64() {
            Some(number) => sent[field].as_f64() == Some(number),
            None => sent[field] == *value,
        };
        assert!(
            same || ["n", "seed", "logit_bias"].contains(&field.as_str()),
            "{field}: {sent}"
        );
    }
}

#[rstest]
#[case("error_vocabulary", 400)]
#[case("error_too_long", 400)]
#[case("error_max_tokens", 400)]
#[case("error_model", 404)]
#[case("error_key", 401)]
fn a_recorded_error_is_an_error_with_its_message(#[case] name: &str, #[case] status: u16) {
    let answer = &recording(name)["response"];
    assert_eq!(answer["status"], status);
    let body = &answer["body"];
    let message = body["error"]["message"]
        .as_str()
        .or(body["error"].as_str())
        .unwrap();
    let replayed = Replayed::new("one", name);
    let text = format!("{:#}", replayed.drawn.unwrap_err());
    let start: String = message.chars().take(100).collect();
    let url = replayed.server.url();
    assert!(
        text.contains(&format!("{url}: status {status}: {start}")),
        "{text}"
    );
}

/// The settings of the recorded completions.
fn six_tokens() -> SamplingConfig {
    sampling(&recording("one")["request"]["body"])
}

/// Sends weights of version 1.
fn push(server: &HttpServer, sync: WeightSync) -> anyhow::Result<()> {
    let model = DecoderConfig {
        vocab_size: VOCABULARY,
        ..model()
    };
    let parameters = Parameters::init(&model, 1, device()).unwrap();
    let adapters = Lora::init(LoraConfig::all_linear(2, 4.), &model, 1, device()).unwrap();
    let weights = PolicyWeights {
        version: 1,
        model: &model,
        parameters: &parameters,
        adapters: (sync == WeightSync::Adapter).then_some(&adapters),
    };
    let client = client(server, sync, &six_tokens());
    client.generator.weights_changed(&weights, &NoProgress)
}

const DISK: [(&str, &str); 9] = [
    ("/health", "health"),
    ("/v1/models", "models"),
    ("/v1/completions", "updated"),
    ("/pause", "pause"),
    ("/collective_rpc", "reload"),
    ("/reset_prefix_cache", "reset_prefix_cache"),
    ("/update_weight_version", "update_weight_version"),
    ("/resume", "resume"),
    ("/weight_info", "weight_info_updated"),
];

#[test]
fn recorded_answers_to_whole_weights_are_a_success() {
    push(&replay(&DISK), WeightSync::Disk).unwrap();
    let mut old = DISK;
    old[8].1 = "weight_info";
    let error = push(&replay(&old), WeightSync::Disk).unwrap_err();
    assert!(format!("{error:#}").contains("policy-000001"), "{error:#}");
}

#[rstest]
#[case("adapter_in_place", None)]
#[case("adapter_missing", Some("status 404"))]
fn a_recorded_answer_to_an_adapter_is_read(#[case] name: &str, #[case] words: Option<&str>) {
    let server = replay(&[
        ("/health", "health"),
        ("/v1/models", "models_adapter"),
        ("/v1/load_lora_adapter", name),
        ("/v1/completions", "adapter_two"),
    ]);
    let pushed = push(&server, WeightSync::Adapter).map_err(|e| format!("{e:#}"));
    match words {
        None => pushed.unwrap(),
        Some(words) => {
            let text = pushed.unwrap_err();
            assert!(
                text.contains(words) && text.contains(&server.url()),
                "{text}"
            );
        }
    }
}

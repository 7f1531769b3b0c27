//! Real servers' answers, which `scripts/record-engines` records, through the client.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;

use anyhow::Result;
use candle_grpo_nn::{DecoderConfig, Lora, LoraConfig, Parameters};
use candle_grpo_test_support::{HttpServer, Reply, device};
use candle_grpo_train::learn::{Teacher as _, TeacherDistributions};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::{ServerGenerator, ServerTeacher};
use candle_grpo_train::rollout::{Engine, PolicyWeights, RolloutConfig, WeightSync};
use candle_grpo_train::{
    FinishReason, Generator, Prompt, Rollout, Sampler, SamplingConfig, TokenBatch,
};
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::model;

/// Recordings from one kind of server.
#[derive(Clone, Copy)]
struct Recordings {
    engine: Engine,
    folder: &'static str,
    vocab_size: usize,
}

const VLLM: Recordings = Recordings {
    engine: Engine::Vllm,
    folder: "vllm",
    vocab_size: 512,
};

const LLAMA: Recordings = Recordings {
    engine: Engine::Openai,
    folder: "llama",
    vocab_size: 49152,
};

impl Recordings {
    fn read(self, name: &str) -> Value {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/train/engines/recordings"
        );
        let path = format!("{folder}/{}/{name}.json", self.folder);
        let text = fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        serde_json::from_slice(&text).unwrap()
    }

    /// Answers each path with a recording.
    fn replay(self, names: &[(&str, &str)]) -> HttpServer {
        let replies: HashMap<String, Reply> = names
            .iter()
            .map(|(path, name)| {
                let response = &self.read(name)["response"];
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

    /// A client for one server.
    fn client(self, server: &HttpServer, sync: WeightSync, sampling: &SamplingConfig) -> Client {
        let config = RolloutConfig {
            engine: self.engine,
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
        Client {
            generator: ServerGenerator::new(&config, sampling, self.vocab_size, &path).unwrap(),
            vocab_size: self.vocab_size,
            _folder: folder,
        }
    }
}

/// A client, and its weight directory.
struct Client {
    generator: ServerGenerator,
    vocab_size: usize,
    _folder: TempDir,
}

impl Client {
    /// Samples the recorded completion.
    fn draw(self, request: &Value, sampling: &SamplingConfig) -> anyhow::Result<Rollout> {
        let generator: Arc<dyn Generator> = Arc::new(self.generator);
        let sampler = Sampler::from_generator(generator, self.vocab_size, sampling.clone())?
            .with_text_decoder(|_| Ok(String::new()));
        let prompt = Prompt {
            index: 0,
            text: String::new(),
            messages: Vec::new(),
            tools: None,
            variables: serde_json::Map::new(),
            tokens: serde_json::from_value(request["prompt"].clone())?,
            columns: Value::Null,
        };
        Ok(sampler.sample(&[&prompt], 1, 0)?.remove(0))
    }
}

/// A recorded request's settings.
fn sampling(request: &Value) -> SamplingConfig {
    let list = |name: &str| request[name].as_array().cloned().unwrap_or_default();
    let temperature = request["temperature"].as_f64().unwrap();
    SamplingConfig {
        greedy: temperature == 0.,
        temperature: if temperature == 0. { 1. } else { temperature },
        max_new_tokens: request["max_tokens"].as_u64().unwrap().max(1) as usize,
        stop_token_ids: serde_json::from_value(Value::Array(list("stop_token_ids"))).unwrap(),
        stop_strings: serde_json::from_value(Value::Array(list("stop"))).unwrap(),
        top_p: request["top_p"].as_f64().unwrap(),
        ..SamplingConfig::default()
    }
}

/// A recorded request through the client, and the server's answer `name`.
struct Replayed {
    server: HttpServer,
    request: Value,
    sampling: SamplingConfig,
    drawn: anyhow::Result<Rollout>,
}

impl Replayed {
    fn new(recordings: Recordings, request: &str, name: &str) -> Self {
        Self::with_client(recordings, request, name, |client| client)
    }

    fn with_client(
        recordings: Recordings,
        request: &str,
        name: &str,
        change: impl FnOnce(ServerGenerator) -> ServerGenerator,
    ) -> Self {
        let request = recordings.read(request)["request"]["body"].take();
        let sampling = sampling(&request);
        let server = recordings.replay(&[
            ("/health", "health"),
            ("/v1/models", "models"),
            ("/v1/completions", name),
        ]);
        let mut client = recordings.client(&server, WeightSync::None, &sampling);
        client.generator = change(client.generator);
        let drawn = client.draw(&request, &sampling);
        Self {
            server,
            request,
            sampling,
            drawn,
        }
    }

    /// Checks that the client sends what the real server accepted.
    fn assert_sent(&self) {
        let requests = self.server.requests();
        let sent: Value = serde_json::from_slice(&requests.last().unwrap().body).unwrap();
        for (field, value) in self.request.as_object().unwrap() {
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
}

#[rstest]
#[case("one", FinishReason::Length)]
#[case("stop_token", FinishReason::StopToken)]
#[case("stop_string", FinishReason::StopString)]
#[case("eos", FinishReason::StopToken)]
fn a_recorded_completion_is_read(#[case] name: &str, #[case] reason: FinishReason) {
    let replayed = Replayed::new(VLLM, name, name);
    replayed.assert_sent();
    let completion = replayed.drawn.unwrap().completion;

    let recorded = VLLM.read(name);
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
}

#[rstest]
#[case("one", FinishReason::Length)]
#[case("truncated", FinishReason::Length)]
#[case("greedy", FinishReason::Length)]
#[case("eos", FinishReason::StopToken)]
#[case("stop_string", FinishReason::StopString)]
fn a_recorded_completion_of_llama_cpp_is_read(#[case] name: &str, #[case] reason: FinishReason) {
    let replayed = Replayed::new(LLAMA, name, name);
    replayed.assert_sent();
    let completion = replayed.drawn.unwrap().completion;

    let recorded = LLAMA.read(name);
    let answer = &recorded["response"]["body"]["__verbose"];
    assert_eq!(json!(completion.tokens), answer["tokens"]);
    assert_eq!(completion.finish_reason, reason);
    // The log-probs of the draw, after temperature and filters.
    let entries = answer["completion_probabilities"].as_array();
    let log_probs: Vec<f32> = entries
        .into_iter()
        .flatten()
        .map(|entry| (entry["prob"].as_f64().unwrap() as f32).ln())
        .collect();
    if replayed.sampling.greedy {
        assert!(completion.drawn_log_probs.iter().all(|&x| x == 0.))
    } else {
        assert_eq!(completion.drawn_log_probs, log_probs)
    }
}

/// llama.cpp names no log-probs for tokens that end within a character.
#[test]
fn tokens_without_log_probs_are_not_trained_on() {
    let name = "within_character";
    let recorded = LLAMA.read(name);
    let answer = &recorded["response"]["body"]["__verbose"];
    let draw = |change: fn(ServerGenerator) -> ServerGenerator| {
        let replayed = Replayed::with_client(LLAMA, name, name, change);
        let completion = replayed.drawn.unwrap().completion;
        assert_eq!(json!(completion.tokens), answer["tokens"]);
        completion
    };
    let completion = draw(|client| client);
    let written = [false, false, true, false, false, true];
    assert_eq!(completion.written.unwrap(), written);
    for (log_prob, written) in completion.drawn_log_probs.iter().zip(written) {
        assert_eq!(*log_prob < 0., written);
    }

    let completion = draw(ServerGenerator::without_log_probs);
    assert_eq!(completion.drawn_log_probs, [0.; 6]);
    assert_eq!(completion.written, None);
}

/// The log-prob list has gaps, so it is not the token list.
#[test]
fn an_answer_of_llama_cpp_without_its_own_form_is_refused() {
    let replayed = Replayed::new(LLAMA, "one", "plain");
    let text = format!("{:#}", replayed.drawn.unwrap_err());
    assert!(text.contains("token_ids: absent"), "{text}");
}

#[rstest]
#[case(VLLM, "error_vocabulary", 400)]
#[case(VLLM, "error_too_long", 400)]
#[case(VLLM, "error_max_tokens", 400)]
#[case(VLLM, "error_model", 404)]
#[case(VLLM, "error_key", 401)]
#[case(LLAMA, "error_vocabulary", 400)]
#[case(LLAMA, "error_too_long", 400)]
#[case(LLAMA, "error_empty_prompt", 400)]
fn a_recorded_error_is_an_error_with_its_message(
    #[case] recordings: Recordings,
    #[case] name: &str,
    #[case] status: u16,
) {
    let answer = &recordings.read(name)["response"];
    assert_eq!(answer["status"], status);
    let body = &answer["body"];
    let message = body["error"]["message"]
        .as_str()
        .or(body["error"].as_str())
        .unwrap();
    let replayed = Replayed::new(recordings, "one", name);
    let text = format!("{:#}", replayed.drawn.unwrap_err());
    let start: String = message.chars().take(100).collect();
    let url = replayed.server.url();
    assert!(
        text.contains(&format!("{url}: status {status}: {start}")),
        "{text}"
    );
}

/// Settings for the recorded completions.
fn six_tokens() -> SamplingConfig {
    sampling(&VLLM.read("one")["request"]["body"])
}

/// Sends weights with version 1.
fn push(server: &HttpServer, sync: WeightSync) -> anyhow::Result<()> {
    let model = DecoderConfig {
        vocab_size: VLLM.vocab_size,
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
    let client = VLLM.client(server, sync, &six_tokens());
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
    push(&VLLM.replay(&DISK), WeightSync::Disk).unwrap();
    let mut old = DISK;
    old[8].1 = "weight_info";
    let error = push(&VLLM.replay(&old), WeightSync::Disk).unwrap_err();
    assert!(format!("{error:#}").contains("policy-000001"), "{error:#}");
}

#[rstest]
#[case("adapter_in_place", None)]
#[case("adapter_missing", Some("status 404"))]
fn a_recorded_answer_to_an_adapter_is_read(#[case] name: &str, #[case] words: Option<&str>) {
    let server = VLLM.replay(&[
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

/// Scores the tokens in a recorded request, where the first two are the prompt. Returns the tokens,
/// the recorded answer's entry for each, and the result from `ask`.
fn scored<T>(
    name: &str,
    ask: impl Fn(&ServerTeacher, &TokenBatch) -> Result<T>,
) -> (Vec<u32>, Vec<Value>, T) {
    let recorded = VLLM.read(name);
    let request = &recorded["request"]["body"];
    let tokens: Vec<u32> = serde_json::from_value(request["prompt"].clone()).unwrap();
    let server = VLLM.replay(&[
        ("/health", "health"),
        ("/v1/models", "models"),
        ("/v1/completions", name),
    ]);
    let config = RolloutConfig {
        engine: Engine::Vllm,
        base_url: vec![server.url()],
        ..RolloutConfig::default()
    };
    let teacher = ServerTeacher::new(&config).unwrap();
    let batch = TokenBatch::new(&[tokens.split_at(2)], device()).unwrap();
    let found = ask(&teacher, &batch).unwrap();
    let requests = server.requests();
    let sent: Value = serde_json::from_slice(&requests.last().unwrap().body).unwrap();
    assert_eq!(sent, *request);
    let named = &recorded["response"]["body"]["choices"][0]["prompt_logprobs"];
    (tokens, named.as_array().unwrap()[2..].to_vec(), found)
}

fn log_prob(entry: &Value) -> f32 {
    entry["logprob"].as_f64().unwrap() as f32
}

#[test]
fn recorded_log_probs_of_given_tokens_are_read() {
    let (tokens, named, found) = scored("scored", |teacher, batch| {
        teacher.log_probs(batch, 1., &NoProgress)
    });
    let expected = tokens[2..].iter().zip(&named);
    let expected = expected.map(|(token, named)| log_prob(&named[token.to_string()]));
    let found: Vec<f32> = found.flatten_all().unwrap().to_vec1().unwrap();
    assert_eq!(found, expected.collect::<Vec<f32>>());
}

/// The answer names the given token as well, which is rarely one of the most likely.
#[test]
fn recorded_most_likely_tokens_are_read_by_their_rank() {
    let (_, named, found) = scored("scored_most_likely", |teacher, batch| {
        teacher.distributions(batch, Some(3), &NoProgress)
    });
    let TeacherDistributions::TopK { ids, log_probs } = found else {
        panic!("no entries");
    };
    let ids = ids.to_vec3::<u32>().unwrap();
    let log_probs = log_probs.to_vec3::<f32>().unwrap();
    assert_eq!((ids.len(), ids[0].len()), (1, named.len()));
    for ((named, ids), log_probs) in named.iter().zip(&ids[0]).zip(&log_probs[0]) {
        assert_eq!(ids.len(), 3);
        for ((rank, id), found) in (1u64..).zip(ids).zip(log_probs) {
            let entry = &named[id.to_string()];
            assert_eq!(entry["rank"].as_u64(), Some(rank));
            assert_eq!(*found, log_prob(entry));
        }
    }
}

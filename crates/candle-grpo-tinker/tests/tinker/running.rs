//! A running server with a tiny model, and its client.

use std::path::Path;

use candle_core::Device;
use candle_grpo_nn::{DecoderConfig, Parameters};
use candle_grpo_test_support::TINY_DECODER;
use candle_grpo_tinker::{TinkerConfig, TinkerServer};
use candle_grpo_train::Pretrained;
use candle_grpo_train::model::{SpecialTokens, character_tokenizer};
use serde_json::{Value, json};

/// Name of the model for clients.
pub(crate) const MODEL: &str = "tiny";

/// Tokens of the model: 0 ends a text.
pub(crate) const VOCABULARY: usize = 12;

/// Returns the base model.
pub(crate) fn base() -> (DecoderConfig, Parameters) {
    let mut config: Value = serde_json::from_str(TINY_DECODER).unwrap();
    config["vocab_size"] = VOCABULARY.into();
    config["max_position_embeddings"] = 64.into();
    let config: DecoderConfig = serde_json::from_value(config).unwrap();
    let parameters = Parameters::init(&config, 5, &Device::Cpu).unwrap();
    (config, parameters)
}

/// Returns the base model with its tokenizer.
pub(crate) fn pretrained() -> Pretrained {
    let (model, parameters) = base();
    let tokenizer = character_tokenizer("abcdefghijk").unwrap();
    Pretrained {
        special_tokens: SpecialTokens {
            stop_token_ids: vec![0],
            ..SpecialTokens::default()
        },
        ..Pretrained::new(model, parameters, tokenizer)
    }
}

/// A reply.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) bytes: Vec<u8>,
}

impl Reply {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap_or_else(|_| panic!("{self:?}"))
    }

    /// The error message.
    pub(crate) fn detail(&self) -> String {
        let json = self.json();
        let detail = json["detail"].as_str();
        detail.unwrap_or_else(|| panic!("{json}")).to_owned()
    }
}

/// A server with its address. It stops when dropped.
pub(crate) struct Running {
    _server: TinkerServer,
    pub(crate) url: String,
}

impl Running {
    /// Starts a server on a free port.
    pub(crate) fn start(folder: &Path) -> Self {
        Self::with(TinkerConfig {
            // Several passes for a few examples.
            micro_batch_tokens: 16,
            ..TinkerConfig::new(folder, MODEL)
        })
    }

    pub(crate) fn with(config: TinkerConfig) -> Self {
        Self::serve(config, pretrained())
    }

    pub(crate) fn serve(config: TinkerConfig, pretrained: Pretrained) -> Self {
        Self::of(TinkerServer::start(config, pretrained).unwrap())
    }

    pub(crate) fn of(server: TinkerServer) -> Self {
        let url = format!("http://{}/api/v1/", server.address());
        Self {
            _server: server,
            url,
        }
    }

    pub(crate) fn send(&self, call: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut request = ureq::post(format!("{}{call}", self.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.config().http_status_as_error(false).build();
        let response = request.send(body).unwrap();
        Reply {
            status: response.status().as_u16(),
            bytes: response.into_body().read_to_vec().unwrap(),
        }
    }

    pub(crate) fn try_post(&self, call: &str, body: &Value) -> Reply {
        self.send(
            call,
            &[("content-type", "application/json")],
            body.to_string().as_bytes(),
        )
    }

    /// Posts a body that the server must accept.
    pub(crate) fn post(&self, call: &str, body: &Value) -> Value {
        let reply = self.try_post(call, body);
        assert_eq!(reply.status, 200, "{call}: {}", reply.json());
        reply.json()
    }

    /// Waits for the result of a call.
    pub(crate) fn result(&self, promise: &Value) -> Value {
        loop {
            let reply = self.try_result(promise);
            if reply.status != 408 {
                assert_eq!(reply.status, 200, "{}", reply.json());
                return reply.json();
            }
        }
    }

    /// Gets the result of a call, if there is one now.
    pub(crate) fn try_result(&self, promise: &Value) -> Reply {
        let id = json!({"request_id": promise["request_id"]});
        self.try_post("retrieve_future", &id)
    }

    /// Waits for the results of several calls.
    pub(crate) fn results(&self, promises: &[Value]) -> Vec<Value> {
        promises
            .iter()
            .map(|promise| self.result(promise))
            .collect()
    }

    /// Posts a body, and waits for the result.
    pub(crate) fn call(&self, call: &str, body: &Value) -> Value {
        self.result(&self.post(call, body))
    }

    pub(crate) fn session(&self) -> String {
        let session = self.post("create_session", &json!({"tags": [], "sdk_version": "0"}));
        session["session_id"].as_str().unwrap().to_owned()
    }

    /// Occupies the engine with samples, until they are canceled.
    pub(crate) fn occupy(&self) -> Value {
        let body = json!({
            "base_model": MODEL,
            "num_samples": 4096,
            "prompt": {"chunks": [{"tokens": [1]}]},
            "sampling_params": {"stop": []},
        });
        self.post("asample", &body)
    }

    /// Cancels a call.
    pub(crate) fn cancel(&self, promise: &Value) {
        let id = json!({"request_id": promise["request_id"]});
        self.post("cancel_future", &id);
    }

    /// Creates a session with a model, and returns the model's id.
    pub(crate) fn new_model(&self) -> String {
        self.model(&self.session(), 0, 1)
    }

    /// Creates a model, and returns its id.
    pub(crate) fn model(&self, session: &str, number: u64, seed: u64) -> String {
        let body = json!({
            "session_id": session,
            "model_seq_id": number,
            "base_model": MODEL,
            "lora_config": {"rank": 4, "seed": seed},
        });
        let created = self.call("create_model", &body);
        created["model_id"].as_str().unwrap().to_owned()
    }
}

/// A one-dimensional tensor of numbers.
pub(crate) fn numbers(values: &[f32]) -> Value {
    json!({"data": values, "dtype": "float32", "shape": [values.len()]})
}

/// A one-dimensional tensor of tokens.
pub(crate) fn tokens(values: &[u32]) -> Value {
    json!({"data": values, "dtype": "int64", "shape": [values.len()]})
}

/// An example for `cross_entropy`.
pub(crate) fn example(text: &[u32]) -> Value {
    let (read, targets) = (&text[..text.len() - 1], &text[1..]);
    json!({
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": read}]},
        "loss_fn_inputs": {
            "target_tokens": tokens(targets),
            "weights": numbers(&vec![1.; targets.len()]),
        },
    })
}

/// A body for `forward_backward`.
pub(crate) fn pass(model: &str, seq: u64, loss: &str, data: &[Value]) -> Value {
    json!({
        "model_id": model,
        "seq_id": seq,
        "forward_backward_input": {"data": data, "loss_fn": loss},
    })
}

/// A body for `optim_step`.
pub(crate) fn step(model: &str, seq: u64) -> Value {
    json!({"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.01}})
}

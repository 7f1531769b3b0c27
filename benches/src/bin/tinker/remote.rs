//! The loop through the API.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use candle_grpo_bench::Connection;
use candle_grpo_train::learn::TargetRow;
use serde_json::{Value, json};

use crate::{Drawn, GROUP, LEARNING_RATE, RANK, SEED, TOKENS, prompts, rows, seed};

/// Name of the model for clients.
pub(crate) const MODEL: &str = "model";

/// A session with a model.
pub(crate) struct Client {
    connection: Connection,
    session: String,
    model: String,
    /// Number of the last request to the model.
    seq: u64,
    /// Sampling session of the base model, and later of the session's own model.
    sampler: Value,
}

/// The tensors of a row.
fn example(row: &TargetRow) -> Value {
    let flat = |data: Value, dtype: &str| json!({"data": data, "dtype": dtype});
    json!({
        "model_input": {"chunks": [{"tokens": row.tokens}]},
        "loss_fn_inputs": {
            "target_tokens": flat(json!(row.targets), "int64"),
            "logprobs": flat(json!(row.rollout_log_probs), "float32"),
            "advantages": flat(json!(row.advantages), "float32"),
        },
    })
}

fn samples(result: &Value) -> Result<Vec<Drawn>> {
    let sequences = result["sequences"].as_array();
    let sequences = sequences.with_context(|| format!("sequences in {result}"))?;
    let drawn = sequences.iter().map(|sequence| {
        Ok(Drawn {
            tokens: serde_json::from_value(sequence["tokens"].clone())?,
            log_probs: serde_json::from_value(sequence["logprobs"].clone())?,
        })
    });
    drawn.collect()
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Result<Self> {
        let mut client = Self {
            connection: Connection::open(address)?,
            session: String::new(),
            model: String::new(),
            seq: 0,
            sampler: Value::Null,
        };
        let session = client.post("create_session", &json!({}))?;
        client.session = text(&session, "session_id")?;
        let session = client.session.clone();
        let create = json!({
            "session_id": session, "model_seq_id": 0, "base_model": MODEL,
            "lora_config": {"rank": RANK, "seed": SEED},
        });
        let created = client.call("create_model", &create)?;
        client.model = text(&created, "model_id")?;
        let create = json!({
            "session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL,
        });
        let created = client.post("create_sampling_session", &create)?;
        client.sampler = created["sampling_session_id"].clone();
        Ok(client)
    }

    fn post(&mut self, call: &str, body: &Value) -> Result<Value> {
        let (status, body) = self.connection.post(&format!("/api/v1/{call}"), "", body)?;
        ensure!(status == 200, "{call}: {status} {body}");
        Ok(body)
    }

    /// Waits for a promised result.
    pub(crate) fn result(&mut self, promise: &Value) -> Result<Value> {
        let id = json!({"request_id": promise["request_id"]});
        loop {
            let path = "/api/v1/retrieve_future";
            let (status, body) = self.connection.post(path, "", &id)?;
            if status != 408 {
                ensure!(status == 200 && body["error"].is_null(), "{status} {body}");
                return Ok(body);
            }
        }
    }

    fn call(&mut self, call: &str, body: &Value) -> Result<Value> {
        let promise = self.post(call, body)?;
        self.result(&promise)
    }

    /// Returns a body with the next number of the model.
    fn numbered(&mut self, mut body: Value) -> Value {
        self.seq += 1;
        body["model_id"] = json!(self.model);
        body["seq_id"] = json!(self.seq);
        body
    }

    /// Makes a step. Returns its samples.
    pub(crate) fn step(&mut self, step: u64) -> Result<Vec<Drawn>> {
        let save = self.numbered(json!({"sampling_session_seq_id": step + 1}));
        let saved = self.call("save_weights_for_sampler", &save)?;
        let prompts = prompts();
        let promises = prompts.iter().enumerate().map(|(at, prompt)| {
            let request = json!({
                "sampling_session_id": saved["sampling_session_id"], "seq_id": at,
                "num_samples": GROUP, "prompt": {"chunks": [{"tokens": prompt}]},
                "sampling_params": {"max_tokens": TOKENS, "seed": seed(step, at), "stop": []},
            });
            self.post("asample", &request)
        });
        let promises: Vec<Value> = promises.collect::<Result<_>>()?;
        let mut drawn = Vec::new();
        let mut data = Vec::new();
        for (prompt, promise) in prompts.iter().zip(&promises) {
            let group = samples(&self.result(promise)?)?;
            data.extend(rows(prompt, &group).iter().map(example));
            drawn.extend(group);
        }
        let input = json!({"data": data, "loss_fn": "importance_sampling"});
        let pass = self.numbered(json!({"forward_backward_input": input}));
        let adam = json!({"learning_rate": LEARNING_RATE, "beta2": 0.95, "eps": 1e-12});
        let step = self.numbered(json!({"adam_params": adam}));
        let promises = [
            self.post("forward_backward", &pass)?,
            self.post("optim_step", &step)?,
        ];
        for promise in &promises {
            self.result(promise)?;
        }
        Ok(drawn)
    }

    /// Sends a request without work.
    pub(crate) fn heartbeat(&mut self) -> Result<()> {
        let body = json!({"session_id": self.session});
        self.post("session_heartbeat", &body).map(|_| ())
    }

    /// Computes log-probs of one example.
    pub(crate) fn forward(&mut self) -> Result<()> {
        let body = self.numbered(json!({"forward_input": likelihood(16)}));
        self.call("forward", &body).map(|_| ())
    }

    /// Promises a pass over an example with this number of tokens.
    pub(crate) fn promise_pass(&mut self, tokens: u32) -> Result<Value> {
        let body = self.numbered(json!({"forward_backward_input": likelihood(tokens)}));
        self.post("forward_backward", &body)
    }

    /// Makes a step, and samples from the model from now on.
    pub(crate) fn save(&mut self) -> Result<()> {
        let step = self.numbered(json!({"adam_params": {"learning_rate": LEARNING_RATE}}));
        self.call("optim_step", &step)?;
        let save = self.numbered(json!({"sampling_session_seq_id": 1}));
        let saved = self.call("save_weights_for_sampler", &save)?;
        self.sampler = saved["sampling_session_id"].clone();
        Ok(())
    }

    /// Promises a sample.
    pub(crate) fn promise_samples(&mut self, seq: u64) -> Result<Value> {
        let body = json!({
            "sampling_session_id": self.sampler, "seq_id": seq,
            "prompt": {"chunks": [{"tokens": [1, 2, 3, 4]}]},
            "sampling_params": {"max_tokens": TOKENS, "stop": []},
        });
        self.post("asample", &body)
    }

    /// Samples one token from the base model.
    pub(crate) fn sample_one(&mut self, seq: u64) -> Result<()> {
        let body = json!({
            "sampling_session_id": self.sampler, "seq_id": seq,
            "prompt": {"chunks": [{"tokens": [1, 2, 3, 4]}]},
            "sampling_params": {"max_tokens": 1, "stop": []},
        });
        self.call("asample", &body).map(|_| ())
    }
}

/// An input for `cross_entropy`: one example with this number of tokens.
fn likelihood(tokens: u32) -> Value {
    let tokens: Vec<u32> = (0..tokens).map(|at| at % 15).collect();
    let target_tokens = json!({"data": tokens, "dtype": "int64"});
    let data = json!([{
        "model_input": {"chunks": [{"tokens": tokens}]},
        "loss_fn_inputs": {"target_tokens": target_tokens},
    }]);
    json!({"data": data, "loss_fn": "cross_entropy"})
}

fn text(body: &Value, name: &str) -> Result<String> {
    let text = body[name].as_str();
    Ok(text
        .with_context(|| format!("{name} in {body}"))?
        .to_owned())
}

//! Runs with completions from real servers on the CPU: `make test-vllm` and `make test-llama`.

mod llama;
mod vllm;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use candle_core::{Device, Tensor};
use candle_grpo::nn::{DecoderConfig, Parameters};
use candle_grpo::train::Pretrained;
use candle_grpo_test_support::ReservedPort;
use serde_json::{Value, json};

use crate::support::lines;

/// A server that ends with the value.
struct Server {
    command: Command,
    child: Child,
    port: ReservedPort,
}

impl Server {
    /// Starts `script serve MODEL PORT`.
    fn start(script: &str, model: &Path) -> Self {
        Self::start_with(script, model, &[])
    }

    /// [`Self::start`] with environment variables.
    fn start_with(script: &str, model: &Path, variables: &[(&str, &str)]) -> Self {
        let port = ReservedPort::new();
        let mut command = Command::new(root().join("scripts").join(script));
        command
            .args(["serve".as_ref(), model.as_os_str()])
            .arg(port.number().to_string())
            .envs(variables.iter().copied());
        Self {
            child: command.spawn().unwrap(),
            command,
            port,
        }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port.number())
    }

    /// Waits until it can sample.
    #[cfg(feature = "tinker")]
    fn wait(&mut self) {
        let health = format!("{}/health", self.url());
        while ureq::get(&health).call().is_err() {
            assert!(self.child.try_wait().unwrap().is_none(), "it has ended");
            std::thread::sleep(std::time::Duration::from_secs(1));
        }
    }

    fn kill(&mut self) {
        // vLLM's answer to SIGTERM is to wait for its clients, which wait for their completions.
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts a server that was killed, at the same port.
    fn restart(&mut self) {
        self.child = self.command.spawn().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.kill();
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// SmolLM2-135M-Instruct, as a Hugging Face folder.
fn model() -> PathBuf {
    let models = env::var_os("GRPO_MODELS").expect("GRPO_MODELS: run this by make");
    Path::new(&models).join("SmolLM2-135M-Instruct")
}

/// Returns a tiny model of a family, with random weights, the tokens of `tokens`, and the keys of
/// `more` in its `config.json`.
fn tiny(tokens: &Pretrained, family: &str, more: &Value) -> Pretrained {
    let mut config = json!({"model_type": family, "vocab_size": tokens.model.vocab_size,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "tie_word_embeddings": false});
    config
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    let config = serde_json::to_vec(&config).unwrap();
    let config = DecoderConfig::from_hugging_face(&config).unwrap();
    let drawn = Parameters::init(&config, 3, &Device::Cpu).unwrap();
    // The text depends on the prompt.
    let lively = |(name, value): (String, Tensor)| {
        let value = match value.rank() {
            1 => value,
            _ => (value * 10.0).unwrap(),
        };
        (name, value)
    };
    let weights = drawn.frozen_copy().unwrap().into_iter().map(lively);
    let parameters = Parameters::from_tensors(&config, weights.collect(), &Device::Cpu);
    Pretrained {
        model: config,
        parameters: parameters.unwrap(),
        ..tokens.clone()
    }
}

/// Writes the addition-llm example configuration, with some other keys, to `run.json`.
fn write_config(folder: &Path, more: &[(&str, Value)]) {
    let example = root().join("examples/addition-llm");
    let text = fs::read_to_string(example.join("run.yaml")).unwrap();
    let config = candle_grpo::config::RunConfig::new(
        &candle_grpo::config::Document::from_yaml(Path::new("run.yaml"), &text).unwrap(),
    );
    let mut config = config.unwrap().to_value().unwrap();
    config["model"] = json!(model());
    config["run_dir"] = json!("run");
    config["evaluation"]["max_prompts"] = json!(100);
    config["data"]["train"] = json!([example.join("train.jsonl")]);
    config["data"]["held_out"] = json!([example.join("held_out.jsonl")]);
    for (pointer, value) in more {
        *config
            .pointer_mut(pointer)
            .unwrap_or_else(|| panic!("no {pointer}")) = value.clone();
    }
    fs::write(folder.join("run.json"), config.to_string()).unwrap();
}

/// Returns the share of correct held-out answers at each evaluation.
fn rewards(folder: &Path) -> Vec<f64> {
    let evaluations = lines(&folder.join("run/evaluations.jsonl"));
    let reward = |line: &Value| line["reward_mean"].as_f64().unwrap();
    evaluations.iter().map(reward).collect()
}

//! Samples of an engine outside this process.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use candle_grpo_nn::Lora;
use candle_grpo_test_support::WATCHDOG;
use candle_grpo_tinker::{TinkerConfig, TinkerListener};
use candle_grpo_train::rollout::{
    AdapterEngine, Completion, Deliver, GenerationBatch, LocalGenerator, PolicyWeights,
};
use candle_grpo_train::{Generator, Progress};
use serde_json::{Value, json};
use tempfile::tempdir;

use super::running::{MODEL, Running, example, pass, pretrained, step};

/// An engine that samples as this process does.
#[derive(Clone, Default)]
struct Engine {
    /// True if it names log-probs of the policy.
    names_log_probs: bool,
    /// Number of generators that are open.
    open: Arc<AtomicUsize>,
    /// Number of generators that were opened.
    opened: Arc<AtomicUsize>,
    /// True if the next generator cannot be opened.
    fails: Arc<AtomicBool>,
    /// Messages that calls wait for.
    gate: Option<Arc<Mutex<Receiver<()>>>>,
}

impl Engine {
    /// Waits until this number of generators is open. A result is there before its thread has ended
    /// its turn.
    fn wait_for(&self, open: usize) {
        let start = Instant::now();
        while self.open.load(Ordering::Acquire) != open {
            assert!(start.elapsed() < WATCHDOG);
            thread::yield_now();
        }
    }
}

struct Opened {
    generator: LocalGenerator,
    engine: Engine,
}

impl AdapterEngine for Engine {
    fn open(
        &self,
        folder: &Path,
        weights: &PolicyWeights<'_>,
        _: &dyn Progress,
    ) -> Result<Box<dyn Generator>> {
        ensure!(!self.fails.swap(false, Ordering::AcqRel), "no server");
        let device = weights.parameters.device();
        let read = Lora::load(folder, weights.model, device)?;
        let weights = PolicyWeights {
            adapters: Some(&read),
            ..*weights
        };
        self.open.fetch_add(1, Ordering::AcqRel);
        self.opened.fetch_add(1, Ordering::AcqRel);
        Ok(Box::new(Opened {
            generator: LocalGenerator::in_dtype(&weights, candle_grpo_train::ComputeDType::F32)?,
            engine: self.clone(),
        }))
    }
}

impl Generator for Opened {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        if let Some(gate) = &self.engine.gate
            && gate.lock().unwrap().recv_timeout(WATCHDOG).is_err()
        {
            // Instead of a test that hangs.
            bail!("nobody opens the gate");
        }
        self.generator.generate(batch, &mut |place, completion| {
            let named = completion.log_probs.clone();
            let named = named.unwrap_or_else(|| completion.drawn_log_probs.clone());
            let names = self.engine.names_log_probs;
            let completion = Completion {
                log_probs: names.then_some(named),
                // As of a distribution after filters.
                drawn_log_probs: vec![0.; completion.tokens.len()],
                ..completion
            };
            deliver(place, completion)
        })
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.engine.open.fetch_sub(1, Ordering::AcqRel);
    }
}

fn start(folder: &Path, engine: &Engine) -> Running {
    start_with(TinkerConfig::new(folder, MODEL), engine)
}

fn start_with(config: TinkerConfig, engine: &Engine) -> Running {
    let listener = TinkerListener::bind(config).unwrap();
    let listener = listener.with_engine(Arc::new(engine.clone()));
    Running::of(listener.serve(pretrained()).unwrap())
}

/// A request for samples from the base model, or from saved weights.
fn request(weights: &Value, params: Value) -> Value {
    let mut body = json!({
        "num_samples": 3, "prompt_logprobs": true,
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "sampling_params": params,
    });
    match weights {
        Value::Null => body["base_model"] = json!(MODEL),
        path => body["model_path"] = path.clone(),
    }
    body
}

/// Trains a model for a step, and saves its weights under a name that may be taken.
fn weights(server: &Running, model: &str, first: u64) -> Value {
    let data = [example(&[1, 2, 3, 4])];
    let passed = pass(model, first, "cross_entropy", &data);
    server.post("forward_backward", &passed);
    server.post("optim_step", &step(model, first + 1));
    let save = json!({"model_id": model, "path": "a", "seq_id": first + 2, "overwrite": true});
    server.call("save_weights_for_sampler", &save)["path"].clone()
}

/// The samples and log-probs, of the base model and of saved weights, with all kinds of parameters.
fn samples(server: &Running) -> Vec<Value> {
    let model = server.new_model();
    let saved = weights(server, &model, 1);
    let params = [
        json!({"max_tokens": 9, "seed": 7}),
        json!({"max_tokens": 9, "seed": 7, "temperature": 0.5, "top_k": 2}),
        json!({"max_tokens": 9, "seed": 8, "top_p": 0.5, "stop": ["b"]}),
        json!({"max_tokens": 9, "temperature": 0.0}),
    ];
    let weights = [Value::Null, saved];
    let bodies = weights.iter().flat_map(|weights| {
        let bodies = params.iter().map(|params| request(weights, params.clone()));
        bodies.collect::<Vec<_>>()
    });
    let promises: Vec<Value> = bodies.map(|body| server.post("asample", &body)).collect();
    server.results(&promises)
}

/// Compares numbers up to rounding, and everything else exactly.
fn assert_close(found: &Value, expected: &Value) {
    match (found, expected) {
        (Value::Number(a), Value::Number(b)) => {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
        (Value::Array(a), Value::Array(b)) => {
            assert_eq!(a.len(), b.len());
            a.iter().zip(b).for_each(|(a, b)| assert_close(a, b));
        }
        (Value::Object(a), Value::Object(b)) => {
            assert!(a.keys().eq(b.keys()), "{a:?} {b:?}");
            a.values()
                .zip(b.values())
                .for_each(|(a, b)| assert_close(a, b));
        }
        (a, b) => assert_eq!(a, b),
    }
}

#[test]
fn samples_of_an_engine_have_the_log_probs_of_the_policy_over_all_tokens() {
    let folder = tempdir().unwrap();
    let expected = samples(&Running::start(folder.path()));
    for names_log_probs in [true, false] {
        let folder = tempdir().unwrap();
        let engine = Engine {
            names_log_probs,
            ..Engine::default()
        };
        let server = start(folder.path(), &engine);
        let found = samples(&server);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert_close(found, expected);
        }
        // The base model and the saved weights, for all requests.
        assert_eq!(engine.opened.load(Ordering::Acquire), 2);
        drop(server);
        assert_eq!(engine.open.load(Ordering::Acquire), 0);
    }
}

/// An engine whose calls each wait for a message.
fn gated() -> (Engine, Sender<()>) {
    let (sender, receiver) = channel();
    let engine = Engine {
        names_log_probs: true,
        gate: Some(Arc::new(Mutex::new(receiver))),
        ..Engine::default()
    };
    (engine, sender)
}

#[test]
fn training_goes_on_while_an_engine_samples() {
    let folder = tempdir().unwrap();
    let (engine, gate) = gated();
    let server = start(folder.path(), &engine);
    let promise = server.post("asample", &request(&Value::Null, json!({"max_tokens": 2})));
    let model = server.new_model();
    weights(&server, &model, 1);
    gate.send(()).unwrap();
    assert_eq!(
        server.result(&promise)["sequences"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
}

#[test]
fn weights_that_replace_others_are_sampled_from() {
    let folder = tempdir().unwrap();
    let engine = Engine::default();
    let server = start(folder.path(), &engine);
    let model = server.new_model();
    let sample = |path: &Value| {
        let params = json!({"max_tokens": 9, "seed": 7, "stop": []});
        server.call("asample", &request(path, params))
    };
    let first = weights(&server, &model, 1);
    let before = sample(&first);
    let second = weights(&server, &model, 4);
    assert_eq!(first, second);
    let after = sample(&second);
    assert_ne!(before["prompt_logprobs"], after["prompt_logprobs"]);
    engine.wait_for(1);
}

#[test]
fn weights_that_were_unused_longest_are_closed() {
    let folder = tempdir().unwrap();
    let engine = Engine::default();
    let config = TinkerConfig {
        max_loaded_models: 1,
        ..TinkerConfig::new(folder.path(), MODEL)
    };
    let server = start_with(config, &engine);
    let saved = weights(&server, &server.new_model(), 1);
    for path in [&saved, &Value::Null, &saved] {
        server.call("asample", &request(path, json!({"max_tokens": 1})));
        engine.wait_for(1);
    }
    assert_eq!(engine.opened.load(Ordering::Acquire), 3);
}

#[test]
fn an_engine_that_fails_is_asked_again() {
    let folder = tempdir().unwrap();
    let engine = Engine::default();
    let server = start(folder.path(), &engine);
    engine.fails.store(true, Ordering::Release);
    let body = request(&Value::Null, json!({"max_tokens": 1}));
    let failed = server.call("asample", &body);
    assert_eq!(failed["error"], "no server", "{failed}");
    let sampled = server.call("asample", &body);
    assert_eq!(sampled["sequences"].as_array().unwrap().len(), 3);
}

//! Servers that sample from several adapters at the same time.

use std::sync::Arc;

use candle_grpo_test_support::Request;
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::ServerAdapters;
use candle_grpo_train::rollout::{AdapterEngine, Engine, WeightSync};
use candle_grpo_train::{Generator, Rollout, Sampler, SamplingConfig};
use rstest::rstest;
use serde_json::Value;

use super::served_policy::LogProbs;
use super::{Setup, draw_with, short};
use crate::common::model;

/// Saves the adapters of a policy, and opens them.
fn open(
    setup: &Setup,
    engine: &ServerAdapters,
    version: u64,
) -> anyhow::Result<Box<dyn Generator>> {
    let policy = setup.policy(version);
    let adapters = policy.adapters.as_ref().unwrap();
    let folder = setup.folder.path().join(version.to_string());
    std::fs::create_dir(&folder).unwrap();
    adapters.save(&folder, None).unwrap();
    engine.open(&folder, &policy.weights(&model()), &NoProgress)
}

fn draw(generator: &Arc<dyn Generator>, sampling: &SamplingConfig) -> Vec<Rollout> {
    let generator = Arc::clone(generator);
    let sampler = Sampler::from_generator(generator, model().vocab_size, sampling.clone());
    draw_with(&sampler.unwrap(), 0).unwrap()
}

/// Checks that all tokens were sampled from the adapters with this version.
fn assert_drew(setup: &Setup, version: u64, mut rollouts: Vec<Rollout>, temperature: f64) {
    for rollout in &mut rollouts {
        // The servers know them by other names.
        rollout.completion.weight_versions.fill(version);
    }
    setup.policy(version).assert_drew(&rollouts, temperature);
}

/// The names in the requests to a path, in order.
fn names(setup: &Setup, ending: &str) -> Vec<Value> {
    let requests = setup.servers[0].http.requests();
    let of_path = requests.iter().filter(|r| r.path().ends_with(ending));
    let name = |request: &Request| -> Value {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        body["lora_name"].clone()
    };
    of_path.map(name).collect()
}

#[rstest]
fn several_adapters_are_sampled_from_at_the_same_time(
    #[values(Engine::Vllm, Engine::Sglang)] engine: Engine,
) {
    let setup = Setup::new(engine, WeightSync::Adapter, 2);
    let adapters = ServerAdapters::new(&setup.config()).unwrap();
    let generators = [1, 2].map(|version| Arc::from(open(&setup, &adapters, version).unwrap()));
    // In turn, and with another temperature than the probe.
    for _ in 0..2 {
        for (version, generator) in (1..).zip(&generators) {
            let drawn = draw(generator, &short());
            assert_drew(&setup, version, drawn, short().temperature);
        }
    }
    let loaded = names(&setup, "/load_lora_adapter");
    assert_eq!(loaded.len(), 2);
    assert_ne!(loaded[0], loaded[1]);
    assert_eq!(names(&setup, "/unload_lora_adapter"), [Value::Null; 0]);
    // Another one's keys and values may be in use.
    assert_eq!(setup.servers[0].count("/reset_prefix_cache"), 0);

    let [first, second] = generators;
    drop(first);
    setup.servers[0].http.wait_for_requests(|requests| {
        requests
            .iter()
            .any(|r| r.path().ends_with("/unload_lora_adapter"))
    });
    assert_eq!(names(&setup, "/unload_lora_adapter"), loaded[..1]);
    let drawn = draw(&second, &short());
    assert_drew(&setup, 2, drawn, short().temperature);
    drop(second);
    // It waits for the servers.
    drop(adapters);
    assert_eq!(names(&setup, "/unload_lora_adapter"), loaded);
}

#[rstest]
fn a_restarted_server_gets_its_adapters_again() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Adapter, 1);
    let adapters = ServerAdapters::new(&setup.config()).unwrap();
    let generators = [1, 2].map(|version| Arc::from(open(&setup, &adapters, version).unwrap()));
    setup.servers[0].restart();
    for (version, generator) in (1..).zip(&generators) {
        let drawn = draw(generator, &short());
        assert_drew(&setup, version, drawn, short().temperature);
    }
}

/// With filters, an engine's log-probs may not be those over all tokens.
#[test]
fn log_probs_after_filters_are_not_those_of_the_policy() {
    for (engine, is_policy) in [(Engine::Vllm, false), (Engine::Sglang, true)] {
        let setup = Setup::new(engine, WeightSync::Adapter, 1);
        let adapters = ServerAdapters::new(&setup.config()).unwrap();
        let generator: Arc<dyn Generator> = Arc::from(open(&setup, &adapters, 1).unwrap());
        let filtered = SamplingConfig {
            top_k: 2,
            ..short()
        };
        let drawn = draw(&generator, &filtered);
        let has = |rollout: &Rollout| rollout.completion.log_probs.is_some();
        assert_eq!(drawn.iter().all(has), is_policy, "{engine:?}");
        if is_policy {
            assert_drew(&setup, 1, drawn, short().temperature);
        }
    }
}

#[test]
fn a_server_with_other_weights_is_an_error() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Adapter, 1);
    let adapters = ServerAdapters::new(&setup.config()).unwrap();
    drop(open(&setup, &adapters, 2).unwrap());
    let saved = setup.folder.path().join("2");
    let error = |version: u64| {
        let policy = setup.policy(version);
        let opened = adapters.open(&saved, &policy.weights(&model()), &NoProgress);
        format!("{:#}", opened.err().unwrap())
    };
    let other = error(1);
    assert!(other.contains("it serves other weights"), "{other}");
    setup.report(LogProbs::Raw);
    let raw = error(2);
    let words = "start vLLM with --logprobs-mode processed_logprobs";
    assert!(raw.contains(words), "{raw}");
}

#[test]
fn settings_without_adapters_are_errors() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    for (engine, sync, message) in [
        (
            Engine::Local,
            WeightSync::Auto,
            "base_url: given, must be absent with engine local, which needs no server",
        ),
        (
            Engine::Openai,
            WeightSync::Auto,
            "engine: openai, must be vllm or sglang, which load adapters",
        ),
        (
            Engine::Vllm,
            WeightSync::Disk,
            "weight_sync: disk, must be auto or adapter",
        ),
    ] {
        let config = candle_grpo_train::rollout::RolloutConfig {
            engine,
            weight_sync: sync,
            ..setup.config()
        };
        let error = ServerAdapters::new(&config).err().unwrap();
        assert_eq!(error.to_string(), message);
    }
}

//! Clients for inference servers, against servers in this process.

mod adapters;
mod engine;
mod fake_llama;
mod fake_server;
mod fake_sglang;
pub(crate) mod fake_vllm;
mod fakes;
mod faults;
mod ipc;
mod ipc_worker;
mod partial;
mod random_faults;
mod recorded;
mod served_policy;
mod sleep;
mod structured;
mod teacher;
mod trajectories;
mod transfer;
mod weight_check;
mod weights;
mod workers;

use std::sync::Arc;

use candle_core::DType;
use candle_grpo_nn::{Export, Lora, LoraConfig, Parameters};
use candle_grpo_test_support::{Reply, device, noise_tensor};
use candle_grpo_train::learn::Reference;
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::ServerGenerator;
use candle_grpo_train::rollout::{Engine, PolicyWeights, RolloutConfig, WeightSync};
use candle_grpo_train::{ComputeDType, Generator, Progress, Rollout, Sampler, SamplingConfig};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use crate::common::{END, file_names, model, parameters, prompts, sampler, sampling, tokenizer};
use fake_server::{FakeServer, Fault};
pub(crate) use served_policy::{LogProbs, log_distributions};
use served_policy::{Served, ServedPolicy, log_probs, scaled, seeds};
use workers::{Digests, Network, Workers};

/// The test policy.
fn initial() -> Served {
    Served {
        model: model(),
        parameters: parameters(),
        tokenizer: Arc::new(tokenizer()),
        end: END,
    }
}

/// The test policy, which a server samples from.
pub(crate) fn served(log_probs: LogProbs) -> ServedPolicy {
    ServedPolicy::new(initial(), log_probs)
}

/// Servers for one engine, and the directory for their weights.
struct Setup {
    engine: Engine,
    sync: WeightSync,
    servers: Vec<FakeServer>,
    folder: TempDir,
    /// Connects the policy to the servers' processes.
    network: Network,
}

impl Setup {
    fn new(engine: Engine, sync: WeightSync, servers: usize) -> Self {
        let servers = (0..servers).map(|_| engine::start(engine, initial()));
        let setup = Self {
            engine,
            sync,
            servers: servers.collect(),
            folder: tempfile::tempdir().unwrap(),
            network: Network::default(),
        };
        if sync == WeightSync::Nccl {
            setup.set_processes(2);
        }
        setup
    }

    /// Gives each server this number of processes that can receive weights.
    fn set_processes(&self, count: usize) {
        for server in &self.servers {
            server.engine().workers = Some(Workers::new(self.network.clone(), count));
        }
    }

    /// A configuration whose time limits no test reaches.
    fn config(&self) -> RolloutConfig {
        RolloutConfig {
            weight_sync: self.sync,
            max_inflight: 4,
            ..engine::config(self.engine, &self.servers)
        }
    }

    /// A configuration that gives up soon on an unreachable server.
    fn impatient(&self) -> RolloutConfig {
        RolloutConfig {
            server_timeout: 0.2,
            max_retries: 2,
            ..self.config()
        }
    }

    /// A client, with a transport if the servers have processes.
    fn client(&self, config: &RolloutConfig, sampling: &SamplingConfig) -> ServerGenerator {
        let client = self.client_without_transport(config, sampling);
        let has_processes = |server: &FakeServer| server.engine().workers.is_some();
        if !self.servers.iter().any(has_processes) {
            return client;
        }
        let client = client.with_message_bytes(1000);
        client
            .with_transport(Ok(Arc::new(self.network.clone())))
            .unwrap()
    }

    fn client_without_transport(
        &self,
        config: &RolloutConfig,
        sampling: &SamplingConfig,
    ) -> ServerGenerator {
        let folder = self.folder.path().join("weights");
        ServerGenerator::new(config, sampling, model().vocab_size, &folder).unwrap()
    }

    /// A policy whose weights differ between versions.
    fn policy(&self, version: u64) -> Policy {
        let adapters = (self.sync == WeightSync::Adapter).then(|| adapters(version));
        let base = parameters();
        let parameters = match adapters {
            Some(_) => base,
            None => scaled(&model(), &base, 1. + 0.1 * (version % 7) as f64),
        };
        Policy {
            version,
            parameters,
            adapters,
        }
    }

    /// Makes the servers sample the same tokens as [`draw_locally`].
    fn draw_as_local(&self, sampling: &SamplingConfig) {
        let seeds = seeds(sampling.seed, [STREAMS, 3, 2, TURNS]);
        for server in &self.servers {
            server.engine().policy.seeds = Arc::clone(&seeds);
        }
    }

    /// Makes the servers report these log-probs.
    fn report(&self, log_probs: LogProbs) {
        for server in &self.servers {
            server.engine().policy.log_probs = log_probs;
        }
    }

    /// Names of the versions in the weights directory.
    fn versions(&self) -> Vec<String> {
        let folder = self.folder.path().join("weights");
        if !folder.exists() {
            return Vec::new();
        }
        let mut versions = file_names(&folder);
        versions.retain(|name| name.starts_with("policy"));
        versions
    }

    /// Request path for sampling.
    fn draw_path(&self) -> &'static str {
        engine::draw_path(self.engine)
    }

    /// Request path for loading weights.
    fn load_path(&self) -> &'static str {
        match (self.engine, self.sync) {
            (Engine::Sglang, WeightSync::Adapter) => "/load_lora_adapter",
            (Engine::Sglang, _) => "/update_weights_from_disk",
            (_, WeightSync::Adapter) => "/v1/load_lora_adapter",
            (_, WeightSync::Nccl | WeightSync::Ipc) => "/update_weights",
            _ => "/collective_rpc",
        }
    }

    /// Checks that an error names a server.
    fn assert_names_a_server(&self, error: &anyhow::Error) {
        let text = format!("{error:#}");
        let named = self.servers.iter().any(|s| text.contains(&s.url()));
        assert!(named, "{text}");
    }
}

/// The policy's weights after some training steps.
struct Policy {
    version: u64,
    parameters: Parameters,
    adapters: Option<Lora>,
}

impl Policy {
    fn weights<'a>(&'a self, model: &'a candle_grpo_nn::DecoderConfig) -> PolicyWeights<'a> {
        PolicyWeights {
            version: self.version,
            model,
            parameters: &self.parameters,
            adapters: self.adapters.as_ref(),
        }
    }

    /// Sends the weights.
    fn push(&self, client: &ServerGenerator) -> anyhow::Result<()> {
        self.push_with(client, &NoProgress)
    }

    /// Returns the SHA-256 of the bytes of each weight that servers receive, in `dtype`.
    fn digests(&self, dtype: ComputeDType) -> Digests {
        let model = model();
        let weights = self.weights(&model);
        let export: Export<'_> = weights.export().in_dtype(DType::from(dtype));
        let digest = |name: &str| {
            let mut hash = Sha256::new();
            export.tensor(name).unwrap().write_bytes(&mut hash).unwrap();
            (name.to_owned(), hash.finalize().to_vec())
        };
        export.names().map(digest).collect()
    }

    fn push_with(&self, client: &ServerGenerator, progress: &dyn Progress) -> anyhow::Result<()> {
        client.weights_changed(&self.weights(&model()), progress)
    }

    /// Checks that all tokens in `rollouts` were sampled from these weights.
    fn assert_drew(&self, rollouts: &[Rollout], temperature: f64) {
        let merged = self.weights(&model()).merged().unwrap();
        let merged = merged.copy_to(device()).unwrap();
        for rollout in rollouts {
            let completion = &rollout.completion;
            let versions = vec![self.version; completion.tokens.len()];
            assert_eq!(completion.weight_versions, versions);
            let log_probs = completion.log_probs.as_ref().unwrap();
            let answer = (
                rollout.prompt_tokens.as_slice(),
                &completion.tokens,
                log_probs,
            );
            let difference = difference([answer], &merged, temperature);
            assert!(difference < 1e-5, "{difference} in {rollout:?}");
        }
    }
}

fn adapters(version: u64) -> Lora {
    let adapters = Lora::init(LoraConfig::all_linear(2, 8.), &model(), 5, device()).unwrap();
    for (_, variable) in adapters.parameters().iter() {
        let noise = noise_tensor(variable.shape(), version, DType::F32, device()).unwrap();
        variable.set(&(noise * 0.3).unwrap()).unwrap();
    }
    adapters
}

/// Largest difference between the log-probs after a prompt and those under `parameters`.
fn difference<'a>(
    answers: impl IntoIterator<Item = (&'a [u32], &'a Vec<u32>, &'a Vec<f32>)>,
    parameters: &Parameters,
    temperature: f64,
) -> f32 {
    let reference = Reference::new(&model(), parameters, ComputeDType::F32).unwrap();
    let answers = answers.into_iter();
    let differences = answers.flat_map(|(prompt, tokens, given)| {
        let expected = log_probs(&reference, (prompt, tokens), temperature).unwrap();
        assert_eq!(expected.len(), given.len());
        let pairs = expected.into_iter().zip(given);
        pairs.map(|(a, b)| (a - b).abs()).collect::<Vec<_>>()
    });
    differences.fold(0., f32::max)
}

/// Number of streams that tests use.
const STREAMS: u64 = 20;

/// Maximum number of turns that tests use.
const TURNS: u64 = 3;

/// Samples two completions for each of three prompts.
fn draw(
    client: &Arc<ServerGenerator>,
    sampling: &SamplingConfig,
    stream: u64,
    progress: Arc<dyn Progress>,
) -> anyhow::Result<Vec<Rollout>> {
    let generator: Arc<dyn Generator> = Arc::clone(client) as _;
    let sampler = Sampler::from_generator(generator, model().vocab_size, sampling.clone())?;
    draw_with(&sampler.with_progress(progress), stream)
}

/// Samples them from the initial weights.
fn draw_locally(sampling: &SamplingConfig, stream: u64) -> Vec<Rollout> {
    draw_with(&sampler(sampling.clone()), stream).unwrap()
}

fn draw_with(sampler: &Sampler, stream: u64) -> anyhow::Result<Vec<Rollout>> {
    let sampler = sampler.clone().with_tokenizer(&tokenizer());
    let prompts = prompts(&["abc", "d", "ee"]);
    let prompts: Vec<_> = prompts.iter().collect();
    sampler.sample(&prompts, 2, stream)
}

/// Settings for most tests: short completions at a temperature.
fn short() -> SamplingConfig {
    SamplingConfig {
        max_new_tokens: 4,
        temperature: 0.8,
        ..sampling()
    }
}

/// Samples with these settings.
fn drawn(client: &Arc<ServerGenerator>) -> anyhow::Result<Vec<Rollout>> {
    draw(client, &short(), 0, Arc::new(NoProgress))
}

/// More bytes than all weights have.
const ALL: usize = 1 << 30;

/// Number of bytes of the tiny model's largest weight, in f32.
fn largest() -> usize {
    let parameters = initial().parameters;
    let sizes = parameters.iter().map(|(_, of)| of.elem_count() * 4);
    sizes.max().unwrap()
}

/// Checks that the server was sent weights from memory by the requests of the protocol, in order.
fn assert_transferred_in_order(server: &FakeServer) {
    let requests = server.http.requests();
    let mut paths: Vec<&str> = requests.iter().map(|request| &*request.target).collect();
    // One for each message.
    paths.dedup();
    let expected = [
        "/get_world_size",
        "/init_weight_transfer_engine",
        "/pause?mode=keep",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache",
        "/resume",
        "/weight_info",
    ];
    let start = paths.iter().position(|path| *path == expected[0]).unwrap();
    assert_eq!(paths[start..][..expected.len()], expected);
}

fn instead(status: u16, body: &str) -> Fault {
    Fault::Instead(Reply::new(status, body))
}

/// A server that answers `status`, and that it is out of memory.
fn exhausted(status: u16) -> Fault {
    instead(status, r#"{"error": "out of memory"}"#)
}

/// Makes a request to `path` fail, after `before` others.
fn fail_once(server: &FakeServer, path: &'static str, mut before: usize, fault: fn() -> Fault) {
    let mut is_left = true;
    server.set_faults(move |request| {
        if request.path() != path || !is_left {
            return None;
        }
        is_left = before > 0;
        before = before.saturating_sub(1);
        (!is_left).then(fault)
    });
}

/// Repeats `call`, whose time limits a slow machine may exceed.
fn until_it_succeeds<T>(mut call: impl FnMut() -> anyhow::Result<T>) -> T {
    let mut calls = (0..100).map(|_| call());
    calls.find_map(anyhow::Result::ok).expect("a success")
}

//! Agents whose answers come from inference servers.

#[path = "../../../candle-grpo-train/tests/train/engines/engine.rs"]
mod engine;
#[path = "../../../candle-grpo-train/tests/train/engines/fake_llama.rs"]
mod fake_llama;
#[path = "../../../candle-grpo-train/tests/train/engines/fake_server.rs"]
#[allow(dead_code, reason = "the tests of the clients need more of it")]
mod fake_server;
#[path = "../../../candle-grpo-train/tests/train/engines/fake_sglang.rs"]
mod fake_sglang;
#[path = "../../../candle-grpo-train/tests/train/engines/fake_vllm.rs"]
#[allow(dead_code, reason = "the tests of the clients need more of it")]
mod fake_vllm;
#[path = "../../../candle-grpo-train/tests/train/engines/ipc_worker.rs"]
#[allow(dead_code, reason = "the tests of the clients need more of it")]
mod ipc_worker;
#[path = "../../../candle-grpo-train/tests/train/engines/served_policy.rs"]
#[allow(dead_code, reason = "the tests of the clients need more of it")]
mod served_policy;
#[path = "../../../candle-grpo-train/tests/train/engines/workers.rs"]
#[allow(dead_code, reason = "the tests of the clients need more of it")]
mod workers;

use std::sync::Arc;

use candle_grpo_nn::Parameters;
use candle_grpo_test_support::{Reply, Request};
use candle_grpo_train::environment::{AgentConfig, EpisodeEnd};
use candle_grpo_train::learn::Reference;
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::ServerGenerator;
use candle_grpo_train::rollout::{Engine, PolicyWeights, RolloutConfig, WeightSync};
use candle_grpo_train::{ComputeDType, Generator, Prompt, Rollout, Sampler};
use rstest::rstest;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::{Client, receive};
use super::drawer::{STOP, VOCAB_SIZE, agents, decode, prompt, tokenizer};
use super::same_bits::{
    Trained, count_agent, environments, limits, policy, sampling, trained, with_agents,
};
use fake_server::{FakeServer, Fault};
use served_policy::{Served, log_probs, scaled, seeds};

const CHAT: &str = "/v1/chat/completions";

/// A server with the policy, and its client.
struct Setup {
    server: FakeServer,
    client: Arc<ServerGenerator>,
    draw_path: &'static str,
    _folder: TempDir,
}

/// Starts a server, which samples the same tokens as the sampler in this process for the same
/// seeds.
fn setup(engine: Engine) -> Setup {
    let (model, parameters) = policy();
    let served = Served {
        model,
        parameters,
        tokenizer: Arc::new(tokenizer()),
        end: STOP,
    };
    let server = engine::start(engine, served);
    server.engine().policy.seeds = seeds(sampling().seed, [STREAMS, 4, 4, 4]);
    let config = RolloutConfig {
        weight_sync: WeightSync::Disk,
        ..engine::config(engine, std::slice::from_ref(&server))
    };
    let folder = tempfile::tempdir().unwrap();
    let weights = folder.path().join("weights");
    let client = ServerGenerator::new(&config, &sampling(), VOCAB_SIZE, &weights).unwrap();
    Setup {
        server,
        client: Arc::new(client),
        draw_path: engine::draw_path(engine),
        _folder: folder,
    }
}

/// Number of streams whose seeds the servers have.
const STREAMS: u64 = 8;

impl Setup {
    fn push(&self, version: u64, parameters: &Parameters) {
        let weights = PolicyWeights {
            version,
            model: &policy().0,
            parameters,
            adapters: None,
        };
        self.client.weights_changed(&weights, &NoProgress).unwrap();
    }

    fn sampler(&self) -> Sampler {
        let client: Arc<dyn Generator> = Arc::clone(&self.client) as _;
        let sampler = Sampler::from_generator(client, VOCAB_SIZE, sampling()).unwrap();
        sampler.with_tokenizer(&tokenizer())
    }

    /// Number of requests for completions, probes included.
    fn draws(&self) -> usize {
        self.server.count(self.draw_path)
    }
}

/// Checks that the policy's tokens have this version, and their log-probs under these weights.
fn assert_drawn_from(rollouts: &[Rollout], version: u64, parameters: &Parameters) {
    let reference = Reference::new(&policy().0, parameters, ComputeDType::F32).unwrap();
    for (prompt, completion) in rollouts.iter().flat_map(Rollout::rows) {
        let expected = log_probs(&reference, (prompt, &completion.tokens), 1.).unwrap();
        let drawn = completion.log_probs.as_ref().unwrap();
        let all = vec![true; drawn.len()];
        let written = completion.written.as_ref().unwrap_or(&all);
        assert!(written.contains(&true));
        for place in (0..written.len()).filter(|&place| written[place]) {
            let difference = (drawn[place] - expected[place]).abs();
            assert!(difference < 1e-5, "{difference} at {place}");
            assert_eq!(completion.weight_versions[place], version);
        }
    }
}

fn turns(rollout: &Rollout) -> usize {
    rollout.episode.as_ref().unwrap().turns.len()
}

/// The server samples the same tokens as the sampler in this process for the same seeds, so
/// episodes differ only if requests to the server do.
#[rstest]
#[case::vllm(Engine::Vllm)]
#[case::sglang(Engine::Sglang)]
fn the_episodes_of_a_server_are_those_of_this_process(#[case] engine: Engine) {
    let (_, schemas, prompts) = environments();
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let fields = json!({"logprobs": true, "stop": ["e", "aba"]});
    let agent = |client: &Client| count_agent(client, &schemas, &fields);
    let play = |sampler: Sampler| {
        with_agents(&agent, 1, |agents| {
            let sampler = sampler.with_environments(agents);
            sampler.sample(&prompts, 4, 1).unwrap()
        })
    };
    let (model, parameters) = policy();
    let local = Sampler::new(&model, &parameters, sampling()).unwrap();
    let local = play(local.with_tokenizer(&tokenizer()));
    let setup = setup(engine);
    setup.push(5, &parameters);
    let served = play(setup.sampler());
    assert!(local.iter().any(|rollout| turns(rollout) > 1), "calls");
    assert_eq!(served.len(), local.len());
    for (served, local) in served.iter().zip(&local) {
        assert_eq!(served.prompt_tokens, local.prompt_tokens);
        assert_eq!(served.episode, local.episode);
        assert!(served.branches.is_empty());
        let (served, local) = (&served.completion, &local.completion);
        assert_eq!(served.tokens, local.tokens);
        assert_eq!(served.written, local.written);
        assert_eq!(served.finish_reason, local.finish_reason);
    }
    assert_drawn_from(&served, 5, &parameters);
}

#[rstest]
#[case::vllm(Engine::Vllm)]
#[case::sglang(Engine::Sglang)]
fn answers_come_from_the_weights_of_the_last_update(#[case] engine: Engine) {
    let (_, schemas, prompts) = environments();
    let prompts: Vec<&Prompt> = prompts.iter().collect();
    let setup = setup(engine);
    let agent = |client: &Client| count_agent(client, &schemas, &json!({}));
    with_agents(&agent, 2, |agents| {
        let sampler = setup.sampler().with_environments(agents);
        for version in [1, 2] {
            let (model, parameters) = policy();
            let parameters = scaled(&model, &parameters, version as f64);
            setup.push(version, &parameters);
            let rollouts = sampler.sample(&prompts, 4, version).unwrap();
            assert_drawn_from(&rollouts, version, &parameters);
        }
    });
}

/// Steps whose episodes a server samples. It receives the weights after each update.
#[test]
fn a_policy_whose_agents_a_server_answers_trains_to_the_same_bits() {
    const STEPS: usize = 2;
    let (_, schemas, prompts) = environments();
    let agent = |client: &Client| count_agent(client, &schemas, &json!({}));
    let train = |generator: Option<Arc<dyn Generator>>| -> Trained {
        with_agents(&agent, STEPS, |agents| {
            trained(agents, &prompts, STEPS, generator)
        })
    };
    let local = train(None);
    let setup = setup(Engine::Vllm);
    let served = train(Some(Arc::clone(&setup.client) as _));
    assert_eq!(local.0.len(), STEPS);
    assert!(served == local, "{:?} {:?}", served.0, local.0);
}

/// Plays one episode whose answers the server gives.
fn episode(setup: &Setup, agent: impl FnOnce(Client)) -> Rollout {
    let agents = Arc::new(agents(AgentConfig::default(), limits()));
    let prompt = prompt("so?");
    std::thread::scope(|scope| {
        let (address, key) = (agents.address(), agents.key().to_owned());
        let sampler = setup.sampler().with_environments(agents);
        let played = scope.spawn(move || sampler.sample(&[&prompt], 1, 1).unwrap());
        agent(Client::new(address, &key));
        played.join().unwrap().remove(0)
    })
}

fn question() -> Value {
    json!({"messages": [{"role": "user", "content": "so?"}]})
}

/// Checks that the episode has one answer, which the agent received.
fn assert_has_one_answer(rollout: &Rollout, answer: &str) {
    let episode = rollout.episode.as_ref().unwrap();
    assert_eq!((&episode.end, episode.turns.len()), (&EpisodeEnd::Done, 1));
    assert_eq!(rollout.rows().count(), 1);
    let text = decode(&rollout.completion.tokens);
    assert_eq!(text.strip_suffix(&decode(&[STOP])).unwrap_or(&text), answer);
    assert_drawn_from(std::slice::from_ref(rollout), 1, &policy().1);
}

#[rstest]
#[case::vllm(Engine::Vllm)]
#[case::sglang(Engine::Sglang)]
fn a_client_that_leaves_while_the_server_samples_gets_its_answer_later(#[case] engine: Engine) {
    let setup = setup(engine);
    setup.push(1, &policy().1);
    let probes = setup.draws();
    let path = setup.draw_path;
    let is_held = move |request: &Request| request.path() == path;
    setup
        .server
        .set_faults(move |request| is_held(request).then(Fault::held));
    let mut text = String::new();
    let rollout = episode(&setup, |client| {
        let stream = client.begin(CHAT, &[], &question());
        setup.server.http.wait_until_held(1);
        drop(stream);
        let again = client.begin(CHAT, &[("x-stainless-retry-count", "1")], &question());
        client.wait_for_server();
        setup.server.http.release();
        let answer = receive(again).json();
        let content = answer["choices"][0]["message"]["content"].as_str();
        text = content.unwrap().to_owned();
        client.done(json!(1));
    });
    assert_eq!(setup.draws(), probes + 1);
    assert_has_one_answer(&rollout, &text);
}

#[rstest]
#[case::vllm(Engine::Vllm)]
#[case::sglang(Engine::Sglang)]
fn a_server_that_fails_once_answers_once(#[case] engine: Engine) {
    let setup = setup(engine);
    setup.push(1, &policy().1);
    let (path, mut left) = (setup.draw_path, 1);
    setup.server.set_faults(move |request| {
        let fails = request.path() == path && left > 0;
        left -= i32::from(fails);
        fails.then(|| Fault::Instead(Reply::closed()))
    });
    let mut text = String::new();
    let rollout = episode(&setup, |client| {
        text = client.say(&question()["messages"]);
        client.done(json!(1));
    });
    assert_has_one_answer(&rollout, &text);
}

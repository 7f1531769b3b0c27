//! Weights that go to servers, and completions that come from them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use anyhow::Result;
use candle_grpo_nn::{LoraConfig, Parameters};
use candle_grpo_test_support::{Reply, Request, device};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::ServerGenerator;
use candle_grpo_train::rollout::{
    CompletionSeed, Deliver, Engine, GenerationBatch, PolicyWeights, WeightSync,
};
use candle_grpo_train::{Completion, Generator, Progress, SamplingConfig, TrainerParts};
use rstest::rstest;
use serde_json::{Value, json};

use super::fake_server::Fault;
use super::served_policy::LogProbs;
use super::{Policy, STREAMS, Setup, difference, draw, draw_locally, short};
use crate::common::{self, config, digest, max_difference, parameters};

/// Checks the servers' completions against the policy, and makes the servers sample the same tokens
/// as the local generator.
struct Checked {
    servers: ServerGenerator,
    /// The seeds by the number that requests carry, shared with the servers.
    seeds: Arc<Mutex<HashMap<u64, CompletionSeed>>>,
    temperature: f64,
    policy: Mutex<Option<(u64, Parameters)>>,
    versions: Mutex<Vec<u64>>,
}

impl Generator for Checked {
    fn generate(&self, batch: &GenerationBatch<'_>, deliver: &mut Deliver<'_>) -> Result<()> {
        let mut requests = Vec::new();
        for prompt in batch.prompts {
            for &seed in &prompt.seeds {
                self.seeds.lock().unwrap().insert(seed.to_u64() >> 1, seed);
                requests.push(prompt.tokens);
            }
        }
        let policy = self.policy.lock().unwrap();
        let (version, parameters) = policy.as_ref().expect("weights before completions");
        let mut check = |place: usize, completion: Completion| {
            let versions = vec![*version; completion.tokens.len()];
            assert_eq!(completion.weight_versions, versions);
            let log_probs = completion.log_probs.as_ref().unwrap();
            assert_eq!(*log_probs, completion.drawn_log_probs);
            let answer = (requests[place], &completion.tokens, log_probs);
            let difference = difference([answer], parameters, self.temperature);
            assert!(difference < 1e-5, "{difference} in {completion:?}");
            deliver(place, completion)
        };
        self.servers.generate(batch, &mut check)
    }

    fn weights_changed(&self, weights: &PolicyWeights<'_>, progress: &dyn Progress) -> Result<()> {
        let copy = weights.merged()?.frozen_copy()?.into_iter().collect();
        let copy = Parameters::from_tensors(weights.model, copy, device())?;
        *self.policy.lock().unwrap() = Some((weights.version, copy));
        self.versions.lock().unwrap().push(weights.version);
        self.servers.weights_changed(weights, progress)
    }
}

#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Disk)]
#[case(Engine::Sglang, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Nccl)]
#[case(Engine::Sglang, WeightSync::Disk)]
fn a_run_with_servers_is_the_run_with_the_policy_itself(
    #[case] engine: Engine,
    #[case] sync: WeightSync,
) {
    let mut config = config();
    config.sampling.temperature = 0.8;
    config.optimizer.learning_rate = 1e-2;
    if sync == WeightSync::Adapter {
        config.adapters = Some(LoraConfig::all_linear(4, 8.));
    }
    let mut setup = Setup::new(engine, sync, 2);
    // The adapters of the configuration decide.
    setup.sync = WeightSync::Auto;
    let seeds = Arc::new(Mutex::new(HashMap::new()));
    for server in &setup.servers {
        server.engine().policy.seeds = Arc::clone(&seeds);
    }
    let checked = Arc::new(Checked {
        servers: setup.client(&setup.config(), &config.sampling),
        seeds,
        temperature: config.sampling.temperature,
        policy: Mutex::new(None),
        versions: Mutex::default(),
    });
    let mut local = common::trainer(digest, config.clone());
    let generator: Arc<dyn Generator> = Arc::clone(&checked) as _;
    let mut remote = common::trainer_of(TrainerParts {
        generator: Some(generator),
        ..common::parts(digest, config)
    });
    for _ in 0..3 {
        let (a, b) = (local.step().unwrap(), remote.step().unwrap());
        assert!(!a.skipped);
        assert_eq!(a.reward_mean, b.reward_mean);
        assert_eq!(a.truncated, b.truncated);
    }
    let (a, b) = (
        local.policy_parameters().unwrap(),
        remote.policy_parameters().unwrap(),
    );
    for (name, variable) in a.iter() {
        let difference = max_difference(variable, b.get(name).unwrap());
        assert!(difference < 1e-4, "{name}: {difference}");
    }
    assert_eq!(*checked.versions.lock().unwrap(), [0, 1, 2]);
    for server in &setup.servers {
        let adapters = server.engine().policy.adapters();
        let names: Vec<&String> = adapters.keys().collect();
        match sync {
            WeightSync::Adapter => assert_eq!(names, ["policy-000002"]),
            _ => assert!(names.is_empty()),
        }
    }
    match sync {
        WeightSync::Nccl => assert!(setup.versions().is_empty()),
        _ => assert_eq!(setup.versions(), ["policy-000002"]),
    }
}

#[rstest]
#[case(Engine::Vllm, WeightSync::Disk, true)]
#[case(Engine::Sglang, WeightSync::Disk, true)]
#[case(Engine::Openai, WeightSync::None, true)]
#[case(Engine::Openai, WeightSync::None, false)]
fn a_completion_ends_as_that_of_the_policy_itself(
    #[case] engine: Engine,
    #[case] sync: WeightSync,
    #[case] log_probs: bool,
) {
    let setup = Setup::new(engine, sync, 1);
    let sampling = SamplingConfig {
        stop_strings: vec!["dd".to_owned(), "e".to_owned()],
        ..short()
    };
    setup.draw_as_local(&sampling);
    let client = setup.client(&setup.config(), &sampling);
    let client = Arc::new(if log_probs {
        client
    } else {
        client.without_log_probs()
    });
    setup.policy(0).push(&client).unwrap();
    let mut seen = [false; 3];
    for stream in 0..STREAMS {
        let expected = draw_locally(&sampling, stream);
        let found = draw(&client, &sampling, stream, Arc::new(NoProgress)).unwrap();
        for (a, b) in expected.iter().zip(&found) {
            let (a, b) = (&a.completion, &b.completion);
            assert_eq!((&a.tokens, a.finish_reason), (&b.tokens, b.finish_reason));
            let are_zero = b.drawn_log_probs.iter().all(|&x| x == 0.);
            assert_eq!(are_zero, !log_probs);
            seen[a.finish_reason as usize] = true;
        }
    }
    assert_eq!(seen, [true; 3], "all ends should occur");
}

/// One server holds its answers, so the other one samples the rest.
#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter)]
#[case(Engine::Sglang, WeightSync::Disk)]
fn servers_share_the_completions(#[case] engine: Engine, #[case] sync: WeightSync) {
    let setup = Setup::new(engine, sync, 2);
    let client = Arc::new(setup.client(&setup.config(), &short()));
    setup.policy(1).push(&client).unwrap();
    let path = setup.draw_path();
    let [holding, answering] = setup.servers.as_slice() else {
        panic!("two servers");
    };
    let before = answering.count(path);
    holding.set_faults(move |request| (request.path() == path).then(Fault::held));
    std::thread::scope(|scope| {
        let drawing = scope.spawn(|| draw(&client, &short(), 0, Arc::new(NoProgress)).unwrap());
        holding.http.wait_until_held(1);
        let drawn = |requests: &[Request]| requests.iter().filter(|r| r.path() == path).count();
        answering
            .http
            .wait_for_requests(|requests| drawn(requests) >= before + 4);
        holding.set_faults(|_| None);
        // A request may have met the fault and not be held yet.
        while !drawing.is_finished() {
            holding.http.release();
            std::thread::yield_now();
        }
        assert_eq!(drawing.join().unwrap().len(), 6);
    });
}

#[rstest]
#[case(Engine::Vllm, "/weight_info")]
#[case(Engine::Sglang, "/get_model_info")]
fn a_server_that_names_another_version_after_a_push_is_an_error(
    #[case] engine: Engine,
    #[case] path: &'static str,
) {
    let setup = Setup::new(engine, WeightSync::Disk, 1);
    setup.servers[0].set_faults(move |request| {
        let other = |answer: &mut Value| answer["weight_version"] = json!("policy-000000");
        (request.path() == path).then(|| Fault::json(other))
    });
    let client = setup.client(&setup.impatient(), &short());
    let error = setup.policy(1).push(&client).unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains("policy-000001"), "{text}");
}

/// The server answers that it has loaded the weights, and names their version.
#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
fn weights_that_do_not_arrive_are_found_by_their_log_probs(#[case] engine: Engine) {
    let setup = Setup::new(engine, WeightSync::Disk, 1);
    let path = setup.load_path();
    let mut version = json!("default");
    setup.servers[0].set_faults(move |request| {
        if request.path() == path {
            let body: Value = serde_json::from_slice(&request.body).unwrap();
            version = body["weight_version"].clone();
            let answer = json!({"success": true, "results": [null]});
            return Some(Fault::Instead(Reply::new(200, answer.to_string())));
        }
        let version = version.clone();
        match request.path() {
            "/get_model_info" => Some(Fault::json(|info| info["weight_version"] = version)),
            "/generate" => Some(Fault::json(|answer| {
                answer["meta_info"]["weight_version"] = version;
            })),
            _ => None,
        }
    });
    let client = setup.client(&setup.config(), &short());
    setup.policy(0).push(&client).unwrap();
    let error = setup.policy(1).push(&client).unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains("log_prob_tolerance"), "{text}");
}

#[test]
fn log_probs_before_the_temperature_are_an_error() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    setup.report(LogProbs::Raw);
    let client = setup.client(&setup.config(), &short());
    let error = setup.policy(0).push(&client).unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(
        text.contains("--logprobs-mode processed_logprobs"),
        "{text}"
    );

    let sampling = SamplingConfig {
        temperature: 1.,
        ..short()
    };
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    setup.report(LogProbs::Raw);
    let client = Arc::new(setup.client(&setup.config(), &sampling));
    let policy = setup.policy(1);
    policy.push(&client).unwrap();
    let rollouts = draw(&client, &sampling, 0, Arc::new(NoProgress)).unwrap();
    policy.assert_drew(&rollouts, 1.);
}

/// With a filter, a server reports the log-probs under either the policy or the filtered
/// distribution.
#[rstest]
#[case(LogProbs::Temperature)]
#[case(LogProbs::Processed)]
fn log_probs_under_a_filter_are_those_that_the_server_reports(#[case] log_probs: LogProbs) {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    setup.report(log_probs);
    let sampling = SamplingConfig {
        top_k: 2,
        ..short()
    };
    setup.draw_as_local(&sampling);
    let client = Arc::new(setup.client(&setup.config(), &sampling));
    let policy = setup.policy(0);
    policy.push(&client).unwrap();
    let rollouts = draw(&client, &sampling, 0, Arc::new(NoProgress)).unwrap();
    if log_probs == LogProbs::Temperature {
        policy.assert_drew(&rollouts, sampling.temperature);
        return;
    }
    for (a, b) in draw_locally(&sampling, 0).iter().zip(&rollouts) {
        assert_eq!(a.completion.tokens, b.completion.tokens);
        assert_eq!(b.completion.log_probs, None);
        let expected = &a.completion.drawn_log_probs;
        for (a, b) in expected.iter().zip(&b.completion.drawn_log_probs) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }
}

#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Disk)]
#[case(Engine::Sglang, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Nccl)]
#[case(Engine::Sglang, WeightSync::Disk)]
fn a_restarted_server_receives_the_weights_again(#[case] engine: Engine, #[case] sync: WeightSync) {
    let setup = Setup::new(engine, sync, 1);
    let client = Arc::new(setup.client(&setup.config(), &short()));
    let policy = setup.policy(3);
    policy.push(&client).unwrap();
    let loaded = setup.servers[0].count(setup.load_path());
    for stream in 0..3 {
        let rollouts = draw(&client, &short(), stream, Arc::new(NoProgress)).unwrap();
        policy.assert_drew(&rollouts, short().temperature);
        setup.servers[0].restart();
    }
    assert!(setup.servers[0].count(setup.load_path()) >= loaded + 2);
}

/// The server answers that it has loaded the weights, and names their version.
#[test]
fn weights_that_do_not_arrive_after_a_restart_are_found_before_a_completion() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let client = Arc::new(setup.client(&setup.config(), &short()));
    setup.policy(3).push(&client).unwrap();
    let server = &setup.servers[0];
    server.restart();
    server.set_faults(|request| {
        let answer = json!({"results": [null]}).to_string();
        (request.path() == "/collective_rpc").then(|| Fault::Instead(Reply::new(200, answer)))
    });
    let error = draw(&client, &short(), 0, Arc::new(NoProgress)).unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains("log_prob_tolerance"), "{text}");
}

#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Disk)]
#[case(Engine::Sglang, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Nccl)]
#[case(Engine::Sglang, WeightSync::Disk)]
fn a_server_that_restarts_with_other_log_probs_is_an_error(
    #[case] engine: Engine,
    #[case] sync: WeightSync,
) {
    let setup = Setup::new(engine, sync, 1);
    let client = Arc::new(setup.client(&setup.config(), &short()));
    setup.policy(3).push(&client).unwrap();
    setup.report(LogProbs::Raw);
    setup.servers[0].restart();
    let error = draw(&client, &short(), 0, Arc::new(NoProgress)).unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(
        text.contains("log-probs before the temperature of 0.8"),
        "{text}"
    );
}

/// With a filter, each server reports the log-probs that its own flags select.
#[test]
fn servers_may_report_log_probs_of_different_distributions() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 2);
    setup.servers[1].engine().policy.log_probs = LogProbs::Temperature;
    let sampling = SamplingConfig {
        top_k: 2,
        ..short()
    };
    let client = Arc::new(setup.client(&setup.config(), &sampling));
    let policy = setup.policy(1);
    policy.push(&client).unwrap();
    for (gone, left) in [(0, LogProbs::Temperature), (1, LogProbs::Processed)] {
        setup.servers[gone].http.stop();
        let rollouts = draw(&client, &sampling, 0, Arc::new(NoProgress)).unwrap();
        match left {
            LogProbs::Temperature => policy.assert_drew(&rollouts, sampling.temperature),
            _ => assert!(rollouts.iter().all(|r| r.completion.log_probs.is_none())),
        }
        setup.servers[gone].http.restart();
    }
    // The flags of a server may change with a restart.
    let server = &setup.servers[0];
    server.engine().policy.log_probs = LogProbs::Temperature;
    server.restart();
    let rollouts = draw(&client, &sampling, 1, Arc::new(NoProgress)).unwrap();
    policy.assert_drew(&rollouts, sampling.temperature);
}

/// Two completions are sampled from the initial weights. The first answer shows that they are lost,
/// and the second arrives after they are restored.
#[test]
fn a_completion_from_lost_weights_is_drawn_again_even_if_they_are_back() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let mut config = setup.config();
    config.max_inflight = 2;
    let client = Arc::new(setup.client(&config, &short()));
    let policy = setup.policy(3);
    policy.push(&client).unwrap();
    let server = &setup.servers[0];
    server.restart();
    let loaded = server.count("/update_weight_version");
    let mut held = false;
    server.set_faults(move |request| {
        let first = request.path() == "/v1/completions" && !held;
        held |= first;
        first.then(Fault::held)
    });
    std::thread::scope(|scope| {
        let drawing = scope.spawn(|| draw(&client, &short(), 0, Arc::new(NoProgress)).unwrap());
        server.http.wait_until_held(1);
        // A completion is drawn after the weights are back.
        server.http.wait_for_requests(|requests| {
            let paths = requests.iter().map(|request| request.path());
            let mut after = paths.skip_while({
                let mut loads = 0;
                move |path| {
                    loads += usize::from(*path == "/update_weight_version");
                    loads <= loaded
                }
            });
            after.any(|path| path == "/v1/completions")
        });
        server.http.release();
        policy.assert_drew(&drawing.join().unwrap(), short().temperature);
    });
}

#[test]
fn a_server_that_was_down_during_a_push_receives_the_weights_when_it_is_back() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 2);
    let client = Arc::new(setup.client(&setup.config(), &short()));
    setup.policy(1).push(&client).unwrap();
    setup.servers[0].http.stop();
    let policy = setup.policy(2);
    policy.push(&client).unwrap();
    let rollouts = draw(&client, &short(), 0, Arc::new(NoProgress)).unwrap();
    policy.assert_drew(&rollouts, short().temperature);
    setup.servers[0].http.restart();
    setup.servers[1].http.stop();
    let rollouts = draw(&client, &short(), 1, Arc::new(NoProgress)).unwrap();
    policy.assert_drew(&rollouts, short().temperature);
}

#[test]
fn an_engine_without_transfers_draws_from_its_own_weights() {
    let setup = Setup::new(Engine::Openai, WeightSync::None, 1);
    let sampling = short();
    let client = Arc::new(setup.client(&setup.config(), &sampling));
    setup.policy(5).push(&client).unwrap();
    let rollouts = draw(&client, &sampling, 0, Arc::new(NoProgress)).unwrap();
    for rollout in &rollouts {
        let completion = &rollout.completion;
        let answer = (
            rollout.prompt_tokens.as_slice(),
            &completion.tokens,
            &completion.drawn_log_probs,
        );
        assert!(
            difference([answer], &parameters(), sampling.temperature) < 1e-5,
            "{rollout:?}"
        );
        assert_eq!(completion.log_probs, None);
    }
    let posts = setup.servers[0].http.requests();
    let mut posts = posts.iter().filter(|r| r.method == "POST");
    assert!(posts.all(|r| r.path() == "/v1/completions"));
}

#[rstest]
#[case(LogProbs::Raw, false)]
#[case(LogProbs::Temperature, true)]
#[case(LogProbs::Processed, true)]
fn a_fixed_policy_must_report_log_probs_after_the_temperature(
    #[case] log_probs: LogProbs,
    #[case] accepted: bool,
    #[values(0.5, 0.8, 1.5)] temperature: f64,
    #[values(0, 2)] top_k: usize,
) {
    let setup = Setup::new(Engine::Openai, WeightSync::None, 2);
    setup.report(log_probs);
    let sampling = SamplingConfig {
        temperature,
        top_k,
        ..short()
    };
    let client = Arc::new(setup.client(&setup.config(), &sampling));
    let pushed = setup.policy(5).push(&client);
    if !accepted {
        let error = pushed.unwrap_err();
        setup.assert_names_a_server(&error);
        let words = format!("log-probs before the temperature of {temperature}");
        assert!(format!("{error:#}").contains(&words), "{error:#}");
        return;
    }
    pushed.unwrap();
    let path = setup.draw_path();
    let probed: Vec<usize> = setup.servers.iter().map(|s| s.count(path)).collect();
    assert!(probed.iter().all(|&requests| requests > 0), "{probed:?}");
    // Once is enough.
    setup.policy(6).push(&client).unwrap();
    let again: Vec<usize> = setup.servers.iter().map(|s| s.count(path)).collect();
    assert_eq!(again, probed);
    let rollouts = draw(&client, &sampling, 0, Arc::new(NoProgress)).unwrap();
    assert!(rollouts.iter().all(|r| r.completion.log_probs.is_none()));
}

#[rstest]
#[case(Engine::Vllm, &["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume", "/weight_info"])]
#[case(Engine::Sglang, &["/pause_generation", "/update_weights_from_disk", "/continue_generation", "/get_model_info"])]
fn whole_weights_change_while_the_server_pauses(#[case] engine: Engine, #[case] expected: &[&str]) {
    let setup = Setup::new(engine, WeightSync::Disk, 1);
    let client = setup.client(&setup.config(), &short());
    setup.policy(1).push(&client).unwrap();
    let requests = setup.servers[0].http.requests();
    let paths: Vec<&str> = requests.iter().map(|request| request.path()).collect();
    let start = paths.iter().position(|path| *path == expected[0]).unwrap();
    assert_eq!(paths[start..][..expected.len()], *expected);
    assert!(requests[start].target == "/pause?mode=keep" || engine == Engine::Sglang);
}

/// Prompt keys and values are cached by an adapter's name and path, which an earlier run may have
/// used for other weights.
#[test]
fn an_adapter_resets_the_cache_of_prompts_if_the_server_can() {
    let setup = Setup::new(Engine::Vllm, WeightSync::Adapter, 1);
    let client = setup.client(&setup.config(), &short());
    setup.policy(1).push(&client).unwrap();
    let requests = setup.servers[0].http.requests();
    let mut paths = requests.iter().map(|request| request.path());
    assert!(paths.any(|path| path == "/v1/load_lora_adapter"));
    assert_eq!(paths.next(), Some("/reset_prefix_cache"));

    setup.servers[0].set_faults(|request| {
        let absent = Reply::new(404, r#"{"detail": "Not Found"}"#);
        (request.path() == "/reset_prefix_cache").then_some(Fault::Instead(absent))
    });
    setup.policy(2).push(&client).unwrap();
}

/// A step's weights may change without a new step, when a caller sets them.
#[rstest]
#[case(Engine::Vllm, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Disk)]
#[case(Engine::Sglang, WeightSync::Adapter)]
#[case(Engine::Vllm, WeightSync::Nccl)]
#[case(Engine::Sglang, WeightSync::Disk)]
fn other_weights_of_the_same_version_are_sent(#[case] engine: Engine, #[case] sync: WeightSync) {
    let setup = Setup::new(engine, sync, 1);
    let client = Arc::new(setup.client(&setup.config(), &short()));
    setup.policy(1).push(&client).unwrap();
    let policy = Policy {
        version: 1,
        ..setup.policy(2)
    };
    policy.push(&client).unwrap();
    let rollouts = draw(&client, &short(), 0, Arc::new(NoProgress)).unwrap();
    policy.assert_drew(&rollouts, short().temperature);
}

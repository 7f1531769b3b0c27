//! Random server faults.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use candle_grpo_test_support::{Reply, cases, words};
use candle_grpo_train::SamplingConfig;
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::{Engine, WeightSync};
use serde_json::json;

use super::fake_server::Fault;
use super::partial::{Places, assert_drawn, call};
use super::{Policy, Setup, draw, instead, until_it_succeeds};
use crate::common::{prompts, sampling};

/// A fault that any engine's server may have.
fn fault(number: u64) -> Fault {
    let after = |change: fn(Reply) -> Reply| Fault::After(Box::new(change));
    match number % 13 {
        0 => instead(500, "Internal Server Error"),
        1 => instead(429, ""),
        2 => instead(503, r#"{"error": {"message": "busy"}}"#),
        3 => instead(200, r#"{"choices": [{"#),
        4 => instead(200, "{}"),
        5 => instead(404, r#"{"detail": "Not Found"}"#),
        6 => instead(400, r#"{"error": {"message": "bad"}}"#),
        7 => Fault::Instead(Reply::closed()),
        8 => after(|_| Reply::closed()),
        9 => after(Reply::cut),
        10 => after(Reply::chunked),
        11 => Fault::held(),
        _ => Fault::json(|answer| {
            for place in ["/choices/0/finish_reason", "/meta_info/finish_reason/type"] {
                if let Some(reason) = answer.pointer_mut(place) {
                    *reason = json!("abort");
                }
            }
        }),
    }
}

/// The engines run in parallel, because they wait most of the time.
#[test]
fn random_faults_lose_nothing_double_nothing_and_hang_nothing() {
    thread::scope(|scope| {
        for (engine, sync) in [
            (Engine::Vllm, WeightSync::Adapter),
            (Engine::Vllm, WeightSync::Disk),
            (Engine::Vllm, WeightSync::Nccl),
            (Engine::Sglang, WeightSync::Adapter),
            (Engine::Sglang, WeightSync::Disk),
            (Engine::Openai, WeightSync::None),
        ] {
            scope.spawn(move || survive_faults(engine, sync));
        }
    });
}

/// Each call returns, with every completion once and from the right weights, or with an error that
/// names a server. The sampler checks that no completion is missing and none comes twice.
fn survive_faults(engine: Engine, sync: WeightSync) {
    let setup = Setup::new(engine, sync, 2);
    let sampling = SamplingConfig {
        max_new_tokens: 2,
        ..sampling()
    };
    let mut config = setup.config();
    (config.request_timeout, config.server_timeout) = (0.5, 0.5);
    (config.max_retries, config.max_inflight) = (3, 6);
    let client = Arc::new(setup.client(&config, &sampling));
    let faults = Arc::new(AtomicUsize::new(0));
    for (number, server) in setup.servers.iter().enumerate() {
        let faults = Arc::clone(&faults);
        let mut words = words(7 * (engine as u64 + 1) + number as u64);
        server.set_faults(move |_| {
            let (chance, kind) = (words.next()?, words.next()?);
            if !chance.is_multiple_of(4) {
                return None;
            }
            faults.fetch_add(1, Ordering::Relaxed);
            Some(fault(kind))
        });
    }
    let mut chances = words(engine as u64);
    let mut version = 0;
    let (mut policies, mut begun) = (BTreeMap::<u64, Policy>::new(), Places::new());
    // Two of each kind, on average.
    while faults.load(Ordering::Relaxed) < cases(26, 400) as usize {
        version += 1;
        let policy = setup.policy(version);
        if let Err(error) = policy.push(&client) {
            setup.assert_names_a_server(&error);
            continue;
        }
        if engine != Engine::Openai {
            policies.insert(version, setup.policy(version));
            let enough = 1 + chances.next().unwrap() as usize % 6;
            match call(&client, &sampling, &begun, enough, &NoProgress) {
                Ok((ended, unfinished)) => {
                    for (place, completion) in ended.iter().chain(&unfinished) {
                        let prompt = &prompts(&["abc", "d", "ee"])[place / 2];
                        assert_drawn(&prompt.tokens, completion, &policies);
                    }
                    assert!(ended.len() >= enough);
                    assert!(unfinished.keys().all(|place| !ended.contains_key(place)));
                    begun = unfinished;
                }
                Err(error) => setup.assert_names_a_server(&error),
            }
        }
        for stream in 0..2 {
            match draw(&client, &sampling, stream, Arc::new(NoProgress)) {
                Ok(_) if engine == Engine::Openai => {}
                Ok(rollouts) => policy.assert_drew(&rollouts, sampling.temperature),
                Err(error) => setup.assert_names_a_server(&error),
            }
        }
        let chance = chances.next().unwrap();
        for (number, server) in setup.servers.iter().enumerate() {
            if chance >> number & 3 == 3 {
                server.restart();
            }
            server.http.release();
        }
    }
    // The servers are well again.
    for server in &setup.servers {
        server.set_faults(|_| None);
        server.http.release();
    }
    let policy = setup.policy(version + 1);
    until_it_succeeds(|| policy.push(&client));
    let rollouts = until_it_succeeds(|| draw(&client, &sampling, 0, Arc::new(NoProgress)));
    if engine != Engine::Openai {
        policy.assert_drew(&rollouts, sampling.temperature);
    }
}

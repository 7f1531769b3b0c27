//! Servers that sleep while the policy trains.

use std::sync::Arc;
use std::thread;

use candle_core::Device;
use candle_grpo_test_support::{Reply, Request, devices, on_ranks};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::ServerGenerator;
use candle_grpo_train::rollout::{Engine, RolloutConfig, WeightSync};
use candle_grpo_train::{
    Generator, Interrupted, Sample, TrainConfig, Trainer, TrainerParts, evaluate,
};
use rstest::rstest;

use super::fake_server::{Fault, Sleep};
use super::faults::Cancel;
use super::ipc::Sharing;
use super::{adapters, drawn, fail_once, short, until_it_succeeds};
use crate::common;

/// A server that can sleep, and the configuration of a policy that lets it.
fn sleeping(sync: WeightSync, device: &'static Device) -> (Sharing, RolloutConfig) {
    let sharing = Sharing::new(sync, device);
    sharing.server().engine().sleep = Some(Sleep::default());
    let config = RolloutConfig {
        sleep_mode: true,
        ..sharing.setup.config()
    };
    (sharing, config)
}

fn impatient(sharing: &Sharing) -> RolloutConfig {
    RolloutConfig {
        sleep_mode: true,
        request_timeout: 1.,
        ..sharing.setup.impatient()
    }
}

fn sleep(client: &ServerGenerator) -> bool {
    client.sleep(&NoProgress).unwrap()
}

const ASLEEP: Sleep = Sleep {
    weights: true,
    cache: true,
    lost: true,
};

/// The server refuses each step that is not in its place.
#[rstest]
#[case::ipc(WeightSync::Ipc)]
#[case::auto(WeightSync::Auto)]
#[case::disk(WeightSync::Disk)]
fn a_server_sleeps_until_it_receives_weights(#[case] sync: WeightSync) {
    for device in devices() {
        let (sharing, config) = sleeping(sync, device);
        let client = sharing.client(&config);
        // Also for the same weights again, as for an evaluation after a step that changed none.
        for version in [1, 2, 2, 3] {
            let policy = sharing.policy(version);
            policy.push(&client).unwrap();
            policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
            for _ in 0..2 {
                assert!(sleep(&client));
                assert_eq!(sharing.server().engine().sleep, Some(ASLEEP));
            }
        }
        assert_eq!(sharing.server().count("/sleep"), 4);
        let error = drawn(&client).unwrap_err();
        let text = format!("{error:#}");
        assert!(
            text.contains("rollout.sleep_mode: the servers sleep"),
            "{text}"
        );
        if sync != WeightSync::Disk {
            sharing.assert_received(&sharing.policy(3));
        }
    }
}

#[rstest]
#[case::ipc(WeightSync::Ipc, &["/get_world_size", "/init_weight_transfer_engine", "/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"])]
#[case::disk(WeightSync::Disk, &["/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"])]
fn the_requests_are_in_the_only_order_that_works(
    #[case] sync: WeightSync,
    #[case] transfer: &[&str],
) {
    let (sharing, config) = sleeping(sync, &Device::Cpu);
    let client = sharing.client(&config);
    sharing.policy(1).push(&client).unwrap();
    assert!(sleep(&client));
    sharing.policy(2).push(&client).unwrap();
    let requests = sharing.server().http.requests();
    let mut paths: Vec<&str> = requests.iter().map(|request| &*request.target).collect();
    paths.dedup();
    let start = paths.iter().position(|path| path.starts_with("/sleep"));
    let mut expected = vec![
        "/sleep?level=2&mode=abort",
        "/health",
        "/wake_up?tags=weights",
    ];
    expected.extend(transfer);
    expected.extend(["/weight_info", "/wake_up?tags=kv_cache", "/v1/completions"]);
    assert_eq!(paths[start.unwrap()..][..expected.len()], expected);
}

/// The memory of the weights under adapters is gone, too.
#[test]
fn auto_sends_adapters_merged() {
    let (sharing, config) = sleeping(WeightSync::Auto, &Device::Cpu);
    let client = sharing.client(&config);
    for version in 1..3 {
        let mut policy = sharing.policy(0);
        (policy.version, policy.adapters) = (version, Some(adapters(version)));
        policy.push(&client).unwrap();
        sharing.assert_received(&policy);
        policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
        assert!(sleep(&client));
    }
}

fn failed() -> Fault {
    Fault::Instead(Reply::new(500, r#"{"error": "out of memory"}"#))
}

#[rstest]
#[case::weights("/wake_up", 0, failed)]
#[case::cache("/wake_up", 1, failed)]
#[case::still_asleep("/wake_up", 1, || Fault::json(|answer| answer["status"] = "sleeping".into()))]
#[case::lost_answer("/wake_up", 1, || Fault::After(Box::new(|_| Reply::closed())))]
#[case::first_message("/update_weights", 0, failed)]
#[case::second_message("/update_weights", 1, failed)]
#[case::finish("/finish_weight_update", 0, failed)]
#[case::version("/weight_info", 0, failed)]
fn a_server_that_fails_to_wake_up_tries_again(
    #[case] path: &'static str,
    #[case] before: usize,
    #[case] fault: fn() -> Fault,
    #[values(false, true)] restarts: bool,
) {
    let (sharing, config) = sleeping(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&config);
    sharing.policy(1).push(&client).unwrap();
    assert!(sleep(&client));
    if restarts {
        sharing.server().restart();
    }
    fail_once(sharing.server(), path, before, fault);
    let policy = sharing.policy(2);
    policy.push(&client).unwrap();
    sharing.assert_received(&policy);
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
    assert_eq!(sharing.server().engine().sleep, Some(Sleep::default()));
}

#[rstest]
#[case::refused(failed)]
#[case::hangs(Fault::held)]
#[case::closed(|| Fault::Instead(Reply::closed()))]
fn a_server_that_does_not_wake_up_is_an_error_within_the_limit(#[case] fault: fn() -> Fault) {
    let (sharing, _) = sleeping(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&impatient(&sharing));
    until_it_succeeds(|| sharing.policy(1).push(&client));
    assert!(sleep(&client));
    let server = sharing.server();
    server.set_faults(move |request| (request.path() == "/wake_up").then(fault));
    let policy = sharing.policy(2);
    let error = policy.push(&client).unwrap_err();
    sharing.setup.assert_names_a_server(&error);
    server.set_faults(|_| None);
    server.http.release();
    until_it_succeeds(|| policy.push(&client));
    sharing.assert_received(&policy);
}

#[test]
fn a_server_that_has_ended_does_not_need_to_sleep() {
    let (sharing, config) = sleeping(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&config);
    sharing.policy(1).push(&client).unwrap();
    let server = sharing.server();
    server.set_faults(|_| Some(Fault::Instead(Reply::closed())));
    assert!(sleep(&client));
    server.set_faults(|_| None);
    server.restart();
    let policy = sharing.policy(2);
    policy.push(&client).unwrap();
    policy.assert_drew(&drawn(&client).unwrap(), short().temperature);
}

#[test]
fn a_server_that_cannot_sleep_is_an_error_that_names_the_setting() {
    let (sharing, mut config) = sleeping(WeightSync::Ipc, &Device::Cpu);
    config.server_timeout = impatient(&sharing).server_timeout;
    let client = sharing.client(&config);
    until_it_succeeds(|| sharing.policy(1).push(&client));
    let server = sharing.server();
    server.engine().sleep = None;
    let error = client.sleep(&NoProgress).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.starts_with("rollout.sleep_mode: http"), "{text}");
    assert!(text.contains("--enable-sleep-mode"), "{text}");
    let error = sharing.policy(2).push(&client).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.starts_with("rollout.sleep_mode: http"), "{text}");
    // It answers that it does not.
    server.engine().sleep = Some(Sleep::default());
    until_it_succeeds(|| sharing.policy(2).push(&client));
    server.set_faults(|request| (request.path() == "/sleep").then(failed));
    let error = client.sleep(&NoProgress).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.starts_with("rollout.sleep_mode: http"), "{text}");
    server.set_faults(|_| None);
    until_it_succeeds(|| sharing.policy(3).push(&client));
}

#[test]
fn a_cancellation_ends_the_wait_for_a_server_to_sleep() {
    let (sharing, config) = sleeping(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&config);
    sharing.policy(1).push(&client).unwrap();
    let server = sharing.server();
    server.set_faults(|request| (request.path() == "/sleep").then(Fault::held));
    let cancel = Cancel::default();
    thread::scope(|scope| {
        let sleeping = scope.spawn(|| client.sleep(&cancel));
        let has_come = |requests: &[Request]| requests.iter().any(|of| of.path() == "/sleep");
        server.http.wait_for_requests(has_come);
        cancel.cancel();
        let error = sleeping.join().unwrap().unwrap_err();
        assert!(error.is::<Interrupted>(), "{error:#}");
    });
    server.http.release();
}

/// A run lets the server sleep before each update. Evaluations and a resumed run wake it up again,
/// also after a step without an update.
#[rstest]
#[case(WeightSync::Ipc)]
#[case(WeightSync::Disk)]
fn a_run_wakes_the_server_up_for_each_step_and_evaluation(#[case] sync: WeightSync) {
    let (sharing, rollout) = sleeping(sync, &Device::Cpu);
    let config = TrainConfig {
        rollout,
        ..common::config()
    };
    let same = |_: &Sample| 1.;
    let trainer = |reward: fn(&Sample) -> f32| {
        let client = sharing.client_with(&config.rollout, &config.sampling);
        common::trainer_of(TrainerParts {
            generator: Some(client as _),
            ..common::parts(reward, config.clone())
        })
    };
    let server = sharing.server();
    let is_asleep = || server.engine().sleep == Some(ASLEEP);
    let evaluate = |trainer: &Trainer| {
        let sampler = trainer.sampler(config.sampling.clone()).unwrap();
        let tokenizer = common::tokenizer();
        let prompts = trainer.prompts();
        let evaluation = evaluate(&sampler, prompts, 2, &common::digest, &tokenizer, 0);
        assert_eq!(evaluation.unwrap().samples.len(), 10);
        assert!(!is_asleep());
    };
    let mut first = trainer(same);
    evaluate(&first);
    // Equal rewards change no weights.
    for _ in 0..2 {
        assert!(first.step().unwrap().skipped);
        assert!(is_asleep());
    }
    evaluate(&first);
    evaluate(&first);
    first.step().unwrap();
    assert!(is_asleep());
    let mut trainer = common::resumed(&first, trainer(common::digest));
    drop(first);
    assert!(is_asleep());
    for _ in 0..2 {
        assert!(!trainer.step().unwrap().skipped);
        assert!(is_asleep());
    }
    evaluate(&trainer);
}

#[test]
fn several_ranks_are_refused() {
    let rollout = RolloutConfig {
        engine: Engine::Vllm,
        base_url: vec!["http://localhost:8000".to_owned()],
        sleep_mode: true,
        ..RolloutConfig::default()
    };
    let errors = on_ranks(2, |collective| {
        let config = TrainConfig {
            rollout: rollout.clone(),
            ..common::config()
        };
        let parts = TrainerParts {
            collective,
            ..common::parts(common::digest, config)
        };
        Trainer::new(parts).err().unwrap().to_string()
    });
    let must = "rollout.sleep_mode: true, must be false with 2 processes: the server would wait for the memory of one of them only";
    assert_eq!(errors, [must; 2]);
}

/// A server without the setting keeps its weights.
#[test]
fn without_the_setting_no_server_sleeps() {
    let (sharing, config) = sleeping(WeightSync::Ipc, &Device::Cpu);
    let client = sharing.client(&RolloutConfig {
        sleep_mode: false,
        ..config
    });
    let policy = sharing.policy(1);
    policy.push(&client).unwrap();
    assert!(!sleep(&client));
    policy.assert_drew(&drawn(&Arc::clone(&client)).unwrap(), short().temperature);
    assert_eq!(sharing.server().count("/sleep"), 0);
}

//! Servers' log-probs for given tokens.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};

use candle_core::Tensor;
use candle_grpo_core::schedule::CoefSchedule;
use candle_grpo_kernels::top_k;
use candle_grpo_loss::{DistillationLoss, Recipe, Support};
use candle_grpo_test_support::{Reply, WATCHDOG, stay_on_cpu};
use candle_grpo_train::learn::{
    DemonstrationConfig, DemonstrationPart, Reference, Teacher, TeacherDistributions, TeacherPart,
    TeacherSamplesConfig,
};
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rewards::Score;
use candle_grpo_train::rollout::engine::{
    Call, DrawRequest, Drawn, EngineWeights, Failure, Protocol, ServedModel, Server,
    ServerGenerator, ServerTeacher,
};
use candle_grpo_train::rollout::{Engine, LocalGenerator, RolloutConfig, WeightSync};
use candle_grpo_train::{
    ComputeDType, Generator, Interrupted, Progress, RewardFunction, Sample, TokenBatch,
    TrainConfig, TrainerParts,
};
use rstest::rstest;
use serde_json::{Value, json};

use super::fake_server::Fault;
use super::{Setup, instead, log_distributions};
use crate::common::{
    self, assert_records_close, digest, model, parameters, parts, trainer_of, with_mask,
};

fn setup(engine: Engine, servers: usize) -> Setup {
    Setup::new(engine, WeightSync::Auto, servers)
}

/// The [`Setup`] settings that a teacher has.
fn config(setup: &Setup) -> RolloutConfig {
    RolloutConfig {
        log_prob_tolerance: RolloutConfig::default().log_prob_tolerance,
        ..setup.config()
    }
}

/// Sequences with several lengths. One has context tokens within its response and after it, and one
/// has no token that counts.
fn batch() -> TokenBatch {
    let pairs: [(&[u32], &[u32]); 5] = [
        (&[1, 2, 3], &[4, 5, 0]),
        (&[4], &[1, 1, 2, 3, 5]),
        (&[2, 2], &[3]),
        (&[5, 1], &[2, 4, 1, 3]),
        (&[3, 3, 1, 2], &[1, 0]),
    ];
    let mut mask = pairs.map(|(_, response)| vec![1; response.len()]);
    mask[1] = vec![1, 0, 1, 0, 0];
    mask[4] = vec![0; 2];
    with_mask(&pairs, &mask)
}

/// The log-probs that count, row by row.
fn counted(log_probs: &Tensor) -> Vec<Vec<f32>> {
    let mask = batch().response_mask().to_vec2::<u32>().unwrap();
    let rows = log_probs.to_vec2::<f32>().unwrap();
    let row = |(row, mask): (Vec<f32>, Vec<u32>)| {
        let pairs = row.into_iter().zip(mask);
        pairs
            .filter_map(|(x, counts)| (counts == 1).then_some(x))
            .collect()
    };
    rows.into_iter().zip(mask).map(row).collect()
}

fn assert_scores(teacher: &ServerTeacher) {
    let found = teacher.log_probs(&batch(), 1., &NoProgress).unwrap();
    assert_eq!(found.dims(), [5, 5]);
    let reference = Reference::new(&model(), &parameters(), ComputeDType::F32).unwrap();
    let expected = reference.log_probs(&batch(), 1.).unwrap();
    let (found, expected) = (counted(&found), counted(&expected));
    let lengths: Vec<usize> = found.iter().map(Vec::len).collect();
    assert_eq!(lengths, [3, 2, 1, 4, 0]);
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}

#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
fn the_log_probs_of_servers_are_those_of_a_model_in_this_process(#[case] engine: Engine) {
    let setup = setup(engine, 2);
    assert_scores(&ServerTeacher::new(&config(&setup)).unwrap());
    // A sequence is a request, and one without a token that counts is not asked for.
    let asked = setup
        .servers
        .iter()
        .map(|server| server.count(setup.draw_path()));
    assert_eq!(asked.sum::<usize>(), 4);
}

/// The `k` best entries at positions that count, with their log-probs.
fn best(distributions: &TeacherDistributions) -> Vec<(Vec<u32>, Vec<f32>)> {
    let TeacherDistributions::TopK { ids, log_probs } = distributions else {
        panic!("no entries");
    };
    let mask = batch().response_mask().to_vec2::<u32>().unwrap().concat();
    let ids = ids.flatten(0, 1).unwrap().to_vec2().unwrap();
    let log_probs = log_probs.flatten(0, 1).unwrap().to_vec2().unwrap();
    let places = ids.into_iter().zip(log_probs).zip(mask);
    places
        .filter_map(|(place, counts)| (counts == 1).then_some(place))
        .collect()
}

#[rstest]
fn the_best_entries_of_servers_are_those_of_a_model_in_this_process(
    #[values(Engine::Vllm, Engine::Sglang)] engine: Engine,
    #[values(1, 3, 6)] k: usize,
) {
    let setup = setup(engine, 2);
    let teacher = ServerTeacher::new(&config(&setup)).unwrap();
    let found = teacher
        .distributions(&batch(), Some(k), &NoProgress)
        .unwrap();
    let reference = Reference::new(&model(), &parameters(), ComputeDType::F32).unwrap();
    let log_probs = log_distributions(&reference, &batch()).unwrap();
    let ids = top_k(&log_probs, k).unwrap();
    let expected = best(&TeacherDistributions::TopK {
        log_probs: log_probs.gather(&ids, 2).unwrap(),
        ids,
    });
    let found = best(&found);
    assert_eq!(found.len(), 10);
    for ((ids, log_probs), (expected_ids, expected)) in found.iter().zip(&expected) {
        assert_eq!(ids, expected_ids);
        for (found, expected) in log_probs.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
    }
}

#[rstest]
#[case::support(
    Engine::Vllm,
    None,
    "recipe.distillation_loss.support: another one, must be teacher"
)]
#[case::more_than_the_server_names(Engine::Vllm, Some(21), "greater than max allowed: 20")]
#[case::more_than_there_are(Engine::Sglang, Some(7), "6 most likely tokens at token ")]
fn distributions_that_servers_do_not_have_are_errors(
    #[case] engine: Engine,
    #[case] entries: Option<usize>,
    #[case] words: &str,
) {
    let setup = setup(engine, 1);
    let teacher = ServerTeacher::new(&RolloutConfig {
        max_retries: 1,
        ..config(&setup)
    });
    let error = teacher
        .unwrap()
        .distributions(&batch(), entries, &NoProgress);
    let text = format!("{:#}", error.unwrap_err());
    assert!(text.contains(words), "{text}");
}

#[rstest]
#[case::too_few_places(Engine::Sglang, || Fault::json(|answer| {
    answer["meta_info"]["input_top_logprobs"].as_array_mut().unwrap().pop();
}))]
#[case::none(Engine::Sglang, || Fault::json(|answer| {
    *answer["meta_info"]["input_top_logprobs"].as_array_mut().unwrap().last_mut().unwrap() = Value::Null;
}))]
#[case::too_few(Engine::Sglang, || Fault::json(|answer| {
    let best = answer["meta_info"]["input_top_logprobs"].as_array_mut().unwrap();
    best.last_mut().unwrap().as_array_mut().unwrap().pop();
}))]
#[case::not_a_log_prob(Engine::Sglang, || Fault::json(|answer| {
    let best = answer["meta_info"]["input_top_logprobs"].as_array_mut().unwrap();
    best.last_mut().unwrap()[1][0] = json!(0.1);
}))]
#[case::too_few(Engine::Vllm, || Fault::json(|answer| {
    let named = answer["choices"][0]["prompt_logprobs"].as_array_mut().unwrap();
    let entry = named.last_mut().unwrap().as_object_mut().unwrap();
    while entry.len() > 1 {
        let last = entry.keys().next_back().unwrap().clone();
        entry.remove(&last);
    }
}))]
#[case::not_a_token(Engine::Vllm, || Fault::json(|answer| {
    let named = answer["choices"][0]["prompt_logprobs"].as_array_mut().unwrap();
    named.last_mut().unwrap()["?"] = json!({"logprob": -1.});
}))]
fn a_request_of_distributions_that_fails_is_repeated(
    #[case] engine: Engine,
    #[case] fault: fn() -> Fault,
) {
    let setup = setup(engine, 1);
    let expected = ServerTeacher::new(&config(&setup)).unwrap();
    let expected = expected
        .distributions(&batch(), Some(2), &NoProgress)
        .unwrap();
    let teacher = ServerTeacher::new(&config(&setup)).unwrap();
    let (path, mut left) = (setup.draw_path(), 2);
    setup.servers[0].set_faults(move |request| {
        let fails = request.path() == path && left > 0;
        left -= usize::from(fails);
        fails.then(fault)
    });
    let found = teacher
        .distributions(&batch(), Some(2), &NoProgress)
        .unwrap();
    assert_eq!(best(&found), best(&expected));
    assert_eq!(setup.servers[0].count(setup.draw_path()), 4 + 4 + 2);
}

#[rstest]
#[case::internal_error(Engine::Vllm, || instead(500, ""))]
#[case::no_answer(Engine::Vllm, || Fault::Instead(Reply::closed()))]
#[case::no_log_probs(Engine::Vllm, || Fault::json(|answer| answer["choices"][0]["prompt_logprobs"] = Value::Null))]
#[case::too_few(Engine::Vllm, || Fault::json(|answer| {
    answer["choices"][0]["prompt_logprobs"].as_array_mut().unwrap().pop();
}))]
#[case::other_tokens(Engine::Vllm, || Fault::json(|answer| {
    let named = answer["choices"][0]["prompt_logprobs"].as_array_mut().unwrap();
    *named.last_mut().unwrap() = json!({"77": {"logprob": -1.}});
}))]
#[case::other_tokens(Engine::Sglang, || Fault::json(|answer| {
    let named = answer["meta_info"]["input_token_logprobs"].as_array_mut().unwrap();
    named.last_mut().unwrap()[1] = json!(77);
}))]
#[case::too_few(Engine::Sglang, || Fault::json(|answer| {
    answer["meta_info"]["input_token_logprobs"].as_array_mut().unwrap().pop();
}))]
fn a_request_that_fails_is_repeated(#[case] engine: Engine, #[case] fault: fn() -> Fault) {
    let setup = setup(engine, 1);
    let teacher = ServerTeacher::new(&RolloutConfig {
        max_inflight: 1,
        ..config(&setup)
    });
    let (path, mut left) = (setup.draw_path(), 2);
    setup.servers[0].set_faults(move |request| {
        let fails = request.path() == path && left > 0;
        left -= usize::from(fails);
        fails.then(fault)
    });
    assert_scores(&teacher.unwrap());
}

#[rstest]
#[case(500, r#"{"error": "out of memory"}"#, "failed 3 times")]
#[case(
    400,
    r#"{"error": {"message": "no prompt_logprobs"}}"#,
    "status 400: no prompt_logprobs"
)]
fn a_server_that_fails_every_request_is_named(
    #[case] status: u16,
    #[case] body: &'static str,
    #[case] words: &str,
) {
    let setup = setup(Engine::Vllm, 1);
    let teacher = ServerTeacher::new(&RolloutConfig {
        max_retries: 2,
        ..config(&setup)
    });
    let path = setup.draw_path();
    setup.servers[0]
        .set_faults(move |request| (request.path() == path).then(|| instead(status, body)));
    let error = teacher.unwrap().log_probs(&batch(), 1., &NoProgress);
    let error = error.unwrap_err();
    setup.assert_names_a_server(&error);
    let text = format!("{error:#}");
    assert!(text.contains(words), "{text}");
    assert!(text.starts_with("teacher: sequence "), "{text}");
}

#[rstest]
#[case(
    Engine::Vllm,
    "/choices/0/prompt_logprobs",
    "prompt_logprobs: absent or of other tokens"
)]
#[case(
    Engine::Sglang,
    "/meta_info/input_token_logprobs",
    "input_token_logprobs: absent or of other tokens"
)]
fn a_list_of_another_length_is_named(
    #[case] engine: Engine,
    #[case] pointer: &'static str,
    #[case] words: &str,
) {
    for change in [
        |list: &mut Vec<Value>| drop(list.pop()),
        |list: &mut Vec<Value>| list.push(list[1].clone()),
        |list: &mut Vec<Value>| list.clear(),
    ] {
        let setup = setup(engine, 1);
        let teacher = ServerTeacher::new(&RolloutConfig {
            max_retries: 1,
            ..config(&setup)
        });
        let path = setup.draw_path();
        setup.servers[0].set_faults(move |request| {
            (request.path() == path).then(|| {
                Fault::json(move |answer| {
                    change(answer.pointer_mut(pointer).unwrap().as_array_mut().unwrap());
                })
            })
        });
        let error = teacher.unwrap().log_probs(&batch(), 1., &NoProgress);
        let text = format!("{:#}", error.unwrap_err());
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn log_probs_that_are_none_are_errors() {
    let setup = setup(Engine::Vllm, 1);
    let teacher = ServerTeacher::new(&RolloutConfig {
        max_retries: 1,
        ..config(&setup)
    });
    let teacher = teacher.unwrap();
    let path = setup.draw_path();
    setup.servers[0].set_faults(move |request| {
        (request.path() == path).then(|| {
            Fault::json(|answer| {
                let named = answer["choices"][0]["prompt_logprobs"]
                    .as_array_mut()
                    .unwrap();
                for entry in &mut named[1..] {
                    for log_prob in entry.as_object_mut().unwrap().values_mut() {
                        log_prob["logprob"] = json!(0.5);
                    }
                }
            })
        })
    });
    let error = teacher.log_probs(&batch(), 1., &NoProgress).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("log-prob 0.5 of token "), "{text}");
}

#[test]
fn a_server_that_is_gone_is_an_error_with_the_keys_of_the_teacher() {
    let setup = setup(Engine::Vllm, 1);
    let config = RolloutConfig {
        server_timeout: 0.2,
        max_retries: 2,
        ..config(&setup)
    };
    setup.servers[0].http.stop();
    let teacher = ServerTeacher::new(&config).unwrap();
    let error = teacher.log_probs(&batch(), 1., &NoProgress).unwrap_err();
    let text = format!("{error:#}");
    let words = "teacher.server.base_url: no server is ready after 0.2 s";
    assert!(text.contains(words), "{text}");
}

#[test]
fn a_server_must_have_a_place_for_the_longest_sequence() {
    let setup = setup(Engine::Vllm, 1);
    // The longest sequence of the batch has 6 tokens.
    for (longest, place, fits) in [(0, 7, true), (0, 6, false), (9, 10, true), (9, 9, false)] {
        setup.servers[0].engine().policy.max_model_len = place;
        let teacher = ServerTeacher::new(&config(&setup)).unwrap();
        let teacher = teacher.with_longest_sequence(longest);
        match teacher.log_probs(&batch(), 1., &NoProgress) {
            Ok(_) => assert!(fits, "{longest} {place}"),
            Err(error) => {
                let text = format!("{error:#}");
                assert!(!fits, "{text}");
                assert!(
                    text.contains(&format!("serves up to {place} tokens")),
                    "{text}"
                );
                assert!(text.contains("and one more"), "{text}");
            }
        }
    }
}

/// A reward that records that it was called.
struct Recorded(Arc<AtomicBool>);

impl RewardFunction for Recorded {
    fn score(&self, samples: &[Sample]) -> anyhow::Result<Vec<Score>> {
        self.0.store(true, Ordering::Relaxed);
        Ok(vec![Score::from(0.); samples.len()])
    }
}

/// The first completions may take minutes.
#[rstest]
#[case::gone(true, "no server is ready after 0.2 s")]
#[case::without_log_probs(false, "log-prob 0.5 of token 1")]
fn a_teacher_that_does_not_answer_is_an_error_before_the_first_completion(
    #[case] is_gone: bool,
    #[case] words: &str,
) {
    let setup = setup(Engine::Vllm, 1);
    let server = &setup.servers[0];
    if is_gone {
        server.http.stop();
    } else {
        let path = setup.draw_path();
        server.set_faults(move |request| {
            (request.path() == path).then(|| {
                Fault::json(|answer| {
                    let named = &mut answer["choices"][0]["prompt_logprobs"][1];
                    for log_prob in named.as_object_mut().unwrap().values_mut() {
                        log_prob["logprob"] = json!(0.5);
                    }
                })
            })
        });
    }
    let config = RolloutConfig {
        server_timeout: 0.2,
        max_retries: 1,
        ..config(&setup)
    };
    let was_scored = Arc::new(AtomicBool::new(false));
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(ServerTeacher::new(&config).unwrap())),
        ..parts(Recorded(Arc::clone(&was_scored)), distillation())
    });
    let text = format!("{:#}", trainer.step().unwrap_err());
    assert!(text.contains(words), "{text}");
    assert!(!was_scored.load(Ordering::Relaxed));
}

/// Micro-batches limit this process's memory, and not the number of requests.
#[test]
fn requests_are_at_the_same_time_whatever_the_micro_batches() {
    let setup = setup(Engine::Vllm, 1);
    // The requests of a moment, and the most of any moment.
    let counts = Arc::new((Mutex::new((0, 0)), Condvar::new()));
    let (path, counted) = (setup.draw_path(), Arc::clone(&counts));
    setup.servers[0].set_faults(move |request| {
        // Not that of the check before the first completion.
        let body: Value = serde_json::from_slice(&request.body).unwrap_or_default();
        if request.path() != path || body["prompt"] == json!([0, 0]) {
            return None;
        }
        let counted = Arc::clone(&counted);
        Some(Fault::After(Box::new(move |reply| {
            let (counts, changed) = &*counted;
            let mut now = counts.lock().unwrap();
            now.0 += 1;
            now.1 = now.1.max(now.0);
            changed.notify_all();
            // The first answers come together.
            let waited = changed.wait_timeout_while(now, WATCHDOG, |(_, most)| *most < 4);
            waited.unwrap().0.0 -= 1;
            reply
        })))
    });
    let config = TrainConfig {
        micro_batch_size: 1,
        ..distillation()
    };
    let teacher = ServerTeacher::new(&self::config(&setup)).unwrap();
    let mut trainer = trainer_of(TrainerParts {
        teacher: Some(TeacherPart::other(teacher)),
        ..parts(digest, config)
    });
    trainer.step().unwrap();
    assert_eq!(counts.0.lock().unwrap().1, 4);
}

/// Cancels from the start.
struct Canceled;

impl Progress for Canceled {
    fn is_canceled(&self) -> bool {
        true
    }
}

#[test]
fn a_wait_for_a_server_can_be_canceled() {
    let setup = setup(Engine::Vllm, 1);
    setup.servers[0].set_faults(|_| Some(Fault::held()));
    let teacher = ServerTeacher::new(&config(&setup)).unwrap();
    let error = teacher.log_probs(&batch(), 1., &Canceled).unwrap_err();
    assert!(error.is::<Interrupted>(), "{error:#}");
}

/// A recipe that learns from the teacher alone.
fn distillation() -> TrainConfig {
    let mut config = common::config();
    config.sampling.temperature = 1.;
    config.recipe.policy_loss = serde_json::from_value(json!({
        "surrogate": "policy_gradient", "distillation": {"coef": 1.}, "aggregation": "token-mean",
    }))
    .unwrap();
    config.optimizer.learning_rate = 1e-2;
    config.optimizer.epsilon = 1e-3;
    config
}

#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
fn steps_with_a_server_are_those_with_a_model_in_this_process(#[case] engine: Engine) {
    stay_on_cpu();
    let run = |teacher: Arc<dyn Teacher>| {
        let mut trainer = trainer_of(TrainerParts {
            teacher: Some(TeacherPart::Other(teacher)),
            ..parts(digest, distillation())
        });
        common::run(&mut trainer, 4)
    };
    let setup = setup(engine, 1);
    let served = run(Arc::new(ServerTeacher::new(&config(&setup)).unwrap()));
    let reference = Reference::new(&model(), &parameters(), ComputeDType::F32).unwrap();
    let local = run(Arc::new(reference));
    assert_records_close(&served, &local);
}

#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
fn steps_of_distributions_are_those_with_a_model_in_this_process(#[case] engine: Engine) {
    stay_on_cpu();
    let mut config = distillation();
    config.recipe = Recipe {
        distillation_loss: Some(DistillationLoss {
            support: Support::Teacher { k: 3 },
            ..DistillationLoss::default()
        }),
        ..Recipe::dapo(8, 4)
    };
    // Only terms of the sampled tokens need the temperature of servers.
    config.sampling.temperature = 0.9;
    let run = |teacher: Arc<dyn Teacher>| {
        let mut trainer = trainer_of(TrainerParts {
            teacher: Some(TeacherPart::Other(teacher)),
            ..parts(digest, config.clone())
        });
        common::run(&mut trainer, 4)
    };
    let setup = setup(engine, 2);
    let served = run(Arc::new(ServerTeacher::new(&self::config(&setup)).unwrap()));
    let reference = Reference::new(&model(), &parameters(), ComputeDType::F32).unwrap();
    let local = run(Arc::new(reference));
    assert_records_close(&served, &local);
    assert!(local[3].policy["divergence"] > 0.);
}

#[test]
fn a_temperature_that_servers_do_not_have_is_an_error() {
    let setup = setup(Engine::Vllm, 1);
    let teacher = ServerTeacher::new(&config(&setup)).unwrap();
    let error = teacher.log_probs(&batch(), 0.7, &NoProgress).unwrap_err();
    assert!(
        error.to_string().starts_with("temperature: 0.7, must be 1"),
        "{error:#}"
    );
}

#[rstest]
#[case(json!({"engine": "openai", "base_url": "http://a"}), "engine: openai, must be vllm or sglang")]
#[case(json!({}), "engine: local, must be vllm or sglang")]
#[case(json!({"engine": "vllm"}), "base_url: absent, must be the URL")]
#[case(json!({"engine": "vllm", "base_url": "http://a", "weight_sync": "disk"}), "weight_sync: given, must be absent")]
#[case(json!({"engine": "vllm", "base_url": "http://a", "max_staleness": 1}), "max_staleness: given, must be absent")]
#[case(json!({"engine": "vllm", "base_url": "http://a", "log_prob_tolerance": 1}), "log_prob_tolerance: given, must be absent")]
fn settings_that_are_not_those_of_a_teacher_are_errors(
    #[case] config: Value,
    #[case] expected: &str,
) {
    let config: RolloutConfig = serde_json::from_value(config).unwrap();
    let error = ServerTeacher::new(&config).err().unwrap().to_string();
    assert!(error.starts_with(expected), "{error}");
}

/// Another crate's protocol, whose servers name no log-probs for given tokens.
struct DrawsOnly;

impl Protocol for DrawsOnly {
    fn describe(&self, _: &Server, _: Option<&str>) -> Result<ServedModel, Failure> {
        Ok(ServedModel {
            name: String::new(),
            max_model_len: None,
        })
    }

    fn draw(&self, _: &DrawRequest) -> Call {
        Call::get("/")
    }

    fn parse(&self, _: &Value) -> Result<Drawn, Failure> {
        Err(Failure::Malformed(String::new()))
    }

    fn load(&self, _: &Server, _: &EngineWeights) -> Result<(), Failure> {
        Ok(())
    }

    fn serves(&self, _: &Server, _: &EngineWeights) -> Result<bool, Failure> {
        Ok(true)
    }
}

#[test]
fn a_protocol_without_scores_is_named() {
    let setup = setup(Engine::Vllm, 1);
    let teacher = ServerTeacher::with_protocol(Box::new(DrawsOnly), &config(&setup)).unwrap();
    let error = teacher.log_probs(&batch(), 1., &NoProgress).unwrap_err();
    let text = format!("{error:#}");
    assert!(text.contains("name no log-probs of given tokens"), "{text}");
}

/// The most likely tokens do not depend on an engine's random numbers.
#[rstest]
#[case(Engine::Vllm)]
#[case(Engine::Sglang)]
#[case(Engine::Openai)]
fn the_samples_of_servers_are_those_of_a_model_in_this_process(#[case] engine: Engine) {
    stay_on_cpu();
    let setup = setup(engine, 2);
    let demonstrations = DemonstrationConfig {
        coef: CoefSchedule::constant(0.5),
        teacher_samples: Some(TeacherSamplesConfig {
            samples_per_prompt: 2,
            temperature: Some(1e-4),
            ..TeacherSamplesConfig::default()
        }),
        ..DemonstrationConfig::default()
    };
    let train = TrainConfig {
        demonstrations: Some(demonstrations),
        ..common::config()
    };
    let build = |generator: Arc<dyn Generator>| TrainerParts {
        demonstrations: Some(DemonstrationPart::Teacher(generator)),
        ..parts(digest, train.clone())
    };
    let on_servers = || {
        let config = config(&setup);
        let sampling = &train.sampling;
        let generator = ServerGenerator::of_teacher(&config, sampling, model().vocab_size);
        build(Arc::new(generator.unwrap()))
    };
    let local = LocalGenerator::new(&model(), &parameters()).unwrap();
    let expected = common::run(&mut trainer_of(build(Arc::new(local))), 2);
    let found = common::run(&mut trainer_of(on_servers()), 2);
    assert_eq!(found, expected);
    let asked = |setup: &Setup| {
        let asked = setup.servers.iter();
        asked
            .map(|server| server.count(setup.draw_path()))
            .sum::<usize>()
    };
    // Two for each of three prompts, in two steps.
    assert_eq!(asked(&setup), 12);
    // Rank 0 asks for the samples of all ranks.
    common::assert_ranks_agree(&[2], on_servers, 1);
    assert_eq!(asked(&setup), 12 + 2 * 6);
}

#[test]
fn a_teacher_that_samples_has_no_settings_of_a_policy() {
    let setup = setup(Engine::Openai, 1);
    let of_teacher = |change: fn(&mut RolloutConfig)| {
        let mut config = config(&setup);
        change(&mut config);
        let sampling = common::sampling();
        let generator = ServerGenerator::of_teacher(&config, &sampling, model().vocab_size);
        generator.err().map(|error| error.to_string())
    };
    assert_eq!(of_teacher(|_| ()), None);
    for (change, expected) in [
        (
            (|config| *config = RolloutConfig::default()) as fn(&mut RolloutConfig),
            "engine: local, must be vllm, sglang or openai",
        ),
        (
            |config| config.weight_sync = WeightSync::None,
            "weight_sync: given, must be absent for a teacher",
        ),
    ] {
        let error = of_teacher(change).unwrap();
        assert!(error.starts_with(expected), "{error}");
    }
}

//! Constraints on the text of completions, which servers enforce. The fake servers take them and
//! sample as without them.

use std::sync::Arc;

use candle_grpo_loss::RolloutCorrection;
use candle_grpo_test_support::Request;
use candle_grpo_train::learn::OldLogProbs;
use candle_grpo_train::progress::NoProgress;
use candle_grpo_train::rollout::engine::{
    Call, DrawRequest, Drawn, EngineWeights, Failure, Protocol, ServedModel, Server,
    ServerGenerator,
};
use candle_grpo_train::rollout::{Engine, StructuredOutputs, WeightSync};
use candle_grpo_train::{SamplingConfig, TrainConfig};
use rstest::rstest;
use serde_json::{Value, json};

use super::served_policy::LogProbs;
use super::{Setup, draw, draw_with, short};
use crate::common::{config, model, sampler};

fn structured(form: Value) -> SamplingConfig {
    SamplingConfig {
        structured_outputs: Some(serde_json::from_value(form).unwrap()),
        ..short()
    }
}

/// The last request for a completion.
fn last_draw(setup: &Setup) -> Value {
    let requests = setup.servers[0].http.requests();
    let mut draws = requests
        .iter()
        .rev()
        .filter(|r| r.path() == setup.draw_path());
    let body = |request: &Request| serde_json::from_slice(&request.body).unwrap();
    draws.next().map(body).unwrap()
}

#[rstest]
#[case(json!({"regex": "[0-9]+"}), json!({"regex": "[0-9]+"}), json!({"regex": "[0-9]+"}))]
#[case(json!({"grammar": "root ::= \"a\""}), json!({"grammar": "root ::= \"a\""}), json!({"ebnf": "root ::= \"a\""}))]
#[case(
    json!({"choice": ["yes", "say \"no\"", "a\nb"]}),
    json!({"choice": ["yes", "say \"no\"", "a\nb"]}),
    json!({"ebnf": r#"root ::= "yes" | "say \"no\"" | "a\nb""#})
)]
#[case(
    json!({"json": {"type": "object"}}),
    json!({"json": {"type": "object"}}),
    json!({"json_schema": r#"{"type":"object"}"#})
)]
fn a_constraint_is_in_each_request(
    #[case] form: Value,
    #[case] of_vllm: Value,
    #[case] of_sglang: Value,
) {
    for engine in [Engine::Vllm, Engine::Sglang] {
        let setup = Setup::new(engine, WeightSync::Disk, 1);
        let sampling = structured(form.clone());
        let client = Arc::new(setup.client(&setup.config(), &sampling));
        setup.policy(1).push(&client).unwrap();
        // The probe compares the log-probs of any text with the policy's.
        let probe = last_draw(&setup);
        assert_eq!(probe["structured_outputs"], Value::Null);
        draw(&client, &sampling, 0, Arc::new(NoProgress)).unwrap();
        let body = last_draw(&setup);
        if engine == Engine::Vllm {
            assert_eq!(body["structured_outputs"], of_vllm);
            continue;
        }
        for name in ["regex", "ebnf", "json_schema"] {
            assert_eq!(body["sampling_params"][name], of_sglang[name], "{name}");
            assert_eq!(probe["sampling_params"][name], Value::Null, "{name}");
        }
    }
}

/// A server masks logits first, so none of its log-probs are those of the policy.
#[rstest]
#[case(Engine::Vllm, LogProbs::Temperature)]
#[case(Engine::Vllm, LogProbs::Processed)]
#[case(Engine::Sglang, LogProbs::Temperature)]
fn log_probs_under_a_constraint_are_those_of_the_draw(
    #[case] engine: Engine,
    #[case] log_probs: LogProbs,
) {
    let setup = Setup::new(engine, WeightSync::Disk, 1);
    setup.report(log_probs);
    let sampling = structured(json!({"regex": ".*"}));
    setup.draw_as_local(&sampling);
    let client = Arc::new(setup.client(&setup.config(), &sampling));
    setup.policy(0).push(&client).unwrap();
    let rollouts = draw(&client, &sampling, 0, Arc::new(NoProgress)).unwrap();
    let local = draw_with(&sampler(short()), 0).unwrap();
    assert_eq!(rollouts.len(), local.len());
    for (a, b) in local.iter().zip(&rollouts) {
        assert_eq!(a.completion.tokens, b.completion.tokens);
        assert_eq!(b.completion.log_probs, None);
        let expected = a.completion.drawn_log_probs.iter();
        for (a, b) in expected.zip(&b.completion.drawn_log_probs) {
            assert!((a - b).abs() < 1e-5, "{a} {b}");
        }
    }
}

/// Servers whose protocol has no field for constraints.
struct Plain;

impl Protocol for Plain {
    fn describe(&self, _: &Server, _: Option<&str>) -> Result<ServedModel, Failure> {
        unreachable!("no request is sent")
    }

    fn draw(&self, _: &DrawRequest) -> Call {
        unreachable!("no request is sent")
    }

    fn parse(&self, _: &Value) -> Result<Drawn, Failure> {
        unreachable!("no request is sent")
    }

    fn load(&self, _: &Server, _: &EngineWeights) -> Result<(), Failure> {
        unreachable!("no request is sent")
    }

    fn serves(&self, _: &Server, _: &EngineWeights) -> Result<bool, Failure> {
        unreachable!("no request is sent")
    }
}

#[test]
fn a_generator_that_would_ignore_a_constraint_refuses_it() {
    let sampling = structured(json!({"regex": ".*"}));
    let error = draw_with(&sampler(sampling.clone()), 0).unwrap_err();
    let must = "structured_outputs: given, must be absent with engine local: only vllm and sglang mask tokens";
    assert!(format!("{error:#}").ends_with(must), "{error:#}");

    let setup = Setup::new(Engine::Vllm, WeightSync::Disk, 1);
    let size = model().vocab_size;
    let folder = setup.folder.path();
    let plain = Box::new(Plain);
    let client = ServerGenerator::with_protocol(plain, &setup.config(), &sampling, size, folder);
    let error = draw(
        &Arc::new(client.unwrap()),
        &sampling,
        0,
        Arc::new(NoProgress),
    )
    .unwrap_err();
    let must = "structured_outputs: given, must be absent with a server whose protocol does not pass it on";
    assert!(format!("{error:#}").ends_with(must), "{error:#}");
}

#[rstest]
#[case(json!({"regex": ""}), "structured_outputs.regex: \"\", must have at least one character")]
#[case(json!({"grammar": ""}), "structured_outputs.grammar: \"\", must have at least one character")]
#[case(json!({"choice": []}), "structured_outputs.choice: [], must have at least one text")]
#[case(json!({"choice": ["a", ""]}), "structured_outputs.choice[1]: \"\", must have at least one character")]
#[case(json!({"json": {}}), "structured_outputs.json: {}, must be a JSON schema with at least one key")]
fn an_empty_constraint_is_named(#[case] form: Value, #[case] words: &str) {
    let error = structured(form).validate().unwrap_err();
    assert_eq!(format!("{error:#}"), words);
}

/// A configuration of training with a constraint that is valid.
fn training() -> TrainConfig {
    let mut config = config();
    config.sampling.structured_outputs = Some(StructuredOutputs::Regex("a+".to_owned()));
    config.rollout.engine = Engine::Vllm;
    config.rollout.base_url = vec!["http://localhost:8000".to_owned()];
    config
}

#[rstest]
#[case(
    |c: &mut TrainConfig| (c.rollout.engine, c.rollout.base_url) = (Engine::Local, Vec::new()),
    "sampling.structured_outputs: given, must be absent with engine local: only vllm and sglang mask tokens"
)]
#[case(
    |c: &mut TrainConfig| (c.rollout.engine, c.rollout.weight_sync) = (Engine::Openai, WeightSync::None),
    "sampling.structured_outputs: given, must be absent with engine openai: only vllm and sglang mask tokens"
)]
#[case(
    |c: &mut TrainConfig| c.rollout.partial = true,
    "rollout.partial: true, must be false with sampling.structured_outputs, whose form a server starts again when it continues a completion"
)]
#[case(
    |c: &mut TrainConfig| (c.rollout.in_flight_updates, c.rollout.max_staleness) = (true, 1),
    "rollout.in_flight_updates: true, must be false with sampling.structured_outputs, whose form a server starts again when it continues a completion"
)]
#[case(
    |c: &mut TrainConfig| {
        c.old_log_probs = OldLogProbs::Sampler;
        c.recipe.policy_loss.rollout_correction = None;
    },
    "old_log_probs: sampler, must be auto, recompute or current with sampling.structured_outputs, whose log-probs are those of the tokens that the form allows"
)]
#[case(
    |c: &mut TrainConfig| c.recipe.policy_loss.off_policy_threshold = Some(1.),
    "sampling.structured_outputs: given, must be absent with recipe.policy_loss.off_policy_threshold and with a distillation whose student is rollout: they compare log-probs of all tokens with those of the tokens that the form allows"
)]
fn settings_that_contradict_a_constraint_are_named(
    #[case] change: fn(&mut TrainConfig),
    #[case] words: &str,
) {
    let mut config = training();
    config.recipe.policy_loss.rollout_correction = Some(RolloutCorrection::default());
    config.validate().unwrap();
    change(&mut config);
    assert_eq!(format!("{:#}", config.validate().unwrap_err()), words);
}
